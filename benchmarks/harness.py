"""Times variants of a layer on a GPU by replaying CUDA graphs, after comparing their results with float64.

README.md describes the method ("GPU", "Correctness", "Bursts and clocks").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.timing import ROUNDS, GraphTimer, first_call, summarise, time_graphs
from mglu_ops import accuracy

PROTOCOL = (
    "CUDA graph replay, rotating layers > 1 GB, variants interleaved (up to 64 tokens all but the library GEMM; above, "
    "in turns of 0.1 s whose second half is timed), median over rounds, us per layer"
)
SETTLED_PROTOCOL = (
    "CUDA graph replay, rotating layers > 1 GB, variants in turns of {seconds:g} s whose second half is timed, median "
    "over rounds, us per layer"
)


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


class Captured(GraphTimer):
    """A variant as a CUDA graph, and the tensors that a replay writes, one per layer.

    `check` sets `error`, the relative error of the result, and `budget`, the largest error that counts as correct.
    """

    def __init__(self, variant: Variant, graph: torch.cuda.CUDAGraph, outputs: list[Tensor | None]) -> None:
        super().__init__(graph, variant.layers)
        self.variant, self.outputs = variant, outputs
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
    """Capture one run over all layers of a variant, after two warm-up calls that compile."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def warm_up() -> None:
        with torch.cuda.stream(stream):
            for _ in range(2):
                variant.run(0)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

    first_call(variant.name, warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [variant.run(i) for i in range(variant.layers)]
    return Captured(variant, graph, outputs)


def measure(
    variants: Sequence[Variant], dtype: torch.dtype, rounds: int = ROUNDS, settle_seconds: float = 0.0
) -> dict[Variant, Timing]:
    """Check variants against the error budget of `dtype`, and time them together with `time_graphs`."""
    captured = [capture(variant) for variant in variants]
    for one in captured:
        one.check(dtype)
    time_graphs(captured, rounds, settle_seconds)
    return {one.variant: one.timing() for one in captured}
