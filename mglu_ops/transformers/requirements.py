"""Checks that transformers is installed and new enough, before this package imports anything else."""

from __future__ import annotations

_INSTALL = 'in a clone of mglu_ops, pip install ".[transformers]" installs it'

try:
    from transformers import __version__
except ImportError as error:
    raise ImportError(f"mglu_ops.transformers needs the package transformers, 5.17 or later; {_INSTALL}") from error

if tuple(map(int, __version__.split(".")[:2])) < (5, 17):
    raise ImportError(f"mglu_ops.transformers: got transformers {__version__}, must be 5.17 or later; {_INSTALL}")
