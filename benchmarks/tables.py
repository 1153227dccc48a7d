"""Makes Markdown tables from the results of inference, compilation and packages, and of training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from benchmarks.decode_model import MODELS
from benchmarks.frames import (
    fastest,
    form,
    grid,
    in_order,
    many,
    ms,
    ratio,
    share,
    shown,
    speedup,
    swiglu_time,
    table,
    us,
    whole,
)
from benchmarks.train import FUSED, GEMMS, MODULE, NAIVE, OPERATOR, RECOMPUTING, SWIGLU, TRICK, Results

PROBLEM = ["layer", "n_masks", "tokens"]
ONE_TOKEN = {
    "only reading the bytes": "read ceiling",
    "CUDA backend": "mglu cuda",
    "Triton backend": "mglu triton",
    "naive, best of torch.compile": "naive compiled",
    "naive, eager": "naive eager",
}
"""Label of a line -> the prefix of its variants' names."""
PAPER = Path(__file__).with_name("paper.csv")
MODEL_OF = {f"{sizes.intermediate} x {sizes.hidden}": name for name, sizes in MODELS.items()}
"""Size of a gated projection -> the model in `decode_model` with layers of that size."""


def one_token_times(rows: pd.DataFrame) -> pd.DataFrame:
    """The least microseconds per layer: a row for each number of masks, and a column for each label."""
    columns = {label: fastest(rows, prefix, "n_masks").microseconds for label, prefix in ONE_TOKEN.items()}
    found = pd.DataFrame(columns, index=sorted({*rows.n_masks} - {0}))
    return found.dropna(axis=1, how="all").assign(**{"SwiGLU, fastest": swiglu_time(rows)})


@table("one_token", "sustained")
def one_token(rows: pd.DataFrame) -> Iterator[str]:
    """Microseconds per layer: a table for each shape, with variants as rows and numbers of masks as columns."""
    for layer, here in rows.groupby("layer", sort=False):
        yield grid(f"{layer}, us", one_token_times(here).map(us).T)


@table("paper", result="one_token")
def paper(rows: pd.DataFrame) -> Iterator[str]:
    """The paper's table of each layer, with our GPU's times in lines below the paper's."""
    variants = {"CUDA": "mglu cuda", "Triton": "mglu triton", "Torch": "naive eager", "GLU": "SwiGLU eager"}
    printed = pd.read_csv(PAPER, comment="#").set_index("n_m")
    printed["GPU"] += ", paper"
    printed[[*variants]] *= 1000  # from milliseconds to microseconds
    for layer, here in rows.groupby("layer", sort=False):
        ours = pd.DataFrame({label: fastest(here, name, "n_masks").microseconds for label, name in variants.items()})
        ours = ours.assign(GLU=ours.GLU.min(), GPU=f"**{rows.attrs['device']}**").dropna()
        theirs = printed[(printed.layer == layer) & printed.index.isin(ours.index)]
        lines = pd.concat([theirs, ours]).sort_index(kind="stable")
        head = ["GPU", "CUDA", "Triton", "Torch", "Torch/CUDA", "Torch/Triton", "GLU", "GLU/CUDA"]
        for over in (name for name in head if "/" in name):
            above, below = over.split("/")
            lines[over] = (lines[above] / lines[below]).map(ratio)
        yield f"{layer}, us\n\n{grid('n_m', lines.assign(**lines[[*variants]].map(us))[head])}"


def chosen(rows: pd.DataFrame, **others: tuple[str, list[str]]) -> pd.DataFrame:
    """The rows of the backend that the dispatch chose, indexed by `PROBLEM`.

    Each argument `name=(prefix, columns)` adds a column `name`. For each row it holds the least microseconds of the
    variants that begin with `prefix`, among the rows that agree with this row in `columns`.
    """
    ours = rows[rows.chosen]
    for name, (prefix, columns) in others.items():
        ours = ours.join(fastest(rows, prefix, columns).microseconds.rename(name), on=columns)
    return ours.set_index(PROBLEM).sort_index()


