"""The training runs as frames, and their tables: of each experiment, of masks, and for choosing a layer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.frames import form, grid, markdown
from benchmarks.learning import cost
from benchmarks.learning.experiments import (
    AGAIN,
    BEST,
    EXPERIMENTS,
    LARGER,
    SLOW,
    SWIGLU,
    USUAL,
    leveled_glu,
    same_load,
    same_training,
)
from benchmarks.learning.gather import RESULTS
from benchmarks.learning.recipe import KINDS, SIZES, Recipe
from benchmarks.records import read_table
from mglu_ops.nn.leveling import glu_level_gain, level_gain, lu_level_gain


def read(path: Path) -> pd.DataFrame:
    """A table that `benchmarks.learning.gather` wrote, whose head is in `attrs`.

    Raises:
        FileNotFoundError: it is not there.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such table; `python -m benchmarks.learning.gather` makes it")
    head = read_table(path)[0]
    found = pd.read_csv(path, skiprows=len(head), dtype={"commit": str, "torch": str})
    found.attrs = head
    return found


def curves(results: Path, corpus: str = "python") -> pd.DataFrame:
    """The points of all learning curves of a corpus."""
    return read(results / RESULTS.name / f"{corpus}_curves.csv")


def runs(results: Path, corpus: str = "python") -> pd.DataFrame:
    """The runs of a corpus, in the order of their names.

    Besides the columns of the table it has `recipe`, with seed 0; `seed`; `load`, the megabytes that decoding reads for
    a token, which are all weights in 16 bits and the masks, but of its experts only; and `ms`, the time of a training
    step in milliseconds, if it was measured.
    """
    found, costs = read(results / RESULTS.name / f"{corpus}_runs.csv"), results / f"{cost.NAME}.csv"
    ms = {row["name"]: float(row["ms"]) for row in read_table(costs)[1]} if costs.is_file() else {}
    recipes = [recipe_of(row) for row in found.to_dict("records")]
    active = found["recipe.active"] / found["recipe.experts"]
    return found.assign(
        recipe=[replace(recipe, seed=0) for recipe in recipes],
        seed=found["recipe.seed"],
        load=(2 * (found.weights - found.idle_weights) + found.mask_bits * active / 8) / 1e6,
        ms=[ms.get(cost.layer_of(recipe).name) for recipe in recipes],
    ).astype({"ms": float})


def recipe_of(row: Mapping[str, Any]) -> Recipe:
    """The recipe of a run. Fields that are missing have their defaults."""
    given = {name: row.get(f"recipe.{name}") for name in KINDS}
    return Recipe(**{name: KINDS[name](value) for name, value in given.items() if pd.notna(value)})


def by_recipe(found: pd.DataFrame) -> pd.DataFrame:
    """A row for each recipe: mean losses over seeds, the largest memory, and all else of the first seed.

    `seeds` counts the seeds, and `distance` is the largest distance between two of their losses.
    """
    seeds = found.groupby("recipe", sort=False)
    of = found.drop_duplicates("recipe").set_index("recipe")
    losses = {name: seeds[name].agg(statistics.fmean) for name in found if name.startswith("held_out")}
    distance = seeds.held_out.max() - seeds.held_out.min()
    return of.assign(**losses, seeds=seeds.size(), distance=distance, peak_mb=seeds.peak_mb.max())


def bytes_of_token(found: pd.DataFrame) -> float:
    """The mean number of bytes of held-out text in a token."""
    return float(found.attrs["corpus.held_out_bytes"]) / float(found.attrs["corpus.held_out_tokens"])


def sources(results: Path) -> str:
    """A row for each corpus: its text, and where and with which commits its runs were trained.

    Raises:
        FileNotFoundError: no corpus has tables.
    """
    lines, costs = [], results / f"{cost.NAME}.csv"
    for path in sorted((results / RESULTS.name).glob("*_runs.csv")):
        found = read(path)
        facts, held_out = found.attrs, f"{float(found.attrs['corpus.held_out_bytes']) / 1e6:.1f} MB"
        text = [facts["corpus.kind"], facts["corpus.digest"], held_out]
        where = (", ".join(one.unique()) for one in (found.device, found.torch, found.commit.str[:7]))
        lines.append([f"`{path.stem.removesuffix('_runs')}`", *text, len(found), *where])
    if not lines:
        raise FileNotFoundError(f"{results}: no tables of runs; `python -m benchmarks.learning.gather` makes them")
    if costs.is_file():
        facts = read_table(costs)[0]
        commits = ", ".join(commit[:7] for commit in facts["commit"].split(", "))
        lines.append(["times of a step", "random", "", "", "", facts["device"], facts["torch"], commits])
    return markdown(["corpus", "text", "digest", "held out", "runs", "devices", "torch", "commits"], lines)


