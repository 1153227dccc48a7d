"""Measures the time that a user waits, by the wall clock, and the time that the GPU works, by CUDA graph replay.

Both methods measure the variants in turns, so that a busy moment of the machine affects all of them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

PROTOCOL = "CUDA graph replay, rotating layers > 1 GB, candidates interleaved, median over rounds, us per layer"

BYTES_OF_LAYERS = 1_300_000_000
"""The total bytes of a graph's distinct layers: far more than any L2 cache, so each layer is read from memory."""

WARM_UP_ROUNDS = 2


def milliseconds(
    variants: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, calls: int
) -> dict[str, float]:
    """Measure the median time of a call of each variant by the wall clock, in milliseconds.

    Args:
        variants: the functions to time, by name.
        device: the device to wait for before and after each measurement.
        rounds: measurements of each variant. One more measurement, for warm-up, precedes them and is not counted.
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
    """A CUDA graph of several layers, and the results that it writes, one per layer.

    In each measurement, `warmup_replays` precede the timed replays.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: list[Any]) -> None:
        self.graph, self.outputs, self.layers = graph, outputs, len(outputs)
        self.warmup_replays = 1

    @property
    def timed_replays(self) -> int:
        return max(2, self.warmup_replays)


def capture(run: Callable[[int], Any], layers: int) -> Replay:
    """Capture a CUDA graph that calls `run(i)` for i from 0 to `layers` - 1."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(0)  # compiles, loads and warms up outside the graph
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [run(i) for i in range(layers)]
    return Replay(graph, outputs)


def replay(graphs: Sequence[Replay], rounds: int) -> list[list[float]]:
    """Measure each graph `rounds` times, in turns, in microseconds per layer.

    Untimed replays of the same graph precede the timed ones. All replays are queued before the CPU waits, so the GPU
    never waits for the CPU.
    """
    events = [
        [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
        for _ in graphs
    ]
    order = list(zip(graphs, events, strict=True))
    shuffle = random.Random(0).shuffle
    for i in range(rounds):
        shuffle(order)  # a graph heats the GPU, so each graph must run after different ones
        for one, pairs in order:
            start, end = pairs[i]
            for _ in range(one.warmup_replays):
                one.graph.replay()
            start.record()
            for _ in range(one.timed_replays):
                one.graph.replay()
            end.record()
    torch.cuda.synchronize()
    return [
        [start.elapsed_time(end) * 1000 / (one.timed_replays * one.layers) for start, end in pairs]
        for one, pairs in zip(graphs, events, strict=True)
    ]


def times(replays: Sequence[Replay], rounds: int) -> list[list[float]]:
    """Measure graphs with `replay`, after `WARM_UP_ROUNDS` rounds that are not counted."""
    return [one[WARM_UP_ROUNDS:] for one in replay(replays, rounds + WARM_UP_ROUNDS)]