@table("routes")
def routes(rows: pd.DataFrame) -> Iterator[str]:
    """A line for each number of tokens: the backend that the dispatch chose, and the fastest alternatives."""
    ours = chosen(rows, floor=("floor", PROBLEM), swiglu=("SwiGLU", ["layer", "tokens"]))
    other = fastest(rows[~rows.chosen], ("mglu ", "naive "), PROBLEM).reindex(ours.index)
    cells = pd.DataFrame(
        {
            "floor": ours.floor.map(us),
            "mglu_ops": shown(ours) + " (" + ours.variant.str.removeprefix("mglu ") + ")",
            "over the floor": (ours.microseconds / ours.floor).map(ratio),
            "next best": other.variant,
            "its time": other.microseconds.map(us),
            "speed-up": (other.microseconds / ours.microseconds).map(speedup),
            "SwiGLU": ours.swiglu.map(us),
            "speed-up over SwiGLU": (ours.swiglu / ours.microseconds).map(speedup),
        }
    )
    for layer in rows.layer.unique():
        for n_masks, here in cells.loc[layer].groupby("n_masks"):
            yield f"{layer}, n_m = {n_masks}, us\n\n{grid('tokens', here.droplevel('n_masks'))}"


@table("tokens")
def floors(rows: pd.DataFrame) -> Iterator[str]:
    """Times of the chosen backend by tokens and masks, also as multiples of the floor (`ceiling.floor`)."""
    ours = chosen(rows, floor=("floor", PROBLEM))
    cells = (shown(ours) + ", " + (ours.microseconds / ours.floor).map(ratio)).unstack("n_masks")
    for layer in rows.layer.unique():
        yield grid(f"tokens, {layer}", cells.loc[layer])


@table("formats")
def formats(rows: pd.DataFrame) -> Iterator[str]:
    """Layers with weights in 8 and 4 bits: us, fraction of the read ceiling, and speed-up over the fastest SwiGLU.

    A layer in `fp8_row` or `fp8_block` is compared with the fastest SwiGLU in either of them. A layer in any other
    format is compared with the fastest SwiGLU in its own format.
    """
    problem = ["layer", "tokens", "kind"]
    rows["kind"] = rows.case.replace({"fp8_row": "fp8", "fp8_block": "fp8"})
    ours = rows[rows.chosen].join(fastest(rows, "SwiGLU", problem).microseconds.rename("swiglu"), on=problem)
    share_of_reading = ours.fraction_of_ceiling.map(form("{:.2f}"))
    ours["cell"] = shown(ours) + ", " + share_of_reading + ", " + (ours.swiglu / ours.microseconds).map(speedup)
    for (layer, tokens), here in ours.groupby(["layer", "tokens"], sort=False):
        cells = in_order(here, "case", "n_masks", here.cell)
        cells.insert(0, "SwiGLU", here.drop_duplicates("case").set_index("case").swiglu.map(us))
        yield grid(f"{layer}, {many(tokens, 'token')}", cells)


@table("activations")
def activations(rows: pd.DataFrame) -> Iterator[str]:
    """Layers with x in fp8: microseconds, two ratios to cuBLAS, and the speed-up over the same layer with 16-bit x.

    Each ratio divides our time by the time of n_masks + 1 fp8 GEMMs. The GEMMs of the first ratio promote their sums to
    float32, as our kernels do. The GEMMs of the second ratio use fast accumulation. Layers in `fp8_block` are
    compared with the GEMMs of `fp8_row`.
    """
    problem = ["layer", "tokens", "case", "n_masks"]
    times = {name: here.set_index(problem).microseconds for name, here in rows.groupby("variant")}
    ours = rows[rows.variant == "mglu, fp8_token"].set_index(problem)
    cells = shown(ours)
    for name in ("fp8 GEMM", "fp8 GEMM, fast accumulation"):
        product = times[name].groupby(["layer", "tokens"]).min()
        products = (ours.index.get_level_values("n_masks") + 1) * product.reindex(ours.index.droplevel([2, 3])).array
        cells += ", " + (ours.microseconds / products).map(form("{:.2f}"))
    cells += ", " + (times["mglu, dense"].reindex(ours.index) / ours.microseconds).map(speedup)
    for layer, here in cells.reset_index(name="cell").groupby("layer", sort=False):
        yield grid(f"tokens, {layer}", in_order(here, ["tokens", "case"], "n_masks", here.cell))


