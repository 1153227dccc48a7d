"""Layers and whole models at inference as Markdown tables. Each function takes the folder of the results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from benchmarks.decode_model import MODELS
from benchmarks.frames import (
    fastest,
    grid,
    in_order,
    load,
    page,
    rate,
    shown,
    speedup,
    swiglu_time,
    table,
    text,
    times,
    us,
)
from benchmarks.paper import GPUS
from benchmarks.records import read_environment

PROBLEM = ["layer", "n_masks", "tokens"]
ONE_TOKEN = {
    "only reading the bytes": "read ceiling",
    "CUDA backend": "mglu cuda",
    "Triton backend": "mglu triton",
    "naive, best of torch.compile": "naive compiled",
    "naive, eager": "naive eager",
}
"""Label of a line to the beginning of the names of its variants."""
MODEL_OF = {f"{sizes.intermediate} x {sizes.hidden}": name for name, sizes in MODELS.items()}
"""Size of a gated projection to the name of the model that `decode_model` measures with it."""


def one_token_times(rows: pd.DataFrame) -> pd.DataFrame:
    """The least microseconds of one layer, with a line for each number of masks and a column for each label."""
    columns = {label: fastest(rows, prefix, "n_masks").microseconds for label, prefix in ONE_TOKEN.items()}
    found = pd.DataFrame(columns, index=sorted({*rows.n_masks} - {0}))
    return found.dropna(axis=1, how="all").assign(**{"SwiGLU, fastest": swiglu_time(rows)})


def one_token(results: Path, name: str = "one_token") -> str:
    """Microseconds per layer of one token, shape by shape; lines are variants, columns numbers of masks."""
    rows = load(results, name)
    layers = rows[rows.tokens == 1].groupby("layer", sort=False)
    return page(results, name, *(grid(f"{layer}, us", one_token_times(here).map(us).T) for layer, here in layers))


def paper_lines(rows: pd.DataFrame, shape: tuple[int, int], device: str) -> Iterator[dict[str, object]]:
    """Lines that join the paper's two tables, in microseconds: its GPUs and ours for each number of masks."""

    def line(n_masks: int, gpu: str, cuda: float, triton: float, torch: float, glu: float) -> dict[str, object]:
        return {
            "n_m": n_masks,
            "GPU": gpu,
            "CUDA": us(cuda),
            "Triton": us(triton),
            "Torch": us(torch),
            "Torch/CUDA": times(torch, cuda),
            "Torch/Triton": times(torch, triton),
            "GLU": us(glu),
            "GLU/CUDA": times(glu, cuda),
        }

    variants = ("mglu cuda", "mglu triton", "naive eager")
    ours = pd.concat([fastest(rows, prefix, "n_masks").microseconds for prefix in variants], axis=1)
    glu_eager = rows.microseconds[rows.variant == "SwiGLU eager"].min()
    for n_masks, *measured in ours.assign(glu=glu_eager).itertuples():
        for gpu, (mglu, glu) in GPUS.items():
            if (shape, n_masks) in mglu:  # the paper has no 16 masks
                milliseconds = (*mglu[shape, n_masks], glu[shape, n_masks].glu)
                yield line(n_masks, f"{gpu}, paper", *(1000 * time for time in milliseconds))
        if not any(map(math.isnan, measured)):
            yield line(n_masks, f"**{device}**", *measured)


def paper(results: Path) -> str:
    """The paper's tables with our GPU beside its own."""
    rows, device = load(results, "one_token"), read_environment(results, "one_token")["device"]
    parts = []
    for shape, here in rows[rows.tokens == 1].groupby(["out_features", "in_features"], sort=False):
        parts.append(f"{shape[0]} x {shape[1]}, us\n\n{table(paper_lines(here, shape, device))}")
    return page(results, "one_token", *parts)


def chosen(rows: pd.DataFrame, **others: tuple[str, list[str]]) -> pd.DataFrame:
    """The rows that the dispatch chose, by problem.

    Args:
        rows: the rows of a result.
        others: further columns, each the least microseconds of the variants that begin with a prefix, among the rows
            that have the same values in the given columns.
    """
    ours = rows[rows.chosen]
    for name, (prefix, columns) in others.items():
        ours = ours.join(fastest(rows, prefix, columns).microseconds.rename(name), on=columns)
    return ours.set_index(PROBLEM).sort_index()


