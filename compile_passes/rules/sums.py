"""Rules for sums of gated products over the masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from .. import formulas
from ..recognise import Recogniser
from ..shapes import dimension, dims, dtype_of, same_shape
from ..symbols import Call, value_users
from ..values import Activated, Bundle, Gated, MaskWeight, Projection, Scalar, Value
from .bundles import bundle
from .gates import scaled, times, with_mask_weight
from .projections import same_operands
from .rule import rule


@rule("add")
def sum_of_terms(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`y + term`, where y is a sum of terms, 0, or anything else (a residual)."""
    left, right = call.args
    a, b = recogniser.value(left), recogniser.value(right)
    if isinstance(a, Gated) and isinstance(b, Gated):
        longer = _longer_sum(recogniser, node, (left, a), (right, b))
        return longer if longer is not None else _with_rest(node, b, right, left, rest_first=True)
    rest_first = isinstance(b, Gated)
    if isinstance(a, Gated):
        (left, a), (right, b) = (right, b), (left, a)
    if not isinstance(b, Gated):
        return None
    if a == Scalar(0):
        return b if len(value_users(right)) == 1 and same_shape(node, right) else None
    return _with_rest(node, b, right, left, rest_first=rest_first)


def _longer_sum(
    recogniser: Recogniser, node: Node, left: tuple[Node, Gated], right: tuple[Node | None, Gated]
) -> Gated | None:
    """The sum of two sums of terms; None if one of them has other users, for it is then a layer of its own.

    The right one need not have a node.
    """
    (_, a), (_, b) = left, right
    held = [part for part, _ in (left, right) if part is not None]
    if any(len(value_users(n)) > 1 or not same_shape(node, n) for n in held) or (a.rest and b.rest):
        return None
    total = joined(recogniser, [a, b])
    return None if total is None else replace(total, rest=a.rest or b.rest, rest_first=a.rest_first)


@rule("addcmul")
def sum_with_a_product(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`addcmul(y, act(gate), value)`."""
    base, *factors, scale = call.args
    term = times(recogniser, *map(recogniser.value, factors))
    if not isinstance(term, Gated) or not same_shape(node, *factors) or not isinstance(scale, (int, float)):
        return None
    term, before = scaled(term, scale), recogniser.value(base)
    if not isinstance(term, Gated) or before == Scalar(0):
        return term
    if isinstance(before, Gated):
        return _longer_sum(recogniser, node, (base, before), (None, term))
    return replace(term, rest=base, rest_first=True)


@rule("matmul")
def product_of_a_stack(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`stack(terms, -1) @ weights` with one weight per mask."""
    source, weights = call.args
    value = recogniser.value(source)
    if not isinstance(value, Bundle) or value.size is not None or value.dim != dims(source) - 1 or dims(weights) != 1:
        return None
    numbers = [MaskWeight(weights, is_number=True, index=i) for i in range(len(value.items))]
    return joined(recogniser, list(map(with_mask_weight, value.items, numbers)))


def joined(recogniser: Recogniser, parts: Sequence[Value]) -> Gated | None:
    """One sum of the terms of several sums, if all terms belong to one layer: one x, one weight, one activation."""
    sums = [part for part in parts if isinstance(part, Gated)]
    terms = tuple(term for part in sums for term in part.terms)
    if len(sums) < len(parts):
        return None
    first, *others = terms
    unit, _ = formulas.unscaled(first.formula)
    alike = all(
        formulas.unscaled(term.formula)[0] == unit and same_operands(recogniser, term.gate, first.gate)
        for term in others
    )
    return Gated(terms) if alike else None


def _with_rest(node: Node, gated: Gated, gated_node: Node, rest: Any, *, rest_first: bool) -> Gated | None:
    """A sum of terms plus a residual, to which more terms may be added: `y = x; y = y + term; y = y + term`.

    The residual is a tensor that may broadcast to the shape of the sum, as a bias does, and may have a narrower dtype.
    """
    if gated.rest is not None or dtype_of(node) != dtype_of(gated_node) or not same_shape(node, gated_node):
        return None
    return replace(gated, rest=rest, whole=gated_node, rest_first=rest_first)


@rule("sub")
def difference_of_terms(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`y - term`."""
    left, right = call.args
    a, b = recogniser.value(left), scaled(recogniser.value(right), -1)
    if not isinstance(a, Gated) or not isinstance(b, Gated):
        return None
    return _longer_sum(recogniser, node, (left, a), (right, b))


@rule("neg")
def negated_term(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`-term`."""
    (source,) = call.args
    value = recogniser.value(source)
    return scaled(value, -1) if isinstance(value, Gated) else None


@rule("stack")
def stacked_terms(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`stack(terms)`, `stack(gates)` and `stack(values)`."""
    items, position = call.args
    dim = dimension(position, node)
    if not isinstance(items, (list, tuple)) or dim is None:
        return None
    values = [recogniser.value(item) for item in items]
    if not all(isinstance(value, (Projection, Activated, Gated)) for value in values):
        return None
    if any(isinstance(value, Gated) and value.rest is not None for value in values):
        return None
    no_other_users = all(len(value_users(item)) == 1 for item in items if isinstance(item, Node))
    return bundle(values, dim) if no_other_users else None


@rule("sum", "mean")
def sum_of_a_stack(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`terms.sum(0)` and `terms.mean(0)` along the dimension of the masks."""
    source, dim, keepdim = call.args
    value = recogniser.value(source)
    if not isinstance(value, Bundle) or value.size is not None or dimension(dim, source) != value.dim:
        return None
    if keepdim is not False or dtype_of(node) != dtype_of(source):
        return None
    total = joined(recogniser, value.items)
    return total if call.symbol == "sum" else scaled(total, 1 / len(value.items))
