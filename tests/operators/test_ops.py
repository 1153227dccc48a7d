"""The operators in eager mode, compared with the float64 oracle, the naive layer, and identities of the equation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mglu_ops import dispatch
from mglu_ops.activations import get_activation
from mglu_ops.formats import FORMATS
from tests.support import layers as s
from tests.support.budgets import BUDGET, NAIVE_FACTOR, assert_matches, relative_error
from tests.support.calls import run_on
from tests.support.layers import DTYPES, ROUTINGS, assert_within_condition, make_layer

forward = torch.ops.mglu.forward
NARROW = (torch.float32, torch.float16, torch.bfloat16)
RUNS = {
    "op": None,
    "cpu": partial(dispatch.forward, backend="cpu"),
    "composite": partial(dispatch.forward, backend="composite"),
}


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("how", RUNS)
@given(data=st.data())
@s.examples(40)
def test_every_routing_size_layout_and_dtype_agrees_with_the_oracle(how, weight_format, data):
    routing = data.draw(st.sampled_from(ROUTINGS))
    dtypes = DTYPES if how != "cpu" and weight_format == "dense" else NARROW
    layer = data.draw(s.layers(routing, dtypes=dtypes, weight_format=weight_format))
    result = layer.forward() if how == "op" else RUNS[how](layer.given)
    assert result.dtype is layer.x.dtype
    assert result.is_contiguous()
    assert_within_condition(result, layer)
    if (routing or weight_format != "dense") and result.numel() >= 64:  # in fewer elements, terms may cancel
        found, exact = result[layer.has_expert], layer.oracle()[layer.has_expert]
        assert relative_error(found, exact) <= BUDGET[result.dtype]


@pytest.mark.parametrize("routing", [None, "offs"])
@given(data=st.data())
def test_training_returns_the_result(routing, data):
    """`forward_ste` has the bits of `forward`. Those of `forward_train` may differ, as its backend may be another."""
    layer = data.draw(s.layers(routing))
    result, packed = layer.result_of("forward_ste")
    assert torch.equal(packed, layer.packed_masks)
    assert torch.equal(result, layer.forward())
    result, _ = layer.result_of("forward_train")
    assert result.dtype is layer.x.dtype
    assert_within_condition(result, layer)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", s.ACTIVATION_NAMES)
def test_relative_error_is_within_the_budget(activation, dtype, weighted):
    for n_masks, in_features in ((1, 64), (4, 201), (16, 512)):
        layer = make_layer((33,), in_features, 48, n_masks, activation=activation, dtype=dtype, weighted=weighted)
        assert_matches(layer.forward(), layer.oracle(), what=f"n_masks={n_masks}, in_features={in_features}")


@pytest.mark.parametrize("density", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("n_masks", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_error_is_at_most_1_5_times_the_naive_layers(dtype, n_masks, density):
    """float64 is skipped, because the oracle is in float64 itself and has errors as large as the layers'."""
    for activation in ("silu", "relu", "sigmoid", "identity"):
        layer = make_layer((32,), 256, 64, n_masks, activation=activation, dtype=dtype, density=density)
        exact = layer.oracle()
        least_naive_error = torch.finfo(dtype).eps / 2
        error = relative_error(layer.forward(), exact)
        naive_error = relative_error(s.naive(layer.x, layer.weight, layer.masks, activation), exact)
        assert error <= NAIVE_FACTOR * max(naive_error, least_naive_error), (
            f"{activation}: {error:.3g}, naive {naive_error:.3g}"
        )


SMALL = [((4,), 1, 1), ((4,), 0, 8), ((4,), 8, 0), ((0,), 10, 24)]


