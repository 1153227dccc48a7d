"""Near misses: which programs with two masked forms of a weight are reported, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import Capture
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


@pytest.mark.parametrize(
    ("function", "phrase"),
    [
        (
            lambda x, w, m: F.linear(x, (w * m).sin()) * gate(x, w, ~m),
            "`sin` (float32) reads a masked weight by `sin`, `linear`",
        ),
        (
            lambda x, w, m: gate(x, w, m).sin() * gate(x, w, ~m),
            "`sin` (float32) reads a product with a masked weight by",
        ),
        (lambda x, w, m: F.silu(gate(x, w, m)).sin() * gate(x, w, ~m), "`sin` (float32) reads a product with a masked"),
        (
            lambda x, w, m: gate(x, w, m).sin() * F.linear(x, w),
            "`sin` (float32) reads a product with a masked weight by",
        ),
        (
            lambda x, w, m: F.relu(gate(x, w, m)) * gate(x, w, ~m).tanh(),
            "reads relu(g) and tanh(g) of the products g, of which one must be g itself (the value), by `mul`",
        ),
        (lambda x, w, m: (gate(x, w, m), gate(x, w, ~m)), "but no gate is multiplied by a value"),
        (lambda x, w, m: checkpoint(gate, x, w, m, use_reentrant=False) * gate(x, w, ~m), ""),
        (lambda x, w, m: _linear(x, w * m) * gate(x, w, ~m), "another graph reads one or both of them"),
        (lambda x, w, m: gate(x, w, m) * _linear(x, w * ~m), "another graph reads one or both of them"),
    ],
)
def test_words(function: Callable[[Tensor, Tensor, Tensor], Any], phrase: str) -> None:
    found = reasons(function)
    assert [phrase in reason for reason in found] == ([True] if phrase else []), found


def _linear(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(F.linear, x, w, use_reentrant=False)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, m: gate(x, w, m).sin() * gate(x + 1, w, ~m),
        lambda x, w, m: gate(x, w, m).sin() * gate(x, w, m),
        lambda x, w, m: (_linear(x, w * m), _linear(x, w * m)),
        lambda x, w, m: gate(x, w, m).sum() * 0 + x.sum(),
    ],
)
def test_no_near_miss(function: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
    assert reasons(function) == []


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
