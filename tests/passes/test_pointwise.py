"""Elementwise calls that torch evaluates at the values of a mask, and numbers that are rounded to a dtype."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from compile_passes.pointwise import Operand, Result, as_dtype, evaluate

FLOAT, LONG, BOOL = torch.float32, torch.int64, torch.bool
MASK = Operand((0, 1), FLOAT)
TRAINED = Operand((0, 1), FLOAT, has_gradient=True)


def call(target: Any, *args: Any, **kwargs: Any) -> tuple[Node, list[Node]]:
    """A call and its input nodes. Among the arguments, `a` and `b` stand for the first and the second input node."""
    graph = Graph()
    inputs = [graph.placeholder(name) for name in "ab"]
    op = "call_method" if isinstance(target, str) else "call_function"
    held = [{"a": inputs[0], "b": inputs[1]}.get(item, item) if isinstance(item, str) else item for item in args]
    return graph.create_node(op, target, tuple(held), kwargs), inputs


@pytest.mark.parametrize(
    ("made", "operands", "dtype", "result"),
    [
        (call(torch.sub, 1, "a"), [MASK], FLOAT, Result((1, 0), ())),
        (call("sub", "a", 1), [Operand((0, 1), torch.uint8)], torch.uint8, Result((255, 0), ())),
        (call(torch.add, "a", "a", alpha=2), [TRAINED], FLOAT, Result((0, 3), ((3, 3),))),
        (call("mul_", "a", "b"), [TRAINED, Operand((5, 7), FLOAT)], FLOAT, Result((0, 7), ((5, 7),))),
        (call("mul", "a", "b"), [MASK, Operand((5,), FLOAT, has_gradient=True)], FLOAT, Result((0, 5), ((0, 1),))),
        (call(torch.square, "a"), [Operand((-1, 0, 3), FLOAT)], FLOAT, Result((1, 0, 9), ())),
        (call("expand_as", "a", "b"), [TRAINED, TRAINED], FLOAT, Result((0, 1), ((1, 1), (0, 0)))),
        (call(operator.gt, "a", 0.5), [TRAINED], BOOL, Result((0, 1), ((0, 0),))),
        (call(torch.logical_not, "a"), [Operand((0, 1), BOOL)], BOOL, Result((1, 0), ())),
        (call(operator.add, "a", "b"), [Operand((2,), LONG, True), Operand((3,), LONG, True)], LONG, Result((5,), ())),
        # A tensor without dimensions does not change the dtype of the result, but a filled tensor does.
        (call("mul", "a", "b"), [MASK, Operand((3,), torch.float64, True)], FLOAT, Result((0, 3), ())),
        (call("mul", "a", "b"), [MASK, Operand((3,), torch.float64)], torch.float64, Result((0, 3), ())),
        # Arguments that are equal in Python but not in torch
        (call("add", "a", 1), [Operand((0, 1), LONG)], LONG, Result((1, 2), ())),
        (call("add", "a", 1.0), [Operand((0, 1), LONG)], LONG, None),
        (call("add", "a", 1.0), [Operand((0, 1), LONG)], FLOAT, Result((1, 2), ())),
        # Results that are not finite
        (call("reciprocal", "a"), [MASK], FLOAT, None),
        (call("div", "a", 0), [Operand((-1, 1), FLOAT)], FLOAT, None),
        (call("log", "a"), [Operand((1, 0), FLOAT)], FLOAT, None),
        (call("div", "a", "a"), [MASK], FLOAT, None),
    ],
)
def test_evaluate(made: tuple[Node, list[Node]], operands: list[Operand], dtype: torch.dtype, result: Any) -> None:
    node, inputs = made
    found = evaluate(node, dict(zip(inputs, operands, strict=False)), dtype)
    assert found == result


@pytest.mark.parametrize(
    ("value", "dtype", "held"),
    [
        (0.5, torch.int32, 0),
        (0.999, torch.bfloat16, 1),
        (2, torch.bool, 1),
        (1e300, torch.float16, math.inf),
        (127, torch.int8, 127),
        (128, torch.int8, None),
        (-128, torch.int8, -128),
        (-129, torch.int8, None),
        (255, torch.uint8, 255),
        (-1, torch.uint8, None),
        (1, torch.float4_e2m1fn_x2, None),
    ],
)
def test_number_in_another_dtype(value: float, dtype: torch.dtype, held: float | None) -> None:
    assert as_dtype(value, dtype) == held
