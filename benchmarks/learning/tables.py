"""The results of the training runs as Markdown tables: for each experiment, for the masks, and for choosing a layer.

python -m benchmarks.learning.tables [--results DIR]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.frames import form, markdown
from benchmarks.learning import cost
from benchmarks.learning.experiments import BEST, EXPERIMENTS, RESULTS, SWIGLU, same_load, same_training
from benchmarks.learning.recipe import KINDS, SIZES, Recipe
from benchmarks.records import read_table

FOLDER = RESULTS.name
"""The name of the subfolder of the results that has the runs."""


@dataclass(frozen=True)
class Finished:
    """A finished run: its recipe, the facts in the head of its file, and its learning curve."""

    recipe: Recipe
    facts: dict[str, str]
    rows: list[dict[str, str]]

    @property
    def last(self) -> dict[str, str]:
        """The last point of the curve."""
        return self.rows[-1]

    @property
    def loss(self) -> float:
        return float(self.last["held_out"])

    @property
    def load(self) -> float:
        """Megabytes that decoding reads for a token: all weights in 16 bits, and the masks."""
        return (2 * float(self.facts["weights"]) + float(self.facts["mask_bits"]) / 8) / 1e6

    @property
    def bytes_of_token(self) -> float:
        """The mean number of bytes of held-out text in a token."""
        return float(self.facts["corpus.held_out_bytes"]) / float(self.facts["corpus.held_out_tokens"])


@dataclass(frozen=True)
class Trained:
    """The finished runs of a recipe, which differ by seed; `ms` is the time of a training step, NaN if unknown."""

    recipe: Recipe
    seeds: list[Finished]
    ms: float

    @property
    def first(self) -> Finished:
        return self.seeds[0]

    @property
    def loss(self) -> float:
        """The mean over the seeds, in nats a byte."""
        return statistics.fmean(run.loss for run in self.seeds)

    @property
    def spread(self) -> float:
        """The distance between the smallest and the largest loss."""
        losses = [run.loss for run in self.seeds]
        return max(losses) - min(losses)

    @property
    def peak_gb(self) -> float:
        """The most memory of training, in gigabytes; NaN on a CPU."""
        return max(float(run.facts["peak_mb"]) for run in self.seeds) / 1000


ByRecipe: TypeAlias = "dict[Recipe, Trained]"
"""Recipe with seed 0 to its finished runs."""


def recipe_of(facts: dict[str, str]) -> Recipe:
    """The recipe in the head of a result. Fields that are newer than the result have their defaults."""
    values: dict[str, Any] = {}
    for name, kind in KINDS.items():
        text = facts.get(f"recipe.{name}", str(getattr(Recipe, name)))
        values[name] = None if text == "None" else (text == "True" if kind is bool else kind(text))
    return Recipe(**values)


def runs(results: Path) -> list[Finished]:
    """All finished runs.

    Raises:
        FileNotFoundError: no run is finished.
        ValueError: the runs read different texts.
    """
    files = [read_table(path) for path in sorted((results / FOLDER).glob("*.csv"))]
    found = [Finished(recipe_of(facts), facts, rows) for facts, rows in files]
    if not found:
        raise FileNotFoundError(
            f"{results / FOLDER}: no results; `python -m benchmarks.learning.experiments` measures them"
        )
    if len(digests := {run.facts["corpus.digest"] for run in found}) > 1:
        raise ValueError(f"{results / FOLDER}: the results are of several texts: {', '.join(sorted(digests))}")
    return found


def by_recipe(found: Iterable[Finished], milliseconds: Mapping[str, float] | None = None) -> ByRecipe:
    """Group runs by their recipe with seed 0; `milliseconds` are the times of a step as in `costs`."""
    of: ByRecipe = {}
    for run in found:
        recipe = replace(run.recipe, seed=0)
        ms = (milliseconds or {}).get(cost.layer_of(recipe).name, math.nan)
        of.setdefault(recipe, Trained(recipe, [], ms)).seeds.append(run)
    return of


def costs(results: Path) -> tuple[str, dict[str, float]]:
    """A sentence that says where steps were timed, and the milliseconds of a step by the name of `cost.layer_of`.

    Both are empty if no steps were timed.
    """
    path = results / f"{cost.NAME}.csv"
    if not path.is_file():
        return "", {}
    facts, rows = read_table(path)
    where = f" Times of a step: one {facts['device']}, commit {facts['commit'][:7]}."
    return where, {row["name"]: float(row["ms"]) for row in rows}


def experiment(results: Path, name: str) -> str:
    """The table of an experiment: a row for each recipe with a finished run, then the names of the other recipes.

    'To SwiGLU' is the difference to the mean of the SwiGLU runs of the same size, text and learning rate, in nats a
    byte. A mean over several seeds is followed by the largest distance between two of them.
    """
    found, (where, milliseconds) = runs(results), costs(results)
    of = by_recipe(found, milliseconds)
    wanted = list(dict.fromkeys(replace(recipe, seed=0) for recipe in EXPERIMENTS[name]))
    lines = [[cell(of[one], of.get(baseline(one))) for cell in CELLS.values()] for one in wanted if one in of]
    parts = [source(found) + where, markdown(CELLS, lines)]
    if missing := [label(recipe) for recipe in wanted if recipe not in of]:
        parts.append(f"Not run: {'; '.join(missing)}.")
    return "\n\n".join(parts)


def choice(results: Path) -> str:
    """What a user decides by: the loss and the costs of SwiGLU and of SwiMGLU with our recipe.

    A model needs a finished run of SwiGLU to be in the table.

    Raises:
        FileNotFoundError: no run is finished.
    """
    found, (where, milliseconds) = runs(results), costs(results)
    layers = {
        "SwiGLU": SWIGLU,
        **{f"SwiMGLU, n_m = {n_masks}": recipe for n_masks, recipe in BEST.items()},
        "SwiGLU with as many bytes as n_m = 1": replace(SWIGLU, width=same_load(1)),
        "SwiGLU with as many training operations as n_m = 4": replace(SWIGLU, width=same_training(4)),
    }
    lines, of = [], by_recipe(found, milliseconds)
    for size in SIZES:
        recipes = {name: replace(recipe, size=size) for name, recipe in layers.items()}
        swiglu = of.get(recipes["SwiGLU"])
        for name, recipe in recipes.items():
            if swiglu is not None and recipe in of:
                one = of[recipe]
                pairs = (one.first.load, swiglu.first.load), (one.ms, swiglu.ms), (one.peak_gb, swiglu.peak_gb)
                ratios = [f"{ours:.1f} ({ours / base:.2f})" for ours, base in pairs]
                gap = (one.loss - swiglu.loss) * one.first.bytes_of_token
                lines.append([size, name, f"{gap:+.3f}", *("" if "nan" in cell else cell for cell in ratios)])
    head = ["model", "layer", "loss to SwiGLU", "MB a token", "ms a training step", "GB of training memory"]
    return f"{source(found)}{where}\n\n{markdown(head, lines)}"


def baseline(recipe: Recipe) -> Recipe:
    """The SwiGLU run with the same seed, size, learning rate and text, which a run is compared with."""
    megabytes = recipe.skip + recipe.megabytes
    lr = Recipe.lr if recipe.start is not None else recipe.lr
    return Recipe("glu", size=recipe.size, megabytes=megabytes, lr=lr, seed=recipe.seed)


def label(recipe: Recipe) -> str:
    """The name of a recipe in a table."""
    activation = {"silu": "SiLU", "gelu": "GELU", "relu": "ReLU", "relu_squared": "ReLU squared"}[recipe.activation]
    gated = {"silu": "Swi{}", "gelu": "Ge{}", "relu": "Re{}"}.get(recipe.activation, f"{{}} with {activation}")
    glu, mglu = gated.format("GLU"), gated.format("MGLU")
    names = {
        "lu": activation,
        "glu": glu,
        "glu_shared": f"{glu}, one shared matrix (no masks)",
        "mglu": mglu,
        "no_gate_mask": f"{mglu}, no gate mask",
        "no_value_mask": f"{mglu}, no value mask",
    }
    name = names[recipe.layer] + (f", n_m = {recipe.n_masks}" if recipe.has_masks else "")
    return ", ".join([name, *options_of(recipe)])


def options_of(recipe: Recipe) -> list[str]:
    """The fields that differ from the layer's default recipe, besides the activation, as text for a table."""
    words = {
        "top_k": f"Top-{recipe.top_k}",
        "fused": "not fused",
        "learned": "fixed masks",
        "size": f"{recipe.size} model",
        "width": f"{recipe.width:.3g} times as wide",
        "megabytes": f"{recipe.megabytes:g} MB",
        "lr": f"learning rate {recipe.lr:g}",
        "mask_lr": f"masks at {recipe.mask_lr:g} times the rate",
        "mask_stop": f"masks frozen after {recipe.mask_stop:.0%}",
        "logits_std": f"logits from N(0, {recipe.logits_std:g})",
        "gate_ratio": f"gate ratio {recipe.gate_ratio:g} at the start",
        "straight_through": f"{recipe.straight_through} gradient, slope {recipe.slope:g}",
        "scaled_sum": "sum / sqrt(n_m)",
        "scale": f"times {recipe.scale:g}",
        "weight_gain": f"initial weights times {recipe.weight_gain:g}",
        "down_gain": f"initial down projection times {recipe.down_gain:g}",
        "start": f"converted by `{recipe.start}`",
        "distilled": "distilled",
        "skip": f"after {recipe.skip:g} MB of the teacher",
    }
    return [words.get(name, f"{name} = {value}") for name, value in recipe.changes.items() if name != "activation"]


