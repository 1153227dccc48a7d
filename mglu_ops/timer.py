"""Timing: the clock on the wall for what a user waits for, and CUDA graph replay for what the GPU works.

Both measure the variants in turns, so that a busy moment of the machine does not hit one of them only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

PROTOCOL = "CUDA graph replay, rotating layers > 1 GB, candidates interleaved, median over rounds, us per layer"

BYTES_OF_LAYERS = 1_300_000_000
"""Bytes of distinct layers that a graph runs over: far more than any L2 holds, so that each is read from memory."""

WARM_UP_ROUNDS = 2


def milliseconds(
    variants: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, calls: int
) -> dict[str, float]:
    """Measure the median time of a call of each variant by the clock on the wall, in milliseconds.

    Args:
        variants: what to time, by name.
        device: the device to wait for before and after each measurement.
        rounds: measurements of each variant; one more round before them is not counted.
        calls: calls in one measurement.
    """
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


def layers_for(bytes_per_layer: int, total: int = BYTES_OF_LAYERS) -> int:
    """The number of distinct layers that hold at least `total` bytes together; at least 2."""
    return max(2, -(-total // bytes_per_layer))


class Replay:
    """A CUDA graph of `run(i)` for layers 0 to `layers` - 1, one after another; `outputs` holds their results."""

    def __init__(self, run: Callable[[int], Tensor], layers: int) -> None:
        self.layers = layers
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(0)  # compiles, loads and warms up outside the graph
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = [run(i) for i in range(layers)]


def times(replays: Sequence[Replay], rounds: int) -> list[list[float]]:
    """Measure each graph `rounds` times, in turns, in microseconds per layer.

    Each timed replay follows an untimed one of the same graph, so that the GPU never waits for the CPU. The first two
    rounds are not counted.
    """
    pending: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(rounds + WARM_UP_ROUNDS):
        for index, replay in enumerate(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            replay.graph.replay()
            start.record()
            replay.graph.replay()
            replay.graph.replay()
            end.record()
            pending.append((index, start, end))
    torch.cuda.synchronize()
    found: list[list[float]] = [[] for _ in replays]
    for index, start, end in pending:
        two_replays_us = start.elapsed_time(end) * 1000
        found[index].append(two_replays_us / 2 / replays[index].layers)
    return [one[WARM_UP_ROUNDS:] for one in found]
