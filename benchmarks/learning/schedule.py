"""The text and the learning rate of each step of a run, and the steps after which its learning curve has a point."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.learning.corpus import Corpus
from benchmarks.learning.recipe import CONTEXT, SEQUENCES

WARM_UP = 0.1
EVALUATIONS, MOST_STEPS = 6, 1000
"""The least number of points of a learning curve, and the most steps between two points. Evaluating 2 MB of held-out
text at each point takes 7% of a short run's time."""
MOST_TOKENS = 2_500_000
"""All points of a curve except the last evaluate about this many held-out tokens of each kind of text. In longer texts,
they evaluate batches that are spread evenly."""


class Windows:
    """The training text in windows, `[SEQUENCES, CONTEXT + 1]` tokens per step, in an order that the seed determines.

    Args:
        tokens: the training text, uint16 `[tokens]`.
        device: the device of the windows.
        seed: the seed of the order.
    """

    def __init__(self, tokens: Tensor, device: str, seed: int = 0) -> None:
        self.tokens = tokens.to(device, torch.int32)  # uint16 cannot be indexed on every device
        self.windows = (len(tokens) - 1) // CONTEXT
        if self.windows < SEQUENCES:
            raise ValueError(f"tokens: got {len(tokens)}, must be more than {SEQUENCES * CONTEXT}")
        self.steps_of_epoch = self.windows // SEQUENCES
        self.tokens_of_step = SEQUENCES * CONTEXT
        self._offsets = torch.arange(CONTEXT + 1, device=device)
        self._seed, self._epoch, self._starts = seed, -1, torch.empty(0)

    def batch(self, step: int) -> Tensor:
        """The tokens `[SEQUENCES, CONTEXT + 1]` of a step, int64."""
        epoch, index = divmod(step, self.steps_of_epoch)
        if epoch != self._epoch:
            order = torch.randperm(self.windows, generator=torch.Generator().manual_seed(self._seed * 1000 + epoch))
            self._epoch, self._starts = epoch, (order * CONTEXT).to(self.tokens.device)
        starts = self._starts[index * SEQUENCES : (index + 1) * SEQUENCES]
        return self.tokens[starts[:, None] + self._offsets].long()


def held_out_batches(tokens: Tensor, device: str, most: float = math.inf) -> Iterator[Tensor]:
    """Yield batches of held-out text, int64 `[SEQUENCES, CONTEXT + 1]`: about `most` tokens, or all if there are fewer.

    An incomplete last batch is dropped unless it is the only batch, so that only one shape is compiled.
    """
    tokens = tokens.to(device, torch.int32)
    offsets, windows = torch.arange(CONTEXT + 1, device=device), (len(tokens) - 1) // CONTEXT
    stride = SEQUENCES * max(1, math.ceil(len(tokens) / most))
    for first in range(0, windows - windows % SEQUENCES or windows, stride):
        starts = torch.arange(first, min(first + SEQUENCES, windows), device=device) * CONTEXT
        yield tokens[starts[:, None] + offsets].long()


def steps_of(megabytes: float, corpus: Corpus) -> int:
    """The number of steps that read this many megabytes of text."""
    tokens = megabytes * 1e6 * corpus.sizes.train_tokens / corpus.sizes.train_bytes
    return round(tokens / (SEQUENCES * CONTEXT))


def rate(step: int, steps: int, last: float) -> float:
    """The learning rate of a step as a fraction of the largest: linear warm-up, then a cosine that ends at `last`."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * done))


def points(steps: int) -> list[int]:
    """The numbers of steps after which the learning curve has a point."""
    count = max(EVALUATIONS, -(-steps // MOST_STEPS))
    return sorted({max(1, round(steps * i / count)) for i in range(1, count + 1)})
