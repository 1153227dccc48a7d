"""Plots of the training runs, drawn from their result files."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import plots
from benchmarks.learning.claims import CONFIDENCE, GELU, losses_of
from benchmarks.learning.comparisons import NAMES, PAPERS
from benchmarks.learning.experiments import BEST, LARGER, SWIGLU
from benchmarks.learning.recipe import Recipe
from benchmarks.learning.tables import Finished, by_recipe, deviation, label, mean_loss, runs
from mglu_ops.nn.leveling import level_gain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = {
    GELU: plots.CEILING,
    SWIGLU: plots.SWIGLU,
    **{one: plots.BY_MASKS[n_masks]._replace(marker="") for n_masks, one in PAPERS.items()},
}
"""The layers of the paper's learning curves. Each one that was trained is drawn, with its first seed."""


def first_seeds(found: Iterable[Finished], wanted: Iterable[Recipe]) -> list[Finished]:
    """The finished runs of some recipes, in the order of the recipes."""
    by_recipe = {run.recipe: run for run in found}
    return [by_recipe[recipe] for recipe in wanted if recipe in by_recipe]


def curves(found: Sequence[Finished]) -> Figure:
    """The held-out loss by text read: after the first tenth, and enlarged for the second half."""
    figure, panels = plots.figure_of(2, 2.6, sharex=False)
    chosen = first_seeds(found, STYLES)
    for axes, share in zip(panels, (0.1, 0.5), strict=True):
        for run in chosen:
            every = [(float(row["megabytes"]), float(row["held_out"])) for row in run.rows]
            points = [(x, y) for x, y in every if x >= share * run.recipe.megabytes]
            plots.draw_line(axes, label(run.recipe), STYLES[run.recipe], points)
        axes.set_ylabel("held out, nats a byte")
    panels[-1].set_xlabel("training text, MB")
    plots.draw_legend(figure, panels[0])
    return figure


def by_masks(found: Sequence[Finished]) -> Figure:
    """The final loss by number of masks, with the paper's recipe and with ours; a bar spans the seeds."""
    figure, (axes,) = plots.figure_of(1, 3.2)
    losses = losses_of(found, Recipe.size)
    for name, recipes, style in (("the paper's recipe", PAPERS, plots.EAGER), ("our recipe", BEST, plots.CUDA)):
        points = [(n_masks, losses[one]) for n_masks, one in recipes.items() if one in losses]
        plots.draw_line(axes, name, style, [(n_masks, statistics.fmean(of)) for n_masks, of in points])
        for n_masks, of in points:
            axes.plot([n_masks, n_masks], [min(of), max(of)], color=style.color, linewidth=1)
    for name, one, linestyle in (("SwiGLU", SWIGLU, "-."), ("SwiGLU, product times 1.6", LARGER, ":")):
        if one in losses:
            mean, style = statistics.fmean(losses[one]), plots.SWIGLU._replace(linestyle=linestyle)
            plots.draw_line(axes, name, style, [(n_masks, mean) for n_masks in PAPERS])
    axes.set_ylabel("held out, nats a byte")
    plots.powers_of_two(axes, "masks", list(PAPERS))
    plots.draw_legend(figure, axes)
    return figure


def gate_ratios(found: Sequence[Finished]) -> Figure:
    """The share of ones in the masks of each layer at the end, as in the paper's Figure 14."""
    figure, (axes,) = plots.figure_of(1, 3.0)
    for run in first_seeds(found, [one for n_masks, one in PAPERS.items() if n_masks < 16]):
        ratios = json.loads(run.rows[-1]["gate_ratios"])
        style = STYLES[run.recipe]._replace(marker=plots.BY_MASKS[run.recipe.n_masks].marker)
        plots.draw_line(axes, label(run.recipe), style, list(enumerate(ratios, 1)))
    axes.axhline(0.5, **plots.THIN)
    axes.set(xlabel="layer", ylabel="gate ratio")
    plots.draw_legend(figure, axes)
    return figure


class Point(NamedTuple):
    """A layer's costs and its loss over seeds: megabytes a token, PFLOP of training, nats a byte, and the noise."""

    recipe: Recipe
    megabytes: float
    pflop: float
    loss: float
    noise: float


