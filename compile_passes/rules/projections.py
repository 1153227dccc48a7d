"""Rules for products of x and a masked weight, `x (M * W)^T`, and for differences of such products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import shapes, values
from ..recognise import Recogniser
from ..shapes import dimension, dims, dtype_of, equal_sizes, has_shape, is_matrix, same_shape, size, tensor_example
from ..symbols import Call
from ..values import Activated, Binary, Bundle, Gated, Interleaved, Product, Projection, Scalar, Value, Weighted
from ..weight_formats import is_decoded
from .base import bundle, each, pairwise, rule
from .weights import rounds_once, swaps_last_two

# --- Products of x and a weight --------------------------------------------------------------------------------------


BIAS = (
    "the projection adds a bias to the gate or to the value, where the operator has none; a bias that is added to "
    "act(gate) * value is fused, but it makes another model"
)


@rule("linear", "inner", "matmul", "addmm", "grouped_mm")
def project(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W)`, `x @ W.T`, `addmm` with a bias of 0, and `bmm` or `grouped_mm` with the weights of experts."""
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
        is_swapped = call.symbol == "matmul" and is_matrix(x) and is_matrix(weight) and _is_masked(recogniser, x)
        if is_swapped and not _is_masked(recogniser, weight):
            return _swapped(recogniser, node, x, weight)
    product = projection_at(recogniser, node, x, weight, offs, upright=call.symbol in ("linear", "inner"))
    return with_problem(product, BIAS) if has_bias else product


def _is_masked(recogniser: Recogniser, argument: Node) -> bool:
    """True if an argument is a weight that is masked somewhere in the graph."""
    weighted = recogniser.as_weighted(argument)
    return weighted is not None and recogniser.key(weighted.weight) in recogniser.masked_weights


def _swapped(recogniser: Recogniser, node: Node, weight: Node, x: Node) -> Projection | None:
    """`(W * M) @ x.T`, the transpose of `x (W * M)^T`."""
    inner = recogniser.through(x)
    is_transpose = inner is not None and swaps_last_two(inner)
    rows = inner.args[0] if inner is not None and is_transpose else recogniser.imagine(node, torch.t, x)
    projection = projection_by(recogniser, node, rows, weight, recogniser.as_weighted(weight), upright=True)
    return projection and replace(projection, swapped=True)


def projection_at(
    recogniser: Recogniser, node: Node, x: Node, weight: Node, offs: Node | None = None, *, upright: bool
) -> Value:
    """The product at `node` of x and a weight. The weight is `[out, in]` if `upright`, else `[in, out]`.

    A weight of three dimensions holds one weight per expert.
    """
    value = recogniser.value(weight)
    if offs is not None and isinstance(value, (Bundle, Product, Interleaved)):
        return None

    def project_by(weighted: Value) -> Projection | None:
        return projection_by(recogniser, node, x, weight, weighted, upright=upright)

    if isinstance(value, Interleaved):
        products = [product for item in value.items if upright and (product := project_by(item)) is not None]
        return Interleaved(tuple(products), dims(node) - 1) if len(products) == len(value.items) else None
    if isinstance(value, Bundle):
        return _projections(node, x, weight, value, project_by, upright=upright)
    if isinstance(value, Product):
        if recogniser.key(value.node) in recogniser.masked_weights:  # the product `a * b` itself is the weight
            return project_by(Weighted(value.node, None, value.transposed))
        dtype = dtype_of(node)
        return None if dtype is None else Projection(x, value, None, dtype, value.transposed == upright)
    weighted = recogniser.as_weighted(weight)
    if weighted is not None and weighted.factor is not None and recogniser.key(weight) in recogniser.masked_weights:
        weighted = Weighted(weight, None)  # it is masked again: one mask has pruned the weight
    if is_matrix(weight) and offs is None:
        return project_by(weighted)
    projection = project_by(weighted) if _multiplies_by_experts(node, x, weight, offs, upright=upright) else None
    is_of_experts = projection is not None and shapes.holds_experts(projection.weight)
    return replace(projection, offs=offs) if projection is not None and is_of_experts else None


def _multiplies_by_experts(node: Node, x: Node, weight: Node, offs: Node | None, *, upright: bool) -> bool:
    """True if each expert multiplies its own rows of x, as `Projection` describes, and nothing is broadcast."""
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
    recogniser: Recogniser, node: Node, x: Node, weight: Node, weighted: Value, *, upright: bool
) -> Projection | None:
    """The product of x and a weight; None if the weight is never masked. `weighted` is the value of node `weight`."""
    dtype = dtype_of(node)
    if not isinstance(weighted, Weighted) or dtype is None:
        return None
    if recogniser.key(weighted.weight) not in recogniser.masked_weights or not rounds_once(weighted, weight, dtype):
        return None
    return Projection(x, weighted.weight, weighted.factor, dtype, weighted.transposed == upright)


