"""Rules for masks: functions of one binary tensor, and the straight-through form that carries a gradient."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from .mask_algebra import checked, combine, constant, multiply
from .mutation import Effects
from .recognise import Recogniser, rule
from .symbols import Call, as_call, requires_grad, slice_of, submodule, tensor_example
from .values import (
    Binary,
    Carrier,
    Levels,
    Mask,
    Scalar,
    Value,
    at_index,
    slice_key,
    stack_dim_of,
    stack_of,
)

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
        symbol, operands = ("", ()) if call is None or call.kwargs else (call.symbol, call.args)
        carries = carries and requires_grad(argument) and symbol != "detach"
        if symbol in ("add", "sub") and len(operands) == 2:
            pending += [(operands[0], sign, carries), (operands[1], sign if symbol == "add" else -sign, carries)]
        elif symbol in ("neg", "detach"):
            pending.append((operands[0], -sign if symbol == "neg" else sign, carries))
        else:
            value, gradient, first = terms.get(recogniser.key(argument), (0.0, 0.0, argument))
            terms[recogniser.key(argument)] = (value + sign, gradient + sign * carries, first)
    return None


@rule("add", "sub")
def straight_through(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`(hard - soft).detach() + soft` in any order: the value of `hard`, the gradient of `soft`.

    (Exact while |soft| is at most 256 in bfloat16, 2048 in float16, 2^24 in float32; past that the spelling itself
    is no longer binary.)
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
    if not differentiable or not requires_grad(node):
        return replace(hard, slope=(0, 0))
    if len(differentiable) > 1 or differentiable[0][1] != 1:
        return None
    soft = differentiable[0][2]
    carrier = Carrier(node, recogniser.key(node), soft if _is_positive(recogniser, hard.mask, soft) else None)
    mask = replace(hard.mask, proof=hard.mask.proof and "straight-through", carrier=carrier)
    return checked(node, Binary(mask, at=(0, 1), slope=(1, 1)))


def _is_positive(recogniser: Recogniser, mask: Mask, soft: Node) -> bool:
    """Whether a mask is `soft > 0`."""
    call = as_call(mask.bits)
    if call is None or call.symbol != "gt" or len(call.args) != 2 or recogniser.value(call.args[1]) != Scalar(0):
        return False
    key = recogniser.key(call.args[0])
    return recogniser.key(soft) == (key if mask.index is None else slice_key(key, mask.index))


@rule("getitem", "select")
def slice_of_a_stack(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`masks[i]`, and one of all that is made of a stack of masks."""
    found = slice_of(node)
    if found is None:
        return None
    base, dim, index = found
    value, source = recogniser.value(base), as_call(base)
    if stack_of(value) is None or dim != stack_dim_of(value):
        return None
    is_of_nodes = source is not None and source.symbol == "stack"  # each of which may be a layer of its own
    return None if is_of_nodes else at_index(value, index)


_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "rsub": operator.sub,  # (of swapped arguments)
    "mul": operator.mul,
}


