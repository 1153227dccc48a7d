"""Arithmetic and comparison of sizes. Comparisons are cheap in eager mode and accept unbacked SymInts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Size(int):
    """An integer that also holds the expression by which it was computed from named values.

    It compares like its value, so code that branches on a Size takes the branch for this value. Negatives, sums,
    differences, products and quotients (`//`) of Sizes are Sizes, and so are the results of `least` and `greatest`. All
    other operations return plain integers.

    Attributes:
        expression: the expression in the syntax that Python and C++ share, with the functions `floor_div`, `least` and
            `greatest`.
    """

    expression: str

    def __new__(cls, value: int, expression: str) -> Size:  # noqa: PYI034 (typing.Self needs Python 3.11)
        size = super().__new__(cls, value)
        size.expression = expression
        return size

    def __add__(self, other: int) -> Size:
        if text(other) == "0":
            return self
        return Size(int(self) + int(other), f"({text(self)} + {text(other)})")

    def __radd__(self, other: int) -> Size:
        return Size(int(other) + int(self), f"({text(other)} + {text(self)})")

    def __sub__(self, other: int) -> Size:
        return Size(int(self) - int(other), f"({text(self)} - {text(other)})")

    def __rsub__(self, other: int) -> Size:
        return Size(int(other) - int(self), f"({text(other)} - {text(self)})")

    def __mul__(self, other: int) -> Size:
        if text(other) == "1":
            return self
        return Size(int(self) * int(other), f"({text(self)} * {text(other)})")

    def __rmul__(self, other: int) -> Size:
        if text(other) == "1":
            return self
        return Size(int(other) * int(self), f"({text(other)} * {text(self)})")

    def __floordiv__(self, other: int) -> Size:
        if text(other) == "1":
            return self
        return Size(int(self) // int(other), f"floor_div({text(self)}, {text(other)})")

    def __rfloordiv__(self, other: int) -> Size:
        return Size(int(other) // int(self), f"floor_div({text(other)}, {text(self)})")

    def __neg__(self) -> Size:
        return Size(-int(self), f"(-{text(self)})")


def text(size: int) -> str:
    """Return the expression of a `Size`, or the digits of a plain integer."""
    return size.expression if isinstance(size, Size) else str(int(size))


def least(a: int, b: int) -> int:
    """The smaller of two sizes."""
    return _extreme(min, "least", a, b)


def greatest(a: int, b: int) -> int:
    """The larger of two sizes."""
    return _extreme(max, "greatest", a, b)


def _extreme(function: Callable[[int, int], int], name: str, a: int, b: int) -> int:
    found = function(a, b)
    return Size(found, f"{name}({text(a)}, {text(b)})") if isinstance(a, Size) or isinstance(b, Size) else found


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
