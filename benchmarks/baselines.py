"""The baselines that MGLU is compared with, in plain torch: the naive layer, the complement trick and SwiGLU."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import reduce
from operator import add
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mglu_ops.nn import NaiveMGLU

Mode = Literal["eager", "compiled", "coordinate descent", "max-autotune"]
OPTIONS: dict[Mode, dict[str, str | int | bool | Callable[..., object]]] = {
    "compiled": {},
    "coordinate descent": {"coordinate_descent_tuning": True},
    "max-autotune": {"coordinate_descent_tuning": True, "max_autotune": True},
}
"""Options of torch.compile in each mode except "eager"."""


def naive(x: Tensor, weight: Tensor, masks: Tensor) -> Tensor:
    """The layer as a user writes it. Masks `[n_masks, d, h]` are bool or have the weight's dtype."""
    terms = [
        F.silu(F.linear(x, weight * mask)) * F.linear(x, weight * (~mask if mask.dtype is torch.bool else 1 - mask))
        for mask in masks
    ]
    return reduce(add, terms)


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's projection with two weights `[d, h]`."""
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def swiglu_stacked(x: Tensor, both: Tensor) -> Tensor:
    """SwiGLU's projection with one weight `[2 d, h]`, in which the gate's rows come first."""
    gate, up = F.linear(x, both).chunk(2, dim=-1)
    return F.silu(gate) * up


class ComplementTrick(NaiveMGLU):
    """MGLU with n_masks + 1 products: `value = x W^T - gate`, where all masks share the product x W^T."""

    def forward(self, x: Tensor) -> Tensor:
        total = F.linear(x, self.weight)
        gates = (F.linear(x, self.weight * self._straight_through(i)) for i in range(self.n_masks))
        return reduce(add, (F.silu(gate) * (total - gate) for gate in gates))


class Baseline(NamedTuple):
    """A function that computes a layer, and the mode in which it is compiled."""

    name: str
    function: Callable[..., Tensor]
    mode: Mode

    @property
    def has_bool_masks(self) -> bool:
        return self.name.endswith("bool masks")

    def build(self) -> Callable[..., Tensor]:
        """The function to call. Unless the mode is "eager", its first call compiles it, for fixed shapes."""
        if self.mode == "eager":
            return self.function
        return torch.compile(self.function, fullgraph=True, dynamic=False, options=OPTIONS[self.mode] or None)


NAIVE = (
    Baseline("naive eager", naive, "eager"),
    Baseline("naive compiled, coordinate descent", naive, "coordinate descent"),
    Baseline("naive compiled, bool masks", naive, "compiled"),
    Baseline("naive compiled, coordinate descent, bool masks", naive, "coordinate descent"),
    Baseline("naive compiled, max-autotune, bool masks", naive, "max-autotune"),
)
NAIVE_ON_CPU = Baseline("naive compiled", naive, "compiled")
SWIGLU = (
    Baseline("SwiGLU eager", swiglu, "eager"),
    Baseline("SwiGLU compiled", swiglu, "compiled"),
    Baseline("SwiGLU stacked, compiled", swiglu_stacked, "compiled"),
    Baseline("SwiGLU compiled, coordinate descent", swiglu, "coordinate descent"),
    Baseline("SwiGLU stacked, coordinate descent", swiglu_stacked, "coordinate descent"),
    Baseline("SwiGLU compiled, max-autotune", swiglu, "max-autotune"),
)


def in_modes(baselines: Collection[Baseline], tuned: bool, autotuned: bool) -> list[Baseline]:
    """The baselines to measure. Coordinate descent needs `tuned`, and max-autotune needs `tuned` and `autotuned`."""
    left_out = {"coordinate descent": not tuned, "max-autotune": not (tuned and autotuned)}
    return [baseline for baseline in baselines if not left_out.get(baseline.mode)]
