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
from kinds import KINDS, MAIN_KINDS, MODES, N_MASKS, SAME, D, H, More, Pair, activated, fuses_to_one, sum_of
from spellings import JOINTS, WRONG_JOINTS, term_of_products, term_of_total
from torch import Tensor

Masks = list[Tensor]


def stacked(x: Tensor, weights: Any) -> Tensor:
    """The products `[n, tokens, D]` of x and a stack or list of weights."""
    return torch.einsum("bh,ndh->nbd", x, weights if isinstance(weights, Tensor) else torch.stack(weights))


def tokens_first(x: Tensor, weights: Any) -> Tensor:
    """The products `[tokens, n, D]` of x and a stack or list of weights."""
    return torch.einsum("bh,ndh->bnd", x, weights if isinstance(weights, Tensor) else torch.stack(weights))


def catted(x: Tensor, weights: Any) -> Tensor:
    """The products `[tokens, n * D]` of x and a list of weights."""
    return F.linear(x, torch.cat(list(weights)))


# --- Gate and value of one mask --------------------------------------------------------------------------------------


def _of_weights(joint: Callable[[Tensor, Tensor, Tensor], Any]) -> Pair:
    return lambda x, w, m, c: joint(x, w * m, w * c)


def _with_the_total(total: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return gate, total - gate


JOINED_PAIRS: dict[str, Pair] = {
    **{name: _of_weights(joint) for name, joint in JOINTS.items() if name not in WRONG_JOINTS},
    "stack of masks": lambda x, w, m, c: stacked(x, w * torch.stack([m, c])),
    "stack of the weight and the masked weight": lambda x, w, m, c: _with_the_total(*stacked(x, [w, w * m])),
    "cat of transposes, linear": lambda x, w, m, c: F.linear(x, torch.cat([(w * m).t(), (w * c).t()])).chunk(2, -1),
    "stack of transposes, flatten": lambda x, w, m, c: (
        F.linear(x, torch.stack([w * m, w * c]).mT.flatten(0, 1)).unflatten(-1, (2, D)).unbind(-2)
    ),
}


@pytest.mark.parametrize(("name", "kind", "mode"), family(JOINED_PAIRS, MAIN_KINDS, MODES, one_in=1))
def test_gate_and_value_in_one_product(name: str, kind: str, mode: str) -> None:
    def term(x: Tensor, w: Tensor, m: Tensor, _: More) -> Tensor:
        return activated(JOINED_PAIRS[name](x, w, m, KINDS[kind].complement(m)))

    fuses_to_one(sum_of(term), KINDS[kind], mode)


# --- All masks -------------------------------------------------------------------------------------------------------

# The layer from x, weight, masks and complements.
JOINED: dict[str, Callable[[Tensor, Tensor, Masks, Masks], Tensor]] = {
    "one cat": lambda x, w, ms, cs: _in_halves(catted(x, [w * m for m in [*ms, *cs]]).chunk(2 * N_MASKS, -1)),
    "one cat of pairs": lambda x, w, ms, cs: _in_pairs(
        catted(x, [w * f for pair in zip(ms, cs, strict=True) for f in pair]).chunk(2 * N_MASKS, -1)
    ),
    "gates in one cat, values in another": lambda x, w, ms, cs: _terms(
        catted(x, [w * m for m in ms]).chunk(N_MASKS, -1), catted(x, [w * c for c in cs]).split(D, -1)
    ),
    "gates in one cat, values in another, one sum": lambda x, w, ms, cs: (
        activated(catted(x, [w * f for f in fs]) for fs in (ms, cs)).unflatten(-1, (N_MASKS, D)).sum(-2)
    ),
    "flattened stacks": lambda x, w, ms, cs: activated(
        F.linear(x, (torch.stack(fs) * w).flatten(0, 1)).unflatten(-1, (N_MASKS, D)) for fs in (ms, cs)
    ).sum(-2),
    "reshaped stacks": lambda x, w, ms, cs: activated(
        F.linear(x, (w * torch.stack(fs)).reshape(-1, H)).view(5, -1, D) for fs in (ms, cs)
    ).sum(1),
    "flattened, total - gates": lambda x, w, ms, cs: term_of_total(
        F.linear(x, w).unsqueeze(-2), F.linear(x, (torch.stack(ms) * w).flatten(0, 1)).unflatten(-1, (N_MASKS, D))
    ).sum(-2),
    "stack of masked weights": lambda x, w, ms, cs: activated(stacked(x, [w * f for f in fs]) for fs in (ms, cs)).sum(
        0
    ),
    "one cat of stacks": lambda x, w, ms, cs: activated(
        stacked(x, torch.cat([w * torch.stack(ms), w * torch.stack(cs)])).chunk(2)
    ).sum(0),
    "one cat of cats": lambda x, w, ms, cs: _in_halves(
        catted(x, [torch.cat([w * f for f in fs]) for fs in (ms, cs)]).chunk(2 * N_MASKS, -1)
    ),
    "stack, weight - masked weights": lambda x, w, ms, cs: activated(
        stacked(x, weights) for weights in (w * torch.stack(ms), w - w * torch.stack(ms))
    ).sum(0),
    "one cat, halves": lambda x, w, ms, cs: (
        activated(catted(x, [w * f for f in [*ms, *cs]]).split(N_MASKS * D, -1)).unflatten(-1, (-1, D)).sum(-2)
    ),
    "one stack, halves": lambda x, w, ms, cs: activated(stacked(x, [w * f for f in [*ms, *cs]]).chunk(2)).sum(0),
    "ranges of one": lambda x, w, ms, cs: _sum_of_ranges(stacked(x, w * torch.stack([*ms, *cs]))),
    "terms of a stack, added one by one": lambda x, w, ms, cs: sum(
        activated(stacked(x, w * torch.stack([*ms, *cs])).chunk(2)).unbind(0)
    ),
    "stack, total - gates": lambda x, w, ms, cs: term_of_total(F.linear(x, w), stacked(x, [w * m for m in ms])).sum(0),
    "stack of tokens first, total - gates": lambda x, w, ms, cs: term_of_total(
        F.linear(x, w).unsqueeze(1), tokens_first(x, [w * m for m in ms])
    ).sum(1),
    "stack of masks": lambda x, w, ms, cs: activated(stacked(x, w * torch.stack(fs)) for fs in (ms, cs)).mean(0),
}


def _terms(gates: Any, values: Any) -> Tensor:
    return sum(F.silu(g) * v for g, v in zip(gates, values, strict=True))


def _in_halves(products: Any) -> Tensor:
    return _terms(products[:N_MASKS], products[N_MASKS:])


def _in_pairs(products: Any) -> Tensor:
    return _terms(products[::2], products[1::2])


def _sum_of_ranges(products: Tensor) -> Tensor:
    ranges = [products[i : i + 1] for i in range(2 * N_MASKS)]
    return sum(activated(pair).sum(0) for pair in zip(ranges[:N_MASKS], ranges[N_MASKS:], strict=True))


@pytest.mark.parametrize(("name", "kind", "mode"), family(JOINED, MAIN_KINDS, MODES, one_in=1))
def test_all_masks_in_one_product(name: str, kind: str, mode: str) -> None:
    def layer(x: Tensor, weight: Tensor, masks: Masks, more: More) -> Tensor:
        return JOINED[name](x, weight, masks, [KINDS[kind].complement(m) for m in masks])

    fuses_to_one(layer, KINDS[kind], mode)


# --- Parts that are not gates and values -----------------------------------------------------------------------------


def each(w: Tensor, f: Tensor) -> Tensor:
    """The weight, masked by each of some masks."""
    return torch.stack([w * one for one in f])


def eight(w: Tensor, f: Tensor, dim: int = 0) -> Tensor:
    """As many masked weights as there are features."""
    return torch.stack([w * f[i % 2] for i in range(8)], dim)


def both(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """Gate and value `[tokens, 2 * D]` of one mask."""
    return catted(x, [w * m, w * ~m])


def beside(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """A layer, beside which a program has something unusual."""
    return activated(both(x, w, m[0]).chunk(2, 1))


def _with_one_mask(joint: Callable[[Tensor, Tensor, Tensor], Any]) -> Callable[..., Tensor]:
    return lambda x, w, m, o: activated(joint(x, w * m[0], w * ~m[0]))


def square(x: Tensor) -> Tensor:
    """An input with as many tokens as features."""
    return torch.cat([x, x.flip(0) * 2])[:H]


# Programs `(x, weight, masks, other)` of joined products that are not MGLU, or that no rule knows.
NOT_JOINED: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    **{name: _with_one_mask(JOINTS[name]) for name in WRONG_JOINTS},
    # Parts of products
    "parts of gate and value": lambda x, w, m, o: term_of_products(
        both(x, w, m[0])[:, 4:8], both(x, w, m[0])[:, 12:16]
    ),
    "columns of gate and value": lambda x, w, m, o: activated(both(x, w, m[0]).unbind(-1)[:2]),
    "products unflattened to other sizes": lambda x, w, m, o: activated(
        both(x, w, m[0]).unflatten(-1, (4, 4)).unbind(1)[:2]
    ),
    "tokens of a stack": lambda x, w, m, o: activated(stacked(x, [w * m[0], w * ~m[0]]).unbind(1)[:2]),
    "ranges of tokens of a stack": lambda x, w, m, o: activated(stacked(x, [w * m[0], w * ~m[0]]).split(1, 1)[:2]).sum(
        0
    ),
    "a concatenation along the input features": lambda x, w, m, o: activated(
        (torch.cat([x, x], 1) @ torch.cat([w * m[0], w * ~m[0]])).chunk(2, 1)
    ),
    "a concatenation of other widths": lambda x, w, m, o: activated(catted(x, [w * m[0], (w * ~m[0])[:4]]).chunk(2, 1)),
    "a concatenation of unequal heights": lambda x, w, m, o: activated(
        catted(x, [w[:4] * m[0, :4], w * m[0], w * ~m[0]]).split(4, 1)[1:3]
    ),
    "masked weights of two dtypes": lambda x, w, m, o: activated(
        catted(x, [(w * m[0]).float(), w * ~m[0]]).chunk(2, 1)
    ),
    "glu of three products": lambda x, w, m, o: F.glu(catted(x, [w * m[0], w * ~m[0], *each(w, m)])),
    "glu of tokens": lambda x, w, m, o: F.glu(both(x[:4], w, m[0]), 0),
    # Stacks along other dimensions, and of other sizes
    "stacks along other dimensions": lambda x, w, m, o: term_of_products(
        stacked(square(x), eight(w, m)), tokens_first(square(x), eight(w, ~m))
    ).sum(0),
    "stacks along other dimensions, one of them transposed": lambda x, w, m, o: term_of_products(
        stacked(square(x), eight(w, m)), stacked(square(x), eight(w, ~m)).transpose(0, 1)
    ).sum(0),
    "a total for each token, of a stack whose masks are as many": lambda x, w, m, o: term_of_total(
        F.linear(square(x), w), tokens_first(square(x), eight(w, m))
    ).sum(1),
    "a stack of one token, and a stack of all": lambda x, w, m, o: term_of_products(
        stacked(x, each(w, m[:2])), torch.einsum("h,ndh->nd", x[0], eight(w, ~m)[:5])
    ).sum(0),
    "a stack along the rows": lambda x, w, m, o: activated(stacked(x, eight(w, f, 1)) for f in (m, ~m)).sum(0),
    "stacks that are concatenated along the rows": lambda x, w, m, o: activated(
        stacked(x, torch.cat([each(w, m[:2]), each(w, ~m[:2])], 1)).unbind(0)
    ),
    "a stack as one wide matrix": lambda x, w, m, o: activated(
        F.linear(torch.cat([x, x], 1), each(w, torch.stack([f, ~f])).reshape(D, 2 * H)).narrow(-1, 0, D)
        for f in (m[0], ~m[0])
    ),
    "rows of the masked weights": lambda x, w, m, o: activated(
        x.expand(8, -1, -1).contiguous() @ each(w, f).mT.unsqueeze(-1) for f in (m, ~m)
    ).sum(0),
    "masked weights, unflattened": lambda x, w, m, o: activated(
        x @ torch.cat([one.t() for one in eight(w, f)], 1).unflatten(1, (8, D)) for f in (m, ~m)
    ).sum(0),
    "the transpose of a stack in all dimensions": lambda x, w, m, o: activated(
        x @ eight(w, f).permute(2, 1, 0) for f in (m, ~m)
    ).sum(0),
    "a stack whose first dimensions are swapped": lambda x, w, m, o: activated(
        x @ eight(w, f).transpose(0, 1) for f in (m, ~m)
    ).sum(0),
    "a stack that is rounded": lambda x, w, m, o: activated(stacked(x, each(w, m[:2]).float().double())),
    "a stack with a mask in it": lambda x, w, m, o: activated(
        stacked(x, [w * m[0], m[1].to(w.dtype), w * ~m[0]]).unbind(0)[:2]
    ),
    "inner products with a stack": lambda x, w, m, o: activated(
        torch.inner(square(x), eight(w, f)) for f in (m, ~m)
    ).sum(0),
    # Stacks of masks
    "masks that the weight has not": lambda x, w, m, o: term_of_products(
        F.linear(x, ((w * m[0]) * torch.stack([m[1], m[0]]))[0]), F.linear(x, w * ~m[0])
    ),
    "stacked masks in another dtype": lambda x, w, m, o: activated(stacked(x, w * torch.stack([m[0], ~m[0]]).double())),
    "stacked masks, transposed": lambda x, w, m, o: activated(x @ (w.t() * torch.stack([m[0], ~m[0]]).mT)),
    "masks that are stacked along the rows": lambda x, w, m, o: activated(
        stacked(x, w * torch.stack([f[i % 2] for i in range(8)], 1)) for f in (m, ~m)
    ).sum(0),
    "stacks of masks that are joined along the rows": lambda x, w, m, o: activated(
        stacked(x, torch.cat([w, w]) * torch.cat([m[:2], ~m[:2]], 1)).unbind(0)
    ),
    "another tensor in a stack of masks": lambda x, w, m, o: activated(
        stacked(x, w * torch.stack([m[0].double(), o, 1 - m[0].double()])).unbind(0)[:2]
    ),
    "one masked weight, masked by a stack": lambda x, w, m, o: activated(
        stacked(x, each(w, f[:1]) * f) for f in (m, ~m)
    ).sum(0),
    # Repeated weights and inputs
    "a total of a repeated weight": lambda x, w, m, o: term_of_total(x @ w.expand(3, -1, -1).mT, F.linear(x, w * m[0])),
    "one masked weight and a repeated weight": lambda x, w, m, o: _less_repeated(x, w, each(w, m[:1])),
    "one weight for an x that is repeated": lambda x, w, m, o: activated(
        x.expand(3, -1, -1) @ each(w, f[:1]).mT for f in (m, ~m)
    ).sum(0),
    "a weight that is repeated along its rows": lambda x, w, m, o: activated(
        stacked(x, w[:, None] * torch.cat([f, f, f])[:8]) for f in (m, ~m)
    ).sum(0),
    "a repeated weight with one mask": lambda x, w, m, o: activated(
        x @ (w.expand(3, -1, -1) * f).mT for f in (m[0], ~m[0])
    ),
    "a repeated weight under vmap": lambda x, w, m, o: torch.vmap(
        lambda one: activated(x @ (w.expand(3, -1, -1) * f).mT for f in (one, ~one))
    )(m).sum(0),
    "one mask for a repeated weight": lambda x, w, m, o: activated(
        stacked(x, w.expand(3, -1, -1) * torch.stack([f])) for f in (m[0], ~m[0])
    ).sum(0),
    "a stack of one mask for a repeated weight": lambda x, w, m, o: activated(
        stacked(x, w.expand(3, -1, -1) * f[:1]) for f in (m, ~m)
    ).sum(0),
    "concatenated repeated weights": lambda x, w, m, o: activated(
        (torch.cat([x, x], 1) @ torch.cat([w.expand(3, -1, -1).mT * f.t(), w.expand(3, -1, -1).mT * ~f.t()], 1)).narrow(
            -1, 0, D
        )
        for f in (m[0], ~m[0])
    ),
    "another input for each mask": lambda x, w, m, o: activated(
        torch.stack([x, 2 * x]) @ each(w, f[:2]).mT for f in (m, ~m)
    ).sum(0),
    "three inputs for three masks": lambda x, w, m, o: activated(
        torch.stack([x, 2 * x, 3 * x]) @ each(w, f).mT.unsqueeze(0) for f in (m, ~m)
    ).sum(0),
    "each token with another mask": lambda x, w, m, o: activated(
        square(x).unsqueeze(1).expand(8, 8, H) @ eight(w, f).mT for f in (m, ~m)
    ).sum(1),
    "a repeated batch, each input with another mask": lambda x, w, m, o: activated(
        torch.stack([x, 2 * x, 3 * x]).expand(3, -1, -1, -1) @ each(w, f).mT for f in (m, ~m)
    ).sum(0),
    "one token, repeated": lambda x, w, m, o: activated(x[0].expand(3, -1) @ each(w, f).mT for f in (m, ~m)).sum(0),
    # Einsum
    "one column of x, which einsum repeats": lambda x, w, m, o: activated(
        torch.einsum("bh,dh->bd", x[:, :1], w * f) for f in (m[0], ~m[0])
    ),
    "one mask weight, which einsum repeats": lambda x, w, m, o: torch.einsum(
        "nbd,n->bd", activated(stacked(x, each(w, f)) for f in (m, ~m)), o[0, :1]
    ),
    "a weight and a mask in two layouts": lambda x, w, m, o: activated(
        torch.einsum("bh,hd,dh->bd", x, w, f.to(w.dtype)) for f in (m[0], ~m[0])
    ),
    "an einsum of three operands under vmap": lambda x, w, m, o: torch.vmap(
        lambda one: activated(torch.einsum("bh,dh,dh->bd", x, w, f.to(w.dtype)) for f in (one, ~one))
    )(m).sum(0),
    "an einsum that adds up the masks": lambda x, w, m, o: activated(
        torch.einsum("bh,ndh->bd", x, each(w, f)) for f in (m, ~m)
    ),
    "an einsum of stacks along other dimensions": lambda x, w, m, o: torch.einsum(
        "nbd,nbd->bd", F.silu(stacked(square(x), eight(w, m))), tokens_first(square(x), eight(w, ~m))
    ),
    "an einsum of masks and tokens": lambda x, w, m, o: torch.einsum(
        "nbd,bnd->bd", F.silu(stacked(square(x), eight(w, m))), stacked(square(x), eight(w, ~m))
    ),
    "an einsum with a transposed result": lambda x, w, m, o: activated(
        torch.einsum("bh,dh->db", square(x), w * f) for f in (m[0], ~m[0])
    ),
    "an einsum without an arrow, with a transposed result": lambda x, w, m, o: activated(
        torch.einsum("zh,ah", square(x), w * f) for f in (m[0], ~m[0])
    ),
    "an einsum with one transposed result": lambda x, w, m, o: term_of_products(
        torch.einsum("bh,dh->bd", square(x), w * m[0]), torch.einsum("bh,dh->db", square(x), w * ~m[0])
    ),
    "an einsum with a diagonal": lambda x, w, m, o: activated(
        torch.einsum("bd,dd->bd", x, w * f) for f in (m[0], ~m[0])
    ),
    "an einsum of the tokens": lambda x, w, m, o: activated(
        torch.einsum("hb,dh->bd", square(x), w * f) for f in (m[0], ~m[0])
    ),
    "an einsum that adds up features": lambda x, w, m, o: torch.einsum(
        "bd->b", activated(catted(x, each(w, f)) for f in (m, ~m))
    ),
    "an einsum that adds up tokens": lambda x, w, m, o: torch.einsum(
        "nbd->nd", activated(stacked(x, each(w, f)) for f in (m, ~m))
    ),
    "an einsum with weights of a batch": lambda x, w, m, o: torch.einsum(
        "nbtd,nb->btd", of_a_batch(x, w, m), o[:3, :2]
    ),
    "an einsum with weights of tokens but not of masks": lambda x, w, m, o: torch.einsum(
        "nbtd,bt->btd", of_a_batch(x, w, m), o[:2, :5]
    ),
    "weights of tokens that are as many as the masks": lambda x, w, m, o: (
        activated(stacked(x[:3], each(w, f)) for f in (m, ~m)) * o[:3, :1]
    ).sum(0),
}

# Programs with one layer, which does not depend on the part that is unusual.
STILL_JOINED: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "a total under vmap": lambda x, w, m, o: torch.vmap(
        lambda one: term_of_total(F.linear(x, w), F.linear(x, w * one))
    )(m).sum(0),
    "slices of masks along the rows": lambda x, w, m, o: activated(
        F.linear(x, w * f) for f in (torch.cat([m, ~m, m])[:8].select(1, 0), ~torch.cat([m, ~m, m])[:8].select(1, 0))
    ),
    "a stack that is masked twice": lambda x, w, m, o: activated(
        stacked(x, each(w, f[:2]) * f[:2]) for f in (m, ~m)
    ).sum(0),
    "one weight of a stack": lambda x, w, m, o: (activated(stacked(x, each(w, f)) for f in (m, ~m)) * o[0, 0]).sum(0),
    "weights of the tokens of a batch": lambda x, w, m, o: (
        activated(F.linear(torch.stack([x, 2 * x]), w * f) for f in (m[0], ~m[0])) * o.flatten()[:10].view(2, 5, 1)
    ),
    "x of three dimensions": lambda x, w, m, o: activated(
        torch.stack([x, 2 * x]) @ each(w, f).mT.unsqueeze(1) for f in (m, ~m)
    ).sum(0),
    "x of four dimensions": lambda x, w, m, o: activated(
        x[None, None] @ each(w, f).mT.unsqueeze(1).unsqueeze(2) for f in (m, ~m)
    ).sum(0),
    "glu of a stack": lambda x, w, m, o: F.glu(stacked(x, [*each(w, m), *each(w, ~m)]), 0).sum(0),
    "an einsum of an ellipsis without an arrow": lambda x, w, m, o: activated(
        torch.einsum("...h,dh", x, w * f) for f in (m[0], ~m[0])
    ),
    "an einsum with weights of the tokens of a batch": lambda x, w, m, o: torch.einsum(
        "nbtd,nbt->btd", of_a_batch(x, w, m), o.flatten()[:30].view(3, 2, 5)
    ),
    "an einsum of three operands with a transposed result": lambda x, w, m, o: (
        beside(x, w, m) + torch.einsum("bh,dh,dh->db", x, w, m[0].to(w.dtype)).sum()
    ),
    "an einsum of lists": lambda x, w, m, o: beside(x, w, m) + torch.einsum(x, [0, 1], w * m[0], [2, 1], [0, 2]),
    "a product with two masks at once": lambda x, w, m, o: (
        beside(x, w, m) + torch.einsum("bh,dh,dh,dh->bd", x, w, m[0].to(w.dtype), m[1].to(w.dtype))
    ),
    "the product with the masks": lambda x, w, m, o: beside(x, w, m) + (x.expand(2, -1, -1) @ m[:2].double()).sum(0),
    "complex numbers": lambda x, w, m, o: beside(x, w, m) + _of_complex_masks(m[0]),
    "a tensor less itself": lambda x, w, m, o: beside(x, w, m) + (o - o).sum(),
    "an empty part": lambda x, w, m, o: beside(x, w, m) + both(x, w, m[0]).narrow(1, 0, 0).sum(),
}


def of_a_batch(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """The terms `[n_masks, 2, 5, D]` of a batch of inputs."""
    return activated(torch.einsum("bth,ndh->nbtd", torch.stack([x, 2 * x]), w * f) for f in (m, ~m))


def _of_complex_masks(m: Tensor) -> Tensor:
    zeros = torch.zeros_like(m, dtype=torch.complex64)
    y = (m.to(torch.complex64) + zeros) * torch.full_like(zeros, 2)
    return (torch.sgn(y) + y).real.sum()


def _less_repeated(x: Tensor, w: Tensor, gates: Tensor) -> Tensor:
    return activated(stacked(x, one) for one in (gates, w.expand(4, -1, -1) - gates)).sum(0)


@pytest.mark.parametrize("name", [*NOT_JOINED, *STILL_JOINED])
def test_parts_of_joined_products(name: str) -> None:
    program = (NOT_JOINED | STILL_JOINED)[name]
    layer = lookalikes.by_name(lambda x, w, logits, bits, other: program(x, w, bits, other))
    capture = compare(layer, lambda: lookalikes.tensors(("x", "weight")), SAME)
    assert len(capture.report.fused) == (name in STILL_JOINED)
