"""Compares layers seed by seed, in runs that read the text in the same order and start with the same weights."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.frames import markdown
from benchmarks.learning.experiments import STRUCTURE
from benchmarks.learning.recipe import SIZES, Recipe
from benchmarks.learning.tables import Finished, deviation, runs

CORPORA = ("pinned_earlier", "pinned")
"""The two texts of the experiment `structure`."""
REFERENCES = ("one free mask", "SwiGLU")
"""The layers that the others are compared with, keys of `experiments.STRUCTURE`."""
MEASURES = {"held_out": "Held-out text", "train": "The last sixth of the training text, which is read once"}
"""Column of the runs to what it measures, in nats a byte."""
QUANTILES = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5% quantiles of Student's t with 0 (none), 1, 2, ... degrees of freedom."""


@dataclass(frozen=True)
class Difference:
    """The difference of two layers over the seeds that both have.

    Attributes:
        mean: the mean of the first layer's loss minus the second's, in nats a byte.
        deviation: the standard deviation of the differences; NaN for one seed.
        bound: half the width of the mean's 95% confidence interval; NaN for one seed.
    """

    mean: float
    deviation: float
    bound: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + ("" if math.isnan(self.bound) else f" ± {self.bound:.4f}")


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Compare the losses of two layers by seed; None without a common seed."""
    pairs = [ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()]
    if not pairs:
        return None
    spread = statistics.stdev(pairs) if len(pairs) > 1 else math.nan
    return Difference(statistics.fmean(pairs), spread, QUANTILES[len(pairs) - 1] * spread / math.sqrt(len(pairs)))


def table(results: Path) -> str:
    """The losses of each layer and size, and their paired differences: one table for each of `MEASURES`.

    Raises:
        FileNotFoundError: the result is missing.
    """
    found = [run for corpus in CORPORA for run in runs(results, corpus)]
    commits, devices = (", ".join(dict.fromkeys(run.facts[what] for run in found)) for what in ("commit", "device"))
    commits = ", ".join(commit[:7] for commit in commits.split(", "))
    facts = found[0].facts
    parts = [f"{devices}, torch {facts['torch']}, commit {commits}; text `{facts['corpus.kind']}`."]
    head = ["text", "model", "layer", "seeds", "nats a byte", "deviation"]
    for name in REFERENCES:
        head += [f"to {name}", "deviation"]
    for measure, about in MEASURES.items():
        texts = losses_of(found, measure)
        lines = [
            [text[:7], *line_of(size, name, losses)]
            for text, losses in texts.items()
            for size in SIZES
            for name, recipe in STRUCTURE.items()
            if replace(recipe, size=size) in losses
        ]
        noise = ", ".join(
            f"{_noise(losses, size)} in the {size} model on {text[:7]}"
            for text, losses in texts.items()
            for size in dict.fromkeys(recipe.size for recipe in losses)
        )
        parts += [f"**{about}.** Standard deviation between seeds: {noise}.", markdown(head, lines)]
    return "\n\n".join(parts)


def losses_of(found: Iterable[Finished], measure: str) -> dict[str, dict[Recipe, dict[int, float]]]:
    """The losses by text, recipe (with seed 0) and seed; `measure` is a column of a point."""
    texts: dict[str, dict[Recipe, dict[int, float]]] = {}
    for run in found:
        seeds = texts.setdefault(run.facts["corpus.digest"], {}).setdefault(replace(run.recipe, seed=0), {})
        seeds[run.recipe.seed] = float(run.rows[-1][measure])
    return texts


def line_of(size: str, name: str, losses: Mapping[Recipe, Mapping[int, float]]) -> list[str]:
    """The cells of a layer."""
    of = losses[replace(STRUCTURE[name], size=size)]
    cells = [size, name, str(len(of)), f"{statistics.fmean(of.values()):.4f}", _digits(deviation([[*of.values()]]))]
    for reference in REFERENCES:
        found = difference(of, losses.get(replace(STRUCTURE[reference], size=size), {}))
        cells += [str(found), _digits(found.deviation)] if found and name != reference else ["", ""]
    return cells


def _noise(losses: Mapping[Recipe, Mapping[int, float]], size: str) -> str:
    """The deviation between seeds, pooled over the layers of a size."""
    return _digits(deviation([*of.values()] for recipe, of in losses.items() if recipe.size == size))


def _digits(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.5f}"
