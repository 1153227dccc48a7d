"""The operators over experts in eager mode, against a float64 loop over experts and against the dense operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.backends import composite
from mglu_ops.backends.triton import experts as grouped_products
from mglu_ops.formats import FORMATS
from mglu_ops.given import DownGiven
from tests.support.budgets import BUDGET, assert_matches, relative_error
from tests.support.families import sample
from tests.support.layers import (
    DTYPES,
    LOADS,
    Layer,
    down_oracle,
    examples,
    laid_out,
    layers,
    leaf,
    make_down,
    make_layer,
)

mglu = torch.ops.mglu


@given(data=st.data())
@examples(60)
def test_sorted_rows_give_the_same_bits(data: st.DataObject) -> None:
    """`grouped_forward` gives the bits of `experts_forward`. Rows past the last expert are zeros; their x is not read.

    float64 is compared with a tolerance, because the last bits of BLAS depend on the memory layout.
    """
    layer = data.draw(layers("ids", weight_format=data.draw(st.sampled_from(list(FORMATS)))))
    rows, pairs = layer.sorted_by_expert()
    tolerance = 1e-12 if layer.x.dtype is torch.float64 else 0
    by_ids = layer.forward().flatten(0, 1)[pairs]
    torch.testing.assert_close(rows.forward(), by_ids, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("weight_format", FORMATS)
@given(data=st.data())
@examples(30)
def test_experts_down_matches_a_loop(weight_format: str, data: st.DataObject) -> None:
    layer = data.draw(layers("ids", dtypes=DTYPES if weight_format == "dense" else DTYPES[1:]))
    down = make_down(layer, "dense", data.draw(st.sampled_from(DTYPES)))
    if weight_format != "dense":
        assume(layer.masks.shape[2] % FORMATS[weight_format].packed == 0)
        down = make_down(layer, weight_format)
    expected = down_oracle(down)
    for result in (mglu.experts_down(*down), dispatch.down(None, down, backend="composite")):
        assert result.dtype is down.y.dtype
        assert result.is_contiguous()
        assert relative_error(result, expected) <= BUDGET[result.dtype]


@pytest.mark.parametrize("rows", [1, 3, 9, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_experts_down_has_the_range_of_float32(weight_format: str, dtype: torch.dtype, rows: int) -> None:
    """Products may exceed float16 before they are multiplied by expert weights. Infinite results stay infinite."""
    stored, dense = FORMATS[weight_format], torch.full((1, 5, 256), 20.0)
    weight, scale = (dense.to(dtype), None) if stored.is_dense else stored.quantize(dense[0])
    weight, scale = weight.view(1, 5, -1), None if scale is None else scale[None]
    y, ids = torch.full((rows, 2, 256), 20.0, dtype=dtype), torch.zeros(rows, 2, dtype=torch.int64)
    result = mglu.experts_down(y, weight, ids, torch.tensor([[0.75, -0.5]]).expand(rows, 2), scale, weight_format)
    torch.testing.assert_close(result, torch.full((rows, 5), 25600.0, dtype=dtype), rtol=1e-2, atol=0)
    y[0, :, 3] = torch.inf
    result = mglu.experts_down(y, weight, ids, torch.ones(rows, 2), scale, weight_format)
    assert torch.equal(result[0], torch.full((5,), torch.inf, dtype=dtype))
    assert not result[1:].isnan().any()


def test_experts_down_adds_in_float32_in_the_order_of_the_experts() -> None:
    """The result shows the order: in float32, 2^24 + 1 - 2^24 is 0, and 2^24 - 2^24 + 1 is 1."""
    weight = torch.tensor([2.0**24, 1.0, -(2.0**24)]).view(3, 1, 1)
    composite = partial(dispatch.down, None, backend="composite")
    for down in (mglu.experts_down, lambda *given: composite(DownGiven(*given))):
        for ids, expected in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0)):
            result = down(torch.ones(1, 3, 1), weight, torch.tensor([ids]), torch.ones(1, 3))
            assert result.item() == expected


@pytest.mark.parametrize("values", [[3, 1, 9, 5], [-7, 2**31 - 1, -(2**31), 4], [9, 9, 9, 9]])
def test_offs_of_any_value_stay_in_bounds(values: list[int]) -> None:
    given = make_layer((4,), routing="offs").given
    wrong = given._replace(offs=torch.tensor(values, dtype=torch.int32))
    for result in (dispatch.forward(wrong, backend="composite"), dispatch.forward(wrong)):
        assert result.isfinite().all()


def test_a_prepared_call_takes_other_loads() -> None:
    dispatch._prepared.clear()
    for loads in LOADS:
        layer = make_layer((6,), routing="ids", loads=loads, seed=3)
        assert_matches(layer.forward(), layer.oracle(), what=loads)
    assert len(dispatch._prepared) == 1


@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed", "offset"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_of_experts_packs_each(dtype: torch.dtype, layout: str) -> None:
    logits = laid_out(torch.randn(4, 3, 10, 21).to(dtype), layout)
    expected = torch.stack([mglu.pack_logits(one) for one in logits])
    assert torch.equal(mglu.pack_expert_logits(logits), expected)


# --- Gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_format", FORMATS)
def test_experts_forward_has_the_gradients_of_each_experts_layer(weight_format: str) -> None:
    options = {"loads": "some out of range", "weighted": True, "weight_format": weight_format}
    layer = make_layer((9,), routing="ids", **options)
    names = ("x", "mask_weights", "weight") if weight_format == "dense" else ("x", "mask_weights")
    leaves = {name: leaf(getattr(layer, name)) for name in names}
    layer = layer.with_(**leaves)
    found, expected = layer.forward(), layer.in_parts(Layer.forward, torch.float32)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
    wanted = torch.autograd.grad(expected, tuple(leaves.values()), grad)
    torch.testing.assert_close(torch.autograd.grad(found, tuple(leaves.values()), grad), wanted)


@pytest.mark.parametrize("loads", sample(LOADS, 3))
def test_gradients_of_experts_down(loads: str) -> None:
    layer = make_layer((6,), routing="ids", loads=loads, dtype=torch.float64)
    y, weight, ids, expert_weights, *_ = make_down(layer, dtype=torch.float64)
    leaves = [leaf(one) for one in (y, weight, expert_weights)]
    assert torch.autograd.gradcheck(lambda *given: mglu.experts_down(*given[:2], ids, given[2]), leaves)


@pytest.mark.parametrize(
    "needs", [[True, True, True], [True, False, False], [False, True, False], [False, False, True]]
)
@pytest.mark.parametrize(
    ("how", "dtype"),
    [(composite._down_backward, torch.float64), (grouped_products.down_backward, torch.bfloat16)],
)
def test_gradients_of_experts_down_on_other_devices(
    how: Callable[..., Any], dtype: torch.dtype, needs: list[bool]
) -> None:
    for loads in LOADS:
        layer = make_layer((70,), 24, 16, routing="ids", experts=5, loads=loads, dtype=dtype)
        down = make_down(layer)
        grad = torch.randn(70, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
        grad[~layer.has_expert.any(1)] = torch.nan
        found = how(grad, down.in_rows(), needs)
        expected = mglu.experts_down_backward(grad, *down[:4], needs)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            assert other.isfinite().all()
            assert relative_error(one, other) <= BUDGET[dtype]


# --- Transforms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_y_and_a_dense_weight_of_a_down_projection(dtype: torch.dtype) -> None:
    down = make_down(make_layer((6,), routing="ids"))
    with torch.autocast("cpu", dtype):
        found = mglu.experts_down(*down)
    assert torch.equal(found, mglu.experts_down(down.y.to(dtype), down.weight.to(dtype), *down[2:]))


def test_vmap_over_tokens_and_over_weights() -> None:
    layer = make_layer((6,), routing="ids", weighted=True, dtype=torch.float64)
    given, ids = layer.given, layer.given.routing
    x, weights = torch.stack((given.x, -given.x)), torch.stack((given.mask_weights, 1 - given.mask_weights))
    both_ids = torch.stack((ids, ids.flip(0)))

    def run(x: Tensor, weight: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return mglu.experts_forward(x, weight, given.packed_masks, ids, "silu", weights)

    found = torch.vmap(run, (0, None, 0, 0))(x, given.weight, both_ids, weights)
    two_weights = torch.stack((given.weight, -given.weight))
    over_weights = torch.vmap(run, (None, 0, None, None))(given.x, two_weights, ids, weights[0])
    down = make_down(layer)
    y = torch.stack((down.y, down.y.flip(0)))
    over_y = torch.vmap(mglu.experts_down, (0, None, None, None))(y, *down[1:4])
    for i in range(2):
        torch.testing.assert_close(found[i], run(x[i], given.weight, both_ids[i], weights[i]))
        torch.testing.assert_close(over_weights[i], run(given.x, two_weights[i], ids, weights[0]))
        torch.testing.assert_close(over_y[i], mglu.experts_down(y[i], *down[1:4]))


def test_flops_count_the_rows_of_the_result() -> None:
    """Each of 6 tokens has 2 experts of 10 x 24 with 3 masks. The backward pass has twice the forward pass's flops."""
    layer = make_layer((6,), routing="ids")
    given = layer.sorted_by_expert()[0].given
    x, weight = leaf(given.x), leaf(given.weight)
    rows, pair = 12, 2 * 10 * 24
    with FlopCounterMode(display=False) as counter:
        layer.forward()
    assert counter.get_total_flops() == rows * 4 * pair
    with FlopCounterMode(display=False) as counter:
        mglu.experts_down(*make_down(layer))
    assert counter.get_total_flops() == rows * pair
    with FlopCounterMode(display=False) as counter:
        mglu.grouped_forward(x, weight, given.packed_masks, given.offs).sum().backward()
    assert counter.get_total_flops() == 3 * rows * 4 * pair


def test_explain_dispatch_names_the_backend_of_experts() -> None:
    given = make_layer((6,), routing="ids", dtype=torch.float64).given
    choice = mglu_ops.explain_dispatch(mglu.experts_forward, *given[:3], given.routing)
    assert choice.backend == "composite"
    assert "float64" in choice.reason


@pytest.mark.parametrize("in_features", [0, 24])
def test_weights_in_any_layout_give_the_bits_of_contiguous_ones(in_features: int) -> None:
    layer = make_layer((9,), in_features, routing="ids", loads="one expert")
    masks = layer.packed_masks.transpose(1, 2).contiguous().transpose(1, 2)
    other = layer.with_(weight=layer.weight.mT.contiguous().mT, packed_masks=masks)
    assert torch.equal(other.forward(), layer.forward())
    assert in_features or not layer.forward().any()
