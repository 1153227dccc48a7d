"""Plots of the training runs with the corpora `python` and `pinned`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from benchmarks import plots
from benchmarks.frames import many
from benchmarks.learning.comparisons import ERRORS, Difference, Study, difference, losses_of, same_text
from benchmarks.learning.experiments import BEST, DISTILLED, LARGER, PAPER, SLOW, STRUCTURE, SWIGLU, converted, masks
from benchmarks.learning.gather import RESULTS
from benchmarks.learning.recipe import Recipe
from benchmarks.learning.tables import by_recipe, is_leveled, runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def by_masks(results: Path) -> Figure:
    """The final loss by number of masks, with the paper's recipe and with ours. Bars span the losses of the seeds."""
    figure, (axes,) = plots.figure_of(1, 3.2)
    losses = losses_of(runs(results))
    lines = (("the paper's recipe", masks(PAPER, BEST), plots.EAGER), ("our recipe", BEST.values(), plots.CUDA))
    for name, recipes, style in lines:
        points = {one.n_masks: losses[one] for one in recipes if one in losses}
        plots.draw_line(axes, name, style, [(n_masks, of.mean()) for n_masks, of in points.items()])
        for n_masks, of in points.items():
            axes.plot([n_masks, n_masks], [of.min(), of.max()], color=style.color, linewidth=1)
    for name, one, linestyle in (("SwiGLU", SWIGLU, "-."), ("scaled SwiGLU", LARGER, ":")):
        if one in losses:
            style = plots.SWIGLU._replace(linestyle=linestyle)
            plots.draw_line(axes, name, style, [(n_masks, losses[one].mean()) for n_masks in BEST])
    axes.set_ylabel("held out, nats a byte")
    plots.powers_of_two(axes, "masks", BEST)
    plots.draw_legend(figure, axes)
    return figure


FAMILIES = {
    "GLU, any gate": plots.Style(plots.SWIGLU.color, "D"),
    "ReLU squared": plots.Style("#000000", "x"),
    **{f"{many(n_masks, 'mask')}, any gate": plots.BY_MASKS[n_masks] for n_masks in BEST},
}
"""Family of layers in the Pareto plot -> its style."""


def family(recipe: Recipe) -> str | None:
    """The family of a recipe in the Pareto plot, or None if the plot leaves the recipe out.

    The plot shows layers of any gate and width that are trained as we recommend. Masks start with leveled weights, and
    other layers with leveled weights or `nn.Linear`'s own. The searches for our recipe, masks that learn in another
    way, routes, mixtures, other lengths of text and converted models are left out.
    """
    free = {name: getattr(recipe, name) for name in ("activation", "width", "size", "weight_gain")}
    rate = SLOW.mask_lr if recipe.layer == "mglu" else Recipe.mask_lr
    if recipe != Recipe(recipe.layer, recipe.n_masks, mask_lr=rate, **free):
        return None
    if recipe.layer == "mglu" and is_leveled(recipe):
        return f"{many(recipe.n_masks, 'mask')}, any gate"
    if (recipe.layer, recipe.activation) == ("lu", "relu_squared"):
        return "ReLU squared"
    return "GLU, any gate" if recipe.layer == "glu" else None


def pareto_points(results: Path, size: str) -> pd.DataFrame:
    """The points of models of a size: family, MB read per token, PFLOP of training, loss, and two standard errors."""
    of, study = by_recipe(runs(results)), Study(results)
    noise = ERRORS * study.deviations[size] / study.unit / of.seeds.map(math.sqrt)
    columns = {"megabytes": of.load, "pflop": of.tflop / 1000, "loss": of.held_out, "noise": noise}
    points = pd.DataFrame(columns).assign(family=[family(one) for one in of.index])
    return points[[one.size == size for one in of.index]].dropna(subset="family")


def frontier(points: pd.DataFrame, cost: str) -> pd.DataFrame:
    """The points with a lower loss than all other points that cost as much or less. The cheapest comes first."""
    points = points.sort_values([cost, "loss"])
    return points[points.loss < points.loss.cummin().shift(fill_value=math.inf)]


PAIRED = {
    "SwiGLU": (STRUCTURE[0], FAMILIES["GLU, any gate"]),
    "1 mask": (STRUCTURE[1], FAMILIES["1 mask, any gate"]),
    "1 mask, 2:4": (STRUCTURE[2], plots.BY_MASKS[2]._replace(marker="v")),
    "2:4 SwiGLU": (STRUCTURE[3], plots.SWIGLU._replace(marker="v")),
    "ReLU squared": (STRUCTURE[5], FAMILIES["ReLU squared"]),
    "1 mask, converted": (converted(**DISTILLED), plots.BY_MASKS[4]._replace(marker="*")),
}
"""Layer in the plot of paired runs -> its recipe at 25M, and its style."""


def paired_points(results: Path, size: str) -> Iterator[tuple[str, float, Difference]]:
    """Yield the layers of PAIRED in models of a size: name, MB read per token, and the difference of loss to SwiGLU.

    A converted model is compared with SwiGLU trained on with the same text.
    """
    found = runs(results, "pinned")
    loads, losses = found.groupby("recipe", sort=False).load.first(), losses_of(found)
    for name, (recipe, _) in PAIRED.items():
        one = replace(recipe, size=size)
        base = replace(STRUCTURE[0], size=size) if one.start is None else same_text(one)
        if one in losses and base in losses and (of := difference(losses[one], losses[base])) is not None:
            yield name, loads[one], of


def pareto(results: Path) -> Figure:
    """The held-out loss by bytes read per token and by training operations, with the best layer for each cost.

    With runs on `pinned`, two more panels have the paired differences to SwiGLU by bytes.
    """
    sizes = "25M", "90M"
    has_pairs = (results / RESULTS.name / "pinned_runs.csv").is_file()
    figure, panels = plots.figure_of(6 if has_pairs else 4, 3.0, sharex=False, columns=2)
    costs = {"megabytes": "MB read a token", "pflop": "PFLOP of training"}
    for axes, (cost, size) in zip(panels[:4], product(costs, sizes), strict=True):
        points = pareto_points(results, size)
        for name, style in FAMILIES.items():
            own = points[points.family == name]
            axes.errorbar(
                own[cost], own.loss, own.noise, fmt=style.marker, color=style.color, elinewidth=0.4, label=name
            )
        best = frontier(points, cost)
        axes.step(best[cost], best.loss, where="post", label="lowest loss at no higher cost", **plots.THIN)
        axes.set(title=f"{size} weights with SwiGLU", xlabel=costs[cost], ylabel="held out, nats a byte")
    for axes, size in zip(panels[4:], sizes if has_pairs else (), strict=True):
        for name, load, of in paired_points(results, size):
            style = PAIRED[name][1]
            axes.errorbar(load, of.mean, of.noise, fmt=style.marker, color=style.color, elinewidth=0.4, label=name)
        axes.axhline(0, **plots.THIN)
        axes.set(title=f"{size}, paired runs", xlabel=costs["megabytes"], ylabel="nats a byte behind SwiGLU")
    plots.draw_legend(figure, *panels[::4])
    return figure


PLOTS = {"learning_by_masks": by_masks, "learning_pareto": pareto}
"""Name of a plot -> the function that draws it from a folder of results."""


def draw(results: Path, out: Path) -> list[Path]:
    """Draw every plot into the folder `out`, as SVG.

    Raises:
        FileNotFoundError: no run is finished.
    """
    return [plots.save(picture, [results], out / f"{name}.svg") for name, picture in PLOTS.items()]
