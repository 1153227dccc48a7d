"""Allocated memory of a GPU in megabytes (1e6 bytes). On a CPU it is not counted, and is NaN."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def allocated(device: str) -> float:
    """The megabytes that tensors hold now."""
    return torch.cuda.memory_allocated() / 1e6 if device == "cuda" else float("nan")


def peak(call: Callable[[], object], device: str) -> float:
    """The peak of megabytes that all tensors hold during a call, including tensors from before the call."""
    if device != "cuda":
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 1e6


def release(device: str) -> None:
    """Release cached memory to the device, so that a problem does not fragment memory for the next one."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
