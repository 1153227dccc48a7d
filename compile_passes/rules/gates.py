"""Rules for gated products `act(gate) * value`, for numbers and mask weights that multiply them, and for their sums."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch.fx import Node

from .. import formulas, values
from ..formulas import Formula
from ..recognise import Recogniser
from ..shapes import dimension, dims, dtype_of, has_one_element, has_shape, same_shape, tensor_example
from ..symbols import Call, value_users
from ..values import (
    MOST_ITEMS,
    Activated,
    Bundle,
    Gated,
    MaskWeight,
    Product,
    Projection,
    Scalar,
    Term,
    Value,
    function_of,
)
from .base import bundle, each, pairwise, rule
from .projections import same_operands, same_projection

_PARTS = (Projection, Activated, Gated, Bundle)


@rule("mul", "div")
def gated_product(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`act(gate) * value`, and the product of a gate, a value or a term with a mask weight or a number."""
    left, right = call.args
    a, b = recogniser.value(left), recogniser.value(right)
    if isinstance(a, _PARTS) and isinstance(b, _PARTS):

        def product(x: Value, y: Value) -> Value:  # for `div`, the quotient, as in `value * g / (1 + exp(-g))`
            return times(recogniser, x, _applied(formulas.inverse, y) if call.symbol == "div" else y)

        return pairwise(node, (left, a), (right, b), product)
    if isinstance(b, _PARTS) and call.symbol == "mul":
        (left, a), (right, b) = (right, b), (left, a)
    if not isinstance(a, _PARTS):
        return None
    if isinstance(b, Scalar) and same_shape(node, left):
        inverse = 1 / b.value if b.value else None
        return scaled(a, b.value if call.symbol == "mul" else inverse)
    return _weighted(a, left, right, node) if call.symbol == "mul" else None