def experiment(results: Path, name: str) -> str:
    """The table of an experiment: a row for each recipe with a finished run, then the names of the other recipes.

    'To SwiGLU' is the difference to the mean of the SwiGLU runs of the same size, text and learning rate, in nats a
    byte; SwiGLU has leveled weights if it was trained with no others. A mean over several seeds is followed by the
    largest distance between two of them. With several kinds of text, the loss of each kind follows.

    Raises:
        FileNotFoundError: the corpus of the experiment has no tables.
    """
    of = by_recipe(runs(results, "python" if name in USUAL else "texts"))
    wanted = dict.fromkeys(replace(one, seed=0) for one in EXPERIMENTS[name])
    shown = of.reindex([one for one in wanted if one in of.index])
    missing = [label(one) for one in wanted if one not in of.index]
    parts = [grid("feed-forward layer", cells(shown, of).set_axis(shown.index.map(label)))] if len(shown) else []
    if missing:
        parts.append(f"Not run: {'; '.join(missing)}.")
    return "\n\n".join(parts)


def cells(shown: pd.DataFrame, of: pd.DataFrame) -> pd.DataFrame:
    """The cells of some recipes in the table of an experiment; `of` has all recipes."""
    gaps = [of.held_out[one] - of.held_out[dense] if dense else None for one, dense in baselines(of, shown.index)]
    distance = shown.distance.where(shown.seeds > 1)
    kinds = [name for name in shown if name.startswith("held_out_")]
    masks = shown.index.map(lambda one: one.has_masks)
    timed = shown.index.map(lambda one: not one.distilled)  # steps were timed without a teacher
    return pd.DataFrame(
        {
            "weights": (shown.weights / 1e6).map("{:.1f} M".format),
            "MB a token": shown.load.map("{:.1f}".format),
            "nats a byte": shown.held_out.map("{:.4f}".format) + distance.map(form(" ({:.4f})")),
            **{name.removeprefix("held_out_"): shown[name].map("{:.4f}".format) for name in kinds},
            "to SwiGLU": pd.Series(gaps, shown.index, dtype=float).map(form("{:+.4f}")),
            "seeds": shown.seeds.astype(str),
            "gate ratio": shown.gate_ratio.where(masks).map(form("{:.3f}")),
            "flipped": shown.flipped.where(masks).map(form("{:.1%}")),
            "PFLOP": (shown.tflop / 1000).map("{:.1f}".format),
            "ms a step": shown.ms.where(timed).map(form("{:.1f}")),
            "memory": (shown.peak_mb / 1000).map(form("{:.1f} GB")),
        }
    )


def baselines(of: pd.DataFrame, recipes: pd.Index) -> list[tuple[Recipe, Recipe | None]]:
    """Each recipe with the SwiGLU recipe of the same size, learning rate and text; None for SwiGLU itself."""
    pairs = []
    for one in recipes:
        lr = Recipe.lr if one.start is not None else one.lr
        dense = Recipe("glu", size=one.size, megabytes=one.skip + one.megabytes, lr=lr)
        dense = replace(dense, experts=one.experts, active=one.active)
        swiglus = (dense, replace(dense, weight_gain=leveled_glu("silu").weight_gain))
        found = next((swiglu for swiglu in swiglus if swiglu in of.index), one)
        pairs.append((one, None if found == one else found))
    return pairs


