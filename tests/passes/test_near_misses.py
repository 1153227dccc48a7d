"""Near misses: which programs with two masked forms of a weight are reported, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import Capture, assert_same, results
from lookalikes import SAME, tensors
from spellings import gated
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def reasons(function: Callable[[Tensor, Tensor, Tensor], Any]) -> list[str]:
    """Why a function of x, a weight and a mask is not fused."""
    capture = Capture()
    capture.compile(function)(torch.randn(5, 8), torch.randn(8, 8), torch.rand(8, 8) > 0.5)
    assert capture.report.fused == []
    return capture.reasons


def gate(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return F.linear(x, w * m)


# Name -> programs and what one reason says.
WORDS: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Any]]] = {
    "a sine of a masked weight": (
        "`sin` (float32) reads a masked weight by `sin`, `linear`",
        lambda x, w, m: F.linear(x, (w * m).sin()) * gate(x, w, ~m),
    ),
    "a sine of a gate": (
        "`sin` (float32) reads a product with a masked weight by",
        lambda x, w, m: gate(x, w, m).sin() * gate(x, w, ~m),
    ),
    "a sine of an activation": (
        "`sin` (float32) reads a product with a masked weight by",
        lambda x, w, m: F.silu(gate(x, w, m)).sin() * gate(x, w, ~m),
    ),
    "a sine of a gate, and a value without a mask": (
        "`sin` (float32) reads a product with a masked weight by",
        lambda x, w, m: gate(x, w, m).sin() * F.linear(x, w),
    ),
    "two activations": (
        "reads relu(g) and tanh(g) of the products g, of which one must be g itself (the value), by `mul`",
        lambda x, w, m: F.relu(gate(x, w, m)) * gate(x, w, ~m).tanh(),
    ),
    "a checkpoint of the gate": (
        "another graph reads one or both of them",
        lambda x, w, m: _linear(x, w * m) * gate(x, w, ~m),
    ),
    "a checkpoint of the value": (
        "another graph reads one or both of them",
        lambda x, w, m: gate(x, w, m) * _linear(x, w * ~m),
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_words(name: str) -> None:
    phrase, function = WORDS[name]
    assert [phrase in reason for reason in reasons(function)] == [True]


def _linear(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(F.linear, x, w, use_reentrant=False)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, m: gate(x, w, m).sin() * gate(x + 1, w, ~m),
        lambda x, w, m: gate(x, w, m).sin() * gate(x, w, m),
        lambda x, w, m: (_linear(x, w * m), _linear(x, w * m)),
        lambda x, w, m: gate(x, w, m).sum() * 0 + x.sum(),
        lambda x, w, m: checkpoint(gate, x, w, m, use_reentrant=False) * gate(x, w, ~m),
        # Products that are masked by the elements of the outputs, by tokens, by one bit, or by a stack of rows
        lambda x, w, m: _masked_outputs(F.linear(x, w), m[:5]),
        lambda x, w, m: _masked_outputs(F.linear(x, w), m[:5, :1]),
        lambda x, w, m: _masked_outputs(F.linear(x, w), m[0, 0]),
        lambda x, w, m: _masked_outputs(F.linear(x, w), m[:2].unsqueeze(1)),
    ],
)
def test_no_near_miss(function: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
    assert reasons(function) == []


def _masked_outputs(outputs: Tensor, m: Tensor) -> Tensor:
    return F.silu(outputs * m) * (outputs * ~m)


@pytest.mark.parametrize(("sines", "count"), [(8, 1), (9, 0)])
def test_a_product_nine_nodes_after_a_mask_is_no_near_miss(sines: int, count: int) -> None:
    def far(w: Tensor) -> Tensor:
        for _ in range(sines):
            w = w.sin()
        return w

    assert len(reasons(lambda x, w, m: F.linear(x, far(w * m)) * F.linear(x, far(w * ~m)))) == count


@pytest.mark.parametrize(("count", "end"), [(4, "by `asin` in a way"), (8, "by `asin`, and 4 more in a way")])
def test_no_more_than_four_nodes_are_named(count: int, end: str) -> None:
    functions = (torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan, torch.sinh, torch.cosh)[:count]

    def function(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
        product = gate(x, w, m)
        return torch.stack([read(product) for read in functions]) * gate(x, w, ~m)

    (reason,) = reasons(function)
    assert end in reason


def test_weights_masked_before_a_graph_break_are_reported() -> None:
    def layer(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
        gate_weight, value_weight = w * m, w * ~m
        torch._dynamo.graph_break()
        return F.silu(F.linear(x, gate_weight)) * F.linear(x, value_weight)

    x, w = torch.randn(5, 8), torch.randn(8, 8)
    capture = Capture()
    torch._dynamo.reset()
    torch.compile(layer, backend=capture)(x, w, w > 0)
    assert ["another graph reads" in reason for reason in capture.reasons] == [True]
    assert ["invert" in line for site in capture.report.missed for line in site.before] == [True], "the last is named"


def test_a_product_of_four_operands_that_masks_the_weight_is_reported() -> None:
    def layer(x: Tensor, w: Tensor, m: Tensor, *factors: Tensor) -> Tensor:
        gate, value = (torch.einsum("bh,dh,dh,h->bd", x, w, f.float(), *factors) for f in (m, ~m))
        return F.silu(gate) * value

    x, w, factors, m = torch.randn(5, 8), torch.randn(6, 8), torch.randn(8), torch.rand(6, 8) > 0.5
    capture = Capture()
    capture.compile(layer)(x, w, m, factors)
    assert ["reads a masked weight by `einsum`" in reason for reason in capture.reasons] == [True]
    one_mask, other = Capture(), torch.randn(6, 8)
    one_mask.compile(lambda: torch.einsum("bh,dh,dh,h->bd", x, w, m.float(), factors) * (x @ other.T))()
    assert one_mask.reasons == []


def test_a_symbolic_number_of_masks_is_reported() -> None:
    """Fusing would need a guard on the number."""

    def layer(x: Tensor, weight: Tensor, masks: Tensor) -> Tensor:
        gates, values = (torch.einsum("bh,ndh->nbd", x, weight * m) for m in (masks, ~masks))
        return (F.silu(gates) * values).sum(0)

    named, capture = tensors(), Capture()
    given = {"x": named["x"], "weight": named["weight"], "masks": named["bits"]}
    assert_same(results(capture.compile(layer, dynamic=True), given), results(layer, given), SAME)
    assert capture.report.fused == []
    assert ["reads a masked weight by `einsum`" in reason for reason in capture.reasons] == [True]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, m: F.gelu(gate(x, w, m)) * gate(x, w, ~m) + gated(x, w, m.flip(0), ~m.flip(0)),
        lambda x, w, m: gated(x, w, m, ~m) + gated(x + 1, w, m.flip(0), ~m.flip(0)),
        lambda x, w, m: _with_its_first(gated(x, w, m, ~m), gated(x, w, m.flip(0), ~m.flip(0))),
    ],
    ids=["two activations", "two inputs", "a part is used"],
)
def test_a_sum_that_becomes_several_operators_says_so(function: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
    """Each operator reads the whole weight, which a user may not expect of one sum."""
    named, capture = tensors(), Capture()
    given = {"x": named["x"], "w": named["weight"], "m": named["bits"][0]}
    assert_same(results(capture.compile(function), given), results(function, given), SAME)
    assert len(capture.report.fused) == 2
    assert "2 operators" in str(capture.report)


def _with_its_first(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return first + second, first
