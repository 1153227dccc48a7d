"""Layers with mask weights, with masks or results that have other users, and with some tensors trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.budgets import BUDGET, relative_error
from tests.support.programs.graphs import Capture, assert_same, masked_products, results
from tests.support.programs.lookalikes import layer_tensors
from tests.support.programs.spellings import gated, straight_through

# Both the fused and the unfused layer have rounding errors within the budget of their dtype.
SAME = 10 * BUDGET[torch.float64]


def fused(layer: Callable[..., Any], make: Callable[[], dict[str, Tensor]] = layer_tensors) -> Capture:
    """Compile a layer and compare it with eager. No product with a weight may remain."""
    capture = Capture(strict=True)
    assert_same(results(capture.compile(layer), make()), results(layer, make()), SAME)
    assert masked_products(capture.calls) == 0
    return capture


MASK_WEIGHTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "columns": lambda mask_weight, i: mask_weight[..., i : i + 1],
    "columns in another order": lambda mask_weight, i: mask_weight[..., (i + 1) % 3 : (i + 1) % 3 + 1],
    "one column": lambda mask_weight, i: mask_weight[..., :1],
    "tensors of their own": lambda mask_weight, i: mask_weight.clone()[..., i : i + 1].exp(),
    "unsqueezed": lambda mask_weight, i: mask_weight[..., i].unsqueeze(-1),
}


def _with_mask_weights(*shape: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: layer_tensors(
        mask_weight=torch.linspace(-1, 2, 15, dtype=torch.float64).view(shape).requires_grad_()
    )


@pytest.mark.parametrize("way", MASK_WEIGHTS)
def test_mask_weights(way: str) -> None:
    def layer(x: Tensor, weight: Tensor, logits: Tensor, mask_weight: Tensor) -> Tensor:
        weights = [MASK_WEIGHTS[way](mask_weight, i) for i in range(3)]
        return sum(r * gated(x, weight, straight_through(l)) for r, l in zip(weights, logits, strict=True))

    calls = fused(layer, _with_mask_weights(5, 3)).calls
    assert calls["mglu.forward_ste"] == 1
    assert calls["cat"] == (way in ("one column", "tensors of their own")), "the operator reads `mask_weight` itself"


def test_mask_weights_of_a_part_of_a_stack() -> None:
    def layer(x: Tensor, weight: Tensor, logits: Tensor, mask_weight: Tensor) -> Tensor:
        terms = torch.stack([gated(x, weight, straight_through(l)) for l in logits])
        return (mask_weight[..., None] * terms)[1:].sum(0)

    assert [site.n_masks for site in fused(layer, _with_mask_weights(3, 5)).report.fused] == [2]


def test_repeated_and_subset_masks() -> None:
    """One mask occurs twice, and another mask never. The operator has as many masks as the sum has terms."""

    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        masks = [straight_through(logits[i]) for i in (0, 2, 0)]
        return sum(gated(x, weight, m) for m in masks)

    assert [site.n_masks for site in fused(layer).report.fused] == [3]


def test_a_mask_with_other_uses_stays() -> None:
    """A penalty on the masks adds its own gradient to the gradient of the layer."""

    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        m = straight_through(logits[0])
        return gated(x, weight, m), m.sum() * 0.1

    fused(layer)


def test_result_that_is_cast_or_copied() -> None:
    """The layer ends before a cast of its result, even if another node reads the result without the cast."""

    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        y = gated(x, weight, straight_through(logits[0]))
        return y.double(), y.clone(), y

    named = {name: t.detach().float().requires_grad_() for name, t in layer_tensors().items()}
    capture = Capture(strict=True)
    found = results(capture.compile(layer), named)
    assert_same(found, results(layer, named), 4 * BUDGET[torch.float32])
    assert len(capture.report.fused) == 1


def test_sixteen_bits_summed_in_float32() -> None:
    """The program casts gate and value to float32, adds the terms in float32, and rounds the sum at the end."""

    def layer(x: Tensor, weight: Tensor, bits: Tensor) -> Tensor:
        y: Any = 0
        for m in bits:
            gate, value = F.linear(x, weight * m).float(), F.linear(x, weight * ~m).float()
            y = y + F.silu(gate) * value
        return y.to(x.dtype)

    torch.manual_seed(0)
    x, weight, bits = torch.randn(6, 16).bfloat16(), torch.randn(12, 16).bfloat16(), torch.rand(3, 12, 16) > 0.5
    capture = Capture(strict=True)
    found = capture.compile(layer)(x, weight, bits)
    oracle = layer(x.double(), weight.double(), bits)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, oracle) <= BUDGET[torch.bfloat16]
    assert capture.calls["mglu.forward"] == 1


@pytest.mark.parametrize("trained", [("x", "logits"), ("logits",), ("x", "weight"), ("weight",), ("x",), ()])
def test_what_requires_a_gradient(trained: tuple[str, ...]) -> None:
    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        return sum(gated(x, weight, straight_through(l)) for l in logits)

    def named() -> dict[str, Tensor]:
        return {name: t.detach().requires_grad_(name in trained) for name, t in layer_tensors().items()}

    operator = "forward_ste" if "logits" in trained else "forward"
    assert [site.operator for site in fused(layer, named).report.fused] == [operator]
