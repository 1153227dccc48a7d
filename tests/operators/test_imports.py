"""Errors of imports that cannot work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def last_line(folder: Path, *arguments: str) -> str:
    """The last line that a Python process in this folder prints to standard error. The process must fail."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, env=environment, cwd=folder
    )
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.long
def test_a_second_import_says_that_operators_are_registered_once(tmp_path: Path) -> None:
    code = """
import sys
import torch, mglu_ops
for name in [name for name in sys.modules if name.startswith("mglu_ops")]:
    del sys.modules[name]
try:
    import mglu_ops
finally:
    layer = torch.ones(1, 8), torch.ones(2, 8), torch.ops.mglu.pack_masks(torch.eye(8)[None, :2] > 0)
    assert torch.ops.mglu.forward(*layer, "relu").tolist() == [[7, 7]], "the first import must keep working"
"""
    line = last_line(tmp_path, "-c", code)
    assert line.startswith(
        "ImportError: mglu_ops was imported before in this process and then removed from sys.modules"
    )
    assert "restart Python" in line


WITHOUT_EDITABLE = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f)]; "
"""Removes the import hook of an editable install, which would find our modules before the user's."""


@pytest.mark.long
@pytest.mark.parametrize("call", ["enable_fusion()", "fuse(None)"])
def test_a_package_of_the_user_that_hides_ours_is_named(call: str, tmp_path: Path) -> None:
    (tmp_path / "compile_passes").mkdir()
    (tmp_path / "compile_passes" / "__init__.py").touch()
    line = last_line(tmp_path, "-c", f"{WITHOUT_EDITABLE}import mglu_ops; mglu_ops.{call}")
    assert f"a package compile_passes, but Python finds {tmp_path / 'compile_passes'} in its place: rename" in line


def test_a_module_of_the_user_that_hides_ours_is_named_by_commands(tmp_path: Path) -> None:
    (tmp_path / "compile_passes.py").touch()
    line = last_line(tmp_path, "-m", "mglu_ops", "--version")
    assert f"a package compile_passes, but Python finds {tmp_path / 'compile_passes.py'} in its place: rename" in line
