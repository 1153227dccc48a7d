"""Trains one language model and writes its learning curve.

python -m benchmarks.learning.train --corpus DIR --out DIR [--layer mglu] [--n-masks 4] [--lr 0.001] ... [--seconds 540]

The optimiser is AdamW with the paper's betas, epsilon, weight decay, clipping of gradients, warm-up over a tenth of the
steps and cosine decay to a tenth of the rate. A run writes a checkpoint every two minutes, and when it stops after
`--seconds`. The same command resumes from the checkpoint. On a CPU, a run that was stopped gives the same bits as a run
without a stop. On a GPU it does not, because the backward pass of attention adds in no fixed order.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from benchmarks.language_model import count
from benchmarks.learning.corpus import Corpus, load
from benchmarks.learning.mixture import expert_weights
from benchmarks.learning.recipe import KINDS, Recipe
from benchmarks.learning.schedule import points, steps_of
from benchmarks.learning.training import FIT_STEPS, Training, fitted, keep_all_graphs, masked_layers
from benchmarks.records import environment, write_table, write_whole

PROTOCOL = (
    "the corpus's windows of 512 tokens in one random order for all runs, or for all runs with a seed if they are "
    "paired, 32 a step; bfloat16 autocast of float32 parameters; AdamW, betas 0.9 and 0.99, epsilon 1e-8, weight decay "
    "0.1 (not of norms and mask logits), gradients clipped to a norm of 1, warm-up over 10% of the steps, cosine to "
    "10% of the rate; held_out: nats a byte over all held-out text, before the last point over about 2.5 M tokens of "
    "longer text; train: nats a token, mean since the last point, and worst, of one step; seconds: steps alone, "
    "without evaluations, while other runs may have the same GPU; peak_mb: parameters, gradients, state of the "
    "optimiser and activations"
)
MOST_NAMES = 100
"""The head of a result names up to this many held-out packages. If there are more, it has only their number."""
SAVE_SECONDS = 120.0
"""Seconds between two checkpoints of a run. They limit what is lost if the run is killed."""


@keep_all_graphs  # type: ignore[untyped-decorator]
def run(
    recipe: Recipe,
    corpus: Corpus,
    out: Path,
    device: str = "cuda",
    limit: float = math.inf,
    compiled: bool = True,
    keeps_weights: bool = False,
) -> bool:
    """Train, and write `NAME.csv` into a folder, where NAME is `recipe.name`. Return whether the run is finished.

    A recipe with a `start` first trains its teacher, or waits for the process that trains it, unless the folder has the
    teacher's `NAME.weights`. Runs that differ only in the training after a fit share the fit, in the folder `fits`.
    Processes that share a folder never train the same run at once.

    Args:
        recipe: what to train.
        corpus: the text.
        out: the folder. The run resumes from a checkpoint `NAME.pt` in it, and removes the checkpoint at the end.
        device: "cuda" or "cpu".
        limit: the most seconds; the run stops at the last point of its curve that it expects to reach in time.
        compiled: whether blocks and loss are compiled.
        keeps_weights: whether the trained weights are written to `NAME.weights`. The weights of GLU are always written.

    Raises:
        TimeoutError: another process trains this run.
    """
    end = time.perf_counter() + limit
    out.mkdir(parents=True, exist_ok=True)
    with FileLock(out / f"{recipe.name}.lock", timeout=0):
        teacher = None
        if recipe.start is not None:
            weights = out / f"{recipe.teacher.name}.weights"
            wait = limit if math.isfinite(limit) else -1  # -1 waits without a limit
            try:
                with FileLock(out / f"{recipe.teacher.name}.lock", timeout=wait):
                    if not weights.is_file() and not _run(Training(recipe.teacher, corpus, device, compiled), out, end):
                        return False
            except TimeoutError:
                return False
            teacher = torch.load(weights, map_location=device, weights_only=True)
        fit = _fit(recipe, corpus, teacher, out / "fits", device) if teacher and recipe.is_fitted else None
        return _run(Training(recipe, corpus, device, compiled, teacher, fit), out, end, keeps_weights)


def _fit(recipe: Recipe, corpus: Corpus, teacher: dict[str, Tensor], folder: Path, device: str) -> dict[str, Any]:
    """Fit the recipe's model to its teacher, or load the fit if a run with the same fit has left it in the folder."""
    if steps_of(recipe.megabytes, corpus) > FIT_STEPS:
        recipe = replace(recipe, megabytes=Recipe.megabytes)  # more text does not change the sample
    path = folder / f"{recipe.fit.name}.fit"
    folder.mkdir(exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.is_file():
            made = fitted(recipe, corpus, teacher, device)
            write_whole(path, lambda temporary: torch.save(made, temporary))
        return torch.load(path, map_location=device, weights_only=True)


def _run(training: Training, out: Path, end: float, keeps_weights: bool = False) -> bool:
    """Train from the run's checkpoint, if there is one, until `end` on the clock `time.perf_counter`."""
    recipe = training.recipe
    checkpoint = out / f"{recipe.name}.pt"
    training.warm_up()
    if checkpoint.is_file():
        training.restore(checkpoint)
    elif recipe.start is not None:
        training.progress.rows.append(training.first_point())
    saved = time.perf_counter()
    for last in points(training.steps):
        if last <= training.progress.step:
            continue
        start = time.perf_counter()
        training.advance(last)
        row = training.progress.rows[-1]
        print(f"{recipe.name}: {row['megabytes']:.1f} MB, train {row['train']:.4f}", end=" ")
        print(f"held out {row['held_out']:.4f} nats a byte, {row['seconds']:.0f} s", flush=True)
        now = time.perf_counter()
        is_over = now + (now - start) > end  # the next point will take about as long as this one
        if last < training.steps and (is_over or now - saved > SAVE_SECONDS):
            training.save(checkpoint)
            saved = time.perf_counter()
            if is_over:
                return False
    if recipe.layer == "glu" or keeps_weights:
        state = training.model.state_dict()
        write_whole(out / f"{recipe.name}.weights", lambda path: torch.save(state, path))
    write_table(training.progress.rows, head(training), out, recipe.name)
    checkpoint.unlink(missing_ok=True)
    return True


def head(training: Training) -> dict[str, str]:
    """The facts at the head of a result: environment, recipe, corpus, and costs of the run."""
    logits = sum(p.numel() for n, p in training.model.named_parameters() if "mask_logits" in n)
    bits = sum(layer.weight.numel() * layer.n_masks for layer in masked_layers(training.model))
    cost = {
        "weights": count(training.model) - logits,
        "mask_bits": bits,
        "idle_weights": round((1 - training.recipe.active / training.recipe.experts) * expert_weights(training.model)),
        "steps": training.steps,
        "tflop": round(training.recipe.flops_of_token * training.steps * training.windows.tokens_of_step / 1e12),
        "seconds": round(training.progress.seconds, 1),
        "peak_mb": round(training.progress.peak_mb, 1),
        "tokenizers": version("tokenizers"),
    }
    return {
        **environment(PROTOCOL),
        **{f"recipe.{key}": str(value) for key, value in asdict(training.recipe).items()},
        **corpus_facts(training.corpus),
        **{key: str(value) for key, value in cost.items()},
    }


def corpus_facts(corpus: Corpus) -> dict[str, str]:
    """What the head of a result says about the text."""
    sizes = asdict(corpus.sizes)
    packages = sizes["held_out_packages"]
    sizes["held_out_packages"] = " ".join(packages) if len(packages) <= MOST_NAMES else f"{len(packages)} packages"
    if parts := sizes.pop("parts"):
        sizes["parts"] = json.dumps(parts)
    return {f"corpus.{key}": str(value) for key, value in sizes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="a folder that corpus.py prepared")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="stop after about this time, and leave a checkpoint"
    )
    for name, kind in KINDS.items():
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        parser.add_argument(f"--{name.replace('_', '-')}", default=getattr(Recipe, name), **how)
    options = parser.parse_args()
    recipe = Recipe(**{name: getattr(options, name) for name in KINDS})
    finished = run(recipe, load(options.corpus), options.out, options.device, options.seconds)
    print("finished" if finished else "stopped; repeat the command to continue")


if __name__ == "__main__":
    main()