def _projections(
    node: Node, x: Node, weight: Node, value: Bundle, project_by: Callable[[Value], Projection | None], *, upright: bool
) -> Bundle | None:
    """The products of x and each weight of a bundle; `project_by` makes one product.

    Weights may be concatenated along their output features only. A stack of weights `[n, ..., in, out]` is multiplied
    by broadcasting. Either x lacks the dimension of the stack, and the dimension comes first in the result; or x is
    repeated along this dimension.
    """
    items = list(map(project_by, value.items))
    if value.size is not None:
        is_along_outputs = value.dim == (0 if upright else 1)
        return bundle(items, dims(node) - 1, value.size) if is_along_outputs else None
    base, dim = shapes.repeated(x)
    if dim is None:
        broadcast = dims(x) + 1 == dims(node) == dims(weight)
        return bundle(items, 0) if broadcast and not upright else None
    # The last condition excludes a stack of one weight that is broadcast to several copies of x.
    if dim != dims(node) - dims(weight) or dims(x) != dims(node) or size(node, dim) != len(value.items):
        return None
    return bundle([item and replace(item, x=base) for item in items], dim)


def same_operands(recogniser: Recogniser, a: Projection, b: Projection) -> bool:
    """True if two projections multiply the same x and the same weight."""
    return (
        recogniser.key(a.x) == recogniser.key(b.x)
        and recogniser.key(a.offs) == recogniser.key(b.offs)
        and (a.transposed, a.swapped) == (b.transposed, b.swapped)
        and recogniser.key(a.weight) == recogniser.key(b.weight)
    )


def same_projection(recogniser: Recogniser, a: Projection, b: Projection) -> bool:
    """True if two projections hold the same values."""
    same_product = same_operands(recogniser, a, b) and values.same_function(a.factor, b.factor)
    return same_product and (a.problem, a.dtype) == (b.problem, b.dtype)


# --- The same products in another shape or dtype ---------------------------------------------------------------------


@rule("getitem", "slice")
def interleaved_product(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W)[..., ::2]`, where W interleaves the rows of two weights."""
    source, found = call.args[0], shapes.strided_slice_of(node)
    value = recogniser.value(source)
    if not isinstance(value, Interleaved) or found is None or not isinstance(value.items[0], Projection):
        return None
    dim, start, step = found
    return value.items[start] if (dim, step) == (value.dim, len(value.items)) and start < step else None


@rule("unflatten", "reshape")
def unflattened(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`n` concatenated products viewed as a stack `[..., n, out]`, or a product of `x.view(-1, in)` as `[..., out]`."""
    source, *_ = call.args
    value, before = recogniser.value(source), tensor_example(source)
    if (old := values.function_of(value)) is not None:
        projection = _viewed_back(recogniser, node, old.projection)
        return projection and (projection if isinstance(value, Projection) else replace(old, projection=projection))
    if not isinstance(value, Bundle) or values.projection_of(value) is None or before is None:
        return None
    is_stack = has_shape(node, (*before.shape[:-1], len(value.items), value.size))
    return Bundle(value.items, value.dim) if is_stack else None


def _viewed_back(recogniser: Recogniser, node: Node, projection: Projection) -> Projection | None:
    """The product of x and W, if `node` is `(x.view(-1, in) @ W^T).view(*x.shape[:-1], out)`; None otherwise."""
    inner = recogniser.through(projection.x)
    if inner is None or inner.symbol not in ("reshape", "flatten") or not is_matrix(projection.weight):
        return None
    x, rows, made = (tensor_example(tensor) for tensor in (inner.args[0], projection.x, node))
    if x is None or rows is None or made is None or projection.swapped:
        return None
    same_sizes = equal_sizes(x.shape[-1:], rows.shape[-1:]) and equal_sizes(x.shape[:-1], made.shape[:-1])
    return replace(projection, x=inner.args[0]) if same_sizes else None


@rule("unsqueeze")
def unsqueezed(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W).unsqueeze(1)`, from which a stack of products may be subtracted."""
    source, position = call.args
    value, dim = recogniser.value(source), dimension(position, node)
    return Bundle((value,), dim) if isinstance(value, Projection) and dim is not None else None


@rule("to", "alias", "assert_metadata")
def pass_through(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A value of the layer, copied or in a wider dtype. The proof compares the dtypes of the projections and result."""
    (source,) = call.args
    value, dtype = recogniser.value(source), dtype_of(node)
    projection = values.projection_of(value)
    if projection is None or dtype is None or not shapes.holds(dtype, projection.dtype):
        return None
    return None if isinstance(value, Gated) and value.rest is not None else value


# --- Differences, masks of output features, scales and biases --------------------------------------------------------


