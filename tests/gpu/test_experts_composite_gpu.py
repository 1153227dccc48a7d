"""Experts on the composite backend on a GPU, and packing of their logits. Calls must not wait for the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mglu_ops import dispatch
from mglu_ops.backends import composite
from mglu_ops.formats import FORMATS
from tests.support.budgets import BUDGET, relative_error
from tests.support.calls import without_waiting
from tests.support.layers import DTYPES, ROUTINGS, down_oracle, laid_out, make_down, make_experts, sorted_rows

pytestmark = pytest.mark.gpu
mglu = torch.ops.mglu


def on_gpu(args: Any) -> Any:
    """A copy of the arguments with all tensors on the GPU."""
    return type(args)(*(arg.cuda() if isinstance(arg, Tensor) else arg for arg in args))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_match_a_loop_without_waiting(dtype: torch.dtype, weight_format: str, routing: str) -> None:
    if dtype is torch.float64 and weight_format != "dense":
        pytest.skip("no float64 with stored weights in this family")
    for tokens in (1, 70):
        layer = make_experts(
            tokens, 2, 5, 136, 72, routing=routing, dtype=dtype, weighted=tokens > 1, weight_format=weight_format
        )
        down, (rows, pairs) = make_down(layer, weight_format), sorted_rows(layer)
        given, there, down_there = on_gpu(layer.given), on_gpu(rows), on_gpu(down)
        dispatch.forward(given, backend="composite")  # torch's first calls may wait
        with without_waiting():
            result = dispatch.forward(given, backend="composite")
            grouped = dispatch.forward(there, backend="composite")
            second = dispatch.down(None, down_there, backend="composite")
        assert relative_error(result, layer.oracle()) <= BUDGET[dtype]
        assert torch.equal(grouped, result.flatten(0, 1)[pairs.cuda()])
        assert relative_error(second, down_oracle(down)) <= BUDGET[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_experts_down_do_not_wait_and_repeat(dtype: torch.dtype) -> None:
    for routing in ROUTINGS:
        layer = make_experts(70, experts=5, out_features=16, routing=routing, dtype=dtype)
        down = make_down(layer)
        grad = torch.randn(70, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
        expected = mglu.experts_down_backward(grad, *down[:4], [True] * 3)
        given, there = on_gpu(down), grad.cuda()
        first = mglu.experts_down_backward(there, *given[:4], [True] * 3)
        with without_waiting():
            found = mglu.experts_down_backward(there, *given[:4], [True] * 3)
            in_blocks = composite._down_backward(there, given.in_rows(), [True] * 3)
        for one, again, other, exact in zip(found, first, in_blocks, expected, strict=True):
            assert torch.equal(one, again)
            assert relative_error(one, exact) <= BUDGET[dtype]
            assert relative_error(other, exact) <= BUDGET[dtype]


@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed", "offset"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_masks", [1, 3, 8])
def test_packing_of_experts(dtype: torch.dtype, layout: str, n_masks: int) -> None:
    for in_features in (21, 64):
        logits = torch.randn(7, n_masks, 10, in_features).to(dtype)
        expected = torch.stack([mglu.pack_logits(one) for one in logits])
        assert torch.equal(mglu.pack_expert_logits(laid_out(logits.cuda(), layout)).cpu(), expected)