@rule("glu")
def gated_linear_unit(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.glu(F.linear(x, cat([V, W])))`, which multiplies the first half by the sigmoid of the second half."""
    source, dim = call.args
    value, half = recogniser.value(source), dimension(dim, source)
    if not isinstance(value, Bundle) or value.dim != half or len(value.items) % 2:
        return None
    middle = len(value.items) // 2
    pairs = zip(value.items[:middle], value.items[middle:], strict=True)
    terms = [times(recogniser, a, _applied(partial(formulas.apply, "sigmoid"), b)) for a, b in pairs]
    return terms[0] if value.size is not None and middle == 1 else bundle(terms, value.dim, value.size)


def _applied(function: Callable[[Formula], Formula | None], value: Value) -> Activated | None:
    before = function_of(value)
    formula = None if before is None else function(before.formula)
    return None if before is None or formula is None else replace(before, formula=formula)


def times(recogniser: Recogniser, a: Value, b: Value) -> Value:
    """The product of two values of a layer; None if it is not a term."""
    if isinstance(b, Gated):
        a, b = b, a
    if isinstance(a, Gated):
        return _gated_times(recogniser, a, b)
    if isinstance(a, (Projection, Activated)) and isinstance(b, (Projection, Activated)):
        return _gate_times_value(recogniser, a, b)
    return None


def _gated_times(recogniser: Recogniser, gated: Gated, other: Value) -> Gated | None:
    """A term times the last factor of a hand-written activation of the gate, as `(g * v) * sigmoid(g)` for silu."""
    function = function_of(other)
    if function is None or len(gated.terms) != 1 or gated.rest is not None:
        return None
    (term,), projection = gated.terms, function.projection
    if formulas.unscaled(term.formula)[0] == formulas.VARIABLE and same_projection(recogniser, projection, term.value):
        term = replace(term, gate=term.value, value=term.gate)
    product = formulas.multiply(term.formula, function.formula)
    if product is None or not same_projection(recogniser, projection, term.gate):
        return None
    return Gated((replace(term, formula=product),))


def _gate_times_value(recogniser: Recogniser, a: Projection | Activated, b: Projection | Activated) -> Gated | None:
    """The product of a gate and a value, in either order. The value is the factor that is linear in its projection."""
    parts = [part if isinstance(part, Activated) else Activated(formulas.VARIABLE, part) for part in (a, b)]
    parts.sort(key=lambda part: formulas.unscaled(part.formula)[0] == formulas.VARIABLE)
    first, second = parts
    linear, scale = formulas.unscaled(second.formula)
    if linear != formulas.VARIABLE or (first.mask_weight is not None and second.mask_weight is not None):
        return None
    gate, value = first.projection, second.projection
    is_symmetric = formulas.unscaled(first.formula)[0] == formulas.VARIABLE
    if is_symmetric and value.factor is not None and value.factor.is_gate(1):
        gate, value = value, gate
    masked = [isinstance(p.weight, Product) or p.factor is not None for p in (gate, value)]
    if not any(masked) or not _have_a_common_part(recogniser, gate, value):
        return None
    formula, weight = formulas.scaled(first.formula, scale), first.mask_weight or second.mask_weight
    return None if formula is None else Gated((Term(formula, gate, value, weight, moved=weight is not None),))


def _have_a_common_part(recogniser: Recogniser, gate: Projection, value: Projection) -> bool:
    """True if gate and value share a weight, or mask two weights by different functions of one mask.

    Other products are not meant as MGLU, and the report should not list them as refused. An example is a SwiGLU with
    two pruned weights, even if one mask prunes both.
    """
    if _weights(recogniser, gate) & _weights(recogniser, value):
        return True
    if gate.factor is None or value.factor is None or gate.factor.mask.key != value.factor.mask.key:
        return False
    return gate.factor.at != value.factor.at


def _weights(recogniser: Recogniser, projection: Projection) -> set[Hashable]:
    weight = projection.weight
    return set(map(recogniser.key, weight.weights if isinstance(weight, Product) else [weight]))


# --- Mask weights and scales ----------------------------------------------------------------------------------------


def scaled(value: Value, factor: float | None) -> Value:
    """Multiply a term, a factor of a term, or every item of a bundle by a number; None for other values."""
    if factor is None or factor == 0:
        return None
    if isinstance(value, Bundle):
        return each(value, lambda item: scaled(item, factor))
    if isinstance(value, Gated) and value.rest is None:
        terms = [term for term in (_scaled(term, factor) for term in value.terms) if term is not None]
        return Gated(tuple(terms)) if len(terms) == len(value.terms) else None
    # Here an `Activated` has a mask weight. Without one, the earlier rule `function_of_two` would have scaled it.
    return _scaled(value, factor) if isinstance(value, Activated) else None


_Part = TypeVar("_Part", Term, Activated)


def _scaled(part: _Part, factor: float) -> _Part | None:
    formula = formulas.scaled(part.formula, factor)
    return None if formula is None else replace(part, formula=formula)


def _weighted(value: Value, part: Any, weight: Any, node: Node) -> Value:
    """A part of the layer times a mask weight: one number, or one per token. A stack may have one weight per mask."""
    projection = values.projection_of(value)
    if not isinstance(weight, Node) or projection is None or not same_shape(node, part):
        return None
    mask_weights_dtype = dtype_of(weight)
    if mask_weights_dtype is None or not mask_weights_dtype.is_floating_point:
        return None
    if projection.swapped and not has_one_element(weight):
        return None
    if isinstance(value, Bundle) and value.size is None:
        return _weighted_stack(value, projection, weight, node)
    if has_one_element(weight):
        return with_mask_weight(value, MaskWeight(weight, is_number=True))
    tokens = tensor_example(projection.x)
    is_column = tokens is not None and has_shape(weight, (*tokens.shape[:-1], 1))
    return with_mask_weight(value, MaskWeight(weight)) if is_column else None


def _weighted_stack(value: Bundle, projection: Projection, weight: Node, node: Node) -> Value:
    """A stack times mask weights: a single number, a number per mask, or a number per token and mask."""
    tokens, count, dim = tensor_example(projection.x), len(value.items), value.dim
    if tokens is None or dims(node) != tokens.dim() + 1:
        return None
    if has_one_element(weight):
        mask_weights = [MaskWeight(weight, is_number=True)] * count
    else:
        mask_weight_dim = dim - (dims(node) - dims(weight))
        ones, column = [1] * (dims(weight) - 1), (*tokens.shape[:-1], 1)
        of_masks = (*ones[:mask_weight_dim], count, *ones[mask_weight_dim:])
        per_mask = mask_weight_dim >= 0 and has_shape(weight, of_masks)
        per_token = has_shape(weight, (*column[:dim], count, *column[dim:]))
        if not per_mask and not per_token:
            return None
        is_number = per_mask and not per_token
        mask_weights = [MaskWeight(weight, is_number, mask_weight_dim if is_number else dim, i) for i in range(count)]
    return bundle(list(map(with_mask_weight, value.items, mask_weights)), dim)


def with_mask_weight(value: Value, mask_weight: MaskWeight) -> Value:
    """A term, or a factor of a term, times a mask weight; None if it already has one."""
    if isinstance(value, Gated):
        if len(value.terms) != 1 or value.terms[0].mask_weight is not None or value.rest is not None:
            return None
        return Gated((replace(value.terms[0], mask_weight=mask_weight),))
    function = function_of(value)
    return function and replace(function, mask_weight=mask_weight)


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
    """The sum of two sums of terms; None if one sum has other users, because that sum is then a layer of its own.

    `left` and `right` hold a node and its value. The node of `right` may be None.
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
    """`stack(terms, -1) @ weights`, with one mask weight (a number) per term."""
    source, weights = call.args
    value = recogniser.value(source)
    if not isinstance(value, Bundle) or value.size is not None or value.dim != dims(source) - 1 or dims(weights) != 1:
        return None
    numbers = [MaskWeight(weights, is_number=True, index=i) for i in range(len(value.items))]
    return joined(recogniser, list(map(with_mask_weight, value.items, numbers)))


def joined(recogniser: Recogniser, parts: Sequence[Value]) -> Gated | None:
    """The sum of several sums, if all terms have one x, one weight and one activation; else None.

    A sum that is added to itself has each term twice. So the number of terms is limited.
    """
    sums = [part for part in parts if isinstance(part, Gated)]
    if len(sums) < len(parts) or sum(len(part.terms) for part in sums) > MOST_ITEMS:
        return None
    terms = tuple(term for part in sums for term in part.terms)
    first, *others = terms
    unit, _ = formulas.unscaled(first.formula)
    alike = (formulas.unscaled(t.formula)[0] == unit and same_operands(recogniser, t.gate, first.gate) for t in others)
    return Gated(terms) if all(alike) else None


def _with_rest(node: Node, gated: Gated, gated_node: Node, rest: Any, *, rest_first: bool) -> Gated | None:
    """A sum of terms plus a residual. Later nodes may add more terms, as in `y = x; y = y + term; y = y + term`.

    The residual may broadcast to the shape of the sum, as a bias does, and may have a narrower dtype than the sum.
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
    """`stack(terms)`, `stack(gates)` and `stack(values)`, if nothing else reads the stacked tensors."""
    items, position = call.args
    dim = dimension(position, node)
    if not isinstance(items, (list, tuple)) or dim is None:
        return None
    parts = [recogniser.value(item) for item in items]
    if not all(isinstance(part, (Projection, Activated, Gated)) for part in parts):
        return None
    if any(isinstance(part, Gated) and part.rest is not None for part in parts):
        return None
    no_other_users = all(len(value_users(item)) == 1 for item in items if isinstance(item, Node))
    return bundle(parts, dim) if no_other_users else None


@rule("sum", "mean")
def sum_of_a_stack(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`terms.sum(0)` and `terms.mean(0)`, along the dimension of the masks."""
    source, dim, keepdim = call.args
    value = recogniser.value(source)
    if not isinstance(value, Bundle) or value.size is not None or dimension(dim, source) != value.dim:
        return None
    if keepdim is not False or dtype_of(node) != dtype_of(source):
        return None
    total = joined(recogniser, value.items)
    return total if call.symbol == "sum" else scaled(total, 1 / len(value.items))
