"""The rule of `mglu_ops.ops` for NaN and infinity in arguments, on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from not_finite import assert_right_or_not_finite

mglu = torch.ops.mglu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "weight", "mask_weights"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_no_nan_is_hidden_and_no_wrong_number_comes_out(dtype: torch.dtype, where: str, value: float) -> None:
    """One, few and many tokens, and odd sizes, run on different kernels. Training is tested too."""
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
