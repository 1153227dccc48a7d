"""Gate and value, or all masks, from one product of x with stacked or concatenated weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lookalikes
import pytest
import torch
import torch.nn.functional as F
from families import family
from graphs import compare
from kinds import (
    KINDS,
    MAIN_KINDS,
    MODES,
    N_MASKS,
    SAME,
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
    "cat of transposes, transposed": lambda x, w, m, c: F.linear(
        x, torch.cat([(w * m).t(), (w * c).t()], dim=1).t()
    ).chunk(2, -1),
    "cat, unflatten of three dimensions": lambda x, w, m, c: (
        F.linear(x[None], _pair_cat(w, m, c)).unflatten(-1, (2, D)).unbind(-2)
    ),
    "stack of the weight and the masked weight": lambda x, w, m, c: _with_the_total(
        *torch.einsum("bh,kdh->kbd", x, torch.stack([w, w * m]))
    ),
    "cat of transposes, linear": lambda x, w, m, c: F.linear(x, torch.cat([(w * m).t(), (w * c).t()])).chunk(2, -1),
    "stack of transposes, flatten": lambda x, w, m, c: (
        F.linear(x, _pair_stack(w, m, c).mT.flatten(0, 1)).unflatten(-1, (2, D)).unbind(-2)
    ),
    "stack, linear of each": lambda x, w, m, c: [F.linear(x, one) for one in _pair_stack(w, m, c)],
}


def _with_the_total(total: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return gate, total - gate


def _halves(both: Tensor) -> tuple[Tensor, Tensor]:
    return both[..., :D], both[..., D:]


@pytest.mark.parametrize(("name", "kind", "mode"), family(JOINED_PAIRS, MAIN_KINDS, MODES, one_in=1))
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
    "one cat of stacks": lambda x, w, ms, cs: _term_of(
        torch.einsum("bh,ndh->nbd", x, torch.cat([w * torch.stack(ms), w * torch.stack(cs)])).chunk(2)
    ).sum(0),
    "one cat of cats": lambda x, w, ms, cs: _chunked(
        F.linear(x, torch.cat([torch.cat([w * m for m in ms]), torch.cat([w * c for c in cs])]))
    ),
    "stack, weight - masked weights": lambda x, w, ms, cs: _term_of(
        torch.einsum("bh,ndh->nbd", x, weights) for weights in (w * torch.stack(ms), w - w * torch.stack(ms))
    ).sum(0),
    "one cat, halves": lambda x, w, ms, cs: _halves_gated(F.linear(x, torch.cat([w * m for m in [*ms, *cs]]))),
    "one stack, halves": lambda x, w, ms, cs: _term_of(
        torch.einsum("bh,ndh->nbd", x, torch.stack([w * m for m in [*ms, *cs]])).chunk(2)
    ).sum(0),
    "ranges of one": lambda x, w, ms, cs: _sum_of_ranges(
        torch.einsum("bh,ndh->nbd", x, w * torch.stack([*ms, *cs])), len(ms)
    ),
    "terms of a stack, added one by one": lambda x, w, ms, cs: sum(
        _term_of(torch.einsum("bh,ndh->nbd", x, w * torch.stack([*ms, *cs])).chunk(2)).unbind(0)
    ),
    "stack, total - gates": lambda x, w, ms, cs: _with_gates(
        torch.einsum("bh,ndh->nbd", x, torch.stack([w * m for m in ms])), F.linear(x, w)
    ).sum(0),
    "stack of tokens first, total - gates": lambda x, w, ms, cs: _with_gates(
        torch.einsum("bh,ndh->bnd", x, torch.stack([w * m for m in ms])), F.linear(x, w).unsqueeze(1)
    ).sum(1),
    "stack of masks": lambda x, w, ms, cs: (
        F.silu(torch.einsum("bh,ndh->nbd", x, w * torch.stack(ms)))
        * torch.einsum("bh,ndh->nbd", x, w * torch.stack(cs))
    ).mean(0),
}


def _term_of(parts: Any) -> Tensor:
    gates, values = parts
    return F.silu(gates) * values


def _with_gates(gates: Tensor, total: Tensor) -> Tensor:
    return F.silu(gates) * (total - gates)


def _halves_gated(products: Tensor) -> Tensor:
    half = products.shape[-1] // 2
    return _term_of((products[..., :half], products[..., half:])).unflatten(-1, (-1, D)).sum(-2)


def _sum_of_ranges(products: Tensor, n: int) -> Tensor:
    return sum(_term_of((products[i : i + 1], products[n + i : n + i + 1])).sum(0) for i in range(n))


def _chunked(products: Tensor) -> Tensor:
    parts = products.chunk(2 * N_MASKS, dim=-1)
    return _terms(parts[:N_MASKS], parts[N_MASKS:])


def _chunked_pairs(products: Tensor) -> Tensor:
    parts = products.chunk(2 * N_MASKS, dim=-1)
    return _terms(parts[::2], parts[1::2])


def _less_total(total: Tensor, gates: Tensor) -> Tensor:
    return (F.silu(gates) * (total.unsqueeze(-2) - gates)).sum(-2)


@pytest.mark.parametrize(("name", "kind", "mode"), family(JOINED, MAIN_KINDS, MODES, one_in=1))
def test_all_masks_in_one_product(name: str, kind: str, mode: str) -> None:
    def layer(x: Tensor, weight: Tensor, masks: Masks, more: More) -> Tensor:
        return JOINED[name](x, weight, masks, [KINDS[kind].complement(m) for m in masks])

    fuses_to_one(layer, KINDS[kind], mode)


# --- Parts that are not gates and values -----------------------------------------------------------------------------


def _stacked(x: Tensor, *weights: Tensor) -> Tensor:
    return torch.einsum("bh,ndh->nbd", x, torch.stack(weights))


def _catted(x: Tensor, *weights: Tensor) -> Tensor:
    return F.linear(x, torch.cat(weights))


# Name -> a program of joined products that is not MGLU, or that no rule knows.
NOT_JOINED: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "parts of gate and value": lambda x, w, m, o: _term_of((_both(x, w, m)[:, 4:8], _both(x, w, m)[:, 12:16])),
    "columns of gate and value": lambda x, w, m, o: _term_of(_both(x, w, m).unbind(-1)[:2]),
    "tokens of a stack": lambda x, w, m, o: _term_of(_stacked(x, w * m[0], w * ~m[0]).unbind(1)[:2]),
    "ranges of tokens of a stack": lambda x, w, m, o: _term_of(_stacked(x, w * m[0], w * ~m[0]).split(1, 1)[:2]).sum(0),
    "masks that the weight has not": lambda x, w, m, o: _first_of(x, w, m[0], torch.stack([m[1], m[0]])),
    "stacks along other dimensions, one of them transposed": lambda x, w, m, o: _term_of(
        (_stacked(_square(x), *_eight(w, m)), _stacked(_square(x), *_eight(w, ~m)).transpose(0, 1))
    ).sum(0),
    "stacks along other dimensions": lambda x, w, m, o: _term_of(
        (
            torch.einsum("bh,ndh->nbd", _square(x), torch.stack(_eight(w, m))),
            torch.einsum("bh,ndh->bnd", _square(x), torch.stack(_eight(w, ~m))),
        )
    ).sum(0),
    "a total for each token, of a stack whose masks are as many": lambda x, w, m, o: _with_gates(
        torch.einsum("bh,ndh->bnd", _square(x), torch.stack(_eight(w, m))), F.linear(_square(x), w)
    ).sum(1),
    "a stack of one token, and a stack of all": lambda x, w, m, o: _term_of(
        (
            torch.einsum("bh,ndh->nbd", x, torch.stack([w * m[0], w * m[1]])),
            torch.einsum("h,ndh->nd", x[0], torch.stack([*_eight(w, ~m)][:5])),
        )
    ).sum(0),
    "a total of a repeated weight": lambda x, w, m, o: _with_gates(F.linear(x, w * m[0]), x @ w.expand(3, -1, -1).mT),
    "a concatenation along the input features": lambda x, w, m, o: _term_of(
        (torch.cat([x, x], 1) @ torch.cat([w * m[0], w * ~m[0]])).chunk(2, 1)
    ),
    "a concatenation of other widths": lambda x, w, m, o: _term_of(_catted(x, w * m[0], (w * ~m[0])[:4]).chunk(2, 1)),
    "one weight for an x that is repeated": lambda x, w, m, o: _term_of(
        x.expand(3, -1, -1) @ torch.stack([w * f]).mT for f in (m[0], ~m[0])
    ).sum(0),
    "one masked weight and a repeated weight": lambda x, w, m, o: _with_repeated(x, w, torch.stack([w * m[0]])),
    "masked weights, unflattened": lambda x, w, m, o: _term_of(
        x @ torch.cat([one.t() for one in _eight(w, f)], 1).unflatten(1, (8, D)) for f in (m, ~m)
    ).sum(0),
    "products unflattened to other sizes": lambda x, w, m, o: _term_of(
        _both(x, w, m).unflatten(-1, (4, 4)).unbind(1)[:2]
    ),
    "a weight that is repeated along its rows": lambda x, w, m, o: _term_of(
        torch.einsum("bh,ndh->nbd", x, w[:, None] * torch.cat([f, f, f])[:8]) for f in (m, ~m)
    ).sum(0),
    "a repeated weight with one mask": lambda x, w, m, o: _term_of(
        x @ (w.expand(3, -1, -1) * f).mT for f in (m[0], ~m[0])
    ),
    "a repeated weight under vmap": lambda x, w, m, o: torch.vmap(
        lambda one: _term_of(x @ (w.expand(3, -1, -1) * f).mT for f in (one, ~one))
    )(m).sum(0),
    "inner products with a stack": lambda x, w, m, o: _term_of(
        torch.inner(_square(x), torch.stack(_eight(w, f))) for f in (m, ~m)
    ).sum(0),
    "another input for each mask": lambda x, w, m, o: _term_of(
        torch.stack([x, 2 * x]) @ torch.stack([w * f[0], w * f[1]]).mT for f in (m, ~m)
    ).sum(0),
    "each token with another mask": lambda x, w, m, o: _term_of(
        _square(x).unsqueeze(1).expand(8, 8, H) @ torch.stack(_eight(w, f)).mT for f in (m, ~m)
    ).sum(1),
    "a repeated batch, each input with another mask": lambda x, w, m, o: _term_of(
        torch.stack([x, 2 * x, 3 * x]).expand(3, -1, -1, -1) @ torch.stack([w * one for one in f]).mT for f in (m, ~m)
    ).sum(0),
    "one token, repeated": lambda x, w, m, o: _term_of(
        x[0].expand(3, -1) @ torch.stack([w * one for one in f]).mT for f in (m, ~m)
    ).sum(0),
    "the transpose of a stack in all dimensions": lambda x, w, m, o: _term_of(
        x @ torch.stack(_eight(w, f)).permute(2, 1, 0) for f in (m, ~m)
    ).sum(0),
    "stacked masks in another dtype": lambda x, w, m, o: _term_of(
        torch.einsum("bh,ndh->nbd", x, w * torch.stack([m[0], ~m[0]]).double())
    ),
    "stacked masks, transposed": lambda x, w, m, o: _term_of(x @ (w.t() * torch.stack([m[0], ~m[0]]).mT)),
    "masked weights of two dtypes": lambda x, w, m, o: _term_of(_catted(x, (w * m[0]).float(), w * ~m[0]).chunk(2, 1)),
    "a stack that is rounded": lambda x, w, m, o: _term_of(
        torch.einsum("bh,ndh->nbd", x, torch.stack([w * m[0], w * ~m[0]]).float().double())
    ),
    "the product with the masks, beside a layer": lambda x, w, m, o: (
        _term_of(_both(x, w, m).chunk(2, 1))
        + (x.expand(2, -1, -1) @ torch.stack([m[0].double(), m[1].double()])).sum(0)
    ),
    "a total under vmap": lambda x, w, m, o: torch.vmap(lambda one: _with_gates(F.linear(x, w * one), F.linear(x, w)))(
        m
    ).sum(0),
    "a stack that is masked twice": lambda x, w, m, o: _term_of(
        torch.einsum("bh,ndh->nbd", x, torch.stack([w * one for one in f[:2]]) * f[:2]) for f in (m, ~m)
    ).sum(0),
    "one masked weight, masked by a stack": lambda x, w, m, o: _term_of(
        torch.einsum("bh,ndh->nbd", x, torch.stack([w * f[0]]) * f) for f in (m, ~m)
    ).sum(0),
    "one mask for a repeated weight": lambda x, w, m, o: _term_of(
        torch.einsum("bh,ndh->nbd", x, w.expand(3, -1, -1) * torch.stack([f])) for f in (m[0], ~m[0])
    ).sum(0),
    "three inputs for three masks": lambda x, w, m, o: _term_of(
        torch.stack([x, 2 * x, 3 * x]) @ torch.stack([w * one for one in f]).mT.unsqueeze(0) for f in (m, ~m)
    ).sum(0),
    "rows of the masked weights": lambda x, w, m, o: _term_of(
        x.expand(8, -1, -1).contiguous() @ torch.stack([w * one for one in f]).mT.unsqueeze(-1) for f in (m, ~m)
    ).sum(0),
    "a stack along the rows": lambda x, w, m, o: _term_of(
        torch.einsum("bh,ndh->nbd", x, torch.stack(_eight(w, f), 1)) for f in (m, ~m)
    ).sum(0),
    "a stack with a mask in it": lambda x, w, m, o: _term_of(
        _stacked(x, w * m[0], m[1].to(w.dtype), w * ~m[0]).unbind(0)[:2]
    ),
    "stacks that are concatenated along the rows": lambda x, w, m, o: _term_of(
        torch.einsum("bh,ndh->nbd", x, torch.cat([_weights(w, m), _weights(w, ~m)], 1)).unbind(0)
    ),
    "a concatenation of unequal heights": lambda x, w, m, o: _term_of(
        _catted(x, w[:4] * m[0, :4], w * m[0], w * ~m[0]).split(4, 1)[1:3]
    ),
    "concatenated repeated weights": lambda x, w, m, o: _term_of(
        (torch.cat([x, x], 1) @ torch.cat([w.expand(3, -1, -1).mT * f.t(), w.expand(3, -1, -1).mT * ~f.t()], 1)).narrow(
            -1, 0, D
        )
        for f in (m[0], ~m[0])
    ),
    "a stack as one wide matrix": lambda x, w, m, o: _term_of(
        F.linear(torch.cat([x, x], 1), torch.stack([w * f, w * ~f]).reshape(D, 2 * H)).narrow(-1, 0, D)
        for f in (m[0], ~m[0])
    ),
    "masks that are stacked along the rows": lambda x, w, m, o: _term_of(
        torch.einsum("bh,ndh->nbd", x, w * torch.stack([f[i % 2] for i in range(8)], 1)) for f in (m, ~m)
    ).sum(0),
    "stacks of masks that are joined along the rows": lambda x, w, m, o: _term_of(
        torch.einsum("bh,ndh->nbd", x, torch.cat([w, w]) * torch.cat([m[:2], ~m[:2]], 1)).unbind(0)
    ),
    "another tensor in a stack of masks": lambda x, w, m, o: _term_of(
        torch.einsum("bh,ndh->nbd", x, w * torch.stack([m[0].double(), o, 1 - m[0].double()])).unbind(0)[:2]
    ),
    "a stack of one mask for a repeated weight": lambda x, w, m, o: _term_of(
        torch.einsum("bh,ndh->nbd", x, w.expand(3, -1, -1) * f[:1]) for f in (m, ~m)
    ).sum(0),
    "slices of masks along the rows": lambda x, w, m, o: _term_of(
        F.linear(x, w * f) for f in (torch.cat([m, ~m, m])[:8].select(1, 0), ~torch.cat([m, ~m, m])[:8].select(1, 0))
    ),
    "one column of x, which einsum repeats": lambda x, w, m, o: _term_of(
        torch.einsum("bh,dh->bd", x[:, :1], w * f) for f in (m[0], ~m[0])
    ),
    "one mask weight, which einsum repeats": lambda x, w, m, o: torch.einsum(
        "nbd,n->bd",
        _term_of(torch.einsum("bh,ndh->nbd", x, torch.stack([w * one for one in f])) for f in (m, ~m)),
        o[0, :1],
    ),
    "a product with two masks at once, beside a layer": lambda x, w, m, o: (
        _term_of(_both(x, w, m).chunk(2, 1)) + torch.einsum("bh,dh,dh,dh->bd", x, w, m[0].to(w.dtype), m[1].to(w.dtype))
    ),
    "a weight and a mask in two layouts": lambda x, w, m, o: _term_of(
        torch.einsum("bh,hd,dh->bd", x, w, f.to(w.dtype)) for f in (m[0], ~m[0])
    ),
    "a mask and a weight in two layouts": lambda x, w, m, o: _term_of(
        torch.einsum("bh,dh,hd->bd", x, w, f.to(w.dtype)) for f in (m[0], ~m[0])
    ),
    "an einsum of three operands under vmap": lambda x, w, m, o: torch.vmap(
        lambda one: _term_of(torch.einsum("bh,dh,dh->bd", x, w, f.to(w.dtype)) for f in (one, ~one))
    )(m).sum(0),
    "an einsum that adds up the masks": lambda x, w, m, o: _term_of(
        torch.einsum("bh,ndh->bd", x, torch.stack([w * one for one in f])) for f in (m, ~m)
    ),
    "an einsum of stacks along other dimensions": lambda x, w, m, o: torch.einsum(
        "nbd,nbd->bd", F.silu(_first_masks(_square(x), _eight(w, m))), _second_masks(_square(x), _eight(w, ~m))
    ),
    "an einsum of stacks along other dimensions, the second first": lambda x, w, m, o: torch.einsum(
        "bnd,bnd->bd", F.silu(_second_masks(_square(x), _eight(w, m))), _first_masks(_square(x), _eight(w, ~m))
    ),
    "an einsum of masks and tokens": lambda x, w, m, o: torch.einsum(
        "nbd,bnd->bd", F.silu(_first_masks(_square(x), _eight(w, m))), _first_masks(_square(x), _eight(w, ~m))
    ),
    "an einsum of masks and tokens, the second first": lambda x, w, m, o: torch.einsum(
        "bnd,nbd->nd", F.silu(_first_masks(_square(x), _eight(w, m))), _first_masks(_square(x), _eight(w, ~m))
    ),
    "an einsum with a transposed result": lambda x, w, m, o: _term_of(
        torch.einsum("bh,dh->db", _square(x), w * f) for f in (m[0], ~m[0])
    ),
    "an einsum without an arrow, with a transposed result": lambda x, w, m, o: _term_of(
        torch.einsum("zh,ah", _square(x), w * f) for f in (m[0], ~m[0])
    ),
    "an einsum with a diagonal": lambda x, w, m, o: _term_of(
        torch.einsum("bd,dd->bd", x, w * f) for f in (m[0], ~m[0])
    ),
    "an einsum of the tokens": lambda x, w, m, o: _term_of(
        torch.einsum("hb,dh->bd", _square(x), w * f) for f in (m[0], ~m[0])
    ),
    "an einsum of an ellipsis without an arrow": lambda x, w, m, o: _term_of(
        torch.einsum("...h,dh", x, w * f) for f in (m[0], ~m[0])
    ),
    "an einsum of three operands with a transposed result, beside a layer": lambda x, w, m, o: (
        _term_of(_both(x, w, m).chunk(2, 1)) + torch.einsum("bh,dh,dh->db", x, w, m[0].to(w.dtype)).sum()
    ),
    "an einsum of lists, beside a layer": lambda x, w, m, o: (
        _term_of(_both(x, w, m).chunk(2, 1)) + torch.einsum(x, [0, 1], w * m[0], [2, 1], [0, 2])
    ),
    "an einsum with weights of the tokens of a batch": lambda x, w, m, o: torch.einsum(
        "nbtd,nbt->btd", _of_a_batch(x, w, m), o.flatten()[:30].view(3, 2, 5)
    ),
    "an einsum with weights of a batch": lambda x, w, m, o: torch.einsum(
        "nbtd,nb->btd", _of_a_batch(x, w, m), o[:3, :2]
    ),
    "an einsum with weights of tokens but not of masks": lambda x, w, m, o: torch.einsum(
        "nbtd,bt->btd", _of_a_batch(x, w, m), o[:2, :5]
    ),
    "an einsum that adds up features": lambda x, w, m, o: torch.einsum(
        "bd->b", F.silu(_catted(x, w * m[0], w * m[1])) * _catted(x, w * ~m[0], w * ~m[1])
    ),
    "an einsum that adds up tokens": lambda x, w, m, o: torch.einsum(
        "nbd->nd", F.silu(_first_masks(x, list(w * m))) * _first_masks(x, list(w * ~m))
    ),
    "weights of tokens that are as many as the masks": lambda x, w, m, o: (
        F.silu(_first_masks(x[:3], list(w * m))) * _first_masks(x[:3], list(w * ~m)) * o[:3, :1]
    ).sum(0),
    "one weight of a stack": lambda x, w, m, o: (_term_of(_first_masks(x, list(w * f)) for f in (m, ~m)) * o[0, 0]).sum(
        0
    ),
    "weights of the tokens of a batch": lambda x, w, m, o: (
        _term_of(F.linear(torch.stack([x, 2 * x]), w * f) for f in (m[0], ~m[0])) * o.flatten()[:10].view(2, 5, 1)
    ),
    "x of three dimensions": lambda x, w, m, o: _term_of(
        torch.stack([x, 2 * x]) @ torch.stack([w * one for one in f]).mT.unsqueeze(1) for f in (m, ~m)
    ).sum(0),
    "x of four dimensions": lambda x, w, m, o: _term_of(
        x[None, None] @ torch.stack([w * one for one in f]).mT.unsqueeze(1).unsqueeze(2) for f in (m, ~m)
    ).sum(0),
    "a stack whose first dimensions are swapped": lambda x, w, m, o: _term_of(
        x @ torch.stack(_eight(w, f)).transpose(0, 1) for f in (m, ~m)
    ).sum(0),
    "a stack whose dimensions stay in their order": lambda x, w, m, o: _term_of(
        x @ torch.stack(_eight(w, f)).permute(0, 1, 2) for f in (m, ~m)
    ).sum(0),
    "tokens of a stack along the second dimension": lambda x, w, m, o: _term_of(
        _second_masks(x, [w * m[0], w * ~m[0]]).unbind(0)[:2]
    ),
    "ranges of tokens of a stack along the second dimension": lambda x, w, m, o: _term_of(
        _second_masks(x, [w * m[0], w * ~m[0]]).split(1, 0)[:2]
    ).sum(0),
    "glu of a stack": lambda x, w, m, o: F.glu(_first_masks(x, [*(w * m), *(w * ~m)]), 0).sum(0),
    "glu of three products": lambda x, w, m, o: F.glu(_catted(x, w * m[0], w * ~m[0], w * m[1], w * ~m[1], w * m[2])),
    "glu of tokens": lambda x, w, m, o: F.glu(_both(x[:4], w, m), 0),
    "complex numbers beside a layer": lambda x, w, m, o: _term_of(_both(x, w, m).chunk(2, 1)) + _of_complex_masks(m[0]),
    "a tensor less itself, beside a layer": lambda x, w, m, o: _term_of(_both(x, w, m).chunk(2, 1)) + (o - o).sum(),
    "an empty part": lambda x, w, m, o: _term_of(_both(x, w, m).chunk(2, 1)) + _both(x, w, m).narrow(1, 0, 0).sum(),
}


STILL_FUSED = (
    "a total under vmap",
    "slices of masks along the rows",
    "a stack that is masked twice",
    "an empty part",
    "one weight of a stack",
    "weights of the tokens of a batch",
    "x of three dimensions",
    "an einsum of an ellipsis without an arrow",
    "an einsum of three operands with a transposed result, beside a layer",
    "an einsum of lists, beside a layer",
    "an einsum with weights of the tokens of a batch",
    "x of four dimensions",
    "glu of a stack",
    "complex numbers beside a layer",
    "a tensor less itself, beside a layer",
    "a product with two masks at once, beside a layer",
    "the product with the masks, beside a layer",
)
"""Programs whose layer does not depend on the part that is unusual."""


def _both(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return _catted(x, w * m[0], w * ~m[0])


def _first_masks(x: Tensor, weights: list[Tensor]) -> Tensor:
    return torch.einsum("bh,ndh->nbd", x, torch.stack(weights))


def _second_masks(x: Tensor, weights: list[Tensor]) -> Tensor:
    return torch.einsum("bh,ndh->bnd", x, torch.stack(weights))


def _of_a_batch(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """The terms `[n_masks, 2, 5, D]` of a batch of inputs."""
    return _term_of(torch.einsum("bth,ndh->nbtd", torch.stack([x, 2 * x]), w * f) for f in (m, ~m))


def _of_complex_masks(m: Tensor) -> Tensor:
    zeros = torch.zeros_like(m, dtype=torch.complex64)
    y = (m.to(torch.complex64) + zeros) * torch.full_like(zeros, 2)
    return (torch.sgn(y) + y).real.sum()


def _square(x: Tensor) -> Tensor:
    """An input with as many tokens as features."""
    return torch.cat([x, x.flip(0) * 2])[:H]


def _weights(w: Tensor, m: Tensor) -> Tensor:
    return torch.stack([w * m[0], w * m[1]])


def _eight(w: Tensor, m: Tensor) -> list[Tensor]:
    return [w * m[i % 2] for i in range(8)]


def _with_repeated(x: Tensor, w: Tensor, gates: Tensor) -> Tensor:
    values = w.expand(4, -1, -1) - gates
    return _term_of(torch.einsum("bh,ndh->nbd", x, one) for one in (gates, values)).sum(0)


def _first_of(x: Tensor, w: Tensor, m: Tensor, masks: Tensor) -> Tensor:
    return _term_of((F.linear(x, ((w * m) * masks)[0]), F.linear(x, w * ~m)))


@pytest.mark.parametrize("name", NOT_JOINED)
def test_parts_of_joined_products(name: str) -> None:
    def layer(x: Tensor, weight: Tensor, logits: Tensor, bits: Tensor, other: Tensor) -> Tensor:
        return NOT_JOINED[name](x, weight, bits, other)

    capture = compare(layer, lambda: lookalikes.tensors(("x", "weight")), SAME)
    assert len(capture.report.fused) == (name in STILL_FUSED)
