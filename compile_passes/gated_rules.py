"""Rules for gated products, `act(gate) * value`, their routes, and the sums over masks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from . import formulas
from .projection_rules import function_of, is_column, parse_einsum, same_operands, same_projection
from .recognise import Recogniser, rule
from .symbols import READS_NO_VALUES, Call, as_call, dimension, dims, equal_sizes, same_shape, tensor_example
from .values import (
    Activated,
    Gated,
    Product,
    Projection,
    Route,
    Scalar,
    Stacked,
    Term,
    Value,
    at_index,
    stack_dim_of,
    stack_of,
)

# --- Products --------------------------------------------------------------------------------------------------------


@rule("mul", "div")
def gated_product(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`act(gate) * value`, and either of them, or both, times a route weight."""
    if len(call.args) != 2:
        return None
    left, right = call.args
    a, b = recogniser.value(left), recogniser.value(right)
    if call.symbol == "div":  # `value * g / (1 + exp(-g))`
        divisor = function_of(b)
        inverse = None if divisor is None else formulas.inverse(divisor[0])
        if divisor is None or inverse is None:
            return None
        b = Activated(inverse, divisor[1])
    if isinstance(a, _PARTS) and isinstance(b, _PARTS):
        return times(recogniser, a, b)
    if call.symbol == "mul" and isinstance(a, _PARTS) and b is None:
        return _routed(a, right, node)
    if call.symbol == "mul" and isinstance(b, _PARTS) and a is None:
        return _routed(b, left, node)
    return None


_PARTS = (Projection, Activated, Gated, Stacked)


def times(recogniser: Recogniser, a: Value, b: Value) -> Value:
    """The product of two parts of a layer, of two stacks each with each."""
    length, stack_dim = stack_of(a) or stack_of(b), stack_dim_of(a)
    if length is None or stack_dim is None or stack_dim != stack_dim_of(b):
        return None if length is not None else _times(recogniser, a, b)
    items = [_times(recogniser, at_index(a, i), at_index(b, i)) for i in range(length)]
    gated = tuple(item for item in items if isinstance(item, Gated))
    return Stacked(gated, stack_dim) if len(gated) == length else None


def _times(recogniser: Recogniser, a: Value, b: Value) -> Value:
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
    if term.formula == formulas.VARIABLE and same_projection(recogniser, projection, term.value):
        term = replace(term, gate=term.value, value=term.gate)
    product = formulas.multiply(term.formula, formula)
    if product is None or not same_projection(recogniser, projection, term.gate):
        return None
    return Gated((replace(term, formula=product),))


def _gate_times_value(recogniser: Recogniser, a: Projection | Activated, b: Projection | Activated) -> Gated | None:
    parts = [part if isinstance(part, Activated) else Activated(formulas.VARIABLE, part) for part in (a, b)]
    parts.sort(key=lambda part: part.formula == formulas.VARIABLE)
    first, second = parts
    if second.formula != formulas.VARIABLE or (first.route is not None and second.route is not None):
        return None
    gate, value = first.projection, second.projection
    if first.formula == formulas.VARIABLE and value.factor is not None and value.factor.is_gate(1):
        gate, value = value, gate
    gate, value = _resolve(recogniser, gate, value), _resolve(recogniser, value, gate)
    masked = [isinstance(p.weight, Product) or p.factor is not None for p in (gate, value)]
    if not any(masked) or (not all(masked) and not same_operands(recogniser, gate, value)):
        return None
    if not _factors(recogniser, gate) & _factors(recogniser, value):
        return None
    return Gated((Term(first.formula, gate, value, first.route or second.route),))


def _factors(recogniser: Recogniser, projection: Projection) -> set[Hashable]:
    """What a projection's weight is made of: two gates that share none of it (a pruned SwiGLU) are no MGLU."""
    weight = projection.weight
    parts = [weight.a, weight.b] if isinstance(weight, Product) else [weight]
    masks = [] if projection.factor is None else [projection.factor.mask.key]
    return {*map(recogniser.key, parts), *masks}


def _resolve(recogniser: Recogniser, projection: Projection, other: Projection) -> Projection:
    """Tell weight from mask in `weight * mask`, where the other branch, `weight * (1 - mask)`, has told."""
    product, factor = projection.weight, other.factor
    if not isinstance(product, Product) or not isinstance(other.weight, Node) or factor is None:
        return projection
    for weight, mask in ((product.a, product.b), (product.b, product.a)):
        if recogniser.key(weight) == recogniser.key(other.weight) and recogniser.key(mask) == factor.mask.key:
            return replace(projection, weight=weight, factor=recogniser.as_unproved_mask(mask))
    return projection


def _routed(value: Value, weight: Any, node: Node) -> Value:
    """`r * act(gate) * value` with one number r a token, `[..., 1]`, or one a token and mask of a stack."""
    length, stack_dim = stack_of(value), stack_dim_of(value)
    if length is not None and stack_dim is not None:
        return _routed_stack(value, weight, node, length, stack_dim)
    part: Value = Activated(formulas.VARIABLE, value) if isinstance(value, Projection) else value
    x = _x_of(part)
    if x is None or not isinstance(weight, Node) or not is_column(weight, x, node):
        return None
    return _with_route(part, Route(weight))


