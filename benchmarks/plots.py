"""Plots of the results, drawn from nothing but the CSV files: the same files give the same bytes."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from benchmarks.ceiling import GEMM
from benchmarks.records import Row, read
from benchmarks.rows import chosen, fastest, masks, only, shapes, tokens
from benchmarks.tables import ONE_TOKEN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_T = TypeVar("_T")

WIDTH = 5.0
"""Width of a plot in inches, which a phone shows without making the text smaller."""
RC: Any = {
    "font.size": 9,
    "axes.grid": True,
    "axes.grid.which": "major",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "figure.facecolor": "white",  # also where the page is dark
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.markersize": 5,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mglu_ops",
}


class Style(NamedTuple):
    """A colour of Okabe and Ito's palette, which is safe for the colour-blind, and a marker and a line style."""

    color: str
    marker: str
    linestyle: str = "-"


CEILING = Style("#000000", "", "--")
CUDA = Style("#0072B2", "o")
TRITON = Style("#009E73", "s")
SWIGLU = Style("#CC79A7", "", "-.")
COMPILED = Style("#E69F00", "^")
EAGER = Style("#D55E00", "v")
BY_MASKS = {
    1: CUDA,
    2: Style("#56B4E9", "P"),
    4: COMPILED,
    8: TRITON,
    16: EAGER,
}


def figure_of(panels: int, height: float, sharex: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure, and its panels from top to bottom, of a height in inches each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height * panels), layout="constrained")
    axes = figure.subplots(panels, sharex=sharex, squeeze=False)
    return figure, list(axes[:, 0])


def draw_line(axes: Axes, label: str, style: Style, points: Sequence[tuple[float, float]]) -> None:
    """Draw a line with a label, if it has points."""
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style._asdict())


