"""Two ranks on GPUs: tensor-parallel and fully sharded layers, checkpoints and compilation are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import sharded_training
import tensor_parallel
import torch
from ranks import GPU_BACKENDS, run_on_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("backend", GPU_BACKENDS)]


def test_tensor_parallel_layers_in_float64(tmp_path: Path, backend: str) -> None:
    checks = list(tensor_parallel.CHECKS)
    run_on_ranks(tensor_parallel.run_checks, tmp_path, "cuda", torch.float64, checks, backend=backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tensor_parallel_layers_in_16_bits(dtype: torch.dtype, tmp_path: Path, backend: str) -> None:
    """At a width for which the kernels of 16 bits run, without the steps that only float64 can compare."""
    checks = ["placements", "results", "freezing"]
    arguments = ("cuda", dtype, checks, tensor_parallel.WIDE)
    run_on_ranks(tensor_parallel.run_checks, tmp_path, *arguments, backend=backend)


def test_compiled_layers(tmp_path: Path, backend: str) -> None:
    arguments = ("cuda", torch.float64, "inductor", ["learned", "fixed", "routed"])
    run_on_ranks(tensor_parallel.run_compiled, tmp_path, *arguments, backend=backend)


def test_fully_sharded_layers(tmp_path: Path, backend: str) -> None:
    run_on_ranks(sharded_training.run_checks, tmp_path, "cuda", torch.float64, backend=backend)


def test_a_checkpoint_of_two_ranks_loads_on_two_and_in_one_process(tmp_path: Path, backend: str) -> None:
    (tmp_path / "to_load").mkdir()
    run_on_ranks(sharded_training.save, tmp_path, "cuda", str(tmp_path), backend=backend)
    run_on_ranks(sharded_training.load, tmp_path / "to_load", "cuda", str(tmp_path), backend=backend)
    sharded_training.load_whole(str(tmp_path))
