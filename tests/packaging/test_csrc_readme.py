"""The snippets of csrc/README.md run in order, as a user would type them."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from library_fixtures import needs_compiler, run

ROOT = Path(__file__).parents[2]
README = (ROOT / "csrc/README.md").read_text()


def snippets(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@needs_compiler
@pytest.mark.long
def test_snippets_run(tmp_path: Path) -> None:
    """The commands build and run the C++ program, by g++ and by CMake. It loads the package of the Python snippet."""
    (python,), (program,), (project,) = snippets("python"), snippets("cpp"), snippets("cmake")
    (tmp_path / "readme.py").write_text(python)
    (tmp_path / "main.cpp").write_text(program)
    (tmp_path / "CMakeLists.txt").write_text(project)
    # Users wait for the compiler's optimisations; a test need not.
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -O0\n')
    compiler.chmod(0o755)
    environment = {
        "PATH": os.pathsep.join([str(compiler.parent), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    script = "\n".join(["set -euo pipefail", f"cd {tmp_path}", "python readme.py", *snippets("bash")])
    process = run(["bash", "-c", script], timeout=600, **environment)
    assert process.returncode == 0, process.stderr
    results = [line for line in process.stdout.splitlines() if line.startswith("[") and "%" not in line]
    assert results == ["[1, 64]", "[7, 64]", "[64, 64]"] * 2
