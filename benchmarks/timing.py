"""The clocks of the benchmarks: single calls by GPU events or the wall clock, whole layers by CUDA graph replay."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

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

LOAD_SECONDS = 0.06
"""How long a call is repeated before its clock starts, and is then timed, where calls and not graphs are timed."""
SETTLED_ROUNDS = 9
MAX_SECONDS_OF_SETTLED_ROUNDS = 10.0
"""Time after which no further round of loaded calls begins, once there are `MIN_SETTLED_ROUNDS`."""


class Clock(Protocol):
    """Measures the time of a call in microseconds, averaged over `calls` of them."""

    def __call__(self, call: Callable[[], object], calls: int = 1) -> float: ...


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


def gpu_microseconds(call: Callable[[], object], calls: int = 1) -> float:
    """Time of a call between two events on the current CUDA stream, averaged over `calls` of them.

    It includes the host's part if that is longer.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / calls


def _calls_in(seconds: float, call: Callable[[], object], clock: Clock) -> int:
    """The number of consecutive calls that take the given time; at least 1."""
    call()  # allocates memory that a release may have given back
    few = max(1, math.ceil(seconds / 4 * 1e6 / clock(call)))
    return max(1, math.ceil(seconds * 1e6 / clock(call, few)))


def under_load(
    calls: Mapping[str, Callable[[], object]],
    clock: Clock,
    rounds: int = SETTLED_ROUNDS,
    seconds: float = LOAD_SECONDS,
) -> dict[str, list[float]]:
    """Times of every call under sustained load, taken in turns whose order changes from round to round.

    Args:
        calls: what to time, by name; each has run before, so that nothing is compiled here.
        clock: measures a number of calls; it must not wait for the GPU before it starts, since the load before it is
            part of the method.
        rounds: largest number of times for each call.
        seconds: how long a call is repeated before its clock starts, and for how long it is then timed; one call at
            least.
    """
    counts = {name: _calls_in(seconds, call, clock) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    shuffle = random.Random(0).shuffle
    start = time.perf_counter()
    for done in range(rounds):
        if done >= MIN_SETTLED_ROUNDS and time.perf_counter() - start > MAX_SECONDS_OF_SETTLED_ROUNDS:
            break
        shuffle(order)  # a call heats the GPU, and must not always do so for the same next one
        for name in order:
            for _ in range(counts[name]):
                calls[name]()
            times[name].append(clock(calls[name], counts[name]))
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
