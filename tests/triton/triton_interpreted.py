"""Triton kernels on CPU tensors, compared with the oracle. test_triton.py runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from torch import Tensor

from mglu_ops.activations import ACTIVATIONS
from mglu_ops.backends import BACKENDS
from mglu_ops.backends.triton import experts
from mglu_ops.backends.triton.grouped import grouped_products, products_over_rows
from mglu_ops.call import Call
from mglu_ops.formats import FORMATS
from mglu_ops.masks import pack
from tests.support import reference
from tests.support.budgets import assert_matches
from tests.support.calls import run_on, unsupported
from tests.support.hard_values import (
    assert_loses_no_more_than_naive,
    assert_right_or_not_finite,
    outlier_layers,
    slack_of_differences,
)
from tests.support.layers import (
    LOADS,
    Layer,
    down_oracle,
    every_stored_value,
    examples,
    make_down,
    make_layer,
    mask_major,
    rows_apart,
    spaced,
    transposed,
    unaligned,
)
from tests.support.training_steps import TrainingLayer, assert_as_good_as_naive, take_step

Layout = Callable[[Tensor], Tensor]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check(
    tokens: int,
    d: int,
    h: int,
    n_masks: int,
    dtype: torch.dtype = torch.float16,
    activation: str = "silu",
    weighted: bool = False,
    layout: Layout = lambda tensor: tensor,
    weight_format: str = "dense",
) -> Tensor:
    """Compare one call with the oracle. `layout` gives each tensor other strides or another offset."""
    torch.manual_seed(n_masks)
    x = torch.randn(tokens, h).to(dtype)
    stored, scale = FORMATS[weight_format].quantize((torch.randn(d, h) / max(h, 1) ** 0.5).to(dtype))
    weight = FORMATS[weight_format].dequantize(stored, scale, torch.float64)
    masks = torch.rand(n_masks, d, h) > 0.5
    mask_weight = torch.rand(tokens, n_masks).to(dtype) if weighted else None
    packed = pack(masks)
    laid = [layout(tensor) for tensor in (x, stored, packed)]
    laid_weights = layout(mask_weight) if mask_weight is not None else None
    operands = (*laid, activation, laid_weights, scale, weight_format)
    assert unsupported("triton", *operands) is None
    result = run_on("triton", *operands)
    assert result.dtype is dtype
    assert_matches(result, reference.forward(x, weight, masks, activation, mask_weight))
    return result


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("n_masks", [1, 2, 3, 6, 8, 12, 16])
@pytest.mark.parametrize("weight_format", ["dense", "fp8_row", "int8_row"])
def test_numbers_of_masks(weight_format: str, n_masks: int, tokens: int) -> None:
    h, dtype = 77 if n_masks in (1, 3, 16) else 40, DTYPES[n_masks % 3]
    check(tokens, 2, h, n_masks, dtype, weighted=n_masks % 4 < 2, weight_format=weight_format)


@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.float16), (4, torch.float16), (4, torch.bfloat16)])
@pytest.mark.parametrize("weight_format", ["fp8_row", "int8_row"])
def test_every_stored_value_is_decoded(weight_format: str, tokens: int, dtype: torch.dtype) -> None:
    """Skips the NaN of fp8, which Triton's interpreter reads as 480. test_triton_backend.py tests NaN on a GPU."""
    layer, expected = every_stored_value(weight_format, 3, dtype)
    result = run_on("triton", *layer._replace(x=layer.x.expand(tokens, -1)))[-1]
    rounding = 2**-7 if dtype is torch.bfloat16 else 0  # the interpreter truncates results in bfloat16
    kept = ~expected.isnan()
    torch.testing.assert_close(result[kept], expected[kept], rtol=rounding, atol=0)


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, tokens: int) -> None:
    check(tokens, 2, 24, 1, torch.float32 if tokens == 1 else torch.bfloat16, activation)


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize(
    ("dtype", "h"), [*((dtype, 77) for dtype in DTYPES), *((torch.float16, h) for h in (1, 8, 1024, 1032))]
)
def test_ragged_sizes(dtype: torch.dtype, h: int, tokens: int) -> None:
    check(tokens, 1 if tokens == 1 else 17, h, 3, dtype)


def test_tokens_past_a_block() -> None:
    check(64, 20, 96, 4)
    check(33, 20, 96, 8)
    check(17, 20, 77, 16, torch.bfloat16, weight_format="fp8_row")
    check(33, 20, 77, 8, weight_format="int8_row")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "weight"])
def test_no_nan_is_hidden_and_no_wrong_number_comes_out(where: str, value: float) -> None:
    """Tests the rule of `mglu_ops.ops` for NaN and infinity."""
    for tokens, activation, dtype in (
        (1, "relu", torch.float32),
        (2, "silu", torch.float16),
        (8, "relu", torch.float32),
        (3, "tanh", torch.bfloat16),
    ):
        torch.manual_seed(0)
        operands = {"x": torch.randn(tokens, 24).to(dtype), "weight": torch.randn(5, 24).to(dtype)}
        operands[where][-1, 7] = value
        masks = torch.rand(3, 5, 24) > 0.5
        y = run_on("triton", *operands.values(), pack(masks), activation)
        assert_right_or_not_finite(y, *operands.values(), masks, activation)


@pytest.mark.parametrize(("tokens", "d", "h"), [(0, 3, 16), (2, 0, 16), (1, 3, 0), (2, 3, 0)])
def test_empty(tokens: int, d: int, h: int) -> None:
    check(tokens, d, h, 2)


