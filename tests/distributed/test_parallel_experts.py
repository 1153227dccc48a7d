"""Layers of experts that are divided over gloo ranks, by experts or by rows, give the same as one process."""

from __future__ import annotations

from pathlib import Path

import expert_parallel
import pytest
import token_exchange
import torch
import torch.distributed as dist
from ranks import run_on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")


def check_and_save(rank: int, folder: str) -> None:
    expert_parallel.run_checks(rank)
    expert_parallel.save(rank, folder)
    expert_parallel.load(rank, folder)


def test_two_ranks_equal_one_process_which_loads_their_checkpoints(tmp_path: Path) -> None:
    """One test for all checks, because starting two processes takes longer than the checks."""
    run_on_ranks(check_and_save, tmp_path, str(tmp_path))
    expert_parallel.load_whole(str(tmp_path))


@pytest.mark.long
def test_four_ranks_equal_one_process(tmp_path: Path) -> None:
    run_on_ranks(expert_parallel.run_checks, tmp_path, ranks=4)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_that_exchange_tokens_equal_one_process(ranks: int, tmp_path: Path) -> None:
    checks = list(token_exchange.CHECKS)
    run_on_ranks(token_exchange.run_checks, tmp_path, "cpu", torch.float64, checks, ranks=ranks)
