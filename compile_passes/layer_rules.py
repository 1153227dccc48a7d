"""Rules for layers: masked weights, their projections, activations, gated products, and sums of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from .mask_algebra import checked, combine, multiply
from .rules import rule
from .symbols import Call, equal_sizes, is_matrix, same_shape, tensor_example
from .values import Activated, Binary, Gated, Product, Projection, Scalar, Stacked, Term, Value, Weighted

if TYPE_CHECKING:
    from .recognise import Recogniser


# --- Masked weights ------------------------------------------------------------------------------------------------


@rule("mul")
def masked_weight(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`W * M`, and `W * m` of which nothing tells yet which is the mask."""
    if len(call.args) != 2:
        return None
    for mask, weight in (call.args, tuple(reversed(call.args))):
        factor = recogniser.value(mask)
        if isinstance(factor, Binary):
            return _apply_mask(recogniser, node, factor, weight)
    left, right = call.args
    both_unknown = recogniser.value(left) is None and recogniser.value(right) is None
    return Product(left, right) if both_unknown and _is_real_matrix(left) and _is_real_matrix(right) else None


def _is_real_matrix(argument: Any) -> bool:
    example = tensor_example(argument)
    return is_matrix(argument) and example is not None and example.dtype is not torch.bool


def _upright(weighted: Weighted | None, argument: Any) -> Weighted | None:
    """`weighted` as it lies at its node, as a mask of it must: a transposed weight is a weight of its own."""
    if weighted is None or not weighted.transposed:
        return weighted
    return Weighted(argument, None) if weighted.factor is None else None


def _apply_mask(recogniser: Recogniser, node: Node, mask: Binary, argument: Any) -> Weighted | None:
    weighted = _upright(recogniser.as_weighted(argument), argument)
    if weighted is None or not same_shape(node, argument):
        return None
    factor = mask if weighted.factor is None else multiply(mask, weighted.factor)
    return None if factor is None else replace(weighted, factor=factor)


