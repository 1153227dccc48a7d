"""The example and the benchmark of tensor parallelism under torchrun, on two gloo ranks at a small size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.records import read, read_table

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")

ROOT = Path(__file__).parents[2]


def torchrun(*arguments: str) -> str:
    """Run a command on two ranks of the CPU, and return what it printed."""
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
    sizes = ["--shapes", "48x32", "--n-masks", "2", "--decoded", "1", "4", "--trained", "16"]
    torchrun("-m", "benchmarks.tensor_parallel", "--out", str(tmp_path), *sizes, "--rounds", "3", "--seconds", "0.001")
    rows = read(tmp_path, "tensor_parallel")
    work = [("decode", 1), ("decode", 4), ("training step", 16)]
    expected = [(case, variant, tokens) for case, tokens in work for variant in ("2 ranks", "one rank")]
    assert sorted((row.case, row.variant, row.tokens) for row in rows) == sorted(expected)
    assert all(row.has_time and row.microseconds > 0 and 0 < row.error < 2.4e-2 for row in rows)
    assert all(row.shape == (48, 32) and row.n_masks == 2 for row in rows)
    assert read_table(tmp_path / "tensor_parallel.csv")[0]["protocol"].startswith("gloo, 2 ranks; down_proj(mglu(x))")
