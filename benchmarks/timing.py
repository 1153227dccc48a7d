"""Times calls under load, and variants of a layer by replaying CUDA graphs, and measures the memory of a call.

README.md describes the method ("GPU", "Correctness", "Bursts and clocks").
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mglu_ops import accuracy, timer
from mglu_ops.timer import Replay, replay

ROUNDS = 25
MIN_ROUNDS = 9
MIN_SETTLED_ROUNDS = 5
MAX_SECONDS_OF_ROUNDS = 1.5
"""All rounds together take at most about this time, unless `MIN_ROUNDS` rounds take longer."""
SETTLE_SECONDS = 0.05
"""Where the power limit matters, a graph is replayed for this time before its timing starts, and then timed for this
time. The power limit slows a GEMM of torch.mm by 10% after about 50 ms (benchmarks/README.md, "Bursts and clocks")."""

LOAD_SECONDS = 0.06
"""A call that is not a graph is repeated for this time before its clock starts, and then timed for this time."""
SETTLED_ROUNDS = 9
MAX_SECONDS_OF_SETTLED_ROUNDS = 10.0

PROTOCOL = (
    "CUDA graph replay, rotating layers > 1 GB, variants interleaved (up to 64 tokens all but the library GEMM; above, "
    "in turns of 0.1 s whose second half is timed), median over rounds, us per layer"
)
SETTLED_PROTOCOL = (
    "CUDA graph replay, rotating layers > 1 GB, variants in turns of {seconds:g} s whose second half is timed, median "
    "over rounds, us per layer"
)


class Clock(Protocol):
    """Measures the time of a call in microseconds, averaged over `calls` calls."""

    def __call__(self, call: Callable[[], object], calls: int = 1) -> float: ...


class Summary(NamedTuple):
    """The median of several times, and their interquartile range."""

    median: float
    spread: float


def summarise(times: Sequence[float]) -> Summary:
    """The median and the interquartile range. The range of a single time is 0."""
    if len(times) == 1:
        return Summary(times[0], 0.0)
    low, middle, high = statistics.quantiles(times, n=4)
    return Summary(middle, high - low)


def wall_microseconds(call: Callable[[], object], calls: int = 1) -> float:
    """Wall-clock time of a call in microseconds, averaged over `calls` calls."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) * 1e6 / calls


def gpu_microseconds(call: Callable[[], object], calls: int = 1) -> float:
    """Time of a call in microseconds between two events on the current CUDA stream, averaged over `calls` calls.

    If the host is slower than the GPU, this is the host's time.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / calls


def clock_of(device: str) -> Clock:
    """The clock for a device type: events on a GPU, and otherwise the wall clock."""
    return gpu_microseconds if device == "cuda" else wall_microseconds


def first_call(name: str, call: Callable[[], object]) -> None:
    """Make the first call of a function that compiles, and print its time if it is more than a second."""
    start = time.perf_counter()
    call()
    if (elapsed := time.perf_counter() - start) > 1:
        print(f"{name}: ready after {elapsed:.1f} s", flush=True)


def _calls_in(seconds: float, call: Callable[[], object], clock: Clock) -> int:
    """The number of consecutive calls, at least 1, that together take `seconds`."""
    call()  # allocates memory again that `release` may have freed
    few = max(1, math.ceil(seconds / 4 * 1e6 / clock(call)))
    return max(1, math.ceil(seconds * 1e6 / clock(call, few)))


def under_load(
    calls: Mapping[str, Callable[[], object]],
    clock: Clock,
    rounds: int = SETTLED_ROUNDS,
    seconds: float = LOAD_SECONDS,
    most_seconds: float = MAX_SECONDS_OF_SETTLED_ROUNDS,
) -> dict[str, list[float]]:
    """Time every call under sustained load. Calls take turns, in an order that changes from round to round.

    Args:
        calls: name -> function to time. Each function must have run before, so that nothing is compiled here.
        clock: measures a number of calls. It must start right after the load, whose effect would otherwise fade. A
            barrier between ranks may come first, because it is short.
        rounds: the largest number of rounds.
        seconds: a call is repeated for this time before its clock starts, and then timed for this time.
        most_seconds: no further round begins after this time, once `MIN_SETTLED_ROUNDS` are done.
    """
    counts = {name: _calls_in(seconds, call, clock) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    shuffle = random.Random(0).shuffle
    start = time.perf_counter()
    for done in range(rounds):
        if done >= MIN_SETTLED_ROUNDS and time.perf_counter() - start > most_seconds:
            break
        shuffle(order)  # a call heats the GPU, so the next call must not always be the same one
        for name in order:
            for _ in range(counts[name]):
                calls[name]()
            times[name].append(clock(calls[name], counts[name]))
    return times


def allocated(device: str) -> float:
    """The memory that tensors hold now, in MB; NaN on a CPU."""
    return torch.cuda.memory_allocated() / 1e6 if device == "cuda" else float("nan")


def peak(call: Callable[[], object], device: str) -> float:
    """The peak memory of all tensors during a call, in MB, including tensors from before it; NaN on a CPU."""
    if device != "cuda":
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 1e6


def release() -> None:
    """Release a GPU's cached memory, so that a problem does not fragment memory for the next one."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing before the first use of a GPU


