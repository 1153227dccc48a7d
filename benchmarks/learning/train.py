"""Trains one language model and writes its learning curve.

python -m benchmarks.learning.train --corpus DIR --out DIR [--layer mglu] [--n-masks 4] [--lr 0.001] ... [--seconds 540]

AdamW with the paper's betas, epsilon, weight decay, clipping of gradients, warm-up over a tenth of the steps and cosine
decay to a tenth of the rate. A run that has to stop, at `--seconds`, leaves a checkpoint, from which the same command
goes on. Its result is then bit for bit what it would have been without the stop.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from benchmarks.language_model import LanguageModel, count
from benchmarks.learning.corpus import Corpus, load
from benchmarks.learning.recipe import CONTEXT, SEQUENCES, Recipe, take_over
from benchmarks.records import environment, write_table
from mglu_ops.nn import MGLU, MaskStatistics, NaiveMGLU, flip_ratio, parameter_groups

PROTOCOL = (
    "the corpus's windows of 512 tokens in one random order for all runs, 32 a step; bfloat16 autocast of float32 "
    "parameters; AdamW, betas 0.9 and 0.99, epsilon 1e-8, weight decay 0.1 (not of norms and mask logits), gradients "
    "clipped to a norm of 1, warm-up over 10% of the steps, cosine to 10% of the rate; held_out: nats a byte over all "
    "held-out text"
)
WEIGHT_DECAY = 0.1
WARM_UP = 0.1
LAST_RATE = 0.1
MAX_NORM = 1.0
EVALUATIONS = 20
"""Points of a learning curve."""


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        step: steps that are done.
        seconds: time of these steps, without evaluations and compilations.
        rows: the learning curve so far.
    """

    step: int = 0
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)


class Windows:
    """The windows of a corpus in the order in which every run reads them, `[SEQUENCES, CONTEXT + 1]` a step.

    Args:
        tokens: `[train_tokens]`.
        device: where the batches are.
    """

    def __init__(self, tokens: Tensor, device: str) -> None:
        self.tokens = tokens.to(device, torch.int32)  # uint16 cannot be indexed on every device
        self.windows = (len(tokens) - 1) // CONTEXT
        if self.windows < SEQUENCES:
            raise ValueError(f"tokens: got {len(tokens)}, must be more than {SEQUENCES * CONTEXT}")
        self.steps_of_epoch = self.windows // SEQUENCES
        self._offsets = torch.arange(CONTEXT + 1, device=device)
        self._epoch, self._starts = -1, torch.empty(0)

    def batch(self, step: int) -> Tensor:
        """The tokens of a step, int64."""
        epoch, index = divmod(step, self.steps_of_epoch)
        if epoch != self._epoch:
            order = torch.randperm(self.windows, generator=torch.Generator().manual_seed(epoch))
            self._epoch, self._starts = epoch, (order * CONTEXT).to(self.tokens.device)
        starts = self._starts[index * SEQUENCES : (index + 1) * SEQUENCES]
        return self.tokens[starts[:, None] + self._offsets].long()


def steps_of(megabytes: float, corpus: Corpus) -> int:
    """The number of steps that read so much text."""
    tokens = megabytes * 1e6 * corpus.sizes.train_tokens / corpus.sizes.train_bytes
    return round(tokens / (SEQUENCES * CONTEXT))


