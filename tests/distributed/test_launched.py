"""The example and the benchmark of tensor parallelism run under torchrun, on two gloo ranks, at a small size."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import pages
from benchmarks.records import read, read_table

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")

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
