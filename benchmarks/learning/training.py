"""A training run in progress: its steps, its learning curve, and its checkpoints."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import get_ema_multi_avg_fn

from benchmarks.language_model import LanguageModel
from benchmarks.learning import conversion
from benchmarks.learning.corpus import Corpus
from benchmarks.learning.masks import FITTED_WIDTH, WIDTH, ContinuousMGLU, optimizers, step_accumulators
from benchmarks.learning.recipe import Recipe, take_over
from benchmarks.learning.schedule import MOST_TOKENS, Windows, held_out_batches, rate, steps_of
from benchmarks.learning.structure import StructuredMGLU
from benchmarks.records import write_whole
from benchmarks.timing import release
from mglu_ops.nn import MGLU, MaskStatistics, NaiveMGLU, flip_ratio, parameter_groups
from mglu_ops.nn.masked_linear import packed_logits

WEIGHT_DECAY = 0.1
MAX_NORM = 1.0
FIT_STEPS = 8
"""The sample of a fit is the text of the first 8 steps of training, or of all steps if there are fewer."""


# Most runs need the same graphs as an earlier run, so a process keeps all graphs instead of compiling them again.
keep_all_graphs = dynamo_config.patch(recompile_limit=1000, accumulated_recompile_limit=1000)


@dataclass
class Progress:
    """How far a run has come, and its learning curve so far."""

    step: int = 0
    seconds: float = 0.0
    """The time of the steps, without evaluation and compilation."""
    peak_mb: float = float("nan")
    """The peak of GPU memory in the steps, in megabytes, without the memory of the training text; NaN on a CPU."""
    rows: list[dict[str, Any]] = field(default_factory=list)


class Training:
    """A run in progress on a device, "cuda" or "cpu"; `compiled` says whether blocks and loss are compiled.

    `teacher` is the state dict of the trained `recipe.teacher`, if the recipe has a `start`. `fit` is the result of
    `fitted`, if the start is a fit.
    """

    def __init__(
        self,
        recipe: Recipe,
        corpus: Corpus,
        device: str = "cuda",
        compiled: bool = True,
        teacher: Mapping[str, Tensor] | None = None,
        fit: Mapping[str, Any] | None = None,
    ) -> None:
        if device == "cuda":
            release()  # so that the previous run's memory does not count in `peak_mb`
        if (tokens := len(corpus.token_bytes)) > recipe.sizes.vocabulary:
            raise ValueError(f"vocabulary: got {recipe.sizes.vocabulary}, must be at least the corpus's {tokens}")
        self.recipe, self.corpus, self.device = recipe, corpus, device
        self.errors: list[dict[str, float]] = []
        self.steps, self.progress = max(1, steps_of(recipe.megabytes, corpus)), Progress()
        self.skipped = steps_of(recipe.skip, corpus)
        with torch.device(device):
            self.model: LanguageModel = recipe.model()
        if recipe.start is not None:
            if teacher is None:
                raise ValueError(f"teacher: got None, must be the state of {recipe.teacher.name}")
            self._start(recipe.start, teacher, fit)
        self.teacher: LanguageModel | None = None
        if recipe.distilled and teacher is not None:
            with torch.device(device):
                self.teacher = recipe.teacher.model().requires_grad_(False)
            self.teacher.load_state_dict(teacher)
            if compiled:
                self.teacher.compile_parts()
        if recipe.logits == "bfloat16":
            for layer in masked_layers(self.model):
                assert layer.mask_logits is not None
                layer.mask_logits.data = layer.mask_logits.bfloat16()
        if compiled:
            self.model.compile_parts()
        groups = parameter_groups(
            self.model, lr=recipe.lr, weight_decay=WEIGHT_DECAY, mask_lr=recipe.mask_lr * recipe.lr
        )
        self.accumulators: list[Tensor] = []
        if recipe.flips:
            self.accumulators = [one for group in groups if group["name"] == "mask_logits" for one in group["params"]]
            groups = [group for group in groups if group["name"] != "mask_logits"]
        self.flips_of_rate = recipe.flips / sum(map(self.rate, range(self.steps)))
        self.optimizers = optimizers(groups, recipe.logits, fused=device == "cuda")
        self.largest = [group["lr"] for group in self.groups]
        self.averages = [one.detach().clone() for one in self.model.parameters()] if recipe.average else []
        self.windows = Windows(corpus.train, device, recipe.seed if recipe.paired else 0)
        self.statistics = MaskStatistics(self.model) if recipe.has_masks and recipe.structure == "free" else None
        self.first_masks = [packed_masks(layer) for layer in masked_layers(self.model)]

    def _start(self, start: str, teacher: Mapping[str, Tensor], fit: Mapping[str, Any] | None) -> None:
        """Set the model to a conversion of the teacher, or to the teacher."""
        if self.recipe.is_fitted:
            fit = fitted(self.recipe, self.corpus, teacher, self.device) if fit is None else fit
            self.model.load_state_dict(fit["model"])
            self.errors = fit["errors"]
        elif start == "teacher":
            self.model.load_state_dict(teacher)
        else:
            take_over(self.model, teacher, start)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def rate(self, step: int) -> float:
        """The learning rate of a step as a fraction of the largest."""
        return rate(step, self.steps, self.recipe.last_rate)

    def step(self) -> Tensor:
        """Take a step and return its loss, without waiting for the device."""
        step = self.progress.step
        stopped = step >= self.recipe.mask_stop * self.steps
        for group, largest in zip(self.groups, self.largest, strict=True):
            group["lr"] = 0.0 if stopped and group["name"] == "mask_logits" else largest * self.rate(step)
        self._set_tau()
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.loss(self.windows.batch(self.skipped + step))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        skipped = self.recipe.logits == "every_second" and step % 2 == 0
        for optimizer in self.optimizers[:1] if skipped else self.optimizers:
            optimizer.step()
        for logits in () if stopped else self.accumulators:
            assert logits.grad is not None
            step_accumulators(logits, logits.grad, self.flips_of_rate * self.rate(step))
        self.model.zero_grad(set_to_none=True)
        self.progress.step += 1
        if self.averages:  # the first steps have equal weights, so that the initial parameters have none
            weight = max(1 / self.progress.step, min(1.0, 1 / (self.recipe.average * self.steps)))
            get_ema_multi_avg_fn(1 - weight)(self.averages, list(self.model.parameters()), None)
        return loss.detach()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Exchange the parameters for their averages, if the recipe has any, until the end of the context."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, average in zip(self.model.parameters(), self.averages, strict=bool(self.averages)):
            last = parameter.clone()
            parameter.copy_(average)
            average.copy_(last)

    def _set_tau(self) -> None:
        """Set the width of continuous masks for the next step."""
        width = FITTED_WIDTH if self.recipe.is_fitted else WIDTH
        for layer in masked_layers(self.model):
            if isinstance(layer, ContinuousMGLU):
                layer.set_tau(width * max(0.0, 1 - self.progress.step / (self.recipe.continuous * self.steps)))

    def first_point(self) -> dict[str, Any]:
        """The point of a converted model's learning curve before the first step, with the errors of its fit."""
        self._set_tau()
        return self.point(math.nan, math.nan) | ({"errors": json.dumps(self.errors)} if self.errors else {})

    def loss(self, batch: Tensor) -> Tensor:
        """The mean cross entropy over tokens, with the text, the teacher's predictions or a mix as the target."""
        if self.teacher is None:
            return self.model(batch)
        with torch.no_grad():
            predicted = self.teacher.logits(batch[:, :-1]).flatten(0, 1).float().softmax(-1)
        logits = self.model.logits(batch[:, :-1]).flatten(0, 1).float()
        if not (share := self.recipe.text_share):
            return cross_entropy(logits, predicted)
        return (1 - share) * cross_entropy(logits, predicted) + share * cross_entropy(logits, batch[:, 1:].flatten())

    def warm_up(self) -> None:
        """Compile what steps and evaluations need by running them, then restore the initial state."""
        parameters = [parameter.detach().clone() for parameter in self.model.parameters()]
        for step in (0, self.steps - 1) if self.recipe.continuous else (0,):  # masks are hard in the last step
            self.progress.step = step
            self.step()
            self.nats(next(held_out_batches(self.corpus.held_out, self.device)))
        with torch.no_grad():
            for parameter, before in zip(self.model.parameters(), parameters, strict=True):
                parameter.copy_(before)
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self.progress = Progress()

    def advance(self, last: int) -> None:
        """Take steps until `last` steps are done in total, and add a point to the learning curve."""
        before, begin = self.progress.step, time.perf_counter()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        total, worst = (torch.zeros((), device=self.device) for _ in range(2))
        for step in range(before, last):
            if step == last - 1 and self.statistics is not None:
                self.statistics.update()  # so that the point counts only the flips of the last step
            loss = self.step()
            total += loss
            worst = torch.maximum(worst, loss)
        mean = total.item() / (last - before)  # waits for the device
        self.progress.seconds += time.perf_counter() - begin
        if self.device == "cuda":
            peak = (torch.cuda.max_memory_allocated() - self.windows.tokens.nbytes) / 1e6
            # `max` keeps its first argument if the second is NaN, as peak_mb is before the first measurement.
            self.progress.peak_mb = max(peak, self.progress.peak_mb)
        self.progress.rows.append(self.point(mean, worst.item()))

    @torch.no_grad()
    def losses(self) -> dict[str, float]:
        """The loss on held-out text, in nats per byte: on all kinds together, and on each kind if there are several.

        At points before the last, only about `MOST_TOKENS` tokens of each kind are read.
        """
        sizes = self.corpus.token_bytes.to(self.device)
        most = math.inf if self.progress.step == self.steps else MOST_TOKENS
        sums = {}
        for kind, tokens in self.corpus.held_out_parts.items():
            nats = torch.zeros((), device=self.device, dtype=torch.float64)
            size = torch.zeros((), device=self.device, dtype=torch.int64)
            for batch in held_out_batches(tokens, self.device, most):
                nats += self.nats(batch)
                size += sizes[batch[:, 1:]].sum()
            sums[kind] = float(nats), float(size)
        nats_of_all, size_of_all = map(sum, zip(*sums.values(), strict=True))
        kinds = {f"held_out_{kind}": nats / size for kind, (nats, size) in sums.items() if len(sums) > 1}
        return {"held_out": nats_of_all / size_of_all, **kinds}

    @torch.no_grad()
    def nats(self, batch: Tensor) -> Tensor:
        """The loss on held-out windows in nats, as a sum over their tokens."""
        with torch.autocast(self.device, torch.bfloat16):
            return self.model(batch).double() * batch[:, 1:].numel()

    def point(self, loss: float, worst: float) -> dict[str, Any]:
        """The point of the learning curve after the steps taken so far.

        `loss` is the mean and `worst` the largest loss of the steps since the previous point, in nats per token.
        """
        with self.averaged():
            losses = self.losses()
        row: dict[str, Any] = {
            "step": self.progress.step,
            "megabytes": round(self.recipe.megabytes * self.progress.step / self.steps, 3),
            "train": float(f"{loss:.6g}"),
            "worst": float(f"{worst:.6g}"),
            **{name: float(f"{loss:.6g}") for name, loss in losses.items()},
            "seconds": round(self.progress.seconds, 1),
        }
        return row | self._masks()

    def _masks(self) -> dict[str, Any]:
        """Statistics of the masks: means over layers and masks, and each layer's gate ratio; empty without masks.

        `flips` is the fraction of mask bits that the last step changed, and `flipped` the fraction that differs from
        the start. Masks of structure 2:4 have only `flipped`, since their gate ratio is always 1/2.
        """
        if not self.recipe.has_masks:
            return {}
        numbers = {} if self.statistics is None else self.statistics.update()
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

    def save(self, path: Path) -> None:
        """Write a checkpoint. An older file is replaced only when the new one is complete."""
        state = {
            "recipe": asdict(self.recipe),
            "digest": self.corpus.sizes.digest,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "averages": self.averages,
            "progress": asdict(self.progress),
        }
        write_whole(path, lambda temporary: torch.save(state, temporary))

    def restore(self, path: Path) -> None:
        """Resume from a checkpoint.

        Raises:
            ValueError: the checkpoint has another recipe or another corpus.
        """
        state = torch.load(path, map_location=self.device, weights_only=True)
        wanted = {"recipe": asdict(self.recipe), "digest": self.corpus.sizes.digest}
        for what, own in wanted.items():
            if state[what] != own:
                raise ValueError(f"{path}: the checkpoint is of another {what}: {state[what]}, not {own}")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for average, saved in zip(self.averages, state["averages"], strict=True):
            average.copy_(saved)
        self.progress = Progress(**state["progress"])


