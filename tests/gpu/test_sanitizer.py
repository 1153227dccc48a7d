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


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_the_kernels_are_clean(tool: str) -> None:
    suite = Path(__file__).with_name("sanitizer_suite.py")
    root = Path(__file__).parents[2]
    process = subprocess.run(
        [
            SANITIZER,
            "--tool",
            tool,
            "--error-exitcode",
            "1",
            "--kernel-name",
            "regex:mglu_",
            sys.executable,
            str(suite),
        ],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    report = process.stdout + process.stderr
    if "not supported" in report and "Device" in report:
        pytest.skip("compute-sanitizer does not work on this machine")
    assert process.returncode == 0, report[-8000:]
    assert "ERROR SUMMARY: 0 errors" in report or "RACECHECK SUMMARY: 0 hazards" in report, report[-2000:]
