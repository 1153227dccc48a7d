"""The choice of the gate in a symmetric product, unknown numbers, relu-like functions, and digits of coefficients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.budgets import BUDGET
from tests.support.programs.graphs import Capture, assert_same, compare, results
from tests.support.programs.layers import tensors, with_activation

SAME = 10 * BUDGET[torch.float64]


@pytest.mark.parametrize("swapped", [False, True])
def test_the_factor_with_the_mask_itself_is_the_gate_of_a_symmetric_product(swapped: bool) -> None:
    """If the gate is the factor with `logits > 0`, one operator compares and packs the logits."""

    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        gate, value = F.linear(x, weight * (logits[0] > 0)), F.linear(x, weight * (logits[0] <= 0))
        return value * gate if swapped else gate * value

    capture = compare(layer, lambda: {name: t.detach() for name, t in tensors(1).items()}, SAME)
    assert [site.activation for site in capture.report.fused] == ["identity"]
    assert capture.calls["mglu.pack_logits"] == 1


def test_a_symbolic_float_is_named() -> None:
    """Under `dynamic=True` Dynamo makes a float an input of the graph. Its value is unknown, so the report names it."""
    layer = with_activation(lambda g: 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))))
    named, capture = tensors(2), Capture()
    assert_same(results(capture.compile(layer), named), results(layer, named), SAME)
    assert [site.activation for site in capture.report.fused] == ["gelu_tanh"]
    capture = Capture()
    assert_same(results(capture.compile(layer, dynamic=True), named), results(layer, named), SAME)
    assert capture.report.fused == []
    (reason,) = capture.reasons
    assert "whose value is unknown when compiling" in reason


# Functions with the values of relu, as `(gradient at 0, function)`.
KINKS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "clamp": ("1", lambda g: g.clamp(min=0)),
    "clamp of a position": ("1", lambda g: g.clamp(0)),
    "clamp of None": ("1", lambda g: torch.clamp(g, 0.0, None)),
    "clip": ("1", lambda g: torch.clip(g, 0)),
    "clamp_min": ("1", lambda g: g.clamp_min(0)),
    "clamp_min of a keyword": ("1", lambda g: torch.clamp_min(g, min=0.0)),
    "maximum": ("1/2", lambda g: torch.maximum(g, torch.zeros_like(g))),
    "maximum of zeros": ("1/2", lambda g: torch.maximum(torch.zeros_like(g), other=g)),
    "maximum of a number": ("1/2", lambda g: torch.maximum(g, torch.tensor(0.0, dtype=g.dtype))),
    "max": ("1/2", lambda g: torch.max(g, torch.zeros_like(g))),
}


@pytest.mark.parametrize("name", KINKS)
def test_relu_with_another_gradient_at_0_is_fused_only_in_inference(name: str) -> None:
    """The gate is exactly 0 in rows where its mask is all 0, so the gradient at 0 matters."""
    gradient, function = KINKS[name]
    layer, named = with_activation(function), tensors(2)
    with torch.no_grad():
        named["logits"][0] = -1
    capture = Capture()
    assert_same(results(capture.compile(layer), named), results(layer, named), SAME)
    (reason,) = capture.reasons
    assert f"whose gradient where the gate is 0 is {gradient}, and not 0" in reason
    assert capture.report.fused == []
    with torch.no_grad():
        capture = Capture(strict=True)
        assert_same(results(capture.compile(layer), named), results(layer, named), SAME)
    assert [site.activation for site in capture.report.fused] == ["relu"]


def test_constants_of_six_digits_are_enough_only_below_float64() -> None:
    def function(g: Tensor) -> Tensor:
        return 0.5 * g * (1 + torch.tanh(0.797885 * (g + 0.044715 * g**3)))

    for dtype, fused in ((torch.float32, 1), (torch.float64, 0)):
        named, capture = tensors(1, dtype=dtype), Capture()
        layer = with_activation(function)
        assert_same(results(capture.compile(layer), named), results(layer, named), 10 * BUDGET[dtype])
        assert len(capture.report.fused) == fused
        assert len(capture.report.missed) == 1 - fused
