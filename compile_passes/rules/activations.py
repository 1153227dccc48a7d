"""Rules for activations, named or written out, and for dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .. import formulas
from ..formulas import Formula
from ..recognise import Recogniser
from ..shapes import dtype_of, example, holds, same_shape
from ..symbols import OTHER_ACTIVATIONS, Call, is_identity_dropout
from ..values import Activated, Projection, Scalar, Value, first_of, function_of, projection_of
from .base import each, pairwise, rule
from .projections import same_projection, with_problem

_FUNCTIONS = ("silu", "gelu", "relu", "sigmoid", "tanh", "exp", "erf", "abs")

_WITH_OPTIONS = ("neg", "reciprocal", "square", "pow", "clamp", "clamp_min", "maximum", "max", "threshold")


@rule(*_FUNCTIONS, *_WITH_OPTIONS, *OTHER_ACTIVATIONS)
def function_of_one(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """An activation, or one step of a written-out activation."""
    source, *options = call.args
    if call.symbol == "maximum" and function_of(first_of(recogniser.value(source))) is None:
        (source,), options = options, [source]
    return _mapped(recogniser, node, source, lambda a: _formula_of_one(recogniser, call.symbol, a, options))


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
    if symbol == "threshold":  # with threshold 0 and value 0, `threshold` equals relu, also in its derivative at 0
        return formulas.apply("relu", formula) if numbers == [Scalar(0), Scalar(0)] else None
    if numbers[0] != Scalar(0) or any(option is not None for option in options[1:]):
        return None
    if symbol in ("clamp", "clamp_min"):
        return formulas.apply(formulas.CLAMP, formula)
    return formulas.apply(formulas.MAXIMUM, formula) if isinstance(options[0], Node) else None


@rule("add", "sub", "rsub", "mul", "div")
def function_of_two(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """The sum, difference, product or quotient of two functions of one projection, or of a function and a number."""
    left, right = reversed(call.args) if call.symbol == "rsub" else call.args
    first, second = (_number(argument, recogniser.value(argument)) for argument in (left, right))
    if first is None and second is None:
        operands = [(argument, recogniser.value(argument)) for argument in (left, right)]
        return pairwise(node, operands[0], operands[1], lambda a, b: _combined(recogniser, node, call.symbol, a, b))
    source = left if first is None else right
    return _mapped(recogniser, node, source, lambda a: _arithmetic(call.symbol, first or a, second or a))


def _combined(recogniser: Recogniser, node: Node, symbol: str, a: Value, b: Value) -> Value:
    f, g = function_of(a), function_of(b)
    if f is None or g is None or not same_projection(recogniser, f.projection, g.projection):
        return None
    result = _arithmetic(symbol, f.formula, g.formula)
    if symbol == "mul" and _is_gating(f.formula, g.formula, result):
        return None
    return _activated(node, None, result, f.projection)


def _arithmetic(symbol: str, a: Formula | None, b: Formula | None) -> Formula | None:
    if symbol == "div":
        return formulas.multiply(a, formulas.inverse(b))
    if symbol == "mul":
        return formulas.multiply(a, b)
    return formulas.add(a, b, 1 if symbol == "add" else -1)


def _number(argument: Any, value: Value) -> Formula | None:
    """A number as a formula; None for a tensor. The name of a symbolic float (from `dynamic=True`) is its formula."""
    if isinstance(value, Scalar):
        return formulas.constant(value.value)
    return formulas.number(argument.name) if isinstance(example(argument), torch.SymFloat) else None


def _is_gating(a: Formula, b: Formula, product: Formula | None) -> bool:
    """True if `act(p) * p`, where p is one projection, counts as a gate times a value.

    A product that is itself an activation counts as a function of p: sigmoid(p) * p is silu(p). In any other product of
    this form, the user probably forgot to complement the mask of the value, and the refusal should say so.
    """
    found = [formulas.activation(formula) for formula in (a, b)]
    names = {known.activation for known in found if known is not None}
    is_pair = "identity" in names and len(names) == 2
    return is_pair and (product is None or formulas.activation(product) is None)


def _mapped(recogniser: Recogniser, node: Node, source: Any, function: Callable[[Formula], Formula | None]) -> Value:
    """Apply `function` to the formula of `source`, a function of a projection, or to each item if it is a bundle."""

    def apply(value: Value) -> Value:
        before = function_of(value)
        return before and _activated(node, source, function(before.formula), before.projection)

    return each(recogniser.value(source), apply)


def _activated(node: Node, source: Any, formula: Formula | None, projection: Projection) -> Activated | None:
    """A function of a projection; None if `node` broadcasts `source`, or has a narrower dtype than the projection."""
    dtype = dtype_of(node)
    if formula is None or dtype is None or not holds(dtype, projection.dtype):
        return None
    return Activated(formula, projection) if source is None or same_shape(node, source) else None


@rule("dropout")
def dropout(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """Dropout, which is the identity in eval mode and for p = 0; in other cases the site is refused."""
    source = call.args[0]
    value = recogniser.value(source)
    if is_identity_dropout(call):
        return value if projection_of(value) is not None else None
    return with_problem(value, "dropout is applied between the projection and the product")
