"""User errors: every command prints one line about the problem to standard error, and exits with code 2."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from mglu_ops.__main__ import main
from tests.support.packaging import needs_compiler, write_small_package

pytest_plugins = ["tests.support.builds"]

MODELS = """
import torch
from mglu_ops.nn import MGLU

def too_narrow(): return torch.nn.Linear(4, 4), (torch.randn(2, 5),)
def not_a_module(): return "model", (torch.randn(2, 5),)
def linear(): return torch.nn.Linear(4, 4), (torch.randn(2, 4),)
def layer(): return MGLU(8, 8).eval(), (torch.randn(2, 8),)
"""


@pytest.fixture(autouse=True)
def _files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder with models and packages, some of them broken, and use an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("models.py").write_text(MODELS)
    write_small_package(Path("cpu.pt2"))
    Path("damaged.pt2").write_bytes(Path("cpu.pt2").read_bytes()[:500])
    Path("weights.pt").write_bytes(b"no archive")
    Path("open").mkdir()
    Path("open").chmod(0o777)


def error_of(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The error line of a command, without its prefix. `build` may print progress lines before it."""
    assert main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    *warnings, line = printed.err.splitlines()
    command, *_ = arguments.split()
    assert not warnings or command == "build"
    start = f"python -m mglu_ops {command}: error: "
    assert line.startswith(start)
    return line.removeprefix(start)


LAYER = "--arch sm_90 --shapes 8192x2048"
RUNTIME = "build-runtime --out out"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("report nowhere.py:make", "there is no file"),
        ("report models.py:too_narrow", r"inputs: the model failed on float32 \[2, 5\]: RuntimeError: mat1 and mat2"),
        ("report models.py:not_a_module", "not_a_module: model: got str, must be a torch.nn.Module or a function"),
        ("bench no_such_suite", "no suite is named no_such_suite"),
        ("export models.py:linear model.pt2", "no MGLU layer was found"),
        ("export models.py:layer model.pt2 --weights weights.pt", "has no seal at its end"),
        pytest.param(f"{RUNTIME} --arch sm_90", "give both", marks=needs_compiler),
        pytest.param(f"{RUNTIME} --arch hopper --package cpu.pt2", "must be of the form sm_90", marks=needs_compiler),
        pytest.param(f"{RUNTIME} --arch sm_90 --package cpu.pt2", "does not call the library on", marks=needs_compiler),
        pytest.param(f"{RUNTIME} --arch sm_90 --package no.pt2", "no.pt2 is not a file", marks=needs_compiler),
        pytest.param(f"{RUNTIME} --arch sm_90 --package damaged.pt2", "damaged.pt2 has no seal", marks=needs_compiler),
        (f"{RUNTIME} --kernels-only", "give an architecture and a package"),
        (
            f"{RUNTIME} --compiler no-such-compiler",
            r"^there is no C\+\+ compiler on the path \(compiler=no-such-compiler\)",
        ),
        ("build --arch sm_90", "^--arch and --shapes: CUDA kernels are compiled for a GPU and for a layer; give both"),
        ("build --no-cpu", "^--no-cpu leaves nothing to build without --arch and --shapes"),
        ("build --arch hopper --shapes 8x8", "^arch: got 'hopper', must be of the form sm_90"),
        ("build --arch sm_70 --shapes 8x8", "^arch: got sm_70"),
        (f"build {LAYER} --n-masks 0", r"^--n-masks: got \[0\], must be 1 to 16"),
        (f"build {LAYER} --tokens 0", r"^--tokens: got \[0\], must be at least 1"),
        (f"build {LAYER} --activation swish", "^--activation: got 'swish', must be one of silu, "),
        (f"build {LAYER} --weight-format fp8", "^weight_format: got 'fp8', must be one of dense, fp8_row, "),
        (
            "build --arch sm_90 --shapes 8x9 --weight-format int4_group",
            "^weight_format: got 'int4_group' with in_features=9",
        ),
        ("build --out open", "has mode 777, so others can write to it"),
        ("build --out weights.pt", r"weights.pt is not used: \[Errno 17\] File exists"),
    ],
)
def test_an_error_is_one_line(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(words, error_of(arguments, capsys))
    assert not Path("model.pt2").exists()


def test_a_traceback_is_printed_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traceback", "bench", "no_such_suite"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        error = error_of("export models.py:layer model.pt2", capsys)
    assert error.startswith("no C++ compiler: torch compiles packages with g++")
    monkeypatch.setenv("PATH", str(Path.cwd()))
    assert "pip install ninja" in error_of(RUNTIME, capsys)
    monkeypatch.setitem(sys.modules, "cmake", None)
    assert error_of(RUNTIME, capsys).startswith("CMake is missing: `pip install cmake`")
    assert not Path("out").exists()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "there is no C++ compiler on the path (CXX=no-such-compiler)" in error_of("build", capsys)


@pytest.mark.parametrize(
    ("module", "package"), [("no_such_package.part", "no_such_package"), ("cuda.core", "cuda-core")]
)
def test_a_missing_package_is_named(module, package, monkeypatch, capsys):
    def run(options: object) -> int:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("mglu_ops.bench.run", run)
    expected = f"this command needs the package {package}, which is not installed: pip install {package}"
    assert error_of("bench", capsys) == expected


@pytest.mark.parametrize("error", [ModuleNotFoundError("ours", name="mglu_ops.moved"), ValueError("a bug")])
def test_a_fault_of_the_package_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(options: object) -> int:
        raise error

    monkeypatch.setattr("mglu_ops.bench.run", run)
    with pytest.raises(type(error)):
        main(["bench"])


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "the following arguments are required: COMMAND" in capsys.readouterr().err
