"""Plots of the results. They depend on nothing but the CSV files, so the same files give the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from benchmarks.ceiling import GEMM
from benchmarks.frames import load
from benchmarks.tables import ONE_TOKEN, chosen, one_token_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.0
"""Width of a panel in inches. Phones show this width without shrinking the text."""
RC: Any = {
    "font.size": 9,
    "axes.grid": True,
    "axes.grid.which": "major",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "figure.facecolor": "white",  # keeps dark text readable on dark pages
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.markersize": 5,
    "svg.fonttype": "none",  # text is stored as text, not as outlines
    "svg.hashsalt": "mglu_ops",
}


class Style(NamedTuple):
    """A colour of Okabe and Ito's palette, which is safe for the colour-blind, with a marker and a line style."""

    color: str
    marker: str
    linestyle: str = "-"


CEILING = Style("#000000", "", "--")
CUDA = Style("#0072B2", "o")
TRITON = Style("#009E73", "s")
THIN: Any = {"color": CEILING.color, "linestyle": CEILING.linestyle, "linewidth": 1}
"""Style of a thin dashed line, such as the line at a ratio of 1."""
SWIGLU = Style("#CC79A7", "", "-.")
COMPILED = Style("#E69F00", "^")
EAGER = Style("#D55E00", "v")
BY_MASKS = {1: CUDA, 2: Style("#56B4E9", "P"), 4: COMPILED, 8: TRITON, 16: EAGER}


