"""Notices to the user. Writing a notice never fails, even if standard error is closed, full or a broken pipe."""

from __future__ import annotations

import contextlib
import sys
import warnings
from functools import cache


@cache
def say(message: str) -> None:
    """Write a message to standard error, once per process."""
    write(f"mglu_ops: {message}")


def write(line: str) -> None:
    """Write a line to standard error, or do nothing if that fails."""
    with contextlib.suppress(OSError, ValueError):  # a closed file raises a ValueError
        if sys.stderr is not None:  # otherwise print would write to standard output
            print(line, file=sys.stderr)


def warn(message: str, stacklevel: int) -> None:
    """Issue a UserWarning, with the `stacklevel` of `warnings.warn`. The user's filters may make it an error."""
    with contextlib.suppress(OSError, ValueError):
        warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)