@table("experts", "experts_fp8", "experts_int4", "experts_layer", "experts_layer_fp8")
def experts(rows: pd.DataFrame) -> Iterator[str]:
    """Layers of experts, with a line for each number of tokens.

    A cell has the microseconds, the launches if they were counted, the time as a multiple of the read ceiling, and the
    speed-up over the fastest SwiGLU.
    """
    rows["cell"] = shown(rows)
    if "launches" in rows:
        rows["cell"] += rows.launches.map(form(", {:.0f} launches"))
    for case, here in rows.groupby("case", sort=False):
        swiglu = fastest(here, "SwiGLU", "tokens")
        ours = here[here.variant.str.startswith("mglu")].join(swiglu.microseconds.rename("swiglu"), on="tokens")
        ours["cell"] += ", " + (1 / ours.fraction_of_ceiling).map(ratio)
        gains = ", " + (ours.swiglu / ours.microseconds).map(speedup)
        ours["cell"] += gains.where(ours.swiglu.notna(), "")
        ours["form"] = ours.n_masks.map("n_m = {}".format) + ours.variant.str.removeprefix("mglu")
        cells = in_order(ours, "tokens", "form", ours.cell)
        cells.insert(0, "fastest SwiGLU", swiglu.variant.str.extract("SwiGLU ([^,]*)")[0] + ": " + swiglu.cell)
        cells.insert(0, "experts in use", ours.groupby("tokens").experts_in_use.first().map(form("{:.0f}")))
        yield grid(f"tokens, {case}", cells)


@table("models")
def models(rows: pd.DataFrame) -> Iterator[str]:
    """One token through the layers of current models: the fastest SwiGLU, and ours with its speed-up."""
    ours = chosen(rows, swiglu=("SwiGLU", ["layer"])).droplevel("tokens")
    cells = (shown(ours) + ", " + (ours.swiglu / ours.microseconds).map(ratio)).unstack("n_masks")
    cells = cells.rename(columns="SwiMGLU, n_m = {}".format)
    cells.insert(0, "SwiGLU, us", fastest(rows, "SwiGLU", "layer").microseconds.map(us))
    lines = rows.drop_duplicates("layer")[["case", "layer"]].join(cells, on="layer").set_index(["case", "layer"])
    yield grid("layer of", lines.rename_axis(index={"layer": "d x h"}))


def title(layer: str, sequences: int) -> str:
    """A title such as `Llama-3.1 8B, 8 sequences`, from the size of the model's layers."""
    return f"{MODEL_OF.get(layer, layer)}, {many(sequences, 'sequence')}"


@table("decode_model", "decode_model_fp8")
def decode_model(rows: pd.DataFrame) -> Iterator[str]:
    """Tokens a second of whole models, from the fastest compilation of each."""
    for (layer, batch), here in rows.groupby(["layer", "tokens"], sort=False):
        best = fastest(here, ("SwiGLU", "SwiMGLU"), "n_masks")
        best = best.rename(lambda n_masks: f"SwiMGLU, n_m = {n_masks}" if n_masks else "SwiGLU")
        cells = {
            "MB of weights": best.weight_mb,
            "ms a step": (best.microseconds / 1000).map(form("{:.3f}")),
            "tokens a second": best.rate.map(whole),
            "over SwiGLU": (swiglu_time(here) / best.microseconds).map(speedup),
            "of reading": best.fraction_of_ceiling.map(form("{:.2f}")),
        }
        yield f"{title(layer, batch)}:\n\n{grid('feed-forward layer', cells)}"


@table("generate")
def generate(rows: pd.DataFrame) -> Iterator[str]:
    """Tokens a second of `generate` with each form of a model, by the number of sequences and masks."""
    for (_, layer, batch), here in rows.groupby(["out_features", "layer", "tokens"]):
        cells = in_order(here, "variant", "n_masks", shown(here, whole, "rate"))
        cells = cells.reindex(columns=sorted({0, *rows.n_masks}))
        yield grid(f"{title(layer, batch)}, tokens a second", cells.rename(columns={0: "without masks"}))


SERVED = {"start": "first start, s", "start_cached": "later start, s"}
"""Kinds of work of served models that are shown in seconds, without ratios -> their headings."""


