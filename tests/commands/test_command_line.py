"""The command line as a whole: help and version without torch, errors in one line, and the names of commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mglu_ops
from mglu_ops.__main__ import main

ROOT = Path(__file__).parents[2]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False
    )


# --- Start-up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_do_not_import_torch(option: str) -> None:
    done = python("-X", "importtime", "-m", "mglu_ops", option)
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "mglu_ops.packaging.command" in imported
    assert not {name for name in imported if name.partition(".")[0] in ("torch", "numpy")}


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"mglu_ops {mglu_ops.__version__}\n"


def test_the_version_stands_in_pyproject_too() -> None:
    assert f'\nversion = "{mglu_ops.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


def test_a_command_runs_user_code_that_uses_operators_and_modules(tmp_path: Path) -> None:
    """`python -m mglu_ops` imports the package without torch, and completes that import before it runs user code."""
    file = tmp_path / "model.py"
    file.write_text(
        "import torch, mglu_ops\n"
        "assert torch.ops.mglu.forward and mglu_ops.freeze and mglu_ops.ops\n"
        "def make(): return mglu_ops.nn.NaiveMGLU(8, 8), (torch.randn(2, 8),)\n"
    )
    done = python("-m", "mglu_ops", "report", f"{file}:make")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 fused, 0 missed")


# --- Public names ---------------------------------------------------------------------------------------------------


def test_every_public_name_can_be_imported() -> None:
    done = python(
        "-c", "import mglu_ops\nfrom mglu_ops import *\nfor name in mglu_ops.__all__: assert eval(name), name"
    )
    assert done.returncode == 0, done.stderr
    assert set(mglu_ops.__all__) <= set(dir(mglu_ops))


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'mglu_ops' has no attribute 'no_such_name'"):
        _ = mglu_ops.no_such_name


def test_compiled_code_can_use_a_name_that_was_never_used_before() -> None:
    program = """
import torch, mglu_ops
@torch.compile(backend="eager", fullgraph=True)
def layer(x, weight, packed):
    mglu_ops.check_packed_masks(packed.to("meta"), 8)
    return torch.ops.mglu.forward(x, weight, packed) if not mglu_ops.is_batch_invariant_mode_enabled() else x
packed = torch.ops.mglu.pack_masks(torch.ones(1, 4, 8))
assert layer(torch.randn(2, 8), torch.randn(4, 8), packed).shape == (2, 4)
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


def test_public_names_are_listed() -> None:
    assert {name for name in dir(mglu_ops) if not name.startswith("__")} == set(mglu_ops.__all__)


def test_explain_dispatch_names_the_backend() -> None:
    packed = torch.ops.mglu.pack_masks(torch.ones(1, 4, 8))
    assert mglu_ops.explain_dispatch(torch.randn(1, 8), torch.randn(4, 8), packed).backend in ("cpu", "composite")


def test_a_model_without_layers_is_reported_with_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "reported.py"
    file.write_text("import torch\ndef make(): return torch.nn.Linear(4, 4), (torch.randn(2, 4),)\n")
    assert main(["report", f"{file}:make"]) == 1
    printed = capsys.readouterr().out
    assert "No MGLU layer was found." in printed
    assert "What to try:" in printed


# --- Errors ---------------------------------------------------------------------------------------------------------

MODELS = """
import sys
import torch

def too_narrow():
    return torch.nn.Linear(4, 4), (torch.randn(2, 5),)

def leaves():
    sys.exit("no weights here")

def not_a_module():
    return "model", (torch.randn(2, 5),)
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "{folder}/nowhere.py:make"], "there is no file"),
        (["report", "{folder}/models.py:nothing"], "models.py has no function 'nothing'"),
        (["report", "{folder}/models.py:leaves"], "leaves failed: SystemExit: no weights here (models.py, line 9)"),
        (
            ["report", "{folder}/models.py:too_narrow"],
            "inputs: the model failed on float32 [2, 5]: RuntimeError: mat1 and mat2",
        ),
        (
            ["report", "{folder}/models.py:not_a_module"],
            "not_a_module: model: got str, must be a torch.nn.Module or a function",
        ),
        (["report", "{folder}/raises.py:make"], "failed: KeyError: 'no_such_key' (raises.py, line 2)"),
        (["report", "{folder}/no_syntax.py:make"], "failed: SyntaxError"),
        (["bench", "no_such_suite"], "no suite is named no_such_suite"),
    ],
)
def test_an_error_of_the_user_is_one_line_and_exit_code_2(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "raises.py").write_text("# a file that fails on import\n{}['no_such_key']\n")
    (tmp_path / "no_syntax.py").write_text("def def\n")
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"python -m mglu_ops {arguments[0]}: error: ")
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert main(["--traceback", *arguments]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_without_a_checkout_bench_says_where_the_benchmarks_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mglu_ops.bench.ROOT", tmp_path)
    assert main(["bench"]) == 2
    assert "the wheel does not contain them; in a clone, run `pip install -e .`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "package"), [("no_such_package.part", "no_such_package"), ("cuda.core", "cuda-core")]
)
def test_a_missing_package_is_named(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: object) -> int:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("mglu_ops.bench.run", run)
    assert main(["bench"]) == 2
    expected = f"this command needs the package {package}, which is not installed: pip install {package}"
    assert capsys.readouterr().err == f"python -m mglu_ops bench: error: {expected}\n"


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
