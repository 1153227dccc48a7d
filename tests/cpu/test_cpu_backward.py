"""The CPU's backward pass in bfloat16, with native and emulated intrinsics: its kernels, and gradients of layers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mglu_ops import dispatch
from mglu_ops.backends import BACKENDS
from mglu_ops.backends.cpu import Cpu, backward, build, library
from tests.support.budgets import relative_error
from tests.support.cpu import BFLOAT16, EMULATED, needs_compiler
from tests.support.layers import pack, rows_apart, transposed
from tests.support.training_steps import NAMES, TrainingLayer, assert_as_good_as_naive, assert_rounded, take_step

pytest_plugins = ["tests.support.cpu"]
pytestmark = [needs_compiler, pytest.mark.parametrize("kernel", [BFLOAT16[0], EMULATED[0]], indirect=True, ids=str)]

BF16, F32, F16, F64 = torch.bfloat16, torch.float32, torch.float16, torch.float64
COLUMNS = (0, 1, 7, 8, 31, 32, 33, 72, 257)


@pytest.fixture(autouse=True)
def _forgotten_calls(kernel, monkeypatch):
    monkeypatch.setattr(dispatch, "_prepared", {})


@pytest.fixture
def steps(kernel):
    return backward.CpuSteps(kernel.library())


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("n_masks", range(1, 17))
def test_flip_signs(steps, n_masks):
    for d, h in itertools.product((1, 5), COLUMNS):
        weight, masks = normal(d, h), torch.rand(n_masks, d, h) > 0.5
        expected = torch.cat((weight[None], torch.where(masks, -weight, weight)))
        for change in (torch.clone, rows_apart):
            assert torch.equal(steps.flip_signs(change(weight), pack(masks)), expected)


def test_scale(steps):
    """The product of two bfloat16 numbers is exact in float32, so results are rounded once."""
    for tokens, entries, columns in itertools.product((1, 9), (1, 2, 17), COLUMNS):
        grad, partials = normal(tokens, columns), normal(tokens, entries, columns)
        for change in (torch.clone, rows_apart):
            steps._memory = torch.full((partials.numel(),), float("nan"), dtype=BF16)  # what the kernel does not write
            found = steps.scale(change(grad), change(partials))
            assert torch.equal(found, (grad.float()[:, None] * partials.float()).to(BF16))


@pytest.mark.parametrize("total_dtype", [BF16, F32])
@pytest.mark.parametrize("logits_dtype", [None, BF16, F32])
def test_weight_gradients(steps, logits_dtype, total_dtype):
    for n_masks, d, h in itertools.product((1, 2, 3, 8, 16), (1, 5), COLUMNS):
        weight, products, total = normal(d, h), normal(n_masks, d, h), normal(d, h, dtype=total_dtype)
        masks, nan = torch.rand(n_masks, d, h) > 0.5, float("nan")
        # The kernel writes gradients into a slice of rows of a larger tensor.
        grad_logits = None if logits_dtype is None else torch.full((n_masks, d + 2, h), nan, dtype=logits_dtype)
        for needs_weight in (True, False) if logits_dtype else (True,):
            grad_weight = torch.full((d, h), nan, dtype=BF16) if needs_weight else None
            part = None if grad_logits is None else grad_logits[:, 1:-1]
            steps.weight_gradients(total, products, rows_apart(weight), pack(masks), grad_weight, part)
            if grad_weight is not None:
                exact = total.double() + torch.where(masks, -products, products).double().sum(0)
                assert_rounded(grad_weight, exact, "weight")
            if grad_logits is not None:
                exact = -2 * weight.double() * products.double()
                assert torch.equal(grad_logits[:, 1:-1], exact.to(logits_dtype))
                assert grad_logits[:, [0, -1]].isnan().all()


def test_mask_weight_gradients(steps):
    for tokens, n_masks, columns in itertools.product((1, 9), (1, 3, 16), (*COLUMNS, 3000)):
        grad, terms = normal(tokens, columns), normal(tokens, n_masks, columns)
        exact = (grad.double()[:, None] * terms.double()).sum(-1)
        for change in (torch.clone, rows_apart):
            found = steps.mask_weight_gradients(change(grad), change(terms))
            torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


def test_not_finite_numbers(steps):
    numbers = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, 0.0]).to(BF16)
    grad, partials = numbers.repeat_interleave(5)[None], numbers.repeat(5)[None, None]
    found = steps.scale(grad, partials)
    torch.testing.assert_close(found, (grad[:, None].float() * partials.float()).to(BF16), equal_nan=True)


def run(layer: TrainingLayer, needs: tuple[bool, ...] = (True,) * 4) -> dict[str, Tensor]:
    """Return the CPU backend's result and gradients, also on CPUs for which `dispatch` would not choose it."""
    backward = BACKENDS["cpu"].prepare("backward", layer.call)
    return take_step(layer, lambda given: torch.ops.mglu.forward_train(*given[:5]), backward, needs)


