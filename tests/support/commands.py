"""Runs commands and Python code with this checkout in new processes, and makes rows of benchmark results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import Row

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "tests"
"""Files that tests compile from C++ sources. Names contain a hash of the sources, so later test runs find the files."""


def run(
    command: Sequence[str | Path], timeout: float = 300, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder. It has one thread, because other tests run at the same time.

    CMake compiles without optimisation and caches objects (cached_compiler.py).
    """
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "CMAKE_CXX_COMPILER_LAUNCHER": f"{sys.executable};{Path(__file__).with_name('cached_compiler.py')}",
    }
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=folder,
        env={**variables, **environment},
    )


def python(*arguments: str | Path, **options: Any) -> str:
    """Run Python with arguments, such as `-c` and code, and return the output. The process must succeed."""
    process = run([sys.executable, "-W", "ignore", *arguments], **options)
    assert process.returncode == 0, process.stderr
    return process.stdout


def snippets(page: str, language: str) -> list[str]:
    """The code blocks in `language` of a Markdown page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def row(variant: str, microseconds: float, n_masks: int = 1, tokens: int = 1, **changes: Any) -> Row:
    fields: dict[str, Any] = {
        "case": "decode",
        "out_features": 8192,
        "in_features": 2048,
        "dtype": "bfloat16",
        "spread": 0.5,
        "fraction_of_ceiling": 0.5,
        "error": 1e-3,
    }
    return Row(variant=variant, microseconds=microseconds, n_masks=n_masks, tokens=tokens, **{**fields, **changes})
