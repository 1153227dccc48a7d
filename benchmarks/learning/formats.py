"""Measures how weights in 8 and 4 bits affect quality: the held-out loss of trained models in each weight format.

python -m benchmarks.learning.formats --corpus DIR --runs DIR [--out DIR] [--seconds 540]

The models are SwiGLU and our recipe with 1, 4 and 8 masks. Their runs and trained weights are kept in --runs, so the
same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.frames import grid, in_order
from benchmarks.frames import load as load_frame
from benchmarks.learning.corpus import Corpus, load
from benchmarks.learning.experiments import BEST, LEAST_SECONDS, SWIGLU, is_done
from benchmarks.learning.gather import RESULTS
from benchmarks.learning.recipe import Recipe, projection_weights
from benchmarks.learning.train import corpus_facts, run
from benchmarks.learning.training import Training, keep_all_graphs
from benchmarks.records import environment, write_table
from mglu_ops.accuracy import relative_error
from mglu_ops.formats import FORMATS

NAME = "learning_formats"
PROTOCOL = (
    "models trained as in the experiments, with seed 0; W of each MGLU, and the gate and value weights of each SwiGLU, "
    "are rounded from float32 to the nearest weights of a format (mglu_ops/formats.py) after training, and all other "
    "weights stay; held_out: nats a byte over all held-out text, in bfloat16 autocast, which rounds the decoded "
    "weights too; error: of these weights, relative to their norm, the root mean square over layers"
)
RECIPES = tuple(replace(one, size=size) for size in ("25M", "90M") for one in (SWIGLU, BEST[1], BEST[4], BEST[8]))


@keep_all_graphs  # type: ignore[untyped-decorator]
@torch.no_grad()
def rows_of(training: Training) -> list[dict[str, Any]]:
    """The held-out loss of a trained model in each format, `dense` first.

    The model is left with rounded weights. Masks need not be frozen, since they do not depend on the weights.
    """
    recipe, weights = training.recipe, projection_weights(training.model)
    trained, rows = [weight.clone() for weight in weights], []
    for name, one in FORMATS.items():
        for weight, exact in zip(weights, trained, strict=True):
            weight.copy_(one.dequantize(*one.quantize(exact), exact.dtype))
        errors = torch.tensor([relative_error(*pair) for pair in zip(weights, trained, strict=True)])
        row = {
            "run": recipe.name,
            "model": recipe.size,
            "layer": f"SwiMGLU, n_m = {recipe.n_masks}" if recipe.has_masks else "SwiGLU",
            "format": name,
            "held_out": float(f"{training.losses()['held_out']:.6g}"),
            "error": float(f"{errors.square().mean().sqrt().item():.3g}"),
        }
        print(*row.values(), flush=True)
        rows.append(row)
    return rows


def measure(
    recipes: Sequence[Recipe],
    corpus: Corpus,
    runs: Path,
    out: Path,
    device: str = "cuda",
    seconds: float = math.inf,
    compiled: bool = True,
) -> bool:
    """Train the models whose weights are not in `runs`, and write `learning_formats.csv` into the folder `out`.

    Returns:
        True if all models were trained within `seconds`. Otherwise the file has only the models that were.

    Raises:
        ValueError: a model in `runs` was trained on another text.
        TimeoutError: another process trains one of the models in `runs`.
    """
    begin, rows = time.perf_counter(), []
    facts = environment(PROTOCOL) | corpus_facts(corpus)
    for recipe in recipes:
        weights = runs / f"{recipe.name}.weights"
        if not (weights.is_file() and is_done(recipe, runs, corpus.sizes.digest)):
            rest = seconds - (time.perf_counter() - begin)
            if rest < LEAST_SECONDS or not run(recipe, corpus, runs, device, rest, compiled, keeps_weights=True):
                return False
        training = Training(recipe, corpus, device, compiled)
        training.model.load_state_dict(torch.load(weights, map_location=device, weights_only=True))
        rows += rows_of(training)
        write_table(rows, facts, out, NAME)
    return True


def table(results: Path) -> str:
    """A row for each model: the loss with dense weights in nats per byte, and the change of the loss in each format."""
    rows = load_frame(results, NAME)
    facts, losses = rows.attrs, in_order(rows, ["model", "layer"], "format", rows.held_out)
    cells = {"16 bits": losses.dense.map("{:.4f}".format)}
    for name in (name for name, one in FORMATS.items() if not one.is_dense):
        cells[f"`{name}`"] = (losses[name] - losses.dense).map("{:+.4f}".format)
    source = f"{facts['device']}, torch {facts['torch']}, commit {facts['commit'][:7]}; text `{facts['corpus.kind']}` "
    source += f"{facts['corpus.digest']}, {float(facts['corpus.held_out_bytes']) / 1e6:.1f} MB held out."
    return f"{source}\n\n{grid('model', cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="a folder that corpus.py prepared")
    parser.add_argument("--runs", type=Path, required=True, help="a folder for the runs and the trained weights")
    parser.add_argument("--out", type=Path, default=RESULTS.parent)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after about this time")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    corpus = load(options.corpus)
    if measure(RECIPES, corpus, options.runs, options.out, options.device, options.seconds):
        print(table(options.out))
    else:
        print("the time is over; repeat the command to continue")


if __name__ == "__main__":
    main()
