"""The short tables in benchmarks/README.md, which compare mglu_ops on a GPU with SwiGLU and the naive layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd

from benchmarks.frames import duration, fastest, load, many, markdown
from benchmarks.train import FUSED, NAIVE, OPERATOR

MASKS = (1, 4, 8, 16)
LARGE, SMALL = "14336 x 4096", "8192 x 2048"


def at(layer: str, tokens: int) -> str:
    """The query for the rows of a layer and a number of tokens."""
    return f"layer == '{layer}' and tokens == {tokens}"


def of(case: str, tokens: int | None = None) -> str:
    """The query for the rows of a case, and of a number of tokens if one is given."""
    return f"case == '{case}'" + (f" and tokens == {tokens}" if tokens else "")


_MODEL, _TRAINED = {"ours": "SwiMGLU"}, {"ours": "fused", "naive": "naive"}
_STEP, _MEMORY = {"ours": FUSED}, {"ours": FUSED, "column": "peak_mb"}
WORK: dict[str, list[tuple[str, str, str, dict[str, str]]]] = {
    "summary_tokens": [
        (many(tokens, "token"), "routes", at(SMALL, tokens), {}) for tokens in (1, 8, 32, 64, 256, 1024, 8192)
    ],
    "summary_experts": [
        (f"{model}, {many(tokens, 'token')}", "experts_layer", of(f"{model}, balanced", tokens), {})
        for model in ("Qwen3-30B-A3B", "Mixtral 8x7B", "gpt-oss-20b")
        for tokens in (1, 32, 256, 1024)
    ],
    "summary_models": [
        (f"{name}, {many(sequences, 'sequence')}", result, at(layer, sequences), _MODEL)
        for layer, model in ((SMALL, "1B parameters"), (LARGE, "8B parameters"))
        for result, name in (("decode_model", model), ("decode_model_fp8", f"{model} in fp8"))
        for sequences in (1, 8, 32)
    ],
    "summary_training": [
        *(
            (f"{layer}, 8192 tokens{what}", "train", at(layer, 8192), how)
            for layer, what, how in ((SMALL, "", _STEP), (SMALL, ", peak memory", _MEMORY), (LARGE, "", _STEP))
        ),
        *(
            (f"experts of {model}, 8192 tokens", "train_experts", of(f"{model}, balanced"), {"ours": OPERATOR})
            for model in ("Qwen3-30B-A3B", "Mixtral-8x7B", "gpt-oss")
        ),
        *(
            (f"whole model, {model}, {dtype}", "train_model", of(f"{model}, {dtype}"), _TRAINED)
            for model in ("Llama-3.2 1B", "350M")
            for dtype in ("autocast", "bfloat16")
        ),
    ],
}
"""Name of a table -> its rows: a label, the name of a result, a query that selects the problem, and further arguments
of `line`. A row is left out if the query finds nothing.
"""


def cell(ours: float, swiglu: float, naive: float, form: Callable[[float], str] = duration) -> str:
    """Our figure, and in brackets SwiGLU's and the naive layer's as multiples of ours. Multiples below 1 are bold."""
    if math.isnan(ours):
        return ""
    ratios = []
    for theirs in (one for one in (swiglu, naive) if not math.isnan(one)):
        ratio = f"{theirs / ours:.{2 if theirs < 10 * ours else 0}f}x"
        ratios.append(ratio if theirs >= ours else f"**{ratio}**")
    return f"{form(ours)} ({', '.join(ratios)})"


def line(
    label: str, rows: pd.DataFrame, ours: str = "mglu", naive: str = NAIVE, column: str = "microseconds"
) -> list[str]:
    """The cells of one problem's row: label, fastest SwiGLU, and our figure for each number of masks.

    `ours` and `naive` are prefixes of variant names. If the dispatch chose one of our variants, only that one counts.
    `column` is "microseconds" or "peak_mb", and is taken from the fastest variants. If a result has no SwiGLU for a
    number of masks, the least SwiGLU of any number counts.
    """
    form = duration if column == "microseconds" else "{:.0f} MB".format
    chosen = rows[rows.chosen] if rows.chosen.any() else rows
    mine, theirs = (fastest(of, name, "n_masks")[column].reindex(MASKS) for of, name in ((chosen, ours), (rows, naive)))
    swiglu = fastest(rows, "SwiGLU", "n_masks")[column]
    beside = swiglu.reindex(MASKS).fillna(swiglu.min())
    range_of_swiglu = " to ".join(dict.fromkeys(map(form, (swiglu.min(), swiglu.max()))))
    return [label, range_of_swiglu, *(cell(*figures, form) for figures in zip(mine, beside, theirs, strict=True))]


def summary(name: str, results: Path) -> str:
    """A table with a row for each entry of `WORK[name]`; ratios are bold where mglu_ops is slower."""
    lines = []
    for work, result, query, how in WORK[name]:
        rows = load(results, result)
        gpu = rows.attrs["device"].split()[1]  # such as H200
        if len(found := rows.query(query)):
            lines.append(line(f"{gpu}: {work}", found, **how))
    head = ("work", "fastest SwiGLU", *(f"n_m = {n_masks}" for n_masks in MASKS))
    columns = [column for column in zip(head, *lines, strict=True) if any(column[1:])]
    return markdown([column[0] for column in columns], zip(*(column[1:] for column in columns), strict=True))


TABLES: dict[str, Callable[[Path], str]] = {name: partial(summary, name) for name in WORK}
"""Name of a table -> the function that makes it from a folder of results."""
