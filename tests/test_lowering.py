"""The operators taken apart for Inductor: the same numbers, and none of them left in the graph."""

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
    assert torch.equal(traced.forward(x, weight, packed, "gelu", routes), result)
    found = traced.backward(grad, x, weight, packed, gates, values, "gelu", routes, (True, True, routed), dtype)
    expected = torch.autograd.grad(oracle, exact[: 3 + routed], grad.double())
    for name, ours, theirs in zip(("x", "weight", "logits", "route"), found, expected, strict=False):
        assert_matches(ours, theirs, dtype, name)
    some = traced.backward(grad, x, weight, packed, gates, values, "gelu", routes, (False, True, False), None)
    assert [t.numel() for t in some] == [0, weight.numel(), 0, 0]


def refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("an operator is left in the graph")


@pytest.mark.slow
def test_inductor_takes_the_layer_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with the test of the device overruled: forward and backward without a call of an operator."""
    layer, x = NaiveMGLU(30, 12, n_masks=3).double(), torch.randn(4, 30, dtype=torch.float64)
    expected = layer(x)
    expected.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    monkeypatch.setattr(lowering, "_is_on_gpu", lambda tensor: True)
    for name in ("forward", "forward_train", "backward"):
        monkeypatch.setattr(dispatch, name, refuse)
    with inductor_config.patch(force_disable_caches=True), install.fusion(strict=True):
        compiled = torch.compile(layer)
        result = compiled(x)
        result.square().sum().backward()
        with torch.no_grad():
            assert_matches(compiled(x), expected.detach())
    assert_matches(result, expected)
    for name, parameter in layer.named_parameters():
        assert_matches(parameter.grad, gradients[name], torch.float64, name)


def test_elsewhere_the_operators_stay_whole() -> None:
    x, weight, logits, _ = leaves(torch.float32, 2)
    packed = torch.ops.mglu.pack_masks(logits > 0)
    assert lowering._forward(x, weight, packed) is NotImplemented
