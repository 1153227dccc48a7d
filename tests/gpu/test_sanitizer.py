"""All kernels are free of out-of-bounds accesses, races and uninitialized reads, as far as compute-sanitizer sees."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"

MISSING = not Path(SANITIZER).is_file()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(  # `make gpu-sanitize` must fail without compute-sanitizer
        MISSING and os.environ.get("MGLU_REQUIRE_GPU") != "1",
        reason="needs compute-sanitizer, which is part of the CUDA toolkit",
    ),
]


@pytest.mark.parametrize(
    ("tool", "kernels"),
    [
        ("memcheck", ()),
        # Leaves out "backward_gemm", which includes training with tile_wgmma. In training, tile_wgmma writes with the
        # tensor memory accelerator (TMA), and initcheck does not see such writes.
        ("initcheck", ("plain", "decode_mma", "tile_wgmma", "experts_down")),
        ("synccheck", ()),
        # Racecheck is divided into two runs of about the same duration. Each run watches all of our kernels, because
        # racecheck breaks kernels that run in clusters if it is told to ignore them.
        ("racecheck", ("plain", "decode_mma", "experts_down")),
        ("racecheck", ("tile_wgmma", "backward_gemm")),
    ],
)
def test_the_sanitizer_finds_no_error(tool: str, kernels: tuple[str, ...]) -> None:
    """Runs the calls of `sanitizer_suite.py` that launch one of `kernels`, or all calls if `kernels` is empty."""
    # By default, synccheck tracks fewer barriers than clusters use, and breaks kernels that use more.
    barriers = ("--num-cuda-barriers", "65536") if tool == "synccheck" else ()
    ours = ("--kernel-name", "kns=mglu_")
    suite = Path(__file__).with_name("sanitizer_suite.py")
    process = subprocess.run(
        [SANITIZER, "--tool", tool, "--error-exitcode", "1", *barriers, *ours, sys.executable, suite, *kernels],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    report = process.stdout + process.stderr
    if "Device not supported" in report:
        pytest.skip("compute-sanitizer does not support this machine")
    assert process.returncode == 0, report[-8000:]
    assert ": correct" in report
    assert "ERROR SUMMARY: 0 errors" in report or "RACECHECK SUMMARY: 0 hazards" in report, report[-2000:]
