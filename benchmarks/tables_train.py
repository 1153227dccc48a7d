"""The results of training as Markdown tables: one layer in every form, and a step of whole models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from benchmarks.bars import errors_of, peak_of
from benchmarks.markdown import markdown, milliseconds, share, speedup, time_of, times
from benchmarks.paper import Shape
from benchmarks.records import Row
from benchmarks.rows import masks, of, only, shapes, tokens
from benchmarks.tables import rows_of, source, tokens_a_second
from benchmarks.train_layers import (
    CASE,
    FUSED,
    GEMMS,
    MODULE,
    NAIVE,
    OPERATOR,
    RECOMPUTING,
    SWIGLU,
    TRICK,
    Results,
)

TIMES = {
    "naive": NAIVE,
    "five lines": TRICK,
    "fused": FUSED,
    "operator": OPERATOR,
    "module": MODULE,
    "GEMMs alone": GEMMS,
}
"""Heading of a column of times to the name of its variant."""
RATIOS = ("over naive", "over five lines", "over SwiGLU", "of the GEMMs")
MEMORY = (
    "naive",
    "five lines",
    "SwiGLU",
    "fused",
    "of naive",
    "of five lines",
    "not saved",
    "of fused",
    "its time, of fused",
)


def train(results: Path, name: str = "train", is_selection: bool = False) -> str:
    """Times, errors and, on a GPU, peak memory of a training step of one layer.

    Problems that a selection does not have are not missing.
    """
    rows = only(rows_of(results, name), case=CASE)
    kinds = (step_times,) if all(_peak(row) is None for row in rows) else (step_times, memory)
    parts = [source(results, name), *(table(rows, shape) for table in kinds for shape in shapes(rows))]
    if any(errors_of(row) for row in rows):
        parts.append(errors(rows))
    if (absent := left_out(rows)) and not is_selection:
        parts.append(f"Left out: {'; '.join(absent)}.")
    return "\n\n".join(parts)


def problems(rows: Sequence[Row], shape: Shape) -> list[tuple[int, int, list[Row]]]:
    """Tokens, number of masks and rows of every problem of a shape; the row of SwiGLU is in all of the same tokens."""
    here = only(rows, shape=shape)
    found = []
    for count, n_masks in product(tokens(here), masks(here)):
        problem = only(here, tokens=count, n_masks=n_masks)
        if problem:
            swiglu = only(here, tokens=count, variant=SWIGLU)
            found.append((count, n_masks, [row for row in problem if row.variant != SWIGLU] + swiglu))
    return found


def left_out(rows: Sequence[Row]) -> list[str]:
    """The problems that no row has, among all combinations of shapes, tokens and masks of the rows."""
    return [
        f"{shape[0]} x {shape[1]}, {count} tokens, n_m = {n_masks}"
        for shape, count, n_masks in product(shapes(rows), tokens(rows), masks(rows))
        if not only(rows, shape=shape, tokens=count, n_masks=n_masks)
    ]


def step_times(rows: Sequence[Row], shape: Shape) -> str:
    """Milliseconds of every form, and the speed-ups of the fused one; of the GEMMs' time it is a multiple."""
    lines = []
    for count, n_masks, problem in problems(rows, shape):
        fused = time_of(of(problem, FUSED))
        naive, trick, swiglu, gemms = (time_of(of(problem, name)) for name in (NAIVE, TRICK, SWIGLU, GEMMS))
        cells = [milliseconds(of(problem, name)) for name in TIMES.values()]
        ratios = [*(speedup(theirs, fused) for theirs in (naive, trick, swiglu)), times(fused, gemms)]
        lines.append([str(count), str(n_masks), *cells, *ratios])
    return markdown([f"tokens, {shape[0]} x {shape[1]}, ms", "n_m", *TIMES, *RATIOS], lines)


def peak_cell(row: Row | None) -> str:
    """Peak memory in MB; empty if it is unknown, or the reason why the row is left out."""
    if row is None or math.isnan(peak_of(row)):
        return row.left_out or "" if row else ""
    return f"{peak_of(row):.0f}"


def _peak(row: Row | None) -> float | None:
    return None if row is None or math.isnan(peak_of(row)) else peak_of(row)


def memory(rows: Sequence[Row], shape: Shape) -> str:
    """Peak megabytes over the inputs, and what it costs and saves to compute the activations again."""
    lines = []
    for count, n_masks, problem in problems(rows, shape):
        naive, trick, swiglu, fused, again = (of(problem, name) for name in (NAIVE, TRICK, SWIGLU, FUSED, RECOMPUTING))
        lines.append(
            [
                str(count),
                str(n_masks),
                *(peak_cell(row) for row in (naive, trick, swiglu, fused)),
                *(share(_peak(fused), _peak(theirs)) for theirs in (naive, trick)),
                peak_cell(again),
                share(_peak(again), _peak(fused)),
                times(time_of(again), time_of(fused)),
            ]
        )
    return markdown([f"tokens, {shape[0]} x {shape[1]}, peak MB", "n_m", *MEMORY], lines)


def errors(rows: Sequence[Row]) -> str:
    """The largest errors of the naive layer and of the fused one, and their largest ratio in one problem."""
    lines = []
    for n_masks in masks(rows):
        here = only(rows, n_masks=n_masks)
        pairs = [
            (errors_of(of(problem, NAIVE)), errors_of(of(problem, FUSED)))
            for shape in shapes(here)
            for _, _, problem in problems(here, shape)
        ]
        pairs = [(naive, fused) for naive, fused in pairs if naive and fused]
        cells = []
        for name in Results._fields if pairs else ():
            naive, fused = (1e3 * max(both[i][name] for both in pairs) for i in (0, 1))
            ratio = max(both[1][name] / both[0][name] for both in pairs)
            cells.append(f"{naive:.1f}, {fused:.1f} ({ratio:.2f}x)")
        repeats = [row.extra["bits_repeat"] for row in only(here, variant=FUSED) if "bits_repeat" in row.extra]
        lines.append([str(n_masks), *cells, f"{sum(map(bool, repeats))} of {len(repeats)}"])
    return markdown(["n_m", *(f"{name}: naive, fused, 1e-3" for name in Results._fields), "bits repeat"], lines)


MODEL_HEAD = (
    "n_m",
    "SwiGLU, tokens a second",
    "GB",
    "naive",
    "GB",
    "fused",
    "GB",
    "fused over naive",
    "naive over SwiGLU",
    "fused over SwiGLU",
)


def train_model(results: Path) -> str:
    """Tokens a second and peak memory of a step of whole models."""
    rows = rows_of(results, "train_model")
    parts = [source(results, "train_model")]
    for case in dict.fromkeys(row.case for row in rows):
        here = only(rows, case=case)
        lines = []
        for n_masks in masks(here):
            problem = only(here, n_masks=n_masks)
            swiglu, naive, fused = (of(problem, name) for name in ("SwiGLU", "naive", "fused"))
            cells = [cell(row) for row in (swiglu, naive, fused) for cell in (tokens_a_second, gigabytes)]
            ratios = [speedup(time_of(theirs), time_of(ours)) for theirs, ours in ((naive, fused), (swiglu, naive))]
            lines.append([str(n_masks), *cells, *ratios, speedup(time_of(swiglu), time_of(fused))])
        d, h = here[0].shape
        parts.append(f"{case}, {here[0].tokens} tokens a step, {d} x {h}\n\n{markdown(MODEL_HEAD, lines)}")
    return "\n\n".join(parts)


def gigabytes(row: Row | None) -> str:
    peak = _peak(row)
    return "" if peak is None else f"{peak / 1000:.1f}"
