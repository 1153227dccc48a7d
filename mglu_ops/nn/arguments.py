"""Checks of constructor arguments. Each error names the argument, what it was and what it must be."""

from __future__ import annotations

import torch

from ..activations import get_activation
from ..checks import FLOATING
from ..masks import MAX_MASKS


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_size(name: str, value: object) -> None:
    """Check that a number of features is an int of at least 1."""
    if not (_is_int(value) and value >= 1):  # type: ignore[operator]
        raise ValueError(f"{name}: got {value!r}, must be an int of at least 1")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: got {value!r}, must be True or False")


def check_activation(activation: str) -> None:
    get_activation(activation)


def check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in FLOATING:
        raise ValueError(f"dtype: got {dtype!r}, must be None or one of {', '.join(map(str, FLOATING))}")


def check_masks(n_masks: object, learnable_masks: object, top_k: object) -> None:
    if not (_is_int(n_masks) and 1 <= n_masks <= MAX_MASKS):  # type: ignore[operator]
        raise ValueError(f"n_masks: got {n_masks!r}, must be an int from 1 to {MAX_MASKS}")
    check_flag("learnable_masks", learnable_masks)
    if top_k is not None and not (_is_int(top_k) and 1 <= top_k <= n_masks):  # type: ignore[operator]
        raise ValueError(f"top_k: got {top_k!r}, must be None or an int from 1 to n_masks={n_masks}")
