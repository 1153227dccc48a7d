"""The results of the training runs as Markdown tables: for each experiment, for the masks, and for choosing a layer.

python -m benchmarks.learning.tables [--results DIR]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from benchmarks.frames import MissingResultError, markdown
from benchmarks.learning import cost
from benchmarks.learning.experiments import BEST, EXPERIMENTS, RESULTS, SWIGLU, same_load, same_training
from benchmarks.learning.recipe import SIZES, Recipe
from benchmarks.records import read_table

HEAD = (
    "feed-forward layer",
    "weights",
    "MB a token",
    "nats a byte",
    "to SwiGLU",
    "seeds",
    "gate ratio",
    "flipped",
    "PFLOP",
    "ms a step",
    "memory",
)
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

    @staticmethod
    def read(path: Path) -> Finished:
        facts, rows = read_table(path)
        return Finished(recipe_of(facts), facts, rows)


def recipe_of(facts: dict[str, str]) -> Recipe:
    """The recipe in the head of a result. Fields that are newer than the result have their defaults."""
    hints = get_type_hints(Recipe)
    values: dict[str, Any] = {}
    for one in fields(Recipe):
        text = facts.get(f"recipe.{one.name}", str(one.default))
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
        MissingResultError: no run is finished.
        ValueError: the runs read different texts.
    """
    found = [Finished.read(path) for path in sorted((results / FOLDER).glob("*.csv"))]
    if not found:
        raise MissingResultError(
            f"{results / FOLDER}: no results; `python -m benchmarks.learning.experiments` measures them"
        )
    if len(digests := {run.facts["corpus.digest"] for run in found}) > 1:
        raise ValueError(f"{results / FOLDER}: the results are of several texts: {', '.join(sorted(digests))}")
    return found


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
    wanted = list(dict.fromkeys(replace(recipe, seed=0) for recipe in EXPERIMENTS[name]))
    lines, missing = [], []
    for recipe in wanted:
        of = [run for run in found if replace(run.recipe, seed=0) == recipe]
        if of:
            lines.append(line(of, found, milliseconds))
        else:
            missing.append(label(recipe))
    parts = [source(found) + where, markdown(HEAD, lines)]
    if missing:
        parts.append(f"Not run: {'; '.join(missing)}.")
    return "\n\n".join(parts)


def choice(results: Path) -> str:
    """What a user decides by: the loss and the costs of SwiGLU and of SwiMGLU with our recipe.

    A model needs a finished run of SwiGLU to be in the table.

    Raises:
        MissingResultError: no run is finished.
    """
    found, (where, milliseconds) = runs(results), costs(results)
    layers = {
        "SwiGLU": SWIGLU,
        **{f"SwiMGLU, n_m = {n_masks}": recipe for n_masks, recipe in BEST.items()},
        "SwiGLU with as many bytes as n_m = 1": replace(SWIGLU, width=same_load(1)),
        "SwiGLU with as many training operations as n_m = 4": replace(SWIGLU, width=same_training(4)),
    }
    lines = []
    for size in SIZES:
        recipes = {name: replace(recipe, size=size) for name, recipe in layers.items()}
        finished = {name: [run for run in found if replace(run.recipe, seed=0) == one] for name, one in recipes.items()}
        figures = {name: decisive(of, milliseconds) for name, of in finished.items() if of}
        if "SwiGLU" not in figures:
            continue
        swiglu = figures["SwiGLU"]
        for name, (loss, *costs_of) in figures.items():
            ratios = [f"{one:.1f} ({one / base:.2f})" for one, base in zip(costs_of, swiglu[1:], strict=True)]
            lines.append([size, name, f"{loss - swiglu[0]:+.3f}", *("" if "nan" in cell else cell for cell in ratios)])
    head = ["model", "layer", "loss to SwiGLU", "MB a token", "ms a training step", "GB of training memory"]
    return f"{source(found)}{where}\n\n{markdown(head, lines)}"


def decisive(of: Sequence[Finished], milliseconds: Mapping[str, float]) -> tuple[float, float, float, float]:
    """Nats a token, MB a token, ms a training step and GB of training memory, from the runs of a recipe's seeds."""
    one = of[0]
    loss = statistics.fmean(run.loss for run in of) * one.bytes_of_token
    step = milliseconds.get(cost.layer_of(one.recipe).name, math.nan)
    return loss, one.load, step, max(float(run.facts["peak_mb"]) for run in of) / 1000


