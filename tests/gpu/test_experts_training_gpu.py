"""A training step of experts on a GPU: errors, synchronization with the host, and CUDA graphs."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mglu_ops import dispatch
from mglu_ops.activations import ACTIVATIONS
from mglu_ops.backends import triton
from mglu_ops.backends.cuda import experts_training
from mglu_ops.backends.triton import experts as triton_experts
from tests.support.budgets import NAIVE_FACTOR, relative_error
from tests.support.layers import rows_apart, transposed, unaligned
from tests.support.training_steps import (
    TrainingLayer,
    assert_as_good_as_naive,
    by_operator,
    gradients_by_operator,
    take_step,
)

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
every_dtype = pytest.mark.parametrize("dtype", [BF16, F16, F32])


@pytest.fixture(autouse=True)
def _needs_grouped_products() -> None:
    if reason := triton.device_reason(torch.device("cuda", 0)):
        pytest.skip(reason)


@pytest.fixture(
    params=["bfloat16", "bfloat16 without tiles", "bfloat16 without tiles and grouped_mm", "float16", "float32", "tf32"]
)
def dtype_of_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Choose the kernels of a step's products, and return their dtype. Some GPUs lack `tile_wgmma` or `grouped_mm`."""
    monkeypatch.setattr(dispatch, "_prepared", {})  # forgets calls that were prepared with other products
    if "without" in request.param:
        monkeypatch.setattr(experts_training, "training_items", lambda call, gpu: None)
    if "grouped_mm" in request.param:
        monkeypatch.setattr(triton_experts, "_library_has_kernel", lambda a: False)
    precision = "tf32" if request.param == "tf32" else "ieee"
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", precision)
    return F32 if request.param == "tf32" else getattr(torch, request.param.split()[0])


@pytest.mark.parametrize(
    ("loads", "unowned", "d", "h"),
    [
        ([140, 0, 1, 517, 30], 0, 256, 512),
        ([0, 300, 84], 9, 264, 136),
        ([0, 1000, 0, 0], 0, 128, 64),
        ([3] * 70, 1, 72, 80),
        ([33, 20], 5, 50, 77),
    ],
    ids=["random loads", "unowned rows", "one expert has all rows", "many experts", "odd sizes"],
)
@pytest.mark.parametrize(
    ("n_masks", "density", "mask_weights_dtype", "logits_dtype"),
    [(1, 0.5, None, None), (1, 0.1, F32, F32), (4, 0.5, BF16, None), (4, 0.9, None, F32), (3, 0.25, F32, None),
     (16, 0.5, None, None)],
)  # fmt: skip
def test_errors_are_close_to_the_naive_loops(
    loads, unowned, d, h, n_masks, density, mask_weights_dtype, logits_dtype, dtype_of_products
):
    layer = TrainingLayer.of_experts(
        "cuda", dtype_of_products, loads, d, h, n_masks, unowned=unowned, density=density,
        mask_weights_dtype=mask_weights_dtype, logits_dtype=logits_dtype,
    )  # fmt: skip
    found = take_step(layer)
    assert_as_good_as_naive({"y": found["y"]}, layer, NAIVE_FACTOR)
    is_even = 0.25 <= density <= 0.75 and layer.x.dtype is not F32
    assert_as_good_as_naive(found, layer, NAIVE_FACTOR if is_even else 2.5)
    again = take_step(layer)
    assert all(torch.equal(found[name], again[name]) for name in found)


@every_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str, dtype: torch.dtype) -> None:
    layer = TrainingLayer.of_experts("cuda", dtype, [100, 28], 64, 128, 2, activation=activation)
    assert_as_good_as_naive(take_step(layer), layer, NAIVE_FACTOR)


@every_dtype
def test_any_layout_and_any_need(dtype: torch.dtype) -> None:
    layer = TrainingLayer.of_experts("cuda", dtype, [100, 28], 64, 128, 2, mask_weights_dtype=F32)
    expected = take_step(layer)
    layer.x, layer.grad_output = rows_apart(layer.x), unaligned(layer.grad_output)
    layer.weight = torch.stack([transposed(one) for one in layer.weight]).transpose(1, 2).contiguous().transpose(1, 2)
    layer.packed_masks = layer.packed_masks.transpose(0, 1).contiguous().transpose(0, 1)
    for name, tensor in take_step(layer).items():
        assert torch.equal(tensor, expected[name]), name
    for needed in range(4):
        for name, tensor in take_step(layer, needs=tuple(i == needed for i in range(4))).items():
            assert torch.equal(tensor, expected[name]), name


@every_dtype
def test_a_graph_serves_other_loads(dtype: torch.dtype) -> None:
    """A captured step is replayed with the tensors and loads of other layers, and must give their gradients."""
    layers = [
        TrainingLayer.of_experts("cuda", dtype, loads, 72, 128, 3, unowned=300 - sum(loads))
        for loads in ([100, 0, 60], [0, 0, 0], [300, 0, 0], [1, 150, 149])
    ]
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = [_plain_step(layer) for layer in layers]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    static, graph = copy.deepcopy(layers[0]), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _plain_step(static)
    for layer, exact in zip(layers, expected, strict=True):
        for name in ("x", "weight", "packed_masks", "offs", "grad_output"):
            getattr(static, name).copy_(getattr(layer, name))
        graph.replay()
        for name, tensor in exact.items():
            assert torch.equal(found[name], tensor), name


def _plain_step(layer: TrainingLayer) -> dict[str, Tensor]:
    """A step without checks, which would wait for the GPU."""
    y, partials = by_operator(layer.given)
    grads = gradients_by_operator(layer.backward_arguments(partials))
    return {"y": y, **dict(zip(("x", "weight", "logits"), grads[:3], strict=True))}


@every_dtype
def test_wide_products(dtype: torch.dtype) -> None:
    from mglu_ops.backends.triton.grouped import grouped_products, products_over_rows

    for loads, d, h in (([140, 0, 1, 517], 296, 520), ([0, 0], 8, 8), ([2000], 256, 2048), ([5] * 200, 24, 64)):
        layer = TrainingLayer.of_experts("cuda", dtype, loads, d, h, 1)
        x, grad, weight, offs = layer.x, layer.grad_output, layer.weight, layer.offs
        forward, back, grad_weight = (torch.full_like(t, float("nan"), dtype=F32) for t in (grad, x, weight))
        grouped_products(x, weight.mT, offs, forward)
        grouped_products(grad, weight, offs, back)
        products_over_rows(grad, x, offs, grad_weight)
        for e, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
            rows, expert_weight = slice(start, end), weight[e].double()
            assert relative_error(forward[rows], x[rows].double() @ expert_weight.t()) < 1e-5
            assert relative_error(back[rows], grad[rows].double() @ expert_weight) < 1e-5
            assert relative_error(grad_weight[e], grad[rows].double().t() @ x[rows].double()) < 1e-5
