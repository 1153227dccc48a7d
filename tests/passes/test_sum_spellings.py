"""Sums over masks: accumulators, means, biases, scales and mask weights."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.families import family
from tests.support.programs.graphs import compare
from tests.support.programs.kinds import KINDS, MAIN_KINDS, MODES, SAME, D, More, fuses_to_one, tensors
from tests.support.programs.spellings import SUMS, from_source, gated


def _accumulated(y: Any, terms: list[Tensor]) -> Tensor:
    return functools.reduce(operator.add, terms, y)


def _scaled(numbers: Any, terms: list[Tensor]) -> Tensor:
    return sum(number * term for number, term in zip(numbers, terms, strict=True))


def _without_more(total: Callable[[list[Tensor]], Tensor]) -> Callable[[list[Tensor], More], Tensor]:
    return lambda terms, more: total(terms)


# Functions that sum the terms of all masks.
TOTALS: dict[str, Callable[[list[Tensor], More], Tensor]] = {
    **{name: _without_more(total) for name, total in SUMS.items()},
    "numbers": lambda terms, more: _scaled((0.5, -1.75), terms),
    "0.5 * the first": lambda terms, more: 0.5 * terms[0] + terms[1],
    "a difference": lambda terms, more: terms[0] - terms[1],
    "numbers that are almost equal": lambda terms, more: terms[0] + (1 + 1e-9) * terms[1],
    "an opposite": lambda terms, more: -terms[0] + terms[1],
    "a[None] of the last dimension": lambda terms, more: (torch.stack(terms, -1) * more["a"]).sum(-1),
    "a[:, None]": lambda terms, more: (torch.stack(terms, 1) * more["a"][:, None]).sum(1),
    "a[i] * term": lambda terms, more: sum(more["a"][i] * t for i, t in enumerate(terms)),
    "stack @ a": lambda terms, more: torch.stack(terms, -1) @ more["a"],
    "softmax(a)[i] * term": lambda terms, more: _scaled(more["a"].softmax(0), terms),
    "scalar parameters": lambda terms, more: more["a0"] * terms[0] + terms[1] * more["a1"],
    "a[:, None, None]": lambda terms, more: (torch.stack(terms) * more["a"][:, None, None]).sum(0),
    "scaled sum": lambda terms, more: more["a0"] * sum(terms),
    "bias first, expanded": lambda terms, more: _accumulated(more["bias"].expand(5, D), terms),
    "bias between": lambda terms, more: terms[0] + more["bias"] + terms[1],
    "bias of a narrower dtype": lambda terms, more: _accumulated(more["narrow"][0], terms),
    "bias in the second sum": lambda terms, more: terms[0] + (more["bias"] + terms[1]),
}


@pytest.mark.parametrize(("name", "kind", "mode"), family(TOTALS, MAIN_KINDS, MODES))
def test_sum(name: str, kind: str, mode: str) -> None:
    def layer(x: Tensor, weight: Tensor, masks: list[Tensor], more: More) -> Tensor:
        return TOTALS[name]([gated(x, weight, m, KINDS[kind].complement(m)) for m in masks], more)

    fuses_to_one(layer, KINDS[kind], mode)


def test_zeros_to_which_a_product_is_added_are_removed() -> None:
    def program(x: Tensor, weight: Tensor, masks: Tensor, **_: Tensor) -> Tensor:
        gate, value = F.linear(x, weight * masks[0]), F.linear(x, weight * ~masks[0])
        return torch.addcmul(torch.zeros(5, D, dtype=torch.float64), F.silu(gate), value)

    capture = compare(program, lambda: tensors(KINDS["bool"], training=True), SAME)
    assert [len(capture.report.fused), capture.calls["add"], capture.calls["zeros"]] == [1, 0, 0]


# --- Sums that are not one layer -------------------------------------------------------------------------------------


# Programs of two terms y and z, by the number of operators that they become. Fused into one layer, a program would lose
# a summand or a result, or would have another shape or dtype.
OTHER_SUMS: dict[int, tuple[str, ...]] = {
    1: (
        "(y + 0, y)",
        "y + torch.zeros(2, 1, 1, dtype=y.dtype)",
        "(y + z) * torch.full((2, 1, 1), 0.5).double()",
        "torch.full((2, 1, 1), 0.5).double() * (y + z)",
        "2.0 / (y + z)",
        "a0 / (y + z)",
        "(y + z) / a0",
        "(y + z) / 0.0",
    ),
    2: (
        "bias + y + (scale + z)",
        "y - (bias + z)",
        "y + bias + scale + z",
        "y + scale.view(8, 1, 1) + z",
        "stack([y + bias, z]).sum(0)",
        "(stack([y, z]).sum(0), y)",
        "stack([y, z.sin()]).sum(0)",
        "dropout(y, 1.0) + z",
        "stack([y, z]).sum(1)",
        "stack([y, z]).sum(0, keepdim=True)",
        "stack([y, z]).sum(0, dtype=torch.float32)",
        "stack([y, z], 1) @ bias",
        "0 * y + z",
        "0.5 * (y + bias) + z",
        "a0 * (y + bias) + z",
        "a0 * (a1 * y) + z",
        "bias * y + z",
        "q[0, 0] * y + z",
        "(a0.view(1, 1, 1) * y)[0] + z",
        "(stack([y, z]) * bias).sum(0)",
        "(stack([y, z]) * bias[:5].view(1, 5, 1)).sum(0)",
        "einsum('nbd,n,n->bd', stack([y, z]), a, a)",
        "stack([y, z], -1) @ left.view(2, 8)",
    ),
}


COUNTS = {source: count for count, sources in OTHER_SUMS.items() for source in sources}


@pytest.mark.parametrize(("source", "training"), family(COUNTS, [True, False], one_in=1))
def test_sum_that_is_not_one_layer(source: str, training: bool) -> None:
    total = from_source("y, z, bias, scale, a, a0, a1, q, left, **_", source, {})

    def program(x: Tensor, weight: Tensor, masks: Tensor, **more: Tensor) -> Any:
        return total(*(gated(x, weight, m, ~m) for m in masks), **more)

    capture = compare(program, lambda: tensors(KINDS["bool"], training=training), SAME)
    assert [len(capture.report.fused), capture.reasons] == [COUNTS[source], []]