def served_work(row: pd.Series) -> str:
    """The heading of a line of served models."""
    sequences = {"decode": f"{many(row.tokens, 'sequence')}, tokens a second", "prompts": "8 prompts of 1024, ms"}
    return {**SERVED, **sequences, "mixed": "mixed load, new tokens a second"}[row.work]


@table("serve")
def serve(rows: pd.DataFrame) -> Iterator[str]:
    """Served models: a line for each kind of work and a column for each form of the model.

    Ratios are to SwiGLU in the same engine: in vLLM's fp8 for forms whose weights have 8 bits, else in bfloat16. If a
    ratio differs from 1 by less than its spread, the spread stands beside it.
    """
    rows["line"] = rows.apply(served_work, axis="columns")
    rows["form"] = rows.variant + rows.n_masks.map(lambda n_masks: f", n_m = {n_masks}" if n_masks else "")
    is_fp8 = rows.variant.str.contains("fp8")
    rows["base"] = is_fp8.map({True: "SwiGLU, fp8", False: "SwiGLU"})
    rows["relative_spread"] = rows.spread / rows.microseconds
    swiglu = rows[rows.n_masks == 0].set_index(["model", "line", "variant"])[["microseconds", "relative_spread"]]
    rows = rows.join(swiglu.add_prefix("swiglu_"), on=["model", "line", "base"])
    seconds = rows.microseconds.map(lambda time: form("{:.0f}")(time / 1e6))
    figures = shown(rows, whole, "rate").where(~rows.work.isin([*SERVED, "prompts"]), seconds)
    figures = figures.where(rows.work != "prompts", shown(rows, ms))
    gains = (rows.swiglu_microseconds / rows.microseconds).where(~rows.work.isin(list(SERVED)))
    spreads = gains * (rows.relative_spread**2 + rows.swiglu_relative_spread**2) ** 0.5
    is_clear = (gains - 1).abs() >= spreads
    gains_text = gains.map(speedup).where(is_clear, gains.map(ratio) + spreads.map(form(" ± {:.2f}")))
    rows["text"] = figures + (", " + gains_text).where((rows.n_masks > 0) & gains.notna(), "")
    for model, here in rows.groupby("model", sort=False):
        cells = in_order(here, "line", "form", here.text)
        forms = here.sort_values(["base", "n_masks", "variant"], kind="stable").form.unique()
        yield grid(model, cells[list(forms)])


@table("serve_profile")
def serve_profile(rows: pd.DataFrame) -> Iterator[str]:
    """A step of served models by part, in microseconds, and what the layers' kernels alone let expect.

    The expected step is SwiGLU's without the time by which the kernels of the feed-forward layers differ. These kernels
    are in three of the parts, whose other kernels are the same in all forms of a model.
    """
    rows["form"] = rows.variant + rows.n_masks.map(lambda n_masks: f", n_m = {n_masks}" if n_masks else "")
    for (model, sequences), here in rows.groupby(["model", "sequences"], sort=False):
        parts = here.pivot_table("microseconds", "part", "form", aggfunc="sum", sort=False).fillna(0.0)
        layers = parts.reindex(["MGLU", "experts", "products", "norms, rotary embedding, activations"]).sum()
        parts.loc["**a step**"] = parts.sum()
        parts.loc["expected step"] = parts["SwiGLU"].loc["**a step**"] - layers["SwiGLU"] + layers
        yield grid(f"{model}, {many(sequences, 'sequence')}", parts.map(whole))


@table("sparse_mainloop")
def sparse_mainloop(rows: pd.DataFrame) -> Iterator[str]:
    """Milliseconds of gate and value in one layer, and how many times as fast they are as SwiGLU's dense product."""
    dense = rows[rows.variant == "SwiGLU, dense, torch.mm"].set_index("tokens").microseconds
    gains = rows.tokens.map(dense) / rows.microseconds
    cells = shown(rows, ms) + (", " + gains.map(speedup)).where(gains.notna() & (gains != 1), "")
    lines = in_order(rows, ["variant", "case"], "tokens", cells).rename(columns="T = {}".format)
    yield grid("14336 x 4096, ms", lines.rename_axis(index={"case": "computes"}))


