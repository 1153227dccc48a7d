"""A GPU's training step of experts, run on a CPU: its kernels are emulated, and `grouped_mm` is a loop."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mglu_ops.backends.cuda import experts_training as training
from mglu_ops.given import BackwardGiven, Given
from tests.support.emulated_kernels import emulated_kernels, needs_compiler
from tests.support.expert_steps import ExpertLayer, assert_as_good_as_naive
from tests.support.families import family, sample

__all__ = ["emulated_kernels"]  # a fixture

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated_kernels", "plain_products")]

BF16, F32 = torch.bfloat16, torch.float32


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
    monkeypatch.setattr(training, "product", lambda a, b, offs: products_of_experts(a, b, offs).to(a.dtype))
    monkeypatch.setattr(
        training, "_wide_product", lambda x, weight, offs: products_of_experts(x, weight.transpose(1, 2), offs)
    )


def forward_train(*operands):
    return training.library_forward(Given.of_offs(*operands))


def backward(*arguments):
    return training.backward(BackwardGiven.of_offs(*arguments))


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
def test_errors_are_close_to_the_naive_loops(n_masks, density, sizes, mask_weights_dtype, logits_dtype, activation):
    """Covers sizes that are multiples of a vector, rows without an expert, and sizes that need padding."""
    torch.manual_seed(0)
    loads, unowned, d, h = sizes
    layer = ExpertLayer.random(
        "cpu", BF16, loads, d, h, n_masks, unowned=unowned, density=density, mask_weights_dtype=mask_weights_dtype,
        logits_dtype=logits_dtype, activation=activation,
    )  # fmt: skip
    found = layer.step(forward_train, backward)
    assert_as_good_as_naive(found, layer, 2.5 if density == 0.9 else 1.5)


def test_ends_that_are_not_valid_count_as_the_nearest_valid_ones() -> None:
    layer = ExpertLayer.random("cpu", BF16, [20, 0, 12], 16, 24, 2)
    expected = layer.step(forward_train, backward)
    layer.offs = torch.tensor([20, 7, 99], dtype=torch.int32)
    for name, tensor in layer.step(forward_train, backward).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("needed", sample(range(4), every=4))
def test_computes_only_what_is_needed(needed: int) -> None:
    layer = ExpertLayer.random("cpu", BF16, [20, 12], 16, 24, 2, mask_weights_dtype=F32)
    every = layer.step(forward_train, backward)
    needs = [i == needed for i in range(4)]
    for name, tensor in layer.step(forward_train, backward, needs).items():
        assert torch.equal(tensor, every[name])
