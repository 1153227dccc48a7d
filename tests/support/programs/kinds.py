"""Kinds of masks, and a check that a layer with masks of one kind becomes one operator.

A layer is a function `(x, weight, masks, more)`. Each spelling of a layer can thus be tried with bool, float and
integer buffers, with comparisons, and with logits that are trained with a straight-through estimator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.budgets import BUDGET
from tests.support.programs.graphs import compare
from tests.support.programs.spellings import PROJECTIONS, straight_through

SAME = 10 * BUDGET[torch.float64]

D = H = 8
N_MASKS = 2
More = dict[str, Tensor]

Layer = Callable[[Tensor, Tensor, list[Tensor], More], Any]


@dataclass(frozen=True)
class Kind:
    """How a program stores its masks, and how it computes mask and complement from them."""

    stored: Callable[[Tensor], Tensor]
    """Converts logits to the tensor that the program receives."""
    mask: Callable[[Tensor], Tensor] = lambda given: given
    """Converts a slice of the stored tensor to a mask."""
    complement: Callable[[Tensor], Tensor] = lambda m: 1 - m
    is_bool: bool = False
    is_integer: bool = False
    trains: bool = False
    assume_binary: bool = False


KINDS: dict[str, Kind] = {
    "bool": Kind(lambda l: l > 0, complement=lambda m: ~m, is_bool=True),
    "float": Kind(lambda l: (l > 0).to(l.dtype), assume_binary=True),
    "uint8": Kind(lambda l: (l > 0).to(torch.uint8), is_integer=True, assume_binary=True),
    "int64": Kind(lambda l: (l > 0).long(), is_integer=True, assume_binary=True),
    "compared": Kind(lambda l: l, lambda l: l > 0, lambda m: ~m, is_bool=True),
    "compared as float": Kind(lambda l: l, lambda l: (l > 0).to(l.dtype)),
    "compared as integer": Kind(lambda l: l, lambda l: (l > 0).to(torch.int32), is_integer=True),
    "logits": Kind(lambda l: l, straight_through, trains=True),
}


MAIN_KINDS = ("logits", "bool", "float")
MODES = ("training", "inference")


def tensors(kind: Kind, *, training: bool) -> dict[str, Tensor]:
    """The tensors that a layer may use. In each mask, row 0 has only values and row 1 only gates."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = normal(N_MASKS, D, H)
    logits[:, 0], logits[:, 1] = -1, 1
    named = {"x": normal(5, H), "weight": normal(D, H), "masks": kind.stored(logits)}
    named |= {"a": normal(N_MASKS), "a0": normal(1)[0], "a1": normal(1)[0], "bias": normal(D)}
    named |= {"scale": normal(D), "delta": normal(D, H), "left": normal(D, 2), "right": normal(2, H)}
    named |= {"narrow": normal(D, H).float(), "q": normal(D, H).mul(20).to(torch.int8), "flat": normal(D * H)}
    trains = training and not kind.assume_binary
    fixed = () if trains else ("masks",)
    return {k: t.requires_grad_(training and t.is_floating_point() and k not in fixed) for k, t in named.items()}


def fuses_to_one(layer: Layer, kind: Kind, mode: str, n_masks: int = N_MASKS, activation: str = "silu") -> None:
    """Check that a layer becomes one operator, with eager's results and gradients. `mode` is one of `MODES`."""
    training = mode == "training"

    def program(x: Tensor, weight: Tensor, masks: Tensor, **more: Tensor) -> Any:
        return layer(x, weight, [kind.mask(masks[i]) for i in range(n_masks)], more)

    make = functools.partial(tensors, kind, training=training)
    capture = compare(program, make, SAME, assume_binary=kind.assume_binary)
    assert capture.reasons == []
    found = [(site.n_masks, site.activation, site.operator) for site in capture.report.fused]
    assert found == [(n_masks, activation, "forward_ste" if kind.trains and training else "forward")]


def sum_of(term: Callable[[Tensor, Tensor, Tensor, More], Tensor]) -> Layer:
    """A layer that adds up `term(x, weight, mask, more)`."""
    return lambda x, weight, masks, more: sum(term(x, weight, m, more) for m in masks)


def _projected(project: Callable[[Tensor, Tensor], Tensor]) -> Pair:
    return lambda x, w, m, c: (project(x, w * m), project(x, w * c))


def _less_masked(x: Tensor, w: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, masked), F.linear(x, w - masked)


def _less_gate(gate: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    return gate, total - gate


Pair = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function of x, weight, mask and complement that returns gate and value."""

PAIRS: dict[str, Pair] = {
    "masked twice": _projected(F.linear),
    "gate by the complement": lambda x, w, m, c: (F.linear(x, w * c), F.linear(x, w * m)),
    "w - w * m": lambda x, w, m, c: (F.linear(x, w * m), F.linear(x, w - w * m)),
    "w - m * w": lambda x, w, m, c: (F.linear(x, m * w), F.linear(x, w - m * w)),
    "w - masked": lambda x, w, m, c: _less_masked(x, w, w * m),
    "torch.sub by keyword": lambda x, w, m, c: (F.linear(x, w * m), F.linear(x, torch.sub(w, other=w * m))),
    "-(w * m) + w": lambda x, w, m, c: (F.linear(x, w * m), F.linear(x, -(w * m) + w)),
    "total - gate": lambda x, w, m, c: _less_gate(F.linear(x, w * m), F.linear(x, w)),
    "total - gate of matmul": lambda x, w, m, c: _less_gate(x @ (w * m).T, x @ w.T),
    "total - masked": lambda x, w, m, c: (F.linear(x, w) - F.linear(x, w * c), F.linear(x, w * c)),
    "total - a product of its own": lambda x, w, m, c: (F.linear(x, w * m), F.linear(x, w) - F.linear(x, w * m)),
    **{name: _projected(project) for name, project in PROJECTIONS.items() if name != "linear"},
}


def activated(pair: Any) -> Tensor:
    """The term `silu(gate) * value`."""
    gate, value = pair
    return F.silu(gate) * value
