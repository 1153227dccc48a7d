"""A user's model on the command line: a function, in a file or in a module, that returns it with example inputs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

METAVAR = "FILE.py:FUNCTION"
HELP = "function that returns the model and a tuple of example inputs; or MODULE:FUNCTION, of a module to import"


class FactoryError(ValueError):
    """There is no such function, or it fails or returns something else."""


def load_model(name: str) -> tuple[Any, tuple[Any, ...]]:
    """The model and its example inputs, from the function that `name` (`model.py:make`, `package.model:make`) names.

    Raises:
        FactoryError: with what is wrong, in words.
    """
    factory = load_factory(name)
    try:
        result = factory()
    except Exception as error:  # it is the user's code
        raise FactoryError(f"{name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], (tuple, list)):
        raise FactoryError(f"{name} returned {_kind(result)}, must be (model, (input, ...))")
    return result[0], tuple(result[1])


def load_factory(name: str) -> Callable[[], Any]:
    """The function that `FILE.py:FUNCTION` or `MODULE:FUNCTION` names.

    Raises:
        FactoryError: the name has neither form, nothing is there, or importing it failed.
    """
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise FactoryError(f"got {name!r}, must be FILE.py:FUNCTION or MODULE:FUNCTION, as model.py:make")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        factory = getattr(module, function)
    except Exception as error:  # importing runs the user's code
        raise FactoryError(f"{name}: {error}") from error
    if not callable(factory):
        raise FactoryError(f"{name} is {_kind(factory)}, must be a function")
    return factory


def _import_file(path: Path) -> ModuleType:
    """As `python FILE.py` would: it may import what lies beside it."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "it ends in .py"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # as an import of it would, for pickling and for Dynamo
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__
