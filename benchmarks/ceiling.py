"""Lower bounds of a layer's time: the time to read W and the masks once, and the time of its GEMMs by torch.mm."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Variant

# The fastest launch of a sweep on an H200. Similar launches take up to 1% more time.
BLOCKS_PER_SM = 8
THREADS_PER_BLOCK = 256
LOADS_IN_FLIGHT_PER_THREAD = 4

GEMM = "library GEMM"
GEMM_TOKENS = 8192
GEMM_LAYERS = 2
"""Number of layers that the GEMM rotates through. A result is several times as large as L2, so no weight stays in L2
until its next turn."""
MIN_GEMM_TOKENS = 16
"""With fewer tokens, reads take longer than arithmetic for any number of masks, so GEMMs are not timed."""
MAX_SEPARATE_GEMM_TOKENS = 64
"""Up to this number of tokens, the GEMM is timed after the other variants, and not interleaved with them. The GEMM
draws so much power that short, memory-bound kernels after it run up to 20% slower."""


@cache
def _kernel() -> Any:
    core: Any = importlib.import_module("cuda.core")
    source = Path(__file__).with_name("read_ceiling.cu").read_text()
    major, minor = torch.cuda.get_device_capability()
    options = core.ProgramOptions(
        arch=f"sm_{major}{minor}", std="c++17", define_macro=("MGLU_UNROLL", str(LOADS_IN_FLIGHT_PER_THREAD))
    )
    core.Device(torch.cuda.current_device()).set_current()
    return core.Program(source, "c++", options).compile("cubin").get_kernel("read_ceiling")


def reader(weights: list[Tensor], masks: list[Tensor]) -> Callable[[int], None]:
    """A function `run(i)` that reads all of `weights[i]` and `masks[i]` on the current stream."""
    core: Any = importlib.import_module("cuda.core")
    kernel = _kernel()
    device = core.Device(torch.cuda.current_device())
    blocks = BLOCKS_PER_SM * torch.cuda.get_device_properties().multi_processor_count
    config = core.LaunchConfig(grid=blocks, block=THREADS_PER_BLOCK)
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
            weight.data_ptr(),  # cuda.core passes all Python ints, such as pointers and counts, as 64 bits
            weight.numel() * weight.element_size() // 16,
            mask.data_ptr(),
            mask.numel() // 16,
            sink.data_ptr(),
        )

    return run


def gemm(weights: list[Tensor]) -> Variant:
    """The product of `GEMM_TOKENS` tokens and a weight by torch.mm."""
    x = torch.randn(GEMM_TOKENS, weights[0].shape[1], device="cuda").to(weights[0].dtype)
    return Variant(
        GEMM,
        lambda i: torch.mm(x, weights[i].t()),
        GEMM_LAYERS,
        lambda i: x.double() @ weights[i].double().t(),
    )


def floor(read_ceiling: float, product: float | None, tokens: int, n_masks: int) -> float:
    """Lower bound of a layer's time in microseconds: the time of its reads or, if longer, of n_masks + 1 GEMMs.

    `product` is the time of `gemm` with the layer's weight, or None for few tokens, where reads dominate.
    """
    return max(read_ceiling, 0.0 if product is None else (n_masks + 1) * tokens / GEMM_TOKENS * product)
