"""CPU backends lose no more digits than the naive layer if gates and values have very different sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support import layers as s
from tests.support.budgets import BUDGET, SMALL_DIFFERENCE_ERROR
from tests.support.calls import run_on
from tests.support.cpu import isas, needs_compiler, run
from tests.support.hard_values import (
    TOKENS,
    assert_loses_no_more_than_naive,
    layer_of_large_gates,
    outlier_layers,
    slack_of_differences,
)
from tests.support.layers import make_layer

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_value_is_not_lost_beside_a_large_gate(dtype):
    for tokens in TOKENS:
        for n_masks in (1, 2, 4, 9):
            layer = layer_of_large_gates(dtype, tokens, n_masks)
            for isa in isas(dtype):
                assert_loses_no_more_than_naive(run(layer, isa), layer, what=f"{isa} {tokens=} {n_masks=}")


@needs_compiler
@given(st.data())
def test_cpu_kernels(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    layer = data.draw(outlier_layers(dtype))
    for isa in isas(dtype):
        slack = SMALL_DIFFERENCE_ERROR if dtype is torch.float32 else 0.0
        assert_loses_no_more_than_naive(run(layer, isa), layer, slack, what=isa)


@given(st.data())
def test_composite(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    layer = data.draw(outlier_layers(dtype))
    result = run_on("composite", layer.x, layer.weight, layer.packed_masks, layer.activation)
    slack = BUDGET[dtype] if dtype is torch.float32 else 0.0  # sums of float32 in another order differ by this
    assert_loses_no_more_than_naive(result, layer, slack)


@given(st.data())
def test_sums_with_flipped_signs(data):
    """Training and GPU kernels compute values as differences of sums. Their errors keep the bound of `mglu_ops.ops`."""
    layer = data.draw(outlier_layers(data.draw(st.sampled_from(DTYPES))))
    result, _ = torch.ops.mglu.forward_train(layer.x, layer.weight, layer.packed_masks, layer.activation)
    assert_loses_no_more_than_naive(result, layer, slack_of_differences(layer))


@needs_compiler
@pytest.mark.parametrize("n_masks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_overflow_where_the_naive_layers_do(dtype, n_masks):
    """If a gate is close to the largest float32 or overflows, the results still equal the naive layer's.

    Kernels may double a sum, or subtract a gate from a sum. This must not overflow or give NaN.
    """
    for tokens in TOKENS:
        for large, activation in ((-2.5e38, "silu"), (-2.5e38, "identity"), (-4e38, "relu"), (4e38, "tanh")):
            layer = make_layer((tokens,), 24, 9, n_masks, activation=activation, dtype=dtype)
            masks = torch.zeros_like(layer.masks)
            masks[:, :, :4] = True
            weight = torch.full_like(layer.weight, 0.0)
            weight[:, 0], weight[:, 5] = large / 1e19, 2.0**-100  # a small value keeps its product with the gate finite
            x = torch.ones_like(layer.x)
            x[:, 0] = 1e19
            layer = layer.with_(x=x, weight=weight, masks=masks)
            expected = s.naive(layer.x, layer.weight, layer.masks, activation)
            assert not expected.isnan().any()
            for isa in isas(dtype):
                torch.testing.assert_close(run(layer, isa), expected, msg=f"{isa} {tokens=} {activation} {large}")
