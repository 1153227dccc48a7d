"""Bundles: making them, slicing them, and applying elementwise functions to their items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from ..recognise import Recogniser
from ..shapes import dims, range_of, slice_of
from ..symbols import Call, symbol_of
from ..values import MOST_ITEMS, Bundle, Gated, Value
from .rule import rule


def bundle(items: Sequence[Any], dim: int, size: int | None = None) -> Bundle | None:
    """A bundle of the items, or None if one of them is None or there are too many."""
    known = tuple(item for item in items if item is not None)
    return Bundle(known, dim, size) if len(known) == len(items) <= MOST_ITEMS else None


def each(value: Value, function: Callable[[Value], Value]) -> Value:
    """Apply an elementwise function to a value, or to every item of a bundle."""
    if isinstance(value, Bundle):
        return bundle([function(item) for item in value.items], value.dim, value.size)
    return function(value)


@rule("getitem", "select", "narrow", "slice")
def part_of_a_bundle(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """One item of a bundle, or adjacent ones, taken by an index, a slice, `unbind`, `chunk` or `split`."""
    found = slice_of(node)
    if found is not None:
        base, dim, index = found
        value = recogniser.value(base)
        if not isinstance(value, Bundle) or value.size is not None or value.dim != dim:
            return None
        item = value.items[index]
        # A single term that is taken out of a stack of terms again is a layer of its own.
        return None if isinstance(item, Gated) and symbol_of(base) == "stack" else item
    part = range_of(node)
    if part is None:
        return None
    base, dim, start, stop = part
    value = recogniser.value(base)
    if not isinstance(value, Bundle) or value.dim != dim:
        return None
    step = value.size or 1
    if start % step or stop % step:
        return None
    items = value.items[start // step : stop // step]
    if value.size is not None and len(items) == 1:
        return items[0]
    return replace(value, items=items) if items else None


def pairwise(
    recogniser: Recogniser, node: Node, left: Any, right: Any, function: Callable[[Value, Value], Value]
) -> Value:
    """Apply an elementwise function of two values to each pair of items of two bundles, or to one value and each item.

    Values of one x and one weight have the same shape, and a site whose parts have different ones is refused.

    A value that is broadcast to a stack either lacks the stack's dimension, which must then be the first, or is a
    bundle of one item.
    """
    a, b = recogniser.value(left), recogniser.value(right)
    if not isinstance(a, Bundle) and not isinstance(b, Bundle):
        return function(a, b)
    bundles = [value for value in (a, b) if isinstance(value, Bundle)]
    longest = max(bundles, key=lambda value: len(value.items))
    sides = [_beside(value, longest, argument, node) for argument, value in ((left, a), (right, b))]
    if sides[0] is None or sides[1] is None:
        return None
    results = [function(x, y) for x, y in zip(sides[0], sides[1], strict=True)]
    return bundle(results, longest.dim, longest.size)


def _beside(value: Value, longest: Bundle, argument: Any, node: Node) -> list[Value] | None:
    """The operand as a list with one value per item of the longest bundle; None if it does not broadcast to that."""
    count = len(longest.items)
    if isinstance(value, Bundle):
        same_layout = (value.dim, value.size) == (longest.dim, longest.size) and dims(argument) == dims(node)
        return [*value.items] * (count // len(value.items)) if same_layout else None
    return [value] * count if longest.dim == 0 else None
