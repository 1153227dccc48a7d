"""`forward_train` and `backward`, called directly: saved tensors, each gradient alone, errors and memory."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mglu_ops import dispatch
from mglu_ops.backends import formula, triton
from tests.support import layers as s
from tests.support.budgets import BUDGET, NAIVE_FACTOR, assert_matches, relative_error
from tests.support.families import family, quick_only_for
from tests.support.layers import DTYPES, Layer, make_layer
from tests.support.training_steps import (
    TrainingLayer,
    assert_as_good_as_naive,
    assert_zero_without_an_expert,
    exact_partials,
    products_of,
    take_step,
)

mglu = torch.ops.mglu
FLOAT64 = s.layers(dtypes=(torch.float64,))


def forward_train(layer: Layer) -> tuple[Tensor, Tensor]:
    return mglu.forward_train(layer.x, layer.weight, layer.packed_masks, layer.activation, layer.mask_weights)


def flips(layer: Layer) -> Tensor:
    """F_i of `mglu_ops.ops` in float64: -1 where M_i = 1, and +1 elsewhere."""
    return 1 - 2 * layer.masks.double()


def partials_of(layer: Layer) -> Tensor:
    """The derivatives of y with respect to t, all f_i and all r_i of `mglu_ops.ops`, by autograd in float64."""
    leading, weights = layer.x.shape[:-1], layer.mask_weights
    products = products_of(layer.x.reshape(-1, layer.x.shape[-1]), layer.weight, layer.masks)
    weights = None if weights is None else weights.reshape(len(products), -1)
    partials = exact_partials(products, layer.activation, weights)[1]
    return partials.view(*leading, *partials.shape[1:])


@given(FLOAT64)
def test_partials_are_the_derivatives_of_the_result(layer):
    # If a row of a mask has no 1, the gate is 0 up to rounding, and relu's derivative there is arbitrary.
    assume(layer.activation != "relu" or bool(layer.masks.any(-1).all()))
    exact = partials_of(layer)
    _, partials = forward_train(layer)
    scale = 1 + (layer.x.norm() * layer.weight.norm()).item() ** 2
    torch.testing.assert_close(partials, exact, rtol=1e-12, atol=1e-13 * scale)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", s.ACTIVATION_NAMES)
def test_partials_are_within_the_budget(activation, dtype, weighted):
    layer = make_layer((3, 16), 96, 40, 4, activation=activation, dtype=dtype, weighted=weighted)
    _, partials = forward_train(layer)
    assert partials.dtype is dtype
    assert partials.is_contiguous()
    for row, exact in zip(partials.unbind(-2), partials_of(layer).unbind(-2), strict=True):
        assert_matches(row, exact, dtype)


def test_partials_of_more_tokens_than_one_chunk():
    layer = make_layer((600,), 8, 2000, 2, dtype=torch.float64, weighted=True)
    result, partials = forward_train(layer)
    assert_matches(result, layer.oracle())
    assert_matches(partials, partials_of(layer))


@pytest.mark.parametrize("op", ["forward", "forward_ste"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_inputs_and_the_partials_are_all_that_is_saved(op, weighted):
    layer = make_layer(weighted=weighted)
    x, weight = (tensor.clone().requires_grad_() for tensor in (layer.x, layer.weight))
    masks = layer.packed_masks if op == "forward" else layer.logits.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        getattr(mglu, op)(x, weight, masks, "silu", layer.mask_weights)
    assert saved == [x.shape, weight.shape, layer.packed_masks.shape, (5, 7 if weighted else 4, 10)]


class Sizes(TorchDispatchMode):
    """Counts the elements of the results of all operators except mglu's and views."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace != "mglu" and not func.is_view and isinstance(result, Tensor):
            self.elements[str(func)] += result.untyped_storage().nbytes() // result.element_size()
        return result