@rule("add", "sub")
def difference_of_projections(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W) - gate`, for one gate or a stack of gates."""
    sign = 1 if call.symbol == "add" else -1

    def difference(a: Value, b: Value) -> Value:
        if not isinstance(a, Projection) or not isinstance(b, Projection) or not same_operands(recogniser, a, b):
            return None
        factor = values.combine(a.factor, b.factor, sign)
        return None if factor is None else replace(a, factor=factor, problem=a.problem or b.problem)

    left, right = ((operand, recogniser.value(operand)) for operand in call.args)
    return pairwise(node, left, right, difference)


@rule("mul")
def channels_masked(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W) * m` with one mask bit per output feature. This is not MGLU, as the refusal will say."""
    for mask, other in (call.args, tuple(reversed(call.args))):
        factor, projection = recogniser.value(mask), recogniser.value(other)
        is_row = dims(mask) == 1 or (dims(mask) == 2 and size(mask, -2) == 1)
        if not isinstance(factor, Binary) or not isinstance(projection, Projection) or not is_row:
            continue
        if projection.factor is None and not projection.swapped and same_shape(node, other):
            return replace(projection, factor=factor)
    return None


@rule("mul")
def rows_scaled(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, q * M) * scale`, where q is a weight in 8 bits, with one scale per output feature."""
    for scale, other in (call.args, tuple(reversed(call.args))):
        projection = recogniser.value(other)
        if not isinstance(projection, Projection) or projection.swapped or not isinstance(projection.weight, Node):
            continue
        dtypes = {dtype_of(node), dtype_of(scale), dtype_of(projection.weight)}
        is_row = dims(scale) == 1 and dims(node) >= 1 and recogniser.value(scale) is None and same_shape(node, other)
        if not is_row or dtypes != {projection.dtype} or not is_decoded(projection.weight):
            continue
        column = scale if projection.transposed else recogniser.imagine(node, torch.unsqueeze, scale, -1)
        weight = recogniser.imagine(node, torch.mul, projection.weight, column)
        return replace(projection, weight=weight, row_scaled=True)
    return None


@rule("add")
def biased(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W * M) + b`. A site with such a product is refused."""
    for bias, other in (call.args, tuple(reversed(call.args))):
        value = recogniser.value(other)
        is_product = isinstance(values.first_of(value), Projection) and same_shape(node, other)
        if is_product and dims(bias) == 1 and recogniser.value(bias) is None:
            return with_problem(value, BIAS)
    return None


def with_problem(value: Value, problem: str) -> Value:
    """Record in all projections of a value why a site with them is refused. An earlier reason stays."""

    def mark(projection: Projection) -> Projection:
        return replace(projection, problem=projection.problem or problem)

    def mark_value(item: Value) -> Value:
        if isinstance(item, Projection):
            return mark(item)
        return replace(item, projection=mark(item.projection)) if isinstance(item, Activated) else None

    if isinstance(value, Interleaved):
        return replace(value, items=tuple(mark(item) for item in value.items if isinstance(item, Projection)))
    return each(value, mark_value)


# --- einsum ----------------------------------------------------------------------------------------------------------


@rule("einsum")
def einsum_projection(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`einsum("bh,dh->bd", x, W * M)`, `"bh,ndh->nbd"` for a stack of weights, and `"eth,edh->etd"` for experts.

    The letters and their order may differ, and `...` may stand for dimensions of x.
    """
    equation, operands = call.args
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:  # the default output: the dimensions of `...`, then the letters that occur once, sorted
        output = "..." * ("..." in inputs) + "".join(n for n in sorted({*inputs} - {*".,"}) if inputs.count(n) == 1)
    axes = inputs.split(",")
    named = list(zip(axes, operands, strict=True))
    for (x_axes, x), (w_axes, weight) in (named, named[::-1]):
        is_weight = w_axes.isalpha() and len(w_axes) in (2, 3) and dims(weight) == len(w_axes)
        if not is_weight or not _same_sizes((x_axes, x), (w_axes, weight)):
            continue
        value, stacks = recogniser.value(weight), w_axes[:-2]
        if not isinstance(value, Bundle):
            upright = _layout(x_axes, w_axes, output)
            product = None if upright is None else projection_at(recogniser, node, x, weight, upright=upright)
            if product is not None:
                return product
            continue
        upright = _layout(x_axes, w_axes[-2:], output.replace(stacks, ""))
        if upright is not None and len(stacks) == output.count(stacks) == 1 and value.size is None and value.dim == 0:
            after = len(output) - output.index(stacks)
            dim = output.index(stacks) if "..." not in output[: -after or None] else dims(node) - after
            items = [projection_by(recogniser, node, x, weight, item, upright=upright) for item in value.items]
            return bundle(items, dim)
    return None


def _layout(x: str, weight: str, output: str) -> bool | None:
    """True for a weight `[out, in]`, False for `[in, out]`; None if the axes do not describe `x W^T`."""
    experts, first, second = weight[:-2], weight[-2], weight[-1]
    leading = x[:-1]
    letters = leading.replace("...", "") + first + second
    if len(set(letters)) < len(letters) or (experts and leading not in (experts + leading[-1:],)):
        return None
    layouts = {(leading + second, leading + first): True, (leading + first, leading + second): False}
    return layouts.get((x, output))


def _same_sizes(*operands: tuple[str, Node]) -> bool:
    """True if the operands have equal sizes along shared letters, so that none is broadcast."""
    sizes: dict[str, object] = {}
    for axes, operand in operands:
        found = zip(reversed(axes.replace("...", "")), reversed(shapes.example(operand).shape), strict=False)
        if not all(statically_known_true(sizes.setdefault(letter, n) == n) for letter, n in found):
            return False
    return True
