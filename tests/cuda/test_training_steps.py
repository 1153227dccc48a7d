"""The CUDA backend's training steps, run on a CPU: their host code, and emulated kernels. `grouped_mm` is a loop.

tests/support/emulated_kernels.py says what emulation can show. test_cuda_compile.py compiles the kernels for GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mglu_ops.activations import ACTIVATIONS
from mglu_ops.backends.cuda import experts_training, training
from mglu_ops.backends.cuda.device import KNOWN_GPUS
from mglu_ops.backends.cuda.kernels import backward_gemm
from tests.support.emulated_kernels import emulated_kernels, needs_compiler
from tests.support.families import family, quick_only_for, sample
from tests.support.layers import rows_apart, spaced, transposed, unaligned
from tests.support.training_steps import Steps, TrainingLayer, assert_as_good_as_naive, take_step

__all__ = ["emulated_kernels"]  # a fixture

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated_kernels")]

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
STEPS = Steps("cpu", [(3, 520), (5, 37), (1, 8), (2, 1), (0, 24), (4, 0)])
"""Rows and columns: several warps per row, rows that are not whole vectors, and sizes of 0."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("n_masks", "with_weight"), family([1, 4, 5, 8, 16], [True, False], one_in=2))
def test_flip_signs(n_masks: int, with_weight: bool) -> None:
    STEPS.flip_signs(n_masks, F16, with_weight=with_weight)


@pytest.mark.parametrize(
    ("activation", "n_masks", "dtype", "mask_weights_dtype"),
    family(ACTIVATIONS, [3, 2, 16, 1], [BF16, F16], [None, F32, F16], one_in=3),
)
def test_partials(activation: str, n_masks: int, dtype: torch.dtype, mask_weights_dtype: torch.dtype | None) -> None:
    STEPS.partials(n_masks, dtype, activation, mask_weights_dtype)


@pytest.mark.parametrize("activation", sample(ACTIVATIONS, 3))
def test_partials_of_large_and_small_gates(activation: str) -> None:
    STEPS.partials_of_large_and_small_gates(activation, BF16)


@pytest.mark.parametrize(("entries", "dtype"), family([1, 3, 5, 17], [BF16, F16]))
def test_scale(entries: int, dtype: torch.dtype) -> None:
    STEPS.scale(entries, dtype)


@pytest.mark.parametrize(
    ("n_masks", "weight_dtype", "logits_dtype", "dtype"),
    family(
        [2, 1, 5, 8, 16],
        [BF16, F32, F16, None],
        [F32, BF16, F16, None],
        [BF16, F16],
        fits=lambda n_masks, weight, logits, dtype: weight is not None or logits is not None,
        one_in=2,
    ),
)
def test_weight_gradients(n_masks, weight_dtype, logits_dtype, dtype):
    STEPS.weight_gradients(n_masks, dtype, weight_dtype, logits_dtype)


@pytest.mark.parametrize(("n_masks", "mask_weights_dtype"), family([1, 3], [F32, BF16]))
def test_mask_weight_gradients(n_masks: int, mask_weights_dtype: torch.dtype) -> None:
    STEPS.mask_weight_gradients(n_masks, BF16, mask_weights_dtype)


@pytest.mark.parametrize("most", [training.FORWARD_CHUNKS, training.BACKWARD_CHUNKS])
@pytest.mark.parametrize("tokens", [0, 1, 300, 8192, 32768])
@pytest.mark.parametrize("n_masks", [1, 4, 16])
@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (1, 1), (8192, 2048), (14336, 4096), (5000, 1000)], ids=str)
def test_chunks_cover_the_output_features_once(shape: tuple[int, int], n_masks: int, tokens: int, most: int) -> None:
    d, h = shape
    chunks = training.feature_chunks(tokens, n_masks, d, h, most)
    assert [row for rows in chunks for row in range(d)[rows]] == list(range(d))
    assert 1 <= len(chunks) <= most
    assert all(rows.start % 128 == 0 for rows in chunks)
    per_feature = (n_masks + 1) * max(tokens, h)
    size = len(range(d)[chunks[0]])
    assert (size - 128) * per_feature < max(d * per_feature / most, 2**24)


