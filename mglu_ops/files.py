"""The folder of the C++ and CUDA sources, and checks of output paths for use before expensive work."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from .errors import UserError


class FileError(UserError, ValueError):
    """A file cannot be written."""


@cache
def source_directory(part: str = "") -> Path:
    """Return the folder `csrc`, or its folder `part`: in an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "csrc" / part, package.parent / "csrc" / part):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"the sources of mglu_ops are neither in {package} nor beside it")


def as_path(name: str, path: Any) -> Path:
    """Return an argument as a path. Errors call it `name`.

    Raises:
        TypeError: the argument is neither a str nor a path.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise TypeError(f"{name}: got {type(path).__name__}, must be a path (str or os.PathLike)")
    return Path(path)


def check_writable(name: str, path: Path) -> None:
    """Check that a file can be created or overwritten. Leaves nothing behind.

    Raises:
        FileError: the path is a folder, its folder does not exist, or the system refuses to write.
    """
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise FileError(f"{name}: {path} cannot be written: {error.strerror}") from None
