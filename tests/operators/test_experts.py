"""The operators over experts in eager mode, against a float64 loop over experts and against the dense operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from budgets import BUDGET, assert_matches, relative_error
from expert_layers import (
    ROUTINGS,
    Experts,
    down_oracle,
    expert_layers,
    make_down,
    make_experts,
    slices,
    sorted_rows,
)
from families import family, sample
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import DTYPES, examples, laid_out
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.backends import composite
from mglu_ops.backends.experts_down import backward
from mglu_ops.backends.triton import experts as grouped_products
from mglu_ops.formats import FORMATS
from mglu_ops.given import DownGiven, Given

mglu = torch.ops.mglu
NARROW = (torch.float32, torch.float16, torch.bfloat16)


RUNS = {
    "op": None,
    "cpu": partial(dispatch.forward, backend="cpu"),
    "composite": partial(dispatch.forward, backend="composite"),
}


def rows_with_expert(result: Tensor, layer: Experts) -> Tensor:
    """The rows of the result for pairs whose expert id is in range. All other rows must be zeros."""
    assert not result[~layer.has_expert].count_nonzero()
    return result[layer.has_expert]


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("how", RUNS)
@given(data=st.data())
@examples(30)
def test_results_match_a_loop_over_experts(weight_format: str, how: str, data: st.DataObject) -> None:
    dtypes = DTYPES if how != "cpu" and weight_format == "dense" else NARROW
    layer = data.draw(expert_layers(dtypes, weight_format))
    run = RUNS[how]
    result = layer.forward() if run is None else run(layer.given)
    assert result.dtype is layer.given.x.dtype
    assert result.is_contiguous()
    found, expected = rows_with_expert(result, layer), rows_with_expert(layer.oracle(), layer)
    assert relative_error(found, expected) <= BUDGET[result.dtype]


@given(data=st.data())
@examples(60)
def test_sorted_rows_give_the_same_bits(data: st.DataObject) -> None:
    """`grouped_forward` gives the bits of `experts_forward`. Rows past the last expert are zeros; their x is not read.

    float64 is compared with a tolerance, because the last bits of BLAS depend on the memory layout.
    """
    layer = data.draw(expert_layers(DTYPES))
    given, pairs = sorted_rows(layer)
    x, weight, packed_masks, *rest, _, offs = given
    result, by_ids = mglu.grouped_forward(x, weight, packed_masks, offs, *rest), layer.forward()
    if result.dtype is torch.float64:
        torch.testing.assert_close(result, by_ids.flatten(0, 1)[pairs], rtol=1e-12, atol=1e-12)
    else:
        assert torch.equal(result, by_ids.flatten(0, 1)[pairs])


@pytest.mark.parametrize("weight_format", FORMATS)
@given(data=st.data())
@examples(30)
def test_experts_down_matches_a_loop(weight_format: str, data: st.DataObject) -> None:
    layer = data.draw(expert_layers(DTYPES if weight_format == "dense" else NARROW, "dense"))
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
    given, _ = sorted_rows(make_experts(tokens=4))
    wrong = given._replace(offs=torch.tensor(values, dtype=torch.int32))
    for result in (dispatch.forward(wrong, backend="composite"), dispatch.forward(wrong)):
        assert result.isfinite().all()


def test_a_prepared_call_takes_other_loads() -> None:
    dispatch._prepared.clear()
    for routing in ROUTINGS:
        layer = make_experts(routing=routing, seed=3)
        assert_matches(rows_with_expert(layer.forward(), layer), rows_with_expert(layer.oracle(), layer), what=routing)
    assert len(dispatch._prepared) == 1


@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed", "offset"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_of_experts_packs_each(dtype: torch.dtype, layout: str) -> None:
    logits = laid_out(torch.randn(4, 3, 10, 21).to(dtype), layout)
    expected = torch.stack([mglu.pack_logits(one) for one in logits])
    assert torch.equal(mglu.pack_expert_logits(logits), expected)


# --- Gradients -------------------------------------------------------------------------------------------------------


def leaf(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone().requires_grad_()


def logits_of(layer: Experts) -> Tensor:
    return torch.where(layer.masks, 0.5, -0.5)


@pytest.mark.parametrize(
    ("dtype", "routing", "weighted", "name"),
    family(DTYPES, ROUTINGS, [False, True], ["grouped_forward", "grouped_forward_ste"]),
)
def test_gradients_equal_each_experts_layers(dtype: torch.dtype, routing: str, weighted: bool, name: str) -> None:
    layer = make_experts(9, routing=routing, dtype=dtype, weighted=weighted, activation="gelu")
    given, _ = sorted_rows(layer)
    x, weight, mask_weights, logits = map(leaf, (given.x, given.weight, given.mask_weights, logits_of(layer)))
    masks = logits if name == "grouped_forward_ste" else given.packed_masks
    leaves = [one for one in (x, weight, mask_weights, masks) if one is not None and one.requires_grad]
    found = getattr(mglu, name)(x, weight, masks, given.offs, "gelu", mask_weights)
    found = found[0] if name == "grouped_forward_ste" else found
    expected = torch.zeros_like(found)
    for expert, rows in slices(given.offs):
        weights = None if mask_weights is None else mask_weights[rows]
        one = getattr(mglu, name.replace("grouped_", ""))(x[rows], weight[expert], masks[expert], "gelu", weights)
        expected[rows] = one[0] if name == "grouped_forward_ste" else one
    assert torch.equal(found, expected)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = torch.autograd.grad(expected, leaves, grad)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, grad), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_experts_forward_has_gradients_of_x_and_mask_weights(weight_format: str) -> None:
    layer = make_experts(9, routing="some out of range", weighted=True, weight_format=weight_format)
    given, ids = layer.given, layer.given.routing
    x, weights = leaf(torch.nan_to_num(given.x)), leaf(given.mask_weights)
    found = mglu.experts_forward(x, given.weight, given.packed_masks, ids, "silu", weights, *given[5:7])
    expected = torch.zeros_like(found)
    for t, k in layer.has_expert.nonzero().tolist():
        expected[t, k] = mglu.forward(*given.of_expert(int(ids[t, k]), x[t], weights[t, k])[:8])
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
    wanted = torch.autograd.grad(expected, (x, weights), grad)
    torch.testing.assert_close(torch.autograd.grad(found, (x, weights), grad), wanted)


@pytest.mark.parametrize("routing", sample(ROUTINGS, 3))
def test_gradients_of_experts_down(routing: str) -> None:
    y, weight, ids, expert_weights, *_ = make_down(make_experts(routing=routing, dtype=torch.float64))
    y, weight, expert_weights = (leaf(torch.nan_to_num(one.double())) for one in (y, weight, expert_weights))
    assert torch.autograd.gradcheck(
        lambda *given: mglu.experts_down(*given[:2], ids, given[2]), (y, weight, expert_weights)
    )


@pytest.mark.parametrize(
    "needs", [[True, True, True], [True, False, False], [False, True, False], [False, False, True]]
)
@pytest.mark.parametrize(
    ("how", "dtype"),
    [(partial(backward, composite._grouped_product), torch.float64), (grouped_products.down_backward, torch.bfloat16)],
)
def test_gradients_of_experts_down_on_other_devices(
    how: Callable[..., Any], dtype: torch.dtype, needs: list[bool]
) -> None:
    for routing in ROUTINGS:
        layer = make_experts(70, experts=5, out_features=16, routing=routing, dtype=dtype)
        down = make_down(layer)
        grad = torch.randn(70, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
        grad[~layer.has_expert.any(1)] = torch.nan
        found = how(grad, down.in_rows(), needs)
        expected = mglu.experts_down_backward(grad, *down[:4], needs)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            assert other.isfinite().all()
            assert relative_error(one, other) <= BUDGET[dtype]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("experts_forward", {"weight": 1}, "weight: .* sort the tokens by expert and call mglu::grouped_forward"),
        ("experts_forward", {"x": 1, "activation_format": "fp8_token"}, "x: .* activation_format='fp8_token' is for"),
        ("grouped_forward", {"x": 1, "activation_format": "fp8_token"}, "x: .* activation_format='fp8_token' is for"),
        (
            "grouped_forward",
            {"weight_scale": 1},
            "weight_scale: .* no such gradient for weight_format='fp8_row'",
        ),
    ],
)
def test_gradients_that_are_refused(name: str, changes: dict[str, object], message: str) -> None:
    is_dense = "weight" in changes
    layer = make_experts(weight_format="dense" if is_dense else "fp8_row")
    given = layer.given if name == "experts_forward" else sorted_rows(layer)[0]
    needed = {key: leaf(getattr(given, key)) for key, value in changes.items() if value == 1}
    x, weight, packed_masks, *rest, ids, offs = given._replace(**changes | needed)
    with pytest.raises(ValueError, match=message):
        getattr(mglu, name)(x, weight, packed_masks, ids if offs is None else offs, *rest)


def test_a_second_derivative_is_refused() -> None:
    given, _ = sorted_rows(make_experts())
    x = leaf(given.x)
    y = mglu.grouped_forward(x, given.weight, given.packed_masks, given.offs)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


# --- Transforms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_x_and_a_dense_weight(dtype: torch.dtype) -> None:
    layer, stored = make_experts(weighted=True), make_experts(weight_format="int8_row")
    down, (given, _) = make_down(layer), sorted_rows(layer)
    with torch.autocast("cpu", dtype):
        found = layer.forward(), stored.forward(), mglu.experts_down(*down)
        grouped = mglu.grouped_forward(given.x, given.weight, given.packed_masks, given.offs)
        ste = mglu.grouped_forward_ste(given.x, given.weight, logits_of(layer), given.offs)[0]

    def narrow(one: Experts) -> Experts:
        weight = one.given.weight
        weight = weight.to(dtype) if weight.is_floating_point() else weight
        return Experts(one.given._replace(x=one.given.x.to(dtype), weight=weight), one.masks, one.exact_x, weight)

    expected_down = mglu.experts_down(down.y.to(dtype), down.weight.to(dtype), *down[2:])
    for one, expected in zip(found, (narrow(layer).forward(), narrow(stored).forward(), expected_down), strict=True):
        assert torch.equal(one, expected)
    assert grouped.dtype is dtype
    assert torch.equal(ste, grouped)


def test_vmap_over_tokens_and_over_weights() -> None:
    layer = make_experts(weighted=True, dtype=torch.float64)
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
    layer = make_experts()
    given, _ = sorted_rows(layer)
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
    given = make_experts(dtype=torch.float64).given
    choice = mglu_ops.explain_dispatch(mglu.experts_forward, *given[:3], given.routing)
    assert choice.backend == "composite"
    assert "float64" in choice.reason


@pytest.mark.parametrize("in_features", [0, 24])
def test_weights_in_any_layout_give_the_bits_of_contiguous_ones(in_features: int) -> None:
    """Two rows have the same expert. Without in_features, x and the weights are empty."""
    given = make_experts(9, in_features=in_features).given if in_features else None
    if given is None:
        masks = mglu.pack_masks(torch.zeros(1, 2, 0, dtype=torch.bool))[None]
        given = Given.of_ids(torch.empty(2, 0), torch.empty(1, 2, 0), masks, torch.zeros(2, 1, dtype=torch.int64))
    found = mglu.experts_forward(given.x, given.weight, given.packed_masks, given.expert_ids)
    weight = given.weight.mT.contiguous().mT
    masks = given.packed_masks.transpose(1, 2).contiguous().transpose(1, 2)
    other = mglu.experts_forward(given.x, weight, masks, given.expert_ids)
    assert torch.equal(found, other)
    assert in_features or not found.any()
