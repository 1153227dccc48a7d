"""The training runs as frames, the names of layers, and the tables of corpora and of costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.frames import form, grid, many, markdown
from benchmarks.learning import cost
from benchmarks.learning.experiments import BEST, LARGER, SLOW, SWIGLU, same_load, same_training
from benchmarks.learning.gather import RESULTS
from benchmarks.learning.recipe import KINDS, SIZES, Recipe
from benchmarks.records import read_table


def read(path: Path) -> pd.DataFrame:
    """A table that `benchmarks.learning.gather` wrote. The frame's `attrs` hold its head.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such result; `python -m benchmarks.learning.gather` makes this table")
    head = read_table(path)[0]
    found = pd.read_csv(path, skiprows=len(head), dtype={"commit": str, "torch": str})
    found.attrs = head
    return found


def runs(results: Path, corpus: str = "python") -> pd.DataFrame:
    """The runs of a corpus, in the order of their names.

    The frame has the columns of the table and four more. `recipe` is the recipe with seed 0, and `seed` is its seed.
    `load` is the megabytes that decoding a token reads: all weights in 16 bits and the masks, without experts that the
    token does not use, and 2:4 SwiGLU's with 9 bits a weight: half of them in 16 bits, each with its place in 2 bits.
    `ms` is the time of a training step in milliseconds, if it was measured.
    """
    found, costs = read(results / RESULTS.name / f"{corpus}_runs.csv"), results / f"{cost.NAME}.csv"
    ms = {row["name"]: float(row["ms"]) for row in read_table(costs)[1]} if costs.is_file() else {}
    recipes = [recipe_of(row) for row in found.to_dict("records")]
    active = found["recipe.active"] / found["recipe.experts"]
    pruned = [one.layer == "glu" and one.structure == "2:4" for one in recipes]
    gated = [2 * one.sizes.layers * one.sizes.hidden * one.sizes.intermediate for one in recipes]
    weights = 2 * (found.weights - found.idle_weights) - (2 - 9 / 8) * np.multiply(pruned, gated)
    return found.assign(
        recipe=[replace(recipe, seed=0) for recipe in recipes],
        seed=found["recipe.seed"],
        load=(weights + found.mask_bits * active / 8) / 1e6,
        ms=[ms.get(cost.layer_of(recipe).name) for recipe in recipes],
    ).astype({"ms": float})


def recipe_of(row: Mapping[str, Any]) -> Recipe:
    """The recipe of a run. Fields that are missing have their defaults."""
    given = {name: row.get(f"recipe.{name}") for name in KINDS}
    return Recipe(**{name: KINDS[name](value) for name, value in given.items() if pd.notna(value)})


def by_recipe(found: pd.DataFrame) -> pd.DataFrame:
    """A frame with a row for each recipe: the number of seeds, the mean loss (NaN if a run diverged), and the costs."""
    return found.groupby("recipe", sort=False).agg(
        seeds=("seed", "size"),
        held_out=("held_out", lambda losses: losses.mean(skipna=False)),
        load=("load", "first"),
        tflop=("tflop", "first"),
        ms=("ms", "first"),
        peak_gb=("peak_mb", lambda peaks: peaks.max() / 1000),
    )


def bytes_of_token(found: pd.DataFrame) -> float:
    """The mean number of bytes of held-out text in a token."""
    return float(found.attrs["corpus.held_out_bytes"]) / float(found.attrs["corpus.held_out_tokens"])


# --- Names of layers --------------------------------------------------------------------------------------------------

GATES = {
    "silu": ("SiLU", "SwiGLU"),
    "gelu": ("GELU", "GeGLU"),
    "relu": ("ReLU", "ReGLU"),
    "relu_squared": ("ReLU squared", "GLU with ReLU squared"),
}
"""Activation -> its name, and the name of GLU with this activation."""
SAID = {"layer", "activation", "top_k", "weight_gain", "mask_lr", "size", "skip", "vocabulary", "paired", "average"}
"""Fields of a recipe that `label` does not append as `name value`: it words them otherwise, or leaves them out."""
WORDS = {"width": "{:.3g} times as wide", "megabytes": "{:g} MB", "learned": "not learned", "structure": "{}"}
"""Field -> the words that `label` uses instead of the field's name and value."""


