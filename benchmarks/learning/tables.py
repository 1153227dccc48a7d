"""The results of the training runs as Markdown tables: for each experiment, for the masks, and for choosing a layer."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.frames import form, markdown
from benchmarks.learning import cost
from benchmarks.learning.experiments import (
    BEST,
    EXPERIMENTS,
    SWIGLU,
    USUAL,
    leveled_glu,
    same_load,
    same_training,
)
from benchmarks.learning.gather import RESULTS
from benchmarks.learning.recipe import KINDS, SIZES, SLOPE, Recipe
from benchmarks.records import read_table


@dataclass(frozen=True)
class Finished:
    """A finished run.

    Attributes:
        recipe: its recipe.
        facts: the facts in the head of its file.
        rows: its learning curve.
        ms: the time of a training step in milliseconds; NaN if it was not measured.
    """

    recipe: Recipe
    facts: dict[str, str]
    rows: list[dict[str, str]]
    ms: float

    @property
    def loss(self) -> float:
        return float(self.rows[-1]["held_out"])

    @property
    def load(self) -> float:
        """Megabytes that decoding reads for a token: all weights in 16 bits, and the masks; of its experts only."""
        weights = float(self.facts["weights"]) - float(self.facts.get("idle_weights", 0))
        bits = float(self.facts["mask_bits"]) * self.recipe.active / self.recipe.experts
        return (2 * weights + bits / 8) / 1e6

    @property
    def bytes_of_token(self) -> float:
        """The mean number of bytes of held-out text in a token."""
        return float(self.facts["corpus.held_out_bytes"]) / float(self.facts["corpus.held_out_tokens"])


def recipe_of(row: Mapping[str, str]) -> Recipe:
    """The recipe of a row of a table of runs. Empty fields have their defaults."""
    values: dict[str, Any] = {}
    for name, kind in KINDS.items():
        if text := row.get(f"recipe.{name}", ""):
            values[name] = text == "True" if kind is bool else kind(text)
    return Recipe(**values)


def runs(results: Path, corpus: str = "python") -> list[Finished]:
    """All runs in the tables of a corpus.

    Raises:
        FileNotFoundError: the corpus has no tables.
    """
    path, costs = results / RESULTS.name / f"{corpus}_runs.csv", results / f"{cost.NAME}.csv"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such table; `python -m benchmarks.learning.gather` makes it")
    ms = {row["name"]: float(row["ms"]) for row in read_table(costs)[1]} if costs.is_file() else {}
    (shared, rows), (_, points) = read_table(path), read_table(path.with_name(f"{corpus}_curves.csv"))
    curves: dict[str, list[dict[str, str]]] = {}
    for point in points:
        curves.setdefault(point["run"], []).append(point)
    found = []
    for row in rows:
        recipe = recipe_of(row)
        found.append(Finished(recipe, shared | row, curves[row["run"]], ms.get(cost.layer_of(recipe).name, math.nan)))
    return found


def by_recipe(found: Iterable[Finished]) -> dict[Recipe, list[Finished]]:
    """The runs of each recipe, which differ by seed, by the recipe with seed 0."""
    of: dict[Recipe, list[Finished]] = {}
    for run in found:
        of.setdefault(replace(run.recipe, seed=0), []).append(run)
    return of


def mean_loss(seeds: Iterable[Finished]) -> float:
    """The mean over seeds, in nats a byte."""
    return statistics.fmean(run.loss for run in seeds)


def deviation(losses: Iterable[Sequence[float]]) -> float:
    """The standard deviation between seeds, pooled over recipes with two seeds or more; NaN if there is none."""
    several = [of for of in losses if len(of) > 1 and all(map(math.isfinite, of))]
    freedom = sum(len(of) - 1 for of in several)
    squares = sum((len(of) - 1) * statistics.variance(of) for of in several)
    return math.sqrt(squares / freedom) if several else math.nan


def peak_gb(seeds: Iterable[Finished]) -> float:
    """The most memory of training, in gigabytes; NaN on a CPU."""
    return max(float(run.facts["peak_mb"]) for run in seeds) / 1000


def source(found: Sequence[Finished]) -> str:
    """The line above a table: devices, torch, commits and text."""
    devices, commits = (list(dict.fromkeys(run.facts[what] for run in found)) for what in ("device", "commit"))
    facts = found[0].facts
    return (
        f"{' and '.join(devices)}, torch {facts['torch']}, commits {', '.join(commit[:7] for commit in commits)}; "
        f"text `{facts['corpus.kind']}` {facts['corpus.digest']}, "
        f"{float(facts['corpus.held_out_bytes']) / 1e6:.1f} MB held out."
    )


def timed_source(found: Sequence[Finished], results: Path) -> str:
    """The line above a table with times of a step, if steps were timed."""
    path = results / f"{cost.NAME}.csv"
    if not path.is_file():
        return source(found)
    facts, _ = read_table(path)
    commits = ", ".join(commit[:7] for commit in facts["commit"].split(", "))
    return f"{source(found)} Times of a step: one {facts['device']}, commit {commits}."


def experiment(results: Path, name: str) -> str:
    """The table of an experiment: a row for each recipe with a finished run, then the names of the other recipes.

    'To SwiGLU' is the difference to the mean of the SwiGLU runs of the same size, text and learning rate, in nats a
    byte; SwiGLU has leveled weights if it was trained with no others. A mean over several seeds is followed by the
    largest distance between two of them. With several kinds of text, the loss of each kind follows.

    Raises:
        FileNotFoundError: the corpus of the experiment has no tables.
    """
    found = runs(results, "python" if name in USUAL else "texts")
    of, lines, missing = by_recipe(found), [], []
    for recipe in dict.fromkeys(replace(one, seed=0) for one in EXPERIMENTS[name]):
        if recipe in of:
            dense = baseline(recipe)
            leveled = replace(dense, weight_gain=leveled_glu("silu").weight_gain)
            lines.append(cells(of[recipe], of.get(dense) or of.get(leveled)))
        else:
            missing.append(label(recipe))
    parts = [timed_source(found, results)]
    if lines:
        parts.append(markdown(lines[0], [[*one.values()] for one in lines]))
    if missing:
        parts.append(f"Not run: {'; '.join(missing)}.")
    return "\n\n".join(parts)


def cells(seeds: Sequence[Finished], swiglu: Sequence[Finished] | None) -> dict[str, str]:
    """The cells of a recipe in the table of an experiment, by their headings."""
    one, losses = seeds[0], [run.loss for run in seeds]
    has_masks, last = one.recipe.has_masks, one.rows[-1]
    return {
        "feed-forward layer": label(one.recipe),
        "weights": f"{float(one.facts['weights']) / 1e6:.1f} M",
        "MB a token": f"{one.load:.1f}",
        "nats a byte": f"{mean_loss(seeds):.4f}" + (f" ({max(losses) - min(losses):.4f})" if len(seeds) > 1 else ""),
        **{
            column.removeprefix("held_out_"): f"{statistics.fmean(float(run.rows[-1][column]) for run in seeds):.4f}"
            for column in last
            if column.startswith("held_out_")
        },
        "to SwiGLU": f"{mean_loss(seeds) - mean_loss(swiglu):+.4f}" if swiglu and swiglu is not seeds else "",
        "seeds": str(len(seeds)),
        "gate ratio": f"{float(last['gate_ratio']):.3f}" if has_masks else "",
        "flipped": f"{float(last['flipped']):.1%}" if has_masks else "",
        "PFLOP": f"{float(one.facts['tflop']) / 1000:.1f}",
        "ms a step": "" if one.recipe.distilled else form("{:.1f}")(one.ms),  # timed without a teacher
        "memory": form("{:.1f} GB")(peak_gb(seeds)),
    }


def choice(results: Path) -> str:
    """What a user decides by: the loss and the costs of SwiGLU and of SwiMGLU with our recipe.

    A model needs a finished run of SwiGLU to be in the table.
    """
    found = runs(results)
    layers = {
        "SwiGLU": SWIGLU,
        **{f"SwiMGLU, n_m = {n_masks}": recipe for n_masks, recipe in BEST.items()},
        "SwiGLU with as many bytes as n_m = 1": replace(SWIGLU, width=same_load(1)),
        "SwiGLU with as many training operations as n_m = 4": replace(SWIGLU, width=same_training(4)),
    }
    lines, of = [], by_recipe(found)
    for size, (name, recipe) in product(SIZES, layers.items()):
        one, swiglu = (of.get(replace(layer, size=size)) for layer in (recipe, SWIGLU))
        if one and swiglu:
            pairs = ((seeds[0].load, seeds[0].ms, peak_gb(seeds)) for seeds in (one, swiglu))
            ratios = [form(f"{ours:.1f} ({{:.2f}})")(ours / theirs) for ours, theirs in zip(*pairs, strict=True)]
            gap = (mean_loss(one) - mean_loss(swiglu)) * one[0].bytes_of_token
            lines.append([size, name, f"{gap:+.3f}", *ratios])
    head = ["model", "layer", "loss to SwiGLU", "MB a token", "ms a training step", "GB of training memory"]
    return f"{timed_source(found, results)}\n\n{markdown(head, lines)}"


def baseline(recipe: Recipe) -> Recipe:
    """The SwiGLU run with the same seed, size, learning rate and text, which a run is compared with."""
    megabytes = recipe.skip + recipe.megabytes
    lr = Recipe.lr if recipe.start is not None else recipe.lr
    dense = Recipe("glu", size=recipe.size, megabytes=megabytes, lr=lr, seed=recipe.seed)
    return replace(dense, experts=recipe.experts, active=recipe.active)


def label(recipe: Recipe) -> str:
    """The name of a recipe in a table: its layer, and the fields that differ from the layer's default recipe."""
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
    words = {
        "top_k": f"Top-{recipe.top_k}",
        "learned": "fixed masks",
        "size": f"{recipe.size} model",
        "width": f"{recipe.width:.3g} times as wide",
        "experts": f"{recipe.experts} experts",
        "active": f"{recipe.active} active",
        "megabytes": f"{recipe.megabytes:g} MB",
        "lr": f"learning rate {recipe.lr:g}",
        "last_rate": f"last rate {recipe.last_rate:g}",
        "mask_lr": f"masks at {recipe.mask_lr:g} times the rate",
        "mask_stop": f"masks frozen after {recipe.mask_stop:.0%}",
        "logits_std": f"logits from N(0, {recipe.logits_std:g})",
        "gate_ratio": f"gate ratio {recipe.gate_ratio:g} at the start",
        "straight_through": f"{recipe.straight_through} gradient, slope {SLOPE:g}",
        "continuous": f"continuous masks in the first {recipe.continuous:.0%} of the steps",
        "flips": f"{recipe.flips:g} flips of a mask bit by accumulators",
        "scaled_sum": "sum / sqrt(n_m)",
        "scale": f"times {recipe.scale:g}",
        "weight_gain": f"initial weights times {recipe.weight_gain:g}",
        "down_gain": f"initial down projection times {recipe.down_gain:g}",
        "start": f"converted by `{recipe.start}`",
        "distilled": "distilled",
        "skip": f"after {recipe.skip:g} MB of the teacher",
        "structure": recipe.structure,
        "centered": "centered gradient",
        "decay": f"SR-STE decay {recipe.decay:g}",
        "vocabulary": f"{recipe.vocabulary} tokens",
        "paired": "paired seeds",
    }
    layer = names[recipe.layer] + (f", n_m = {recipe.n_masks}" if recipe.has_masks else "")
    return ", ".join([layer, *(words[name] for name in recipe.changes if name != "activation")])


