"""Backward keeps x, or y of a down projection, only if it reads it: if the weights or the masks need a gradient."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import mglu_ops
from mglu_ops.nn import MGLU


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_x_may_be_written_to_if_only_x_needs_a_gradient(frozen: bool, compiled: bool) -> None:
    """As in a residual stream `hidden += mlp(hidden)` whose MLP is frozen, for example beside adapters."""
    layer = MGLU(8, 8, n_masks=2).requires_grad_(False)
    layer = mglu_ops.freeze(layer) if frozen else layer
    run = torch.compile(layer) if compiled else layer

    def step(written: bool) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(3, 8, requires_grad=True)
        hidden = x * 1
        if written:
            hidden += run(hidden)
        else:
            hidden = hidden + layer(hidden)
        hidden.sum().backward()
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(step(written=True), step(written=False))


def test_only_the_weights_gradient_keeps_x() -> None:
    for trained in (True, False):
        layer, kept = MGLU(8, 16, n_masks=2).requires_grad_(trained), []
        x = torch.randn(3, 8, requires_grad=True)
        with saved_tensors_hooks(
            lambda tensor, kept=kept: (kept.append(tensor.data_ptr()), tensor)[1], lambda tensor: tensor
        ):
            layer(x)
        assert (x.data_ptr() in kept) == trained


def test_only_the_weights_gradient_keeps_y() -> None:
    y, weights = torch.randn(2, 2, 8, requires_grad=True), torch.rand(2, 2)
    given = torch.randn(3, 4, 8), torch.tensor([[0, 1], [1, 2]])
    (expected,) = torch.autograd.grad(torch.ops.mglu.experts_down(y, *given, weights).sum(), y)
    written = y * 1
    result = torch.ops.mglu.experts_down(written, *given, weights)
    written += 1
    assert torch.equal(torch.autograd.grad(result.sum(), y)[0], expected)


@pytest.mark.parametrize("given", [torch.uint8, torch.float32])
def test_hooks_that_do_not_return_the_saved_dtype_are_an_error(given: torch.dtype) -> None:
    """A compression hook must keep masks: of their bits, 8 are one number, which fewer than 8 digits would change."""
    layer, x = MGLU(8, 16, n_masks=2), torch.randn(3, 8, requires_grad=True)
    ids, weights = torch.tensor([[0, 1], [1, 2], [0, 2]]), torch.rand(3, 2)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.bfloat16() if tensor.dtype is given else tensor

    with saved_tensors_hooks(cast, lambda tensor: tensor):
        results = [layer(x)]
        if given is torch.float32:
            y = torch.randn(3, 2, 8, requires_grad=True)
            results.append(torch.ops.mglu.experts_down(y, torch.randn(3, 4, 8), ids, weights))
    for result in results:
        with pytest.raises(RuntimeError, match=f"saved for backward in {given} came back in torch.bfloat16"):
            result.sum().backward()
