"""Rules for masks: functions of one binary tensor, and the straight-through form that carries a gradient."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from .mask_algebra import checked, combine, constant, multiply
from .rules import rule
from .symbols import Call, as_call, requires_grad, tensor_example
from .values import Binary, Scalar, Value

if TYPE_CHECKING:
    from .recognise import Recogniser


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
    if not isinstance(hard, Binary) or not hard.is_gate(1) or hard.mask.straight_through is not None:
        return None
    if not differentiable or not requires_grad(node):
        return replace(hard, slope=(0, 0))
    if len(differentiable) > 1 or differentiable[0][1] != 1:
        return None
    soft = differentiable[0][2]
    is_logits = _is_positive(recogniser, hard.mask.bits, soft)
    mask = replace(hard.mask, proof="straight-through", straight_through=node, logits=soft if is_logits else None)
    return Binary(mask, at=(0, 1), slope=(1, 1))


def _is_positive(recogniser: Recogniser, bits: Node, soft: Node) -> bool:
    """Whether `bits` is `soft > 0`."""
    call = as_call(bits)
    if call is None or call.symbol != "gt" or len(call.args) != 2:
        return False
    return recogniser.key(call.args[0]) == recogniser.key(soft) and recogniser.value(call.args[1]) == Scalar(0)


@rule("add", "sub", "rsub", "mul")
def arithmetic(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`1 - M`, `2 * M - 1`, `M1 * M1`: of numbers, and of functions of one mask."""
    if len(call.args) != 2 or call.kwargs.get("alpha", 1) != 1:
        return None
    left, right = reversed(call.args) if call.symbol == "rsub" else call.args
    a, b = recogniser.value(left), recogniser.value(right)
    if call.symbol != "mul" and isinstance(a, Scalar) and b is None:
        b = recogniser.as_unproved_mask(right)
    if isinstance(a, Scalar) and isinstance(b, Scalar):
        sign = 1 if call.symbol == "add" else -1
        return Scalar(a.value * b.value if call.symbol == "mul" else a.value + sign * b.value)
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
    return checked(node, value.map(operator.neg, lambda v: -1.0)) if isinstance(value, Binary) else None


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
    return value if isinstance(value, Binary) else None


@rule("zeros_like")
def zeros(recogniser: Recogniser, node: Node, call: Call) -> Value:
    return Scalar(0)


@rule("ones_like")
def ones(recogniser: Recogniser, node: Node, call: Call) -> Value:
    return Scalar(1)
