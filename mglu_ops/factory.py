"""Loads a user's model for a command. The user names a function that returns the model and example inputs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import UserError

METAVAR = "FILE.py:FUNCTION"
HELP = "function that returns the model and a tuple of example inputs; or MODULE:FUNCTION for an importable module"


class FactoryError(UserError, ValueError):
    """The function that should return a model and inputs does not exist, failed, or returned something else."""


def load_model(name: str) -> tuple[Any, tuple[Any, ...]]:
    """Call the function that `name` names (`model.py:make`, `package.model:make`).

    Returns:
        The model and its example inputs.

    Raises:
        FactoryError: the function cannot be imported, raised an exception or returned something else.
    """
    factory = load_factory(name)
    try:
        result = factory()
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise FactoryError(f"{name} failed: {describe(error)}") from error
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], (tuple, list)):
        raise FactoryError(f"{name} returned {_type_of(result)}, must be (model, (input, ...))")
    return result[0], tuple(result[1])


def load_factory(name: str) -> Callable[[], Any]:
    """Import the function that `FILE.py:FUNCTION` or `MODULE:FUNCTION` names.

    Raises:
        FactoryError: the name has neither form, there is no such file, module or function, or importing it failed.
    """
    where, _, function = name.rpartition(":")
    if not where or not function:
        raise FactoryError(f"got {name!r}, must be FILE.py:FUNCTION or MODULE:FUNCTION, for example model.py:make")
    if where.endswith(".py") and not Path(where).is_file():
        raise FactoryError(f"{name}: there is no file {where}")
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise FactoryError(f"{name}: importing {where} failed: {describe(error)}") from error
    factory = getattr(module, function, None)
    if factory is None:
        raise FactoryError(f"{name}: {where} has no function {function!r}")
    if not callable(factory):
        raise FactoryError(f"{name} is of type {_type_of(factory)}, must be a function")
    return factory


def describe(error: BaseException) -> str:
    """An exception of the user's code in one line: its type, its message's first line, and where it was raised."""
    words = str(error).strip().partition("\n")[0]
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    where = f" ({Path(inside[-1].filename).name}, line {inside[-1].lineno})" if inside else ""
    return f"{type(error).__name__}{': ' if words else ''}{words}{where}"


def _import_file(path: Path) -> ModuleType:
    """Import a file as `python FILE.py` would: it can import the files beside it. Replaces no other module."""
    name = _free_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "the name ends in .py"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickle and Dynamo look a function's module up here
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _free_name(path: Path) -> str:
    """A module name for a file: its stem, or the stem and underscores if another module has that name."""
    name = path.stem
    while name in sys.stdlib_module_names or not _is_of(sys.modules.get(name), path):
        name += "_"
    return name


def _is_of(module: ModuleType | None, path: Path) -> bool:
    """True if `module` is None or was imported from `path`."""
    file = getattr(module, "__file__", None)
    return module is None or (file is not None and Path(file).resolve() == path.resolve())


def _type_of(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__
