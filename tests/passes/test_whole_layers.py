"""Whole layers as people write them (module `layers`): each becomes one operator in every mode, dtype and shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mglu_ops
from compile_passes.report import FusionReport
from tests.support.budgets import BUDGET, relative_error
from tests.support.families import family, sample
from tests.support.programs.graphs import Capture, assert_same, calls, packings, results
from tests.support.programs.layers import BY_HAND, LAYERS, H, tensors

SAME = 10 * BUDGET[torch.float64]
WITHOUT_ACTIVATIONS = [name for name in LAYERS if not any(name in sources for sources in BY_HAND.values())]


def check(name: str, named: dict[str, Tensor], operator: str, budget: float, **options: Any) -> Capture:
    _, activation, layer = LAYERS[name]
    capture = Capture(strict=True)
    compiled = capture.compile(layer, **options)
    assert_same(results(compiled, named), results(layer, named), budget)
    infers = operator == "forward"
    assert packings(capture.calls) == capture.calls["mglu.forward"] == infers
    assert capture.calls["mglu.forward_ste"] == (not infers)
    assert [site.activation for site in capture.report.fused] == [activation]
    assert capture.report.missed == []
    assert not capture.calls["linear"]
    return capture


@pytest.mark.parametrize("name", sample(LAYERS, every=3))
def test_layer_in_training(name: str) -> None:
    check(name, tensors(3), LAYERS[name][0], SAME)


@pytest.mark.parametrize("name", sample(LAYERS, every=12))
def test_layer_in_inference_with_x_of_three_dimensions(name: str) -> None:
    with torch.no_grad():
        check(name, tensors(2, three_d=True), "forward", SAME)


@pytest.mark.parametrize(("n_masks", "name"), family([1, 16], WITHOUT_ACTIVATIONS, most=1))
def test_layer_with_one_mask_or_with_sixteen(n_masks: int, name: str) -> None:
    check(name, tensors(n_masks), LAYERS[name][0], SAME)


@pytest.mark.parametrize(("dtype", "name"), family([torch.float32, torch.bfloat16, torch.float16], LAYERS, most=1))
def test_layer_in_other_dtypes(dtype: torch.dtype, name: str) -> None:
    _, activation, layer = LAYERS[name]
    named, exact = tensors(2, dtype=dtype), tensors(2, dtype=torch.float64)
    exact = {key: named[key].detach().double() for key in exact}
    with torch.no_grad():
        capture = Capture(strict=True)
        found = results(capture.compile(layer), named)
        unfused = results(layer, named)
        wanted = results(layer, exact)
    assert [site.activation for site in capture.report.fused] == [activation]
    for key, value in wanted.items():
        error, naive = (relative_error(r[key], value) for r in (found, unfused))
        assert error <= max(1.5 * naive, BUDGET[dtype]), key


class Layer(nn.Module):
    def __init__(self, function: Callable[..., Any], weight: Tensor, logits: Tensor) -> None:
        super().__init__()
        self.function = function
        self.weight, self.logits = nn.Parameter(weight.detach()), nn.Parameter(logits.detach())

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.weight, self.logits)


@pytest.mark.parametrize("name", sample(LAYERS, every=25))
def test_exported_layer(name: str) -> None:
    """With grad mode on and off, `fuse` also finds the layers in exported graphs, which consist of ATen operators."""
    operator, activation, function = LAYERS[name]
    named = tensors(2)
    layer = Layer(function, named["weight"], named["logits"])
    for mode, wanted_operator in ((torch.enable_grad, operator), (torch.no_grad, "forward")):
        with mode():
            unfused, report = torch.export.export(layer, (named["x"],)).module(), FusionReport()
            fused = mglu_ops.fuse(unfused, report=report, strict=True)
            wanted = results(unfused.forward, {"x": named["x"]}, dict(unfused.named_parameters()))
            assert_same(results(fused.forward, {"x": named["x"]}, dict(fused.named_parameters())), wanted, SAME)
            assert_same({"y": fused(named["x"]).detach()}, {"y": layer(named["x"]).detach()}, SAME)
        assert [site.activation for site in report.fused] == [activation]
        # `torch.export` drops the backward of a custom `autograd.Function`, so another operator replaces the layer.
        if "autograd.Function" not in name and "Sign.apply" not in name:
            assert calls([fused.graph])[f"mglu.{wanted_operator}"] == 1


@pytest.mark.parametrize("name", sample(LAYERS, every=25))
def test_layer_with_a_dynamic_number_of_tokens(name: str) -> None:
    _, activation, layer = LAYERS[name]
    capture = Capture(strict=True)
    with torch.no_grad():
        named = tensors(2)
        compiled = capture.compile(layer)
        for tokens in (7, 3, 12):
            named["x"] = torch.randn(tokens, H, dtype=torch.float64)
            torch._dynamo.mark_dynamic(named["x"], 0)
            assert_same(results(compiled, named), results(layer, named), SAME)
    assert [site.activation for site in capture.report.fused] == [activation]
    assert capture.report.graphs == 1
