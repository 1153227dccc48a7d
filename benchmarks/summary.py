"""The table of README.md: what mglu_ops gives on a GPU and on CPUs, against SwiGLU and the naive layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from benchmarks.frames import duration, fastest, load, markdown
from benchmarks.train_layers import CASE, FUSED, NAIVE

MASKS = (1, 4, 8, 16)
STEP = f"case == '{CASE}' and layer == '8192 x 2048' and tokens == 8192"
AUTOCAST = "case == 'Llama-3.2 1B, autocast'"
EXPERTS = "case == 'Qwen3-30B-A3B, balanced'"
_MODEL = {"ours": "SwiMGLU"}
ON_GPU: list[tuple[str, str, str, dict[str, str]]] = [
    ("14336 x 4096, 1 token", "one_token", "layer == '14336 x 4096'", {}),
    ("8192 x 2048, 64 tokens", "routes", "layer == '8192 x 2048' and tokens == 64", {}),
    ("8192 x 2048, 8192 tokens", "routes", "layer == '8192 x 2048' and tokens == 8192", {}),
    ("1B-parameter model, 1 token", "decode_model", "layer == '8192 x 2048' and tokens == 1", _MODEL),
    ("14336 x 4096 in fp8, 1 token", "formats", "case == 'fp8_row' and layer == '14336 x 4096' and tokens == 1", {}),
    ("8B-parameter model in fp8, 1 token", "decode_model_fp8", "layer == '14336 x 4096' and tokens == 1", _MODEL),
    ("experts of Qwen3-30B-A3B, whole layer, 32 tokens", "experts_layer", f"{EXPERTS} and tokens == 32", {}),
    ("the same, 256 tokens", "experts_layer", f"{EXPERTS} and tokens == 256", {}),
    ("8192 x 2048, training step, 8192 tokens", "train", STEP, {"ours": FUSED}),
    ("the same, peak memory over the inputs", "train", STEP, {"ours": FUSED, "column": "peak_mb"}),
    ("1B-parameter model, training step, 8192 tokens", "train_model", AUTOCAST, {"ours": "fused", "naive": "naive"}),
]
"""Work on a GPU, the result that has it, the rows of the result, and further arguments of `gpu_line`."""


def cell(ours: float, swiglu: float, naive: float, form: Callable[[float], str] = duration) -> str:
    """Our figure and, in brackets, how many times less it is than SwiGLU's and the naive layer's; more is in bold."""
    if math.isnan(ours):
        return ""
    ratios = []
    for theirs in (one for one in (swiglu, naive) if not math.isnan(one)):
        ratio = f"{theirs / ours:.{2 if theirs < 10 * ours else 0}f}x"
        ratios.append(ratio if theirs >= ours else f"**{ratio}**")
    return f"{form(ours)} ({', '.join(ratios)})"


def gpu_line(
    label: str, rows: pd.DataFrame, ours: str = "mglu", naive: str = NAIVE, column: str = "microseconds"
) -> list[str]:
    """A line for one problem at several numbers of masks.

    `ours` and `naive` are how the names of our variants and of the naive layer's begin; where the dispatch chose one of
    ours, only that one counts. The column, "microseconds" or "peak_mb", is shown of the fastest variants.
    """
    form = duration if column == "microseconds" else "{:.0f} MB".format
    mine = fastest(rows[rows.chosen] if rows.chosen.any() else rows, ours, "n_masks")[column].reindex(MASKS)
    theirs = fastest(rows, naive, "n_masks")[column].reindex(MASKS)
    swiglu = fastest(rows, "SwiGLU", "layer")[column].min()
    return [label, form(swiglu), *(cell(one, swiglu, other, form) for one, other in zip(mine, theirs, strict=True))]


def cpu_line(label: str, results: Path, name: str) -> list[str]:
    """A line for one token in bfloat16 on a CPU, where SwiGLU is measured again beside each number of masks."""
    rows = load(results, name)
    rows = rows[(rows["dtype"] == "bfloat16") & (rows.tokens == 1)]
    prefixes = ("mglu cpu", "SwiGLU", "naive compiled")
    ours, swiglu, naive = (fastest(rows, prefix, "n_masks").microseconds.loc[[*MASKS]] for prefix in prefixes)
    return [label, f"{swiglu.min() / 1000:.2f} to {swiglu.max() / 1000:.2f} ms", *map(cell, ours, swiglu, naive)]


def summary(results: Path) -> str:
    """One line for each kind of work; bold where mglu_ops is slower."""
    lines = []
    for work, name, query, how in ON_GPU:
        rows = load(results, name)
        gpu = rows.attrs["device"].split()[1]  # such as H200
        lines.append(gpu_line(f"{gpu}: {work}", rows.query(query), **how))
    lines.append(cpu_line("2 CPU cores, AVX2: 8192 x 2048, 1 token", results, "cpu_one_token"))
    lines.append(cpu_line("16 CPU cores, AVX-512: 8192 x 2048, 1 token", results, "cpu_one_token_xeon"))
    return markdown(("work", "fastest SwiGLU", *(f"n_m = {n_masks}" for n_masks in MASKS)), lines)
