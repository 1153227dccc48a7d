"""What MGLU is measured against: the naive layer and SwiGLU in plain torch, in the forms of torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add

import torch
import torch.nn.functional as F
from torch import Tensor


def naive(x: Tensor, weight: Tensor, masks: Tensor) -> Tensor:
    """The layer as a user spells it; masks `[n_masks, d, h]`, bool or in the dtype of the weight."""
    terms = [
        F.silu(F.linear(x, weight * mask)) * F.linear(x, weight * (~mask if mask.dtype is torch.bool else 1 - mask))
        for mask in masks
    ]
    return reduce(add, terms)


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def swiglu_stacked(x: Tensor, both: Tensor) -> Tensor:
    """SwiGLU of one weight `[2 d, h]`: gate above up."""
    gate, up = F.linear(x, both).chunk(2, dim=-1)
    return F.silu(gate) * up


def compiled(function: Callable[..., Tensor], tune: bool = False, autotune: bool = False) -> Callable[..., Tensor]:
    """torch.compile's default; with coordinate descent; or its max-autotune, which has coordinate descent too."""
    options: dict[str, str | int | bool | Callable[..., object]] = {}
    if tune or autotune:
        options["coordinate_descent_tuning"] = True
    if autotune:
        options["max_autotune"] = True
    return torch.compile(function, fullgraph=True, dynamic=False, options=options or None)
