"""Plots of the training runs with the corpus `python`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from benchmarks import plots
from benchmarks.learning.comparisons import ERRORS, GELU, PAPERS, Study
from benchmarks.learning.experiments import BEST, LARGER, SWIGLU
from benchmarks.learning.recipe import Recipe
from benchmarks.learning.tables import by_recipe, curves, is_leveled, label, runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = {
    GELU: plots.CEILING,
    SWIGLU: plots.SWIGLU,
    **{one: plots.BY_MASKS[n_masks]._replace(marker="") for n_masks, one in PAPERS.items()},
}
"""The layers of the paper's learning curves. Each one that was trained is drawn, with its first seed."""


def learning_curves(results: Path) -> Figure:
    """The held-out loss by text read: after the first tenth, and enlarged for the second half."""
    figure, panels = plots.figure_of(2, 2.6, sharex=False)
    first, points = by_recipe(runs(results)).run, curves(results)
    for axes, share in zip(panels, (0.1, 0.5), strict=True):
        for recipe, style in STYLES.items():
            shown = points[(points.run == first.get(recipe)) & (points.megabytes >= share * recipe.megabytes)]
            plots.draw_line(axes, label(recipe), style, zip(shown.megabytes, shown.held_out, strict=True))
        axes.set_ylabel("held out, nats a byte")
    panels[-1].set_xlabel("training text, MB")
    plots.draw_legend(figure, panels[0])
    return figure


def by_masks(results: Path) -> Figure:
    """The final loss by number of masks, with the paper's recipe and with ours; a bar spans the seeds."""
    figure, (axes,) = plots.figure_of(1, 3.2)
    losses = {one: of.held_out for one, of in runs(results).groupby("recipe", sort=False)}
    for name, recipes, style in (("the paper's recipe", PAPERS, plots.EAGER), ("our recipe", BEST, plots.CUDA)):
        points = {n_masks: losses[one] for n_masks, one in recipes.items() if one in losses}
        plots.draw_line(axes, name, style, [(n_masks, of.mean()) for n_masks, of in points.items()])
        for n_masks, of in points.items():
            axes.plot([n_masks, n_masks], [of.min(), of.max()], color=style.color, linewidth=1)
    for name, one, linestyle in (("SwiGLU", SWIGLU, "-."), ("scaled SwiGLU", LARGER, ":")):
        if one in losses:
            style = plots.SWIGLU._replace(linestyle=linestyle)
            plots.draw_line(axes, name, style, [(n_masks, losses[one].mean()) for n_masks in PAPERS])
    axes.set_ylabel("held out, nats a byte")
    plots.powers_of_two(axes, "masks", list(PAPERS))
    plots.draw_legend(figure, axes)
    return figure


FAMILIES = {
    "GLU, any gate": ("glu", plots.Style(plots.SWIGLU.color, "D")),
    "ReLU squared": ("lu", plots.Style("#000000", "x")),
    **{f"{label(best)}, any gate": (n_masks, plots.BY_MASKS[n_masks]) for n_masks, best in BEST.items()},
}
"""The legend of the Pareto plot: the name of a family to its layer, or to its number of masks, and to its style."""


def is_pareto(recipe: Recipe) -> bool:
    """True if a recipe is in the Pareto plot: a layer that a user may choose, trained as we recommend.

    These are layers of the families with any gate and any width, with leveled initial weights or with `nn.Linear`'s.
    Not in the plot: the searches for our recipe, masks that learn otherwise, routes, mixtures, other lengths of text
    and converted models.
    """
    rate = 0.3 if recipe.layer == "mglu" else 1.0
    free = {name: getattr(recipe, name) for name in ("activation", "width", "size", "weight_gain")}
    is_plain = recipe == Recipe(recipe.layer, recipe.n_masks, mask_lr=rate, **free)
    is_shown = recipe.layer == "glu" or (recipe.layer, recipe.activation) == ("lu", "relu_squared")
    return is_plain and (is_shown or (recipe.layer == "mglu" and is_leveled(recipe)))


def pareto_points(results: Path, size: str) -> pd.DataFrame:
    """The points of a model's size: recipe, megabytes a token, PFLOP of training, loss, and two standard errors."""
    of, study = by_recipe(runs(results)), Study(results)
    of = of[[one.size == size and is_pareto(one) for one in of.index]]
    noise = ERRORS * study.deviations[size] / study.unit / of.seeds.map(math.sqrt)
    columns = {"megabytes": of.load, "pflop": of.tflop / 1000, "loss": of.held_out, "noise": noise}
    return pd.DataFrame(columns).rename_axis("recipe").reset_index()


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other point beats in one coordinate without being worse in the other, by the first one."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best


def pareto(results: Path) -> Figure:
    """The held-out loss by bytes read a token and by training operations, with the best layer for each cost."""
    figure, panels = plots.figure_of(4, 3.0, sharex=False, columns=2)
    sizes, costs = ("25M", "90M"), {"megabytes": "MB read a token", "pflop": "PFLOP of training"}
    for axes, (cost, size) in zip(panels, product(costs, sizes), strict=True):
        points = pareto_points(results, size)
        points = points.assign(family=[one.n_masks if one.has_masks else one.layer for one in points.recipe])
        for name, (family, style) in FAMILIES.items():
            own = points[points.family == family]
            look: Any = {"color": style.color, "marker": style.marker, "markersize": 4, "linestyle": "none"}
            axes.errorbar(own[cost], own.loss, own.noise, elinewidth=0.4, label=name, **look)
        best = frontier(zip(points[cost], points.loss, strict=True))
        if best:
            axes.step(*zip(*best, strict=True), where="post", label="lowest loss at no higher cost", **plots.THIN)
        axes.set(title=f"{size} weights with SwiGLU", xlabel=costs[cost], ylabel="held out, nats a byte")
        if cost == "pflop":
            axes.set_xscale("log")
            ticks = sorted({round(one) for one in points.pflop})
            axes.set_xticks(ticks, map(str, ticks))
            axes.minorticks_off()
    plots.draw_legend(figure, panels[0])
    return figure


PLOTS = {
    "learning_curves": learning_curves,
    "learning_by_masks": by_masks,
    "learning_pareto": pareto,
}
"""Name of a plot to the function that draws it from the folder of the results."""


def draw(results: Path, out: Path) -> list[Path]:
    """Draw every plot into the folder `out`, as SVG.

    Raises:
        FileNotFoundError: no run is finished.
    """
    return [plots.save(picture, [results], out / f"{name}.svg") for name, picture in PLOTS.items()]