@examples(10)
@given(outlier_layers(torch.bfloat16, out_features=2, in_features=(16, 67, 256), n_masks=(1, 2, 4)))
def test_error_compared_with_the_naive_layers(layer: Layer) -> None:
    result = run_on("triton", layer.x, layer.weight, layer.packed_masks, layer.activation)
    assert_loses_no_more_than_naive(result, layer, slack_of_differences(layer))


@pytest.mark.parametrize("layout", [transposed, spaced, mask_major, unaligned, partial(rows_apart, distance=3)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_strides_and_offsets(layout: Layout, tokens: int) -> None:
    check(tokens, 2, 64, 4, weighted=True, layout=layout)
    check(tokens, 2, 50, 2, torch.bfloat16, layout=layout)
    check(tokens, 2, 64, 4, layout=layout, weight_format="fp8_row")
    check(tokens, 2, 50, 2, torch.bfloat16, weighted=True, layout=layout, weight_format="int8_row")


@pytest.mark.parametrize("fill", [False, True])
def test_empty_gate_or_value_is_exactly_zero(fill: bool) -> None:
    """A gate whose masks are all 0, and a value whose masks are all 1, are exactly 0, without rounding errors."""
    packed = pack(torch.full((2, 3, 72), fill))
    x, weight = torch.randn(1, 72).half(), torch.randn(3, 72).half()
    assert torch.equal(run_on("triton", x, weight, packed, "identity", None), torch.zeros(1, 3).half())


@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize(
    ("dtype", "n_masks", "weight_format"),
    [(torch.bfloat16, 1, "dense"), (torch.float16, 3, "fp8_row"), (torch.float32, 2, "dense"),
     (torch.bfloat16, 4, "int4_group"), (torch.float32, 5, "int8_row")],
)  # fmt: skip
def test_experts(dtype: torch.dtype, n_masks: int, weight_format: str, loads: str) -> None:
    """The operators of inference, with ids and with sorted rows, and the down projection."""
    for tokens in (1, 30):
        options = {"loads": loads, "dtype": dtype, "weighted": tokens > 1, "weight_format": weight_format}
        layer = make_layer((tokens,), 40, 64, n_masks, routing="ids", experts=5, **options)
        (rows, pairs), down = layer.sorted_by_expert(), make_down(layer, weight_format)
        result, grouped = (
            BACKENDS["triton"].prepare("forward", Call.of(one.given))(one.given.in_rows()) for one in (layer, rows)
        )
        assert_matches(result, layer.oracle())
        assert not result[~layer.has_expert].count_nonzero()
        assert torch.equal(grouped, result.flatten(0, 1)[pairs])
        second = BACKENDS["triton"].prepare("down", Call.of_down(down))(down.in_rows())
        assert_matches(second, down_oracle(down))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("loads", "d", "h"),
    [([140, 0, 129, 1], 72, 136), ([0, 20, 0], 264, 64), ([5, 70], 13, 77), ([0, 0], 8, 8)],
    ids=["several tiles", "one expert", "odd sizes", "no rows"],
)
def test_products_of_experts(loads: list[int], d: int, h: int, dtype: torch.dtype) -> None:
    """Covers all products of a training step. Rows without an expert are NaN, and their results must not be written."""
    torch.manual_seed(0)
    layer = TrainingLayer.of_experts("cpu", dtype, loads, d, h, 1, unowned=7)
    x, grad, weight, offs = layer.x, layer.grad_output, layer.weight, layer.offs
    spaced_grad = torch.cat((grad, grad.new_full((len(grad), 8), float("nan"))), 1)[:, :d]
    forward, back = (torch.full_like(tensor, 3, dtype=torch.float32) for tensor in (grad, x))
    assert grouped_products(x, weight.mT, offs, forward) is forward
    grouped_products(grad, weight, offs, back, add=True)
    grad_weight = products_over_rows(spaced_grad, x, offs)
    twice = products_over_rows(grad, x, offs, grad_weight.to(torch.float32, copy=True), add=True)
    assert grad_weight.dtype is dtype
    for e, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
        rows, exact = slice(start, end), grad[start:end].double().t() @ x[start:end].double()
        assert_matches(forward[rows], x[rows].double() @ weight[e].double().t())
        assert_matches(back[rows], 3 + grad[rows].double() @ weight[e].double())
        assert_matches(grad_weight[e], exact)
        assert_matches(twice[e], 2 * exact, dtype)
    for result in (forward, back):
        assert bool((result[sum(loads) :] == 3).all())


@pytest.mark.parametrize(
    ("n_masks", "density", "dtype"),
    [(1, 0.1, torch.float32), (5, 0.9, torch.float32), (3, 0.25, torch.float16)],
)
def test_a_training_step_of_experts(n_masks: int, density: float, dtype: torch.dtype) -> None:
    """`triton.experts` computes every product of a step with `grouped_products` or `products_over_rows`."""
    torch.manual_seed(0)
    layer = TrainingLayer.of_experts(
        "cpu", dtype, [33, 0, 20], 50, 77, n_masks, unowned=5, density=density, mask_weights_dtype=torch.float32
    )

    found = take_step(layer, experts.forward_train, experts.backward)
    assert_as_good_as_naive(found, layer, 2.5)
    for needed in range(4):
        needs = tuple(i == needed for i in range(4))
        for name, tensor in take_step(layer, experts.forward_train, experts.backward, needs).items():
            torch.testing.assert_close(tensor, found[name])
