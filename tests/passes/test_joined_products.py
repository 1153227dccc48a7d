"""Gate and value, or all masks, from one product of x with stacked or concatenated weights."""

from __future__ import annotations

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
    N_MASKS,
    D,
    H,
    More,
    activated,
    fuses_to_one,
    sum_of,
)
from torch import Tensor

Masks = list[Tensor]


def _pair_cat(w: Tensor, m: Tensor, c: Tensor) -> Tensor:
    return torch.cat([w * m, w * c])


def _pair_stack(w: Tensor, m: Tensor, c: Tensor) -> Tensor:
    return torch.stack([w * m, w * c])


# Gate and value of one mask from one product.
JOINED_PAIRS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Any]] = {
    "cat, chunk": lambda x, w, m, c: F.linear(x, _pair_cat(w, m, c)).chunk(2, -1),
    "cat, chunk by keywords": lambda x, w, m, c: torch.chunk(input=F.linear(x, _pair_cat(w, m, c)), chunks=2, dim=1),
    "cat, split": lambda x, w, m, c: F.linear(x, _pair_cat(w, m, c)).split(D, dim=-1),
    "cat, split by sizes": lambda x, w, m, c: torch.split(F.linear(x, _pair_cat(w, m, c)), [D, D], dim=-1),
    "cat, tensor_split": lambda x, w, m, c: F.linear(x, _pair_cat(w, m, c)).tensor_split(2, dim=-1),
    "cat, slices": lambda x, w, m, c: _halves(F.linear(x, _pair_cat(w, m, c))),
    "cat, narrow": lambda x, w, m, c: [F.linear(x, _pair_cat(w, m, c)).narrow(-1, i * D, D) for i in range(2)],
    "cat, unflatten": lambda x, w, m, c: F.linear(x, _pair_cat(w, m, c)).unflatten(-1, (2, D)).unbind(-2),
    "cat, view": lambda x, w, m, c: F.linear(x, _pair_cat(w, m, c)).view(5, 2, D).unbind(1),
    "cat, matmul": lambda x, w, m, c: (x @ _pair_cat(w, m, c).t()).chunk(2, dim=-1),
    "cat of transposes": lambda x, w, m, c: (x @ torch.cat([(w * m).t(), (w * c).t()], dim=1)).chunk(2, dim=-1),
    "vstack": lambda x, w, m, c: F.linear(x, torch.vstack([w * m, w * c])).chunk(2, -1),
    "concat": lambda x, w, m, c: F.linear(x, torch.concat((w * m, w * c), dim=0)).chunk(2, dim=-1),
    "stack, einsum": lambda x, w, m, c: torch.einsum("bh,kdh->kbd", x, _pair_stack(w, m, c)),
    "stack, einsum of tokens first": lambda x, w, m, c: torch.einsum("bh,kdh->bkd", x, _pair_stack(w, m, c)).unbind(1),
    "stack, matmul": lambda x, w, m, c: torch.matmul(x, _pair_stack(w, m, c).mT),
    "stack, matmul of x[None]": lambda x, w, m, c: x[None] @ _pair_stack(w, m, c).transpose(1, 2),
    "stack, bmm": lambda x, w, m, c: torch.bmm(x.expand(2, -1, -1), _pair_stack(w, m, c).mT).unbind(0),
    "stack, flatten, unflatten": lambda x, w, m, c: (
        F.linear(x, _pair_stack(w, m, c).flatten(0, 1)).unflatten(-1, (2, D)).unbind(-2)
    ),
    "stack, view, view": lambda x, w, m, c: F.linear(x, _pair_stack(w, m, c).view(-1, H)).view(-1, 2, D).unbind(1),
    "stack, reshape, chunk": lambda x, w, m, c: F.linear(x, _pair_stack(w, m, c).reshape(2 * D, H)).chunk(2, -1),
    "stack of masks": lambda x, w, m, c: torch.einsum("bh,kdh->kbd", x, w * torch.stack([m, c])),
    "stack, linear of each": lambda x, w, m, c: [F.linear(x, one) for one in _pair_stack(w, m, c)],
}


def _halves(both: Tensor) -> tuple[Tensor, Tensor]:
    return both[..., :D], both[..., D:]


