"""Notices on standard error do not change where a call runs or what a command prints. Also tests errors of imports."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from mglu_ops import notices
from mglu_ops.backends.cpu import build
from tests.support.families import sample

# The first compiler is missing, and the large layer warns of that. The second compiler builds the CPU kernels, and a
# notice says so.
PROGRAM = """
import os, sys, torch, mglu_ops
from mglu_ops.backends.cpu import library
{break_it}
x, weight, masks = torch.ones(2, 512), torch.ones(512, 512), torch.ones(1, 512, 512) > 0
for compiler in ("no-such-compiler", {compiler!r}):
    os.environ["CXX"] = compiler
    for _ in range(2):
        packed_masks = torch.ops.mglu.pack_masks(masks)
        torch.ops.mglu.forward(x, weight, packed_masks)
        torch.ops.mglu.forward_train(x, weight, packed_masks)
    reason = library.load()
    print(reason if isinstance(reason, str) else "built")
"""

CLOSED = {
    "closed": ("", "2>&-"),
    "full": ("", "2>/dev/full"),
    "broken pipe": ("", "2> >(exec true)"),
    "closed in Python": ("sys.stderr.close()", ""),
    "none": ("sys.stderr = None", ""),
}

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a shell and /dev/full")


def run_in_shell(arguments: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in bash, so that `arguments` may contain redirections."""
    root, cache = str(Path(__file__).parents[2]), str(tmp_path / "cache")
    return subprocess.run(
        ["bash", "-c", f"{shlex.quote(sys.executable)} {arguments}"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": root, "MGLU_CACHE_DIR": cache},
    )


def copying_compiler(tmp_path: Path) -> Path:
    """A fake C++ compiler that copies the library from this process's cache."""
    path = tmp_path / "fast-c++"
    path.write_text(f"#!/bin/sh\nfor out; do :; done\ncp {build.load_library(Path)} $out\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("how", sample(CLOSED, 5))
def test_a_standard_error_that_cannot_be_written_changes_no_call(how: str, tmp_path: Path) -> None:
    break_it, redirection = CLOSED[how]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(break_it=break_it, compiler=str(copying_compiler(tmp_path))))
    done = run_in_shell(f"{program} {redirection}", tmp_path)
    assert done.returncode == 0
    first, second = done.stdout.splitlines()
    assert first.startswith("there is no C++ compiler on the path (CXX=no-such-compiler)")
    assert second == "built"


@pytest.mark.long
@pytest.mark.parametrize("how", ["closed", "full", "broken pipe"])
def test_a_command_that_fails_exits_as_usual(how: str, tmp_path: Path) -> None:
    done = run_in_shell(f"-m mglu_ops build --no-cpu {CLOSED[how][1]}", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")


class Broken:
    """A stream that raises an error, such as one that a notebook has closed."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def write(self, _: str) -> int:
        raise self._error

    def flush(self) -> None:
        raise self._error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("I/O operation on closed file")])
@pytest.mark.parametrize("tell", [notices.say, lambda words: notices.warn(words, 1)])
def test_an_error_of_the_stream_does_not_fail_the_call(error, tell, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Broken(error))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "_showwarnmsg_impl", lambda _: sys.stderr.write("a warning"))
        tell(f"test of {error}")


def test_a_warning_that_the_user_made_an_error_is_raised_where_the_level_says() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="some words"):
            notices.warn("some words", 1)
    with pytest.warns(UserWarning, match="other words") as seen:
        notices.warn("other words", 1)
    assert seen[0].filename == __file__


def test_the_same_notice_is_written_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        notices.say("words of this test")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "mglu_ops: words of this test\n")


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