@rule("add", "sub", "rsub", "mul")
def arithmetic(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`1 - M`, `2 * M - 1`, `M1 * M1`: of numbers, and of functions of one mask."""
    if len(call.args) != 2 or call.kwargs.get("alpha", 1) != 1:
        return None
    left, right = reversed(call.args) if call.symbol == "rsub" else call.args
    a, b = recogniser.value(left), recogniser.value(right)
    if call.symbol != "mul" and isinstance(a, Scalar) and b is None:
        b = recogniser.as_unproved_mask(right)
    compute = _ARITHMETIC[call.symbol]
    if isinstance(a, Scalar) and isinstance(b, Scalar):
        return Scalar(compute(a.value, b.value))
    if isinstance(a, Levels) and isinstance(b, Scalar):
        return of_levels(recogniser, node, [compute(v, b.value) for v in a.values])
    if isinstance(a, Scalar) and isinstance(b, Levels):
        return of_levels(recogniser, node, [compute(a.value, v) for v in b.values])
    if isinstance(a, Scalar) and isinstance(b, Binary):
        a = constant(b.mask, a.value)
    elif isinstance(b, Scalar) and isinstance(a, Binary):
        b = constant(a.mask, b.value)
    if not isinstance(a, Binary) or not isinstance(b, Binary):
        return None
    result = multiply(a, b) if call.symbol == "mul" else combine(a, b, 1 if call.symbol == "add" else -1)
    return checked(node, result)


@rule("neg")
def negation(recogniser: Recogniser, node: Node, call: Call) -> Value:
    value = recogniser.value(call.get(0, "input"))
    if isinstance(value, Scalar):
        return Scalar(-value.value)
    if isinstance(value, Levels):
        return of_levels(recogniser, node, [-v for v in value.values])
    return checked(node, value.map(operator.neg, lambda v: -1.0)) if isinstance(value, Binary) else None


@rule("div")
def quotient(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`(sign(x) + 1) / 2`."""
    a, b = recogniser.value(call.get(0, "input")), recogniser.value(call.get(1, "other"))
    if not isinstance(b, Scalar) or b.value == 0 or call.get(2, "rounding_mode") is not None:
        return None
    divisor = b.value
    if isinstance(a, Levels):
        return of_levels(recogniser, node, [v / divisor for v in a.values])
    return checked(node, a.map(lambda v: v / divisor, lambda v: 1 / divisor)) if isinstance(a, Binary) else None


@rule("not", "logical_not")
def complement(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`~M`, of bool alone: of integers, `~` is another function."""
    value, example = recogniser.value(call.get(0, "input")), tensor_example(node)
    if not isinstance(value, Binary) or example is None or example.dtype is not torch.bool:
        return None
    return checked(node, value.map(lambda v: float(v == 0), lambda v: 0.0))


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
}


@rule(*_COMPARISONS)
def comparison(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`M == 0`, `M < 0.5`; a comparison of anything else is a mask of its own, by its dtype."""
    a, b = (recogniser.value(argument) for argument in call.args[:2]) if len(call.args) == 2 else (None, None)
    compare = _COMPARISONS[call.symbol]
    if not isinstance(a, Binary) or not isinstance(b, Scalar):
        return None
    bound = b.value
    return checked(node, a.map(lambda v: float(compare(v, bound)), lambda v: 0.0))


@rule("to")
def cast(recogniser: Recogniser, node: Node, call: Call) -> Value:
    value, example = recogniser.value(call.get(0, "input")), tensor_example(node)
    if isinstance(value, Levels) and example is not None and example.dtype.is_signed:
        return of_levels(recogniser, node, [v if example.dtype.is_floating_point else int(v) for v in value.values])
    if not isinstance(value, Binary) or example is None:
        return None
    if example.dtype is torch.bool:
        value = value.map(lambda v: float(v != 0), lambda v: 0.0)
    elif not example.dtype.is_floating_point:
        value = value.map(lambda v: float(int(v)), lambda v: 0.0)
    return checked(node, value)


@rule("detach")
def detach(recogniser: Recogniser, node: Node, call: Call) -> Value:
    value = recogniser.value(call.get(0, "input"))
    return replace(value, slope=(0, 0)) if isinstance(value, Binary) else None


@rule("alias")
def alias(recogniser: Recogniser, node: Node, call: Call) -> Value:
    value = recogniser.value(call.get(0, "input"))
    return value if isinstance(value, (Scalar, Levels, Binary)) else None


# --- Numbers, and tensors of few values ------------------------------------------------------------------------------


@rule("zeros")
def zeros(recogniser: Recogniser, node: Node, call: Call) -> Value:
    return Scalar(0)


@rule("ones")
def ones(recogniser: Recogniser, node: Node, call: Call) -> Value:
    return Scalar(1)


@rule("full")
def full(recogniser: Recogniser, node: Node, call: Call) -> Value:
    return recogniser.value(call.get(1, "fill_value"))


@rule("tensor")
def tensor(recogniser: Recogniser, node: Node, call: Call) -> Value:
    return recogniser.value(call.get(0, "data", call.kwargs.get("s")))


def of_levels(recogniser: Recogniser, node: Node, values: Sequence[float]) -> Value:
    """A tensor that holds no other values than these: a mask if they are 0 and 1."""
    levels = tuple(sorted(set(values)))
    if not 0 <= levels[0] <= levels[-1] <= 1:
        return Levels(levels)
    others = [value for value in levels if value not in (0, 1)]
    doubt = f"it may hold {', '.join(f'{value:g}' for value in others)}" if others else ""
    mask = Mask(node, recogniser.key(node), proof=None if others else "values", doubt=doubt)
    return Binary(mask, at=(0, 1), slope=(0, 0))


@rule("sign")
def sign(recogniser: Recogniser, node: Node, call: Call) -> Value:
    return Levels((-1, 0, 1))


@rule("heaviside")
def heaviside(recogniser: Recogniser, node: Node, call: Call) -> Value:
    at_zero = recogniser.value(call.get(1, "values"))
    return of_levels(recogniser, node, [0, at_zero.value, 1]) if isinstance(at_zero, Scalar) else None


@rule("round")
def rounded(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`round(sigmoid(logits))`."""
    argument = call.get(0, "input")
    inner = as_call(argument) if isinstance(argument, Node) else None
    if inner is None or inner.symbol != "sigmoid" or call.get(1, "decimals", 0) != 0:
        return None
    return of_levels(recogniser, node, [0, 1])


@rule("and", "remainder")
def lowest_bit(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`(packed >> i) & 1`, `packed % 2`."""
    example, operands = tensor_example(node), [recogniser.value(argument) for argument in call.args]
    if example is None or example.dtype.is_floating_point or example.dtype is torch.bool or len(operands) != 2:
        return None
    is_bit = Scalar(1) in operands if call.symbol == "and" else operands[1] == Scalar(2)
    return of_levels(recogniser, node, [0, 1]) if is_bit else None


@rule("clamp", "clamp_min", "maximum", "relu")
def clamped(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`relu(sign(x))`, `sign(x).clamp(min=0)`."""
    value, low, high = recogniser.value(call.get(0, "input")), 0.0, math.inf
    if not isinstance(value, Levels):
        return None
    if call.symbol != "relu":
        bounds = [call.get(1, "other" if call.symbol == "maximum" else "min"), call.get(2, "max")]
        numbers = [recogniser.value(bound) for bound in bounds]
        if any(number is None and bound is not None for number, bound in zip(numbers, bounds, strict=True)):
            return None
        low = numbers[0].value if isinstance(numbers[0], Scalar) else -math.inf
        high = numbers[1].value if isinstance(numbers[1], Scalar) else math.inf
    return of_levels(recogniser, node, [min(max(v, low), high) for v in value.values])


@rule("getitem")
def result_of_a_function(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A custom `autograd.Function` whose forward gives a mask.

    Its gradient is the user's own and flows through the result as before: the operator gives the gradient of the mask.
    """
    source = call.args[0]
    if not isinstance(source, Node) or "autograd_function_apply" not in str(source.target):
        return None
    body = submodule(source.graph, source.args[0])
    if body is None or not isinstance(call.args[1], int) or not Effects(body.graph).writes_nothing:
        return None
    (returned,) = body.graph.find_nodes(op="output")
    results = returned.args[0][0]  # (of the pair of results and what is saved for backward)
    result = results[call.args[1]] if isinstance(results, (tuple, list)) else results
    hard = type(recogniser)(body.graph).value(result)
    if not isinstance(hard, Binary) or not hard.is_gate(1) or hard.mask.proof is None:
        return None
    key = recogniser.key(node)
    carrier = Carrier(node, key) if requires_grad(node) else None
    mask = Mask(node, key, proof="autograd.Function", carrier=carrier)
    return checked(node, Binary(mask, at=(0, 1), slope=(1, 1) if carrier else (0, 0)))
