"""The forward pass of training in the CPU kernels of each instruction set: the result and its partial derivatives."""

from __future__ import annotations

import math
import shutil
import warnings

import pytest
import strategies as s
import torch
from budgets import BUDGET
from cpu_calls import assert_trains, exact_partials, forward_train, oracle, run
from families import quick_only_for
from hypothesis import given
from hypothesis import strategies as st
from strategies import Layer, make_layer

from mglu_ops import dispatch
from mglu_ops.backends import BACKENDS, cpu
from mglu_ops.backends.cpu import Cpu, build, library
from mglu_ops.layer_call import LayerArguments, LayerCall

pytestmark = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="needs a C++ compiler")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = [(isa, dtype) for isa in ("portable", "avx2", "avx512") for dtype in DTYPES]
KERNELS += [(isa, torch.bfloat16) for isa in ("avx512_bf16", "amx")]


@pytest.fixture(params=KERNELS, ids=lambda kernel: f"{kernel[0]}-{kernel[1]}")
def kernel(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """Each instruction set of the build that this machine has, with each dtype that it takes."""
    loaded = library.load()
    assert isinstance(loaded, library.Library), loaded
    if not loaded.supports(*request.param):
        pytest.skip(f"this CPU has no {request.param[0]}")
    return request.param


@pytest.mark.parametrize("n_masks", quick_only_for([1, 2, 3, 16], range(1, 17)))
def test_every_number_of_masks(kernel, n_masks):
    """Few and many tokens, whole and ragged vectors, panels and blocks, with mask weights and without them."""
    isa, dtype = kernel
    for tokens in (1, 3, 8, 17, 33):
        weighted = tokens % 2 == 0 or tokens == 17
        layer = make_layer((tokens,), 67 + tokens, 35, n_masks, dtype=dtype, weighted=weighted, seed=tokens)
        assert_trains(layer, isa, f"{tokens} tokens")


@pytest.mark.parametrize("activation", s.ACTIVATION_NAMES)
def test_activations_and_their_derivatives(kernel, activation):
    """With a value of 1, dy/dt and dy/df are half the sum and half the difference of act(gate) and act'(gate)."""
    isa, dtype = kernel
    gates = torch.linspace(-30, 30, 2001).to(dtype)
    x, weight = torch.stack((gates, torch.ones_like(gates)), 1), torch.ones(1, 2).to(dtype)
    packed = torch.ops.mglu.pack_masks(torch.tensor([[[True, False]]]))
    cpu = BACKENDS["cpu"]
    assert isinstance(cpu, Cpu)
    given = LayerArguments(x, weight, packed, activation)
    y, partials = cpu.prepare_forward_train(LayerCall.of(given), isa)(given)
    wide = gates.double().requires_grad_()
    act = s.ACTIVATIONS[activation].forward(wide)
    (derivative,) = torch.autograd.grad(act.sum(), wide)
    act = act.detach()
    rounding = torch.finfo(dtype).eps
    for found, exact in ((y, act), (partials[:, 0], (derivative + act) / 2), (partials[:, 1], (act - derivative) / 2)):
        limit = rounding * (act.abs() + derivative.abs()) + 4e-7 * wide.detach().abs().clamp(max=6) + 1e-7
        assert ((found[:, 0].double() - exact).abs() <= limit).all()


def test_derivative_of_relu_at_zero_and_nan(kernel):
    """The derivative is 0 at 0, and 1 at a NaN, as in torch."""
    isa, dtype = kernel
    x = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [math.nan, 1.0]]).to(dtype)
    packed = torch.ops.mglu.pack_masks(torch.tensor([[[True, False]]]))
    layer = Layer(x, torch.ones(1, 2).to(dtype), torch.tensor([[[True, False]]]), packed, "relu", None)
    y, partials = forward_train(layer, isa)
    assert torch.equal(partials[:2], torch.zeros(2, 2, 1).to(dtype))
    assert y[2].isnan().all()
    assert partials[2].isnan().all()


def test_more_tokens_and_features_than_a_block_holds(kernel):
    isa, dtype = kernel
    for tokens, out_features, n_masks in ((700, 53, 3), (40, 300, 1)):
        layer = make_layer((tokens,), 300, out_features, n_masks, dtype=dtype, weighted=n_masks > 1)
        assert_trains(layer, isa, f"{tokens} tokens, {n_masks} masks")


def test_the_result_has_the_bits_of_inference(kernel):
    """Use more tokens than the kernels for few tokens take."""
    isa, dtype = kernel
    layer = make_layer((40,), 90, 50, 3, dtype=dtype, weighted=True)
    assert torch.equal(forward_train(layer, isa)[0], run(layer, isa))


def test_any_number_of_threads_gives_the_same_bits(kernel):
    isa, dtype = kernel
    layer = make_layer((70,), 330, 200, 2, dtype=dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = forward_train(layer, isa)
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert all(map(torch.equal, forward_train(layer, isa), first))
    finally:
        torch.set_num_threads(before)


@given(st.data())
def test_any_layout(data):
    """Strided rows, strided columns, and tensors that are not even views of a matrix."""
    dtype = data.draw(st.sampled_from(DTYPES))
    layer = data.draw(s.layers(dtype=dtype))
    x = layer.x.reshape(math.prod(layer.x.shape[:-1]), layer.x.shape[-1])
    mask_weight = layer.mask_weights
    layer = layer.with_(
        x=x, mask_weights=None if mask_weight is None else mask_weight.reshape(len(x), mask_weight.shape[-1])
    )
    if x.shape[1] == 0:
        return
    y, partials = forward_train(layer)
    exact = exact_partials(layer)
    total = x.abs().double() @ layer.weight.abs().double().T
    term_weights = len(layer.masks) if mask_weight is None else layer.mask_weights.double().sum(-1, keepdim=True).abs()
    limit = BUDGET[dtype] * (term_weights + 1) * (total + 1) ** 2 + torch.finfo(dtype).tiny
    assert ((y.double() - oracle(layer)).abs() <= limit).all()
    assert ((partials.double() - exact).abs() <= limit[:, None]).all()


def test_training_without_kernels_warns_once(monkeypatch):
    """Library GEMMs are correct but slower, so a warning appears, except for small layers."""
    monkeypatch.setattr(cpu, "load", lambda: "no compiler in this test")
    monkeypatch.setattr(dispatch, "_training_calls", {})
    dispatch._warn_of_fallback.cache_clear()
    small, large = (make_layer((2,), size, size, 2, dtype=torch.float32) for size in (16, 512))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.ops.mglu.forward_train(small.x, small.weight, small.packed_masks)
    with pytest.warns(UserWarning, match="forward_train runs on the backend composite: .* no compiler in this test"):
        torch.ops.mglu.forward_train(large.x, large.weight, large.packed_masks)
    dispatch._training_calls.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.ops.mglu.forward_train(large.x, large.weight, large.packed_masks)
    dispatch._warn_of_fallback.cache_clear()


def test_small_masks_do_not_start_a_build(monkeypatch):
    """Training packs masks at every step. Small masks do not justify a build of half a minute."""
    masks = torch.rand(2, 9, 21) < 0.5
    packed = torch.ops.mglu.pack_masks(masks)
    assert isinstance(library.load(), library.Library)
    assert dispatch._packing_backend(masks) is BACKENDS["cpu"]
    monkeypatch.setattr(library, "_loaded", None)
    assert dispatch._packing_backend(masks) is None
    assert torch.equal(torch.ops.mglu.pack_masks(masks), packed)
