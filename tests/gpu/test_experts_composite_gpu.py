"""Experts on the backends `triton`, which does not wait for the GPU, and `composite`, and packing of their logits."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from budgets import BUDGET, relative_error
from expert_layers import ROUTINGS, down_oracle, make_down, make_experts, sorted_rows
from gpu_calls import without_waiting
from strategies import DTYPES, laid_out
from torch import Tensor

from mglu_ops import dispatch
from mglu_ops.backends.composite import Composite
from mglu_ops.call import Call
from mglu_ops.formats import FORMATS

pytestmark = pytest.mark.gpu
mglu = torch.ops.mglu


def on_gpu(args: Any) -> Any:
    """A copy of the arguments with all tensors on the GPU."""
    return type(args)(*(arg.cuda() if isinstance(arg, Tensor) else arg for arg in args))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("triton", one) for one in DTYPES if one is not torch.float64] + [("composite", one) for one in DTYPES],
)
def test_results_match_a_loop(backend: str, dtype: torch.dtype, weight_format: str, routing: str) -> None:
    if dtype is torch.float64 and weight_format != "dense":
        pytest.skip("no float64 with stored weights in this family")
    for tokens in (1, 70):
        layer = make_experts(
            tokens, 2, 5, 136, 72, routing=routing, dtype=dtype, weighted=tokens > 1, weight_format=weight_format
        )
        down_given, (rows, pairs) = make_down(layer, weight_format), sorted_rows(layer)
        given, there, down_there = on_gpu(layer.given), on_gpu(rows), on_gpu(down_given)
        forward, down = (partial(run, backend=backend) for run in (dispatch.forward, partial(dispatch.down, None)))
        forward(given), down(down_there)  # torch's first calls, and Triton when it compiles, may wait
        with without_waiting() if backend == "triton" else nullcontext():
            result, grouped, second = forward(given), forward(there), down(down_there)
        assert relative_error(result, layer.oracle()) <= BUDGET[dtype]
        in_order = result.flatten(0, 1)[pairs.cuda()]
        if backend == "triton":
            assert torch.equal(grouped, in_order)
        assert relative_error(grouped, in_order) <= BUDGET[dtype]
        assert relative_error(second, down_oracle(down_given)) <= BUDGET[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_experts_down_repeat_and_do_not_wait(dtype: torch.dtype) -> None:
    for routing in ROUTINGS:
        layer = make_experts(70, experts=5, out_features=16, routing=routing, dtype=dtype)
        down = make_down(layer)
        grad = torch.randn(70, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
        expected = mglu.experts_down_backward(grad, *down[:4], [True] * 3)
        given, there = on_gpu(down), grad.cuda()
        first = mglu.experts_down_backward(there, *given[:4], [True] * 3)
        with without_waiting() if dtype is not torch.float64 else nullcontext():
            found = mglu.experts_down_backward(there, *given[:4], [True] * 3)
        by_loop = Composite().prepare("down_backward", Call.of_down(given))(there, given.in_rows(), [True] * 3)
        for one, again, other, exact in zip(found, first, by_loop, expected, strict=True):
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
