"""Comparing sizes so that a check costs nothing in eager mode and adds no guard that a compiler cannot decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def same_sizes(got: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether two shapes agree.

    A size that only the run will know (an unbacked SymInt) is taken to agree, and torch asserts it in the run.
    """
    if len(got) != len(expected):
        return False
    return all(a is b or _same(a, b) for a, b in zip(got, expected, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import expect_true

        return expect_true(a == b)
    return a == b
