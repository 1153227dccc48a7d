"""Rules for products of x and a masked weight, `x (M * W)^T`, and for their differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch.fx import Node

from ..recognise import Recogniser
from ..shapes import (
    dimension,
    dims,
    dtype_of,
    equal_sizes,
    has_shape,
    holds,
    holds_experts,
    is_matrix,
    repeated,
    same_shape,
    size,
    tensor_example,
)
from ..symbols import Call
from ..values import (
    BATCHED,
    Binary,
    Bundle,
    Gated,
    Product,
    Projection,
    Scalar,
    Value,
    Weighted,
    combine,
    projection_of,
    same_function,
)
from .bundles import bundle, pairwise
from .rule import rule
from .weight_layouts import rounds_once

# --- Products of x and a weight --------------------------------------------------------------------------------------


@rule("linear", "inner", "matmul", "addmm", "grouped_mm")
def project(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W)`, `x @ W.T`, and `addmm` with a bias of 0; `bmm` and `grouped_mm` with the weights of experts."""
    has_bias, offs = False, None
    if call.symbol == "addmm":
        bias, x, weight, beta = call.args
        has_bias = recogniser.value(bias) != Scalar(0) and beta != 0
    elif call.symbol == "linear":
        x, weight, bias = call.args
        has_bias = bias is not None and recogniser.value(bias) != Scalar(0)
    elif call.symbol == "grouped_mm":
        x, weight, offs = call.args
    else:
        x, weight = call.args
    problem = "the projection adds a bias, which MGLU does not have; add it after the product" if has_bias else None
    upright = call.symbol in ("linear", "inner")
    return projection_at(recogniser, node, x, weight, offs, upright=upright, problem=problem)


def projection_at(
    recogniser: Recogniser,
    node: Node,
    x: Node,
    weight: Node,
    offs: Node | None = None,
    *,
    upright: bool,
    problem: str | None = None,
) -> Value:
    """The product at `node` of x and a weight, whose layout is `[out, in]` if `upright`, else `[in, out]`.

    A weight of three dimensions is one weight of each expert.
    """
    value = recogniser.value(weight)
    if offs is not None and isinstance(value, (Bundle, Product)):
        return None

    def of(weighted: Value) -> Projection | None:
        return projection_by(recogniser, node, x, weight, weighted, upright=upright, problem=problem)

    if isinstance(value, Bundle):
        return _projections(node, x, weight, value, of, upright=upright)
    if isinstance(value, Product):
        if recogniser.key(value.node) in recogniser.masked_weights:  # the elementwise product itself is the weight
            return of(Weighted(value.node, None, value.transposed))
        dtype = dtype_of(node)
        transposed = value.transposed == upright
        return None if dtype is None else Projection(x, value, None, dtype, transposed, problem)
    weighted = recogniser.as_weighted(weight)
    if is_matrix(weight) and offs is None:
        return of(weighted)
    projection = of(weighted) if _multiplies_by_experts(node, x, weight, offs, upright=upright) else None
    is_of_experts = projection is not None and holds_experts(projection.weight)
    return replace(projection, offs=offs) if projection is not None and is_of_experts else None


def _multiplies_by_experts(node: Node, x: Node, weight: Node, offs: Node | None, *, upright: bool) -> bool:
    """Whether each expert multiplies its own rows of x, so that nothing is broadcast: see `Projection`."""
    held, rows = tensor_example(weight), tensor_example(x)
    if held is None or rows is None or held.dim() != 3:
        return False
    experts, *sizes = held.shape
    out_features, in_features = sizes if upright else reversed(sizes)
    leading = rows.shape[:-1]
    is_grouped = offs is not None and len(leading) == 1 and has_shape(offs, (experts,))
    is_batch = offs is None and len(leading) == 2 and equal_sizes(leading[:1], (experts,))
    fits = has_shape(x, (*leading, in_features)) and has_shape(node, (*leading, out_features))
    return (is_grouped or is_batch) and fits


def projection_by(
    recogniser: Recogniser,
    node: Node,
    x: Node,
    weight: Node,
    weighted: Value,
    *,
    upright: bool,
    problem: str | None = None,
) -> Projection | None:
    """The product at `node` of x and `weighted` (a value at node `weight`), if that is a weight masked anywhere."""
    dtype = dtype_of(node)
    if not isinstance(weighted, Weighted) or dtype is None:
        return None
    if recogniser.key(weighted.weight) not in recogniser.masked_weights or not rounds_once(weighted, weight, dtype):
        return None
    transposed = weighted.transposed == upright
    return Projection(x, weighted.weight, weighted.factor, dtype, transposed, problem)