@pytest.mark.parametrize(
    ("routing", "leading", "rows", "columns"),
    [*((routing, *sizes) for routing in ROUTINGS for sizes in SMALL), (None, (2, 0, 3), 10, 24)],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_smallest_and_empty_layers(routing, leading, rows, columns, weighted):
    layer = make_layer(leading, columns, rows, routing=routing, weighted=weighted)
    assert_matches(layer.forward(), layer.oracle())


def test_defaults_are_silu_without_mask_weights_and_no_argument_is_written_to():
    layer = make_layer()
    before = [tensor.clone() for tensor in (layer.x, layer.weight, layer.packed_masks)]
    assert torch.equal(forward(layer.x, layer.weight, layer.packed_masks), layer.forward())
    assert all(map(torch.equal, before, (layer.x, layer.weight, layer.packed_masks)))


@given(s.layers(dtypes=(torch.float64,)), st.integers(1, 16))
def test_a_mask_given_several_times_counts_several_times(layer, times):
    """The repeated masks are an expanded tensor with stride 0."""
    single = layer.with_(masks=layer.masks[:1], mask_weights=None)
    packed = single.packed_masks.expand(-1, -1, times)
    repeated = single.with_(masks=single.masks.expand(times, -1, -1), packed_masks=packed)
    assert_within_condition(repeated.forward(), repeated)


@given(s.layers(), s.seeds)
def test_tokens_are_independent(layer, seed):
    """A token's result is within the budget alone and among other tokens, even if their values are large."""
    x = layer.x.reshape(-1, layer.x.shape[-1])
    mask_weight = None if layer.mask_weights is None else layer.mask_weights.reshape(len(x), -1)
    token = seed % len(x)
    other = torch.full_like(x, 3e4)
    other[token] = x[token]
    single = layer.with_(x=x[token], mask_weights=None if mask_weight is None else mask_weight[token])
    assert_within_condition(layer.with_(x=other, mask_weights=mask_weight).forward()[token], single)
    assert_within_condition(single.forward(), single)


@pytest.mark.parametrize("backend", ["cpu", "composite"])
def test_relu_squared_beyond_float16_is_infinite_and_a_nan_stays(backend):
    """The mask gives the first column of the weight to the gate, and the second to the value, which is 1."""
    gates = torch.tensor([200.0, 300.0, -300.0, 0.0, math.nan], dtype=torch.float16)
    x, weight = torch.stack((gates, torch.ones_like(gates)), 1), torch.ones(1, 2).half()
    masks = torch.tensor([[[True, False]]])
    result = run_on(backend, x, weight, torch.ops.mglu.pack_masks(masks), "relu_squared", None)
    expected = torch.tensor([[40000.0], [math.inf], [0.0], [0.0], [math.nan]]).half()
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(result, s.naive(x, weight, masks, "relu_squared"), rtol=0, atol=0, equal_nan=True)


def test_relu_squared_has_the_gradient_that_autograd_gives_its_formula():
    x = torch.tensor([-2.0, -0.0, 0.0, 3.0, math.nan, math.inf, -math.inf], dtype=torch.float64, requires_grad=True)
    grad = torch.tensor([1.0, math.nan, math.inf, 5.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    expected = torch.autograd.grad(torch.relu(x) ** 2, x, grad)[0]
    found = get_activation("relu_squared").backward(grad, x.detach())
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


BATCH = 3


def batched(tensor: Tensor, count: int = BATCH) -> Tensor:
    """A batch of `count` tensors: `tensor`, and rolled copies of it."""
    return torch.stack([tensor.roll(i, dims=-2 if tensor.dim() > 1 else 0) for i in range(count)])


def assert_equals_a_loop(function: Callable[..., Any], dims: tuple[int | None, ...], *args: Tensor) -> None:
    """Assert that vmap over these dimensions equals a loop over the batch."""
    found = torch.vmap(function, dims)(*args)
    for i in range(BATCH):
        expected = function(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, dims, strict=True)))
        entry = tuple(part[i] for part in found) if isinstance(found, tuple) else found[i]
        torch.testing.assert_close(entry, expected)


@pytest.mark.parametrize("name", ["forward", "forward_ste", "forward_train"])
@pytest.mark.parametrize(
    "which", [which for which in itertools.product([False, True], repeat=4) if any(which)], ids=str
)
def test_vmap_gives_the_results_of_a_loop(name, which):
    layer, op = make_layer(weighted=True, dtype=torch.float64), getattr(torch.ops.mglu, name)
    args = (layer.x, layer.weight, layer.logits if name == "forward_ste" else layer.packed_masks, layer.mask_weights)
    args = (batched(arg) if over else arg for arg, over in zip(args, which, strict=True))
    dims = tuple(0 if over else None for over in which)
    assert_equals_a_loop(lambda x, w, masks, mask_weights: op(x, w, masks, "gelu", mask_weights), dims, *args)


@pytest.mark.parametrize("dims", [(1, None), (1, 0), (None, 1), (-1, -1)])
def test_vmap_over_other_dimensions(dims):
    layer = make_layer(dtype=torch.float64)
    args = zip((layer.x, layer.weight), dims, strict=True)
    args = (arg if dim is None else batched(arg).movedim(0, dim) for arg, dim in args)
    assert_equals_a_loop(lambda x, w: forward(x, w, layer.packed_masks), dims, *args)


def test_vmap_nests():
    layer = make_layer(dtype=torch.float64)
    x, weight = batched(layer.x), batched(layer.weight, 2)
    result = torch.vmap(lambda w: torch.vmap(lambda x: forward(x, w, layer.packed_masks))(x))(weight)
    for i, j in itertools.product(range(2), range(BATCH)):
        torch.testing.assert_close(result[i, j], forward(x[j], weight[i], layer.packed_masks))


def test_vmap_over_packing():
    masks = batched(make_layer().masks)
    assert_equals_a_loop(torch.ops.mglu.pack_masks, (0,), masks)
    assert_equals_a_loop(torch.ops.mglu.pack_logits, (0,), masks.float())
    packed = torch.stack([torch.ops.mglu.pack_masks(layer_masks) for layer_masks in masks])
    assert_equals_a_loop(lambda packed: torch.ops.mglu.unpack_masks(packed, 24), (0,), packed)


@pytest.mark.parametrize("which", ["x", "weight"])
def test_vmap_over_an_empty_batch(which):
    layer = make_layer()
    empty = torch.zeros(0, *getattr(layer, which).shape)
    result = torch.vmap(lambda t: layer.with_(**{which: t}).forward())(empty)
    assert result.shape == (0, 5, 10)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask_weights_dtype", [None, torch.float32, torch.bfloat16])
def test_autocast_computes_in_the_dtype_in_which_linear_does(routing, dtype, mask_weights_dtype):
    layer = make_layer((16,), 64, 32, 4, routing=routing, mask_weights_dtype=mask_weights_dtype)
    with torch.autocast("cpu", dtype):
        result = layer.forward()
        linear = torch.nn.functional.linear(layer.x, layer.weight[-32:].reshape(-1, 64))
        if routing != "ids":
            assert torch.equal(layer.result_of("forward_ste")[0], result)
    assert result.dtype is linear.dtype is dtype
    in_dtype = layer.with_(x=layer.x.to(dtype), weight=layer.weight.to(dtype))
    assert torch.equal(result, in_dtype.forward())


def test_autocast_leaves_float64_alone_and_can_be_disabled():
    with torch.autocast("cpu", torch.bfloat16):
        assert make_layer(dtype=torch.float64).forward().dtype is torch.float64
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert make_layer().forward().dtype is torch.float32
