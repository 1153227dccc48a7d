"""The rule of `mglu_ops.ops` for NaN and infinity in arguments, on all backends that run on a CPU.

tests/triton/triton_interpreted.py checks Triton kernels, and tests/gpu/test_hard_values_gpu.py checks CUDA kernels.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mglu_ops.nn import MGLU
from tests.support.calls import run_on
from tests.support.cpu import isas
from tests.support.families import family
from tests.support.hard_values import assert_right_or_not_finite
from tests.support.layers import ACTIVATION_NAMES, DTYPES, Layer, make_layer, naive

mglu = torch.ops.mglu
VALUES = [math.nan, math.inf, -math.inf]


def changed(layer: Layer, where: str, value: float) -> Layer:
    """The layer with `value` at token 1 or row 1 of the argument `where`."""
    tensor = getattr(layer, where).clone()
    tensor[1, -1] = value
    return replace(layer, **{where: tensor})


def check(y: Tensor, layer: Layer) -> None:
    assert_right_or_not_finite(y, layer.x, layer.weight, layer.masks, layer.activation, layer.mask_weights)


@pytest.mark.parametrize(
    ("backend", "dtype", "where"),
    family(
        ["cpu", "composite"],
        sorted(DTYPES, key=lambda dtype: dtype is not torch.float32),
        ["x", "weight", "mask_weights"],
        fits=lambda backend, dtype, _: backend != "cpu" or dtype is not torch.float64,
    ),
)
def test_no_nan_is_hidden_and_no_wrong_number_comes_out(backend: str, dtype: torch.dtype, where: str) -> None:
    for tokens, n_masks, in_features in ((2, 1, 8), (3, 4, 40), (40, 2, 33), (2, 16, 16)):
        for activation in ACTIVATION_NAMES:
            layer = make_layer((tokens,), in_features, 9, n_masks, activation=activation, dtype=dtype, weighted=True)
            for value in VALUES:
                wrong = changed(layer, where, value)
                arguments = (wrong.x, wrong.weight, wrong.packed_masks, activation, wrong.mask_weights)
                for launch in isas(dtype) if backend == "cpu" else (None,):
                    check(run_on(backend, *arguments, launch=launch), wrong)
                check(naive(wrong.x, wrong.weight, wrong.masks, activation, wrong.mask_weights), wrong)


@pytest.mark.parametrize(("dtype", "where"), family(DTYPES, ["x", "weight", "mask_weights"]))
def test_training_follows_the_rule_too(dtype: torch.dtype, where: str) -> None:
    for n_masks, activation in ((1, "silu"), (3, "relu"), (2, "tanh")):
        layer = make_layer((5,), 40, 9, n_masks, activation=activation, dtype=dtype, weighted=True)
        for value in VALUES:
            wrong = changed(layer, where, value)
            check(
                mglu.forward_train(wrong.x, wrong.weight, wrong.packed_masks, activation, wrong.mask_weights)[0], wrong
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("records", [False, True])
def test_a_nan_logit_is_a_0_of_the_mask(dtype: torch.dtype, records: bool) -> None:
    layer = make_layer(dtype=dtype)
    logits = layer.logits.to(dtype)
    below = logits.clone()
    logits[0, 1, 2], below[0, 1, 2] = math.nan, -1
    logits[1, 1, 3], below[1, 1, 3] = math.inf, 1
    logits[2, 1, 4], below[2, 1, 4] = -math.inf, -1
    x = layer.x.requires_grad_(records)
    y, packed = mglu.forward_ste(x, layer.weight, logits)
    expected, expected_packed = mglu.forward_ste(x, layer.weight, below)
    assert torch.equal(packed, expected_packed)
    assert torch.equal(y, expected)
    assert y.isfinite().all()


def test_a_nan_gradient_reaches_weight_and_logits_together() -> None:
    """NaN logits alone would not show, because they count as 0. The NaN weight makes the layer return NaN."""
    torch.manual_seed(0)
    layer, x = MGLU(16, 8, n_masks=2), torch.randn(5, 16)
    optimizer = torch.optim.AdamW(layer.parameters())
    grad = torch.ones(5, 8)
    grad[2, 3] = math.nan
    layer(x).backward(grad)
    assert layer.mask_logits.grad[:, 3].isnan().all()
    assert layer.weight.grad[3].isnan().all()
    assert layer.mask_logits.grad[:, [0, 1, 2, 4, 5, 6, 7]].isfinite().all()
    optimizer.step()
    y = layer(x)
    assert y[:, 3].isnan().all()
    assert y[:, [0, 1, 2, 4, 5, 6, 7]].isfinite().all()
