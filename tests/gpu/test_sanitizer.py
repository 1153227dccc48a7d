"""compute-sanitizer finds nothing in any kernel: no access out of bounds, no race, no read of what nobody wrote."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not Path(SANITIZER).is_file(), reason="compute-sanitizer (of the CUDA toolkit) is not here"),
]

ALL = ("mglu_",)
BY_THREADS = ("mglu_plain", "mglu_decode", "mglu_turn", "mglu_pack")
"""Kernels whose shared memory threads write; that of the others, the copy engine."""


@pytest.mark.parametrize(
    ("tool", "kernels"),
    [
        ("memcheck", ALL),
        ("initcheck", ALL),
        ("synccheck", ALL),
        ("racecheck", BY_THREADS),
        ("racecheck", ("mglu_tile",)),
    ],
)
def test_the_kernels_are_clean(tool: str, kernels: tuple[str, ...]) -> None:
    filters = [option for kernel in kernels for option in ("--kernel-name", f"kns={kernel}")]
    suite = Path(__file__).with_name("sanitizer_suite.py")
    process = subprocess.run(
        [SANITIZER, "--tool", tool, "--error-exitcode", "1", *filters, sys.executable, suite],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    report = process.stdout + process.stderr
    if "Device not supported" in report:
        pytest.skip("compute-sanitizer does not work on this machine")
    assert process.returncode == 0, report[-8000:]
    assert "calls and packing: right" in report
    assert "ERROR SUMMARY: 0 errors" in report or "RACECHECK SUMMARY: 0 hazards" in report, report[-2000:]
