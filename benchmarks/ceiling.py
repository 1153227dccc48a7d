"""What no kernel can beat: reading the bytes of W and of the masks once, and the library's rate of arithmetic."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Variant

# Blocks an SM and threads a block: the best of a sweep on an H200 and within 1% of its neighbours.
BLOCKS_PER_SM = 8
THREADS = 256
UNROLL = 4

GEMM = "library GEMM"
GEMM_TOKENS = 8192
GEMM_LAYERS = 2
"""Whose results are several times L2."""
GEMM_FROM = 16
"""Tokens: for fewer, reading takes longer than arithmetic whatever the rate and for any number of masks."""
GEMM_APART_UP_TO = 64
"""Tokens: up to here the product does not take turns with what is measured. It draws so much power that kernels of
microseconds, which are bound by memory, are up to a fifth slower beside it."""


@cache
def _kernel() -> Any:
    core: Any = importlib.import_module("cuda.core")
    source = Path(__file__).with_name("read_ceiling.cu").read_text()
    major, minor = torch.cuda.get_device_capability()
    options = core.ProgramOptions(arch=f"sm_{major}{minor}", std="c++17", define_macro=("MGLU_UNROLL", str(UNROLL)))
    core.Device(torch.cuda.current_device()).set_current()
    return core.Program(source, "c++", options).compile("cubin").get_kernel("read_ceiling")


def reader(weights: list[Tensor], masks: list[Tensor]) -> Callable[[int], None]:
    """`run(i)` that reads all of `weights[i]` and `masks[i]` on the current stream."""
    core: Any = importlib.import_module("cuda.core")
    kernel = _kernel()
    device = core.Device(torch.cuda.current_device())
    blocks = BLOCKS_PER_SM * torch.cuda.get_device_properties().multi_processor_count
    config = core.LaunchConfig(grid=blocks, block=THREADS)
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")

    class CurrentStream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, torch.cuda.current_stream().cuda_stream

    def run(i: int) -> None:
        weight, mask = weights[i], masks[i]
        core.launch(
            device.create_stream(CurrentStream()),
            config,
            kernel,
            weight.data_ptr(),  # ints travel as 64 bits: pointers and counts alike
            weight.numel() * weight.element_size() // 16,
            mask.data_ptr(),
            mask.numel() // 16,
            sink.data_ptr(),
        )

    return run


def gemm(weights: list[Tensor]) -> Variant:
    """The library's product of `GEMM_TOKENS` tokens with a weight."""
    x = torch.randn(GEMM_TOKENS, weights[0].shape[1], device="cuda").to(weights[0].dtype)
    return Variant(
        GEMM,
        lambda i: torch.mm(x, weights[i].t()),
        GEMM_LAYERS,
        lambda i: x.double() @ weights[i].double().t(),
    )


def floor(read_ceiling: float, product: float | None, tokens: int, n_masks: int) -> float:
    """Microseconds below which a layer cannot go: its read ceiling, or n_masks + 1 products at the library's rate.

    `product` is the time of `gemm` with the layer's weight; None for few tokens, where it does not count.
    """
    return max(read_ceiling, 0.0 if product is None else (n_masks + 1) * tokens / GEMM_TOKENS * product)
