"""Each condition of the proof, on handmade sites: a correct site with one change."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from compile_passes.evaluate import Evaluation
from compile_passes.formulas import VARIABLE, Formula, apply, multiply, number, scaled
from compile_passes.proof import Layer, check
from compile_passes.sites import Refusal, Site
from compile_passes.values import Binary, Carrier, Gated, Mask, MaskWeight, Product, Projection, Term
from compile_passes.view import View

GRAPH = Graph()


def tensor(name: str, *shape: int, **options: Any) -> Node:
    node = GRAPH.placeholder(name)
    node.meta["example_value"] = torch.zeros(shape, **options)
    return node


X, OTHER_X, HALF_X = tensor("x", 5, 8), tensor("other_x", 5, 8), tensor("half_x", 5, 8, dtype=torch.float16)
WEIGHT, OTHER_WEIGHT, UNKNOWN = tensor("weight", 4, 8), tensor("other_weight", 4, 8), GRAPH.placeholder("unknown")
BITS, LOGITS = tensor("bits", 4, 8, dtype=torch.bool), tensor("logits", 4, 8, requires_grad=True)
ROW, STACK = tensor("row", 4, 1, dtype=torch.bool), tensor("stack", 2, 4, 8)
COLUMN = tensor("column", 5, 1)
SPARSE_X, SPARSE_MASK = tensor("sparse_x", 5, 8), tensor("sparse_mask", 4, 8)
for sparse in (SPARSE_X, SPARSE_MASK):
    sparse.meta["example_value"] = sparse.meta["example_value"].to_sparse()


def call(function: Callable[..., Any], *args: Any, example: Tensor | None) -> Node:
    node = GRAPH.call_function(function, args)
    node.meta["example_value"] = example
    return node


FLOAT = torch.zeros(5, 4)
ROOT, UNKNOWN_ROOT = call(torch.neg, X, example=FLOAT), call(torch.abs, X, example=None)
DOUBLE_ROOT = call(torch.tanh, X, example=FLOAT.double())
TRAINED_ROOT = call(torch.exp, X, example=torch.zeros(5, 4, requires_grad=True))
EXP, EXP_OF_OTHER = (call(torch.exp, node, example=torch.zeros(5, 8)) for node in (X, OTHER_X))
SLICE = call(operator.getitem, STACK, 0, example=torch.zeros(4, 8))
COMPUTED = call(torch.mul, LOGITS, LOGITS, example=torch.zeros(4, 8))
GRAPH.output((ROOT, UNKNOWN_ROOT, DOUBLE_ROOT, TRAINED_ROOT))
VIEW = View(GRAPH)
IN_VIEW = {origin: node for node, origin in VIEW.origin.items()}
RECOGNISER = Evaluation(VIEW)


def silu(factor: float = 1) -> Formula:
    formula = scaled(apply("silu", VARIABLE), factor)
    assert formula is not None
    return formula


def term(
    mask: Mask | None = None,
    *,
    gate: Any = (0, 1),
    value: Any = (1, 0),
    formula: Formula | None = None,
    weight: MaskWeight | None = None,
    dtype: torch.dtype = torch.float32,
    slope: float = 0,
) -> Term:
    """A correct term, or one with changes. `gate` and `value` are factors, or their values at M = 0 and M = 1."""
    mask = Mask(IN_VIEW[BITS], "m", "bool") if mask is None else mask
    factors = [
        Binary(mask, at, (sign * slope, sign * slope)) if isinstance(at, tuple) else at
        for at, sign in ((gate, 1), (value, -1))
    ]
    gate_projection, value_projection = (Projection(IN_VIEW[X], IN_VIEW[WEIGHT], factor, dtype) for factor in factors)
    return Term(silu() if formula is None else formula, gate_projection, value_projection, weight)


def changed(which: str, **changes: Any) -> Term:
    """A correct term with another gate or value."""
    right = term()
    changes = {name: IN_VIEW.get(value, value) for name, value in changes.items()}
    return replace(right, **{which: replace(getattr(right, which), **changes)})


def layer(*terms: Term, root: Node = ROOT, assume_binary: bool = False) -> Layer:
    return check(RECOGNISER, Site(IN_VIEW[root], Gated(terms)), assume_binary)


BITS_MASK = Mask(IN_VIEW[BITS], "m", "bool")
REAL = Mask(IN_VIEW[LOGITS], "m", None)
TRAINED = replace(BITS_MASK, carrier=Carrier(IN_VIEW[LOGITS], "c"))
UNPROVED = "is a float32 tensor that nothing proves to be binary"


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        ([changed("gate", problem="a problem")], "^a problem$"),
        ([changed("value", weight=Product(IN_VIEW[X], IN_VIEW[X], IN_VIEW[X]))], "write the second as 1 - mask"),
        ([term(), changed("gate", x=HALF_X)], "different inputs, `x` and `half_x`$"),
        # Masks
        ([term(gate=(0, 1), value=(0, 1))], r"the gate multiplies the weight by \(0, 1\) and the value by \(0, 1\);"),
        ([term(gate=(1, 0), value=(1, 0))], "not complementary"),
        ([term(gate=(0, 1), value=(2, 1))], "not complementary"),
        ([term(gate=(0, 2), value=(1, 0))], "not complementary"),
        ([term(REAL)], f"mask `logits` {UNPROVED}; .*, or pass assume_binary=True"),
        ([term(replace(REAL, bits=IN_VIEW[SLICE]))], "mask `getitem` .*, or pass assume_binary=True"),
        ([term(replace(REAL, doubt="it may hold 2"))], rf"{UNPROVED} \(it may hold 2\);"),
        ([term(replace(REAL, bits=IN_VIEW[COMPUTED]))], f"{UNPROVED}; .* by a comparison$"),
        ([term(replace(BITS_MASK, bits=IN_VIEW[ROW]))], r"mask `row` has shape \[4, 1\] and the weight \[4, 8\]"),
        ([replace(term(), gate=replace(term().gate, weight=IN_VIEW[UNKNOWN]))], r"\[4, 8\] and the weight unknown"),
        # Kinds, dtypes and activations
        ([term(weight=MaskWeight(IN_VIEW[SPARSE_X]))], "`sparse_x` is a tensor of layout"),
        ([term(replace(BITS_MASK, bits=IN_VIEW[SPARSE_MASK]))], "`sparse_mask` is a tensor"),
        ([replace(term(), **{k: replace(getattr(term(), k), x=IN_VIEW[SPARSE_X]) for k in ("gate", "value")})], "`sp"),
        ([changed("value", dtype=torch.float16)], "the projections are torch.float16 and the result torch.float32"),
        ([term(formula=apply("exp", VARIABLE)), term()], r"goes through exp\(g\), which is none"),
        ([term(formula=multiply(VARIABLE, number("a")))], "through `a` g, with a number whose value is unknown"),
        # Mask weights and numbers
        ([term(formula=silu(k)) for k in (1, 1e300)], "multiplied by 1e[+]300, which torch.float32 cannot hold"),
        ([term(formula=silu(k)) for k in (1, 1e-50)], "multiplied by 1e-50, which torch.float32 cannot hold"),
    ],
)
def test_refusal(terms: list[Term], reason: str) -> None:
    with pytest.raises(Refusal, match=reason):
        layer(*terms)


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        ([term(TRAINED, value=Binary(TRAINED, (1, 0)), slope=1)], "does not pass straight through"),
        ([term(TRAINED, gate=Binary(TRAINED), slope=1)], "does not pass straight through"),
        ([term(TRAINED, gate=(1, 0), value=(0, 1), slope=1)], "does not pass straight through"),
        ([term(TRAINED, slope=2)], "does not pass straight through"),
        ([term(TRAINED, value=Binary(BITS_MASK, (1, 0), (-1, -1)), slope=1)], "through different tensors"),
        ([term(TRAINED, gate=Binary(BITS_MASK, (0, 1), (1, 1)), slope=1)], "through different tensors"),
    ],
)
def test_refusal_in_training(terms: list[Term], reason: str) -> None:
    with pytest.raises(Refusal, match=reason):
        layer(*terms, root=TRAINED_ROOT)
    assert not layer(*terms).trains_masks, "in inference none of this matters"


def test_the_report_does_not_advise_to_trust_a_mask_that_is_trained() -> None:
    given = term(replace(REAL, carrier=TRAINED.carrier), slope=1)
    with pytest.raises(Refusal, match=f"{UNPROVED}; to train it, write it as .*, in the graph that computes the"):
        layer(given, root=TRAINED_ROOT)
    with pytest.raises(Refusal, match="or pass assume_binary=True"):
        layer(given)


def test_a_trained_mask_must_be_proved() -> None:
    trained = term(replace(REAL, carrier=TRAINED.carrier), slope=1)
    assert not layer(trained, assume_binary=True).trains_masks
    with pytest.raises(Refusal, match="is not a straight-through mask of logits"):
        layer(trained, root=TRAINED_ROOT, assume_binary=True)


def test_refusal_of_an_unknown_result() -> None:
    with pytest.raises(Refusal, match="the dtype of the result `abs_1` is unknown"):
        layer(term(), root=UNKNOWN_ROOT)


@pytest.mark.parametrize(
    ("x", "difference"),
    [
        ((EXP, EXP_OF_OTHER), "`x` and `other_x`$"),
        ((EXP, ROOT), r"`exp_1 \[5, 8\] = exp\(x\)` and `neg \[5, 4\] = neg\(x\)`$"),
        ((EXP, TRAINED_ROOT), r"`.* = exp\(x\)` and `.* = exp\(x\)` \(only one of them takes a gradient\)$"),
        ((TRAINED_ROOT, EXP), r"`.* = exp\(x\)` and `.* = exp\(x\)` \(only one of them takes a gradient\)$"),
    ],
)
def test_difference_of_two_inputs(x: tuple[Node, Node], difference: str) -> None:
    gate, value = (replace(getattr(term(), k), x=IN_VIEW[one]) for k, one in zip(("gate", "value"), x, strict=True))
    with pytest.raises(Refusal, match=f"different inputs, {difference}"):
        layer(replace(term(), gate=gate, value=value))


def test_all_reasons_are_named_up_to_four() -> None:
    terms = [term(replace(REAL, key=k, doubt=f"doubt {k}")) for k in range(6)]
    for count, more in ((3, False), (4, False), (6, True)):
        with pytest.raises(Refusal) as caught:
            layer(*terms[:count])
        reasons = str(caught.value).split(". Also: ")
        assert [f"doubt {k}" in reason for k, reason in enumerate(reasons[:4])] == [True] * min(count, 4)
        assert reasons[4:] == (["2 more reasons"] if more else [])


# --- Layers ----------------------------------------------------------------------------------------------------------


def test_layer() -> None:
    found = layer(term())
    assert (found.x, found.weight, found.transposed) == (IN_VIEW[X], IN_VIEW[WEIGHT], False)
    assert (found.masks, found.activation, found.dtype) == (((BITS_MASK, False),), "silu", torch.float32)
    assert (found.trains_masks, found.mask_weights, found.scale) == (False, (), 1)
    assert len(layer(*[term()] * 16).masks) == 16
    assert layer(term(gate=(1, 0), value=(0, 1))).masks == ((BITS_MASK, True),)
    assert layer(term(REAL), assume_binary=True).masks == ((REAL, False),)


@pytest.mark.parametrize("complement", [False, True])
def test_layer_with_trained_masks(complement: bool) -> None:
    ats, slope = (((1, 0), (0, 1)), -1) if complement else (((0, 1), (1, 0)), 1)
    found = layer(*[term(TRAINED, gate=ats[0], value=ats[1], slope=slope)] * 2, root=TRAINED_ROOT)
    assert found.masks == ((TRAINED, complement),) * 2
    assert found.trains_masks


def test_the_larger_rounding_error_counts() -> None:
    rounded = [replace(BITS_MASK, rounding=rounding) for rounding in (1e-9, 1e-8)]
    for gate_mask, value_mask in (rounded, reversed(rounded)):
        ((mask, _),) = layer(term(gate=Binary(gate_mask), value=Binary(value_mask, (1, 0)))).masks
        assert mask.rounding == 1e-8


@pytest.mark.parametrize(
    ("factors", "weights", "scale"),
    [
        ((0.5,), (), 0.5),
        ((-3, -3), (), -3),
        ((3, 3 + 2e-12), (), 3),
        ((-3, -3 - 2e-12), (), -3),
        ((3, 3 + 4e-12), (3, 3 + 4e-12), 1),
        ((0.5, -2), (0.5, -2), 1),
    ],
)
def test_numbers_that_multiply_the_terms(factors: tuple[float, ...], weights: tuple[float, ...], scale: float) -> None:
    terms = [term(formula=silu(factor), dtype=torch.float64) for factor in factors]
    found = layer(*terms, root=DOUBLE_ROOT)
    assert (found.mask_weights, found.scale) == (pytest.approx(weights, rel=1e-13), pytest.approx(scale, rel=1e-13))


def test_mask_weights_and_a_number_of_all_terms() -> None:
    weight = MaskWeight(IN_VIEW[COLUMN])
    found = layer(*(term(formula=silu(2), weight=weight) for _ in range(2)))
    assert (found.mask_weights, found.scale) == ((weight, weight), 2)


def test_digits_of_an_activation_depend_on_the_dtype() -> None:
    almost = multiply(scaled(VARIABLE, 1 + 1e-8), apply("sigmoid", scaled(VARIABLE, 1 + 1e-8)))
    assert layer(term(formula=almost)).activation == "silu"
    with pytest.raises(Refusal, match="which is none of"):
        layer(term(formula=almost, dtype=torch.float64), root=DOUBLE_ROOT)


@pytest.mark.parametrize(
    ("mask", "hides_nan"),
    [
        (BITS_MASK, False),
        (replace(BITS_MASK, rounding=1e-8), True),
        (TRAINED, True),
        (replace(BITS_MASK, bits=IN_VIEW[LOGITS]), True),
        (replace(BITS_MASK, bits=IN_VIEW[LOGITS], proof="constant"), False),
        (REAL, False),
    ],
)
def test_a_layer_may_hide_nan(mask: Mask, hides_nan: bool) -> None:
    assert layer(term(mask), assume_binary=True).hides_nan is hides_nan


def test_a_mask_with_larger_rounding_errors_than_the_layer_is_refused() -> None:
    """The operator's mask is exact, so its result would differ by more than the layer's own rounding."""
    rounded = replace(BITS_MASK, rounding=torch.finfo(torch.float16).eps)
    with pytest.raises(Refusal, match="rounding errors of a narrower dtype"):
        layer(term(rounded))
