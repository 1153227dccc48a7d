"""The results of training as Markdown tables: one layer in every form, and a step of whole models."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from benchmarks.frames import form, grid, markdown, ms, ratio, share, shown, speedup, table, whole
from benchmarks.train_layers import CASE, FUSED, GEMMS, MODULE, NAIVE, OPERATOR, RECOMPUTING, SWIGLU, TRICK, Results

PROBLEM = ["layer", "tokens", "n_masks"]
TIMES = {
    "naive": NAIVE,
    "five lines": TRICK,
    "fused": FUSED,
    "operator": OPERATOR,
    "module": MODULE,
    "GEMMs alone": GEMMS,
}
"""Heading of a column of times to the name of its variant."""


@table("train", "train_cpu")
def train(rows: pd.DataFrame) -> Iterator[str]:
    """Times, errors and, on a GPU, peak memory of a training step of one layer."""
    rows = rows[rows.case == CASE]
    # SwiGLU is measured once for all numbers of masks, and shown beside each.
    swiglu = rows[rows.variant == SWIGLU].drop(columns="n_masks")
    swiglu = swiglu.merge(rows[PROBLEM].drop_duplicates(), on=["layer", "tokens"])
    every = pd.concat([rows[rows.variant != SWIGLU], swiglu], ignore_index=True)
    frames = {"ms": step_times(every)} | ({"peak MB": memory(every)} if rows.peak_mb.notna().any() else {})
    for unit, frame in frames.items():
        for layer in rows.layer.unique():
            yield grid(f"tokens, {layer}, {unit}", frame.loc[layer])
    if rows.errors.notna().any():
        yield errors(rows)


def by_variant(rows: pd.DataFrame, figures: pd.Series) -> pd.DataFrame:
    """A figure of each row, with a line for each problem and a column for each variant."""
    wide = rows.assign(figure=figures).pivot(index=PROBLEM, columns="variant", values="figure")
    return wide.reindex(columns=[*TIMES.values(), SWIGLU, RECOMPUTING])


def step_times(rows: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds of every form, and the speed-ups of the fused one; of the GEMMs' time it is a multiple."""
    cells, time = by_variant(rows, shown(rows, ms)), by_variant(rows, rows.microseconds)
    others = {"over naive": NAIVE, "over five lines": TRICK, "over SwiGLU": SWIGLU}
    return pd.DataFrame(
        {
            **{heading: cells[variant] for heading, variant in TIMES.items()},
            **{heading: (time[variant] / time[FUSED]).map(speedup) for heading, variant in others.items()},
            "of the GEMMs": (time[FUSED] / time[GEMMS]).map(ratio),
        }
    )


def memory(rows: pd.DataFrame) -> pd.DataFrame:
    """Peak megabytes over the inputs, and what it costs and saves to compute the activations again."""
    megabytes = rows.peak_mb.map(whole).where(rows.peak_mb.notna(), rows.left_out)
    cells, peak, time = (by_variant(rows, figures) for figures in (megabytes, rows.peak_mb, rows.microseconds))
    return pd.DataFrame(
        {
            "naive": cells[NAIVE],
            "five lines": cells[TRICK],
            "SwiGLU": cells[SWIGLU],
            "fused": cells[FUSED],
            "of naive": (peak[FUSED] / peak[NAIVE]).map(share),
            "of five lines": (peak[FUSED] / peak[TRICK]).map(share),
            "not saved": cells[RECOMPUTING],
            "of fused": (peak[RECOMPUTING] / peak[FUSED]).map(share),
            "its time, of fused": (time[RECOMPUTING] / time[FUSED]).map(ratio),
        }
    )


def errors(rows: pd.DataFrame) -> str:
    """The largest errors of the naive layer and of the fused one, and their largest ratio in one problem."""
    found = rows.dropna(subset="errors").set_index(PROBLEM)
    naive, fused = (
        pd.DataFrame(of.errors.tolist(), of.index, Results._fields, dtype=float)
        for of in (found[found.variant == variant] for variant in (NAIVE, FUSED))
    )
    naive, fused = naive.align(fused, join="inner")
    figures = {"{:.1f}, ": 1e3 * naive, "{:.1f} ": 1e3 * fused, "({:.2f}x)": fused / naive}
    texts = [of.groupby("n_masks").max().map(pattern.format).astype(str) for pattern, of in figures.items()]
    cells = (texts[0] + texts[1] + texts[2]).add_suffix(": naive, fused, 1e-3")
    repeat = found.bits_repeat[found.variant == FUSED].groupby("n_masks").agg(lambda of: f"{sum(of)} of {len(of)}")
    return grid("n_m", cells.assign(**{"bits repeat": repeat}))


@table("train_model")
def train_model(rows: pd.DataFrame) -> Iterator[str]:
    """Tokens a second and peak memory of a step of whole models."""
    rows["tokens a second"] = shown(rows, whole, "rate")
    rows["gigabytes"] = (rows.peak_mb / 1000).map(form("{:.1f}"))
    head = ["n_m", "SwiGLU, tokens a second", "GB", "naive", "GB", "fused", "GB"]
    head += ["fused over naive", "naive over SwiGLU", "fused over SwiGLU"]
    for (case, tokens, layer), here in rows.groupby(["case", "tokens", "layer"], sort=False):
        lines = []
        for n_masks, problem in here.groupby("n_masks"):
            forms = problem.set_index("variant").reindex(["SwiGLU", "naive", "fused"])
            swiglu, naive, fused = forms.microseconds
            speedups = map(speedup, (naive / fused, swiglu / naive, swiglu / fused))
            lines.append([n_masks, *forms[["tokens a second", "gigabytes"]].fillna("").to_numpy().flat, *speedups])
        yield f"{case}, {tokens} tokens a step, {layer}\n\n{markdown(head, lines)}"