@table("masks_at_inference", result="masks_at_inference_cuda")
def masks_at_inference(rows: pd.DataFrame) -> Iterator[str]:
    """Microseconds per call of a naive layer, for each way to fuse it."""
    cells = in_order(rows, ["variant", "packed"], "n_masks", shown(rows))
    yield grid("us a call", cells.rename_axis(index={"packed": "masks are made or packed"}))


@table("overheads")
def overheads(rows: pd.DataFrame) -> Iterator[str]:
    """The host's microseconds per call, and the microseconds of a kernel's first call in a process."""
    rows = rows.set_index(["variant", "tokens", "n_masks"])
    for case, here in rows.groupby("case", sort=False):
        yield grid(case, {"us": shown(here), "spread, us": here.spread.map(us)})


def with_one_rank(rows: pd.DataFrame) -> pd.DataFrame:
    """Add two columns: `is_one`, true if one rank ran, and `one`, the microseconds of one rank for the same work."""
    problem = ["layer", "case", "tokens", "n_masks"]
    rows = rows.assign(is_one=rows.variant == rows.variant.iloc[0])
    return rows.join(rows[rows.is_one].set_index(problem).microseconds.rename("one"), on=problem)


@table("tensor_parallel")
def tensor_parallel(rows: pd.DataFrame) -> Iterator[str]:
    """Microseconds per layer on one rank and on several, and the speed-up of several ranks over one."""
    several = with_one_rank(rows).query("not is_one").sort_values("tokens", kind="stable")
    gain = (several.one / several.microseconds).map(speedup).where(several.microseconds.notna(), "")
    cell = several.one.map(us) + ", " + shown(several) + ": " + gain
    lines = in_order(several, ["layer", "case", "tokens", "variant"], "n_masks", cell)
    lines = lines.rename_axis(index={"case": "work", "variant": "on"})
    yield grid("out x in", lines.rename(columns="one rank, several, us: n_m = {}".format))


@table("parallelism", result="tensor_parallel")
def parallelism(rows: pd.DataFrame) -> Iterator[str]:
    """The fastest variant for each layer and number of tokens, on one rank or several, and its gain over one rank."""
    problem = ["layer", "case", "n_masks", "tokens"]
    best = with_one_rank(rows).sort_values("microseconds", kind="stable").drop_duplicates(problem).sort_index()
    cell = best.variant.where(best.is_one, best.variant + ": " + (best.one / best.microseconds).map(ratio))
    lines = in_order(best, problem[:3], "tokens", cell).sort_index(axis="columns").rename(columns="T = {}".format)
    yield grid("out x in", lines.rename_axis(index={"case": "work"}))


@table("cpu_one_token", "cpu_one_token_xeon", "cpu_tokens", "cpu_tokens_xeon", "cpu_tokens_zen4")
def cpu(rows: pd.DataFrame) -> Iterator[str]:
    """The least times of each problem in microseconds, and speed-ups."""
    problem = ["dtype", "tokens", "n_masks"]
    variants = (rows[rows.variant == name] for name in ("mglu cpu", "read loop", "naive compiled"))
    ours, reading, naive = (variant.set_index(problem) for variant in variants)
    swiglu = fastest(rows, "SwiGLU", problem).microseconds.reindex(ours.index)
    least, median = ((reading[time] / ours[time]).map("{:.2f}".format) for time in ("microseconds", "median"))
    cells = {
        "only reading": reading.microseconds.map(us),
        "mglu_ops": ours.microseconds.map(us) + " (" + ours.isa + ")",
        "fraction of reading (least, median)": least + ", " + median,
        "naive compiled": naive.microseconds.map(us),
        "speed-up": (naive.microseconds / ours.microseconds).map(speedup),
        "fastest SwiGLU": swiglu.map(us),
        "speed-up over SwiGLU": (swiglu / ours.microseconds).map(speedup),
    }
    yield grid("dtype", pd.DataFrame(cells).replace("", None).dropna(axis="columns", how="all"))


@table("cpu_formats")
def cpu_formats(rows: pd.DataFrame) -> Iterator[str]:
    """Median microseconds for one token, and the speed-up of 8-bit weights over weights in x's dtype."""
    times = in_order(rows, ["dtype", "n_masks"], "variant", rows["median"])
    dense = times["mglu cpu"]
    cells = {"only reading in x's dtype": times["read loop"].map(us), "W in x's dtype": dense.map(us)}
    for name in (name for name in times.columns if name.startswith("mglu cpu ")):
        cells[name.split()[-1]] = times[name].map(us) + ", " + (dense / times[name]).map(speedup)
    yield grid("x", cells)