def routes(results: Path) -> str:
    """A line for each number of tokens: the backend that the dispatch chose, and the fastest alternatives."""
    rows = load(results, "routes")
    ours = chosen(rows, floor=("floor", PROBLEM), swiglu=("SwiGLU", ["layer", "tokens"]))
    other = fastest(rows[~rows.chosen], ("mglu ", "naive "), PROBLEM).reindex(ours.index)
    lines = pd.DataFrame(
        {
            "floor": text(us, ours.floor),
            "mglu_ops": shown(ours) + " (" + ours.variant.str.removeprefix("mglu ") + ")",
            "over the floor": text(times, ours.microseconds, ours.floor),
            "next best": other.variant,
            "its time": text(us, other.microseconds),
            "speed-up": text(speedup, other.microseconds, ours.microseconds),
            "SwiGLU": text(us, ours.swiglu),
            "speed-up over SwiGLU": text(speedup, ours.swiglu, ours.microseconds),
        }
    )
    parts = [
        f"{layer}, n_m = {n_masks}, us\n\n{grid('tokens', here.droplevel('n_masks'))}"
        for layer in rows.layer.unique()
        for n_masks, here in lines.loc[layer].groupby("n_masks")
    ]
    return page(results, "routes", *parts)


def floors(results: Path) -> str:
    """Times of the chosen backend and how many times the floor they are, by tokens and masks."""
    rows = load(results, "tokens")
    ours = chosen(rows, floor=("floor", PROBLEM))
    cells = (shown(ours) + ", " + text(times, ours.microseconds, ours.floor)).unstack("n_masks")
    return page(results, "tokens", *(grid(f"tokens, {layer}", cells.loc[layer]) for layer in rows.layer.unique()))


def models(results: Path) -> str:
    """One token through the layers of current models: the fastest SwiGLU, and ours with its speed-up."""
    rows = load(results, "models")
    ours = chosen(rows, swiglu=("SwiGLU", ["layer"]))
    cells = (shown(ours) + ", " + text(times, ours.swiglu, ours.microseconds)).droplevel("tokens").unstack("n_masks")
    swiglu = text(us, fastest(rows, "SwiGLU", "layer").microseconds).rename("SwiGLU, us")
    lines = rows.drop_duplicates("layer")[["case", "layer"]].join(swiglu, on="layer")
    lines = lines.join(cells.rename(columns="SwiMGLU, n_m = {}".format), on="layer").rename(columns={"layer": "d x h"})
    return page(results, "models", grid("layer of", lines.set_index("case")))


def title(layer: str, sequences: int) -> str:
    """The name of the model that decodes with such layers, and its number of sequences."""
    return f"{MODEL_OF.get(layer, layer)}, {'one sequence' if sequences == 1 else f'{sequences} sequences'}"


def decode_model(results: Path) -> str:
    """Tokens a second of whole models, from the fastest compilation of each."""
    parts = []
    for (layer, batch), here in load(results, "decode_model").groupby(["layer", "tokens"], sort=False):
        lines = [
            {
                "feed-forward layer": f"SwiMGLU, n_m = {n_masks}" if n_masks else "SwiGLU",
                "MB of weights": best.weight_mb,
                "ms a step": f"{best.microseconds / 1000:.3f}",
                "tokens a second": rate(best.microseconds, batch),
                "over SwiGLU": times(swiglu_time(here), best.microseconds),
                "of reading": f"{best.fraction_of_ceiling:.2f}",
            }
            for n_masks, best in fastest(here, ("SwiGLU", "SwiMGLU"), "n_masks").iterrows()
        ]
        parts.append(f"{title(layer, batch)}:\n\n{table(lines)}")
    return page(results, "decode_model", *parts)


def generate(results: Path) -> str:
    """Tokens a second of `generate` with each form of a model, by the number of sequences and masks."""
    rows = load(results, "generate")
    rows["rate"] = shown(rows, rate, "tokens")
    counts = sorted({0, *rows.n_masks})
    parts = []
    for (_, layer, batch), here in rows.groupby(["out_features", "layer", "tokens"]):
        cells = in_order(here, "variant", "n_masks", "rate").reindex(columns=counts)
        parts.append(grid(f"{title(layer, batch)}, tokens a second", cells.rename(columns={0: "without masks"})))
    return page(results, "generate", *parts)


def masks_at_inference(results: Path) -> str:
    """Microseconds per call, by the way in which a naive layer is fused."""
    rows = load(results, "masks_at_inference_cuda")
    rows["time"] = shown(rows)
    cells = in_order(rows, ["variant", "packed"], "n_masks", "time").reset_index("packed")
    cells = cells.rename(columns={"packed": "masks are made or packed"})
    return page(results, "masks_at_inference_cuda", grid("us a call", cells))


