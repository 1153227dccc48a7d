"""The results of the training runs as Markdown tables, one for each experiment."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from benchmarks.learning.experiments import EXPERIMENTS
from benchmarks.learning.recipe import Recipe
from benchmarks.markdown import markdown
from benchmarks.records import read_table
from benchmarks.tables import MissingResultError

HEAD = (
    "feed-forward layer",
    "weights",
    "bits a token",
    "nats a byte",
    "to SwiGLU",
    "seeds",
    "gate ratio",
    "flipped",
    "s",
    "MB",
)
FOLDER = "learning"
"""The folder of the runs in that of the results."""


@dataclass(frozen=True)
class Finished:
    """A run that is finished: its recipe, the head of its file, and the last point of its curve."""

    recipe: Recipe
    facts: dict[str, str]
    last: dict[str, str]

    @property
    def loss(self) -> float:
        return float(self.last["held_out"])

    @property
    def bits(self) -> float:
        """Bits that decoding a token reads: all weights in 16 bits, and the masks."""
        return 16 * float(self.facts["weights"]) + float(self.facts["mask_bits"])

    @staticmethod
    def read(path: Path) -> Finished:
        facts, rows = read_table(path)
        return Finished(recipe_of(facts), facts, rows[-1])


def recipe_of(facts: dict[str, str]) -> Recipe:
    """The recipe in the head of a result."""
    hints = get_type_hints(Recipe)
    values: dict[str, Any] = {}
    for one in fields(Recipe):
        text = facts[f"recipe.{one.name}"]
        if text == "None":
            values[one.name] = None
        elif isinstance(one.default, bool):
            values[one.name] = text == "True"
        else:
            kind = int if one.name == "top_k" else hints[one.name]
            values[one.name] = kind(text) if kind in (int, float) else text
    return Recipe(**values)


def runs(results: Path) -> list[Finished]:
    """All finished runs.

    Raises:
        MissingResultError: there is none.
    """
    found = [Finished.read(path) for path in sorted((results / FOLDER).glob("*.csv"))]
    if not found:
        raise MissingResultError(
            f"{results / FOLDER}: no results; `python -m benchmarks.learning.experiments` measures them"
        )
    return found


def experiment(results: Path, name: str) -> str:
    """The table of an experiment: a line for each recipe with any finished run, and those that are missing.

    'To SwiGLU' is the mean difference to the SwiGLU runs of the same seeds, size, text and learning rate. Behind a mean
    of several seeds stands the largest distance between two of them.
    """
    found = runs(results)
    wanted = list(dict.fromkeys(replace(recipe, seed=0) for recipe in EXPERIMENTS[name]))
    lines, missing = [], []
    for recipe in wanted:
        of = [run for run in found if replace(run.recipe, seed=0) == recipe]
        if of:
            lines.append(line(of, found))
        else:
            missing.append(label(recipe))
    parts = [source(found), markdown(HEAD, lines)]
    if missing:
        parts.append(f"Not run: {'; '.join(missing)}.")
    return "\n\n".join(parts)


def line(of: Sequence[Finished], everything: Iterable[Finished]) -> list[str]:
    """The cells of a recipe from its runs with different seeds."""
    one, losses = of[0], [run.loss for run in of]
    baselines = {run.recipe: run.loss for run in everything if run.recipe.layer == "glu"}
    gaps = [run.loss - baselines[glu] for run in of if (glu := baseline(run.recipe)) in baselines]
    has_masks = one.recipe.has_masks
    return [
        label(one.recipe),
        f"{float(one.facts['weights']) / 1e6:.1f} M",
        f"{one.bits / 1e6:.0f} M",
        with_spread(losses, "{:.4f}"),
        with_spread(gaps, "{:+.4f}") if gaps and one.recipe.layer != "glu" else "",
        str(len(of)),
        f"{float(one.last['gate_ratio']):.3f}" if has_masks else "",
        f"{float(one.last['flipped']):.1%}" if has_masks else "",
        f"{statistics.median(float(run.facts['seconds']) for run in of):.0f}",
        f"{max(float(run.facts['peak_mb']) for run in of):.0f}",
    ]


def baseline(recipe: Recipe) -> Recipe:
    """The SwiGLU run that a run is compared with: the same seed, size, learning rate and text."""
    megabytes = recipe.skip + recipe.megabytes
    lr = Recipe.lr if recipe.start is not None else recipe.lr
    return Recipe("glu", size=recipe.size, megabytes=megabytes, lr=lr, seed=recipe.seed)


def with_spread(values: Sequence[float], form: str) -> str:
    """The mean, and for several values the distance between the smallest and the largest."""
    mean = form.format(statistics.fmean(values))
    return mean if len(values) == 1 else f"{mean} ({max(values) - min(values):.4f})"


def label(recipe: Recipe) -> str:
    """The name of a recipe in a table."""
    names = {"lu": "linear unit", "glu": "SwiGLU", "glu_shared": "SwiGLU, one shared matrix", "mglu": "SwiMGLU"}
    name = names.get(recipe.layer, recipe.layer.replace("_", " "))
    if recipe.has_masks:
        name += f", n_m = {recipe.n_masks}"
    return ", ".join([name, *options_of(recipe)])


def options_of(recipe: Recipe) -> list[str]:
    """What differs from the default recipe of the layer, as `name = value`."""
    default = Recipe(layer=recipe.layer, n_masks=recipe.n_masks)
    return [
        f"{one.name} = {getattr(recipe, one.name)}"
        for one in fields(Recipe)
        if one.name != "seed" and getattr(recipe, one.name) != getattr(default, one.name)
    ]


def source(found: Sequence[Finished]) -> str:
    """The line above a table: device, torch, commits and text."""
    commits = ", ".join(dict.fromkeys(run.facts["commit"][:7] for run in found))
    facts = found[0].facts
    size = float(facts["corpus.held_out_bytes"]) / 1e6
    return (
        f"{facts['device']}, torch {facts['torch']}, commits {commits}; text `{facts['corpus.kind']}` "
        f"{facts['corpus.digest']}, {size:.1f} MB held out."
    )


TABLES: dict[str, Callable[[Path], str]] = {f"learning_{name}": partial(experiment, name=name) for name in EXPERIMENTS}
"""Name of a table to the function that makes it from the folder of the results."""
