"""What the other modules of rules share: the class `Rule`, and functions that make, slice and map bundles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from torch.fx import Node

from ..recognise import Recogniser
from ..shapes import dims, range_of, slice_of
from ..symbols import Call, symbol_of
from ..values import MOST_ITEMS, Bundle, Gated, Value

RuleFunction = Callable[[Recogniser, Node, Call], Value]
"""A function that returns the value of a node, given its `Call`, or None for a node that it does not know.

A rule reads shapes only through the functions of `shapes.py`, so that it adds no guard to the compiled program.
"""


@dataclass(frozen=True)
class Rule:
    """A rule function, and the symbols (`symbols.py`) of the calls that it understands."""

    function: RuleFunction
    symbols: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.function.__name__


def rule(*symbols: str) -> Callable[[RuleFunction], Rule]:
    """Decorate a function as the rule for calls with these symbols."""
    return lambda function: Rule(function, symbols)


def rules_of(*modules: ModuleType) -> tuple[Rule, ...]:
    """The rules of the modules, in the order of their definitions."""
    return tuple(attribute for module in modules for attribute in vars(module).values() if isinstance(attribute, Rule))


RulesBySymbol = Mapping[str, tuple[Rule, ...]]


def by_symbol(rules: Iterable[Rule]) -> RulesBySymbol:
    """The rules for each symbol, in the order of `rules`. A rule is called only for nodes with one of its symbols."""
    table: dict[str, tuple[Rule, ...]] = {}
    for entry in rules:
        for symbol in entry.symbols:
            table[symbol] = (*table.get(symbol, ()), entry)
    return table


# --- Bundles ---------------------------------------------------------------------------------------------------------


def bundle(items: Sequence[Any], dim: int, size: int | None = None) -> Bundle | None:
    """A bundle of the items; None if an item is None, or if there are too many."""
    known = tuple(item for item in items if item is not None)
    return Bundle(known, dim, size) if len(known) == len(items) <= MOST_ITEMS else None


def each(value: Value, function: Callable[[Value], Value]) -> Value:
    """Apply an elementwise function to a value, or for a bundle to each of its items."""
    if isinstance(value, Bundle):
        return bundle([function(item) for item in value.items], value.dim, value.size)
    return function(value)


@rule("getitem", "select", "squeeze", "narrow", "slice")
def part_of_a_bundle(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """One item or several adjacent items of a bundle, taken by an index, a slice, `unbind`, `chunk` or `split`."""
    found = slice_of(node)
    if found is not None:
        base, dim, index = found
        value = recogniser.value(base)
        if not isinstance(value, Bundle) or value.size is not None or value.dim != dim:
            return None
        item = value.items[index]
        # A node that takes a term out of a stack gets no value. So no sum can contain the term, and the node that was
        # stacked becomes a site of its own.
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
    node: Node, left: tuple[Any, Value], right: tuple[Any, Value], function: Callable[[Value, Value], Value]
) -> Value:
    """Apply an elementwise function of two values to the items of two bundles, or of a bundle and a single value.

    Two kinds of values can be broadcast to a stack: a bundle of one item, and a value without the dimension of the
    stack, if this dimension is the first. The shapes of items need no check: values of one x and one weight have the
    same shape, and a site with several inputs or weights is refused.

    Args:
        node: the node that computes the function.
        left: the first operand of the node, as an argument and its value.
        right: the second operand, in the same form.
        function: the function of two values.
    """
    (_, a), (_, b) = left, right
    if not isinstance(a, Bundle) and not isinstance(b, Bundle):
        return function(a, b)
    bundles = [value for value in (a, b) if isinstance(value, Bundle)]
    longest = max(bundles, key=lambda value: len(value.items))
    sides = [_broadcast_items(value, longest, argument, node) for argument, value in (left, right)]
    if sides[0] is None or sides[1] is None:
        return None
    results = [function(x, y) for x, y in zip(sides[0], sides[1], strict=True)]
    return bundle(results, longest.dim, longest.size)


def _broadcast_items(value: Value, longest: Bundle, argument: Any, node: Node) -> list[Value] | None:
    """An operand as one value per item of the longest bundle; None if the operand does not broadcast to the bundle."""
    count = len(longest.items)
    if isinstance(value, Bundle):
        same_layout = (value.dim, value.size) == (longest.dim, longest.size) and dims(argument) == dims(node)
        return [*value.items] * (count // len(value.items)) if same_layout else None
    return [value] * count if longest.dim == 0 else None
