"""Rules for projections by a masked weight, `x (M * W)^T`, and for elementwise functions of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from .. import formulas
from ..formulas import Formula
from ..recognise import Recogniser, drops_nothing, layer_rule
from ..shapes import (
    dimension,
    dims,
    dtype_of,
    equal_sizes,
    example,
    is_matrix,
    repeated,
    same_shape,
    size,
    tensor_example,
)
from ..symbols import OTHER_ACTIVATIONS, Call
from ..values import (
    MOST_ITEMS,
    Activated,
    Binary,
    Bundle,
    Gated,
    Product,
    Projection,
    Scalar,
    Value,
    Weighted,
    binary_at,
    combine,
    same_function,
)
from .weights import bundle, holds, part_of, rounds_once

# --- Products of x and a weight --------------------------------------------------------------------------------------


@layer_rule("linear", "inner", "matmul", "addmm")
def project(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W)`, `x @ W.T`, and `addmm` of a bias that is 0."""
    has_bias = False
    if call.symbol == "addmm":
        bias, x, weight, beta = call.args
        if not isinstance(beta, (int, float)) or beta not in (0, 1):
            return None
        has_bias = recogniser.value(bias) != Scalar(0) and beta != 0
    elif call.symbol == "linear":
        x, weight, bias = call.args
        has_bias = bias is not None and recogniser.value(bias) != Scalar(0)
    else:
        x, weight = call.args
    if not isinstance(x, Node) or not isinstance(weight, Node) or (call.symbol == "inner" and not is_matrix(weight)):
        return None
    problem = "the projection adds a bias, which MGLU does not have; add it after the product" if has_bias else None
    return _projection(recogniser, node, x, weight, upright=call.symbol in ("linear", "inner"), problem=problem)


def _projection(
    recogniser: Recogniser, node: Node, x: Node, weight: Node, *, upright: bool, problem: str | None = None
) -> Value:
    """The product at `node` of x and a weight, which lies there `[out, in]` if `upright`, else `[in, out]`."""
    value = recogniser.value(weight)

    def of(weighted: Weighted) -> Projection | None:
        return projection_by(recogniser, node, x, weight, weighted, upright=upright, problem=problem)

    if isinstance(value, Bundle):
        return _projections(node, x, weight, value, of, upright=upright)
    if isinstance(value, Product):
        if recogniser.key(value.node) in recogniser.masked_weights:  # the product is the weight
            return of(Weighted(value.node, None, value.transposed))
        dtype = dtype_of(node)
        transposed = value.transposed == upright
        return None if dtype is None else Projection(x, value, None, dtype, transposed, problem)
    weighted = recogniser.as_weighted(weight)
    return of(weighted) if weighted is not None and dims(weight) == 2 else None


def projection_by(
    recogniser: Recogniser,
    node: Node,
    x: Node,
    weight: Node,
    weighted: Weighted,
    *,
    upright: bool,
    problem: str | None = None,
) -> Projection | None:
    """The product at `node` of x and `weighted`, which stands at `weight`, if that weight is masked anywhere."""
    dtype = dtype_of(node)
    if dtype is None or recogniser.key(weighted.weight) not in recogniser.masked_weights:
        return None
    if not rounds_once(weighted, weight, dtype):
        return None
    transposed = weighted.transposed == upright
    return Projection(x, weighted.weight, weighted.factor, dtype, transposed, problem)


def _projections(
    node: Node, x: Node, weight: Node, value: Bundle, of: Callable[[Weighted], Projection | None], *, upright: bool
) -> Bundle | None:
    """The products of x and each weight of a bundle.

    A concatenation must be one of output features. In a stack `[n, ..., in, out]`, by the rules of broadcasting, x has
    no dimension for the masks, and theirs comes before all of its own; or has one, along which it is repeated.
    """
    dim, items = None, [of(item) if isinstance(item, Weighted) else None for item in value.items]
    if value.size is not None:
        lies_along_outputs = dims(weight) == 2 and value.dim == (0 if upright else 1)
        return bundle(items, dims(node) - 1, value.size) if lies_along_outputs else None
    base, dim = repeated(x)
    if dim is None:
        broadcast = dims(x) + 1 == dims(node) == dims(weight)
        return bundle(items, 0) if broadcast and not upright else None
    if upright or dim != dims(node) - dims(weight) or dims(x) != dims(node):
        return None
    return bundle([item and replace(item, x=base) for item in items], dim)