# --- Variants as CUDA graphs ------------------------------------------------------------------------------------------


def time_graphs(graphs: Sequence[Captured], rounds: int = ROUNDS, settle_seconds: float = 0.0) -> None:
    """Replay graphs in turn and append to their `times`, in `rounds` rounds, or fewer if a round is long.

    A graph is replayed for `settle_seconds` before its clock starts, and then timed for `settle_seconds`.
    """
    for one, times in zip(graphs, replay(graphs, 2), strict=True):
        one.warmup_replays = max(1, round(settle_seconds * 1e6 / (times[-1] * one.layers)))
    start = time.perf_counter()
    replay(graphs, 1)
    affordable = int(MAX_SECONDS_OF_ROUNDS / (time.perf_counter() - start))
    fewest = MIN_SETTLED_ROUNDS if settle_seconds else MIN_ROUNDS
    for one, times in zip(graphs, replay(graphs, min(rounds, max(fewest, affordable))), strict=True):
        one.times += times


@dataclass(frozen=True, eq=False)
class Variant:
    """A function to time. `run(i)` computes layer i and returns the output, or None if there is nothing to check."""

    name: str
    run: Callable[[int], Tensor | None]
    layers: int
    oracle: Callable[[int], Tensor] | None = None
    """`oracle(i)` is the float64 result of layer i. A variant that computes nothing has no oracle."""
    extra: dict[str, object] = field(default_factory=dict)
    """Further columns of the variant's row."""


class Timing(NamedTuple):
    """Microseconds per layer (NaN if the result is wrong), interquartile range, and relative error of the result."""

    microseconds: float
    spread: float
    error: float = float("nan")


class Captured(Replay):
    """A variant as a CUDA graph, and the times of its rounds so far in microseconds per layer.

    `check` sets `error`, the relative error of the result, and `budget`, the largest error that counts as correct.
    """

    def __init__(self, variant: Variant, graph: torch.cuda.CUDAGraph, outputs: list[Tensor | None]) -> None:
        super().__init__(graph, outputs)
        self.variant = variant
        self.times: list[float] = []
        self.error, self.budget = float("nan"), float("inf")

    def replay(self) -> None:
        """Run all layers once. A reference to this bound method keeps the layers alive; one to the graph would not."""
        self.graph.replay()

    def check(self, dtype: torch.dtype) -> None:
        """Fill the outputs with NaN, replay, and compare the first and the last layer with the oracle."""
        oracle = self.variant.oracle
        if oracle is None:
            return
        for output in self.outputs:
            if output is not None:
                output.fill_(float("nan"))
        self.graph.replay()
        torch.cuda.synchronize()
        pairs = [(self.outputs[i], oracle(i)) for i in sorted({0, len(self.outputs) - 1})]
        self.error = max(relative_error(output, expected) for output, expected in pairs)
        if any(output is None or bool(output.isnan().any()) for output in self.outputs):
            self.error = float("inf")
        self.budget = accuracy.ERROR_BUDGET[dtype]

    def timing(self) -> Timing:
        median, spread = summarise(self.times)
        return Timing(float("nan") if self.error > self.budget else median, spread, self.error)


def relative_error(output: Tensor | None, expected: Tensor) -> float:
    """The relative error of `mglu_ops.accuracy`, but infinite if the output is missing or has NaN.

    NaN would count as correct, because `NaN > budget` is false, and `max` may drop NaN.
    """
    error = float("nan") if output is None else accuracy.relative_error(output, expected)
    return float("inf") if math.isnan(error) else error


def capture(variant: Variant) -> Captured:
    """Capture one run over all layers of a variant, after two warm-up calls, the first of which compiles."""
    first_call(variant.name, partial(variant.run, 0))
    found = timer.capture(variant.run, variant.layers)
    return Captured(variant, found.graph, found.outputs)


def measure(
    variants: Sequence[Variant], dtype: torch.dtype, rounds: int = ROUNDS, settle_seconds: float = 0.0
) -> dict[Variant, Timing]:
    """Check variants against the error budget of `dtype`, and time them together with `time_graphs`."""
    captured = [capture(variant) for variant in variants]
    for one in captured:
        one.check(dtype)
    time_graphs(captured, rounds, settle_seconds)
    return {one.variant: one.timing() for one in captured}
