"""Layers and experts on two GPUs with NCCL match one process: results, training, checkpoints, compilation.

With gloo, two ranks could share one GPU, but gloo crashes when it gathers CUDA tensors (pytorch issue 152645).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import (
    data_parallel,
    expert_parallel,
    run_on_ranks,
    sharded_training,
    tensor_parallel,
    token_exchange,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 or not dist.is_nccl_available(), reason="needs two CUDA GPUs and NCCL"
    ),
]

IN_BFLOAT16 = ("cuda", torch.bfloat16)


def test_tensor_parallel_layers_in_float64(tmp_path: Path) -> None:
    checks = list(tensor_parallel.CHECKS)
    run_on_ranks(tensor_parallel.run_checks, tmp_path, "cuda", torch.float64, checks, backend="nccl")


@pytest.mark.parametrize(
    ("module", "dtype"),
    [
        (tensor_parallel, torch.bfloat16),
        (tensor_parallel, torch.float16),
        (expert_parallel, torch.bfloat16),
        (token_exchange, torch.bfloat16),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_layers_in_16_bits(module: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """The layers are wide enough for the 16-bit kernels, and have dense or quantized weights."""
    arguments = "cuda", dtype, module.WITHOUT_FLOAT64, tensor_parallel.WIDE
    run_on_ranks(module.run_checks, tmp_path, *arguments, backend="nccl")


@pytest.mark.parametrize("module", [expert_parallel, token_exchange], ids=lambda one: one.__name__)
def test_experts_in_float32(module: Any, tmp_path: Path) -> None:
    arguments = "cuda", torch.float32, module.WITHOUT_FLOAT64
    run_on_ranks(module.run_checks, tmp_path, *arguments, backend="nccl")


def test_divided_experts_in_float64(tmp_path: Path) -> None:
    checks = expert_parallel.WITHOUT_TRAINING
    run_on_ranks(expert_parallel.run_checks, tmp_path, "cuda", torch.float64, checks, backend="nccl")


def test_a_checkpoint_of_experts_goes_from_two_gpus_to_one_and_back(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    run_on_ranks(expert_parallel.save, tmp_path, *IN_BFLOAT16, str(tmp_path), backend="nccl")
    expert_parallel.load_whole(*IN_BFLOAT16, str(tmp_path), str(saved))
    run_on_ranks(expert_parallel.load, saved, *IN_BFLOAT16, str(saved), backend="nccl")


def test_transformers_divide_rows_or_experts_of_a_mixture(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed on every machine with a GPU")
    from tests.support.ranks import hf_parallel

    hf_parallel.save_mixture(tmp_path)
    run_on_ranks(hf_parallel.check_mixture, tmp_path, "cuda", tmp_path, backend="nccl")
    hf_parallel.check_saved(tmp_path)


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


@pytest.mark.parametrize("wrapper", ["FSDP2", "DDP"])
def test_mixed_precision_does_not_cast_stored_weights(wrapper: str, tmp_path: Path) -> None:
    run_on_ranks(data_parallel.check_mixed_precision, tmp_path, "cuda", wrapper, backend="nccl")
