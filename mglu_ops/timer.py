"""Times of GPU work by CUDA graph replay: neither Python nor what L2 still holds of the last time is in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PROTOCOL = "CUDA graph replay, rotating layers > 1 GB, candidates interleaved, median over rounds, us per layer"
BYTES_OF_LAYERS = 1_300_000_000
"""Far more than L2 holds: every layer comes from memory."""


def layers_for(bytes_per_layer: int) -> int:
    """How many layers are enough."""
    return max(2, -(-BYTES_OF_LAYERS // bytes_per_layer))


class Replay:
    """`run(i)` of layers 0 to `layers` - 1, one after another in a graph; `outputs` are what they return."""

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
    """Microseconds a layer, `rounds` times for each, in turns.

    Behind a replay that is not timed, so that the GPU never waits for the CPU; the first two rounds are not counted.
    """
    pending: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(rounds + 2):
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
        found[index].append(start.elapsed_time(end) * 500 / replays[index].layers)
    return [one[2:] for one in found]
