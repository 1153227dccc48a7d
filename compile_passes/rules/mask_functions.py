"""Rules for elementwise functions of masks and of numbers: straight-through sums, and what torch itself evaluates."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ..pointwise import Operand, Result, as_dtype, evaluate
from ..recognise import Recogniser
from ..shapes import dtype_of, has_shape, holds, requires_grad, same_shape, tensor_example
from ..symbols import Call
from ..values import Binary, Levels, Mask, Number, Scalar, Value, merge, opposite, slice_key
from .rule import rule

# --- The straight-through form ---------------------------------------------------------------------------------------

_LONGEST_SUM = 16
"""How many nodes to look at: a straight-through mask is a short sum, but a residual stream may have any length."""


def _linear_terms(recogniser: Recogniser, node: Node) -> list[tuple[float, float, Node]] | None:
    """The terms of a sum as `(coefficient of the value, coefficient of the gradient, node)`; None for a long sum."""
    terms: dict[Hashable, tuple[float, float, Node]] = {}
    pending: list[tuple[Any, float, bool]] = [(node, 1.0, True)]
    for _ in range(_LONGEST_SUM):
        if not pending:
            return list(terms.values())
        argument, sign, carries = pending.pop()
        if not isinstance(argument, Node):
            return None
        call = recogniser.through(argument)
        symbol, operands = ("", ()) if call is None else (call.symbol, call.args)
        carries = carries and requires_grad(argument) and symbol != "detach"
        is_hard = argument is not node and isinstance(recogniser.value(argument), Binary)
        if symbol in ("add", "sub") and not is_hard:
            left, right = operands
            pending += [(left, sign, carries), (right, sign if symbol == "add" else -sign, carries)]
        elif symbol in ("neg", "detach"):
            (source,) = operands
            pending.append((source, -sign if symbol == "neg" else sign, carries))
        else:
            value, gradient, first = terms.get(recogniser.key(argument), (0.0, 0.0, argument))
            terms[recogniser.key(argument)] = (value + sign, gradient + sign * carries, first)
    return None


@rule("add", "sub")
def straight_through(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`(hard - soft).detach() + soft` in any order, which has the value of `hard` and the gradient of `soft`.

    Where `soft` is not finite, or |soft| is above 256 in bfloat16, 2048 in float16 or 2^24 in float32, the program's
    own sum is not binary at all, not even up to rounding errors. The operator takes the mask that was meant.
    """
    terms = _linear_terms(recogniser, node) if recogniser.has_masks else None
    if terms is None:
        return None
    present = [(value, argument) for value, _, argument in terms if value != 0]
    differentiable = [(gradient, argument) for _, gradient, argument in terms if gradient != 0]
    if len(present) != 1:
        return None
    ((factor, source),) = present
    hard = recogniser.value(source)
    if isinstance(hard, Levels) and factor == 1 and same_shape(node, source):
        return hard  # not binary, which the report says of what is made of it
    if factor != 1 or not isinstance(hard, Binary) or not hard.is_mask or hard.mask.carrier is not None:
        return None
    if not same_shape(node, source):
        return None
    dtype = dtype_of(node)
    rounding = torch.finfo(dtype).eps if dtype is not None and dtype.is_floating_point else 0.0
    if not differentiable or not requires_grad(node):
        return replace(hard, slope=(0, 0), mask=replace(hard.mask, rounding=rounding))
    (slope, soft), *others = differentiable
    if others or slope != 1:
        return None
    # A complement, such as `logits >= 0` of `0 > logits`, is a mask of its own here.
    mask = opposite(hard.mask) if hard.is_gate(-1) else hard.mask
    logits = soft if _is_positive(recogniser, mask, soft) else None
    return recogniser.straight_through(mask, node, logits, rounding)


def _is_positive(recogniser: Recogniser, mask: Mask, soft: Node) -> bool:
    """Whether a mask is `soft > 0`."""
    if mask.logits is None:
        return False
    key = recogniser.key(mask.logits)
    return recogniser.key(soft) == (key if mask.index is None else slice_key(key, mask.index))


