"""Abstract values: arithmetic with functions of a mask, equality of masks, and functions of a projection."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from compile_passes.formulas import VARIABLE, apply
from compile_passes.values import (
    Activated,
    Binary,
    Bundle,
    Carrier,
    Gated,
    Mask,
    MaskWeight,
    Product,
    Projection,
    Scalar,
    Term,
    Value,
    Weighted,
    binary_at,
    combine,
    function_of,
    merge,
    multiply,
    opposite,
    projection_of,
    same_function,
    slice_key,
)


def node_of(example: torch.Tensor) -> Node:
    node = Graph().placeholder("tensor")
    node.meta["example_value"] = example
    return node


NODE = node_of(torch.zeros(4, 5))
MASK = Mask(NODE, "m", "bool")
TRAINED = replace(MASK, carrier=Carrier(NODE, "c"))


# --- Functions of a mask ---------------------------------------------------------------------------------------------

# Functions of M whose values and slopes at M = 0 and M = 1 are all different.
A = Binary(MASK, at=(2, 3), slope=(5, 7))
B = Binary(MASK, at=(11, 13), slope=(17, 19))


@pytest.mark.parametrize(
    ("found", "at", "slope"),
    [
        (combine(A, B, 1), (13, 16), (22, 26)),
        (combine(A, B, -1), (-9, -10), (-12, -12)),
        (combine(A, None, 3), (5, 6), (5, 7)),
        (combine(None, B, -2), (-21, -25), (-34, -38)),
        (multiply(A, B), (22, 39), (2 * 17 + 5 * 11, 3 * 19 + 7 * 13)),
        (multiply(B, A), (22, 39), (2 * 17 + 5 * 11, 3 * 19 + 7 * 13)),
    ],
)
def test_arithmetic(found: Binary | None, at: tuple[int, int], slope: tuple[int, int]) -> None:
    assert found == Binary(MASK, at, slope)


def test_arithmetic_of_two_masks() -> None:
    other = replace(B, mask=replace(MASK, key="other"))
    assert combine(A, other, 1) is None
    assert multiply(A, other) is None
    assert combine(None, None, 1) is None


def test_gate_and_complement() -> None:
    gate, value, neither = (
        Binary(MASK, slope=(1, 1)),
        Binary(MASK, (1, 0), slope=(-1, -1)),
        Binary(MASK, (1, 1), (0, 1)),
    )
    assert [f.is_gate(1) for f in (gate, value, neither)] == [True, False, False]
    assert [f.is_gate(-1) for f in (gate, value, neither)] == [False, True, False]
    assert [f.is_mask for f in (gate, value, neither)] == [True, True, False]
    assert [f.passes_gradient(1) for f in (gate, value, neither)] == [True, False, False]
    assert [f.passes_gradient(-1) for f in (gate, value, neither)] == [False, True, False]
    assert Binary(MASK) == Binary(MASK, at=(0, 1), slope=(0, 0))


def test_same_function() -> None:
    fixed = replace(A, slope=(0, 0))
    assert same_function(A, A)
    assert same_function(None, None)
    for a, b in (
        (A, None),
        (A, replace(A, mask=replace(MASK, key="other"))),
        (A, replace(A, at=(2, 2))),
        (A, replace(A, slope=(5, 8))),
        (A, replace(A, mask=TRAINED)),
        (replace(A, mask=TRAINED), replace(A, mask=replace(TRAINED, carrier=Carrier(NODE, "other")))),
    ):
        assert not same_function(a, b)
        assert not same_function(b, a)
    assert same_function(fixed, replace(fixed, mask=TRAINED)), "without a gradient the carrier does not matter"


# --- Masks -----------------------------------------------------------------------------------------------------------


def test_merge() -> None:
    other = replace(MASK, carrier=Carrier(NODE, "d"))
    assert merge(MASK, TRAINED) == merge(TRAINED, MASK) == TRAINED
    assert merge(TRAINED, TRAINED) == TRAINED
    assert merge(TRAINED, other) is None
    assert merge(other, TRAINED) is None
    assert merge(MASK, replace(MASK, key="other")) is None
    assert merge(replace(MASK, key="other"), MASK) is None
    assert merge(replace(MASK, rounding=0.5), replace(TRAINED, rounding=0.25)) == replace(TRAINED, rounding=0.5)


def test_opposite() -> None:
    logits = replace(MASK, logits=NODE)
    assert opposite(logits) == replace(MASK, key=("not", "m"), inverted=True)
    assert opposite(opposite(MASK)).inverted is False


def test_slice_of_a_stack() -> None:
    stack = replace(TRAINED, bits=node_of(torch.zeros(3, 4, 5)))
    mask = binary_at(Binary(stack), 2).mask
    assert (mask.key, mask.index) == (slice_key("m", 2), 2)
    assert mask.carrier == Carrier(NODE, slice_key("c", 2), index=2)
    assert mask.shape == (4, 5)
    assert mask.stack is None


@pytest.mark.parametrize(("shape", "stack"), [((4, 5), None), ((3, 4, 5), 3), ((2, 3, 4, 5), None)])
def test_shape_of_a_mask(shape: tuple[int, ...], stack: int | None) -> None:
    mask = replace(MASK, bits=node_of(torch.zeros(shape)))
    assert mask.shape == shape
    assert replace(mask, index=0).shape == shape[1:]
    assert mask.stack == stack


def test_shape_of_a_mask_that_is_unknown() -> None:
    unknown = replace(MASK, bits=Graph().placeholder("tensor"))
    assert unknown.shape == ()
    assert unknown.stack is None
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC])
    symbolic = mode.from_tensor(torch.zeros(3, 4, 5), symbolic_context=sizes)
    assert replace(MASK, bits=node_of(symbolic)).stack is None


# --- Weights and projections -----------------------------------------------------------------------------------------


def test_the_weight_of_a_product_takes_a_gradient() -> None:
    fixed, trained = NODE, node_of(torch.zeros(4, 5, requires_grad=True))
    assert Product(NODE, fixed, trained).weights == (trained,)
    assert Product(NODE, trained, fixed).weights == (trained,)
    assert Product(NODE, trained, trained).weights == (trained, trained)
    assert Product(NODE, fixed, fixed).weights == (fixed, fixed)


SILU = apply("silu", VARIABLE)
assert SILU is not None
GATE, VALUE = (Projection(NODE, NODE, Binary(MASK, at), torch.float32) for at in ((0, 1), (1, 0)))
SUM = Gated((Term(SILU, GATE, VALUE), Term(SILU, VALUE, GATE)))
WEIGHTED = Activated(SILU, VALUE, MaskWeight(NODE))


@pytest.mark.parametrize(
    ("value", "projection"),
    [
        (GATE, GATE),
        (Activated(SILU, GATE), GATE),
        (WEIGHTED, VALUE),
        (SUM, GATE),
        (Bundle((VALUE, GATE), 0), VALUE),
        (Bundle((SUM, SUM), 0), GATE),
        (Weighted(NODE, None), None),
        (Scalar(1), None),
        (None, None),
    ],
)
def test_projection_of(value: Value, projection: Projection | None) -> None:
    assert projection_of(value) == projection


@pytest.mark.parametrize(
    ("value", "function"),
    [
        (GATE, Activated(VARIABLE, GATE)),
        (Activated(SILU, VALUE), Activated(SILU, VALUE)),
        (WEIGHTED, None),
        (SUM, None),
        (None, None),
    ],
)
def test_function_of(value: Value, function: object) -> None:
    assert function_of(value) == function
