"""Rules for gated products, `act(gate) * value`, their weights, and the sums over masks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from .. import formulas
from ..recognise import Recogniser, layer_rule
from ..shapes import broadcasts_to, dimension, dims, dtype_of, equal_sizes, same_shape, size, tensor_example
from ..symbols import READS_NO_VALUES, Call, as_call
from ..values import (
    Activated,
    Bundle,
    Gated,
    Product,
    Projection,
    Route,
    Scalar,
    Term,
    Value,
)
from .projections import function_of, is_column, pairwise, parse_einsum, projection_of, same_operands, same_projection
from .weights import bundle

_PARTS = (Projection, Activated, Gated, Bundle)

# --- Products --------------------------------------------------------------------------------------------------------


@layer_rule("mul", "div")
def gated_product(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`act(gate) * value`, and either of them, or both, times a route weight or a number."""
    left, right = call.args
    a, b = recogniser.value(left), recogniser.value(right)
    if isinstance(a, _PARTS) and isinstance(b, _PARTS):
        divides = call.symbol == "div"  # `value * g / (1 + exp(-g))`
        return pairwise(
            recogniser, node, left, right, lambda x, y: _times(recogniser, x, _inverse(y) if divides else y)
        )
    if isinstance(a, _PARTS) and isinstance(b, Scalar) and same_shape(node, left):
        inverse = 1 / b.value if call.symbol == "div" and b.value else None
        return _scaled(a, b.value if call.symbol == "mul" else inverse)
    if call.symbol == "div":
        return None
    if isinstance(b, _PARTS) and isinstance(a, Scalar) and same_shape(node, right):
        return _scaled(b, a.value)
    if isinstance(a, _PARTS):
        return _routed(a, left, right, node)
    return _routed(b, right, left, node) if isinstance(b, _PARTS) else None


def _inverse(value: Value) -> Value:
    function = function_of(value)
    formula = None if function is None else formulas.inverse(function[0])
    return None if function is None or formula is None else Activated(formula, function[1])


def _times(recogniser: Recogniser, a: Value, b: Value) -> Value:
    """The product of two parts of a layer."""
    if isinstance(b, Gated):
        a, b = b, a
    if isinstance(a, Gated):
        return _gated_times(recogniser, a, b)
    if isinstance(a, (Projection, Activated)) and isinstance(b, (Projection, Activated)):
        return _gate_times_value(recogniser, a, b)
    return None


def _gated_times(recogniser: Recogniser, gated: Gated, other: Value) -> Gated | None:
    """`(g * v) * sigmoid(g)`: the rest of a hand-written activation."""
    function = function_of(other)
    if function is None or len(gated.terms) != 1 or gated.rest is not None:
        return None
    (term,), (formula, projection) = gated.terms, function
    if formulas.unscaled(term.formula)[0] == formulas.VARIABLE and same_projection(recogniser, projection, term.value):
        term = replace(term, gate=term.value, value=term.gate)
    product = formulas.multiply(term.formula, formula)
    if product is None or not same_projection(recogniser, projection, term.gate):
        return None
    return Gated((replace(term, formula=product),))


def _gate_times_value(recogniser: Recogniser, a: Projection | Activated, b: Projection | Activated) -> Gated | None:
    parts = [part if isinstance(part, Activated) else Activated(formulas.VARIABLE, part) for part in (a, b)]
    parts.sort(key=lambda part: formulas.unscaled(part.formula)[0] == formulas.VARIABLE)
    first, second = parts
    linear, scale = formulas.unscaled(second.formula)
    if linear != formulas.VARIABLE or (first.route is not None and second.route is not None):
        return None
    gate, value = first.projection, second.projection
    is_symmetric = formulas.unscaled(first.formula)[0] == formulas.VARIABLE
    if is_symmetric and value.factor is not None and value.factor.is_gate(1):
        gate, value = value, gate
    masked = [isinstance(p.weight, Product) or p.factor is not None for p in (gate, value)]
    if not any(masked) or (not all(masked) and not same_operands(recogniser, gate, value)):
        return None
    if not _factors(recogniser, gate) & _factors(recogniser, value):
        return None
    formula = formulas.scaled(first.formula, scale)
    return None if formula is None else Gated((Term(formula, gate, value, first.route or second.route),))


def _factors(recogniser: Recogniser, projection: Projection) -> set[Hashable]:
    """What a projection's weight is made of: two gates that share none of it (a pruned SwiGLU) are no MGLU."""
    weight = projection.weight
    parts = [weight.a, weight.b] if isinstance(weight, Product) else [weight]
    masks = [] if projection.factor is None else [projection.factor.mask.key]
    return {*map(recogniser.key, parts), *masks}


# --- Weights of terms ------------------------------------------------------------------------------------------------


