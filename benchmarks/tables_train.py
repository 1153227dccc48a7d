"""The results of training as Markdown tables: one layer in every form, and a step of whole models."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from benchmarks.frames import form, grid, ms, ratio, share, shown, speedup, table, whole
from benchmarks.train_layers import FUSED, GEMMS, MODULE, NAIVE, OPERATOR, RECOMPUTING, SWIGLU, TRICK, Results

PROBLEM = ["layer", "tokens", "n_masks"]
NAMES = {NAIVE: "naive", TRICK: "five lines", SWIGLU: "SwiGLU", FUSED: "fused"}
TIMES = {**NAMES, OPERATOR: "operator", MODULE: "module", GEMMS: "GEMMs alone"}
"""Name of a variant -> its heading."""


@table("train", "train_cpu")
def train(rows: pd.DataFrame) -> Iterator[str]:
    """Times, errors and, on a GPU, peak memory of a training step of one layer."""
    # SwiGLU is measured once for all numbers of masks, and shown for each number.
    swiglu = rows[rows.variant == SWIGLU].drop(columns="n_masks")
    swiglu = swiglu.merge(rows[PROBLEM].drop_duplicates(), on=["layer", "tokens"])
    every = pd.concat([rows[rows.variant != SWIGLU], swiglu], ignore_index=True)
    every["ms"], every["mb"] = shown(every, ms), every.peak_mb.map(whole).where(every.peak_mb.notna(), every.left_out)
    wide = every.pivot(index=PROBLEM, columns="variant")
    figures = "microseconds", "peak_mb", "ms", "mb"
    time, peak, times, memory = (wide[name].reindex(columns=[*TIMES, RECOMPUTING]) for name in figures)
    times = times.drop(columns=[SWIGLU, RECOMPUTING]).rename(columns=TIMES)
    for heading, other in (("over naive", NAIVE), ("over five lines", TRICK), ("over SwiGLU", SWIGLU)):
        times[heading] = (time[other] / time[FUSED]).map(speedup)
    times["of the GEMMs"] = (time[FUSED] / time[GEMMS]).map(ratio)
    frames = {"ms": times}
    if rows.peak_mb.notna().any():
        frames["peak MB"] = (
            memory[[*NAMES]]
            .rename(columns=NAMES)
            .assign(
                **{
                    "of naive": (peak[FUSED] / peak[NAIVE]).map(share),
                    "of five lines": (peak[FUSED] / peak[TRICK]).map(share),
                    "not saved": memory[RECOMPUTING],
                    "of fused": (peak[RECOMPUTING] / peak[FUSED]).map(share),
                    "its time, of fused": (time[RECOMPUTING] / time[FUSED]).map(ratio),
                }
            )
        )
    for unit, frame in frames.items():
        for layer in rows.layer.unique():
            yield grid(f"tokens, {layer}, {unit}", frame.loc[layer])
    if rows.errors.notna().any():
        yield errors(rows)


def errors(rows: pd.DataFrame) -> str:
    """The largest errors of the naive and the fused layer, and the largest ratio of the fused to the naive error."""
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


@table("train_experts")
def train_experts(rows: pd.DataFrame) -> Iterator[str]:
    """Times of a training step of experts in ms with their spread, and memory as a share of the naive layer's."""
    rows["cell"] = shown(rows, ms) + (rows.spread / 1000).map(form(" ±{:.2f}"))
    wide = rows.pivot(index=["case", "n_masks"], columns="variant")
    time, peak = wide.microseconds, wide.peak_mb
    cells = wide.cell.reindex(columns=[NAIVE, TRICK, OPERATOR, SWIGLU]).rename(columns=TIMES).fillna("")
    for heading, other in (("over naive", NAIVE), ("over five lines", TRICK)):
        cells[heading] = (time[other] / time[OPERATOR]).map(speedup)
    cells["memory, of naive"] = (peak[OPERATOR] / peak[NAIVE]).map(share)
    cells["of five lines"] = (peak[OPERATOR] / peak[TRICK]).map(share)
    yield grid("experts", cells)


@table("train_model")
def train_model(rows: pd.DataFrame) -> Iterator[str]:
    """Tokens a second and peak memory of a step of whole models."""
    rows["rate, text"], rows["GB"] = shown(rows, whole, "rate"), (rows.peak_mb / 1000).map(form("{:.1f}"))
    for (case, tokens, layer), here in rows.groupby(["case", "tokens", "layer"], sort=False):
        wide = here.pivot(index="n_masks", columns="variant")
        cells, head = [], []
        for name in ("SwiGLU", "naive", "fused"):
            cells += [wide["rate, text", name], wide["GB", name]]
            head += [name if cells[2:] else "SwiGLU, tokens a second", "GB"]
        for ours, theirs in (("fused", "naive"), ("naive", "SwiGLU"), ("fused", "SwiGLU")):
            cells.append((wide.microseconds[theirs] / wide.microseconds[ours]).map(speedup))
            head.append(f"{ours} over {theirs}")
        lines = pd.concat(cells, axis="columns").set_axis(head, axis="columns")
        yield f"{case}, {tokens} tokens a step, {layer}\n\n{grid('n_m', lines)}"
