"""Checks of output paths, for use before expensive work."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from .errors import UserError


class FileError(UserError, ValueError):
    """A file cannot be written."""


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