def line(of: Sequence[Finished], everything: Iterable[Finished], milliseconds: Mapping[str, float]) -> list[str]:
    """The cells of a recipe's row, from its runs with different seeds."""
    one, losses = of[0], [run.loss for run in of]
    glu = replace(baseline(one.recipe), seed=0)
    baselines = [run.loss for run in everything if replace(run.recipe, seed=0) == glu]
    gap = f"{statistics.fmean(losses) - statistics.fmean(baselines):+.4f}" if baselines else ""
    has_masks = one.recipe.has_masks
    # `cost` times a step without a teacher.
    step = None if one.recipe.distilled else milliseconds.get(cost.layer_of(one.recipe).name)
    return [
        label(one.recipe),
        f"{float(one.facts['weights']) / 1e6:.1f} M",
        f"{one.load:.1f}",
        with_spread(losses),
        "" if replace(one.recipe, seed=0) == glu else gap,
        str(len(of)),
        f"{float(one.last['gate_ratio']):.3f}" if has_masks else "",
        f"{float(one.last['flipped']):.1%}" if has_masks else "",
        f"{float(one.facts['tflop']) / 1000:.1f}",
        "" if step is None else f"{step:.1f}",
        "" if math.isnan(peak := max(float(run.facts["peak_mb"]) for run in of)) else f"{peak / 1000:.1f} GB",
    ]


def baseline(recipe: Recipe) -> Recipe:
    """The SwiGLU run with the same seed, size, learning rate and text, which a run is compared with."""
    megabytes = recipe.skip + recipe.megabytes
    lr = Recipe.lr if recipe.start is not None else recipe.lr
    return Recipe("glu", size=recipe.size, megabytes=megabytes, lr=lr, seed=recipe.seed)


def with_spread(values: Sequence[float]) -> str:
    """The mean, and for several values the distance between the smallest and the largest."""
    mean = f"{statistics.fmean(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ({max(values) - min(values):.4f})"


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
    """The fields that differ from the layer's default recipe, as text for a table."""
    default = Recipe(layer=recipe.layer, n_masks=recipe.n_masks, activation=recipe.activation)
    changed = {
        one.name: getattr(recipe, one.name)
        for one in fields(Recipe)
        if one.name != "seed" and getattr(recipe, one.name) != getattr(default, one.name)
    }
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
    return [words.get(name, f"{name} = {value}") for name, value in changed.items()]


def source(found: Sequence[Finished]) -> str:
    """The line above a table: devices, torch, commits and text."""
    devices, commits = (list(dict.fromkeys(run.facts[what] for run in found)) for what in ("device", "commit"))
    facts = found[0].facts
    size = float(facts["corpus.held_out_bytes"]) / 1e6
    return (
        f"{' and '.join(devices)}, torch {facts['torch']}, commits {', '.join(commit[:7] for commit in commits)}; "
        f"text `{facts['corpus.kind']}` "
        f"{facts['corpus.digest']}, {size:.1f} MB held out."
    )


def masks(results: Path) -> str:
    """The gate ratio of each layer at the end, as in the paper's Figure 14, and the agreement and the flips of masks.

    Flips are the share of bits that one step changes: the step before the first point of the curve, and the last step.
    """
    found = [run for run in runs(results) if run.recipe in EXPERIMENTS["layers"] + EXPERIMENTS["best"]]
    found = [run for run in found if run.recipe.has_masks and run.recipe.learned and run.recipe.seed == 0]
    if not found:
        raise MissingResultError(f"{results / FOLDER}: no result of a layer with masks is here")
    ratios = [(run, json.loads(run.last["gate_ratios"])) for run in sorted(found, key=lambda run: run.recipe.n_masks)]
    layers = max(len(of) for _, of in ratios)
    head = ["feed-forward layer", *map(str, range(1, layers + 1)), "agreement", "flips, early", "flips, last"]
    lines = [
        [
            label(run.recipe),
            *(f"{ratio:.3f}" for ratio in of),
            agreement(run.last["agreement"]),
            *(f"{float(row['flips']):.2%}" for row in (run.rows[0], run.last)),
        ]
        for run, of in ratios
    ]
    return f"{source(found)}\n\n{markdown(head, lines)}"


def agreement(text: str) -> str:
    """The mean agreement between masks; empty for one mask."""
    return "" if text == "nan" else f"{float(text):.3f}"


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
