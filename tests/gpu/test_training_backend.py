"""A training step on a GPU: its kernels and whole layers, compared with float64 and with the naive layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mglu_ops import dispatch
from mglu_ops.activations import ACTIVATIONS
from mglu_ops.backends import BACKENDS
from mglu_ops.backends.cuda import training
from mglu_ops.backends.cuda.device import gpu_of
from mglu_ops.backends.cuda.kernels import backward_gemm
from mglu_ops.backends.cuda.kernels import training_steps as steps
from mglu_ops.backends.parameters import addresses
from mglu_ops.sizes import round_up
from tests.support.budgets import NAIVE_FACTOR, assert_matches, relative_error
from tests.support.layers import rows_apart, spaced, unaligned
from tests.support.training_steps import NAMES, Steps, TrainingLayer, assert_as_good_as_naive, take_step

pytestmark = pytest.mark.gpu

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
STEPS = Steps("cuda", [(3, 520), (257, 4096), (5, 37), (19, 1004), (1, 8), (2, 1), (0, 24), (4, 0)])
"""Checks of sizes (rows, columns). Some numbers of columns are not multiples of 8 or 16, and some sizes are 0."""


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


both_halves = pytest.mark.parametrize("dtype", [F16, BF16])


@pytest.mark.parametrize("n_masks", range(1, 17))
@both_halves
def test_flip_signs(n_masks: int, dtype: torch.dtype) -> None:
    for with_weight in (True, False):
        STEPS.flip_signs(n_masks, dtype, with_weight=with_weight)


@pytest.mark.parametrize("n_masks", range(1, 17))
@both_halves
@pytest.mark.parametrize("mask_weights_dtype", [None, F16, BF16, F32], ids=str)
def test_partials(mask_weights_dtype: torch.dtype | None, dtype: torch.dtype, n_masks: int) -> None:
    STEPS.partials(n_masks, dtype, "silu", mask_weights_dtype)


@both_halves
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_partials_of_every_activation(activation: str, dtype: torch.dtype) -> None:
    STEPS.partials_of_large_and_small_gates(activation, dtype)
    STEPS.partials(3, dtype, activation, F32)


@pytest.mark.parametrize("entries", range(1, 18))
@both_halves
def test_scale(entries: int, dtype: torch.dtype) -> None:
    STEPS.scale(entries, dtype)


@pytest.mark.parametrize("dtypes", list(itertools.product([F16, BF16, F32, None], repeat=2))[:-1], ids=str)
@pytest.mark.parametrize("n_masks", [1, 2, 3, 4, 8, 16])
@both_halves
def test_weight_gradients(dtype, n_masks, dtypes):
    STEPS.weight_gradients(n_masks, dtype, *dtypes)


@pytest.mark.parametrize("n_masks", [1, 2, 5, 16])
@pytest.mark.parametrize("mask_weights_dtype", [F16, BF16, F32])
@both_halves
def test_mask_weight_gradients(dtype: torch.dtype, mask_weights_dtype: torch.dtype, n_masks: int) -> None:
    STEPS.mask_weight_gradients(n_masks, dtype, mask_weights_dtype)


@pytest.mark.parametrize(
    "sizes",
    [
        (256, 256, 256, 1), (128, 64, 256, 1), (200, 136, 264, 2), (1000, 392, 520, 3), (1, 8, 8, 4),
        (77, 1000, 72, 16), (2048, 1024, 4096, 4), (385, 40, 1032, 7),
    ],
    ids=str,
)  # fmt: skip
@both_halves
def test_gemms_of_backward(dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    tokens, d, h, n_masks = sizes
    if torch.cuda.get_device_capability() != backward_gemm.ARCH:
        pytest.skip("needs compute capability 9.0")
    grad, x = rows_apart(normal(tokens, d, dtype=dtype)), rows_apart(normal(tokens, h, dtype=dtype))
    partials = normal(tokens, 2 * n_masks + 1, 2 * d, dtype=dtype)[:, : n_masks + 1, d:]
    weight, flipped = rows_apart(normal(d, h, dtype=dtype)), normal(n_masks, d, h, dtype=dtype)
    scaled = (grad[:, None] * partials).double()
    grad_x = torch.full((tokens, h), float("nan"), dtype=dtype, device="cuda")
    products = torch.full((n_masks + 1, d, h), float("nan"), dtype=dtype, device="cuda")
    assert backward_gemm.can_run(gpu_of(0), grad, partials, x, weight)
    stream = torch.cuda.current_stream().cuda_stream
    at = addresses(grad_output=grad, partials=partials, x=x, weight=weight, flipped=flipped, others=None)
    backward_gemm.prepare_grad_x(grad, partials, weight)(stream, at | addresses(out=grad_x))
    by_weight = backward_gemm.prepare_weight_products(grad, partials, x)
    by_weight(stream, at | addresses(out=products[0], others=products[1:]))
    stacked = torch.cat((weight[None], flipped)).double()
    assert_matches(grad_x, scaled.flatten(1) @ stacked.flatten(0, 1), dtype)
    exact = torch.einsum("tid,th->idh", scaled, x.double())
    assert_matches(products, exact, dtype)
    wide = torch.full_like(products[0], float("nan"), dtype=F32)
    backward_gemm.prepare_weight_products(grad, partials[:, :1], x, wide=True)(stream, at | addresses(out=wide))
    assert relative_error(wide, exact[0]) < 1e-5


@pytest.mark.alone(gibibytes=24)
def test_more_than_2_31_elements() -> None:
    """The last rows of each kernel's result must have the same bits as if they were computed alone."""
    tokens, entries, columns = 2**16 + 3, 4, 2**13 + 8
    partials, grad = torch.empty(tokens, entries, columns, dtype=BF16, device="cuda").normal_(), normal(tokens, columns)
    scaled = steps.scale(grad, partials)
    assert torch.equal(scaled[-9:], steps.scale(grad[-9:].clone(), partials[-9:].clone()))
    del scaled
    tail, expected, result = partials[-9:].clone(), grad[-9:].clone(), grad
    steps.partials(tail, "silu", None, tail, expected)
    steps.partials(partials, "silu", None, partials, result)
    assert torch.equal(result[-9:], expected)
    assert torch.equal(partials[-9:], tail)
    del partials, grad, result

    rows, columns = 2**18 + 5, 2**11 + 8
    weight, packed = normal(rows, columns), torch.randint(256, (rows, columns // 8, 3), device="cuda").byte()
    flipped = steps.flip_signs(weight, packed)
    last = weight[-9:].clone(), packed[-9:].clone()
    assert torch.equal(flipped[:, -9:], steps.flip_signs(*last))
    expected = flipped[:, -9:].clone()
    steps.weight_gradients(expected[0], expected[1:], *last, expected[0], expected[1:])
    steps.weight_gradients(flipped[0], flipped[1:], weight, packed, flipped[0], flipped[1:])
    assert torch.equal(flipped[:, -9:], expected)


@pytest.fixture(params=["own kernels", "library GEMMs"])
def gemms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force our own GEMMs or torch's, no matter which is faster, and forget calls that were prepared before."""
    monkeypatch.setattr(dispatch, "_prepared", {})
    if request.param == "own kernels":
        monkeypatch.setattr(backward_gemm, "is_faster", lambda gpu, rows, columns, depth: rows * columns > 0)
    else:
        monkeypatch.setattr(backward_gemm, "can_run", lambda *operands: False)
        monkeypatch.setattr(training, "training_choice", lambda call, gpu: None)
    return str(request.param)


def run(layer: TrainingLayer, *wanted: str) -> dict[str, Tensor]:
    """The result and the wanted gradients of `forward_ste`, or of `forward` if logits need no gradient."""
    tensors = {name: getattr(layer, name) for name in NAMES}
    leaves = {k: None if t is None else t.detach().requires_grad_(k in wanted) for k, t in tensors.items()}
    x, weight, logits, mask_weights = leaves.values()
    if "logits" in wanted:
        y, _ = torch.ops.mglu.forward_ste(x, weight, logits, layer.activation, mask_weights)
    else:
        y = torch.ops.mglu.forward(x, weight, layer.packed_masks, layer.activation, mask_weights)
    grads = torch.autograd.grad(y, [leaves[name] for name in wanted], layer.grad_output) if wanted else ()
    return {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}


def gradients_of(layer: TrainingLayer) -> tuple[str, ...]:
    return NAMES if layer.mask_weights is not None else NAMES[:3]


RAGGED = [(512, 384, 508), (301, 383, 512), (257, 129, 333), (64, 7, 16)]


@pytest.mark.usefixtures("gemms")
@pytest.mark.parametrize("density", [0.5, 0.25, 0.75, 0.1, 0.9])
@pytest.mark.parametrize("n_masks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("weighted", [False, True])
@both_halves
def test_errors_are_close_to_the_naive_layers(dtype: torch.dtype, weighted: bool, n_masks: int, density: float) -> None:
    layer = TrainingLayer.random(
        "cuda", dtype, (512,), 384, 512, n_masks, density=density, mask_weights_dtype=dtype if weighted else None
    )
    assert BACKENDS["cuda"].reason("train", layer.call) is None
    found = run(layer, *gradients_of(layer))
    assert_as_good_as_naive({"y": found.pop("y")}, layer, 1.5)
    assert_as_good_as_naive(found, layer, 1.5 if 0.2 < density < 0.8 else 2.5)


@pytest.mark.parametrize("n_masks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("density", [0.1, 0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_errors_in_float32_are_close_to_the_naive_layers(density, n_masks, precision, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", precision)
    layer = TrainingLayer.random("cuda", F32, (512,), 1024, 512, n_masks, density=density)
    found = run(layer, *NAMES[:3])
    assert_as_good_as_naive({"y": found.pop("y")}, layer, 1.5)
    assert_as_good_as_naive(found, layer, 1.5 if 0.2 < density < 0.8 else 2.5)


@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("n_masks", [1, 4])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_errors_are_within_the_budget(dtype: torch.dtype, n_masks: int) -> None:
    layer = TrainingLayer.random("cuda", dtype, (7, 9), 160, 200, n_masks, mask_weights_dtype=dtype, activation="gelu")
    found, exact = run(layer, *NAMES), layer.in_plain_torch(F64)
    for name in NAMES:
        assert_matches(found[name], exact[name], dtype, name)
    if dtype.itemsize == 2:
        del found["y"]
        assert_as_good_as_naive(found, layer, NAIVE_FACTOR)


@pytest.mark.usefixtures("gemms")
@pytest.mark.parametrize(
    ("tokens", "d", "h", "n_masks", "activation"),
    [
        *(((512,), 384, 512, 4, activation) for activation in ACTIVATIONS),
        *(((tokens,), d, h, 3, "silu") for tokens, d, h in RAGGED),
        *((tokens, 2048, 1024, 4, "silu") for tokens in ((4096,), (16, 300))),  # features in several chunks
    ],
    ids=str,
)
@both_halves
def test_errors_of_activations_and_sizes(dtype, tokens, d, h, n_masks, activation):
    layer = TrainingLayer.random("cuda", dtype, tokens, d, h, n_masks, mask_weights_dtype=F32, activation=activation)
    assert d < 2048 or len(training.feature_chunks(4096, n_masks, d, h, training.BACKWARD_CHUNKS)) > 1
    assert_as_good_as_naive(run(layer, *NAMES), layer, 1.5)


@pytest.mark.usefixtures("gemms")
@pytest.mark.parametrize("sizes", [(0, 24, 40), (1, 24, 40), (5, 0, 40), (5, 24, 0), (0, 7, 9), (1, 1, 1)], ids=str)
@both_halves
def test_sizes_of_zero_and_one(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    tokens, d, h = sizes
    layer = TrainingLayer.random("cuda", dtype, (tokens,), d, h, 3, mask_weights_dtype=F32)
    exact = layer.in_plain_torch(F64)
    for name, found in run(layer, *NAMES).items():
        torch.testing.assert_close(found.double(), exact[name], rtol=0.02, atol=0.02, msg=name)


@pytest.mark.parametrize("logits_dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("mask_weights_dtype", [F16, F32, F64])
def test_dtypes_of_logits_and_mask_weights(mask_weights_dtype: torch.dtype, logits_dtype: torch.dtype) -> None:
    layer = TrainingLayer.random(
        "cuda", BF16, (256,), 128, 192, 3, logits_dtype=logits_dtype, mask_weights_dtype=mask_weights_dtype
    )
    found = run(layer, *NAMES)
    assert found["logits"].dtype is logits_dtype
    assert found["mask_weights"].dtype is mask_weights_dtype
    assert_as_good_as_naive(found, layer, 1.5)


SUBSETS = [subset for size in range(1, 5) for subset in itertools.combinations(NAMES, size)]


@pytest.mark.parametrize("wanted", SUBSETS, ids="-".join)
def test_each_subset_of_gradients_has_the_bits_of_all(wanted: tuple[str, ...]) -> None:
    layer = TrainingLayer.random("cuda", BF16, (7, 9), 136, 200, 3, mask_weights_dtype=F32)
    whole, found = run(layer, *NAMES), run(layer, *wanted)
    for name, tensor in found.items():
        # Fewer gradients may need GEMMs of other sizes, which may sum in another order.
        torch.testing.assert_close(tensor, whole[name], rtol=0.02, atol=0.02, msg=name)


def test_gradients_that_are_not_needed_are_empty_tensors() -> None:
    layer, cuda = TrainingLayer.random("cuda", BF16, (33,), 64, 72, 2), BACKENDS["cuda"]
    forward = cuda.prepare("train", layer.call)
    with torch.no_grad():
        for needs in itertools.product([True, False], repeat=3):
            found = take_step(layer, forward, cuda.prepare("backward", layer.call), (*needs, False))
            assert all(tensor.numel() for tensor in found.values())


@pytest.mark.usefixtures("gemms")
@both_halves
def test_bits_repeat(dtype: torch.dtype) -> None:
    layer = TrainingLayer.random("cuda", dtype, (4096,), 2048, 1024, 4, mask_weights_dtype=F32)
    first = run(layer, *NAMES)
    for _ in range(3):
        again = run(layer, *NAMES)
        assert all(torch.equal(again[name], first[name]) for name in first)


LAYOUTS = (unaligned, rows_apart, lambda tensor: rows_apart(tensor, 3), lambda tensor: tensor.mT.contiguous().mT)


@pytest.mark.usefixtures("gemms")
@pytest.mark.parametrize("d", [256, 131])
@pytest.mark.parametrize("name", ["x", "weight", "logits", "mask_weights", "grad_output"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_each_tensor(layout: Callable[[Tensor], Tensor], name: str, d: int) -> None:
    layer = TrainingLayer.random("cuda", BF16, (130,), d, 264, 3, mask_weights_dtype=F32)
    expected = run(layer, *NAMES)
    setattr(layer, name, layout(getattr(layer, name)))
    for gradient, found in run(layer, *NAMES).items():
        torch.testing.assert_close(found, expected[gradient], rtol=0.02, atol=0.05, msg=gradient)


@pytest.mark.parametrize("layout", [*LAYOUTS, spaced])
def test_layouts_of_packed_masks(layout: Callable[[Tensor], Tensor]) -> None:
    layer = TrainingLayer.random("cuda", BF16, (130,), 256, 264, 4)
    other = replace(layer, packed_masks=layout(layer.packed_masks))
    with torch.no_grad():
        results = [BACKENDS["cuda"].prepare("train", one.call)(one.given) for one in (layer, other)]
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("gemms")
def test_expanded_gradients() -> None:
    """grad_output may be one number (after `sum()`) or one row (after a sum over tokens), expanded to all elements."""
    layer = TrainingLayer.random("cuda", BF16, (4, 33), 136, 200, 3, mask_weights_dtype=F32)
    for grad in (torch.ones((), device="cuda", dtype=BF16), normal(136), normal(33, 136), normal(4, 1, 1)):
        layer.grad_output = grad.expand(4, 33, 136)
        found = run(layer, *NAMES)
        assert_as_good_as_naive(found, layer, 1.5)


@pytest.mark.parametrize("logits_dtype", [BF16, F32])
def test_scratch_memory_of_backward(logits_dtype: torch.dtype, gemms: str) -> None:
    """Our kernels need scratch memory only for flipped weights. torch's GEMMs need it for a fifth of all features."""
    tokens, d, h, n_masks = 8192, 8192, 1024, 4
    layer = TrainingLayer.random("cuda", BF16, (tokens,), d, h, n_masks, logits_dtype=logits_dtype)
    with torch.no_grad():
        _, partials = training.ForwardTrain(layer.call)(layer.given)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        training.Backward(layer.call)(layer.backward_arguments(partials))
    gradients = 2 * (tokens * h + d * h) + logits_dtype.itemsize * n_masks * d * h
    scratch = 0 if logits_dtype == BF16 else 2 * 2**25
    if gemms == "library GEMMs":
        assert len(training.feature_chunks(tokens, n_masks, d, h, training.BACKWARD_CHUNKS)) == 5
        scratch = 2 * (n_masks + 1) * round_up(d // 5, 128) * (tokens + h)
    workspace = 64 * 2**20  # allowance for cuBLAS's workspace and the allocator's rounding
    assert torch.cuda.max_memory_allocated() - before <= gradients + scratch + workspace


def test_on_a_stream_of_its_own() -> None:
    layer = TrainingLayer.random("cuda", BF16, (300,), 256, 512, 3)
    layer.x = 2 * layer.x
    expected = run(layer, *NAMES[:3])
    layer.x = layer.x / 2
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        layer.x.mul_(2)
        found = run(layer, *NAMES[:3])
    stream.synchronize()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=0.02, atol=0.02, msg=name)


def test_in_a_cuda_graph() -> None:
    layer = TrainingLayer.random("cuda", BF16, (300,), 256, 512, 3, mask_weights_dtype=F32)
    forward, backward = training.ForwardTrain(layer.call), training.Backward(layer.call)

    def step() -> list[Tensor]:
        y, partials = forward(layer.given)
        return [y, partials, *backward(layer.backward_arguments(partials))]

    with torch.no_grad():
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        for tensor in (layer.x, layer.weight, layer.grad_output):
            tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        for tensor, expected in zip(found, step(), strict=True):
            torch.testing.assert_close(tensor, expected, rtol=0.02, atol=0.05)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_tensors_on_another_gpu() -> None:
    layer = TrainingLayer.random("cuda:1", BF16, (300,), 256, 512, 3, mask_weights_dtype=F32)
    found = run(layer, *NAMES)
    assert torch.cuda.current_device() == 0
    assert all(tensor.device == layer.x.device for tensor in found.values())
    assert_as_good_as_naive(found, layer, 1.5)


def test_calls_of_other_dtypes_run_on_the_composite_backend() -> None:
    for dtype, mask_weights_dtype, can in (
        (F16, None, True),
        (BF16, F32, True),
        (F32, None, False),
        (BF16, F64, False),
    ):
        layer = TrainingLayer.random("cuda", dtype, (5,), 16, 24, 2, mask_weights_dtype=mask_weights_dtype)
        assert (BACKENDS["cuda"].reason("train", layer.call) is None) == can
