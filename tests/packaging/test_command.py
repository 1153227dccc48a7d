"""Errors of the user in `export` and `build-runtime`: one line on standard error, exit code 2, no traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from library_fixtures import needs_compiler
from small_packages import write_small_package

from mglu_ops.__main__ import main

MODEL = """
import torch
from mglu_ops.nn import MGLU

def raises(): raise RuntimeError("no weights today")
def returns_a_number(): return 3
def linear(): return torch.nn.Linear(4, 4), (torch.randn(2, 4),)
def wrong_inputs(): return MGLU(8, 8), (torch.randn(2, 9),)
def layer(): return MGLU(8, 8).eval(), (torch.randn(2, 8),)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "models_of_commands.py"
    path.write_text(MODEL)
    return path


def error_of(arguments: list[str], command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail, and return its one line."""
    assert main([command, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    start = f"python -m mglu_ops {command}: error: "
    assert line.startswith(start)
    return line.removeprefix(start)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises", "RuntimeError: no weights today"),
        ("returns_a_number", "returned int, must be (model, (input, ...))"),
        ("linear", "no MGLU layer was found"),
        ("wrong_inputs", "torch.export.export failed"),
        ("missing", "missing"),
    ],
)
def test_export_refuses_a_factory_that_fails(
    model: Path, function: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of([f"{model}:{function}", str(tmp_path / "model.pt2")], "export", capsys)
    assert reason in error
    assert not (tmp_path / "model.pt2").exists()


def test_export_refuses_missing_files_and_wrong_options(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = str(tmp_path / "model.pt2")
    assert "no file" in error_of([str(tmp_path / "missing.py:layer"), package], "export", capsys)
    assert "must be a name that ends in .pt2" in error_of(
        [f"{model}:layer", str(tmp_path / "model.zip")], "export", capsys
    )
    assert "is not a folder" in error_of([f"{model}:layer", str(tmp_path / "no/model.pt2")], "export", capsys)
    assert "backend: got 'tpu'" in error_of([f"{model}:layer", package, "--backend", "tpu"], "export", capsys)
    (tmp_path / "weights.pt").write_bytes(b"no archive")
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "no/weights.pt", "No such file or directory")):
        error = error_of([f"{model}:layer", package, "--weights", str(path)], "export", capsys)
        assert error == f"weights: {path} cannot be written: {reason}"
    weights = ["--weights", str(tmp_path / "weights.pt")]
    assert "has no seal at its end" in error_of([f"{model}:layer", package, *weights], "export", capsys)


def test_export_needs_a_compiler(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        error = error_of([f"{model}:layer", str(tmp_path / "model.pt2")], "export", capsys)
    assert error.startswith("no C++ compiler: torch compiles packages with g++")


def test_build_runtime_needs_its_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ["--out", str(tmp_path / "out")]
    error = error_of([*out, "--compiler", "no-such-compiler"], "build-runtime", capsys)
    assert error.startswith("no C++ compiler: no-such-compiler is not on the PATH")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "pip install ninja" in error_of(out, "build-runtime", capsys)
    monkeypatch.setitem(sys.modules, "cmake", None)
    assert error_of(out, "build-runtime", capsys).startswith("CMake is missing: `pip install cmake`")
    assert not (tmp_path / "out").exists()


@needs_compiler
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--arch", "sm_90"], "give both"),
        (["--arch", "hopper", "--package", "cpu.pt2"], "got 'hopper', must be of the form sm_90"),
        (["--arch", "sm_90", "--package", "cpu.pt2"], "does not call the library on a GPU"),
        (["--arch", "sm_90", "--package", "missing.pt2"], "missing.pt2 is not a file"),
        (["--arch", "sm_90", "--package", "damaged.pt2"], "damaged.pt2 has no seal at its end"),
        (["--kernels-only"], "give an architecture and a package"),
    ],
)
def test_build_runtime_refuses_wrong_kernels(
    options: list[str],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_small_package(tmp_path / "cpu.pt2")
    (tmp_path / "damaged.pt2").write_bytes((tmp_path / "cpu.pt2").read_bytes()[:500])
    assert reason in error_of(["--out", "out", *options], "build-runtime", capsys)
