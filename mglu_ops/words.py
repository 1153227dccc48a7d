"""Wording shared by messages. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun, such as `1 layer` or `2 layers`. `plural` is for nouns that do not add an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def described(inputs: Iterable[Any]) -> str:
    """A description of a model's inputs, such as `float32 [3, 64] on cuda:0, dict`."""
    return ", ".join(map(_describe, inputs)) or "no inputs"


def _describe(value: Any) -> str:
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return "None" if value is None else type(value).__name__
    device = "" if str(getattr(value, "device", "cpu")) == "cpu" else f" on {value.device}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{device}"
