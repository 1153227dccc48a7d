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


@pytest.mark.parametrize(
    ("tool", "kernels"),
    [
        ("memcheck", ()),
        ("initcheck", ()),
        ("synccheck", ()),
        # In two parts, which take as long. All of ours that run are watched: racecheck breaks any kernel launched in
        # clusters that it is told to leave out.
        ("racecheck", ("plain", "decode_mma")),
        ("racecheck", ("tile_wgmma",)),
    ],
)
def test_the_kernels_are_clean(tool: str, kernels: tuple[str, ...]) -> None:
    """No kernels: all of them."""
    # By default synccheck has room for fewer barriers than clusters have, and then breaks what it watches.
    room = ("--num-cuda-barriers", "65536") if tool == "synccheck" else ()
    ours = ("--kernel-name", "kns=mglu_")
    suite = Path(__file__).with_name("sanitizer_suite.py")
    process = subprocess.run(
        [SANITIZER, "--tool", tool, "--error-exitcode", "1", *room, *ours, sys.executable, suite, *kernels],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    report = process.stdout + process.stderr
    if "Device not supported" in report:
        pytest.skip("compute-sanitizer does not work on this machine")
    assert process.returncode == 0, report[-8000:]
    assert ": right" in report
    assert "ERROR SUMMARY: 0 errors" in report or "RACECHECK SUMMARY: 0 hazards" in report, report[-2000:]