def source(found: Sequence[Finished]) -> str:
    """The line above a table: devices, torch, commits and text."""
    devices, commits = (list(dict.fromkeys(run.facts[what] for run in found)) for what in ("device", "commit"))
    facts = found[0].facts
    return (
        f"{' and '.join(devices)}, torch {facts['torch']}, commits {', '.join(commit[:7] for commit in commits)}; "
        f"text `{facts['corpus.kind']}` {facts['corpus.digest']}, "
        f"{float(facts['corpus.held_out_bytes']) / 1e6:.1f} MB held out."
    )


def masks(results: Path) -> str:
    """The gate ratio of each layer at the end, as in the paper's Figure 14, and the agreement and the flips of masks.

    Flips are the share of bits that one step changes: the step before the first point of the curve, and the last step.
    """
    found = [run for run in runs(results) if run.recipe in EXPERIMENTS["layers"] + EXPERIMENTS["best"]]
    found = [run for run in found if run.recipe.has_masks and run.recipe.learned and run.recipe.seed == 0]
    if not found:
        raise FileNotFoundError(f"{results / FOLDER}: no result of a layer with masks is here")
    ratios = [(run, json.loads(run.last["gate_ratios"])) for run in sorted(found, key=lambda run: run.recipe.n_masks)]
    layers = max(len(of) for _, of in ratios)
    head = ["feed-forward layer", *map(str, range(1, layers + 1)), "agreement", "flips, early", "flips, last"]
    lines = [
        [
            label(run.recipe),
            *(f"{ratio:.3f}" for ratio in of),
            form("{:.3f}")(float(run.last["agreement"])),  # NaN for one mask
            *(f"{float(row['flips']):.2%}" for row in (run.rows[0], run.last)),
        ]
        for run, of in ratios
    ]
    return f"{source(found)}\n\n{markdown(head, lines)}"


