"""Allocated memory of a GPU, in megabytes (1e6 bytes); NaN on a CPU, which does not count it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def allocated(device: str) -> float:
    """Megabytes that tensors hold now."""
    return torch.cuda.memory_allocated() / 1e6 if device == "cuda" else float("nan")


def peak(call: Callable[[], object], device: str) -> float:
    """The most megabytes that all tensors hold at once while a call runs, also those from before the call."""
    if device != "cuda":
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 1e6


def release(device: str) -> None:
    """Release cached memory to the device, so that one problem does not fragment it for the next."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
