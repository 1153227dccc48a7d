"""The clocks of the benchmarks: single calls by GPU events or the wall clock, whole layers by CUDA graph replay."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from mglu_ops.timer import replay

ROUNDS = 25
MIN_ROUNDS = 9
MIN_SETTLED_ROUNDS = 5
MAX_SECONDS_OF_ROUNDS = 1.5
"""Time for all rounds together. Longer rounds are repeated less often, down to `MIN_ROUNDS`."""
SETTLE_SECONDS = 0.05
"""How long a graph is replayed before its clock starts, and is then timed, where the power limit lowers the clocks. A
GEMM of the library loses 10% of its rate after about 50 ms (benchmarks/README.md, "Bursts and clocks")."""


class Summary(NamedTuple):
    """Median of some times and the distance between their quartiles."""

    median: float
    spread: float


def summarise(times: Sequence[float]) -> Summary:
    """The median and the interquartile range, which is 0 for a single time."""
    if len(times) == 1:
        return Summary(times[0], 0.0)
    low, middle, high = statistics.quantiles(times, n=4)
    return Summary(middle, high - low)


def wall_microseconds(call: Callable[[], object], calls: int = 1) -> float:
    """Wall-clock time of a call, averaged over `calls` of them."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) * 1e6 / calls


def gpu_microseconds(call: Callable[[], object]) -> float:
    """Time of a call between two events on the current CUDA stream; it includes the host's part if that is longer."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000


def interleaved(
    calls: Mapping[str, Callable[[], object]], clock: Callable[[Callable[[], object]], float], rounds: int
) -> dict[str, list[float]]:
    """Times of every call, taken in turn for `rounds` rounds, so that a busy moment of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(clock(call))
    return times


class GraphTimer:
    """A CUDA graph that runs `layers` layers, and its times so far, in microseconds per layer.

    Attributes:
        warmup_replays: replays of each round that run before the clock starts.
        times: of the rounds so far.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, layers: int) -> None:
        self.graph, self.layers = graph, layers
        self.warmup_replays = 1
        self.times: list[float] = []

    @property
    def timed_replays(self) -> int:
        return max(2, self.warmup_replays)


def time_graphs(timers: Sequence[GraphTimer], rounds: int = ROUNDS, settle_seconds: float = 0.0) -> None:
    """Replay graphs in turn and add their times; at most `rounds` rounds, fewer if a round is long.

    Args:
        timers: the graphs.
        rounds: largest number of rounds.
        settle_seconds: how long each graph is replayed before its clock starts, and for how long it is then timed.
    """
    for timer, times in zip(timers, replay(timers, 2), strict=True):
        timer.warmup_replays = max(1, round(settle_seconds * 1e6 / (times[-1] * timer.layers)))
    start = time.perf_counter()
    replay(timers, 1)
    affordable = int(MAX_SECONDS_OF_ROUNDS / (time.perf_counter() - start))
    fewest = MIN_SETTLED_ROUNDS if settle_seconds else MIN_ROUNDS
    for timer, times in zip(timers, replay(timers, min(rounds, max(fewest, affordable))), strict=True):
        timer.times += times