@pytest.mark.parametrize("density", [0.1, 0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("n_masks", [1, 2, 3, 4, 5, 8, 16])
def test_errors_are_close_to_the_naive_layers(n_masks, density):
    layer = TrainingLayer.random("cpu", BF16, (192,), 96, 136, n_masks, density=density, mask_weights_dtype=BF16)
    assert_as_good_as_naive(run(layer), layer, 1.5 if 0.25 <= density <= 0.75 else 2.5)


@given(st.data())
def test_layers_of_any_size(data):
    tokens, d, n_masks = (data.draw(st.integers(1, most)) for most in (70, 70, 16))
    h = data.draw(st.integers(2, 70))  # with one column, gate or value is 0, and gradients of x and weight vanish
    mask_weights_dtype = data.draw(st.sampled_from([None, BF16, F32]))
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    layer = TrainingLayer.random("cpu", BF16, (tokens,), d, h, n_masks, mask_weights_dtype=mask_weights_dtype)
    exact = layer.in_plain_torch(F64)
    # Small sums have few roundings, so errors vary by chance, and the bound does not depend on the naive layer's error.
    for name, found in run(layer).items():
        terms = exact[name].norm() + 1
        assert (found.double() - exact[name]).norm() <= 2.0**-4 * terms, name


@pytest.mark.parametrize("weighted", [False, True])
def test_chunks_of_tokens_and_features(monkeypatch, weighted):
    layer = TrainingLayer.random("cpu", BF16, (200,), 150, 72, 5, mask_weights_dtype=BF16 if weighted else None)
    whole = run(layer)
    monkeypatch.setattr(backward, "_CHUNK_ELEMENTS", 1)
    parts = run(layer)
    for name, found in whole.items():
        assert relative_error(parts[name], found.double()) <= 2.0**-9
    assert_as_good_as_naive(parts, layer, 1.5)


@pytest.mark.parametrize("logits_dtype", [BF16, F32, F16, F64])
@pytest.mark.parametrize("n_masks", [2, 6])
def test_each_subset_of_gradients(logits_dtype, n_masks):
    layer = TrainingLayer.random("cpu", BF16, (70,), 40, 72, n_masks, mask_weights_dtype=F32, logits_dtype=logits_dtype)
    for needs in itertools.product((False, True), repeat=4):
        found = run(layer, needs)
        for name in found.keys() - {"y"}:
            assert found[name].dtype is getattr(layer, name).dtype
        assert_as_good_as_naive(found, layer, 1.5)


@pytest.mark.parametrize("size", [(0, 8, 8), (3, 0, 8), (3, 8, 0), (0, 0, 0), (1, 1, 1), (1, 300, 9), (2, 1, 300)])
def test_sizes_of_zero_and_one(size):
    layer = TrainingLayer.random("cpu", BF16, size[:1], *size[1:], 3, mask_weights_dtype=BF16)
    exact = layer.in_plain_torch(F64)
    for name, found in run(layer).items():
        torch.testing.assert_close(found.double(), exact[name], rtol=0.1, atol=0.05)


@pytest.mark.parametrize("n_masks", [2, 6])
def test_layouts_do_not_change_results(n_masks):
    layer = TrainingLayer.random("cpu", BF16, (33,), 41, 50, n_masks, mask_weights_dtype=BF16)
    wide_masks = torch.full((41, 9, n_masks + 2), 255, dtype=torch.uint8)
    packed_masks = wide_masks[:, :7, :n_masks].copy_(layer.packed_masks)
    expanded = layer.grad_output[:1].expand(33, 41)
    for change in (rows_apart, transposed):
        for grad_output in (change(layer.grad_output), expanded):
            same = replace(layer, grad_output=grad_output.contiguous())
            x, weight = change(layer.x), change(layer.weight)
            changed = replace(layer, x=x, weight=weight, packed_masks=packed_masks, grad_output=grad_output)
            assert all(map(torch.equal, run(changed).values(), run(same).values()))


def test_repetition_does_not_change_bits():
    layer = TrainingLayer.random("cpu", BF16, (300,), 256, 200, 5, mask_weights_dtype=BF16)
    expected = run(layer)
    for _ in range(3):
        assert all(map(torch.equal, run(layer).values(), expected.values()))


def test_only_bfloat16_on_cpus_with_its_instructions_runs_this_backward_pass(monkeypatch):
    def chosen(dtype: torch.dtype) -> str:
        return dispatch.choose("backward", TrainingLayer.random("cpu", dtype, (5,), 16, 24, 2).call).backend

    assert {chosen(dtype) for dtype in (F32, F16, F64)} == {"composite"}
    assert chosen(BF16) == ("cpu" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "composite")
    with monkeypatch.context() as patch:
        patch.setattr(library.Library, "supports", lambda self, isa, dtype: isa not in ("avx512_bf16", "amx"))
        assert chosen(BF16) == "composite"
    monkeypatch.setattr(library, "_loaded", "there is no compiler in this test")
    monkeypatch.setattr(library, "_tried_with", build.settings())
    assert chosen(BF16) == "composite"


def test_autograd_runs_this_backward_pass(monkeypatch):
    """Two backward passes of the same call are prepared once. x has two leading dimensions."""
    prepared = []

    class Spy(Cpu):
        def prepare(self, task, call, launch=None):
            prepared.extend([call] * (task == "backward"))
            return super().prepare(task, call, launch)

    monkeypatch.setattr(dispatch, "BACKENDS", {**BACKENDS, "cpu": Spy()})
    layer = TrainingLayer.random("cpu", BF16, (3, 20), 40, 72, 3)
    x, weight, logits = (t.clone().requires_grad_() for t in (layer.x, layer.weight, layer.logits))
    for _ in range(2):
        y, _ = torch.ops.mglu.forward_ste(x, weight, logits, "silu", None)
        found = torch.autograd.grad(y, (x, weight, logits), layer.grad_output)
        assert_as_good_as_naive(dict(zip(NAMES, found, strict=False)), layer, 1.5)
    assert len(prepared) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