@pytest.mark.parametrize(("name", "kind", "mode"), family(JOINED_PAIRS, MAIN_KINDS, MODES))
def test_gate_and_value_in_one_product(name: str, kind: str, mode: str) -> None:
    def term(x: Tensor, w: Tensor, m: Tensor, _: More) -> Tensor:
        return activated(JOINED_PAIRS[name](x, w, m, KINDS[kind].complement(m)))

    fuses_to_one(sum_of(term), KINDS[kind], mode)


def _terms(gates: Any, values: Any) -> Tensor:
    return sum(F.silu(g) * v for g, v in zip(gates, values, strict=True))


# The layer from x, weight, masks and complements.
JOINED: dict[str, Callable[[Tensor, Tensor, Masks, Masks], Tensor]] = {
    "one cat": lambda x, w, ms, cs: _chunked(F.linear(x, torch.cat([w * m for m in [*ms, *cs]]))),
    "one cat of pairs": lambda x, w, ms, cs: _chunked_pairs(
        F.linear(x, torch.cat([w * f for pair in zip(ms, cs, strict=True) for f in pair]))
    ),
    "gates in one cat, values in another": lambda x, w, ms, cs: _terms(
        F.linear(x, torch.cat([w * m for m in ms])).chunk(len(ms), -1),
        F.linear(x, torch.cat([w * c for c in cs])).split(D, -1),
    ),
    "gates in one cat, values in another, one sum": lambda x, w, ms, cs: (
        (F.silu(F.linear(x, torch.cat([w * m for m in ms]))) * F.linear(x, torch.cat([w * c for c in cs])))
        .unflatten(-1, (len(ms), D))
        .sum(-2)
    ),
    "flattened stacks": lambda x, w, ms, cs: (
        F.silu(F.linear(x, (torch.stack(ms) * w).flatten(0, 1)).unflatten(-1, (len(ms), D)))
        * F.linear(x, (torch.stack(cs) * w).flatten(0, 1)).unflatten(-1, (len(ms), D))
    ).sum(-2),
    "reshaped stacks": lambda x, w, ms, cs: (
        F.silu(F.linear(x, (w * torch.stack(ms)).reshape(-1, H)).view(5, -1, D))
        * F.linear(x, (w * torch.stack(cs)).reshape(-1, H)).view(5, -1, D)
    ).sum(1),
    "flattened, total - gates": lambda x, w, ms, cs: _less_total(
        F.linear(x, w), F.linear(x, (torch.stack(ms) * w).flatten(0, 1)).unflatten(-1, (len(ms), D))
    ),
    "stack of masked weights": lambda x, w, ms, cs: (
        F.silu(torch.einsum("bh,ndh->nbd", x, torch.stack([w * m for m in ms])))
        * torch.einsum("bh,ndh->nbd", x, torch.stack([w * c for c in cs]))
    ).sum(0),
    "stack of masks": lambda x, w, ms, cs: (
        F.silu(torch.einsum("bh,ndh->nbd", x, w * torch.stack(ms)))
        * torch.einsum("bh,ndh->nbd", x, w * torch.stack(cs))
    ).mean(0),
}


def _chunked(products: Tensor) -> Tensor:
    parts = products.chunk(2 * N_MASKS, dim=-1)
    return _terms(parts[:N_MASKS], parts[N_MASKS:])


def _chunked_pairs(products: Tensor) -> Tensor:
    parts = products.chunk(2 * N_MASKS, dim=-1)
    return _terms(parts[::2], parts[1::2])


def _less_total(total: Tensor, gates: Tensor) -> Tensor:
    return (F.silu(gates) * (total.unsqueeze(-2) - gates)).sum(-2)


@pytest.mark.parametrize(("name", "kind", "mode"), family(JOINED, MAIN_KINDS, MODES))
def test_all_masks_in_one_product(name: str, kind: str, mode: str) -> None:
    def layer(x: Tensor, weight: Tensor, masks: Masks, more: More) -> Tensor:
        return JOINED[name](x, weight, masks, [KINDS[kind].complement(m) for m in masks])

    fuses_to_one(layer, KINDS[kind], mode)