def choice(results: Path) -> str:
    """What a user decides by: the loss and the costs of SwiGLU and of masks with our recipe.

    A model needs a finished run of SwiGLU to be in the table.
    """
    found = runs(results)
    of, unit = by_recipe(found), bytes_of_token(found)
    costs = of.assign(peak_gb=of.peak_mb / 1000)[["load", "ms", "peak_gb"]]
    layers = {label(one): one for one in (SWIGLU, *BEST.values())}
    layers["SwiGLU with as many bytes as 1 mask"] = replace(SWIGLU, width=same_load(1))
    layers["SwiGLU with as many training operations as 4 masks"] = replace(SWIGLU, width=same_training(4))
    lines = []
    for size, (name, recipe) in product(SIZES, layers.items()):
        one, swiglu = (replace(layer, size=size) for layer in (recipe, SWIGLU))
        if one in of.index and swiglu in of.index:
            ours, theirs = costs.loc[one], costs.loc[swiglu]
            ratios = [form(f"{cost:.1f} ({{:.2f}})")(cost / other) for cost, other in zip(ours, theirs, strict=True)]
            lines.append([size, name, f"{unit * (of.held_out[one] - of.held_out[swiglu]):+.3f}", *ratios])
    head = ["model", "layer", "loss to SwiGLU", "MB a token", "ms a training step", "GB of training memory"]
    return markdown(head, lines)


def label(recipe: Recipe) -> str:
    """The name of a recipe in a table: its layer, and the fields of `Recipe` that differ from our recipe.

    Without masks, `leveled` says that the layer starts with leveled weights, which ReLU squared does unless its name
    has another `weight_gain`.
    """
    gate = {"silu": "SiLU", "gelu": "GELU", "relu": "ReLU", "relu_squared": "ReLU squared"}[recipe.activation]
    glus = {"silu": "SwiGLU", "gelu": "GeGLU", "relu": "ReGLU", "relu_squared": "GLU with ReLU squared"}
    glu = ("scaled " * is_scaled(recipe) + "leveled " * (recipe.weight_gain != 1)) + glus[recipe.activation]
    masks = f"Top-{recipe.top_k} of " * bool(recipe.top_k) + f"{recipe.n_masks} mask" + "s" * (recipe.n_masks > 1)
    masks += f" with {gate}" * (recipe.activation != "silu")
    names = {
        "lu": gate + ", weight_gain 1" * (not is_leveled(recipe)),
        "glu": glu,
        "glu_shared": f"{glu}, one shared matrix",
        "mglu": masks,
        "no_gate_mask": f"{masks}, on the value only",
        "no_value_mask": f"{masks}, on the gate only",
    }
    known = {"size": "{} model", "width": "{:.3g} times as wide", "megabytes": "{:g} MB", "learned": "not learned"}
    said = {"layer", "activation", "top_k", "weight_gain", "mask_lr", *["scale"] * is_scaled(recipe)}
    words = [
        known.get(name, name if value is True else f"{name} {{}}").format(value)
        for name, value in recipe.changes.items()
        if name not in said
    ]
    return ", ".join([names[recipe.layer], *how_masks_learn(recipe), *words])


def is_scaled(recipe: Recipe) -> bool:
    return recipe.layer == LARGER.layer and recipe.scale == LARGER.scale


def how_masks_learn(recipe: Recipe) -> list[str]:
    """The words for masks that start or learn with other weights or another rate than by our recipe."""
    if not recipe.has_masks:
        return []
    has_rate = recipe.learned and not recipe.flips
    other_rate = has_rate and recipe.mask_lr != SLOW.mask_lr
    if other_rate and recipe.mask_lr == 1 and recipe.weight_gain == 1 and recipe.start is None:
        return ["the paper's recipe"]
    other_weights = not is_leveled(recipe) and recipe.start is None
    return ["the paper's weights"] * other_weights + [f"mask_lr {recipe.mask_lr:g}"] * other_rate


def is_leveled(recipe: Recipe) -> bool:
    """True if the initial weights let the result start as large as the sum of four masks with the same activation."""
    gains = {
        "lu": lambda: lu_level_gain(recipe.activation),
        "glu": lambda: glu_level_gain(recipe.activation),
        "mglu": lambda: level_gain(recipe.n_masks, recipe.activation, top_k=recipe.top_k),
    }
    again = {one.layer: one.weight_gain for one in AGAIN}
    gain = gains[recipe.layer]() if recipe.layer in gains else again[recipe.layer]
    return abs(recipe.weight_gain - gain) < 1e-3


TABLES: dict[str, Callable[[Path], str]] = {
    "learning_sources": sources,
    **{f"learning_{name}": partial(experiment, name=name) for name in EXPERIMENTS if name != "structure"},
    "learning_choice": choice,
}
"""Name of a table to the function that makes it from the folder of the results."""
