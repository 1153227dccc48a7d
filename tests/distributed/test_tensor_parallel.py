"""Tensor-parallel layers on gloo ranks: results, gradients, training and freezing are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from tensor_parallel import CHECKS, run_checks, run_compiled

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_equal_one_process(ranks: int, tmp_path: Path) -> None:
    run_on_ranks(run_checks, tmp_path, "cpu", torch.float64, list(CHECKS), ranks=ranks)


@pytest.mark.long
def test_layers_compiled_by_inductor_equal_one_process(tmp_path: Path) -> None:
    run_on_ranks(run_compiled, tmp_path, "cpu", torch.float64, "inductor")
