"""Sums over masks: accumulators, means, biases, scales and route weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import family
from kinds import (
    KINDS,
    MAIN_KINDS,
    MODES,
    D,
    More,
    fuses_to_one,
)
from spellings import gated
from torch import Tensor


def _accumulated(y: Any, terms: list[Tensor]) -> Tensor:
    for term in terms:
        y = y + term
    return y


def _accumulated_in_place(y: Tensor, terms: list[Tensor]) -> Tensor:
    for term in terms:
        y += term
    return y


FLOATS = (0.5, -1.75)


# The sum of the terms of all masks.
TOTALS: dict[str, Callable[[list[Tensor], More], Tensor]] = {
    "sum": lambda terms, more: sum(terms),
    "torch.add by keywords": lambda terms, more: functools.reduce(lambda y, t: torch.add(input=y, other=t), terms),
    "stack.sum": lambda terms, more: torch.stack(terms).sum(0),
    "torch.sum by keywords": lambda terms, more: torch.sum(input=torch.stack(tensors=terms, dim=0), dim=0),
    "sum of a tuple of dims": lambda terms, more: torch.stack(terms).sum(dim=(0,)),
    "stack.mean(0)": lambda terms, more: torch.stack(terms).mean(0),
    "stack.mean(dim=0)": lambda terms, more: torch.stack(terms, -1).mean(dim=-1),
    "torch.mean": lambda terms, more: torch.mean(torch.stack(terms, 1), 1),
    "sum / n": lambda terms, more: sum(terms) / len(terms),
    "sum * (1 / n)": lambda terms, more: sum(terms) * (1 / len(terms)),
    "terms / n": lambda terms, more: sum(t / len(terms) for t in terms),
    "0.5 * term": lambda terms, more: sum(0.5 * t for t in terms),
    "floats": lambda terms, more: sum(f * t for f, t in zip(FLOATS, terms, strict=True)),
    "0.5 * the first": lambda terms, more: 0.5 * terms[0] + terms[1],
    "a difference": lambda terms, more: terms[0] - terms[1],
    "a[i] * term": lambda terms, more: sum(more["a"][i] * t for i, t in enumerate(terms)),
    "term * a[i]": lambda terms, more: _accumulated(0, [t * a for t, a in zip(terms, more["a"].unbind(), strict=True)]),
    "softmax(a)[i] * term": lambda terms, more: sum(more["a"].softmax(0)[i] * t for i, t in enumerate(terms)),
    "scalar parameters": lambda terms, more: more["a0"] * terms[0] + terms[1] * more["a1"],
    "a[:, None, None]": lambda terms, more: (torch.stack(terms) * more["a"][:, None, None]).sum(0),
    "a.view(-1, 1, 1)": lambda terms, more: (more["a"].view(-1, 1, 1) * torch.stack(terms)).sum(0),
    "einsum of a": lambda terms, more: torch.einsum("n,nbd->bd", more["a"], torch.stack(terms)),
    "einsum": lambda terms, more: torch.einsum("nbd->bd", torch.stack(terms)),
    "scaled sum": lambda terms, more: more["a0"] * sum(terms),
    "bias first": lambda terms, more: _accumulated(more["bias"], terms),
    "sum from a bias": lambda terms, more: sum(terms, more["bias"]),
    "bias first, expanded": lambda terms, more: _accumulated(more["bias"].expand(5, D), terms),
    "bias first, of mean": lambda terms, more: _accumulated(more["bias"], [t / len(terms) for t in terms]),
    "bias last": lambda terms, more: sum(terms) + more["bias"],
    "bias between": lambda terms, more: terms[0] + more["bias"] + terms[1],
    "zeros and +=": lambda terms, more: _accumulated_in_place(torch.zeros_like(terms[0]), terms),
    "dropout of 0 per term": lambda terms, more: sum(F.dropout(t, 0.0) for t in terms),
}


@pytest.mark.parametrize(("name", "kind", "mode"), family(TOTALS, MAIN_KINDS, MODES))
def test_sum(name: str, kind: str, mode: str) -> None:
    def layer(x: Tensor, weight: Tensor, masks: list[Tensor], more: More) -> Tensor:
        return TOTALS[name]([gated(x, weight, m, KINDS[kind].complement(m)) for m in masks], more)

    fuses_to_one(layer, KINDS[kind], mode)