@pytest.mark.parametrize(
    ("sizes", "own_kernel"),
    [
        ((64, 256, 4096), False),
        ((8192, 2048, 9 * 8192), True),
        ((8192, 2048, 9 * 32768), False),
        ((2048, 4096, 5 * 14336), True),
        ((8192, 4096, 2 * 14336), False),
    ],
    ids=["too few tiles", "8192 tokens", "32768 tokens", "2048 tokens of 4096 columns", "8192 tokens of 4096 columns"],
)
def test_sizes_for_which_backward_uses_its_own_gemm(sizes: tuple[int, int, int], own_kernel: bool) -> None:
    assert backward_gemm.is_faster(KNOWN_GPUS[9, 0], *sizes) is own_kernel


def run(layer: TrainingLayer, needs: Sequence[bool] = (True,) * 4) -> dict[str, Tensor]:
    return take_step(layer, training.ForwardTrain(layer.call), training.Backward(layer.call), needs)


@pytest.mark.parametrize(
    ("n_masks", "density", "dtype", "mask_weights_dtype"),
    family([4, 1, 16], [0.5, 0.25, 0.9], [BF16, F16], [None, BF16], most=2, one_in=3),
)
def test_errors_are_close_to_the_naive_layers(n_masks, density, dtype, mask_weights_dtype):
    layer = TrainingLayer.random(
        "cpu", dtype, (96,), 136, 200, n_masks, density=density, mask_weights_dtype=mask_weights_dtype
    )
    assert_as_good_as_naive(run(layer), layer, 1.5 if density < 0.9 else 2.5)


@pytest.mark.long
def test_several_chunks_give_the_gradients_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = TrainingLayer.random("cpu", BF16, (40,), 300, 72, 3, mask_weights_dtype=F32)
    whole = run(layer)
    monkeypatch.setattr(training, "_SMALLEST_CHUNK", 1)
    assert len(training.feature_chunks(40, 3, 300, 72, training.BACKWARD_CHUNKS)) == 3
    found = run(layer)
    for name in ("y", "weight", "logits", "mask_weights"):
        assert torch.equal(found[name], whole[name]), name
    torch.testing.assert_close(found["x"], whole["x"], rtol=0.02, atol=0.05)
    assert_as_good_as_naive(found, layer, 1.5)


@pytest.mark.parametrize("needs", sample(list(itertools.product([True, False], repeat=4)), 5))
def test_each_subset_of_gradients(needs: tuple[bool, bool, bool, bool]) -> None:
    layer = TrainingLayer.random("cpu", BF16, (9,), 24, 40, 2, mask_weights_dtype=F32)
    whole = run(layer)
    for name, found in run(layer, needs).items():
        assert torch.equal(found, whole[name])


ODD_SIZES = [(0, 24, 40), (1, 24, 40), (5, 0, 40), (5, 24, 0), (7, 13, 21)]


@pytest.mark.parametrize("sizes", quick_only_for([ODD_SIZES[0], ODD_SIZES[-1]], ODD_SIZES), ids=str)
def test_sizes_of_zero_one_and_odd_numbers(sizes: tuple[int, int, int]) -> None:
    tokens, d, h = sizes
    layer = TrainingLayer.random("cpu", F16, (tokens,), d, h, 3, mask_weights_dtype=F32)
    for name, found in run(layer).items():
        exact = layer.in_plain_torch(torch.float64)[name]
        torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0.02, msg=name)


@pytest.mark.parametrize("logits_dtype", quick_only_for([F32], [F32, F16, torch.float64]))
def test_dtypes_of_logits_and_mask_weights(logits_dtype: torch.dtype) -> None:
    layer = TrainingLayer.random("cpu", BF16, (33,), 40, 64, 3, logits_dtype=logits_dtype, mask_weights_dtype=F32)
    found = run(layer)
    assert found["logits"].dtype is logits_dtype
    assert found["mask_weights"].dtype is F32
    assert_as_good_as_naive(found, layer, 1.5)