def _routed_stack(value: Value, weight: Any, node: Node, length: int, stack_dim: int) -> Value:
    x, route, result = _x_of(value), tensor_example(weight), tensor_example(node)
    tokens = tensor_example(x)
    if route is None or tokens is None or result is None or not route.dtype.is_floating_point:
        return None
    wanted = [*tokens.shape[:-1], 1]
    wanted.insert(stack_dim, length)
    if not equal_sizes(route.shape, wanted) or result.dim() != route.dim():
        return None
    if not isinstance(value, Stacked):
        part = Activated(formulas.VARIABLE, value) if isinstance(value, Projection) else value
        return _with_route(part, Route(weight, stack_dim))
    items = [_with_route(item, Route(weight, stack_dim, i)) for i, item in enumerate(value.items)]
    gated = tuple(item for item in items if isinstance(item, Gated))
    return replace(value, items=gated) if len(gated) == length else None


def _x_of(value: Value) -> Node | None:
    if isinstance(value, Stacked):
        value = value.items[0]
    if isinstance(value, Gated):
        return value.terms[0].gate.x
    return value.projection.x if isinstance(value, Activated) else value.x if isinstance(value, Projection) else None


def _with_route(value: Value, route: Route) -> Value:
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


@rule("add")
def sum_of_terms(recogniser: Recogniser, node: Node, call: Call) -> Value:
    if len(call.args) != 2 or call.kwargs.get("alpha", 1) != 1:
        return None
    left, right = call.args
    a, b = recogniser.value(left), recogniser.value(right)
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


def _joined(recogniser: Recogniser, parts: Sequence[Gated]) -> Gated | None:
    """All terms of some sums, if they are those of one layer."""
    terms = tuple(term for part in parts for term in part.terms)
    first = terms[0]
    alike = all(t.formula == first.formula and same_operands(recogniser, t.gate, first.gate) for t in terms)
    return Gated(terms) if alike else None


def _with_rest(node: Node, gated: Gated, gated_node: Node, rest: Any) -> Gated | None:
    """A sum of terms plus something else, to which more terms may come: `y = x; y = y + term; y = y + term`."""
    if gated.rest is not None or not isinstance(rest, Node) or "iadd" in str(node.target) or "add_" in str(node.target):
        return None
    result, other = tensor_example(node), tensor_example(rest)
    if result is None or other is None or result.dtype != other.dtype or not same_shape(node, gated_node, rest):
        return None
    return replace(gated, rest=rest, whole=gated_node)


@rule("stack")
def stacked(recogniser: Recogniser, node: Node, call: Call) -> Value:
    items = call.get(0, "tensors")
    if not isinstance(items, (list, tuple)):
        return None
    values = [recogniser.value(item) for item in items]
    gated = tuple(value for value in values if isinstance(value, Gated) and value.rest is None)
    dim = dimension(call.get(1, "dim", 0), node)
    alone = all(len(value_users(item)) == 1 for item in items if isinstance(item, Node))
    return Stacked(gated, dim) if len(gated) == len(items) and dim is not None and alone else None


@rule("sum")
def sum_of_a_stack(recogniser: Recogniser, node: Node, call: Call) -> Value:
    source = call.get(0, "input")
    value, dim = recogniser.value(source), dimension(call.get(1, "dim", call.kwargs.get("axis")), source)
    if not isinstance(value, Stacked) or dim != value.stack_dim or call.get(2, "keepdim", False):
        return None
    return None if call.kwargs.get("dtype") is not None else _joined(recogniser, value.items)


@rule("einsum")
def einsum_of_a_stack(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`einsum("nbd,nbd,bn->bd", act(gates), values, route)`: the product, the route weights and the sum at once."""
    parsed = parse_einsum(call)
    if parsed is None:
        return None
    operands, output = parsed
    parts = [(axes, recogniser.value(operand), operand) for axes, operand in operands]
    stacks = [(axes, value) for axes, value, _ in parts if stack_of(value) is not None]
    routes = [(axes, operand) for axes, value, operand in parts if stack_of(value) is None]
    if not stacks or len(routes) > 1 or len(stacks) + len(routes) != len(parts):
        return None
    axes, product = stacks[0]
    for other_axes, other in stacks[1:]:
        product = times(recogniser, product, other) if other_axes == axes else None
    if not isinstance(product, Stacked) or output != axes[: product.stack_dim] + axes[product.stack_dim + 1 :]:
        return None
    items = list(product.items)
    for route_axes, route in routes:
        masks = axes[product.stack_dim]
        if masks not in route_axes or route_axes.replace(masks, "") != output[:-1]:
            return None
        column = Route(route, route_axes.index(masks))
        routed = [_with_route(item, replace(column, index=i)) for i, item in enumerate(items)]
        items = [item for item in routed if isinstance(item, Gated)]
    if len(items) != len(product.items) or dims(node) != len(output):
        return None
    return _joined(recogniser, items)