def fitted(recipe: Recipe, corpus: Corpus, teacher: Mapping[str, Tensor], device: str) -> dict[str, Any]:
    """Fit the model of a recipe to its teacher, whose state dict is given (`conversion.fit_model`).

    Returns:
        `model`, the state dict of the fitted model, and `errors`, the errors of each layer after each step of the fit.
    """
    assert recipe.start is not None
    with torch.device(device):
        model, trained = recipe.model(), recipe.teacher.model()
    trained.load_state_dict(teacher)
    windows, first = Windows(corpus.train, device, recipe.seed if recipe.paired else 0), steps_of(recipe.skip, corpus)
    steps = min(FIT_STEPS, max(1, steps_of(recipe.megabytes, corpus)))
    tokens = torch.cat([windows.batch(first + step)[:, :-1] for step in range(steps)])
    errors = conversion.fit_model(model, trained, tokens, recipe.start, recipe.structure)
    return {"model": model.state_dict(), "errors": errors}


def masked_layers(model: nn.Module) -> list[MGLU | NaiveMGLU]:
    """The layers with masks in a model."""
    return [module for module in model.modules() if isinstance(module, (MGLU, NaiveMGLU))]


def packed_masks(layer: MGLU | NaiveMGLU) -> Tensor:
    """A packed copy of a layer's masks, `[rows, in_features / 8, n_masks]`. The rows of all experts are stacked."""
    if layer.packed_masks is not None:
        return layer.packed_masks.clone().flatten(0, -3)
    assert layer.mask_logits is not None
    logits = layer.hard_logits() if isinstance(layer, StructuredMGLU) else layer.mask_logits
    return packed_logits(logits.detach()).flatten(0, -3)


def _mean(values: list[float]) -> float:
    """The mean with six digits; NaN for an empty list."""
    return float(f"{sum(values) / len(values):.6g}") if values else float("nan")