def test_autograd_adds_no_tensor_of_the_size_of_the_partials():
    layer = make_layer((64,), n_masks=16)
    x = layer.x.clone().requires_grad_()
    result = layer.with_(x=x).forward()
    grad_output = torch.ones_like(result)
    with Sizes() as sizes:
        result.backward(grad_output)
    assert x.grad is not None
    assert sizes.elements.total() < 64 * 16 * 10


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_a_result_without_a_gradient_gives_none():
    layer = make_layer()
    x = layer.x.clone().requires_grad_()
    NoGradient.apply(layer.with_(x=x).forward()).sum().backward()
    assert x.grad is None


def equations(grad_output: Tensor, layer: Layer, partials: Tensor) -> tuple[Tensor, ...]:
    """The gradients of x, weight, logits and mask weights by the equations in `mglu_ops.ops`, in float64."""
    grad_output, x, weight, partials = (t.double() for t in (grad_output, layer.x, layer.weight, partials))
    n_masks = len(layer.masks)
    dt, b, terms = (grad_output.unsqueeze(-2) * partials).split((1, n_masks, partials.shape[-2] - 1 - n_masks), -2)
    dt, d = dt.squeeze(-2), torch.einsum("...nd,...h->ndh", b, x)
    return (
        dt @ weight + torch.einsum("...nd,ndh->...h", b, flips(layer) * weight),
        torch.einsum("...d,...h->dh", dt, x) + (flips(layer) * d).sum(0),
        -2 * weight * d,
        terms.sum(-1),
    )


def magnitudes(grad_output: Tensor, layer: Layer, partials: Tensor) -> list[Tensor]:
    """The gradients if no terms cancelled. Rounding errors are bounded by a multiple of these values.

    A backend may compute the gradient of the logits as a difference of two larger products, so these products count in
    the magnitude for the logits.
    """
    same_sign = layer.with_(x=layer.x.abs(), weight=layer.weight.abs(), masks=torch.zeros_like(layer.masks))
    grad_x, grad_weight, grad_logits, grad_mask_weights = equations(grad_output.abs(), same_sign, partials.abs())
    return [grad_x, grad_weight, grad_logits.abs() + same_sign.weight.double() * grad_weight, grad_mask_weights]


@s.examples(200)
@given(s.layers(), s.layouts, s.layouts, s.seeds, st.tuples(*[st.booleans()] * 4))
def test_backward_computes_the_gradients_that_are_needed(layer, layout, layout_of_partials, seed, wanted):
    generator, dtype = torch.Generator().manual_seed(seed), layer.x.dtype
    leading, out_features, n_masks = layer.x.shape[:-1], layer.weight.shape[0], len(layer.masks)
    rows = n_masks + 1 if layer.mask_weights is None else 2 * n_masks + 1
    grad_output = torch.randn(*leading, out_features, generator=generator).to(dtype)
    partials = torch.randn(*leading, rows, out_features, generator=generator).to(dtype)
    grad_output, partials = s.laid_out(grad_output, layout), s.laid_out(partials, layout_of_partials)
    needed = (*wanted[:3], wanted[3] and layer.mask_weights is not None)
    dtypes = [dtype if is_needed else None for is_needed in needed[2:]]
    args = (grad_output, layer.x, layer.weight, layer.packed_masks, partials, needed[:2], *dtypes)
    expected = zip(
        mglu.backward(*args),
        equations(grad_output, layer, partials),
        magnitudes(grad_output, layer, partials),
        needed,
        strict=True,
    )
    addresses = []
    for grad, exact, magnitude, is_needed in expected:
        assert (grad.dtype, grad.shape) == (dtype, exact.shape if is_needed else (0,))
        assert grad.is_contiguous()
        if not is_needed:
            continue
        assert ((grad.double() - exact).abs() <= BUDGET[dtype] * magnitude + torch.finfo(dtype).tiny).all()
        addresses.append(grad.untyped_storage().data_ptr())
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_tokens_and_one_token(tokens, dtype):
    layer = make_layer((tokens,), 21, 11, dtype=dtype, weighted=True)
    result, partials = forward_train(layer)
    grads = mglu.backward(result, layer.x, layer.weight, layer.packed_masks, partials, (True, True), dtype, dtype)
    exact = equations(result, layer, partials)
    for name, grad, expected in zip(("x", "weight", "logits", "term_weights"), grads, exact, strict=True):
        assert_matches(grad, expected, dtype, name)


