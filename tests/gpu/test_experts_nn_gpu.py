"""Modules of experts on a GPU: no synchronization, CUDA graphs for any loads, and gradients that repeat bit by bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from mglu_ops.nn import MGLUExperts, MGLUExpertsFeedForward, NaiveMGLUExperts, freeze, quantize
from tests.support.budgets import assert_matches
from tests.support.calls import without_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]


@pytest.mark.parametrize("weight_format", ["dense", "fp8_row", "int4_group"])
@pytest.mark.parametrize("tokens", [1, 8, 200])
@torch.no_grad()
def test_a_frozen_layer_replays_in_a_graph_with_other_loads(tokens: int, weight_format: str) -> None:
    options = {"n_masks": 2, "dtype": torch.bfloat16, "device": "cuda"}
    block = freeze(MGLUExpertsFeedForward(16, 256, 512, 4, **options))
    if weight_format != "dense":
        quantize(block, weight_format)
    inputs = [torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    inputs.append(inputs[0][:1].repeat(tokens, 1))  # the same four experts for all tokens
    expected = [block(x) for x in inputs]
    x = inputs[0].clone()
    with without_waiting():
        block(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = block(x)
    for graph_input, want in zip(inputs, expected, strict=True):
        x.copy_(graph_input)
        graph.replay()
        assert torch.equal(y, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("save_activations", [True, False])
def test_a_step_matches_the_loop_over_experts_and_its_bits_repeat(save_activations: bool, dtype: torch.dtype) -> None:
    layer = MGLUExperts(8, 256, 128, n_masks=2, save_activations=save_activations, dtype=dtype, device="cuda")
    exact = NaiveMGLUExperts(8, 256, 128, n_masks=2, dtype=torch.float64, device="cuda")
    exact.load_state_dict(copy.deepcopy(layer).double().state_dict())
    x, grad = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((300, 256), (300, 3, 128)))
    ids = torch.randint(-1, 9, (300, 3), device="cuda")

    def step(layer: MGLUExperts | NaiveMGLUExperts, dtype: torch.dtype) -> list[Tensor]:
        wanted = [x.to(dtype).requires_grad_(), layer.weight, layer.mask_logits]
        return list(torch.autograd.grad(layer(wanted[0], ids), wanted, grad.to(dtype)))

    first = step(layer, dtype)
    with without_waiting():
        second = step(layer, dtype)
    for name, got, again, want in zip(
        ("x", "weight", "logits"), first, second, step(exact, torch.float64), strict=True
    ):
        assert torch.equal(got, again), name
        assert_matches(got, want, what=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_under_autocast(dtype: torch.dtype) -> None:
    layer = MGLUExperts(8, 256, 128, n_masks=2, device="cuda")
    x, ids = torch.randn(30, 256, device="cuda"), torch.randint(8, (30, 3), device="cuda")
    with torch.autocast("cuda", dtype):
        layer(x, ids).sum().backward()
    assert layer.mask_logits.grad.isfinite().all()


def test_training_in_float64_waits_for_the_gpu() -> None:
    layer = MGLUExperts(8, 256, 128, n_masks=2, device="cuda", dtype=torch.float64)
    x, ids = torch.randn(30, 256, device="cuda", dtype=torch.float64), torch.randint(9, (30, 3), device="cuda")
    exact = copy.deepcopy(layer).cpu()
    expected = exact(x.cpu(), ids.cpu())
    expected.square().sum().backward()
    found = layer(x, ids)
    found.square().sum().backward()
    torch.testing.assert_close(found.cpu(), expected)
    for one, other in zip(layer.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad)


def test_a_compiled_layer_trains_as_the_eager_one_and_waits_for_nothing() -> None:
    block = MGLUExpertsFeedForward(8, 256, 128, 2, n_masks=2, mask_top_k=1, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(4, 75, 256, device="cuda", dtype=torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True)

    def step(layer: torch.nn.Module) -> list[Tensor]:
        y, router_logits = layer(x, output_router_logits=True)
        loss = y.float().square().mean() + 0.01 * router_logits.float().square().mean()
        return list(torch.autograd.grad(loss, list(block.parameters())))

    expected, _ = step(block), step(compiled)
    with without_waiting():
        got = step(compiled)
    for (name, _), grad, want in zip(block.named_parameters(), got, expected, strict=True):
        assert_matches(grad, want, what=name)
