"""How everything here is timed, checked and written down.

Protocol: each variant runs once over several layers of distinct weights, together more than 1 GB, so that nothing comes
from L2; the run is captured into a CUDA graph. Graphs of all variants of a row are replayed in turn, round after
round and each time in another order, with a warm-up replay queued ahead of the two that are timed, or, where power
limits the clocks, with as many of each as they take to settle; a time is the median over rounds, per layer, and the
spread is the distance between its quartiles. Before that, every output is poisoned with NaN, the graph is replayed, and
the result must agree with a float64 oracle: a row that fails is reported as wrong and has no time.
"""

from __future__ import annotations

import ast
import csv
import importlib.metadata
import json
import math
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

PROTOCOL = (
    "CUDA graph replay, rotating layers > 1 GB, variants interleaved (up to 64 tokens all but the library GEMM; above, "
    "in turns of 0.1 s whose second half is timed), median over rounds, us per layer"
)
SETTLED_PROTOCOL = (
    "CUDA graph replay, rotating layers > 1 GB, variants in turns of {seconds:g} s whose second half is timed, median "
    "over rounds, us per layer"
)
ROUNDS = 25
MIN_ROUNDS = 9
SECONDS_OF_ROUNDS = 1.5
"""Rounds that take longer together are fewer, down to `MIN_ROUNDS`."""
SETTLING = 0.05
"""Seconds of replays ahead of those that are timed, and of these, for clocks to settle at what power allows: a product
of the library takes 10% less in bursts of up to 30 ms than when it goes on (benchmarks/NOTES.md)."""
MIN_SETTLED_ROUNDS = 5
ERROR_BUDGET = {torch.float16: 3e-3, torch.bfloat16: 2.4e-2, torch.float32: 4e-6}
"""Largest norm of a result's error, relative to the result's norm."""


@dataclass(frozen=True)
class Variant:
    """Something to time: `run(i)` computes layer i and returns its output (or None if it has none to check)."""

    name: str
    run: Callable[[int], Tensor | None]
    layers: int
    oracle: Callable[[int], Tensor] | None = None
    """The float64 result of layer i; None for what computes nothing."""


@dataclass(frozen=True)
class Row:
    """One line of a result table; `fraction_of_ceiling` is the read ceiling's time divided by this one's."""

    case: str
    variant: str
    tokens: int
    out_features: int
    in_features: int
    n_masks: int
    dtype: str
    microseconds: float
    spread: float
    fraction_of_ceiling: float
    error: float
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def is_wrong(self) -> bool:
        """Whether there is no time because the result disagreed with the oracle."""
        return math.isnan(self.microseconds)

    def __str__(self) -> str:
        problem = f"{self.out_features}x{self.in_features} n_m={self.n_masks} T={self.tokens}"
        result = "WRONG" if self.is_wrong else f"{self.microseconds:.2f} us"
        share = "" if math.isnan(self.fraction_of_ceiling) else f" {self.fraction_of_ceiling:.3f} of the ceiling"
        error = "" if math.isnan(self.error) else f", error {self.error:.1e}"
        extra = "".join(f", {name} {value}" for name, value in self.extra.items())
        return f"{problem} {self.variant:50} {result:>13} +-{self.spread:<7.2f}{share}{error}{extra}"


class Timing(NamedTuple):
    """Microseconds a layer (NaN if the result is wrong), the distance of their quartiles, the relative error."""

    microseconds: float
    spread: float
    error: float = float("nan")


@dataclass
class Captured:
    """A variant as a CUDA graph, with what is known of it so far."""

    variant: Variant
    graph: torch.cuda.CUDAGraph
    outputs: list[Tensor | None]
    error: float = float("nan")
    budget: float = float("inf")
    """The error up to which the result is right; a result without an error has none."""
    times: list[float] = field(default_factory=list)
    ahead: int = 1
    """Replays of a turn that are not timed."""

    @property
    def timed(self) -> int:
        """Replays of a turn that are."""
        return max(2, self.ahead)

    def check(self, dtype: torch.dtype) -> None:
        """Poison the outputs, replay, and compare the first and the last with the oracle."""
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
        self.budget = ERROR_BUDGET[dtype]

    def timing(self) -> Timing:
        low, middle, high = statistics.quantiles(self.times, n=4)
        return Timing(float("nan") if self.error > self.budget else middle, high - low, self.error)