def label(recipe: Recipe) -> str:
    """The name of a layer in a table, with the fields of its recipe that differ from our recipe.

    The name omits the size of the model, which has its own place in tables, and what all runs of a corpus share.
    """
    gate, glu = GATES[recipe.activation]
    is_scaled = recipe.layer == LARGER.layer and recipe.scale == LARGER.scale
    glu = "scaled " * is_scaled + "leveled " * (recipe.weight_gain != 1) + glu
    masks = f"Top-{recipe.top_k} of " * bool(recipe.top_k) + many(recipe.n_masks, "mask")
    masks += f" with {gate}" * (recipe.activation != "silu")
    names = {
        "lu": gate,
        "glu": glu,
        "glu_shared": f"{glu}, one shared matrix",
        "mglu": masks,
        "no_gate_mask": f"{masks}, on the value only",
        "no_value_mask": f"{masks}, on the gate only",
    }
    has_usual_weights = recipe.weight_gain == 1 and recipe.start is None and not recipe.layer.startswith("glu")
    rate = recipe.mask_lr if recipe.has_masks and not recipe.flips else SLOW.mask_lr
    words = ["the paper's weights"] * (has_usual_weights and not is_leveled(recipe))
    words += [f"mask_lr {rate:g}"] * (rate != SLOW.mask_lr)
    if has_usual_weights and rate == 1:
        words = ["the paper's recipe"]
    for name, value in recipe.changes.items():
        if name not in SAID and not (name == "scale" and is_scaled):
            words.append(WORDS.get(name, name if value is True else f"{name} {{}}").format(value))
    return ", ".join([names[recipe.layer], *words])


def is_leveled(recipe: Recipe) -> bool:
    """True for leveled initial weights. For four masks, leveled weights are the usual weights of `nn.Linear`."""
    return recipe.weight_gain != 1 or (recipe.layer, recipe.n_masks) == ("mglu", 4)


# --- Tables -----------------------------------------------------------------------------------------------------------


def sources(results: Path) -> str:
    """A table with a row for each corpus: its text, and the devices, torch versions and commits of its runs.

    Raises:
        FileNotFoundError: no corpus has tables.
    """
    lines = {}
    for path in sorted((results / RESULTS.name).glob("*_runs.csv")):
        found = read(path)
        lines[f"`{path.stem.removesuffix('_runs')}`"] = {
            "text": found.attrs["corpus.kind"],
            "digest": found.attrs["corpus.digest"],
            "held out": f"{float(found.attrs['corpus.held_out_bytes']) / 1e6:.1f} MB",
            "runs": str(len(found)),
            "devices": ", ".join(found.device.unique()),
            "torch": ", ".join(found.torch.unique()),
            "commits": ", ".join(found.commit.str[:7].unique()),
        }
    if not lines:
        raise FileNotFoundError(f"{results}: no tables of runs; `python -m benchmarks.learning.gather` makes them")
    return grid("corpus", pd.DataFrame(lines).T)


def choice(results: Path) -> str:
    """A table for choosing a layer: loss and costs of our recipe with each number of masks, compared with SwiGLU."""
    found, lines = runs(results), []
    of, unit = by_recipe(found), bytes_of_token(found)
    layers = {label(one): one for one in (SWIGLU, *BEST.values())}
    layers["SwiGLU with as many bytes as 1 mask"] = replace(SWIGLU, width=same_load(1))
    layers["SwiGLU with as many training operations as 4 masks"] = replace(SWIGLU, width=same_training(4))
    costs = {"load": "MB a token", "ms": "ms a training step", "peak_gb": "GB of training memory"}
    for size, (name, recipe) in product(SIZES, layers.items()):
        one, swiglu = (replace(layer, size=size) for layer in (recipe, SWIGLU))
        if one in of.index and swiglu in of.index:
            ours, theirs = of.loc[one], of.loc[swiglu]
            ratios = [form(f"{ours[column]:.1f} ({{:.2f}})")(ours[column] / theirs[column]) for column in costs]
            lines.append([size, name, f"{unit * (ours.held_out - theirs.held_out):+.3f}", *ratios])
    return markdown(["model", "layer", "loss to SwiGLU", *costs.values()], lines)


TABLES: dict[str, Callable[[Path], str]] = {"learning_sources": sources, "learning_choice": choice}
"""Name of a table -> the function that makes it from a folder of results."""