CELLS: dict[str, Callable[[Trained, Trained | None], str]] = {
    "feed-forward layer": lambda one, _: label(one.recipe),
    "weights": lambda one, _: f"{float(one.first.facts['weights']) / 1e6:.1f} M",
    "MB a token": lambda one, _: f"{one.first.load:.1f}",
    "nats a byte": lambda one, _: f"{one.loss:.4f}" + (f" ({one.spread:.4f})" if len(one.seeds) > 1 else ""),
    "to SwiGLU": lambda one, glu: f"{one.loss - glu.loss:+.4f}" if glu and glu is not one else "",
    "seeds": lambda one, _: str(len(one.seeds)),
    "gate ratio": lambda one, _: f"{float(one.first.last['gate_ratio']):.3f}" if one.recipe.has_masks else "",
    "flipped": lambda one, _: f"{float(one.first.last['flipped']):.1%}" if one.recipe.has_masks else "",
    "PFLOP": lambda one, _: f"{float(one.first.facts['tflop']) / 1000:.1f}",
    # Steps are timed without a teacher.
    "ms a step": lambda one, _: "" if one.recipe.distilled else form("{:.1f}")(one.ms),
    "memory": lambda one, _: form("{:.1f} GB")(one.peak_gb),
}
"""Heading of a column of an experiment's table to its cell, from a recipe's runs and from SwiGLU's (`baseline`)."""
TABLES: dict[str, Callable[[Path], str]] = {
    **{f"learning_{name}": partial(experiment, name=name) for name in EXPERIMENTS},
    "learning_masks": masks,
    "learning_choice": choice,
}
"""Name of a table to the function that makes it from the folder of the results."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS.parent, help=f"a folder that has the folder {FOLDER}")
    options = parser.parse_args()
    print("\n\n".join(f"## {name}\n\n{table(options.results)}" for name, table in TABLES.items()))


if __name__ == "__main__":
    main()