def _projections(
    node: Node, x: Node, weight: Node, value: Bundle, of: Callable[[Value], Projection | None], *, upright: bool
) -> Bundle | None:
    """The products of x and each weight of a bundle.

    Concatenated weights must be concatenated along their output features. Stacked weights `[n, ..., in, out]` are
    multiplied by broadcasting: either x lacks the dimension of the masks, which then comes first in the result, or x is
    repeated along it.
    """
    items = list(map(of, value.items))
    if value.size is not None:
        is_along_outputs = value.dim == (0 if upright else 1)
        return bundle(items, dims(node) - 1, value.size) if is_along_outputs else None
    if value.dim == BATCHED:
        return bundle(items, BATCHED) if dims(weight) == 2 else None
    base, dim = repeated(x)
    if dim is None:
        broadcast = dims(x) + 1 == dims(node) == dims(weight)
        return bundle(items, 0) if broadcast and not upright else None
    # A stack of one weight may be broadcast to an x that is repeated more often.
    if dim != dims(node) - dims(weight) or dims(x) != dims(node) or size(node, dim) != len(value.items):
        return None
    return bundle([item and replace(item, x=base) for item in items], dim)


def same_operands(recogniser: Recogniser, a: Projection, b: Projection) -> bool:
    """Whether two projections multiply the same x and the same weight."""
    return (
        recogniser.key(a.x) == recogniser.key(b.x)
        and recogniser.key(a.offs) == recogniser.key(b.offs)
        and a.transposed == b.transposed
        and recogniser.key(a.weight) == recogniser.key(b.weight)
    )


def same_projection(recogniser: Recogniser, a: Projection, b: Projection) -> bool:
    """Whether two projections hold the same values."""
    same_product = same_operands(recogniser, a, b) and same_function(a.factor, b.factor)
    return same_product and (a.problem, a.dtype) == (b.problem, b.dtype)


# --- The same products in another shape or dtype ---------------------------------------------------------------------


@rule("unflatten", "reshape")
def unflattened(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """Concatenated products `[..., n * d]` as a stack `[..., n, d]`."""
    source, *_ = call.args
    value, before = recogniser.value(source), tensor_example(source)
    if not isinstance(value, Bundle) or projection_of(value) is None or before is None:
        return None
    is_stack = has_shape(node, (*before.shape[:-1], len(value.items), value.size))
    return Bundle(value.items, value.dim) if is_stack else None


@rule("unsqueeze")
def unsqueezed(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W).unsqueeze(1)`, from which a stack is subtracted."""
    source, position = call.args
    value, dim = recogniser.value(source), dimension(position, node)
    return Bundle((value,), dim) if isinstance(value, Projection) and dim is not None else None


@rule("to", "alias", "assert_metadata")
def pass_through(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A part of the layer in a wider dtype. The check of the site compares the projections' dtype with the result's."""
    (source,) = call.args
    value, dtype = recogniser.value(source), dtype_of(node)
    projection = projection_of(value)
    if projection is None or dtype is None or not holds(dtype, projection.dtype):
        return None
    return None if isinstance(value, Gated) and value.rest is not None else value


@rule("remove_batch_dim")
def stack_of_a_vmap(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """What `torch.vmap` over masks returns: a stack of what its function returns for each mask."""
    source, count, dim = call.args
    value, position = recogniser.value(source), dimension(dim, node)
    if not isinstance(value, Bundle) or value.dim != BATCHED or position is None:
        return None
    return bundle(value.items, position) if count == len(value.items) else None


# --- Differences, and masks of output features -----------------------------------------------------------------------


@rule("add", "sub")
def difference_of_projections(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W) - gate`, for one gate or a stack of them."""
    left, right = call.args
    sign = 1 if call.symbol == "add" else -1

    def difference(a: Value, b: Value) -> Value:
        if not isinstance(a, Projection) or not isinstance(b, Projection) or not same_operands(recogniser, a, b):
            return None
        factor = combine(a.factor, b.factor, sign)
        return None if factor is None else replace(a, factor=factor, problem=a.problem or b.problem)

    return pairwise(recogniser, node, left, right, difference)


@rule("mul")
def channels_masked(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W) * m` with one mask bit per output feature: not MGLU, and the check of the site says so."""
    for mask, other in (call.args, tuple(reversed(call.args))):
        factor, projection = recogniser.value(mask), recogniser.value(other)
        if not isinstance(factor, Binary) or not isinstance(projection, Projection) or projection.factor is not None:
            continue
        is_row = dims(mask) == 1 or size(mask, -2) == 1
        if is_row and dims(mask) <= 2 and same_shape(node, other):
            return replace(projection, factor=factor)
    return None
