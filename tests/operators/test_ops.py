"""The operators in eager mode, against the float64 oracle, the naive layer, and identities of the equation."""

from __future__ import annotations

import itertools
import math

import pytest
import strategies as s
import torch
from backend_calls import run_on
from budgets import BUDGET, NAIVE_FACTOR, assert_matches, relative_error
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, Layer, make_layer
from torch import Tensor

from mglu_ops.activations import get_activation

forward, forward_ste, forward_train = torch.ops.mglu.forward, torch.ops.mglu.forward_ste, torch.ops.mglu.forward_train


def assert_within_condition(result: Tensor, layer: Layer) -> None:
    """Assert that each element is within the budget, relative to the equation with the absolute values of all terms.

    Unlike the relative error of a whole tensor, this bound is also right for single elements in which terms cancel.
    """
    total = layer.x.abs().double() @ layer.weight.abs().double().T
    term_weights = len(layer.masks) if layer.mask_weights is None else layer.mask_weights.double().sum(-1, keepdim=True)
    exact = layer.oracle()
    limit = BUDGET[result.dtype] * term_weights * total * (total + 1) + torch.finfo(result.dtype).tiny
    assert result.shape == exact.shape
    assert ((result.double() - exact).abs() <= limit).all()


# --- Agreement --------------------------------------------------------------------------------------------


@given(s.layers())
def test_every_size_layout_and_dtype_agrees_with_the_oracle(layer):
    result = layer.forward()
    assert result.dtype is layer.x.dtype
    assert result.is_contiguous()
    assert_within_condition(result, layer)


@given(s.layers())
def test_forward_ste_equals_forward_with_masks_where_the_logits_are_positive(layer):
    masks = torch.ops.mglu.unpack_masks(layer.packed_masks, layer.x.shape[-1])
    logits = layer.with_(masks=masks).logits
    result, packed = forward_ste(layer.x, layer.weight, logits, layer.activation, layer.mask_weights)
    assert torch.equal(packed, layer.packed_masks)
    assert torch.equal(result, layer.forward())


@given(s.layers())
def test_forward_train_returns_the_result(layer):
    result, _ = forward_train(layer.x, layer.weight, layer.packed_masks, layer.activation, layer.mask_weights)
    assert result.dtype is layer.x.dtype
    assert_within_condition(result, layer)  # without saved activations, another backend may run, so the bits may differ


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
    """This skips float64, in which the oracle's own rounding is as large as the error."""
    for activation in ("silu", "relu", "sigmoid", "identity"):
        layer = make_layer((32,), 256, 64, n_masks, activation=activation, dtype=dtype, density=density)
        exact = layer.oracle()
        least_naive_error = torch.finfo(dtype).eps / 2
        error = relative_error(layer.forward(), exact)
        naive_error = relative_error(s.naive(layer.x, layer.weight, layer.masks, activation), exact)
        assert error <= NAIVE_FACTOR * max(naive_error, least_naive_error), (
            f"{activation}: {error:.3g}, naive {naive_error:.3g}"
        )


@pytest.mark.parametrize("leading", [(), (1,), (6,), (2, 3), (2, 1, 3), (0,), (2, 0, 3)])
@pytest.mark.parametrize("weighted", [False, True])
def test_leading_dimensions_are_kept(leading, weighted):
    layer = make_layer(leading, weighted=weighted)
    result = layer.forward()
    assert result.shape == (*leading, 10)
    tokens = math.prod(leading)
    flat_weights = None if layer.mask_weights is None else layer.mask_weights.reshape(tokens, 3)
    flat = layer.with_(x=layer.x.reshape(tokens, 24), mask_weights=flat_weights).forward()
    torch.testing.assert_close(result.reshape(tokens, 10), flat)


@pytest.mark.parametrize("layout", s.LAYOUTS[1:])
@pytest.mark.parametrize("argument", ["x", "weight", "packed_masks", "mask_weights"])
def test_strided_arguments_give_the_result_of_contiguous_ones(argument, layout):
    layer = make_layer(weighted=True)
    changed = s.laid_out(getattr(layer, argument), layout)
    dense = layer.with_(**{argument: changed.contiguous()}).forward()
    torch.testing.assert_close(layer.with_(**{argument: changed}).forward(), dense)


@pytest.mark.parametrize("size", [(1, 1), (0, 8), (8, 0)])
def test_smallest_and_empty_layers(size):
    layer = make_layer((4,), size[1], size[0])
    assert_matches(layer.forward(), layer.oracle())


def test_arguments_are_not_written_to():
    layer = make_layer(weighted=True)
    before = [tensor.clone() for tensor in (layer.x, layer.weight, layer.packed_masks, layer.mask_weights)]
    layer.forward()
    after = (layer.x, layer.weight, layer.packed_masks, layer.mask_weights)
    assert all(map(torch.equal, before, after))


