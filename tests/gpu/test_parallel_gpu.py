"""Tensor-parallel and fully sharded layers, checkpoints and compilation on two GPUs by NCCL match one process.

Ranks that share a GPU cannot run these tests with gloo, which crashes when it gathers CUDA tensors (pytorch issue
152645).
"""

from __future__ import annotations

from pathlib import Path

import expert_parallel
import pytest
import sharded_training
import tensor_parallel
import torch
import torch.distributed as dist
from ranks import run_on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 or not dist.is_nccl_available(), reason="needs two CUDA GPUs and NCCL"
    ),
]


def test_tensor_parallel_layers_in_float64(tmp_path: Path) -> None:
    checks = list(tensor_parallel.CHECKS)
    run_on_ranks(tensor_parallel.run_checks, tmp_path, "cuda", torch.float64, checks, backend="nccl")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tensor_parallel_layers_in_16_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """The width is one for which the 16-bit kernels run. Checks that need float64 are omitted."""
    checks = ["placements", "results", "freezing"]
    arguments = ("cuda", dtype, checks, tensor_parallel.WIDE)
    run_on_ranks(tensor_parallel.run_checks, tmp_path, *arguments, backend="nccl")


def test_divided_experts_in_16_bits(tmp_path: Path) -> None:
    run_on_ranks(expert_parallel.run_on_gpu, tmp_path, tensor_parallel.WIDE, backend="nccl")


def test_compiled_layers(tmp_path: Path) -> None:
    arguments = ("cuda", torch.float64, "inductor", ["learned", "fixed", "weighted"])
    run_on_ranks(tensor_parallel.run_compiled, tmp_path, *arguments, backend="nccl")


def test_fully_sharded_layers(tmp_path: Path) -> None:
    run_on_ranks(sharded_training.run_checks, tmp_path, "cuda", torch.float64, backend="nccl")


def test_a_checkpoint_of_two_gpus_loads_on_two_and_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "to_load").mkdir()
    run_on_ranks(sharded_training.save, tmp_path, "cuda", str(tmp_path), backend="nccl")
    run_on_ranks(sharded_training.load, tmp_path / "to_load", "cuda", str(tmp_path), backend="nccl")
    sharded_training.load_whole(str(tmp_path))
