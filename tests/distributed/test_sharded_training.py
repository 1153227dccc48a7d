"""FSDP2 and distributed checkpoints on gloo ranks: training, freezing, and loading on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from sharded_training import load, load_whole, run_checks, save
from torch import nn

from mglu_ops.nn import MGLU
from mglu_ops.parallel import shard_placement_fn

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")


def check_and_save(rank: int, folder: str) -> None:
    run_checks(rank, "cpu", torch.float64)
    save(rank, "cpu", folder)


def test_fully_sharded_layers_learn_as_in_one_process_which_loads_their_checkpoint(tmp_path: Path) -> None:
    """One test, because processes take longer to start than each of these checks takes."""
    run_on_ranks(check_and_save, tmp_path, str(tmp_path))
    load_whole(str(tmp_path))


@pytest.mark.long
def test_fully_sharded_layers_on_four_ranks(tmp_path: Path) -> None:
    run_on_ranks(run_checks, tmp_path, "cpu", torch.float64, ranks=4)


@pytest.mark.long
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 4), (4, 2)])
def test_a_checkpoint_loads_on_another_number_of_ranks(saved_on: int, loaded_on: int, tmp_path: Path) -> None:
    (tmp_path / "to_load").mkdir()
    run_on_ranks(save, tmp_path, "cpu", str(tmp_path), ranks=saved_on)
    run_on_ranks(load, tmp_path / "to_load", "cpu", str(tmp_path), ranks=loaded_on)


def test_only_logits_are_placed() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))
            self.logits = nn.Parameter(torch.randn(2, 4, 6))

    model = nn.ModuleDict({"ours": MGLU(6, 4, n_masks=2, top_k=1), "own": Own(), "conv": nn.Conv1d(4, 4, 2)})
    found = {name: shard_placement_fn(model)(parameter) for name, parameter in model.named_parameters()}
    assert {name: placement.dim for name, placement in found.items() if placement} == {"ours.mask_logits": 1}
    named = shard_placement_fn(model, mask_logits=["own.logits"])
    found = {name: named(parameter) for name, parameter in model.named_parameters()}
    placed = {name: placement.dim for name, placement in found.items() if placement}
    assert placed == {"ours.mask_logits": 1, "own.logits": 1}
    with pytest.raises(TypeError, match="model: got Parameter, must be a torch"):
        shard_placement_fn(model["own"].weight)
