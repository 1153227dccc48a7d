"""Tensor parallelism, FSDP2 and distributed checkpoints on gloo ranks match a single process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import pages
from benchmarks.records import read, read_table
from mglu_ops.nn import MGLU
from mglu_ops.parallel import shard_placement_fn
from tests.support.ranks import run_on_ranks, sharded_training, tensor_parallel

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
    """Run the snippets of `PAGE` in order, and check the result of each."""
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
    """One test makes all checks, because starting two processes takes longer than the checks."""
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

    assert placed([]) == {"ours.mask_logits": 1}
    assert placed(["own.logits"]) == {"ours.mask_logits": 1, "own.logits": 1}
    # Rows of two-dimensional logits are in the first dimension.
    model["own"].logits = nn.Parameter(torch.randn(4, 6))
    assert placed(["own.logits"]) == {"ours.mask_logits": 1, "own.logits": 0}
    with pytest.raises(TypeError, match="model: got Parameter, must be a torch"):
        shard_placement_fn(model["own"].weight)


ROOT = Path(__file__).parents[2]


def torchrun(*arguments: str) -> str:
    """Run a command on two CPU ranks, and return its output."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.long
def test_the_example_trains_and_freezes() -> None:
    sizes = ["--hidden", "32", "--intermediate", "64", "--n-masks", "2", "--steps", "20"]
    lines = torchrun("examples/tensor_parallel.py", *sizes).splitlines()
    assert lines[0] == "2 ranks (cpu); each has 32 of the 64 rows of W and its masks"
    first, last = (float(line.rpartition(" ")[2]) for line in lines[1:3])
    assert last < 0.95 * first
    assert lines[3] == "frozen: 256 bytes of masks on each rank, results differ by 0.0e+00"
    assert lines[4].startswith("done in ")


@pytest.mark.long
def test_the_benchmark_measures_one_rank_and_all_of_them(tmp_path: Path) -> None:
    dense = ["--shapes", "48x32", "--tokens", "1", "4", "--formats", "dense", "int8_row", "--trained", "16"]
    sizes = [*dense, "--n-masks", "2", "--mixtures", "4x16x32x2", "--tokens-of-experts", "1", "6"]
    torchrun("-m", "benchmarks.tensor_parallel", "--out", str(tmp_path), *sizes, "--rounds", "3", "--seconds", "0.001")
    rows = read(tmp_path, "tensor_parallel")
    stored = [f"inference{stored}" for stored in ("", ", int8_row")]
    work = [*product(stored, [1, 4]), ("training step", 16)]
    expected = [(case, variant, tokens) for case, tokens in work for variant in ("2 ranks", "one rank")]
    expert_cases = product(("inference, 4 experts", "training step, 4 experts"), [1, 6])
    variants = ("one rank", "2 ranks, experts", "2 ranks, rows", "2 ranks, experts, all-to-all")
    expected += [(case, variant, tokens) for case, tokens in expert_cases for variant in variants]
    assert sorted((row.case, row.variant, row.tokens) for row in rows) == sorted(expected)
    assert all(row.has_time and row.microseconds > 0 and row.error < 2.4e-2 for row in rows)
    assert {(*row.shape, row.n_masks) for row in rows} == {(48, 32, 2), (16, 32, 2)}
    assert read_table(tmp_path / "tensor_parallel.csv")[0]["protocol"].startswith("gloo, 2 ranks; down_proj(mglu(x))")
    table = pages.TABLES["tensor_parallel"](tmp_path)
    assert "| 16 x 32 | training step, 4 experts | 6 | 2 ranks, experts, all-to-all |" in table


@pytest.mark.long
def test_the_benchmark_of_fsdp_measures_every_model(tmp_path: Path) -> None:
    sizes = ["--sizes", "2x32x64x4x2", "--vocabulary", "64", "--length", "16"]
    masks = ["--n-masks", "0", "2", "--rounds", "3", "--seconds", "0.001"]
    torchrun("-m", "benchmarks.fsdp", "--out", str(tmp_path), *sizes, *masks)
    rows = read(tmp_path, "fsdp")
    assert [(row.variant, row.n_masks, row.tokens, row.shape) for row in rows] == [
        ("SwiGLU", 0, 2 * 4 * 16, (64, 32)),
        ("SwiMGLU", 2, 2 * 4 * 16, (64, 32)),
    ]
    assert all(row.has_time and row.microseconds > 0 and row.error < 0.02 for row in rows)
    assert all(row.extra["tokens_per_second"] > 0 and row.extra["alone_us"] > 0 for row in rows)
