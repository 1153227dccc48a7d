"""Factories, functions that return a model for a command: how the command line names them, and every error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mglu_ops.__main__ import main
from mglu_ops.factory import FactoryError, load_factory, load_model

CODE = """
import sys

import neighbour_of_{name}


def make():
    return neighbour_of_{name}.size, [1, 2]


def broken():
    raise RuntimeError("no weights here")


def leaves():
    sys.exit("no weights today")


def lonely():
    return "model"


def bare():
    return "model", "input"


not_a_function = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with `models.py` and `a_package/inner.py`, which import other files of the folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "a_package"
    package.mkdir()
    for name, parent in (("models", tmp_path), ("inner", package)):
        (parent / f"{name}.py").write_text(CODE.format(name=name))
        (tmp_path / f"neighbour_of_{name}.py").write_text("size = 8\n")
    (tmp_path / "fails.py").write_text("import no_such_package\n")
    (tmp_path / "raises.py").write_text("# a file that fails on import\n{}['no_such_key']\n")
    (tmp_path / "no_syntax.py").write_text("def def\n")
    return tmp_path


def test_a_factory_is_found_in_a_file_and_in_a_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "models", raising=False)  # another test may have imported this name
    assert load_factory(f"{folder / 'models.py'}:make").__module__ == "models"
    assert load_model("models.py:make") == (8, (1, 2))
    monkeypatch.syspath_prepend(folder)
    assert load_model("a_package.inner:make") == (8, (1, 2))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("models.py", r"must be FILE\.py:FUNCTION or MODULE:FUNCTION"),
        ("models.py:", r"must be FILE\.py:FUNCTION or MODULE:FUNCTION"),
        ("nowhere.py:make", r"there is no file nowhere\.py"),
        ("no_such:make", "No module named 'no_such'"),
        ("fails.py:make", "No module named 'no_such_package'"),
        ("models.py:nothing", r"models\.py has no function 'nothing'"),
        ("models.py:not_a_function", "is of type int, must be a function"),
        ("raises.py:make", r"failed: KeyError: 'no_such_key' \(raises\.py, line 2\)"),
        ("no_syntax.py:make", "failed: SyntaxError"),
        ("models.py:broken", r"failed: RuntimeError: no weights here \(models\.py, line 12\)"),
        ("models.py:leaves", r"failed: SystemExit: no weights today \(models\.py, line 16\)"),
        ("models.py:lonely", r"returned str, must be \(model, \(input, ...\)\)"),
        ("models.py:bare", r"returned \(str, str\), must be"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_every_command_reports_a_wrong_factory_in_the_same_words(name, words, capsys):
    with pytest.raises(FactoryError, match=words):
        load_model(name)
    messages = []
    for command in (["report", name], ["export", name, "model.pt2"]):
        assert main(command) == 2
        messages.append(capsys.readouterr().err.partition(": error: ")[2])
    assert messages[0] == messages[1] != ""


@pytest.mark.parametrize("name", ["types", "torch", "mglu_ops", "sched", "neighbour_of_models"])
def test_a_file_replaces_no_module_of_its_name(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers loaded modules, an unloaded module of the standard library, and a module on the path."""
    monkeypatch.syspath_prepend(folder)
    load_factory("models.py:make")
    before = dict(sys.modules)
    path = folder / "elsewhere" / f"{name}.py"
    path.parent.mkdir()
    path.write_text("class Model: ...\n\n\ndef make():\n    return Model(), ()\n")
    for _ in range(2):  # the second import of a file replaces the module of the first
        model, _ = load_model(f"{path}:make")
        assert sys.modules[f"{name}_"].Model is type(model)  # so pickle finds the class
        assert {key: sys.modules[key] for key in before} == before


def test_a_file_that_fails_leaves_no_module(folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(FactoryError, match="no_such_package"):
            load_factory(f"{folder / 'fails.py'}:make")
        assert "fails" not in sys.modules