def test_defaults_are_silu_without_a_router():
    layer = make_layer()
    assert torch.equal(forward(layer.x, layer.weight, layer.packed_masks), layer.forward())


# --- Identities of the equation, in float64 ---------------------------------------------------------------

FLOAT64 = s.layers(dtype=torch.float64)


def close(result: Tensor, expected: Tensor, layer: Layer) -> None:
    size = (layer.x.norm() * layer.weight.norm()) ** 2 * len(layer.masks) + layer.x.norm() * layer.weight.norm()
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13 * (1 + size.item()))


@given(s.layers(dtype=torch.float64, activation="identity"))
def test_swapping_a_mask_for_its_complement_keeps_a_plain_product(layer):
    close(layer.with_(masks=~layer.masks).forward(), layer.forward(), layer)


@given(FLOAT64)
def test_masks_of_ones_make_every_value_zero(layer):
    result = layer.with_(masks=torch.ones_like(layer.masks)).forward()
    close(result, torch.zeros_like(result), layer)


@given(FLOAT64)
def test_masks_of_zeros_make_every_gate_zero(layer):
    """The result is act(0) times a linear layer, and act(0) is 0 for every activation but the sigmoid."""
    result = layer.with_(masks=torch.zeros_like(layer.masks)).forward()
    ones = torch.ones(*layer.x.shape[:-1], len(layer.masks), dtype=torch.float64)
    mask_weight = ones if layer.mask_weights is None else layer.mask_weights
    gate = 0.5 if layer.activation == "sigmoid" else 0.0
    close(result, gate * mask_weight.sum(-1, keepdim=True) * (layer.x @ layer.weight.T), layer)


@given(s.layers(dtype=torch.float32), st.sampled_from([0, 1]))
def test_constant_masks_give_zero_in_float32(layer, constant):
    if layer.activation == "sigmoid":
        return
    masks = torch.full_like(layer.masks, bool(constant))
    result = layer.with_(masks=masks).forward()
    assert (
        result.abs().max() <= 1e-5 * (layer.x.abs().sum() * layer.weight.abs().sum()) ** 2 if result.numel() else True
    )


@given(FLOAT64, st.randoms(use_true_random=False))
def test_the_order_of_masks_does_not_matter(layer, random):
    order = list(range(len(layer.masks)))
    random.shuffle(order)
    mask_weight = None if layer.mask_weights is None else layer.mask_weights[..., order]
    changed = layer.with_(masks=layer.masks[order], mask_weights=mask_weight)
    assert torch.equal(changed.packed_masks, layer.packed_masks[..., order])
    close(changed.forward(), layer.forward(), layer)


@given(FLOAT64, st.randoms(use_true_random=False))
def test_permuting_the_rows_of_a_layer_permutes_its_outputs(layer, random):
    rows = list(range(layer.weight.shape[0]))
    random.shuffle(rows)
    changed = layer.with_(weight=layer.weight[rows], masks=layer.masks[:, rows])
    close(changed.forward(), layer.forward()[..., rows], layer)


@given(FLOAT64, st.randoms(use_true_random=False))
def test_permuting_the_input_features_changes_nothing(layer, random):
    columns = list(range(layer.weight.shape[1]))
    random.shuffle(columns)
    changed = layer.with_(x=layer.x[..., columns], weight=layer.weight[:, columns], masks=layer.masks[..., columns])
    close(changed.forward(), layer.forward(), layer)


@given(s.layers(dtype=torch.float64), st.sampled_from([-2.0, -0.5, 0.25, 3.0]), st.sampled_from(["identity", "relu"]))
def test_scaling_the_weight_scales_the_result_by_the_square(layer, factor, activation):
    layer = layer.with_(activation=activation)
    factor = abs(factor) if activation == "relu" else factor
    scaled = layer.with_(weight=layer.weight * factor)
    close(scaled.forward(), layer.forward() * factor**2, scaled)
    scaled = layer.with_(x=layer.x * factor)
    close(scaled.forward(), layer.forward() * factor**2, scaled)


@given(s.layers(dtype=torch.float64, activation="identity"), s.seeds)
def test_the_plain_product_is_bilinear_in_the_weight(layer, seed):
    """y(W + V) + y(W - V) = 2 y(W) + 2 y(V): the parallelogram law of a quadratic form."""
    other = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(seed)).double()
    y = [layer.with_(weight=w).forward() for w in (layer.weight + other, layer.weight - other, layer.weight, other)]
    close(y[0] + y[1], 2 * y[2] + 2 * y[3], layer.with_(weight=layer.weight.abs() + other.abs()))


