"""Layers of experts that are divided between gloo ranks, by experts or by rows, match a single process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import expert_parallel, run_on_ranks, tensor_parallel, token_exchange

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")

ON_CPU = ("cpu", torch.float64)


def check_and_save(rank: int, folder: str) -> None:
    expert_parallel.run_checks(rank, *ON_CPU, [name for name in expert_parallel.CHECKS if name != "compiled"])
    expert_parallel.save(rank, *ON_CPU, folder)
    expert_parallel.load(rank, *ON_CPU, folder)


@pytest.mark.long  # the quick tests check layers without experts on two ranks (test_parallel.py)
def test_two_ranks_equal_one_process_which_loads_their_checkpoints(tmp_path: Path) -> None:
    """One test makes all checks, because starting two processes takes longer than the checks."""
    run_on_ranks(check_and_save, tmp_path, str(tmp_path))
    (tmp_path / "to_load").mkdir()
    expert_parallel.load_whole(*ON_CPU, str(tmp_path), str(tmp_path / "to_load"))


@pytest.mark.long
def test_four_ranks_equal_one_process(tmp_path: Path) -> None:
    run_on_ranks(expert_parallel.run_checks, tmp_path, *ON_CPU, list(expert_parallel.CHECKS), ranks=4)


@pytest.mark.long  # the quick tests exchange tokens in the snippets of mglu_ops/parallel/README.md
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_exchange_tokens_equal_one_process(ranks: int, tmp_path: Path) -> None:
    checks = list(token_exchange.CHECKS)
    run_on_ranks(token_exchange.run_checks, tmp_path, *ON_CPU, checks, ranks=ranks)


@pytest.mark.long
def test_two_ranks_load_the_checkpoint_of_one_process(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    run_on_ranks(expert_parallel.save, tmp_path, *ON_CPU, str(tmp_path))
    expert_parallel.load_whole(*ON_CPU, str(tmp_path), str(saved))
    run_on_ranks(expert_parallel.load, saved, *ON_CPU, str(saved))


@pytest.mark.long
def test_layers_in_other_dtypes_equal_one_process(tmp_path: Path) -> None:
    """The tests in tests/gpu make these checks on GPUs."""
    run_on_ranks(check_in_other_dtypes, tmp_path)


def check_in_other_dtypes(rank: int) -> None:
    for module in (tensor_parallel, expert_parallel, token_exchange):
        module.run_checks(rank, "cpu", torch.bfloat16, module.WITHOUT_FLOAT64, tensor_parallel.WIDE)
    for module in (expert_parallel, token_exchange):
        module.run_checks(rank, "cpu", torch.float32, module.WITHOUT_FLOAT64)
