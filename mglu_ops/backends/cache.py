"""The cache on disk for the CPU library and the CUDA kernels, which are built where they run."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path


def cache_directory() -> Path:
    """The folder of the cache: `MGLU_CACHE_DIR`, or else `mglu_ops` in the user's XDG cache folder."""
    override = os.environ.get("MGLU_CACHE_DIR")
    if override:
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mglu_ops"


@cache
def announce(what: str, duration: str) -> None:
    """Tell the user once a process, on standard error, why a first call takes long."""
    print(f"mglu_ops: {what}, which takes {duration}; the result is kept in {cache_directory()}", file=sys.stderr)