@given(FLOAT64)
def test_a_layer_is_the_weighted_sum_of_layers_of_one_mask(layer):
    total = torch.zeros(*layer.x.shape[:-1], layer.weight.shape[0], dtype=torch.float64)
    for i in range(len(layer.masks)):
        single = layer.with_(masks=layer.masks[i : i + 1], mask_weights=None).forward()
        total += single if layer.mask_weights is None else layer.mask_weights[..., i : i + 1] * single
    close(layer.forward(), total, layer)


@given(FLOAT64, st.integers(1, 16))
def test_a_mask_given_several_times_counts_several_times(layer, times):
    repeated = layer.with_(masks=layer.masks[:1].expand(times, -1, -1), mask_weights=None)
    close(repeated.forward(), times * layer.with_(masks=layer.masks[:1], mask_weights=None).forward(), repeated)


@given(s.layers())
def test_mask_weights_of_one_change_nothing(layer):
    ones = torch.ones(*layer.x.shape[:-1], len(layer.masks), dtype=layer.x.dtype)
    assert torch.equal(layer.with_(mask_weights=ones).forward(), layer.with_(mask_weights=None).forward())


@given(FLOAT64)
def test_a_mask_weight_of_zero_drops_its_mask(layer):
    if len(layer.masks) == 1:
        return
    mask_weight = torch.ones(*layer.x.shape[:-1], len(layer.masks), dtype=torch.float64)
    mask_weight[..., 0] = 0
    rest = layer.with_(masks=layer.masks[1:], mask_weights=None)
    close(layer.with_(mask_weights=mask_weight).forward(), rest.forward(), layer)


@given(s.layers(), s.seeds)
def test_tokens_are_independent(layer, seed):
    """A token gives the same result alone and together with other tokens of any value."""
    x = layer.x.reshape(-1, layer.x.shape[-1])
    mask_weight = None if layer.mask_weights is None else layer.mask_weights.reshape(len(x), -1)
    token = seed % len(x)
    other = torch.full_like(x, 3e4)
    other[token] = x[token]
    single = layer.with_(x=x[token], mask_weights=None if mask_weight is None else mask_weight[token])
    assert_within_condition(layer.with_(x=other, mask_weights=mask_weight).forward()[token], single)
    assert_within_condition(single.forward(), single)


# --- NaN and infinity -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("n_masks", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", s.ACTIVATION_NAMES)
def test_nan_and_inf_in_x_propagate_as_in_the_naive_layer(activation, dtype, n_masks, value):
    layer = make_layer((6,), 16, 9, n_masks, activation=activation, dtype=dtype)
    x = layer.x.clone()
    x[2, 5] = value
    x[4, 0], x[4, 7] = value, -value
    result = layer.with_(x=x).forward()
    expected = s.naive(x, layer.weight, layer.masks, activation)
    assert torch.equal(result.isnan(), expected.isnan())
    untouched = [0, 1, 3, 5]
    assert torch.equal(result[untouched], layer.forward()[untouched])
    assert result[untouched].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_a_weight_reaches_its_row_only(dtype):
    layer = make_layer(dtype=dtype)
    weight = layer.weight.clone()
    weight[3, 2] = math.nan
    result = layer.with_(weight=weight).forward()
    assert result[:, 3].isnan().all()
    rows = [row for row in range(10) if row != 3]
    assert torch.equal(result[:, rows], layer.forward()[:, rows])


def test_a_result_beyond_float16_is_infinite_as_in_the_naive_layer():
    layer = make_layer((4,), 16, 6, 1, activation="identity", dtype=torch.float16)
    layer = layer.with_(x=layer.x * 2000)
    expected = s.naive(layer.x, layer.weight, layer.masks, "identity")
    assert expected.isinf().any()
    assert torch.equal(layer.forward().isinf(), expected.isinf())


@pytest.mark.parametrize("backend", ["cpu", "composite"])
def test_relu_squared_beyond_float16_is_infinite_and_a_nan_stays(backend):
    """One weight makes the gate, and the other the value, which is 1."""
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


@pytest.mark.parametrize("logit", [0.0, -0.0, math.nan, -math.inf])
def test_only_a_logit_above_zero_is_a_one(logit):
    layer = make_layer()
    _, packed = forward_ste(layer.x, layer.weight, torch.full(layer.masks.shape, logit))
    assert (packed == 0).all()


# --- vmap -------------------------------------------------------------------------------------------------

BATCH = 3


def batched(tensor: Tensor, count: int = BATCH) -> Tensor:
    """A batch of `count` tensors: `tensor`, and others with its elements rolled."""
    return torch.stack([tensor.roll(i, dims=-2 if tensor.dim() > 1 else 0) for i in range(count)])


def call(op, masks_of):
    def function(x, weight, masks, mask_weight):
        return op(x, weight, masks_of(masks), "gelu", mask_weight)

    return function