def powers_of_two(axes: Axes, label: str, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel(label)


def draw_legend(figure: Figure, axes: Axes) -> None:
    """Draw one legend below all panels, with the labels of a panel."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)


BY_VARIANT = {
    "read ceiling": CEILING,
    "mglu cuda": CUDA,
    "mglu triton": TRITON,
    "naive compiled": COMPILED,
    "naive eager": EAGER,
}


def latency_by_masks(rows: Sequence[Row]) -> Figure:
    """The time of one token by number of masks, with a panel for each shape."""
    figure, panels = figure_of(len(shapes(rows)), 2.8)
    for axes, shape in zip(panels, shapes(rows), strict=True):
        here = only(rows, shape=shape)
        for label, variant in ONE_TOKEN.items():
            best = [(count, fastest(only(here, n_masks=count), variant)) for count in masks(here)]
            draw_line(axes, label, BY_VARIANT[variant], [(count, row.microseconds) for count, row in best if row])
        if swiglu := fastest(here, "SwiGLU"):
            draw_line(axes, "SwiGLU, fastest", SWIGLU, [(count, swiglu.microseconds) for count in masks(here)])
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylabel("us a layer")
        axes.set_title(f"one token, {shape[0]} x {shape[1]}")
    powers_of_two(panels[-1], "masks", masks(rows))
    draw_legend(figure, panels[0])
    return figure


def fraction_of_ceiling(rows: Sequence[Row]) -> Figure:
    """The time to read the bytes divided by the time of each backend, by number of masks."""
    figure, (axes,) = figure_of(1, 3.2)
    dashes = dict(zip(shapes(rows), ("-", ":"), strict=False))
    for backend, style in (("CUDA", CUDA), ("Triton", TRITON)):
        for shape, linestyle in dashes.items():
            found = only(rows, shape=shape, variant=f"mglu {backend.lower()}")
            points = [(row.n_masks, row.fraction_of_ceiling) for row in found if not row.is_wrong]
            draw_line(axes, f"{backend}, {shape[0]} x {shape[1]}", style._replace(linestyle=linestyle), points)
    axes.set_ylim(0, 1.05)
    axes.axhline(1, color=CEILING.color, linestyle=CEILING.linestyle, linewidth=1)
    axes.set_ylabel("of the read ceiling")
    axes.set_title("one token")
    powers_of_two(axes, "masks", masks(rows))
    draw_legend(figure, axes)
    return figure


def speedup_over_swiglu(rows: Sequence[Row]) -> Figure:
    """The time of the fastest SwiGLU divided by ours, by number of tokens, with a panel for each shape."""
    figure, panels = figure_of(len(shapes(rows)), 3.2)
    for axes, shape in zip(panels, shapes(rows), strict=True):
        here = only(rows, shape=shape)
        for n_masks in masks(here):
            points = []
            for count in tokens(here):
                ours = chosen(only(here, n_masks=n_masks, tokens=count))
                swiglu = fastest(only(here, tokens=count), "SwiGLU")
                if ours and swiglu and not ours.is_wrong:
                    points.append((count, swiglu.microseconds / ours.microseconds))
            draw_line(axes, f"n_m = {n_masks}", BY_MASKS[n_masks], points)
        axes.axhline(1, color=CEILING.color, linestyle=CEILING.linestyle, linewidth=1)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("speed-up over SwiGLU")
        axes.set_title(f"{shape[0]} x {shape[1]}")
    powers_of_two(panels[-1], "tokens", tokens(rows))
    panels[-1].tick_params(axis="x", labelrotation=45)
    draw_legend(figure, panels[0])
    return figure


def intensity(row: Row) -> float:
    """Arithmetic operations per byte of W and masks, for n_m + 1 products of every token with W."""
    return 2 * (row.n_masks + 1) * row.tokens / (2 + row.n_masks / 8)


def teraflops(row: Row) -> float:
    """The rate of a row's n_m + 1 products, in TFLOP/s."""
    return 2e-6 * (row.n_masks + 1) * row.tokens * row.out_features * row.in_features / row.microseconds


def roofline(rows: Sequence[Row]) -> Figure:
    """The rate by operations per byte, for each number of masks and tokens, with a panel for each shape.

    The roofs are the highest rate at which the kernel of the read ceiling reads, and the rate of the library's GEMMs.
    """
    figure, panels = figure_of(len(shapes(rows)), 3.2)
    for axes, shape in zip(panels, shapes(rows), strict=True):
        here = only(rows, shape=shape)
        ours = [row for row in here if row.variant == "mglu cuda" and not row.is_wrong]
        least, most = min(map(intensity, ours)), max(map(intensity, ours))
        slope = max(teraflops(row) / intensity(row) for row in only(here, variant="read ceiling"))
        rates = [float(str(row.extra["tflops"])) for row in only(here, variant=GEMM)]
        ridge = statistics.median(rates) / slope if rates else most
        draw_line(axes, "read ceiling", CEILING, [(x, slope * x) for x in (least, ridge)])
        if rates:
            draw_line(axes, GEMM, SWIGLU, [(x, slope * ridge) for x in (ridge, most)])
        for n_masks in masks(ours):
            points = [(intensity(row), teraflops(row)) for row in only(ours, n_masks=n_masks)]
            draw_line(axes, f"n_m = {n_masks}", BY_MASKS[n_masks], points)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylabel("TFLOP/s")
        axes.set_title(f"{shape[0]} x {shape[1]}")
    panels[-1].set_xlabel("FLOP a byte of weights and masks")
    draw_legend(figure, panels[0])
    return figure


def speedup_by_model(rows: Sequence[Row]) -> Figure:
    """The time of the fastest SwiGLU divided by ours for one token, for the layers of each model."""
    figure, (axes,) = figure_of(1, 3.6)
    counts = masks(rows)
    height = 0.8 / len(counts)
    labels = []
    for line, shape in enumerate(shapes(rows)):
        here = only(rows, shape=shape)
        labels.append(f"{here[0].case.replace(', ', chr(10))}\n{shape[0]} x {shape[1]}")
        swiglu = fastest(here, "SwiGLU")
        for i, n_masks in enumerate(counts):
            ours = chosen(only(here, n_masks=n_masks))
            if swiglu is None or ours is None or ours.is_wrong:
                continue
            speedup = swiglu.microseconds / ours.microseconds
            label = f"{n_masks} mask{'s' if n_masks > 1 else ''}" if line == 0 else None
            y = line + (i - (len(counts) - 1) / 2) * height
            axes.barh(y, speedup, height, label=label, color=BY_MASKS[n_masks].color)
            axes.text(speedup + 0.02, y, f"{speedup:.2f}x", va="center", fontsize=7)
    axes.axvline(1, color=CEILING.color, linestyle=CEILING.linestyle, linewidth=1)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("speed-up over the fastest SwiGLU (dashed)")
    axes.set_title("one token through the gated projection")
    draw_legend(figure, axes)
    return figure


PLOTS: dict[str, tuple[str, Callable[[Sequence[Row]], Figure]]] = {
    "latency_by_masks": ("one_token", latency_by_masks),
    "fraction_of_ceiling": ("one_token", fraction_of_ceiling),
    "speedup_by_model": ("models", speedup_by_model),
    "speedup_over_swiglu": ("routes", speedup_over_swiglu),
    "roofline": ("tokens", roofline),
}
"""Name of a plot to the result that it shows and the function that draws it."""


def source(results: Path, table: str) -> str:
    """The metadata of a plot that names its result and the digest of the result's bytes."""
    digest = hashlib.sha256((results / f"{table}.csv").read_bytes()).hexdigest()
    return f"{table}.csv sha256 {digest}"


def draw(results: Path, out: Path) -> list[Path]:
    """Draw every plot whose result is in `results` into the folder `out`, as SVG.

    Raises:
        FileNotFoundError: there are no results.
    """
    paths = []
    for name, (table, picture) in PLOTS.items():
        if rows := read(results, table):
            paths.append(save(picture, rows, out / f"{name}.svg", source(results, table)))
    if not paths:
        raise FileNotFoundError(f"{results}: no results are here to draw from; measure some first")
    return paths


def save(picture: Callable[[_T], Figure], rows: _T, path: Path, source: str | None = None) -> Path:
    """Draw a picture of rows into an SVG file, whose metadata name the source and nothing that changes."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(RC):
        picture(rows).savefig(path, metadata={"Date": None, "Creator": None, "Source": source})
    return path
