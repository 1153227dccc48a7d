"""The table of README.md: what mglu_ops gives on a GPU and on CPUs, against SwiGLU and the naive layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.bars import peak_of
from benchmarks.markdown import duration, markdown
from benchmarks.records import Row
from benchmarks.rows import chosen, fastest, only
from benchmarks.tables import rows_of
from benchmarks.tables_cpu import cpu_problems, fastest_swiglu
from benchmarks.train_layers import CASE, FUSED, NAIVE

MASKS = (1, 4, 8, 16)


def cell(ours: float, swiglu: float | None, naive: float | None, text: Callable[[float], str] = duration) -> str:
    """Our time and, in brackets, its speed-ups over SwiGLU and over the naive layer, in bold where it is slower.

    With another `text`, another quantity of which less is better, in the same way.
    """
    ratios = []
    for theirs in (swiglu, naive):
        if theirs is not None:
            ratio = f"{theirs / ours:.{2 if theirs < 10 * ours else 0}f}x"
            ratios.append(ratio if theirs >= ours else f"**{ratio}**")
    return f"{text(ours)} ({', '.join(ratios)})"


def _time(row: Row | None) -> float | None:
    return None if row is None else row.microseconds


def gpu_line(label: str, rows: list[Row], ours: str = "mglu", naive: str = NAIVE) -> list[str]:
    """A line for one problem at several numbers of masks; `ours` and `naive` begin the names of these variants."""
    swiglu = fastest(rows, "SwiGLU")
    cells = []
    for n_masks in MASKS:
        here = only(rows, n_masks=n_masks)
        mine, theirs = chosen(here) or fastest(here, ours), fastest(here, naive)
        cells.append("" if mine is None else cell(mine.microseconds, _time(swiglu), _time(theirs)))
    return [label, "" if swiglu is None else duration(swiglu.microseconds), *cells]


def megabytes(peak: float) -> str:
    return f"{peak:.0f} MB"


def memory_line(label: str, rows: list[Row], ours: str) -> list[str]:
    """A line as `gpu_line`'s for the peak of memory; `ours` begins the name of our variant."""
    swiglu = fastest(rows, "SwiGLU")
    theirs = None if swiglu is None else peak_of(swiglu)
    cells = []
    for n_masks in MASKS:
        mine, naive = (fastest(only(rows, n_masks=n_masks), name) for name in (ours, NAIVE))
        if mine is None:
            cells.append("")
        else:
            cells.append(cell(peak_of(mine), theirs, None if naive is None else peak_of(naive), megabytes))
    return [label, "" if theirs is None else megabytes(theirs), *cells]


def cpu_line(label: str, results: Path, name: str) -> list[str]:
    """A line for one token in bfloat16 on a CPU."""
    problems = cpu_problems(results, name)
    best: list[float] = []
    cells = []
    for n_masks in MASKS:
        variants = problems["bfloat16", "1", str(n_masks)]
        ours, naive = (float(variants[variant]["least"]) for variant in ("mglu cpu", "naive compiled"))
        swiglu = fastest_swiglu(variants)
        assert swiglu is not None
        best.append(swiglu)
        cells.append(cell(ours, swiglu, naive))
    return [label, f"{min(best) / 1000:.2f} to {max(best) / 1000:.2f} ms", *cells]


def summary(results: Path) -> str:
    """One line for each kind of work; bold where mglu_ops is slower."""
    one_token = only(rows_of(results, "one_token"), shape=(14336, 4096))
    routes = only(rows_of(results, "routes"), shape=(8192, 2048))
    step = only(rows_of(results, "train"), case=CASE, shape=(8192, 2048), tokens=8192)
    decoding = only(rows_of(results, "decode_model"), shape=(8192, 2048), tokens=1)
    training = only(rows_of(results, "train_model"), case="Llama-3.2 1B, autocast")
    lines = [
        gpu_line("H200: 14336 x 4096, 1 token", one_token),
        gpu_line("H200: 8192 x 2048, 64 tokens", only(routes, tokens=64)),
        gpu_line("H200: 8192 x 2048, 8192 tokens", only(routes, tokens=8192)),
        gpu_line("H200: 1B-parameter model, 1 token", decoding, "SwiMGLU"),
        gpu_line("H200: 8192 x 2048, training step, 8192 tokens", step, FUSED),
        memory_line("H200: the same, peak memory over the inputs", step, FUSED),
        gpu_line("H200: 1B-parameter model, training step, 8192 tokens", training, "fused", "naive"),
        cpu_line("2 CPU cores, AVX2: 8192 x 2048, 1 token", results, "cpu_one_token"),
        cpu_line("16 CPU cores, AVX-512: 8192 x 2048, 1 token", results, "cpu_one_token_xeon"),
    ]
    return markdown(("work", "fastest SwiGLU", *(f"n_m = {n_masks}" for n_masks in MASKS)), lines)