GRADIENTS_FACTOR = {0.1: 2.5, 0.25: NAIVE_FACTOR, 0.5: NAIVE_FACTOR, 0.75: NAIVE_FACTOR, 0.9: 2.5}
"""Maps the density of masks to the allowed error of gradients, as a multiple of the naive layer's error."""


@pytest.mark.parametrize("density", GRADIENTS_FACTOR)
@pytest.mark.parametrize("n_masks", quick_only_for([4], [1, 2, 4, 16]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_errors_of_gradients_are_at_most_a_multiple_of_the_naive_layers(dtype, n_masks, density):
    """float64 is skipped, because the oracle is in float64 itself and has errors as large as the layers'."""
    for activation in ("silu", "relu", "sigmoid", "identity"):
        layer = TrainingLayer.random("cpu", dtype, (40,), 56, 128, n_masks, density=density, activation=activation)
        assert_as_good_as_naive(take_step(layer), layer, GRADIENTS_FACTOR[density], half_epsilon=True)


@pytest.mark.parametrize("density", GRADIENTS_FACTOR)
@pytest.mark.parametrize("n_masks", quick_only_for([4], [2, 4, 16]))
def test_errors_in_float32_on_gpus_without_fast_float64(n_masks, density, monkeypatch):
    monkeypatch.setattr(formula, "_backward_total_dtype", lambda x: torch.float32)
    layer = TrainingLayer.random("cpu", torch.float32, (96,), 256, 512, n_masks, density=density)
    assert_as_good_as_naive(take_step(layer), layer, 2.5, half_epsilon=True)


# --- Experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loads", "unowned", "n_masks", "dtype", "activation", "mask_weights_dtype"),
    family(
        [[5, 0, 9, 1], [0, 0, 7], [3, 4], [0, 0]],
        [0, 3],
        [2, 1, 5],
        [torch.float64, torch.float32, torch.bfloat16],
        ["silu", "gelu"],
        [None, torch.float32],
    ),
)
def test_a_step_of_experts_agrees_with_a_loop(loads, unowned, n_masks, dtype, activation, mask_weights_dtype):
    torch.manual_seed(0)
    layer = TrainingLayer.of_experts(
        "cpu", dtype, loads, 12, 20, n_masks, unowned=unowned, activation=activation,
        mask_weights_dtype=mask_weights_dtype,
    )  # fmt: skip
    found = take_step(layer)
    for name, exact in layer.in_plain_torch(torch.float64).items():
        assert relative_error(found[name], exact) <= 2 * max(BUDGET[dtype], BUDGET[found[name].dtype]), name
        assert_zero_without_an_expert(name, found[name], layer)


@pytest.mark.parametrize("needed", range(4))
def test_a_step_of_experts_computes_only_what_is_needed(needed: int) -> None:
    layer = TrainingLayer.of_experts("cpu", torch.float32, [2, 3], 8, 16, 2, mask_weights_dtype=torch.float32)
    every = take_step(layer)
    needs = [i == needed for i in range(4)]
    for name, tensor in take_step(layer, needs=needs).items():
        torch.testing.assert_close(tensor, every[name])


@pytest.mark.parametrize(
    ("dtype", "capability", "reason"),
    [
        (torch.float64, (9, 0), "too narrow for float64"),
        (torch.bfloat16, (7, 5), "need compute capability 8.0, this GPU has (7, 5)"),
        (torch.float16, None, "triton is not installed"),
    ],
    ids=["dtype", "GPU", "no Triton"],
)
def test_a_gpu_for_which_the_host_would_wait(monkeypatch, dtype, capability, reason):
    monkeypatch.setattr(triton, "is_installed", lambda: capability is not None)
    monkeypatch.setattr(triton, "_runs_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton, "device_reason", triton.device_reason.__wrapped__)
    for task in (
        ("forward", "train") if dtype is torch.float64 else ("train",)
    ):  # the CUDA backend asks about the others
        text = dispatch.waiting_reason(task, torch.device("cuda", 0), dtype)
        assert text is not None
        assert text.startswith("the host waits for the device, to read which rows each expert has: ")
        assert reason in text
