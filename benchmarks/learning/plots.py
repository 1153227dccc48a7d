"""Plots of the training runs, drawn from their result files."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import plots
from benchmarks.learning.claims import GELU, losses_of
from benchmarks.learning.comparisons import PAPERS
from benchmarks.learning.experiments import BEST, LARGER, SWIGLU
from benchmarks.learning.recipe import Recipe
from benchmarks.learning.tables import Finished, label, runs

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


PLOTS = {"learning_curves": curves, "learning_by_masks": by_masks, "learning_gate_ratios": gate_ratios}
"""Name of a plot to the function that draws it from the finished runs."""


def draw(results: Path, out: Path) -> list[Path]:
    """Draw every plot into the folder `out`, as SVG.

    Raises:
        FileNotFoundError: no run is finished.
    """
    found = runs(results)
    return [plots.save(picture, [found], out / f"{name}.svg") for name, picture in PLOTS.items()]
