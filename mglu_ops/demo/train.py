"""Training and evaluation, the same for every model."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped] # its stubs are another package

from .errors import require
from .model import loss_of
from .settings import Settings
from .text import Corpus

Forward = Callable[[Tensor], Tensor]
"""Maps tokens to logits: a model, compiled or not."""

RATE_TIMES_WIDTH = 0.768
LARGEST_RATE = 6e-3
WARMUP_FRACTION = 0.1
CLIP_NORM = 1.0
SHOW_EVERY = 10


@dataclass(frozen=True)
class Training:
    """The mean loss over the last tenth of a training run, in nats per byte, and its speed without the first step."""

    loss: float
    tokens_per_second: float
    first_step_seconds: float


class Step:
    """A training step of `model`, run by `forward`: gradients are clipped, AdamW updates. A call returns the loss."""

    def __init__(self, model: nn.Module, forward: Forward, settings: Settings) -> None:
        self.forward = forward
        self.settings = settings
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=peak_rate(settings), betas=(0.9, 0.95), fused=True)

    def __call__(self, inputs: Tensor, targets: Tensor, rate: float | None = None) -> Tensor:
        if rate is not None:
            self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        with self.settings.autocast():
            logits = self.forward(inputs)
        loss = loss_of(logits, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        self.optimizer.step()
        return loss.detach()


def peak_rate(settings: Settings) -> float:
    """The largest learning rate of the schedule: inversely proportional to the width, at most 6e-3."""
    return min(LARGEST_RATE, RATE_TIMES_WIDTH / settings.sizes.width)


def rate_at(step: int, settings: Settings) -> float:
    """The learning rate at a step: linear warm-up, then a cosine decay to a tenth of the peak."""
    steps, peak = settings.sizes.steps, peak_rate(settings)
    warmup = max(1, int(WARMUP_FRACTION * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def train(name: str, model: nn.Module, forward: Forward, corpus: Corpus, settings: Settings) -> Training:
    """Train `model`, run by `forward`, for `settings.sizes.steps` steps; a progress bar shows loss and speed.

    Raises:
        Disagreement: the loss is not finite.
    """
    sizes, device = settings.sizes, settings.device
    step = Step(model, forward, settings)
    tokens_per_step = sizes.batch * sizes.context
    losses: list[Tensor] = []
    start = after_first = time.perf_counter()
    batches = corpus.train_batches(sizes.batch, sizes.context, sizes.steps, settings.seed)
    # A file gets a line now and then, not one for each tenth of a second.
    interval = 0.1 if sys.stderr.isatty() else 10.0
    bar = tqdm(batches, total=sizes.steps, desc=f"  {name}", unit="step", mininterval=interval)
    for index, (inputs, targets) in enumerate(bar):
        losses.append(step(inputs.to(device), targets.to(device), rate_at(index, settings)))
        if index == 0:
            losses[0].item()  # synchronises with the device
            after_first = time.perf_counter()
        elif index % SHOW_EVERY == 0 or index == sizes.steps - 1:
            loss = losses[-1].item()
            speed = index * tokens_per_step / (time.perf_counter() - after_first)
            bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s", refresh=False)
            require(math.isfinite(loss), f"the loss of {name} is {loss} at step {index + 1}")
    seconds = max(time.perf_counter() - after_first, 1e-9)
    last = torch.stack(losses[-max(1, sizes.steps // 10) :]).mean().item()
    return Training(last, (sizes.steps - 1) * tokens_per_step / seconds, after_first - start)


@torch.no_grad()
def perplexity(forward: Forward, corpus: Corpus, settings: Settings) -> float:
    """`exp` of the mean cross-entropy per byte over the held-out text, in adjacent windows of one context."""
    sizes, device = settings.sizes, settings.device
    total, count = 0.0, 0
    for inputs, targets in corpus.held_out_batches(sizes.batch, sizes.context):
        with settings.autocast():
            logits = forward(inputs.to(device))
        total += loss_of(logits, targets.to(device)).item() * targets.numel()
        count += targets.numel()
    return math.exp(total / count) if total / count < 700 else math.inf
