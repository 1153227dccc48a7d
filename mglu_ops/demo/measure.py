"""Timing: medians of interleaved rounds after a warm-up, so that a busy moment of the machine hits every variant."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def milliseconds(
    variants: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, calls: int
) -> dict[str, float]:
    """Median time of a call of each variant. A round takes `calls` calls of each in turn; one more round warms up."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for current in range(rounds + 1):
        for name, variant in variants.items():
            _wait(device)
            start = time.perf_counter()
            for _ in range(calls):
                variant()
            _wait(device)
            if current > 0:
                samples[name].append((time.perf_counter() - start) * 1e3 / calls)
    return {name: statistics.median(values) for name, values in samples.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
