"""Compares layers seed by seed, in runs that read the text in the same order and start with the same weights.

python -m benchmarks.learning.paired --runs DIR [DIR ...] [--out benchmarks/results]

The command gathers the finished runs of the experiment `structure` into two tables: `learning_structure` has a row for
each run, and `learning_structure_curves` all points of their learning curves. Each text has a folder of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.frames import markdown
from benchmarks.learning.experiments import STRUCTURE
from benchmarks.learning.recipe import SIZES, Recipe
from benchmarks.learning.tables import Finished, deviation, runs
from benchmarks.records import read_table, write_table

NAME = "learning_structure"
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


def gather(folders: Iterable[Path], out: Path) -> None:
    """Write the two tables of the runs in some folders, each of one text, into another folder.

    Raises:
        FileNotFoundError: a folder has no finished run.
        ValueError: the runs of a folder read different texts.
    """
    found = [run for folder in folders for run in runs(folder.parent, folder.name)]
    own = "recipe", "weights", "mask_bits", "idle_weights", "steps", "tflop", "seconds", "peak_mb"
    shared = [name for name in found[0].facts if name.partition(".")[0] not in own]
    facts = {name: ", ".join(dict.fromkeys(run.facts[name] for run in found)) for name in shared}
    write_table([row_of(run) for run in found], facts, out, NAME)
    columns = "step", "megabytes", "train", "worst", "held_out", "seconds"
    curves = [
        {"text": run.facts["corpus.digest"], "run": run.recipe.name, **{name: row[name] for name in columns}}
        for run in found
        for row in run.rows
    ]
    write_table(curves, facts, out, f"{NAME}_curves")


def row_of(run: Finished) -> dict[str, Any]:
    """The row of a run: its recipe, which `Recipe` takes, its losses and its costs."""
    recipe, last = run.recipe, run.rows[-1]
    given = {"layer": recipe.layer, "n_masks": recipe.n_masks, **recipe.changes, "seed": recipe.seed}
    costs = {name: run.facts[name] for name in ("weights", "mask_bits", "steps", "seconds", "peak_mb")}
    where = {"device": run.facts["device"], "commit": run.facts["commit"], "text": run.facts["corpus.digest"]}
    measured = {"held_out": last["held_out"], "train": last["train"], "flipped": last.get("flipped", "")}
    return {"run": recipe.name, "recipe": given, **measured, **costs, **where}


def table(results: Path) -> str:
    """The losses of each layer and size, and their paired differences: one table for each of `MEASURES`.

    Raises:
        FileNotFoundError: the result is missing.
    """
    facts, rows = read_table(results / f"{NAME}.csv")
    commits = ", ".join(commit[:7] for commit in facts["commit"].split(", "))
    parts = [f"{facts['device']}, torch {facts['torch']}, commit {commits}; text `{facts['corpus.kind']}`."]
    head = ["text", "model", "layer", "seeds", "nats a byte", "deviation"]
    for name in REFERENCES:
        head += [f"to {name}", "deviation"]
    for measure, about in MEASURES.items():
        texts = losses_of(rows, measure)
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


def losses_of(rows: Iterable[Mapping[str, str]], measure: str) -> dict[str, dict[Recipe, dict[int, float]]]:
    """The losses by text, recipe (with seed 0) and seed; `measure` is a column of the runs."""
    texts: dict[str, dict[Recipe, dict[int, float]]] = {}
    for row in rows:
        recipe = Recipe(**json.loads(row["recipe"]))
        seeds = texts.setdefault(row["text"], {}).setdefault(replace(recipe, seed=0), {})
        seeds[recipe.seed] = float(row[measure])
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="folders of finished runs, one a text")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    gather(options.runs, options.out)
    print(table(options.out))


if __name__ == "__main__":
    main()
