"""Training on a GPU: runs of 200 steps, 16 bits, loss scaling, recomputation, mask statistics, and two ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

import mglu_ops
from mglu_ops.nn import MGLU, NaiveMGLU, SwiMGLU, flip_ratio, gate_ratio, mask_agreement
from tests.support.budgets import BUDGET, relative_error
from tests.support.calls import without_waiting
from tests.support.modules import Run, assert_as_good_as_naive, assert_same_training, student, train
from tests.support.ranks import RANKS, run_on_ranks
from tests.support.ranks.data_parallel import check_data_parallel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]

WIDE, TOKENS = 256, 512
"""Sizes for which the 16-bit kernels run: rows are whole 16-byte vectors, and there are several tiles."""


GPU_BACKENDS = [
    pytest.param(
        "nccl",
        marks=pytest.mark.skipif(
            torch.cuda.device_count() < RANKS or not dist.is_nccl_available(), reason="needs two CUDA GPUs and NCCL"
        ),
    ),
    "gloo",
]
"""Backends for ranks with tensors on GPUs. With NCCL, each rank needs its own GPU. With gloo, all ranks share one."""


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.reset()


def on_gpu(kind: type[MGLU | NaiveMGLU], n_masks: int = 2, **options: Any) -> nn.Sequential:
    return student(kind, n_masks, **options).cuda()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("n_masks", [1, 3])
def test_fused_runs_in_float32_follow_the_naive_run(n_masks: int, compiled: bool) -> None:
    naive = on_gpu(NaiveMGLU, n_masks)
    want = train(naive, torch.compile(naive, fullgraph=True) if compiled else None)
    for save_activations in (True, False):
        torch._dynamo.reset()
        model = on_gpu(MGLU, n_masks, save_activations=save_activations)
        assert_same_training(train(model, torch.compile(model, fullgraph=True) if compiled else None), want)


@functools.cache
def float32_run(n_masks: int) -> Run:
    return train(on_gpu(NaiveMGLU, n_masks, width=WIDE), tokens=TOKENS)


@pytest.mark.parametrize("precision", ["autocast", "pure", "float32 logits"])
@pytest.mark.parametrize("how", ["eager", "compiled", "fused by the pass"])
@pytest.mark.parametrize("n_masks", [1, 4])
def test_bfloat16_trains_as_well_as_the_naive_layer(n_masks: int, how: str, precision: str) -> None:
    by_pass = how == "fused by the pass"
    if by_pass and precision == "float32 logits":
        pytest.skip("the naive layer multiplies the weight by its masks, so that both have one dtype")

    def run(kind: type[MGLU | NaiveMGLU], compiled: bool) -> Run:
        torch._dynamo.reset()
        model = on_gpu(kind, n_masks, width=WIDE)
        if precision != "autocast":
            model.to(torch.bfloat16)
        if precision == "float32 logits" and kind is MGLU:
            for block in list(model)[:-1]:
                block.gated.mask_logits.data = block.gated.mask_logits.data.float()
        forward = torch.compile(model, fullgraph=True) if compiled else None
        return train(model, forward, tokens=TOKENS, autocast=torch.bfloat16 if precision == "autocast" else None)

    naive = run(NaiveMGLU, how != "eager")
    if by_pass:
        with mglu_ops.fusion(strict=True) as report:
            got = run(NaiveMGLU, True)
        assert [site.operator for site in report.fused] == ["forward_ste"] * 2
    else:
        got = run(MGLU, how == "compiled")
    assert_as_good_as_naive(got, naive, float32_run(n_masks))


def test_float16_with_a_scaler_trains_as_well_as_the_naive_layer() -> None:
    fused, naive = (
        train(on_gpu(kind, width=WIDE), tokens=TOKENS, autocast=torch.float16, scaler=torch.amp.GradScaler("cuda"))
        for kind in (MGLU, NaiveMGLU)
    )
    assert_as_good_as_naive(fused, naive, float32_run(2))


def gradients(forward: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    result = forward(x)
    grad = torch.linspace(-1, 1, result.numel(), device="cuda").view(result.shape).to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, [x, *module.parameters()], grad)]


def assert_equal(found: list[Tensor], want: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def assert_close(found: list[Tensor], want: list[Tensor]) -> None:
    for got, exact in zip(found, want, strict=True):
        assert relative_error(got, exact) <= BUDGET[got.dtype]


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 2}, {"learnable_masks": False}], ids=["learned", "weighted", "fixed"]
)
def test_recomputing_gives_the_same_bits(options: dict[str, Any], dtype: torch.dtype, mode: str | None) -> None:
    torch.manual_seed(0)
    layer = MGLU(WIDE, 2 * WIDE, n_masks=3, device="cuda", dtype=dtype, **options)
    x = torch.randn(TOKENS, WIDE, device="cuda", dtype=dtype)
    found = []
    for save_activations in (True, False):
        torch._dynamo.reset()
        layer.save_activations = save_activations
        forward = layer if mode is None else torch.compile(layer, mode=mode, fullgraph=True)
        for _ in range(3 if mode == "reduce-overhead" else 1):  # warm up, record, replay
            torch.compiler.cudagraph_mark_step_begin()
            last = [tensor.clone() for tensor in gradients(forward, layer, x)]
        found.append(last)
    if mode is None or "top_k" not in options:
        assert_equal(*found)
    else:
        # Inductor may also recompute the router in backward, in kernels that round differently.
        assert_close(*found)


@pytest.mark.parametrize("compiled", [False, True])
def test_recomputing_frees_the_activations_of_all_layers_but_one(compiled: bool) -> None:
    n_masks, depth, tokens, width = 3, 6, 8192, 1024
    activations = (n_masks + 1) * tokens * width * 2
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    peaks = []
    for save_activations in (True, False):
        torch._dynamo.reset()
        layers = [SwiMGLU(width, width, n_masks=n_masks, save_activations=save_activations) for _ in range(depth)]
        model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
        forward = torch.compile(model, fullgraph=True) if compiled else model
        for _ in range(2):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            forward(x).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model, forward, layers
    assert peaks[0] - peaks[1] > (depth - 2) * activations, [f"{peak / 2**20:.0f} MiB" for peak in peaks]


@pytest.mark.parametrize(("n_masks", "d", "h"), [(1, 512, 256), (3, 129, 333), (16, 4096, 4100)])
def test_mask_ratios_match_the_cpu_and_do_not_synchronise(n_masks: int, d: int, h: int) -> None:
    masks, before = (torch.rand(n_masks, d, h, device="cuda") < density for density in (0.5, 0.4))
    packed, packed_before = torch.ops.mglu.pack_masks(masks), torch.ops.mglu.pack_masks(before)
    torch.cuda.synchronize()
    with without_waiting():
        found = gate_ratio(packed, h), mask_agreement(packed, h), flip_ratio(packed_before, packed, h)
    packed, packed_before = packed.cpu(), packed_before.cpu()
    wanted = gate_ratio(packed, h), mask_agreement(packed, h), flip_ratio(packed_before, packed, h)
    for value, want in zip(found, wanted, strict=True):
        assert value.is_cuda
        torch.testing.assert_close(value.cpu(), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("compiler", [None, "inductor"])
@pytest.mark.parametrize("save_activations", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_data_parallel_training_on_two_ranks_matches_the_whole_batch(
    dtype: torch.dtype, save_activations: bool, compiler: str | None, backend: str, tmp_path: Path
) -> None:
    arguments = ("cuda", dtype, WIDE, save_activations, compiler)
    run_on_ranks(check_data_parallel, tmp_path, *arguments, backend=backend)