def families() -> dict[str, tuple[plots.Style, Callable[[Recipe], bool]]]:
    """The legend of the Pareto plot: a name, a style, and which recipes it is for."""

    def with_masks(n_masks: int, recipe: Recipe) -> bool:
        return recipe.layer == "mglu" and recipe.n_masks == n_masks

    return {
        "GLU, any gate": (plots.Style(plots.SWIGLU.color, "D"), lambda one: one.layer == "glu"),
        "ReLU squared": (
            plots.Style("#000000", "x"),
            lambda one: (one.layer, one.activation) == ("lu", "relu_squared"),
        ),
        **{
            f"{name}, any gate": (plots.BY_MASKS[n_masks], partial(with_masks, n_masks))
            for n_masks, name in NAMES.items()
        },
    }


def is_pareto(recipe: Recipe) -> bool:
    """Whether a recipe is in the Pareto plot: a layer that a user may choose, trained as we recommend.

    These are layers of the families with any gate and any width, with leveled initial weights or with `nn.Linear`'s.
    Not in the plot: the searches for our recipe, masks that learn otherwise, routes, mixtures, other lengths of text
    and converted models.
    """
    rate = 0.3 if recipe.layer == "mglu" else 1.0
    free = ("activation", "width", "size", "weight_gain")
    plain = replace(
        Recipe(recipe.layer, recipe.n_masks, mask_lr=rate), **{name: getattr(recipe, name) for name in free}
    )
    gain = level_gain(recipe.n_masks, recipe.activation) if recipe.layer == "mglu" else recipe.weight_gain
    return recipe == plain and abs(recipe.weight_gain - gain) < 1e-3


def pareto_points(found: Sequence[Finished], size: str) -> list[Point]:
    """The points of a model's size; the noise is two standard errors of the mean over seeds."""
    one_seed = deviation(losses_of(found, size).values())
    return [
        Point(
            recipe,
            seeds[0].load,
            float(seeds[0].facts["tflop"]) / 1000,
            mean_loss(seeds),
            CONFIDENCE * one_seed / math.sqrt(len(seeds)),
        )
        for recipe, seeds in by_recipe(found).items()
        if recipe.size == size and is_pareto(recipe)
    ]


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other point beats in one coordinate without being worse in the other, by the first one."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best


def pareto(found: Sequence[Finished]) -> Figure:
    """The held-out loss by bytes read a token and by training operations, with the best layer for each cost."""
    figure, panels = plots.figure_of(4, 3.0, sharex=False, columns=2)
    sizes, costs = ("25M", "90M"), {"megabytes": "MB read a token", "pflop": "PFLOP of training"}
    for axes, (cost, size) in zip(panels, product(costs, sizes), strict=True):
        points = pareto_points(found, size)
        for name, (style, belongs) in families().items():
            own = [one for one in points if belongs(one.recipe)]
            places = [getattr(one, cost) for one in own], [one.loss for one in own]
            look: Any = {"color": style.color, "marker": style.marker, "markersize": 4, "linestyle": "none"}
            axes.errorbar(*places, [one.noise for one in own], elinewidth=0.4, label=name, **look)
        best = frontier((getattr(one, cost), one.loss) for one in points)
        if best:
            axes.step(*zip(*best, strict=True), where="post", label="lowest loss at no higher cost", **plots.THIN)
        axes.set(title=f"{size} weights with SwiGLU", xlabel=costs[cost], ylabel="held out, nats a byte")
        if cost == "pflop":
            axes.set_xscale("log")
            ticks = sorted({round(one.pflop) for one in points})
            axes.set_xticks(ticks, map(str, ticks))
            axes.minorticks_off()
    plots.draw_legend(figure, panels[0])
    return figure


PLOTS = {
    "learning_curves": curves,
    "learning_by_masks": by_masks,
    "learning_gate_ratios": gate_ratios,
    "learning_pareto": pareto,
}
"""Name of a plot to the function that draws it from the finished runs."""


def draw(results: Path, out: Path) -> list[Path]:
    """Draw every plot into the folder `out`, as SVG.

    Raises:
        FileNotFoundError: no run is finished.
    """
    found = runs(results)
    return [plots.save(picture, [found], out / f"{name}.svg") for name, picture in PLOTS.items()]
