"""The operators decomposed for Inductor: the same numbers, and no operator left in the graph."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config as inductor_config
from budgets import assert_matches
from torch import Tensor

from compile_passes import install, lowering
from mglu_ops import dispatch
from mglu_ops.backends import reference, traced
from mglu_ops.nn import NaiveMGLU


def leaves(dtype: torch.dtype, n_masks: int) -> list[Tensor]:
    shapes = ((5, 7, 30), (12, 30), (n_masks, 12, 30), (5, 7, n_masks))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_masks", [1, 3])
@pytest.mark.parametrize("routed", [False, True])
def test_traced_functions_agree_with_the_oracle(dtype: torch.dtype, n_masks: int, routed: bool) -> None:
    x, weight, logits, route = leaves(dtype, n_masks)
    packed, grad = torch.ops.mglu.pack_masks(logits > 0), torch.randn(5, 7, 12, dtype=dtype)
    routes = route if routed else None
    result, gates, values = traced.forward_train(x, weight, packed, "gelu", routes)
    exact = [t.double().requires_grad_() for t in (x, weight, (logits > 0), route)]
    oracle = reference.forward(exact[0], exact[1], exact[2], "gelu", exact[3] if routed else None)
    assert_matches(result, oracle)
    found = traced.backward(grad, x, weight, packed, gates, values, "gelu", routes, (True, True, routed), dtype)
    expected = torch.autograd.grad(oracle, exact[: 3 + routed], grad.double())
    for name, ours, theirs in zip(("x", "weight", "logits", "route"), found, expected, strict=False):
        assert_matches(ours, theirs, dtype, name)
    some = traced.backward(grad, x, weight, packed, gates, values, "gelu", routes, (False, True, False), None)
    assert [t.numel() for t in some] == [0, weight.numel(), 0, 0]


def refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("an operator is left in the graph")


def run(layer: NaiveMGLU, x: Tensor, compiled: bool) -> dict[str, Tensor]:
    """The result and the gradients of a training step, and the result of inference."""
    layer.zero_grad()
    function = torch.compile(layer) if compiled else layer
    result = function(x)
    result.square().sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in layer.named_parameters() if parameter.grad is not None}
    with torch.no_grad():
        return {"result": result.detach(), "inference": function(x), **found}


@pytest.mark.parametrize("on_gpu", [True, False])
def test_inductor_decomposes_a_training_step_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    """The device is faked. On a GPU a training step calls no operator; on other devices it calls both."""
    torch._dynamo.reset()
    layer, x = NaiveMGLU(30, 12, n_masks=3).double(), torch.randn(4, 30, dtype=torch.float64)
    expected = run(layer, x, compiled=False)
    monkeypatch.setattr(lowering, "_is_on_gpu", lambda tensor: on_gpu)
    calls = []
    for name in ("forward_train", "backward"):
        original = getattr(dispatch, name)
        whole = refuse if on_gpu else lambda *args, name=name, call=original: (calls.append(name), call(*args))[1]
        monkeypatch.setattr(dispatch, name, whole)
    with inductor_config.patch(force_disable_caches=True), install.fusion(strict=True) as report:
        found = run(layer, x, compiled=True)
    assert [site.route for site in report.fused] == ["forward_ste", "forward"]
    assert calls == ([] if on_gpu else ["forward_train", "backward"])
    assert set(found) == set(expected)
    for name, value in found.items():
        assert_matches(value, expected[name], torch.float64, name)
