"""Rules for projections by a masked weight, `x (M * W)^T`, and for elementwise functions of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from . import formulas
from .formulas import Formula
from .mask_algebra import combine, same_function
from .recognise import Recogniser, rule
from .symbols import Call, dimension, dims, equal_sizes, example, repeated, same_shape, tensor_example
from .values import Activated, Gated, Product, Projection, Scalar, Stacked, Value, stack_of
from .weight_rules import holds, rounds_once

# --- Products of x and a weight --------------------------------------------------------------------------------------


@rule("linear", "matmul", "addmm")
def project(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W)`, `x @ W.T`, and `addmm` of a bias that is 0."""
    problem = None
    if call.symbol == "addmm":
        bias, x, weight = call.get(0, "input"), call.get(1, "mat1"), call.get(2, "mat2")
        if call.kwargs.get("alpha", 1) != 1:
            return None
        has_bias = recogniser.value(bias) != Scalar(0) and call.kwargs.get("beta", 1) != 0
    else:
        x, weight = call.get(0, "input"), call.get(1, "weight" if call.symbol == "linear" else "other")
        weight = call.kwargs.get("mat2", weight)
        has_bias = call.symbol == "linear" and call.get(2, "bias") is not None
    if has_bias:
        problem = "the projection adds a bias, which MGLU does not have; add it after the product"
    if not isinstance(x, Node) or not isinstance(weight, Node):
        return None
    return _projection(recogniser, node, x, weight, upright=call.symbol == "linear", problem=problem)


def _projection(
    recogniser: Recogniser, node: Node, x: Node, weight: Node, *, upright: bool, problem: str | None = None
) -> Projection | None:
    """The product at `node` of x and a weight, which lies there `[out, in]` if `upright`, else `[in, out]`."""
    product, result = recogniser.value(weight), tensor_example(node)
    if result is None:
        return None
    if isinstance(product, Product):
        return Projection(x, product, None, result.dtype, transposed=product.transposed == upright, problem=problem)
    weighted = recogniser.as_weighted(weight)
    if weighted is None or not rounds_once(weighted, weight, result.dtype):
        return None
    projection = Projection(
        x,
        weighted.weight,
        weighted.factor,
        result.dtype,
        transposed=weighted.transposed == upright,
        problem=problem,
    )
    if dims(weight) == 2:
        return projection
    return None if stack_of(weighted) is None else _in_a_stack(projection, node, x, weight)


def _in_a_stack(projection: Projection, node: Node, x: Node, weight: Node) -> Projection | None:
    """`x @ W` of a stack `[n_masks, ..., in, out]`, by the rules of broadcasting.

    x has no dimension for the masks, and theirs comes before all of its own; or has one, along which it is repeated.
    """
    base, dim = repeated(x)
    if dim is None:
        return replace(projection, stack_dim=0) if dims(x) + 1 == dims(node) == dims(weight) else None
    starts_at = dims(node) - dims(weight)
    return replace(projection, x=base, stack_dim=dim) if dim == starts_at and dims(x) == dims(node) else None


