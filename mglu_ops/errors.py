"""Errors that commands report in one line, among them one about a package that another one hides."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """Something that the person at the command line can put right.

    `python -m mglu_ops` prints the message in one line on standard error and exits with code 2. The message says what
    happened, the value, and what to do.
    """


class HiddenPackageError(UserError, ImportError):
    """Python finds another `compile_passes` than the one that is installed with this package."""


@contextmanager
def importing_passes() -> Iterator[None]:
    """A block that imports modules of `compile_passes`. Its error names a package of the user that hides them.

    Raises:
        HiddenPackageError: an import failed, and the package that Python finds is not the one beside this package.
    """
    try:
        yield
    except ImportError as error:
        found = _place_of("compile_passes")
        if found is None or found.parent == Path(__file__).resolve().parents[1]:
            raise
        raise HiddenPackageError(
            f"mglu_ops comes with a package compile_passes, but Python finds {found} in its place: rename that one, or "
            "put its folder later in sys.path"
        ) from error


def _place_of(package: str) -> Path | None:
    """The folder of a package, or the file of a module."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    places = spec.submodule_search_locations or [spec.origin or ""]
    return Path(next(iter(places))).resolve()
