"""Arithmetic and comparison of sizes. Comparisons are cheap in eager mode and accept unbacked SymInts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def ceil_div(size: int, step: int) -> int:
    """`size / step`, rounded up."""
    return -(-size // step)


def round_up(size: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `size`."""
    return ceil_div(size, step) * step


def same_sizes(got: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Return True if two shapes are equal.

    A size that is known only at run time (an unbacked SymInt) counts as equal. The compiled code then asserts it.
    """
    if len(got) != len(expected):
        return False
    return all(a is b or _same(a, b) for a, b in zip(got, expected, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import expect_true

        return expect_true(a == b)
    return a == b


def is_negative(size: Any) -> bool:
    """Return True if a size is below 0.

    A size that is known only at run time counts as 0 or more. The compiled code then asserts it.
    """
    if isinstance(size, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import expect_true

        return not expect_true(size >= 0)
    return bool(size < 0)