def rate(step: int, steps: int) -> float:
    """The learning rate of a step as a fraction of the largest."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))


class Training:
    """A run in progress.

    Args:
        recipe: what to train.
        corpus: the text.
        device: "cuda" or "cpu".
        compiled: whether blocks and loss are compiled.
        teacher: the state of the trained `recipe.teacher`, where the recipe has a `start`.
    """

    def __init__(
        self,
        recipe: Recipe,
        corpus: Corpus,
        device: str = "cuda",
        compiled: bool = True,
        teacher: Mapping[str, Tensor] | None = None,
    ) -> None:
        torch._dynamo.reset()
        self.recipe, self.corpus, self.device = recipe, corpus, device
        self.steps, self.progress = max(1, steps_of(recipe.megabytes, corpus)), Progress()
        self.skipped = steps_of(recipe.skip, corpus)
        with torch.device(device):
            self.model: LanguageModel = recipe.model()
        if recipe.start is not None:
            if teacher is None:
                raise ValueError(f"teacher: got None, must be the state of {recipe.teacher.name}")
            take_over(self.model, teacher, recipe.start)
        if compiled:
            self.model.compile_parts()
        groups = parameter_groups(
            self.model, lr=recipe.lr, weight_decay=WEIGHT_DECAY, mask_lr=recipe.mask_lr * recipe.lr
        )
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-8, fused=device == "cuda")
        self.largest = [group["lr"] for group in self.optimizer.param_groups]
        self.windows = Windows(corpus.train, device)
        self.statistics = MaskStatistics(self.model) if recipe.has_masks else None
        self.first_masks = [packed_masks(layer) for layer in masked_layers(self.model)]

    def step(self) -> Tensor:
        """Take a step and return its loss, without waiting for the device."""
        step = self.progress.step
        for group, largest in zip(self.optimizer.param_groups, self.largest, strict=True):
            stopped = group["name"] == "mask_logits" and step >= self.recipe.mask_stop * self.steps
            group["lr"] = 0.0 if stopped else largest * rate(step, self.steps)
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.model(self.windows.batch(self.skipped + step))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        return loss.detach()

    def warm_up(self) -> None:
        """Compile what a step and an evaluation need, and leave everything as it was."""
        parameters = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.step()
        self.held_out()
        with torch.no_grad():
            for parameter, before in zip(self.model.parameters(), parameters, strict=True):
                parameter.copy_(before)
        self.optimizer.state.clear()
        self.progress = Progress()

    def advance(self, last: int) -> None:
        """Take steps up to number `last`, and add a point to the curve."""
        before, begin = self.progress.step, time.perf_counter()
        total = torch.zeros((), device=self.device)
        for _ in range(before, last):
            total += self.step()
        loss = total.item() / (last - before)  # waits for the device
        self.progress.seconds += time.perf_counter() - begin
        self.progress.rows.append(self.point(loss))

    @torch.no_grad()
    def held_out(self) -> float:
        """The loss on all held-out text, in nats a byte."""
        tokens = self.corpus.held_out.to(self.device, torch.int32)
        sizes = self.corpus.token_bytes.to(self.device)
        windows = (len(tokens) - 1) // CONTEXT
        nats, size = torch.zeros((), device=self.device, dtype=torch.float64), 0
        offsets = torch.arange(CONTEXT + 1, device=self.device)
        # Only whole batches, so that no other shape is compiled.
        for first in range(0, windows - windows % SEQUENCES or windows, SEQUENCES):
            starts = torch.arange(first, min(first + SEQUENCES, windows), device=self.device) * CONTEXT
            batch = tokens[starts[:, None] + offsets].long()
            with torch.autocast(self.device, torch.bfloat16):
                nats += self.model(batch).double() * batch[:, 1:].numel()
            size += int(sizes[batch[:, 1:]].sum())
        return float(nats) / size

    def point(self, loss: float) -> dict[str, Any]:
        """A point of the learning curve after the steps that are done; `loss` is the mean since the last point."""
        row: dict[str, Any] = {
            "step": self.progress.step,
            "megabytes": round(self.recipe.megabytes * self.progress.step / self.steps, 3),
            "train": float(f"{loss:.6g}"),
            "held_out": float(f"{self.held_out():.6g}"),
            "seconds": round(self.progress.seconds, 1),
        }
        return row | self._masks()

    def _masks(self) -> dict[str, Any]:
        """Means over layers and masks, and the gate ratios of all layers; none for a model without masks.

        `flips` are the mask bits that differ from the last point, and `flipped` those that differ from the start.
        """
        if self.statistics is None:
            return {}
        numbers = self.statistics.update()
        ratios: dict[str, list[float]] = {}
        for key, value in numbers.items():
            if "/gate_ratio/" in key:
                ratios.setdefault(key.partition("/")[0], []).append(value)
        flipped = [
            flip_ratio(before, packed_masks(layer), layer.in_features).mean().item()
            for layer, before in zip(masked_layers(self.model), self.first_masks, strict=True)
        ]
        return {
            "gate_ratio": _mean([value for of in ratios.values() for value in of]),
            "flips": _mean([value for key, value in numbers.items() if "/flips/" in key]),
            "flipped": _mean(flipped),
            "agreement": _mean([value for key, value in numbers.items() if key.endswith("/agreement")]),
            "gate_ratios": json.dumps([_mean(of) for of in ratios.values()]),
        }

    # --- Checkpoints

    def save(self, path: Path) -> None:
        """Write a checkpoint; a file that was there is replaced at once or not at all."""
        state = {
            "recipe": asdict(self.recipe),
            "digest": self.corpus.sizes.digest,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(path)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: it is of another recipe or another corpus.
        """
        state = torch.load(path, map_location=self.device, weights_only=True)
        for what, found, wanted in (
            ("recipe", state["recipe"], asdict(self.recipe)),
            ("corpus", state["digest"], self.corpus.sizes.digest),
        ):
            if found != wanted:
                raise ValueError(f"{path}: the checkpoint is of another {what}: {found}, not {wanted}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        if self.statistics is not None:
            self.statistics = MaskStatistics(self.model)  # a checkpoint is written at a point of the curve


def masked_layers(model: nn.Module) -> list[MGLU | NaiveMGLU]:
    """The layers of a model that have masks."""
    return [module for module in model.modules() if isinstance(module, (MGLU, NaiveMGLU))]


def packed_masks(layer: MGLU | NaiveMGLU) -> Tensor:
    """A copy of the masks of a layer, packed."""
    if layer.packed_masks is not None:
        return layer.packed_masks.clone()
    assert layer.mask_logits is not None
    return torch.ops.mglu.pack_logits(layer.mask_logits.detach())


def _mean(values: list[float]) -> float:
    """The mean with six digits; NaN of nothing."""
    return float(f"{sum(values) / len(values):.6g}") if values else float("nan")


# --- A whole run ----------------------------------------------------------------------------------------------------


def run(
    recipe: Recipe,
    corpus: Corpus,
    out: Path,
    device: str = "cuda",
    limit: float | None = None,
    compiled: bool = True,
) -> bool:
    """Train, and write `NAME.csv` into a folder; return whether the run is finished.

    A recipe with a `start` trains its teacher first, unless the folder has the teacher's weights, `NAME.weights`.

    Args:
        recipe: what to train.
        corpus: the text.
        out: the folder. A checkpoint in it, `NAME.pt`, is gone on from, and is removed at the end.
        device: "cuda" or "cpu".
        limit: seconds after which the run stops at the next point of its curve; None for no limit.
        compiled: whether blocks and loss are compiled.
    """
    begin = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / f"{recipe.name}.pt"
    teacher = None
    if recipe.start is not None:
        weights = out / f"{recipe.teacher.name}.weights"
        if not weights.is_file() and not run(recipe.teacher, corpus, out, device, limit, compiled):
            return False
        teacher = torch.load(weights, map_location=device, weights_only=True)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    training = Training(recipe, corpus, device, compiled, teacher)
    training.warm_up()
    if checkpoint.is_file():
        training.restore(checkpoint)
    for last in points(training.steps):
        if last <= training.progress.step:
            continue
        training.advance(last)
        row = training.progress.rows[-1]
        print(f"{recipe.name}: {row['megabytes']:.1f} MB, train {row['train']:.4f}", end=" ")
        print(f"held out {row['held_out']:.4f} nats a byte, {row['seconds']:.0f} s", flush=True)
        if limit is not None and time.perf_counter() - begin > limit and last < training.steps:
            training.save(checkpoint)
            return False
    write_table(training.progress.rows, head(training), out, recipe.name)
    if recipe.layer == "glu":
        torch.save(training.model.state_dict(), out / f"{recipe.name}.weights")
    checkpoint.unlink(missing_ok=True)
    return True


def points(steps: int) -> list[int]:
    """The numbers of steps after which the curve has a point."""
    return sorted({max(1, round(steps * i / EVALUATIONS)) for i in range(1, EVALUATIONS + 1)})


def head(training: Training) -> dict[str, str]:
    """What the result depends on, and what it cost."""
    facts = {key: str(value) for key, value in asdict(training.recipe).items()}
    sizes = asdict(training.corpus.sizes)
    sizes["held_out_packages"] = " ".join(sizes["held_out_packages"])
    logits = sum(p.numel() for n, p in training.model.named_parameters() if "mask_logits" in n)
    fixed = sum(layer.weight.numel() * layer.n_masks for layer in masked_layers(training.model))
    cost = {
        "weights": count(training.model) - logits,
        "mask_bits": fixed,
        "steps": training.steps,
        "seconds": round(training.progress.seconds, 1),
        "peak_mb": round(peak(training), 1),
    }
    return {
        **environment(PROTOCOL),
        **{f"recipe.{key}": value for key, value in facts.items()},
        **{f"corpus.{key}": str(value) for key, value in sizes.items()},
        **{key: str(value) for key, value in cost.items()},
    }


def peak(training: Training) -> float:
    """Peak memory of the device in MB, 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 1e6 if training.device == "cuda" else 0.0


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of a recipe."""
    hints = get_type_hints(Recipe)
    for one in fields(Recipe):
        if isinstance(one.default, bool):
            parser.add_argument(f"--{one.name.replace('_', '-')}", action=argparse.BooleanOptionalAction)
        else:
            kind = int if one.name == "top_k" else hints[one.name]
            parser.add_argument(f"--{one.name.replace('_', '-')}", type=kind if kind in (int, float) else str)
    parser.set_defaults(**{one.name: one.default for one in fields(Recipe)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="a folder that corpus.py prepared")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, help="stop after about this time, and leave a checkpoint")
    add_recipe(parser)
    options = vars(parser.parse_args())
    recipe = Recipe(**{one.name: options[one.name] for one in fields(Recipe)})
    finished = run(recipe, load(options["corpus"]), options["out"], options["device"], options["seconds"])
    print("finished" if finished else "stopped; the same command goes on")


if __name__ == "__main__":
    main()