@pytest.mark.parametrize("d", quick_only_for([24], [24, 21]))
def test_any_strides_give_nearly_the_same(d: int) -> None:
    layer = TrainingLayer.random("cpu", BF16, (10,), d, 40, 3, mask_weights_dtype=F32)
    layer.grad_output = layer.grad_output[:1].repeat(10, 1)
    whole = run(layer)
    x, weight, grad, mask_weights = layer.x, layer.weight, layer.grad_output, layer.mask_weights
    assert mask_weights is not None
    for changes in (
        {"x": transposed(x), "weight": rows_apart(weight), "grad_output": grad[:1].expand(10, d)},
        {"x": unaligned(x), "weight": unaligned(weight), "grad_output": unaligned(grad)},
        {"x": rows_apart(x, 3), "weight": transposed(weight), "grad_output": transposed(grad)},
        {"mask_weights": transposed(mask_weights)},
    ):
        for name, tensor in run(replace(layer, **changes)).items():
            torch.testing.assert_close(tensor, whole[name], rtol=0.02, atol=1e-2, msg=name)


@pytest.mark.parametrize("layout", [unaligned, spaced, transposed])
def test_packed_masks_in_other_layouts(layout: Callable[[Tensor], Tensor]) -> None:
    layer = TrainingLayer.random("cpu", BF16, (6,), 16, 40, 4)
    other = replace(layer, packed_masks=layout(layer.packed_masks))
    found, expected = (training.ForwardTrain(one.call)(one.given) for one in (other, layer))
    assert all(map(torch.equal, found, expected))


# --- Experts ---------------------------------------------------------------------------------------------------------


def products_of_experts(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """`grouped_mm` in float32, as a loop. Rows that `grouped_mm` does not write are NaN."""
    a, b, rows = a.float(), b.float(), list(pairwise([0, *offs.tolist()]))
    if b.dim() == 2:
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in rows])
    out = torch.full((a.shape[0], b.shape[2]), float("nan"))
    for matrix, (start, end) in zip(b, rows, strict=True):
        out[start:end] = a[start:end] @ matrix
    return out


@pytest.fixture
def plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces `grouped_mm` and the Triton kernels by loops."""
    monkeypatch.setattr(experts_training, "product", lambda a, b, offs: products_of_experts(a, b, offs).to(a.dtype))
    monkeypatch.setattr(
        experts_training, "_wide_product", lambda x, weight, offs: products_of_experts(x, weight.transpose(1, 2), offs)
    )


def run_experts(layer: TrainingLayer, needs: Sequence[bool] = (True,) * 4) -> dict[str, Tensor]:
    return take_step(layer, experts_training.library_forward, experts_training.backward, needs)


@pytest.mark.parametrize(
    ("n_masks", "density", "sizes", "mask_weights_dtype", "logits_dtype", "activation"),
    family(
        [1, 8, 4, 2, 16],
        [0.5, 0.25, 0.9],
        [([40, 0, 17, 39], 0, 136, 200), ([31, 33, 0], 5, 72, 104), ([64], 0, 50, 77)],
        [None, BF16, F32],
        [BF16, F32],
        ["silu", "relu"],
        most=2,
        one_in=3,
    ),
)
@pytest.mark.usefixtures("plain_products")
def test_errors_of_experts_are_close_to_the_naive_loops(
    n_masks, density, sizes, mask_weights_dtype, logits_dtype, activation
):
    """Covers sizes that are multiples of a vector, rows without an expert, and sizes that need padding."""
    torch.manual_seed(0)
    loads, unowned, d, h = sizes
    layer = TrainingLayer.of_experts(
        "cpu", BF16, loads, d, h, n_masks, unowned=unowned, density=density, mask_weights_dtype=mask_weights_dtype,
        logits_dtype=logits_dtype, activation=activation,
    )  # fmt: skip
    found = run_experts(layer)
    assert_as_good_as_naive(found, layer, 2.5 if density == 0.9 else 1.5)


@pytest.mark.usefixtures("plain_products")
def test_ends_that_are_not_valid_count_as_the_nearest_valid_ones() -> None:
    layer = TrainingLayer.of_experts("cpu", BF16, [20, 0, 12], 16, 24, 2)
    expected = run_experts(layer)
    layer.offs = torch.tensor([20, 7, 99], dtype=torch.int32)
    for name, tensor in run_experts(layer).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("needed", sample(range(4), 4))
@pytest.mark.usefixtures("plain_products")
def test_a_step_of_experts_computes_only_what_is_needed(needed: int) -> None:
    layer = TrainingLayer.of_experts("cpu", BF16, [20, 12], 16, 24, 2, unowned=3, mask_weights_dtype=F32)
    every = run_experts(layer)
    needs = [i == needed for i in range(4)]
    for name, tensor in run_experts(layer, needs).items():
        assert torch.equal(tensor, every[name])