def relative_error(output: Tensor | None, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected; infinite for no output and for one with NaN."""
    if output is None:
        return float("inf")
    error = float((output.double() - expected).norm() / expected.norm())
    return float("inf") if math.isnan(error) else error


def capture(variant: Variant) -> Captured:
    """The graph of one run over all layers; what compiles, compiles here."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    start = time.perf_counter()
    with torch.cuda.stream(stream):
        for _ in range(2):
            variant.run(0)  # compiles, loads and warms up outside the graph
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    if (elapsed := time.perf_counter() - start) > 1:
        print(f"{variant.name}: ready after {elapsed:.1f} s", flush=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [variant.run(i) for i in range(variant.layers)]
    return Captured(variant, graph, outputs)


def replay_in_turn(captured: Sequence[Captured], rounds: int = ROUNDS, settling: float = 0.0) -> None:
    """Add to each graph's times those of some rounds, in microseconds a layer: `rounds`, or fewer if they are long."""
    for one, times in zip(captured, _rounds(captured, 2), strict=True):
        one.ahead = max(1, round(settling * 1e6 / (times[-1] * one.variant.layers)))
    start = time.perf_counter()
    _rounds(captured, 1)
    affordable = int(SECONDS_OF_ROUNDS / (time.perf_counter() - start))
    fewest = MIN_SETTLED_ROUNDS if settling else MIN_ROUNDS
    for one, times in zip(captured, _rounds(captured, min(rounds, max(fewest, affordable))), strict=True):
        one.times += times


def _rounds(captured: Sequence[Captured], rounds: int) -> list[list[float]]:
    events = [
        [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
        for _ in captured
    ]
    order = list(zip(captured, events, strict=True))
    turns = random.Random(0)
    for i in range(rounds):
        turns.shuffle(order)  # what ran before leaves its heat behind
        for one, pairs in order:
            start, end = pairs[i]
            for _ in range(one.ahead):
                one.graph.replay()
            start.record()
            for _ in range(one.timed):
                one.graph.replay()
            end.record()
    torch.cuda.synchronize()
    return [
        [start.elapsed_time(end) * 1000 / (one.timed * one.variant.layers) for start, end in pairs]
        for one, pairs in zip(captured, events, strict=True)
    ]


def measure(
    variants: Sequence[Variant], dtype: torch.dtype, rounds: int = ROUNDS, settling: float = 0.0
) -> dict[str, Timing]:
    """Check variants, and time them together.

    Args:
        variants: what to time.
        dtype: decides the error budget.
        rounds: turns of every graph, at most.
        settling: seconds that a graph is replayed in its turn before it is timed for as long.

    Returns:
        By name.
    """
    captured = [capture(variant) for variant in variants]
    for one in captured:
        one.check(dtype)
    replay_in_turn(captured, rounds, settling)
    return {one.variant.name: one.timing() for one in captured}


def _cpu() -> str:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def environment(protocol: str = PROTOCOL) -> dict[str, str]:
    """What a result depends on besides the code: written beside every table."""
    git = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True, check=False)
    return {
        # MGLU_COMMIT names the code where it is measured from a copy without its history.
        "commit": os.environ.get("MGLU_COMMIT") or (git.stdout.strip() if git.returncode == 0 else "unknown"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "protocol": protocol,
    }


def _written(row: Row) -> dict[str, object]:
    """A row's fields, of floats the six digits that mean something."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in asdict(row).items()}


def _or_none(value: object) -> object:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(rows: Sequence[Row], out: Path, name: str, protocol: str = PROTOCOL) -> None:
    """`<name>.csv` and `<name>.json` in a folder."""
    write_table([_written(row) for row in rows], environment(protocol), out, name)


def write_table(table: Sequence[dict[str, Any]], environment: dict[str, Any], out: Path, name: str) -> None:
    """The same of rows of any columns."""
    out.mkdir(parents=True, exist_ok=True)
    finite = [{name: _or_none(value) for name, value in row.items()} for row in table]
    (out / f"{name}.json").write_text(
        json.dumps({"environment": environment, "rows": finite}, indent=1, allow_nan=False) + "\n"
    )
    with (out / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def read(out: Path, name: str) -> list[Row]:
    """The rows of `<name>.csv`, as `write` left them; none if there is no such table."""
    path = out / f"{name}.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [
            Row(
                case=line["case"],
                variant=line["variant"],
                tokens=int(line["tokens"]),
                out_features=int(line["out_features"]),
                in_features=int(line["in_features"]),
                n_masks=int(line["n_masks"]),
                dtype=line["dtype"],
                microseconds=float(line["microseconds"]),
                spread=float(line["spread"]),
                fraction_of_ceiling=float(line["fraction_of_ceiling"]),
                error=float(line["error"]),
                extra=ast.literal_eval(line["extra"]),
            )
            for line in csv.DictReader(file)
        ]


def read_environment(out: Path, name: str) -> dict[str, str]:
    """The `environment` in which `<name>.csv` was measured."""
    document: dict[str, dict[str, str]] = json.loads((out / f"{name}.json").read_text())
    return document["environment"]
