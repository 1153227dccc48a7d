"""Layers whose gates and values come from one product of x with stacked or concatenated weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.families import family, quick_cases
from tests.support.programs import lookalikes
from tests.support.programs.graphs import compare
from tests.support.programs.kinds import (
    KINDS,
    MAIN_KINDS,
    MODES,
    N_MASKS,
    SAME,
    D,
    H,
    More,
    Pair,
    activated,
    fuses_to_one,
    sum_of,
)
from tests.support.programs.spellings import JOINTS, WRONG_JOINTS, from_source


def stacked(x: Tensor, weights: Any) -> Tensor:
    """The products `[n, tokens, D]` of x and a stack or list of n weights."""
    return torch.einsum("bh,ndh->nbd", x, weights if isinstance(weights, Tensor) else torch.stack(weights))


def tokens_first(x: Tensor, weights: Any) -> Tensor:
    """The products `[tokens, n, D]` of x and a stack or list of n weights."""
    return torch.einsum("bh,ndh->bnd", x, weights if isinstance(weights, Tensor) else torch.stack(weights))


def catted(x: Tensor, weights: Any) -> Tensor:
    """The products `[tokens, n * D]` of x and a list of n weights."""
    return F.linear(x, torch.cat(list(weights)))


# --- Gate and value of one mask --------------------------------------------------------------------------------------


def _from_masked_weights(joint: Callable[[Tensor, Tensor, Tensor], Any]) -> Pair:
    return lambda x, w, m, c: joint(x, w * m, w * c)


def _with_the_total(total: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return gate, total - gate


JOINED_PAIRS: dict[str, Pair] = {
    **{name: _from_masked_weights(joint) for name, joint in JOINTS.items() if name not in WRONG_JOINTS},
    "stack of masks": lambda x, w, m, c: stacked(x, w * torch.stack([m, c])),
    "stack of the weight and the masked weight": lambda x, w, m, c: _with_the_total(*stacked(x, [w, w * m])),
    "cat of transposes, linear": lambda x, w, m, c: F.linear(x, torch.cat([(w * m).t(), (w * c).t()])).chunk(2, -1),
    "stack of transposes, flatten": lambda x, w, m, c: (
        F.linear(x, torch.stack([w * m, w * c]).mT.flatten(0, 1)).unflatten(-1, (2, D)).unbind(-2)
    ),
}


@pytest.mark.parametrize(("name", "kind", "mode"), family(JOINED_PAIRS, MAIN_KINDS, MODES, one_in=2))
def test_gate_and_value_in_one_product(name: str, kind: str, mode: str) -> None:
    def term(x: Tensor, w: Tensor, m: Tensor, _: More) -> Tensor:
        return activated(JOINED_PAIRS[name](x, w, m, KINDS[kind].complement(m)))

    fuses_to_one(sum_of(term), KINDS[kind], mode)


# --- All masks -------------------------------------------------------------------------------------------------------

# Layers of x, a weight w, masks ms and their complements cs.
JOINED = (
    "_in_halves(catted(x, [w * m for m in [*ms, *cs]]).chunk(2 * N_MASKS, -1))",
    "_in_pairs(catted(x, [w * f for pair in zip(ms, cs, strict=True) for f in pair]).chunk(2 * N_MASKS, -1))",
    "_terms(catted(x, [w * m for m in ms]).chunk(N_MASKS, -1), catted(x, [w * c for c in cs]).split(D, -1))",
    "activated(catted(x, [w * f for f in fs]) for fs in (ms, cs)).unflatten(-1, (N_MASKS, D)).sum(-2)",
    "activated(linear(x, (stack(fs) * w).flatten(0, 1)).unflatten(-1, (N_MASKS, D)) for fs in (ms, cs)).sum(-2)",
    "activated(linear(x, (w * stack(fs)).reshape(-1, H)).view(5, -1, D) for fs in (ms, cs)).sum(1)",
    "of_total(linear(x, w).unsqueeze(-2), linear(x, (stack(ms) * w).flatten(0, 1)).unflatten(-1, (2, D))).sum(-2)",
    "activated(stacked(x, [w * f for f in fs]) for fs in (ms, cs)).sum(0)",
    "activated(stacked(x, cat([w * stack(ms), w * stack(cs)])).chunk(2)).sum(0)",
    "_in_halves(catted(x, [cat([w * f for f in fs]) for fs in (ms, cs)]).chunk(2 * N_MASKS, -1))",
    "activated(stacked(x, weights) for weights in (w * stack(ms), w - w * stack(ms))).sum(0)",
    "activated(catted(x, [w * f for f in [*ms, *cs]]).split(N_MASKS * D, -1)).unflatten(-1, (-1, D)).sum(-2)",
    "activated(stacked(x, [w * f for f in [*ms, *cs]]).chunk(2)).sum(0)",
    "_sum_of_ranges(stacked(x, w * stack([*ms, *cs])))",
    "sum(activated(stacked(x, w * stack([*ms, *cs])).chunk(2)).unbind(0))",
    "of_total(linear(x, w), stacked(x, [w * m for m in ms])).sum(0)",
    "of_total(linear(x, w).unsqueeze(1), tokens_first(x, [w * m for m in ms])).sum(1)",
    "activated(stacked(x, w * stack(fs)) for fs in (ms, cs)).mean(0)",
)


def _terms(gates: Any, values: Any) -> Tensor:
    return sum(F.silu(g) * v for g, v in zip(gates, values, strict=True))


def _in_halves(products: Any) -> Tensor:
    return _terms(products[:N_MASKS], products[N_MASKS:])


def _in_pairs(products: Any) -> Tensor:
    return _terms(products[::2], products[1::2])


def _sum_of_ranges(products: Tensor) -> Tensor:
    ranges = [products[i : i + 1] for i in range(2 * N_MASKS)]
    return sum(activated(pair).sum(0) for pair in zip(ranges[:N_MASKS], ranges[N_MASKS:], strict=True))


@pytest.mark.parametrize(("source", "kind", "mode"), family(JOINED, MAIN_KINDS, MODES, one_in=2))
def test_all_masks_in_one_product(source: str, kind: str, mode: str) -> None:
    function = from_source("x, w, ms, cs", source, globals())

    def layer(x: Tensor, weight: Tensor, masks: list[Tensor], _: More) -> Tensor:
        return function(x, weight, masks, [KINDS[kind].complement(m) for m in masks])

    fuses_to_one(layer, KINDS[kind], mode)


# --- Parts that are not gates and values -----------------------------------------------------------------------------


def each(w: Tensor, f: Tensor) -> Tensor:
    """The products of the weight and each mask of f, stacked."""
    return torch.stack([w * mask for mask in f])


def eight(w: Tensor, f: Tensor, dim: int = 0) -> Tensor:
    """A stack of 8 masked weights, as many as there are features."""
    return torch.stack([w * f[i % 2] for i in range(8)], dim)


def gate_and_value(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """Gate and value of one mask, concatenated to `[tokens, 2 * D]`."""
    return catted(x, [w * m, w * ~m])


def plain(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """A plain layer, for programs that also contain something unusual."""
    return activated(gate_and_value(x, w, m[0]).chunk(2, 1))


def square(x: Tensor) -> Tensor:
    """An input with as many tokens as features."""
    return torch.cat([x, x.flip(0) * 2])[:H]


WRONG_PAIRS = [f"activated(JOINTS['{name}'](x, w * b[0], w * ~b[0]))" for name in WRONG_JOINTS]

# Programs of joined products that are not MGLU, or that no rule knows.
NOT_JOINED = (
    # Parts of a product that are not gates and values
    "term(gate_and_value(x, w, b[0])[:, 4:8], gate_and_value(x, w, b[0])[:, 12:16])",
    "activated(gate_and_value(x, w, b[0]).unbind(-1)[:2])",
    "activated(gate_and_value(x, w, b[0]).unflatten(-1, (4, 4)).unbind(1)[:2])",
    "activated(stacked(x, [w * b[0], w * ~b[0]]).unbind(1)[:2])",
    "activated(stacked(x, [w * b[0], w * ~b[0]]).split(1, 1)[:2]).sum(0)",
    "activated((cat([x, x], 1) @ cat([w * b[0], w * ~b[0]])).chunk(2, 1))",
    "activated(catted(x, [w * b[0], (w * ~b[0])[:4]]).chunk(2, 1))",
    "activated(catted(x, [w[:4] * b[0, :4], w * b[0], w * ~b[0]]).split(4, 1)[1:3])",
    "activated(catted(x, [(w * b[0]).float(), w * ~b[0]]).chunk(2, 1))",
    "F.glu(catted(x, [w * b[0], w * ~b[0], *each(w, b)]))",
    "F.glu(gate_and_value(x[:4], w, b[0]), 0)",
    # Stacks along other dimensions, and of other sizes
    "term(stacked(square(x), eight(w, b)), tokens_first(square(x), eight(w, ~b))).sum(0)",
    "term(stacked(square(x), eight(w, b)), stacked(square(x), eight(w, ~b)).transpose(0, 1)).sum(0)",
    "of_total(linear(square(x), w), tokens_first(square(x), eight(w, b))).sum(1)",
    "term(stacked(x, each(w, b[:2])), einsum('h,ndh->nd', x[0], eight(w, ~b)[:5])).sum(0)",
    "activated(stacked(x, eight(w, f, 1)) for f in (b, ~b)).sum(0)",
    "activated(stacked(x, cat([each(w, b[:2]), each(w, ~b[:2])], 1)).unbind(0))",
    "activated(linear(cat([x, x], 1), each(w, (f, ~f)).reshape(D, 2 * H)).narrow(-1, 0, D) for f in (b[0], ~b[0]))",
    "activated(x.expand(8, -1, -1).contiguous() @ each(w, f).mT.unsqueeze(-1) for f in (b, ~b)).sum(0)",
    "activated(x @ cat([one.t() for one in eight(w, f)], 1).unflatten(1, (8, D)) for f in (b, ~b)).sum(0)",
    "activated(x @ eight(w, f).permute(2, 1, 0) for f in (b, ~b)).sum(0)",
    "activated(x @ eight(w, f).transpose(0, 1) for f in (b, ~b)).sum(0)",
    "activated(stacked(x, each(w, b[:2]).float().double()))",
    "activated(stacked(x, [w * b[0], b[1].to(w.dtype), w * ~b[0]]).unbind(0)[:2])",
    "activated(torch.inner(square(x), eight(w, f)) for f in (b, ~b)).sum(0)",
    # Stacks of masks
    "term(linear(x, (w * b[0] * stack([b[1], b[0]]))[0]), linear(x, w * ~b[0]))",
    "activated(stacked(x, w * stack([b[0], ~b[0]]).double()))",
    "activated(x @ (w.t() * stack([b[0], ~b[0]]).mT))",
    "activated(stacked(x, w * stack([f[i % 2] for i in range(8)], 1)) for f in (b, ~b)).sum(0)",
    "activated(stacked(x, cat([w, w]) * cat([b[:2], ~b[:2]], 1)).unbind(0))",
    "activated(stacked(x, w * stack([b[0].double(), o, 1 - b[0].double()])).unbind(0)[:2])",
    "activated(stacked(x, each(w, f[:1]) * f) for f in (b, ~b)).sum(0)",
    # Repeated weights and inputs
    "of_total(x @ w.expand(3, -1, -1).mT, linear(x, w * b[0]))",
    "_less_repeated(x, w, each(w, b[:1]))",
    "activated(x.expand(3, -1, -1) @ each(w, f[:1]).mT for f in (b, ~b)).sum(0)",
    "activated(stacked(x, w[:, None] * cat([f, f, f])[:8]) for f in (b, ~b)).sum(0)",
    "activated(x @ (w.expand(3, -1, -1) * f).mT for f in (b[0], ~b[0]))",
    "torch.vmap(lambda one: activated(x @ (w.expand(3, -1, -1) * f).mT for f in (one, ~one)))(b).sum(0)",
    "activated(stacked(x, w.expand(3, -1, -1) * stack([f])) for f in (b[0], ~b[0])).sum(0)",
    "activated(stacked(x, w.expand(3, -1, -1) * f[:1]) for f in (b, ~b)).sum(0)",
    "activated((cat([x, x], 1) @ cat([thrice(w) * f.t(), thrice(w)], 1)).narrow(-1, 0, D) for f in (b[0], ~b[0]))",
    "activated(stack([x, 2 * x]) @ each(w, f[:2]).mT for f in (b, ~b)).sum(0)",
    "activated(stack([x, 2 * x, 3 * x]) @ each(w, f).mT.unsqueeze(0) for f in (b, ~b)).sum(0)",
    "activated(square(x).unsqueeze(1).expand(8, 8, H) @ eight(w, f).mT for f in (b, ~b)).sum(1)",
    "activated(stack([x, 2 * x, 3 * x]).expand(3, -1, -1, -1) @ each(w, f).mT for f in (b, ~b)).sum(0)",
    "activated(x[0].expand(3, -1) @ each(w, f).mT for f in (b, ~b)).sum(0)",
    # Einsum
    "activated(einsum('bh,dh->bd', x[:, :1], w * f) for f in (b[0], ~b[0]))",
    "einsum('nbd,n->bd', activated(stacked(x, each(w, f)) for f in (b, ~b)), o[0, :1])",
    "activated(einsum('bh,hd,dh->bd', x, w, f.to(w.dtype)) for f in (b[0], ~b[0]))",
    "torch.vmap(lambda one: activated(einsum('bh,dh,dh->bd', x, w, f.to(w.dtype)) for f in (one, ~one)))(b).sum(0)",
    "activated(einsum('bh,ndh->bd', x, each(w, f)) for f in (b, ~b))",
    "einsum('nbd,nbd->bd', silu(stacked(square(x), eight(w, b))), tokens_first(square(x), eight(w, ~b)))",
    "einsum('nbd,bnd->bd', silu(stacked(square(x), eight(w, b))), stacked(square(x), eight(w, ~b)))",
    "activated(einsum('bh,dh->db', square(x), w * f) for f in (b[0], ~b[0]))",
    "activated(einsum('zh,ah', square(x), w * f) for f in (b[0], ~b[0]))",
    "term(einsum('bh,dh->bd', square(x), w * b[0]), einsum('bh,dh->db', square(x), w * ~b[0]))",
    "activated(einsum('bd,dd->bd', x, w * f) for f in (b[0], ~b[0]))",
    "activated(einsum('hb,dh->bd', square(x), w * f) for f in (b[0], ~b[0]))",
    "einsum('bd->b', activated(catted(x, each(w, f)) for f in (b, ~b)))",
    "einsum('nbd->nd', activated(stacked(x, each(w, f)) for f in (b, ~b)))",
    "einsum('nbtd,nb->btd', batch_terms(x, w, b), o[:3, :2])",
    "einsum('nbtd,bt->btd', batch_terms(x, w, b), o[:2, :5])",
    "(activated(stacked(x[:3], each(w, f)) for f in (b, ~b)) * o[:3, :1]).sum(0)",
)

# Programs with an unusual part and one layer, which is fused.
STILL_JOINED = (
    "activated(linear(x, w * f) for f in (cat([b, ~b, b])[:8].select(1, 0), ~cat([b, ~b, b])[:8].select(1, 0)))",
    "activated(stacked(x, each(w, f[:2]) * f[:2]) for f in (b, ~b)).sum(0)",
    "(activated(stacked(x, each(w, f)) for f in (b, ~b)) * o[0, 0]).sum(0)",
    "activated(linear(stack([x, 2 * x]), w * f) for f in (b[0], ~b[0])) * o.flatten()[:10].view(2, 5, 1)",
    "activated(stack([x, 2 * x]) @ each(w, f).mT.unsqueeze(1) for f in (b, ~b)).sum(0)",
    "activated(x[None, None] @ each(w, f).mT.unsqueeze(1).unsqueeze(2) for f in (b, ~b)).sum(0)",
    "F.glu(stacked(x, [*each(w, b), *each(w, ~b)]), 0).sum(0)",
    "activated(einsum('...h,dh', x, w * f) for f in (b[0], ~b[0]))",
    "plain(x, w, b) + einsum('bh,dh,dh->db', x, w, b[0].to(w.dtype)).sum()",
    "plain(x, w, b) + einsum(x, [0, 1], w * b[0], [2, 1], [0, 2])",
    "plain(x, w, b) + einsum('bh,dh,dh,dh->bd', x, w, b[0].to(w.dtype), b[1].to(w.dtype))",
    "plain(x, w, b) + (x.expand(2, -1, -1) @ b[:2].double()).sum(0)",
    "plain(x, w, b) + _complex_mask_sum(b[0])",
    "plain(x, w, b) + (o - o).sum()",
    "plain(x, w, b) + gate_and_value(x, w, b[0]).narrow(1, 0, 0).sum()",
)


def batch_terms(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """The terms `[n_masks, 2, 5, D]` for a batch of two inputs."""
    return activated(torch.einsum("bth,ndh->nbtd", torch.stack([x, 2 * x]), w * f) for f in (m, ~m))


def _complex_mask_sum(m: Tensor) -> Tensor:
    zeros = torch.zeros_like(m, dtype=torch.complex64)
    y = (m.to(torch.complex64) + zeros) * torch.full_like(zeros, 2)
    return (torch.sgn(y) + y).real.sum()


def thrice(w: Tensor) -> Tensor:
    """Three transposes of a weight."""
    return w.expand(3, -1, -1).mT


def _less_repeated(x: Tensor, w: Tensor, gates: Tensor) -> Tensor:
    return activated(stacked(x, gates_or_values) for gates_or_values in (gates, w.expand(4, -1, -1) - gates)).sum(0)


PARTS = [*((source, 0) for source in (*WRONG_PAIRS, *NOT_JOINED)), *((source, 1) for source in STILL_JOINED)]


@pytest.mark.parametrize(("source", "count"), quick_cases(PARTS[::3], PARTS))
def test_parts_of_joined_products(source: str, count: int) -> None:
    layer = lookalikes.layer_of(source, globals())
    capture = compare(layer, lambda: lookalikes.tensors(("x", "weight")), SAME)
    assert len(capture.report.fused) == count
