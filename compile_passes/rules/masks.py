"""Rules for masks: functions of one binary tensor, and the straight-through form that carries a gradient."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ..mutation import Effects
from ..pointwise import Operand, as_dtype, evaluate
from ..recognise import Recogniser, weight_rule
from ..shapes import dimension, dtype_of, equal_sizes, requires_grad, same_shape, slice_of, submodule, tensor_example
from ..symbols import Call, as_call
from ..values import MOST_ITEMS, Binary, Bundle, Carrier, Levels, Mask, Scalar, Value, binary_at, merge, slice_key

# --- The straight-through form ---------------------------------------------------------------------------------------

_LONGEST_SUM = 16
"""Nodes to look at: a straight-through mask is a short sum, a residual stream may be of any length."""


def _linear_terms(recogniser: Recogniser, node: Node) -> list[tuple[float, float, Node]] | None:
    """The terms of a sum, `(coefficient, that of the gradient, node)`; None if it is none, or a long one."""
    terms: dict[Hashable, tuple[float, float, Node]] = {}
    pending: list[tuple[Any, float, bool]] = [(node, 1.0, True)]
    for _ in range(_LONGEST_SUM):
        if not pending:
            return list(terms.values())
        argument, sign, carries = pending.pop()
        if not isinstance(argument, Node):
            return None
        call = as_call(argument)
        symbol, operands = ("", ()) if call is None else (call.symbol, call.args)
        carries = carries and requires_grad(argument) and symbol != "detach"
        if symbol in ("add", "sub"):
            pending += [(operands[0], sign, carries), (operands[1], sign if symbol == "add" else -sign, carries)]
        elif symbol in ("neg", "detach"):
            pending.append((operands[0], -sign if symbol == "neg" else sign, carries))
        else:
            value, gradient, first = terms.get(recogniser.key(argument), (0.0, 0.0, argument))
            terms[recogniser.key(argument)] = (value + sign, gradient + sign * carries, first)
    return None


@weight_rule("add", "sub")
def straight_through(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`(hard - soft).detach() + soft` in any order: the value of `hard`, the gradient of `soft`.

    (Where |soft| is above 256 in bfloat16, 2048 in float16 or 2^24 in float32, and where soft is not finite, what the
    program computes is no longer binary, and not only because of rounding errors.)
    """
    terms = _linear_terms(recogniser, node)
    if terms is None or len(terms) < 2:
        return None
    present = [term for term in terms if term[0] != 0]
    differentiable = [term for term in terms if term[1] != 0]
    if len(present) != 1 or present[0][0] != 1:
        return None
    hard = recogniser.value(present[0][2])
    if not isinstance(hard, Binary) or not hard.is_gate(1) or hard.mask.carrier is not None:
        return None
    if not same_shape(node, present[0][2]):
        return None
    dtype = dtype_of(node)
    rounding = torch.finfo(dtype).eps if dtype is not None and dtype.is_floating_point else 0.0
    if not differentiable or not requires_grad(node):
        return replace(hard, slope=(0, 0), mask=replace(hard.mask, rounding=rounding))
    if len(differentiable) > 1 or differentiable[0][1] != 1:
        return None
    soft = differentiable[0][2]
    carrier = Carrier(node, recogniser.key(node), soft if _is_positive(recogniser, hard.mask, soft) else None)
    proof = hard.mask.proof and "straight-through"
    mask = replace(hard.mask, proof=proof, carrier=carrier, rounding=rounding)
    return Binary(mask, slope=(1, 1))


def _is_positive(recogniser: Recogniser, mask: Mask, soft: Node) -> bool:
    """Whether a mask is `soft > 0`."""
    if mask.logits is None:
        return False
    key = recogniser.key(mask.logits)
    return recogniser.key(soft) == (key if mask.index is None else slice_key(key, mask.index))


# --- Stacks ----------------------------------------------------------------------------------------------------------