def overheads(results: Path) -> str:
    """Host time per call, and the first call of a kernel in a process."""
    rows = load(results, "overheads")
    rows["us"], rows["spread, us"] = shown(rows), text(us, rows.spread)
    rows = rows.rename(columns={"n_masks": "n_m"}).set_index("variant")
    cases = rows.groupby("case", sort=False)[["tokens", "n_m", "us", "spread, us"]]
    return page(results, "overheads", *(grid(case, here) for case, here in cases))


def tensor_parallel(results: Path) -> str:
    """Microseconds per layer on one rank and on several, and how many times as fast several are."""
    command = "torchrun --standalone --nproc-per-node 2 -m benchmarks.tensor_parallel"
    rows = load(results, "tensor_parallel", command)
    one, several = rows.variant.unique()
    rows["time"] = shown(rows)
    problem = ["layer", "case", "tokens", "n_masks"]
    time, cells = (in_order(rows, problem, "variant", column) for column in ("microseconds", "time"))
    cells = cells.assign(gain=text(speedup, time[one], time[several])).fillna("").reset_index()
    cells["cell"] = cells[one] + ", " + cells[several] + ": " + cells.gain
    lines = in_order(cells, problem[:3], "n_masks", "cell").rename(columns=f"{one}, {several}, us: n_m = {{}}".format)
    lines = lines.reset_index(["case", "tokens"]).rename(columns={"case": "work"})
    return page(results, "tensor_parallel", grid("out x in", lines))


def load_cpu(results: Path, name: str) -> pd.DataFrame:
    """The rows of a result of `benchmarks.cpu`, with its least times as `microseconds`."""
    return load(results, name, f"python -m benchmarks.cpu --name {name}").rename(columns={"least": "microseconds"})


def cpu(results: Path, name: str) -> str:
    """The least times of each problem, in microseconds."""
    rows = load_cpu(results, name)
    lines = []
    for (dtype, tokens, n_masks), here in rows.groupby(["dtype", "tokens", "n_masks"], sort=False):
        variants, swiglu = here.set_index("variant"), swiglu_time(here)
        ours, reading, naive = (variants.loc[variant] for variant in ("mglu cpu", "read loop", "naive compiled"))
        fractions = (f"{reading[time] / ours[time]:.2f}" for time in ("microseconds", "median"))
        lines.append(
            {
                "dtype": dtype,
                "tokens": tokens,
                "n_m": n_masks,
                "only reading": us(reading.microseconds),
                "mglu_ops": f"{us(ours.microseconds)} ({ours.isa})",
                "fraction of reading (least, median)": ", ".join(fractions),
                "naive compiled": us(naive.microseconds),
                "speed-up": speedup(naive.microseconds, ours.microseconds),
                "fastest SwiGLU": us(swiglu),
                "speed-up over SwiGLU": speedup(swiglu, ours.microseconds),
            }
        )
    return page(results, name, table(lines))


def compile_time(results: Path) -> str:
    """Seconds to compile a model, and the fusion pass's part of them."""
    lines = []
    for case, here in load(results, "compile_time", "python -m benchmarks.compile_time").groupby("case", sort=False):
        seconds = dict(zip(here.variant, here.microseconds / 1e6, strict=True))
        # Tracing is only a part of compiling: the time is more, and the share of the pass less, than what was measured.
        more, less = ("more than ", "less than ") if "traced" in seconds else ("", "")
        without = next(seconds[name] for name in ("naive compiled", "compiled", "traced") if name in seconds)
        lines.append(
            {
                "model": case,
                "without fusion, s": f"{more}{without:.1f}",
                "with fusion, s": f"{seconds['fused']:.1f}" if "fused" in seconds else "",
                "the pass, ms": f"{seconds['pass'] * 1000:.1f}",
                "the pass, of the time without": f"{less}{100 * seconds['pass'] / without:.2f}%",
            }
        )
    return page(results, "compile_time", table(lines))


def packages(results: Path) -> str:
    """Microseconds per layer of a package that a C++ program runs."""
    rows = load(results, "packages", "python -m benchmarks.packages").set_index("variant")
    rows["us a layer"] = text(us, rows.pop("microseconds"))
    return page(results, "packages", grid("a layer is called by", rows))