@rule("add", "sub")
def difference_of_weights(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`W - W * M`."""
    if len(call.args) != 2 or call.kwargs.get("alpha", 1) != 1:
        return None
    left, right = call.args
    a, b = recogniser.as_weighted(left), recogniser.as_weighted(right)
    if a is not None and b is not None and a.transposed != b.transposed:
        a, b = _upright(a, left), _upright(b, right)
    if a is None or b is None or a.transposed != b.transposed or (a.factor is None and b.factor is None):
        return None
    if recogniser.key(a.weight) != recogniser.key(b.weight):
        return None
    factor = combine(a.factor, b.factor, 1 if call.symbol == "add" else -1)
    return None if factor is None else replace(a, factor=factor)


@rule("where")
def _where(recogniser: Recogniser, node: Node, call: Call) -> Value:
    if len(call.args) != 3:
        return None
    condition, if_true, if_false = call.args
    if call.symbol == "where" and node.op == "call_method":
        condition, if_true = if_true, condition
    return _choose(recogniser, node, recogniser.value(condition), if_true, if_false)


@rule("masked_fill")
def _masked_fill(recogniser: Recogniser, node: Node, call: Call) -> Value:
    if len(call.args) != 3:
        return None
    tensor, mask, fill = call.args
    return _choose(recogniser, node, recogniser.value(mask), fill, tensor)


def _choose(recogniser: Recogniser, node: Node, condition: Value, if_true: Any, if_false: Any) -> Value:
    """`where(M, W, 0)` and its like: a weight, or numbers, chosen by a mask."""
    if not isinstance(condition, Binary):
        return None
    values = [recogniser.value(if_true), recogniser.value(if_false)]
    branches = [if_true, if_false]
    coefficients = [value.value if isinstance(value, Scalar) else 1.0 for value in values]
    picked = [coefficients[0] if at else coefficients[1] for at in condition.at]
    factor = Binary(condition.mask, at=(picked[0], picked[1]), slope=(0, 0))
    if all(isinstance(value, Scalar) for value in values):
        return checked(node, factor)
    weights = [branch for branch, value in zip(branches, values, strict=True) if not isinstance(value, Scalar)]
    weighted = _upright(recogniser.as_weighted(weights[0]), weights[0])
    if len(weights) != 1 or weighted is None or weighted.factor is not None or not same_shape(node, weights[0]):
        return None
    return replace(weighted, factor=factor) if 0.0 in coefficients else None


@rule("to", "alias")
def pass_through(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A change of dtype or device, or a copy, that loses no more than the layer itself does.

    A part of the layer may be widened and taken back (the site compares the dtypes of projections and result); a
    weight may be cast once, as the operator casts it.
    """
    value, source, result = recogniser.value(call.get(0, "input")), call.get(0, "input"), tensor_example(node)
    if isinstance(value, Weighted) and result is not None:
        return value if _rounds_once(value, source, result.dtype) else None
    projection = _projection_of(value)
    if projection is None or result is None or not _holds(result.dtype, projection.dtype):
        return None
    return value


def _projection_of(value: Value) -> Projection | None:
    if isinstance(value, Gated):
        return value.terms[0].gate
    return value.projection if isinstance(value, Activated) else value if isinstance(value, Projection) else None


def _rounds_once(weighted: Weighted, node: Any, dtype: torch.dtype) -> bool:
    """Whether a masked weight, at `node`, cast to `dtype` is what casting the weight itself gives."""
    weight, source = tensor_example(weighted.weight), tensor_example(node)
    if weight is None or source is None or not dtype.is_floating_point:
        return False
    return source.dtype == weight.dtype or _holds(source.dtype, dtype)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether `wide` represents every value of `narrow`."""
    return torch.promote_types(wide, narrow) == wide


# --- Projections -----------------------------------------------------------------------------------------------------


@rule("add", "sub")
def difference_of_projections(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W) - gate`."""
    if len(call.args) != 2 or call.kwargs.get("alpha", 1) != 1:
        return None
    a, b = (recogniser.value(argument) for argument in call.args)
    if not isinstance(a, Projection) or not isinstance(b, Projection):
        return None
    if not _same_operands(recogniser, a, b) or (a.factor is None and b.factor is None):
        return None
    factor = combine(a.factor, b.factor, 1 if call.symbol == "add" else -1)
    return None if factor is None else replace(a, factor=factor, problem=a.problem or b.problem)


def _same_operands(recogniser: Recogniser, a: Projection, b: Projection) -> bool:
    return (
        recogniser.key(a.x) == recogniser.key(b.x)
        and a.transposed == b.transposed
        and isinstance(a.weight, Node)
        and isinstance(b.weight, Node)
        and recogniser.key(a.weight) == recogniser.key(b.weight)
    )


@rule("getattr", "transpose")
def _transpose(recogniser: Recogniser, node: Node, call: Call) -> Value:
    value = recogniser.value(call.get(0, "input"))
    weighted = value if isinstance(value, Product) else recogniser.as_weighted(call.get(0, "input"))
    if weighted is None:
        return None
    if call.symbol == "getattr":
        swaps = call.args[1] in ("T", "mT")
    else:
        first, second = call.get(1, "dim0", 0), call.get(2, "dim1", 1)
        swaps = isinstance(first, int) and isinstance(second, int) and first % 2 != second % 2
    return replace(weighted, transposed=not weighted.transposed) if swaps else None


@rule("linear", "matmul")
def _project(recogniser: Recogniser, node: Node, call: Call) -> Value:
    x, weight = call.get(0, "input"), call.get(1, "weight" if call.symbol == "linear" else "other")
    bias = call.get(2, "bias") if call.symbol == "linear" else None
    if not isinstance(x, Node) or not isinstance(weight, Node):
        return None
    problem = None if bias is None else "the projection adds a bias, which MGLU does not have; add it after the product"
    product, result = recogniser.value(weight), tensor_example(node)
    if result is None:
        return None
    if isinstance(product, Product):
        stored_in_first = product.transposed == (call.symbol == "linear")
        return Projection(x, product, None, result.dtype, transposed=stored_in_first, problem=problem)
    weighted = recogniser.as_weighted(weight)
    if weighted is None or not _rounds_once(weighted, weight, result.dtype):
        return None
    stored_in_first = weighted.transposed == (call.symbol == "linear")
    return Projection(x, weighted.weight, weighted.factor, result.dtype, transposed=stored_in_first, problem=problem)


@rule("silu", "relu", "sigmoid", "tanh", "gelu")
def _activation(recogniser: Recogniser, node: Node, call: Call) -> Value:
    value = recogniser.value(call.get(0, "input"))
    if not isinstance(value, Projection):
        return None
    name = call.symbol
    if name == "gelu" and call.get(1, "approximate", "none") == "tanh":
        name = "gelu_tanh"
    return Activated(name, value)


@rule("dropout")
def _dropout(recogniser: Recogniser, node: Node, call: Call) -> Value:
    value = recogniser.value(call.get(0, "input"))
    if not call.get(2, "training" if node.target is not torch.ops.aten.dropout.default else "train", True):
        return value
    problem = "dropout stands between the projection and the product"
    if isinstance(value, Projection):
        return replace(value, problem=value.problem or problem)
    if isinstance(value, Activated):
        return replace(value, projection=replace(value.projection, problem=problem))
    return None


# --- Gated products and their sums -----------------------------------------------------------------------------------


@rule("mul")
def gated_product(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`act(gate) * value`, and either of them, or both, times a route weight."""
    if len(call.args) != 2:
        return None
    left, right = call.args
    a, b = recogniser.value(left), recogniser.value(right)
    if isinstance(a, (Activated, Projection)) and isinstance(b, (Activated, Projection)):
        return _gate_times_value(recogniser, a, b)
    if isinstance(a, (Activated, Gated)):
        return _route(recogniser, node, a, right)
    if isinstance(b, (Activated, Gated)):
        return _route(recogniser, node, b, left)
    return None


def _route(recogniser: Recogniser, node: Node, value: Activated | Gated, weight: Any) -> Value:
    """`r * act(gate) * value` with one number r a token, `[..., 1]`."""
    term = value.terms[0] if isinstance(value, Gated) else value
    projection = term.gate if isinstance(term, Term) else term.projection
    r, x, result = tensor_example(weight), tensor_example(projection.x), tensor_example(node)
    if r is None or x is None or result is None or recogniser.value(weight) is not None:
        return None
    if not r.dtype.is_floating_point or not equal_sizes(r.shape, (*x.shape[:-1], 1)) or result.dim() != x.dim():
        return None
    if term.route is not None or (isinstance(value, Gated) and len(value.terms) > 1):
        return None
    routed = replace(term, route=weight)
    return Gated((routed,)) if isinstance(routed, Term) else routed


def _gate_times_value(recogniser: Recogniser, a: Activated | Projection, b: Activated | Projection) -> Value:
    if isinstance(b, Activated):
        a, b = b, a
    if isinstance(b, Activated):
        return None
    if isinstance(a, Activated):
        if (
            a.route is None
            and a.activation == "sigmoid"
            and _same_operands(recogniser, a.projection, b)
            and a.projection.factor == b.factor
            and a.projection.problem == b.problem
        ):
            return Activated("silu", b)
        activation, gate, value, route = a.activation, a.projection, b, a.route
    else:
        activation, gate, value, route = "identity", a, b, None
        if value.factor is not None and value.factor.is_gate(1):
            gate, value = value, gate
    gate, value = _resolve(recogniser, gate, value), _resolve(recogniser, value, gate)
    masked = [isinstance(p.weight, Product) or p.factor is not None for p in (gate, value)]
    if not any(masked) or (not all(masked) and not _same_operands(recogniser, gate, value)):
        return None
    if not _factors(recogniser, gate) & _factors(recogniser, value):
        return None
    return Gated((Term(activation, gate, value, route),))


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


@rule("add")
def sum_of_terms(recogniser: Recogniser, node: Node, call: Call) -> Value:
    if len(call.args) != 2 or call.kwargs.get("alpha", 1) != 1:
        return None
    left, right = call.args
    a, b = recogniser.value(left), recogniser.value(right)
    if not isinstance(a, Gated) and not isinstance(b, Gated):
        return None
    return _add_gated(recogniser, node, (left, a), (right, b))


def _add_gated(recogniser: Recogniser, node: Node, left: tuple[Any, Value], right: tuple[Any, Value]) -> Gated | None:
    """A longer sum. A partial sum that someone else uses too stays a layer of its own."""
    terms: tuple[Term, ...] = ()
    for argument, value in (left, right):
        if isinstance(value, Gated):
            if len(argument.users) > 1 or not same_shape(node, argument):
                return None
            terms += value.terms
        elif value != Scalar(0):
            return None
    first = terms[0]
    for term in terms[1:]:
        if term.activation != first.activation or not _same_operands(recogniser, term.gate, first.gate):
            return None
    return Gated(terms)


@rule("stack")
def _stack(recogniser: Recogniser, node: Node, call: Call) -> Value:
    items = call.get(0, "tensors")
    if not isinstance(items, (list, tuple)) or not all(isinstance(recogniser.value(i), Gated) for i in items):
        return None
    return Stacked(tuple(items), dim=call.get(1, "dim", 0))


@rule("sum")
def _sum(recogniser: Recogniser, node: Node, call: Call) -> Value:
    stacked = recogniser.value(call.get(0, "input"))
    dim = call.get(1, "dim")
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    if not isinstance(stacked, Stacked) or list(dims) != [stacked.dim] or call.get(2, "keepdim", False):
        return None
    if call.kwargs.get("dtype") is not None:
        return None
    total: Value = Scalar(0)
    for item in stacked.items:
        total = _add_gated(recogniser, item, (node, total), (item, recogniser.value(item)))
        if total is None:
            return None
    return total