@rule("einsum")
def einsum_projection(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`einsum("bh,ndh->nbd", x, M * W)`, of any letters and either order."""
    parsed = parse_einsum(call)
    if parsed is None or len(parsed[0]) != 2:
        return None
    (left, right), output = parsed
    for (x_axes, x), (w_axes, weight) in ((left, right), (right, left)):
        found = _axes_of_projection(x_axes, w_axes, output)
        if found is None:
            continue
        upright, stack_dim = found
        projection = _einsum_operands(recogniser, node, x, weight, upright, stack_dim)
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
) -> Projection | None:
    weighted, result = recogniser.as_weighted(weight), tensor_example(node)
    product = recogniser.value(weight)
    if isinstance(product, Product) and stack_dim is None:
        return _projection(recogniser, node, x, weight, upright=upright)
    if weighted is None or result is None or not rounds_once(weighted, weight, result.dtype):
        return None
    if (stack_of(weighted) is None) != (stack_dim is None):
        return None
    transposed = weighted.transposed == upright
    return Projection(x, weighted.weight, weighted.factor, result.dtype, transposed, stack_dim)


def parse_einsum(call: Call) -> tuple[list[tuple[str, Node]], str] | None:
    """`([(axes, operand), ...], output axes)`, with the dimensions of `...` as letters of their own."""
    equation, operands = call.args[0], call.args[1:]
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "->" not in equation or not all(isinstance(o, Node) for o in operands):
        return None
    inputs, output = equation.replace(" ", "").split("->")
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


# --- What is made of projections -------------------------------------------------------------------------------------


@rule("add", "sub")
def difference_of_projections(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W) - gate`."""
    if len(call.args) != 2 or call.kwargs.get("alpha", 1) != 1:
        return None
    a, b = (recogniser.value(argument) for argument in call.args)
    if not isinstance(a, Projection) or not isinstance(b, Projection):
        return None
    if not same_operands(recogniser, a, b) or (a.factor is None and b.factor is None):
        return None
    factor = combine(a.factor, b.factor, 1 if call.symbol == "add" else -1)
    stack_dim = _broadcast_stack(a, b, call)
    if factor is None or stack_dim is None:
        return None
    result = a if a.stack_dim == stack_dim[0] else b
    return replace(result, factor=factor, problem=a.problem or b.problem, stack_dim=stack_dim[0])


def _broadcast_stack(a: Projection, b: Projection, call: Call) -> tuple[int | None] | None:
    """The dimension of the masks in a sum: that of both, or of one if the other is broadcast to it."""
    if a.stack_dim == b.stack_dim:
        return (a.stack_dim,)
    single, stack = (a, b) if a.stack_dim is None else (b, a)
    leads = single.stack_dim is None and stack.stack_dim == 0
    return (0,) if leads and abs(dims(call.args[0]) - dims(call.args[1])) == 1 else None


@rule("unsqueeze")
def projection_to_be_broadcast(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.linear(x, W).unsqueeze(1)`, for a difference with a stack."""
    value, dim = recogniser.value(call.get(0, "input")), dimension(call.get(1, "dim"), node)
    if not isinstance(value, Projection) or value.stack_dim is not None or stack_of(value) is not None or dim is None:
        return None
    return replace(value, stack_dim=dim)


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
    return (
        same_operands(recogniser, a, b)
        and same_function(a.factor, b.factor)
        and (a.problem, a.stack_dim, a.dtype) == (b.problem, b.stack_dim, b.dtype)
    )


@rule("to", "alias", "assert_metadata")
def pass_through(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A part of the layer in a wider dtype, and back: the site compares the dtypes of projections and result."""
    value, result = recogniser.value(call.get(0, "input")), tensor_example(node)
    projection = _projection_of(value)
    if projection is None or result is None or not holds(result.dtype, projection.dtype):
        return None
    return None if isinstance(value, Gated) and value.rest is not None else value


def _projection_of(value: Value) -> Projection | None:
    if isinstance(value, Stacked):
        value = value.items[0]
    if isinstance(value, Gated):
        return value.terms[0].gate
    return value.projection if isinstance(value, Activated) else value if isinstance(value, Projection) else None


# --- Elementwise functions -------------------------------------------------------------------------------------------

_FUNCTIONS = ("silu", "gelu", "relu", "sigmoid", "tanh", "exp", "erf", "other_activation")


def function_of(value: Value) -> tuple[Formula, Projection] | None:
    """A value as a function of a projection."""
    if isinstance(value, Projection):
        return formulas.VARIABLE, value
    return (value.formula, value.projection) if isinstance(value, Activated) and value.route is None else None


@rule(*_FUNCTIONS)
def activation(recogniser: Recogniser, node: Node, call: Call) -> Value:
    argument = function_of(recogniser.value(call.get(0, "input")))
    if argument is None:
        return None
    name = call.symbol
    if name == "gelu" and call.get(1, "approximate", "none") == "tanh":
        name = "gelu_tanh"
    if name == "other_activation":
        name = str(getattr(node.target, "__name__", node.target)).split(".")[0]
    return _activated(recogniser, node, formulas.apply(name, argument[0]), argument[1])


@rule("neg", "reciprocal", "square", "pow", "clamp", "clamp_min", "maximum")
def function_of_one(recogniser: Recogniser, node: Node, call: Call) -> Value:
    argument = function_of(recogniser.value(call.get(0, "input")))
    if argument is None:
        return None
    formula, projection = argument
    result: Formula | None = None
    if call.symbol == "neg":
        result = formulas.add((), formula, -1)
    elif call.symbol == "reciprocal":
        result = formulas.inverse(formula)
    elif call.symbol == "square":
        result = formulas.power(formula, 2)
    else:
        number = recogniser.value(call.get(1, {"pow": "exponent", "maximum": "other"}.get(call.symbol, "min")))
        if call.symbol == "pow" and isinstance(number, Scalar) and number.value == int(number.value):
            result = formulas.power(formula, int(number.value))
        elif call.symbol != "pow" and number == Scalar(0) and call.get(2, "max") is None:
            result = formulas.apply("relu", formula)
    return _activated(recogniser, node, result, projection)


@rule("add", "sub", "rsub", "mul", "div")
def function_of_two(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """Of two functions of one projection, or of one and a number."""
    if len(call.args) != 2 or call.kwargs:
        return None
    left, right = reversed(call.args) if call.symbol == "rsub" else call.args
    operands = [recogniser.value(left), recogniser.value(right)]
    functions = [function_of(value) for value in operands]
    projections = [function[1] for function in functions if function is not None]
    if not projections or (len(projections) == 2 and not same_projection(recogniser, *projections)):
        return None
    given = [
        function[0] if function is not None else _number(argument, value)
        for argument, value, function in zip((left, right), operands, functions, strict=True)
    ]
    a, b = given
    if a is None or b is None:
        return None
    result: Formula | None
    if call.symbol == "div":
        inverse = formulas.inverse(b)
        result = None if inverse is None else formulas.multiply(a, inverse)
    elif call.symbol == "mul":
        result = formulas.multiply(a, b)
        if _is_gating(a, b, result):
            return None
    else:
        result = formulas.add(a, b, 1 if call.symbol == "add" else -1)
    return _activated(recogniser, node, result, projections[0])


def _number(argument: Any, value: Value) -> Formula | None:
    """A number as a formula; one that compiling does not know (a float under `dynamic=True`) by its name."""
    if isinstance(value, Scalar):
        return formulas.constant(value.value)
    return formulas.atom(f"`{argument.name}`") if isinstance(example(argument), torch.SymFloat) else None


def _is_gating(a: Formula, b: Formula, product: Formula | None) -> bool:
    """Whether `act(p) * p` of one projection is meant to be a gate and its value, whose masks are then wrong."""
    names = {formulas.activation(a), formulas.activation(b)}
    is_pair = "identity" in names and len(names) == 2 and None not in names
    return is_pair and (product is None or formulas.activation(product) is None)


def _activated(recogniser: Recogniser, node: Node, formula: Formula | None, projection: Projection) -> Activated | None:
    """The function at a node, if nothing is broadcast there and its dtype holds what the projection's does."""
    result = tensor_example(node)
    sources = [argument for argument in node.all_input_nodes if _projection_of(recogniser.value(argument)) is not None]
    if formula is None or result is None or not same_shape(node, *sources) or not holds(result.dtype, projection.dtype):
        return None
    return Activated(formula, projection)


@rule("dropout")
def dropout(recogniser: Recogniser, node: Node, call: Call) -> Value:
    value = recogniser.value(call.get(0, "input"))
    if not call.get(2, "train" if isinstance(node.target, torch._ops.OpOverload) else "training", True):
        return value
    problem = "dropout stands between the projection and the product"
    if isinstance(value, Projection):
        return replace(value, problem=value.problem or problem)
    if isinstance(value, Activated):
        return replace(value, projection=replace(value.projection, problem=problem))
    return None


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