# --- Functions that torch evaluates ----------------------------------------------------------------------------------

COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")

_POINTWISE = (
    *("add", "sub", "rsub", "scaled_add", "scaled_sub", "mul", "div", "rounded_div", "neg", "abs", "reciprocal"),
    *("pow", "square", "remainder"),
    *("clamp", "clamp_min", "maximum", "round", "round_to", "sign", "relu", "threshold"),
    *("not", "logical_not", "and", "or", "xor", "logical_and", "logical_or", "logical_xor"),
    *(*COMPARISONS, "where", "masked_fill", "detach"),
)


@rule(*_POINTWISE)
def pointwise(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """An elementwise function of numbers and one mask, such as `1 - M`, `~M`, `M == 0` or `where(M, 0, 1)`.

    Torch computes it at M = 0 and M = 1 (`pointwise.evaluate`). A tensor of few values, as in `(sign(x) + 1) / 2`, is
    treated in the same way.
    """
    inputs = node.all_input_nodes
    values = [recogniser.value(item) for item in inputs]
    if not inputs or None in values:
        return None
    if call.symbol in COMPARISONS and any(isinstance(value, Levels) for value in values):
        return None  # `masks.comparison` gives a comparison and its complement the same key
    dtype, operands = dtype_of(node), _operands(inputs, values)
    if not operands or dtype is None or dtype.is_complex:
        return None
    result = evaluate(node, operands, dtype)
    if result is None:
        return None
    functions = {item: value for item, value in zip(inputs, values, strict=True) if isinstance(value, Binary)}
    if functions:
        rounding = max(function.mask.rounding for function in functions.values())
        perturbed = [evaluate(node, _perturbed(operands, error), dtype) for error in _rounding_errors(rounding)]
        if not all(other is not None and _is_close(other.values, result.values, rounding) for other in perturbed):
            return None
        return _function_of_a_mask(node, functions, operands, result)
    if any(isinstance(value, Levels) for value in values):
        return of_levels(recogniser, node, result.values)
    (value,) = result.values
    return Scalar(value)


def _operands(inputs: Sequence[Node], values: Sequence[Value]) -> dict[Node, Operand]:
    """The values of each input at M = 0 and M = 1, or at each of its levels; empty if an input is unknown."""
    operands: dict[Node, Operand] = {}
    varying = [value for value in values if not isinstance(value, Scalar)]
    several_levels = any(isinstance(value, Levels) for value in varying) and len(varying) > 1
    for item, value in zip(inputs, values, strict=True):
        example = tensor_example(item)
        if example is None or example.is_complex() or several_levels:
            return {}
        if isinstance(value, Scalar):
            operands[item] = Operand((value.value,), example.dtype, is_number=example.dim() == 0)
        elif isinstance(value, Levels):
            operands[item] = Operand(value.values, example.dtype)
        elif isinstance(value, Binary):
            trained = any(value.slope) and requires_grad(item)
            operands[item] = Operand(value.at, example.dtype, has_gradient=trained)
        else:
            return {}
    return operands


def _function_of_a_mask(
    node: Node, functions: Mapping[Node, Binary], operands: Mapping[Node, Operand], result: Result
) -> Binary | None:
    """The function that a node computes from functions of one mask, by the chain rule; None for several masks."""
    first, *others = functions.values()
    mask: Mask | None = first.mask
    for function in others:
        mask = mask and merge(mask, function.mask)
    if mask is None or not has_shape(node, mask.shape):
        return None
    total = [0.0, 0.0]
    carrying = [function for item, function in functions.items() if operands[item].has_gradient]
    if requires_grad(node):
        for function, slope in zip(carrying, result.slopes, strict=True):
            total = [t + s * f for t, s, f in zip(total, slope, function.slope, strict=True)]
    return Binary(mask, at=(result.values[0], result.values[-1]), slope=(total[0], total[1]))


def of_levels(recogniser: Recogniser, node: Node, values: Sequence[Number]) -> Value:
    """A tensor that holds no other values than these, which is a mask if they are 0 and 1."""
    levels = tuple(sorted(set(values)))
    if not all(0 <= level <= 1 for level in levels):
        return Levels(levels)
    others = [value for value in levels if value not in (0, 1)]
    doubt = f"it may hold {', '.join(f'{value:g}' for value in others)}" if others else ""
    return recogniser.new_mask(node, None if others else "values", rounding=0, doubt=doubt)


# --- Rounding errors -------------------------------------------------------------------------------------------------


def _rounding_errors(rounding: float) -> tuple[float, ...]:
    """The errors to try where the mask is 1, if the program computes it with this machine epsilon."""
    return (2 * rounding, -2 * rounding) if rounding else ()


def _perturbed(operands: dict[Node, Operand], error: float) -> dict[Node, Operand]:
    """The operands with a rounding error in their values at M = 1."""
    return {
        item: replace(operand, values=(operand.values[0], _with_error(operand.values[1], operand.dtype, error)))
        if len(operand.values) == 2
        else operand
        for item, operand in operands.items()
    }


def _with_error(value: Number, dtype: torch.dtype, error: float) -> Number:
    """A number with a rounding error; integers have none."""
    return value + error * max(1.0, abs(value)) if dtype.is_floating_point else value


def _is_close(perturbed: Sequence[float], exact: Sequence[float], rounding: float) -> bool:
    """Whether rounding errors of the mask stay small; `m == 1` and `m.to(torch.int32)` turn them into jumps."""
    return all(abs(a - b) <= 16 * rounding * (1 + abs(b)) for a, b in zip(perturbed, exact, strict=True))


# --- Casts and copies ------------------------------------------------------------------------------------------------


@rule("to")
def cast(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A mask, or a number, in another dtype."""
    (source,), dtype = call.args, dtype_of(node)
    value, example = recogniser.value(source), tensor_example(source)
    if dtype is None or dtype.is_complex or example is None or not isinstance(value, (Scalar, Levels, Binary)):
        return None
    points = value.at if isinstance(value, Binary) else value.values if isinstance(value, Levels) else (value.value,)
    values = [point for point in (as_dtype(point, dtype) for point in points) if point is not None]
    if len(values) < len(points):
        return None
    if isinstance(value, Levels):
        return of_levels(recogniser, node, values)
    if isinstance(value, Scalar):
        return Scalar(values[0])
    errors = _rounding_errors(value.mask.rounding)
    perturbed = [as_dtype(_with_error(value.at[1], example.dtype, error), dtype) for error in errors]
    if not all(other is not None and _is_close([other], values[1:], value.mask.rounding) for other in perturbed):
        return None
    slope = value.slope if requires_grad(node) and requires_grad(source) else (0.0, 0.0)
    if any(slope) and _narrows_the_gradient(value.mask, example.dtype, dtype):
        return None
    return replace(value, at=(values[0], values[1]), slope=slope)


def _narrows_the_gradient(mask: Mask, source: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether the gradient is rounded on its way to the carrier: `source` is narrower than the carrier and `dtype`."""
    carrier = None if mask.carrier is None else dtype_of(mask.carrier.node)
    return carrier is not None and carrier != source and holds(carrier, source) and not holds(source, dtype)


@rule("alias")
def alias(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A copy of a mask or of a number."""
    (source,) = call.args
    value = recogniser.value(source)
    if isinstance(value, Binary) and not requires_grad(node):
        return replace(value, slope=(0, 0))
    return value if isinstance(value, (Scalar, Levels, Binary)) else None


# --- Numbers ---------------------------------------------------------------------------------------------------------


@rule("zeros", "ones", "full", "tensor")
def filled(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`zeros_like(m)`, `full_like(m, 0.5)` and `torch.tensor(0.5)`: a number, rounded to the dtype of the tensor."""
    number = {"zeros": 0, "ones": 1}[call.symbol] if call.symbol in ("zeros", "ones") else call.args[0]
    value, dtype = recogniser.value(number), dtype_of(node)
    if not isinstance(value, Scalar) or dtype is None or dtype.is_complex:
        return None
    rounded = as_dtype(value.value, dtype)
    return None if rounded is None else Scalar(rounded)