def masks(results: Path) -> str:
    """The gate ratio of each layer at the end, as in the paper's Figure 14, and the agreement and the flips of masks.

    Flips are the share of bits that one step changes: the step before the first point of the curve, and the last step.
    """
    shown = {
        one for one in EXPERIMENTS["layers"] + EXPERIMENTS["best"] if one.has_masks and one.learned and not one.seed
    }
    found = sorted((run for run in runs(results) if run.recipe in shown), key=lambda run: run.recipe.n_masks)
    if not found:
        raise FileNotFoundError(f"{results}: no result of a layer with masks is here")
    lines = []
    for run in found:
        first, last = run.rows[0], run.rows[-1]
        ratios = [f"{ratio:.3f}" for ratio in json.loads(last["gate_ratios"])]
        agreement = form("{:.3f}")(float(last["agreement"]))  # NaN for one mask
        flips = [f"{float(row['flips']):.2%}" for row in (first, last)]
        lines.append([label(run.recipe), *ratios, agreement, *flips])
    head = ["feed-forward layer", *range(1, len(lines[0]) - 3), "agreement", "flips, early", "flips, last"]
    return f"{source(found)}\n\n{markdown(head, lines)}"


TABLES: dict[str, Callable[[Path], str]] = {
    **{f"learning_{name}": partial(experiment, name=name) for name in EXPERIMENTS if name != "structure"},
    "learning_mask_statistics": masks,
    "learning_choice": choice,
}
"""Name of a table to the function that makes it from the folder of the results."""