def _scaled(value: Value, factor: float | None) -> Value:
    """`0.5 * term`, and of a part of one, or of each in a bundle."""
    if factor is None or factor == 0:
        return None
    if isinstance(value, Bundle):
        return bundle([_scaled(item, factor) for item in value.items], value.dim, value.size)
    if isinstance(value, Gated) and value.rest is None:
        formulas_of_terms = [formulas.scaled(term.formula, factor) for term in value.terms]
        known = [formula for formula in formulas_of_terms if formula is not None]
        terms = tuple(replace(term, formula=formula) for term, formula in zip(value.terms, known, strict=False))
        return Gated(terms) if len(known) == len(value.terms) else None
    if isinstance(value, Activated):  # (that of a function without a route is one more step of its formula)
        formula = formulas.scaled(value.formula, factor)
        return None if formula is None else replace(value, formula=formula)
    return None


def _routed(value: Value, part: Any, weight: Any, node: Node) -> Value:
    """`r * act(gate) * value` with one number r a token, or one for all, or one a token and mask of a stack."""
    projection = projection_of(value)
    if not isinstance(weight, Node) or projection is None or not same_shape(node, part):
        return None
    route_dtype = dtype_of(weight)
    if route_dtype is None or not route_dtype.is_floating_point:
        return None
    if isinstance(value, Bundle) and value.size is None:
        return _routed_stack(value, projection, weight, node)
    if _is_number(weight):
        return _with_route(value, Route(weight, is_number=True))
    return _with_route(value, Route(weight)) if is_column(weight, projection.x, node) else None


def _is_number(node: Node) -> bool:
    """Whether a tensor has one element: a learned scale."""
    example = tensor_example(node)
    return example is not None and all(isinstance(n, int) and n == 1 for n in example.shape)


def _routed_stack(value: Bundle, projection: Projection, weight: Node, node: Node) -> Value:
    """Terms with weights in a tensor with their dimension: one a token and mask, or one a mask."""
    route, tokens = tensor_example(weight), tensor_example(projection.x)
    count, dim = len(value.items), value.dim
    if route is None or tokens is None or dims(node) != len(tokens.shape) + 1:
        return None
    if _is_number(weight) and count != 1:
        routes = [Route(weight, is_number=True)] * count
    else:
        place = dim - (dims(node) - route.dim())
        ones = [1] * (route.dim() - 1)
        a_mask = place >= 0 and equal_sizes(route.shape, (*ones[:place], count, *ones[place:]))
        a_token = equal_sizes(route.shape, (*(*tokens.shape[:-1], 1)[:dim], count, *(*tokens.shape[:-1], 1)[dim:]))
        if not a_mask and not a_token:
            return None
        is_number = a_mask and not a_token
        routes = [Route(weight, is_number, place if is_number else dim, i) for i in range(count)]
    return bundle([_with_route(item, one) for item, one in zip(value.items, routes, strict=True)], dim)


def _with_route(value: Value, route: Route) -> Value:
    if isinstance(value, Projection):
        value = Activated(formulas.VARIABLE, value)
    if isinstance(value, Gated):
        if len(value.terms) != 1 or value.terms[0].route is not None or value.rest is not None:
            return None
        return Gated((replace(value.terms[0], route=route),))
    return replace(value, route=route) if isinstance(value, Activated) and value.route is None else None


# --- Sums ------------------------------------------------------------------------------------------------------------


def value_users(node: Node) -> list[Node]:
    """The users of a node that read its values, not its shape alone."""
    calls = {user: as_call(user) for user in node.users}
    return [user for user, call in calls.items() if call is None or call.symbol not in READS_NO_VALUES]


