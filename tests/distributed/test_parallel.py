"""Tensor parallelism, FSDP2 and distributed checkpoints on gloo ranks match a single process."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import sharded_training
import tensor_parallel
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import nn

from mglu_ops.nn import MGLU
from mglu_ops.parallel import shard_placement_fn

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")

ON_CPU = ("cpu", torch.float64)
PAGE = Path(__file__).parents[2] / "mglu_ops/parallel/README.md"


def check_and_save(rank: int, folder: str) -> None:
    tensor_parallel.run_checks(rank, *ON_CPU, list(tensor_parallel.CHECKS))
    tensor_parallel.run_compiled(rank, *ON_CPU, "aot_eager", ["learned"])
    sharded_training.run_checks(rank, *ON_CPU)
    sharded_training.save(rank, "cpu", folder)
    sharded_training.load_in_another_way(rank, "cpu", folder)
    run_page()


def run_page() -> None:
    """Run the snippets of the page in order, and check the result of each."""
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    tensor_parallel_model, experts, exchanged, fully_sharded, frozen = snippets
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(tensor_parallel_model, names)
    assert names["y"].shape == (8, 64)
    assert names["model"].mglu.mask_logits.to_local().shape == (4, 256 // dist.get_world_size(), 64)
    exec(experts, names)
    assert names["y"].shape == (8, 64)
    assert names["mixture"].mlp.experts.mask_logits.to_local().shape == (8 // dist.get_world_size(), 4, 128, 64)
    exec(exchanged, names)
    assert names["own"].shape == (3 + dist.get_rank(), 64)
    assert names["mixture"][0].experts.weight.to_local().shape == (8 // dist.get_world_size(), 128, 64)
    exec(fully_sharded, names)
    assert names["model"][1].mglu.mask_logits.to_local().shape == (1, 256 // dist.get_world_size(), 64)
    assert [group["name"] for group in names["groups"]] == ["weights", "mask_logits"]
    exec(frozen, names)
    x = torch.randn(3, 64)
    torch.testing.assert_close(names["whole"](x), names["model"](x))
    assert names["whole"][0].mglu.packed_masks is not None


def test_two_ranks_equal_one_process_which_loads_their_checkpoints(tmp_path: Path) -> None:
    """One test for all checks, because starting two processes takes longer than the checks."""
    run_on_ranks(check_and_save, tmp_path, str(tmp_path))
    sharded_training.load_whole(str(tmp_path))


@pytest.mark.long
def test_four_tensor_parallel_ranks_equal_one_process(tmp_path: Path) -> None:
    run_on_ranks(tensor_parallel.run_checks, tmp_path, *ON_CPU, list(tensor_parallel.CHECKS), ranks=4)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_equal_one_process(backend: str, tmp_path: Path) -> None:
    kinds = ["fixed", "weighted", *(["learned"] if backend == "inductor" else [])]
    run_on_ranks(tensor_parallel.run_compiled, tmp_path, *ON_CPU, backend, kinds)


@pytest.mark.long
def test_four_fully_sharded_ranks_equal_one_process(tmp_path: Path) -> None:
    run_on_ranks(sharded_training.run_checks, tmp_path, *ON_CPU, ranks=4)


@pytest.mark.long
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 4), (4, 2)])
def test_a_checkpoint_loads_on_another_number_of_ranks(saved_on: int, loaded_on: int, tmp_path: Path) -> None:
    (tmp_path / "to_load").mkdir()
    run_on_ranks(sharded_training.save, tmp_path, "cpu", str(tmp_path), ranks=saved_on)
    run_on_ranks(sharded_training.load, tmp_path / "to_load", "cpu", str(tmp_path), ranks=loaded_on)


def test_only_logits_are_placed() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))
            self.logits = nn.Parameter(torch.randn(2, 4, 6))

    model = nn.ModuleDict({"ours": MGLU(6, 4, n_masks=2, top_k=1), "own": Own(), "conv": nn.Conv1d(4, 4, 2)})

    def placed(names: list[str]) -> dict[str, int]:
        placement = shard_placement_fn(model, mask_logits=names)
        found = {name: placement(parameter) for name, parameter in model.named_parameters()}
        return {name: shard.dim for name, shard in found.items() if shard is not None}

    words = "shard_placement_fn: own: a .*Own looks like an MGLU layer .* divided along their first dimension"
    with pytest.warns(UserWarning, match=words) as caught:
        assert placed([]) == {"ours.mask_logits": 1}
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert placed(["own.logits"]) == {"ours.mask_logits": 1, "own.logits": 1}
        # Rows of two-dimensional logits are in the first dimension.
        model["own"].logits = nn.Parameter(torch.randn(4, 6))
        assert placed(["own.logits"]) == {"ours.mask_logits": 1, "own.logits": 0}
    with pytest.raises(TypeError, match="model: got Parameter, must be a torch"):
        shard_placement_fn(model["own"].weight)