@layer_rule("einsum")
def einsum_projection(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`einsum("bh,ndh->nbd", x, M * W)`, of any letters and order; also with M and W as operands of their own."""
    parsed = parse_einsum(call)
    if parsed is None:
        return None
    operands, output = parsed
    if len(operands) == 3:
        return _einsum_of_weight_and_mask(recogniser, node, operands, output)
    if len(operands) != 2:
        return None
    for (x_axes, x), (w_axes, weight) in (operands, reversed(operands)):
        found = _axes_of_projection(x_axes, w_axes, output)
        projection = None if found is None else _einsum_operands(recogniser, node, x, weight, *found)
        if projection is not None:
            return projection
    return None


def _axes_of_projection(x: str, weight: str, output: str) -> tuple[bool, int | None] | None:
    """Whether the weight lies `[out, in]`, and which axis of the output is the masks'; None if it is no projection."""
    shared = [axis for axis in weight if axis in x]
    if len(shared) != 1 or shared[0] in output or not x.endswith(shared[0]):
        return None
    own = [axis for axis in weight if axis not in x and axis in output]
    if len(own) + 1 != len(weight) or len(weight) not in (2, 3):
        return None
    features = weight[-1] if weight[-1] != shared[0] else weight[-2]
    stack = weight[0] if len(weight) == 3 else ""
    if stack == shared[0] or output.replace(stack, "") != x[:-1] + features:
        return None
    return weight[-1] == shared[0], output.index(stack) if stack else None


def _einsum_operands(
    recogniser: Recogniser, node: Node, x: Node, weight: Node, upright: bool, stack_dim: int | None
) -> Value:
    value = recogniser.value(weight)
    if stack_dim is None:
        return None if isinstance(value, Bundle) else _projection(recogniser, node, x, weight, upright=upright)
    if not isinstance(value, Bundle) or value.size is not None:
        return None
    items = [
        projection_by(recogniser, node, x, weight, item, upright=upright) if isinstance(item, Weighted) else None
        for item in value.items
    ]
    return bundle(items, stack_dim)


def _einsum_of_weight_and_mask(
    recogniser: Recogniser, node: Node, operands: list[tuple[str, Node]], output: str
) -> Value:
    """`einsum("bh,dh,dh->bd", x, W, M)`, and of a stack of masks."""
    for i, (mask_axes, mask) in enumerate(operands):
        factor = recogniser.value(mask)
        others = operands[:i] + operands[i + 1 :]
        if not isinstance(factor, Binary):
            continue
        for (x_axes, x), (w_axes, weight) in (others, others[::-1]):
            found = _axes_of_projection(x_axes, mask_axes, output)
            weighted = recogniser.as_weighted(weight)
            if found is None or w_axes != mask_axes[-2:] or weighted is None:
                continue
            if weighted.factor is None and not weighted.transposed:
                return _masked_projections(recogniser, node, (x, weight), weighted, factor, *found)
    return None


def _masked_projections(
    recogniser: Recogniser,
    node: Node,
    operands: tuple[Node, Node],
    weighted: Weighted,
    factor: Binary,
    upright: bool,
    stack_dim: int | None,
) -> Value:
    x, weight = operands

    def of(mask: Binary) -> Projection | None:
        return projection_by(recogniser, node, x, weight, replace(weighted, factor=mask), upright=upright)

    if stack_dim is None:
        return of(factor) if len(factor.mask.shape) == 2 else None
    count = factor.mask.stack
    return (
        None
        if count is None or count > MOST_ITEMS
        else bundle([of(binary_at(factor, i)) for i in range(count)], stack_dim)
    )


def parse_einsum(call: Call) -> tuple[list[tuple[str, Node]], str] | None:
    """`([(axes, operand), ...], output axes)`, with the dimensions of `...` as letters of their own."""
    equation, operands = call.args
    if not isinstance(equation, str) or not all(isinstance(o, Node) for o in operands):
        return None
    inputs, arrow, output = str(equation).replace(" ", "").partition("->")
    if not arrow:  # the dimensions of `...`, and then the letters that stand once, in the order of the alphabet
        single = [letter for letter in sorted(set(inputs) - set(".,")) if inputs.count(letter) == 1]
        output = "..." * ("..." in inputs) + "".join(single)
    axes = inputs.split(",")
    if len(axes) != len(operands):
        return None
    expanded = []
    for letters, operand in zip(axes, operands, strict=True):
        hidden = _letters_of_ellipsis(dims(operand) - len(letters.replace("...", "")))
        expanded.append((letters.replace("...", hidden), operand))
        output = output.replace("...", hidden) if "..." in letters else output
    if any(len(letters) != dims(operand) or len(set(letters)) != len(letters) for letters, operand in expanded):
        return None
    return expanded, output


def _letters_of_ellipsis(count: int) -> str:
    return "".join(chr(0x3B1 + i) for i in range(max(count, 0)))  # Greek ones, which einsum does not take


# --- The same products in another shape ------------------------------------------------------------------------------


@layer_rule("getitem", "select", "narrow", "slice")
def part_of_projections(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """One of a bundle of products, or some that lie side by side."""
    return part_of(recogniser, node)


@layer_rule("unflatten", "reshape")
def unflattened(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`[..., n * d]` of concatenated products as a stack `[..., n, d]`."""
    source = call.args[0]
    value, before, after = recogniser.value(source), tensor_example(source), tensor_example(node)
    if not isinstance(value, Bundle) or before is None or after is None or before.dtype != after.dtype:
        return None
    if value.size is None or value.dim != before.dim() - 1:
        return None
    wanted = (*before.shape[:-1], len(value.items), value.size)
    return Bundle(value.items, before.dim() - 1) if equal_sizes(after.shape, wanted) else None


@layer_rule("unsqueeze")
def unsqueezed(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W).unsqueeze(1)`, for a difference with a stack."""
    value, dim = recogniser.value(call.args[0]), dimension(call.args[1], node)
    return Bundle((value,), dim) if isinstance(value, Projection) and dim is not None else None


# --- Differences -----------------------------------------------------------------------------------------------------


@layer_rule("add", "sub")
def difference_of_projections(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W) - gate`, also of a stack."""
    left, right = call.args
    sign = 1 if call.symbol == "add" else -1

    def difference(a: Value, b: Value) -> Value:
        if not isinstance(a, Projection) or not isinstance(b, Projection) or not same_operands(recogniser, a, b):
            return None
        factor = combine(a.factor, b.factor, sign)
        return None if factor is None else replace(a, factor=factor, problem=a.problem or b.problem)

    return pairwise(recogniser, node, left, right, difference)


def pairwise(
    recogniser: Recogniser, node: Node, left: Any, right: Any, function: Callable[[Value, Value], Value]
) -> Value:
    """An elementwise function of two values: of each pair of two bundles, or of one value and each of a bundle.

    A value that is broadcast to a stack has no dimension for it, and the stack's comes first; or is a bundle of one.
    """
    a, b = recogniser.value(left), recogniser.value(right)
    if not isinstance(a, Bundle) and not isinstance(b, Bundle):
        return function(a, b) if same_shape(node, left, right) else None
    bundles = [value for value in (a, b) if isinstance(value, Bundle)]
    longest = max(bundles, key=lambda value: len(value.items))
    sides = [_beside(value, longest, argument, node) for argument, value in ((left, a), (right, b))]
    if sides[0] is None or sides[1] is None:
        return None
    results = [function(x, y) for x, y in zip(sides[0], sides[1], strict=True)]
    return bundle(results, longest.dim, longest.size)


def _beside(value: Value, longest: Bundle, argument: Any, node: Node) -> list[Value] | None:
    """One value for each of a bundle."""
    count = len(longest.items)
    if isinstance(value, Bundle):
        same_place = (value.dim, value.size) == (longest.dim, longest.size) and dims(argument) == dims(node)
        lengths = (1, count) if value.size is None else (count,)
        return [*value.items] * (count // len(value.items)) if same_place and len(value.items) in lengths else None
    leads = longest.size is None and longest.dim == 0 and dims(argument) + 1 == dims(node)
    return [value] * count if leads and isinstance(value, (Projection, Activated)) else None


def same_operands(recogniser: Recogniser, a: Projection, b: Projection) -> bool:
    """Whether two projections are of one x and one weight."""
    return (
        recogniser.key(a.x) == recogniser.key(b.x)
        and a.transposed == b.transposed
        and isinstance(a.weight, Node)
        and isinstance(b.weight, Node)
        and recogniser.key(a.weight) == recogniser.key(b.weight)
    )


def same_projection(recogniser: Recogniser, a: Projection, b: Projection) -> bool:
    """Whether two projections are one tensor."""
    is_one = same_operands(recogniser, a, b) and same_function(a.factor, b.factor)
    return (is_one or a == b) and (a.problem, a.dtype) == (b.problem, b.dtype)


@layer_rule("to", "alias", "assert_metadata")
def pass_through(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A part of the layer in a wider dtype, and back: the site compares the dtypes of projections and result."""
    value, dtype = recogniser.value(call.args[0]), dtype_of(node)
    projection = projection_of(value)
    if projection is None or dtype is None or not holds(dtype, projection.dtype):
        return None
    return None if isinstance(value, Gated) and value.rest is not None else value


def projection_of(value: Value) -> Projection | None:
    """A projection that a value is made of."""
    if isinstance(value, Bundle):
        value = value.items[0]
    if isinstance(value, Gated):
        return value.terms[0].gate
    return value.projection if isinstance(value, Activated) else value if isinstance(value, Projection) else None


# --- Masks of output channels ----------------------------------------------------------------------------------------


@layer_rule("mul")
def channels_masked(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W) * m` with a mask a channel, which is not MGLU; a site of it is refused in these words."""
    for mask, other in (call.args, tuple(reversed(call.args))):
        factor, projection = recogniser.value(mask), recogniser.value(other)
        if not isinstance(factor, Binary) or not isinstance(projection, Projection) or projection.factor is not None:
            continue
        is_a_row = dims(mask) == 1 or size(mask, -2) == 1
        if is_a_row and dims(mask) <= 2 and same_shape(node, other):
            return replace(projection, factor=factor)
    return None


# --- Elementwise functions -------------------------------------------------------------------------------------------

_FUNCTIONS = ("silu", "gelu", "relu", "sigmoid", "tanh", "exp", "erf", "abs")
_OF_ONE = ("neg", "reciprocal", "square", "pow", "clamp", "clamp_min", "maximum", "max", "threshold")


def function_of(value: Value) -> tuple[Formula, Projection] | None:
    """A value as a function of a projection."""
    if isinstance(value, Projection):
        return formulas.VARIABLE, value
    return (value.formula, value.projection) if isinstance(value, Activated) and value.route is None else None


def _each(node: Node, value: Value, function: Callable[[Value], Value]) -> Value:
    """An elementwise function of a value, or of each in a bundle."""
    if isinstance(value, Bundle):
        return bundle([function(item) for item in value.items], value.dim, value.size)
    return function(value)


@layer_rule(*_FUNCTIONS, *_OF_ONE, *OTHER_ACTIVATIONS)
def function_of_one(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """An activation, or a part of one that is written out."""
    source, *options = call.args
    if call.symbol == "maximum" and function_of(_first(recogniser.value(source))) is None:
        source, options = options[0], [source]

    def function(value: Value) -> Value:
        argument = function_of(value)
        if argument is None:
            return None
        formula = _formula_of_one(recogniser, call.symbol, argument[0], options)
        return _activated(node, source, formula, argument[1])

    return _each(node, recogniser.value(source), function)


def _first(value: Value) -> Value:
    return value.items[0] if isinstance(value, Bundle) else value


def _formula_of_one(recogniser: Recogniser, symbol: str, formula: Formula, options: list[Any]) -> Formula | None:
    numbers = [recogniser.value(option) for option in options]
    if symbol in OTHER_ACTIVATIONS:
        return formulas.apply(f"{symbol}{options}" if options else symbol, formula)
    if symbol == "gelu":
        return formulas.apply("gelu_tanh" if options[0] == "tanh" else "gelu", formula)
    if symbol in _FUNCTIONS:
        return formulas.apply(symbol, formula)
    if symbol == "neg":
        return formulas.scaled(formula, -1)
    if symbol == "reciprocal":
        return formulas.inverse(formula)
    if symbol == "square":
        return formulas.power(formula, 2)
    if symbol == "pow":
        return formulas.power(formula, numbers[0].value) if isinstance(numbers[0], Scalar) else None
    if symbol == "threshold":  # its derivative at 0 is relu's
        return formulas.apply("relu", formula) if numbers == [Scalar(0), Scalar(0)] else None
    if numbers[0] != Scalar(0) or any(option is not None for option in options[1:]):
        return None
    if symbol in ("clamp", "clamp_min"):
        return formulas.apply(formulas.CLAMP, formula)
    return formulas.apply(formulas.MAXIMUM, formula) if isinstance(options[0], Node) else None


@layer_rule("add", "sub", "rsub", "mul", "div")
def function_of_two(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A function of two functions of one projection, or of one and a number."""
    left, right = reversed(call.args) if call.symbol == "rsub" else call.args
    numbers = [_number(argument, recogniser.value(argument)) for argument in (left, right)]
    if numbers[0] is None and numbers[1] is None:
        return pairwise(recogniser, node, left, right, lambda a, b: _of_two(recogniser, node, call.symbol, a, b))
    source, is_left = (right, False) if numbers[0] is not None else (left, True)

    def function(value: Value) -> Value:
        argument = function_of(value)
        if argument is None:
            return None
        operands = (argument[0], numbers[1]) if is_left else (numbers[0], argument[0])
        return _activated(node, source, _arithmetic(call.symbol, *operands), argument[1])

    return _each(node, recogniser.value(source), function)


def _of_two(recogniser: Recogniser, node: Node, symbol: str, a: Value, b: Value) -> Value:
    first, second = function_of(a), function_of(b)
    if first is None or second is None or not same_projection(recogniser, first[1], second[1]):
        return None
    result = _arithmetic(symbol, first[0], second[0])
    if symbol == "mul" and _is_gating(first[0], second[0], result):
        return None
    return _activated(node, None, result, first[1])


def _arithmetic(symbol: str, a: Formula | None, b: Formula | None) -> Formula | None:
    if symbol == "div":
        return formulas.multiply(a, formulas.inverse(b))
    if symbol == "mul":
        return formulas.multiply(a, b)
    return formulas.add(a, b, 1 if symbol == "add" else -1)


def _number(argument: Any, value: Value) -> Formula | None:
    """A number as a formula; one that compiling does not know (a float under `dynamic=True`) by its name."""
    if isinstance(value, Scalar):
        return formulas.constant(value.value)
    return formulas.number(argument.name) if isinstance(example(argument), torch.SymFloat) else None


def _is_gating(a: Formula, b: Formula, product: Formula | None) -> bool:
    """Whether `act(p) * p` of one projection is meant to be a gate and its value, whose masks are then wrong."""
    found = [formulas.activation(formula) for formula in (a, b)]
    names = {one.activation for one in found if one is not None}
    is_pair = "identity" in names and len(names) == 2
    return is_pair and (product is None or formulas.activation(product) is None)


def _activated(node: Node, source: Any, formula: Formula | None, projection: Projection) -> Activated | None:
    """The function at a node, if nothing is broadcast there and its dtype holds what the projection's does."""
    dtype = dtype_of(node)
    if formula is None or dtype is None or not holds(dtype, projection.dtype):
        return None
    return Activated(formula, projection) if source is None or same_shape(node, source) else None


@layer_rule("dropout")
def dropout(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """Nothing, in eval mode or with a probability of 0."""
    source = call.args[0]
    value = recogniser.value(source)
    if drops_nothing(call):
        return value if projection_of(value) is not None else None
    problem = "dropout stands between the projection and the product"

    def marked(value: Value) -> Value:
        if isinstance(value, Projection):
            return replace(value, problem=value.problem or problem)
        return (
            replace(value, projection=replace(value.projection, problem=problem))
            if isinstance(value, Activated)
            else None
        )

    return _each(node, value, marked)


def is_column(route: Any, x: Node, node: Node) -> bool:
    """Whether a tensor is a weight a token, `[..., 1]`, in a product at `node` that it does not broadcast."""
    weight, tokens, result = tensor_example(route), tensor_example(x), tensor_example(node)
    return (
        weight is not None
        and tokens is not None
        and result is not None
        and weight.dtype.is_floating_point
        and equal_sizes(weight.shape, (*tokens.shape[:-1], 1))
        and result.dim() == tokens.dim()
    )
