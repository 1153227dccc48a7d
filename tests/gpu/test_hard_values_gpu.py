"""GPU backends with outliers, and with NaN and infinity (the rule of `mglu_ops.ops`).

As in test_outliers.py, gates and values may differ much in size. The CUDA and the Triton backend compute a value as the
difference of two sums over whole rows, so their error may be larger, by what `slack_of_differences` allows. The naive
layer and the float64 layer are computed on the CPU.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mglu_ops.backends.cuda import Plain
from tests.support.calls import run_on, unsupported
from tests.support.hard_values import (
    assert_loses_no_more_than_naive,
    assert_right_or_not_finite,
    outlier_layers,
    slack_of_differences,
)
from tests.support.layers import examples

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ACTIVATIONS = ("silu", "identity")
# Each number of masks, dtype and activation compiles a kernel. On Hopper, 1 to 5 tokens run on decode_mma, and 33
# tokens run on tile_wgmma. Layers with 67 in_features or in float32 run on plain.
IN_FEATURES = (1024, 256, 64, 67)


@pytest.mark.parametrize(
    ("backend", "launch", "n_masks"),
    [
        *(("cuda", launch, n_masks) for launch in (None, Plain(block_tokens=1)) for n_masks in (1, 4, 8, 16)),
        *(("triton", None, n_masks) for n_masks in (1, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
@examples(20)
@given(data=st.data())
def test_outliers(data: st.DataObject, dtype: torch.dtype, backend: str, launch: Plain | None, n_masks: int) -> None:
    drawn = outlier_layers(dtype, out_features=64, in_features=IN_FEATURES, n_masks=(n_masks,), activations=ACTIVATIONS)
    layer = data.draw(drawn)
    operands = [tensor.cuda() for tensor in (layer.x, layer.weight, layer.packed_masks)]
    if unsupported(backend, *operands, layer.activation) is None:
        result = run_on(backend, *operands, layer.activation, launch=launch).cpu()
        assert_loses_no_more_than_naive(result, layer, slack_of_differences(layer))


mglu = torch.ops.mglu


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "weight", "mask_weights"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_no_nan_is_hidden_and_no_wrong_number_comes_out(dtype: torch.dtype, where: str, value: float) -> None:
    """Covers one, few and many tokens and odd sizes, which run on different kernels, in inference and in training."""
    for tokens, out_features, in_features, n_masks, activation in (
        (1, 256, 256, 1, "silu"),
        (9, 256, 256, 4, "relu"),
        (64, 256, 256, 2, "gelu"),
        (600, 128, 128, 4, "silu"),
        (3, 33, 45, 3, "tanh"),
    ):
        operands = {
            "x": torch.randn(tokens, in_features, device="cuda").to(dtype),
            "weight": (torch.randn(out_features, in_features, device="cuda") / in_features**0.5).to(dtype),
            "mask_weights": torch.rand(tokens, n_masks, device="cuda").to(dtype),
        }
        operands[where][1 if where == "weight" else tokens - 1, -1] = value
        x, weight, term_weights = operands.values()
        masks = torch.rand(n_masks, out_features, in_features, device="cuda") > 0.5
        packed = mglu.pack_masks(masks)
        for y in (
            mglu.forward(x, weight, packed, activation, term_weights),
            mglu.forward_train(x, weight, packed, activation, term_weights)[0],
        ):
            assert_right_or_not_finite(y, x, weight, masks, activation, term_weights)