@layer_rule("add")
def sum_of_terms(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`y + term`, where y is a sum so far, 0, or something else."""
    left, right = call.args
    a, b = recogniser.value(left), recogniser.value(right)
    if isinstance(a, Bundle) and isinstance(b, Bundle):
        return None
    if isinstance(a, Gated) and isinstance(b, Gated):
        longer = _longer_sum(recogniser, node, (left, a), (right, b))
        return longer if longer is not None else _with_rest(node, b, right, left)
    if isinstance(b, Gated):
        return _plus_zero(node, b, right) if a == Scalar(0) else _with_rest(node, b, right, left)
    if isinstance(a, Gated):
        return _plus_zero(node, a, left) if b == Scalar(0) else _with_rest(node, a, left, right)
    return None


def _plus_zero(node: Node, gated: Gated, gated_node: Node) -> Gated | None:
    return gated if len(value_users(gated_node)) == 1 and same_shape(node, gated_node) else None


def _longer_sum(
    recogniser: Recogniser, node: Node, left: tuple[Node, Gated], right: tuple[Node, Gated]
) -> Gated | None:
    """The sum of two. A partial sum that someone else uses too stays a layer of its own."""
    (a_node, a), (b_node, b) = left, right
    if any(len(value_users(n)) > 1 or not same_shape(node, n) for n in (a_node, b_node)) or (a.rest and b.rest):
        return None
    joined = _joined(recogniser, [a, b])
    return None if joined is None else replace(joined, rest=a.rest or b.rest)


def _joined(recogniser: Recogniser, parts: Sequence[Value]) -> Gated | None:
    """All terms of some sums, if they are those of one layer."""
    sums = [part for part in parts if isinstance(part, Gated)]
    terms = tuple(term for part in sums for term in part.terms)
    if not terms or len(sums) < len(parts):
        return None
    first = terms[0]
    unit = formulas.unscaled(first.formula)[0]
    alike = all(
        formulas.unscaled(term.formula)[0] == unit and same_operands(recogniser, term.gate, first.gate)
        for term in terms[1:]
    )
    return Gated(terms) if alike else None


def _with_rest(node: Node, gated: Gated, gated_node: Node, rest: Any) -> Gated | None:
    """A sum of terms plus something else, to which more terms may come: `y = x; y = y + term; y = y + term`.

    What is added may be of a shape that is broadcast to the sum's, such as a bias.
    """
    if gated.rest is not None or not isinstance(rest, Node) or "iadd" in str(node.target) or "add_" in str(node.target):
        return None
    if dtype_of(node) is None or dtype_of(node) != dtype_of(rest) or not same_shape(node, gated_node):
        return None
    return replace(gated, rest=rest, whole=gated_node) if broadcasts_to(rest, node) else None


@layer_rule("sub")
def difference_of_terms(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`y - term`."""
    left, right = call.args
    a, b = recogniser.value(left), _scaled(recogniser.value(right), -1)
    if not isinstance(a, Gated) or not isinstance(b, Gated):
        return None
    return _longer_sum(recogniser, node, (left, a), (right, b))


@layer_rule("neg")
def negated_term(recogniser: Recogniser, node: Node, call: Call) -> Value:
    value = recogniser.value(call.args[0])
    return _scaled(value, -1) if isinstance(value, Gated) else None


@layer_rule("stack")
def stacked_terms(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`stack(terms)`, and of gates or values."""
    items, dim = call.args[0], dimension(call.args[1], node)
    if not isinstance(items, (list, tuple)) or dim is None:
        return None
    values = [recogniser.value(item) for item in items]
    if not all(isinstance(value, (Projection, Activated, Gated)) for value in values):
        return None
    if any(isinstance(value, Gated) and value.rest is not None for value in values):
        return None
    alone = all(len(value_users(item)) == 1 for item in items if isinstance(item, Node))
    return bundle(values, dim) if alone else None


@layer_rule("sum", "mean")
def sum_of_a_stack(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`terms.sum(0)` and `terms.mean(0)` along the dimension of the masks."""
    source, dim, keepdim = call.args
    value = recogniser.value(source)
    is_stack = isinstance(value, Bundle) and value.size is None and dimension(dim, source) == value.dim
    if not is_stack or not isinstance(value, Bundle) or keepdim is not False or dtype_of(node) != dtype_of(source):
        return None
    joined = _joined(recogniser, value.items)
    return joined if call.symbol == "sum" else _scaled(joined, 1 / len(value.items))


@layer_rule("einsum")
def einsum_of_a_stack(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`einsum("nbd,nbd,bn->bd", act(gates), values, route)`: the product, the route weights and the sum at once."""
    parsed = parse_einsum(call)
    if parsed is None:
        return None
    operands, output = parsed
    parts = [(axes, recogniser.value(operand), operand) for axes, operand in operands]
    stacks = [(axes, value) for axes, value, _ in parts if isinstance(value, Bundle) and value.size is None]
    routes = [(axes, operand) for axes, value, operand in parts if not isinstance(value, Bundle)]
    if not stacks or len(routes) > 1 or len(stacks) + len(routes) != len(parts) or dims(node) != len(output):
        return None
    axes, first = stacks[0]
    if output != axes[: first.dim] + axes[first.dim + 1 :]:
        return None
    items: list[Value] = list(first.items)
    for other_axes, other in stacks[1:]:
        if other_axes != axes or other.dim != first.dim or len(other.items) != len(items):
            return None
        items = [_times(recogniser, a, b) for a, b in zip(items, other.items, strict=True)]
    for route_axes, route in routes:
        masks = axes[first.dim]
        if route_axes not in (masks, *_insertions(output[:-1], masks)) or size(route, route_axes.index(masks)) is None:
            return None
        column = Route(route, route_axes == masks and len(output) > 1, route_axes.index(masks))
        items = [_with_route(item, replace(column, index=i)) for i, item in enumerate(items)]
    return _joined(recogniser, items)


def _insertions(axes: str, letter: str) -> list[str]:
    return [axes[:i] + letter + axes[i:] for i in range(len(axes) + 1)]