@table("compile_time")
def compile_time(rows: pd.DataFrame) -> Iterator[str]:
    """Seconds to compile a model, and the fusion pass's share of that time."""
    variants = ["naive compiled", "compiled", "traced", "fused", "pass"]
    seconds = in_order(rows, "case", "variant", rows.microseconds).reindex(columns=variants) / 1e6
    without = seconds["naive compiled"].fillna(seconds.compiled).fillna(seconds.traced)
    # Tracing is only a part of compiling. If a model was only traced, compiling it takes more than the measured time,
    # and the pass's share is less than the measured one.
    more, less = (seconds.traced.notna().map({True: word, False: ""}) for word in ("more than ", "less than "))
    cells = {
        "without fusion, s": more + without.map("{:.1f}".format),
        "with fusion, s": seconds.fused.map(form("{:.1f}")),
        "the pass, ms": (1000 * seconds["pass"]).map("{:.1f}".format),
        "the pass, of the time without": less + (seconds["pass"] / without).map("{:.2%}".format),
    }
    yield grid("model", cells)


@table("packages")
def packages(rows: pd.DataFrame) -> Iterator[str]:
    """Microseconds per layer of a package that a C++ program runs."""
    rows["us a layer"] = rows.pop("microseconds").map(us)
    yield grid("a layer is called by", rows.set_index("variant"))


# --- Training ---------------------------------------------------------------------------------------------------------

TRAINED = ["layer", "tokens", "n_masks"]
NAMES = {NAIVE: "naive", TRICK: "five lines", SWIGLU: "SwiGLU", FUSED: "fused"}
TIMES = {**NAMES, OPERATOR: "operator", MODULE: "module", GEMMS: "GEMMs alone"}
"""Name of a variant -> its heading."""


@table("train", "train_cpu")
def train(rows: pd.DataFrame) -> Iterator[str]:
    """Times, errors and, on a GPU, peak memory of a training step of one layer."""
    # SwiGLU is measured once for all numbers of masks, and shown for each number.
    swiglu = rows[rows.variant == SWIGLU].drop(columns="n_masks")
    swiglu = swiglu.merge(rows[TRAINED].drop_duplicates(), on=["layer", "tokens"])
    every = pd.concat([rows[rows.variant != SWIGLU], swiglu], ignore_index=True)
    every["ms"], every["mb"] = shown(every, ms), every.peak_mb.map(whole).where(every.peak_mb.notna(), every.left_out)
    wide = every.pivot(index=TRAINED, columns="variant")
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
        yield errors_of_training(rows)


def errors_of_training(rows: pd.DataFrame) -> str:
    """The largest errors of the naive and the fused layer, and the largest ratio of the fused to the naive error."""
    found = rows.dropna(subset="errors").set_index(TRAINED)
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


@table("fsdp")
def fsdp(rows: pd.DataFrame) -> Iterator[str]:
    """A training step of models that FSDP2 divides: tokens a second, peak memory, and what communication adds.

    "alone" is the same forward and backward pass of the whole model on each GPU, without communication.
    """
    for (case, sequences), here in rows.groupby(["case", "sequences"], sort=False):
        line = here.set_index(here.n_masks.map(lambda n_masks: f"SwiMGLU, n_m = {n_masks}" if n_masks else "SwiGLU"))
        rate = line.tokens_per_second
        gain = ", " + (rate / rate["SwiGLU"]).map(speedup)
        backward, alone, kernels = (line[f"{of}_us"] / 1000 for of in ("backward", "alone", "communication"))
        cells = {
            "tokens a second": rate.map(whole) + gain.where(line.n_masks > 0, ""),
            "GB": (line.peak_mb / 1000).map(form("{:.1f}")),
            "forward and backward, ms": backward.map(whole),
            "alone, ms": alone.map(whole),
            "difference, ms": (backward - alone).map(whole),
            "kernels of communication, ms": kernels.map(whole),
        }
        yield grid(f"{case}, {many(sequences, 'sequence')} a GPU", cells)