@weight_rule("getitem", "select")
def slice_of_a_stack(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`masks[i]`."""
    found = slice_of(node)
    value = None if found is None else recogniser.value(found[0])
    if found is None or not isinstance(value, Binary) or len(value.mask.shape) != 3 or found[1] != 0:
        return None
    return binary_at(value, found[2])


@weight_rule("stack")
def stacked_masks(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`stack([M, 1 - M])`."""
    items, dim = call.args
    values = [recogniser.value(item) for item in items] if isinstance(items, (list, tuple)) else []
    masks = [value for value in values if isinstance(value, Binary) and len(value.mask.shape) == 2]
    is_known = masks and len(masks) == len(values) and dimension(dim, node) == 0
    return _bundle_of_masks(node, items, masks) if is_known else None


@weight_rule("cat")
def concatenated_masks(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`cat([M, 1 - M])` of stacks."""
    items, dim = call.args
    values = [recogniser.value(item) for item in items] if isinstance(items, (list, tuple)) else []
    stacks = [value for value in values if isinstance(value, Binary) and value.mask.stack is not None]
    if not stacks or len(stacks) < len(values) or dimension(dim, node) != 0:
        return None
    masks = [binary_at(value, i) for value in stacks for i in range(value.mask.stack or 0)]
    return _bundle_of_masks(node, items, masks)


def _bundle_of_masks(node: Node, items: Sequence[Any], masks: Sequence[Binary]) -> Bundle | None:
    """Masks in one tensor, whose dtype holds what theirs do."""
    dtypes = [dtype_of(item) for item in items]
    dtype = dtype_of(node)
    trained = requires_grad(node)
    known = dtype is not None and all(d is not None and torch.promote_types(d, dtype) == dtype for d in dtypes)
    kept = tuple(mask if trained else replace(mask, slope=(0.0, 0.0)) for mask in masks)
    return Bundle(kept, 0) if known and len(kept) <= MOST_ITEMS else None


# --- Elementwise functions -------------------------------------------------------------------------------------------

_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
_POINTWISE = (
    *(
        "add",
        "sub",
        "rsub",
        "scaled_add",
        "mul",
        "div",
        "rounded_div",
        "neg",
        "abs",
        "reciprocal",
        "pow",
        "square",
        "remainder",
    ),
    *("clamp", "clamp_min", "maximum", "round", "round_to", "sign", "relu", "threshold"),
    *("not", "logical_not", "and", "or", "xor", "logical_and", "logical_or", "logical_xor"),
    *(*_COMPARISONS, "where", "masked_fill", "detach"),
)


@weight_rule(*_POINTWISE)
def pointwise(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`1 - M`, `~M`, `M == 0`, `(sign(x) + 1) / 2`, `where(M, 0, 1)`: of numbers and one mask, computed by torch."""
    inputs = node.all_input_nodes
    values = [recogniser.value(item) for item in inputs]
    if call.symbol in _COMPARISONS and any(isinstance(value, Levels) for value in values):
        return None  # `comparison` tells masks and their complements
    dtype, operands = dtype_of(node), _operands(inputs, values)
    if not operands or dtype is None or dtype.is_complex:
        return None
    result = evaluate(node, operands, dtype)
    if result is None:
        return None
    functions = [value for value in values if isinstance(value, Binary)]
    if functions:
        rounding = max(function.mask.rounding for function in functions)
        moved = [evaluate(node, _moved(operands, error), dtype) for error in _rounding_errors(rounding)]
        if not all(other is not None and _is_close(other.values, result.values, rounding) for other in moved):
            return None
        return _function_of_a_mask(node, functions, operands, result.values, result.slopes)
    if any(isinstance(value, Levels) for value in values):
        return of_levels(recogniser, node, result.values)
    return Scalar(result.values[0])


def _operands(inputs: Sequence[Node], values: Sequence[Value]) -> dict[Node, Operand]:
    """What stands for each input: its values at 0 and 1, or at each of its levels. Empty where one is unknown."""
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
            trained = any(value.slope) and example.requires_grad
            operands[item] = Operand(value.at, example.dtype, has_gradient=trained)
        else:
            return {}
    return operands


def _function_of_a_mask(
    node: Node,
    functions: Sequence[Binary],
    operands: dict[Node, Operand],
    values: Sequence[float],
    slopes: Sequence[Sequence[float]],
) -> Binary | None:
    """The function at a node of functions of one mask, by the chain rule; None if they are of several masks."""
    mask = functions[0].mask
    for function in functions[1:]:
        merged = merge(mask, function.mask)
        if merged is None:
            return None
        mask = merged
    example = tensor_example(node)
    if example is None or not equal_sizes(example.shape, mask.shape):
        return None
    total = [0.0, 0.0]
    carrying = [f for f, operand in zip(functions, _of_masks(operands), strict=True) if operand.has_gradient]
    if requires_grad(node):
        for function, slope in zip(carrying, slopes, strict=True):
            total = [t + s * f for t, s, f in zip(total, slope, function.slope, strict=True)]
    return Binary(mask, at=(values[0], values[-1]), slope=(total[0], total[1]))


def _rounding_errors(rounding: float) -> tuple[float, ...]:
    """By how much a mask may be off where it is 1, if it is computed with this machine epsilon."""
    return (2 * rounding, -2 * rounding) if rounding else ()


def _moved(operands: dict[Node, Operand], error: float) -> dict[Node, Operand]:
    """The operands where the mask is off by an error in place of 1."""
    return {
        item: replace(operand, values=(operand.values[0], _off(operand.values[1], operand.dtype, error)))
        if len(operand.values) == 2
        else operand
        for item, operand in operands.items()
    }


def _off(value: float, dtype: torch.dtype, error: float) -> float:
    """A number with a rounding error, which no integer has."""
    return value + error * max(1.0, abs(value)) if dtype.is_floating_point else value


def _is_close(moved: Sequence[float], exact: Sequence[float], rounding: float) -> bool:
    """Whether rounding errors of the mask stay rounding errors: `m == 1` and `m.to(torch.int32)` make them jumps."""
    return all(abs(a - b) <= 16 * rounding * (1 + abs(b)) for a, b in zip(moved, exact, strict=True))


def _of_masks(operands: dict[Node, Operand]) -> list[Operand]:
    return [operand for operand in operands.values() if len(operand.values) > 1]


@weight_rule(*_COMPARISONS)
def comparison(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`logits > 0`: a mask of its own, and `logits <= 0` the complement of it.

    (A comparison with NaN is False both ways, so this takes logits to be numbers: a NaN counts as not positive.)
    """
    if dtype_of(node) is not torch.bool or recogniser.is_mutable(node):
        return None
    left, right = call.args
    kind = "eq" if call.symbol in ("eq", "ne") else "gt"
    if call.symbol in ("lt", "ge"):  # a < b is b > a, and a >= b is not b > a
        left, right = right, left
    operands = [_compared(recogniser, left), _compared(recogniser, right)]
    if kind == "eq":
        operands.sort(key=repr)
    inverted = call.symbol in ("le", "ge", "ne")
    is_positive = kind == "gt" and isinstance(left, Node) and recogniser.value(right) == Scalar(0)
    logits = left if is_positive and same_shape(left, node) else None
    mask = Mask(node, (kind, *operands), "bool", inverted=inverted, logits=logits)
    return Binary(mask, at=(1, 0) if inverted else (0, 1))


def _compared(recogniser: Recogniser, argument: Any) -> Hashable:
    """The key of an operand of a comparison, the same for all zeros: `0`, `0.0`, `zeros_like(x)`."""
    value = recogniser.value(argument)
    if value == Scalar(0):
        return "zero"
    is_number = isinstance(argument, (int, float)) and not isinstance(argument, bool)
    return ("number", float(argument)) if is_number else recogniser.key(argument)


@weight_rule("to")
def cast_to_bool(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`m.bool()`, which is `m != 0`, of a tensor of which nothing is known."""
    source = call.args[0]
    if dtype_of(node) is not torch.bool or recogniser.value(source) is not None or recogniser.is_mutable(node):
        return None
    operands = sorted([_compared(recogniser, source), "zero"], key=repr)
    return Binary(Mask(node, ("eq", *operands), "bool", inverted=True), at=(1, 0))


@weight_rule("to")
def cast(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A mask, or a number, in another dtype."""
    source, dtype = call.args[0], dtype_of(node)
    value, example = recogniser.value(source), tensor_example(source)
    if dtype is None or dtype.is_complex or example is None or not isinstance(value, (Scalar, Levels, Binary)):
        return None
    points = value.at if isinstance(value, Binary) else value.values if isinstance(value, Levels) else (value.value,)
    held = [as_dtype(point, dtype) for point in points]
    values = [point for point in held if point is not None]
    if len(values) < len(held):
        return None
    if isinstance(value, Levels):
        return of_levels(recogniser, node, values)
    if isinstance(value, Scalar):
        return Scalar(values[0])
    errors = _rounding_errors(value.mask.rounding)
    moved = [as_dtype(_off(value.at[1], example.dtype, error), dtype) for error in errors]
    if not all(other is not None and _is_close([other], values[1:], value.mask.rounding) for other in moved):
        return None
    slope = value.slope if requires_grad(node) and requires_grad(source) else (0.0, 0.0)
    return replace(value, at=(values[0], values[1]), slope=slope)


@weight_rule("alias")
def alias(recogniser: Recogniser, node: Node, call: Call) -> Value:
    value = recogniser.value(call.args[0])
    if isinstance(value, Binary) and not requires_grad(node):
        return replace(value, slope=(0, 0))
    return value if isinstance(value, (Scalar, Levels, Binary)) else None


# --- Numbers, and tensors of few values ------------------------------------------------------------------------------


def _filled(node: Node, value: float) -> Scalar | None:
    """A tensor that is filled with a number, which takes its dtype."""
    dtype = dtype_of(node)
    if dtype is None or dtype.is_complex:
        return None
    held = as_dtype(value, dtype)
    return None if held is None else Scalar(held)


@weight_rule("zeros")
def zeros(recogniser: Recogniser, node: Node, call: Call) -> Value:
    return _filled(node, 0)


@weight_rule("ones")
def ones(recogniser: Recogniser, node: Node, call: Call) -> Value:
    return _filled(node, 1)


@weight_rule("full", "tensor")
def full(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`full_like(m, 0.5)` and `torch.tensor(0.5)`."""
    value = recogniser.value(call.args[0])
    return _filled(node, value.value) if isinstance(value, Scalar) else None


def of_levels(recogniser: Recogniser, node: Node, values: Sequence[float]) -> Value:
    """A tensor that holds no other values than these: a mask if they are 0 and 1."""
    levels = tuple(sorted(set(values)))
    if not 0 <= levels[0] <= levels[-1] <= 1:
        return Levels(levels)
    others = [value for value in levels if value not in (0, 1)]
    doubt = f"it may hold {', '.join(f'{value:g}' for value in others)}" if others else ""
    return Binary(Mask(node, recogniser.key(node), proof=None if others else "values", doubt=doubt))


@weight_rule("sign")
def sign(recogniser: Recogniser, node: Node, call: Call) -> Value:
    example = tensor_example(node)
    return None if example is None or example.is_complex() else Levels((-1, 0, 1))


@weight_rule("heaviside")
def heaviside(recogniser: Recogniser, node: Node, call: Call) -> Value:
    at_zero = recogniser.value(call.args[1])
    return of_levels(recogniser, node, [0, at_zero.value, 1]) if isinstance(at_zero, Scalar) else None


@weight_rule("round")
def rounded(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`round(sigmoid(logits))`."""
    inner = as_call(call.args[0])
    return of_levels(recogniser, node, [0, 1]) if inner is not None and inner.symbol == "sigmoid" else None


@weight_rule("and", "remainder")
def lowest_bit(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`(packed >> i) & 1`, `packed % 2`, and `packed & 8`, which holds 0 and 8."""
    dtype, values = dtype_of(node), [recogniser.value(argument) for argument in call.args]
    if dtype is None or dtype.is_floating_point or dtype is torch.bool:
        return None
    if call.symbol == "remainder":
        return of_levels(recogniser, node, [0, 1]) if values[1] == Scalar(2) else None
    bits = [value.value for value in values if isinstance(value, Scalar)]
    is_bit = len(bits) == 1 and bits[0] >= 1 and int(bits[0]) & (int(bits[0]) - 1) == 0
    return of_levels(recogniser, node, [0, bits[0]]) if is_bit else None


@weight_rule("getitem")
def result_of_a_function(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A custom `autograd.Function` whose forward gives a mask.

    Its gradient is the user's own and flows through the result as before: the operator gives the gradient of the mask.
    """
    source, index = call.args
    if not isinstance(source, Node) or "autograd_function_apply" not in str(source.target):
        return None
    body = submodule(source.graph, source.args[0])
    if body is None or not isinstance(index, int) or not Effects(body.graph).writes_nothing:
        return None
    (returned,) = body.graph.find_nodes(op="output")
    results = returned.args[0][0]  # (of the pair of results and what is saved for backward)
    result = results[index] if isinstance(results, (tuple, list)) else results
    hard = type(recogniser)(body.graph).value(result)
    if not isinstance(hard, Binary) or not hard.is_gate(1) or hard.mask.proof is None:
        return None
    key = recogniser.key(node)
    carrier = Carrier(node, key) if requires_grad(node) else None
    mask = Mask(node, key, proof="autograd.Function", carrier=carrier)
    return Binary(mask, slope=(1, 1) if carrier else (0, 0))