@pytest.mark.parametrize("name", ["forward", "forward_ste", "forward_train"])
@pytest.mark.parametrize(
    "which", [which for which in itertools.product([False, True], repeat=4) if any(which)], ids=str
)
def test_vmap_gives_the_results_of_a_loop(name, which):
    layer = make_layer(weighted=True, dtype=torch.float64)
    masks = layer.logits if name == "forward_ste" else layer.packed_masks
    args = [layer.x, layer.weight, masks, layer.mask_weights]
    args = [batched(arg) if over else arg for arg, over in zip(args, which, strict=True)]
    function = call(getattr(torch.ops.mglu, name), lambda masks: masks)
    dims = tuple(0 if over else None for over in which)
    result = torch.vmap(function, dims)(*args)
    for i in range(BATCH):
        expected = function(*(arg[i] if over else arg for arg, over in zip(args, which, strict=True)))
        for got, want in zip(
            result if isinstance(result, tuple) else (result,),
            expected if isinstance(expected, tuple) else (expected,),
            strict=True,
        ):
            torch.testing.assert_close(got[i], want)


@pytest.mark.parametrize("in_dims", [(1, None), (1, 0), (None, 1), (-1, -1)])
def test_vmap_over_other_dimensions(in_dims):
    layer = make_layer(dtype=torch.float64)
    x = layer.x if in_dims[0] is None else batched(layer.x).movedim(0, in_dims[0])
    weight = layer.weight if in_dims[1] is None else batched(layer.weight).movedim(0, in_dims[1])
    result = torch.vmap(lambda x, w: forward(x, w, layer.packed_masks), in_dims)(x, weight)
    for i in range(BATCH):
        x_i = x if in_dims[0] is None else x.select(in_dims[0], i)
        w_i = weight if in_dims[1] is None else weight.select(in_dims[1], i)
        torch.testing.assert_close(result[i], forward(x_i, w_i, layer.packed_masks))


def test_vmap_nests():
    layer = make_layer(dtype=torch.float64)
    x, weight = batched(layer.x), batched(layer.weight, 2)
    result = torch.vmap(lambda w: torch.vmap(lambda x: forward(x, w, layer.packed_masks))(x))(weight)
    for i, j in itertools.product(range(2), range(BATCH)):
        torch.testing.assert_close(result[i, j], forward(x[j], weight[i], layer.packed_masks))


def test_vmap_over_packing():
    masks = batched(make_layer().masks)
    packed = torch.vmap(torch.ops.mglu.pack_masks)(masks)
    assert all(torch.equal(packed[i], torch.ops.mglu.pack_masks(masks[i])) for i in range(BATCH))
    assert torch.equal(torch.vmap(lambda p: torch.ops.mglu.unpack_masks(p, 24))(packed), masks)


@pytest.mark.parametrize("which", ["x", "weight"])
def test_vmap_over_an_empty_batch(which):
    layer = make_layer()
    empty = torch.zeros(0, *getattr(layer, which).shape)
    result = torch.vmap(lambda t: layer.with_(**{which: t}).forward())(empty)
    assert result.shape == (0, 5, 10)


# --- Autocast ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask_weights_dtype", [None, torch.float32, torch.bfloat16])
def test_autocast_computes_in_the_dtype_in_which_linear_does(dtype, mask_weights_dtype):
    layer = make_layer((16,), 64, 32, 4, weighted=mask_weights_dtype is not None)
    mask_weight = None if mask_weights_dtype is None else layer.mask_weights.to(mask_weights_dtype)
    layer = layer.with_(mask_weights=mask_weight)
    with torch.autocast("cpu", dtype):
        result = layer.forward()
        ste = forward_ste(layer.x, layer.weight, layer.logits, "silu", mask_weight)[0]
        linear = torch.nn.functional.linear(layer.x, layer.weight)
    assert result.dtype is linear.dtype is dtype
    assert torch.equal(ste, result)
    in_dtype = layer.with_(x=layer.x.to(dtype), weight=layer.weight.to(dtype))
    assert torch.equal(result, in_dtype.forward())


def test_autocast_leaves_float64_alone():
    layer = make_layer(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.forward(), layer.forward())
        assert layer.forward().dtype is torch.float64


def test_disabled_autocast_changes_nothing():
    layer = make_layer()
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert layer.forward().dtype is torch.float32


def test_the_keyword_that_mask_weights_had_works_with_a_warning() -> None:
    layer = make_layer(weighted=True)
    for op, masks in ((forward, layer.packed_masks), (forward_ste, layer.logits)):
        expected = op(layer.x, layer.weight, masks, "gelu", mask_weights=layer.mask_weights)
        with pytest.warns(UserWarning, match="route_weights is now called mask_weights") as seen:
            found = op(layer.x, layer.weight, masks, "gelu", route_weights=layer.mask_weights)
        assert seen[0].filename == __file__
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
