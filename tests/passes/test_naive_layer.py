"""The naive layer of the paper (`mglu_ops.nn.NaiveMGLU`) becomes one operator for every size, dtype and mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mglu_ops.activations import ACTIVATIONS
from mglu_ops.nn import NaiveMGLU
from tests.support.budgets import BUDGET, NAIVE_FACTOR, relative_error
from tests.support.families import family
from tests.support.programs.compiled import OfSource, parameter
from tests.support.programs.graphs import Capture, assert_same, masked_products, model_results

SAME = 10 * BUDGET[torch.float64]


def fused(model: nn.Module, x: Tensor, budget: float = SAME) -> Capture:
    """Fuse a model, and compare its result and gradients with eager's."""
    capture = Capture(strict=True)
    assert_same(model_results(model, x, capture.compile(model)), model_results(model, x), budget)
    return capture


@pytest.mark.parametrize(("dtype", "n_masks"), family([torch.float32, torch.bfloat16, torch.float16], [4, 1, 2, 16]))
def test_naive_layer_in_training(dtype: torch.dtype, n_masks: int) -> None:
    torch.manual_seed(0)
    model = NaiveMGLU(24, 16, n_masks=n_masks, dtype=dtype)
    shape = (2, 3, 24) if n_masks == 2 else (5, 24)
    x = torch.randn(shape, dtype=dtype)
    naive = model_results(model, x)
    oracle = model_results(copy.deepcopy(model).double(), x.double())
    capture = Capture(strict=True)
    found = model_results(model, x, capture.compile(model))

    assert masked_products(capture.calls_before) == 2 * n_masks
    assert capture.calls == {"mglu.forward_ste": 1, "getitem": 1}
    for name, wanted in oracle.items():
        bar = max(BUDGET[dtype], NAIVE_FACTOR * relative_error(naive[name], wanted))
        assert found[name].dtype == dtype
        assert relative_error(found[name], wanted) <= bar, name


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_naive_layer_with_each_activation(activation: str) -> None:
    torch.manual_seed(1)
    model = NaiveMGLU(16, 12, n_masks=2, activation=activation, dtype=torch.float64)
    capture = fused(model, torch.randn(4, 16, dtype=torch.float64))
    assert capture.calls == {"mglu.forward_ste": 1, "getitem": 1}
    assert [site.activation for site in capture.report.fused] == [activation]


@pytest.mark.parametrize("sizes", [(0, 12, 16), (3, 0, 16), (3, 12, 0)])
@pytest.mark.parametrize(
    "source", ["gated(x, w, m, ~m)", "term(F.linear(x, w.masked_fill(~m, 0)), F.linear(x, w * ~m))"]
)
def test_layers_without_tokens_or_features(source: str, sizes: tuple[int, int, int]) -> None:
    tokens, rows, columns = sizes
    model = OfSource(source, w=parameter(rows, columns), m=torch.rand(rows, columns) > 0.5)
    assert fused(model, torch.randn(tokens, columns)).calls["mglu.forward"] == 1


@pytest.mark.parametrize(("mode", "n_masks"), family([torch.no_grad, torch.inference_mode], [4, 1]))
def test_naive_layer_in_inference_packs_its_masks(mode: Callable[[], Any], n_masks: int) -> None:
    model = NaiveMGLU(16, 12, n_masks=n_masks).eval()
    x = torch.randn(4, 16)
    capture = Capture(strict=True)
    with mode():
        torch.testing.assert_close(capture.compile(model)(x), model(x))
    counts = capture.calls
    assert counts["mglu.pack_logits"] == counts["mglu.forward"] == 1
    assert masked_products(counts) == counts["mul"] == counts["mglu.forward_ste"] == 0
    assert [site.operator for site in capture.report.fused] == ["forward"]


def test_fixed_masks_are_not_packed_again() -> None:
    model = NaiveMGLU(16, 12, n_masks=3, learnable_masks=False)
    assert fused(model, torch.randn(4, 16), 4 * BUDGET[torch.float32]).calls == {"mglu.forward": 1}


@pytest.mark.parametrize(("top_k", "learned"), family([2, 1, 4], [True, False]))
def test_routed_layer(top_k: int, learned: bool) -> None:
    torch.manual_seed(2)
    model = NaiveMGLU(16, 12, n_masks=4, top_k=top_k, learnable_masks=learned, dtype=torch.float64)
    for training, operator in ((True, "forward_ste" if learned else "forward"), (False, "forward")):
        with torch.set_grad_enabled(training):
            capture = fused(model, torch.randn(2, 3, 16, dtype=torch.float64))
        assert capture.calls[f"mglu.{operator}"] == 1
        assert masked_products(capture.calls) == 1, "the router"


@pytest.mark.parametrize("shape", [(16,), (1, 16), (0, 16), (2, 3, 4, 16)])
def test_shapes_of_x(shape: tuple[int, ...]) -> None:
    model = NaiveMGLU(16, 12, n_masks=2, dtype=torch.float64)
    assert fused(model, torch.randn(shape, dtype=torch.float64)).calls["mglu.forward_ste"] == 1


@pytest.mark.parametrize("where", ["ambient", "inside"])
def test_autocast(where: str) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = NaiveMGLU(16, 12, n_masks=2)

        def forward(self, x: Tensor) -> Tensor:
            if where == "ambient":
                return self.layer(x)
            with torch.autocast("cpu", torch.bfloat16):
                return self.layer(x) * 2

    torch.manual_seed(4)
    model, x = Cast(), torch.randn(4, 16)
    oracle = model_results(copy.deepcopy(model.layer).double(), x.double())
    scale = 1 if where == "ambient" else 2
    capture = Capture(strict=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "ambient"):
        naive = model_results(model, x)
        found = model_results(model, x, capture.compile(model))
    assert capture.calls["mglu.forward_ste"] == 1
    for name, wanted in oracle.items():
        key = name if name in ("x", "result 0") else f"layer.{name}"
        assert found[key].dtype == naive[key].dtype
        bar = max(BUDGET[torch.bfloat16], NAIVE_FACTOR * relative_error(naive[key], scale * wanted))
        assert relative_error(found[key], scale * wanted) <= bar, key
    assert [site.dtype for site in capture.report.fused] == ["bfloat16"]