def figure_of(panels: int, height: float, sharex: bool = True, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, row by row. `height` is the height of a panel in inches."""
    from matplotlib.figure import Figure

    lines = panels // columns
    figure = Figure(figsize=(WIDTH * columns, height * lines), layout="constrained")
    axes = figure.subplots(lines, columns, sharex=sharex, squeeze=False)
    return figure, list(axes.flat)


def draw_line(axes: Axes, label: str, style: Style, points: Iterable[tuple[float, float]]) -> None:
    """Draw a line with a label, if it has points."""
    if line := list(points):
        axes.plot(*zip(*line, strict=True), label=label, **style._asdict())


def powers_of_two(axes: Axes, label: str, ticks: Iterable[int]) -> None:
    """Make the x axis logarithmic, with a tick for each number in `ticks` except 0 (layers without masks)."""
    ticks = sorted({*ticks} - {0})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_xlabel(label)


def draw_legend(figure: Figure, *panels: Axes) -> None:
    """Draw one legend below all panels, with the labels of some panels."""
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=2)


BY_LABEL = dict(zip(ONE_TOKEN, (CEILING, CUDA, TRITON, COMPILED, EAGER), strict=True))


def latency_by_masks(rows: pd.DataFrame) -> Figure:
    """The time of one token by number of masks, with a panel for each shape."""
    layers = rows.groupby("layer", sort=False)
    figure, panels = figure_of(len(layers), 2.8)
    for axes, (layer, here) in zip(panels, layers, strict=True):
        for label, column in one_token_times(here).items():
            draw_line(axes, label, BY_LABEL.get(label, SWIGLU), column.dropna().items())
        axes.set(yscale="log", ylabel="us a layer", title=f"one token, {layer}")
        axes.yaxis.set_major_formatter("{x:g}")
    powers_of_two(panels[-1], "masks", rows.n_masks)
    draw_legend(figure, panels[0])
    return figure


def speedup_over_swiglu(rows: pd.DataFrame) -> Figure:
    """The speed-up over the fastest SwiGLU by number of tokens, with a panel for each shape."""
    ours = chosen(rows, swiglu=("SwiGLU", ["layer", "tokens"]))
    speedup = (ours.swiglu / ours.microseconds).dropna()
    layers = rows.layer.unique()
    figure, panels = figure_of(len(layers), 3.2)
    for axes, layer in zip(panels, layers, strict=True):
        for n_masks, line in speedup.loc[layer].groupby("n_masks"):
            draw_line(axes, f"n_m = {n_masks}", BY_MASKS[n_masks], line.droplevel("n_masks").items())
        axes.axhline(1, **THIN)
        axes.set(ylim=(0, None), ylabel="speed-up over SwiGLU", title=layer)
    powers_of_two(panels[-1], "tokens", rows.tokens)
    panels[-1].tick_params(axis="x", labelrotation=45)
    draw_legend(figure, panels[0])
    return figure


def roofline(rows: pd.DataFrame) -> Figure:
    """The rate in TFLOP/s over the FLOP per byte: a line for each number of masks, and a panel for each shape.

    The sloped roof is the highest rate at which the kernel of the read ceiling reads. The flat roof is the rate of
    `ceiling.gemm`.
    """
    products = 2 * (rows.n_masks + 1) * rows.tokens  # FLOP per element of W
    rows = rows.assign(
        intensity=products / (2 + rows.n_masks / 8),  # FLOP per byte of W (16 bits) and masks
        teraflops=1e-6 * products * rows.out_features * rows.in_features / rows.microseconds,
    )
    layers = rows.groupby("layer", sort=False)
    figure, panels = figure_of(len(layers), 3.2)
    for axes, (layer, here) in zip(panels, layers, strict=True):
        ours = here[(here.variant == "mglu cuda") & here.microseconds.notna()]
        reading, gemm = here[here.variant == "read ceiling"], here[here.variant == GEMM]
        least, most = ours.intensity.min(), ours.intensity.max()
        slope = (reading.teraflops / reading.intensity).max()
        ridge = most if gemm.empty else gemm.tflops.median() / slope
        draw_line(axes, "read ceiling", CEILING, [(x, slope * x) for x in (least, ridge)])
        if not gemm.empty:
            draw_line(axes, GEMM, SWIGLU, [(x, slope * ridge) for x in (ridge, most)])
        for n_masks, line in ours.groupby("n_masks"):
            points = zip(line.intensity, line.teraflops, strict=True)
            draw_line(axes, f"n_m = {n_masks}", BY_MASKS[n_masks], points)
        axes.set(xscale="log", yscale="log", ylabel="TFLOP/s", title=layer)
    panels[-1].set_xlabel("FLOP a byte of weights and masks")
    draw_legend(figure, panels[0])
    return figure


def draw_bars(axes: Axes, figures: pd.DataFrame, labels: pd.DataFrame) -> None:
    """Draw a group of bars for each row of `figures`, with a bar for each column: a number of masks, 0 for SwiGLU."""
    height = 0.8 / figures.shape[1]
    for i, (n_masks, column) in enumerate(figures.items()):
        places = [line + (i - (figures.shape[1] - 1) / 2) * height for line in range(len(figures))]
        name = f"{n_masks} mask{'s' if n_masks > 1 else ''}" if n_masks else "SwiGLU"
        bars = axes.barh(places, column, height, label=name, color=(BY_MASKS[n_masks] if n_masks else SWIGLU).color)
        axes.bar_label(bars, labels[n_masks], padding=2, fontsize=7)
    axes.set_yticks(range(len(figures)), figures.index, fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.25)  # makes room for the labels


def layer_and_model(layers: pd.DataFrame, served: pd.DataFrame) -> Figure:
    """One token: the speed-up of the layers of current models over SwiGLU, and tokens a second of served models."""
    figure, (left, right) = figure_of(2, 3.6, sharex=False, columns=2)
    ours = chosen(layers, swiglu=("SwiGLU", ["layer"])).droplevel("tokens")
    names = layers.drop_duplicates("layer").set_index("layer").case.str.replace(", ", "\n")
    speedups = (ours.swiglu / ours.microseconds).unstack("n_masks").loc[names.index]
    draw_bars(left, speedups.set_axis(names + "\n" + names.index), speedups.map("{:.2f}x".format))
    left.axvline(1, **THIN)
    left.set(xlabel="speed-up over the fastest SwiGLU (dashed)", title="the gated projection of one layer")

    steps = served[(served.work == "decode") & (served.tokens == 1)]
    formats = steps.variant.str.extract(", (.*)", expand=False)  # such as fp8
    steps = steps.assign(name=steps.model + ("\n" + formats).fillna(""))
    rates = steps.pivot_table("rate", "name", "n_masks", sort=False).sort_index(axis="columns")
    rates = rates[rates[0].notna()]  # formats that SwiGLU has too
    labels = rates.map("{:.0f}".format) + rates.div(rates[0], axis="index").map(", {:.2f}x".format)
    draw_bars(right, rates, labels)
    right.set(xlabel="tokens a second, and their ratio to SwiGLU's", title=f"a model in vLLM {served.attrs['vllm']}")

    devices = sorted({layers.attrs["device"], served.attrs["device"]})
    figure.suptitle(", ".join([*devices, *sorted({*layers["dtype"], *served["dtype"]}), "one token at a time"]))
    draw_legend(figure, right, left)
    return figure


PLOTS: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {
    "layer_and_model": (("models", "serve"), layer_and_model),
    "latency_by_masks": (("one_token",), latency_by_masks),
    "speedup_over_swiglu": (("routes",), speedup_over_swiglu),
    "roofline": (("tokens",), roofline),
}
"""Name of a plot -> the results that it shows, and the function that draws the plot from their rows."""


def source(results: Path, *names: str) -> str:
    """The metadata of a plot: the names of its results, and the digests of their bytes."""
    digests = {name: hashlib.sha256((results / f"{name}.csv").read_bytes()).hexdigest() for name in names}
    return ", ".join(f"{name}.csv sha256 {digest}" for name, digest in digests.items())


def draw(results: Path, out: Path) -> list[Path]:
    """Draw every plot whose results are in `results` into the folder `out`, as SVG.

    Raises:
        FileNotFoundError: no results were found.
    """
    paths = []
    for name, (tables, picture) in PLOTS.items():
        with suppress(FileNotFoundError):
            rows = [load(results, table) for table in tables]
            paths.append(save(picture, rows, out / f"{name}.svg", source(results, *tables)))
    if not paths:
        raise FileNotFoundError(f"{results}: no results are here to draw from; measure some first")
    return paths


def save(picture: Callable[..., Figure], rows: Sequence[Any], path: Path, source: str | None = None) -> Path:
    """Draw a picture of `rows` into an SVG file. Its metadata name the source but no date and no version."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(RC):
        picture(*rows).savefig(path, metadata={"Date": None, "Creator": None, "Source": source})
    return path
