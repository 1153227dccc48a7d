"""Programs whose meaning depends on one argument of one call have eager's results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.families import sample
from tests.support.programs.graphs import assert_says_why, compare
from tests.support.programs.lookalikes import ALL, SAME, H, layer_of, tensors
from tests.support.programs.spellings import gated


def cube(logits: Tensor) -> Tensor:
    """Bool masks `[8, 8, 8]`, so that the shape does not tell the dimensions apart."""
    return torch.cat([logits, -logits.mT, logits.flip(1)])[:8] > 0


def square(x: Tensor) -> Tensor:
    """An input with as many tokens as features."""
    return torch.cat([x, x.flip(0) * 2])[:H]


# Transposes of the masked weights `[8, 8]`: g of the gate, and v of the value.
TRANSPOSES = (
    "g.transpose(dim0=0, dim1=0), v.transpose(dim0=0, dim1=1)",
    "g.transpose(dim0=0, dim1=0), v.transpose(dim0=0, dim1=0)",
    "torch.transpose(g, 0, 0), torch.transpose(v, -1, 1)",
    "g.swapaxes(axis0=-1, axis1=1), v.swapaxes(axis0=-1, axis1=0)",
    "g.swapdims(dim0=1, dim1=1), v.swapdims(dim0=1, dim1=0)",
    "g.permute(dims=(0, 1)), v.permute(dims=(1, 0))",
    "g.permute(dims=(0, 1)), v.permute(dims=(0, 1))",
    "g.permute(-1, -2), v.permute([-2, -1])",
    "g.movedim(source=0, destination=0), v.movedim(source=0, destination=1)",
)

# The mask factors of gate and value, from masks m `[8, 8, 8]`, logits l `[3, 8, 8]` and another matrix o.
FACTORS = (
    "m[0], ~m.select(dim=1, index=0)",
    "m[0], ~m.select(index=0, dim=0)",
    "m[0], ~torch.select(m, -1, 0)",
    "m[0], ~m[:, 0]",
    "m[0], ~m.unbind(dim=1)[0]",
    "m[0], ~torch.unbind(m, dim=-1)[0]",
    "m.chunk(8, 0)[0].squeeze(0), ~m.chunk(8, dim=1)[0].squeeze(1)",
    "m[0], ~m.movedim(1, 0)[0]",
    "m[[0, 1]][1], ~m[0]",
    "m[torch.tensor(1)], ~m[0]",
    "m[::2][1], ~m[1]",
    "m[1:][0], ~m[0]",
    "stack([m[0], m[1]], 1)[:, 0], ~m[1]",
    "m[0][:, :1].expand(H, H), ~m[0][:1].expand(H, H)",
    "torch.gt(l[0], other=0.5), torch.le(l[0], other=0)",
    "l[0] > 0.5, l[0] < 0.5",
    "l[0] > 0.0, l[0] <= 1e-9",
    "l[0] > o, o > l[0]",
    "l[0] >= -1, l[0] <= -1",  # both comparisons hold in row 0, where the logits are -1
    "l[0] > -1, ~(l[0] >= -1)",
    "l[0] > o[:1], l[0] <= o[:, :1]",
    "l[0] > 0, l[0].int() <= 0",
    "l[0] > 0.3, l[0].half() <= 0.3",
    "~(l[0] / l[0].relu()).isnan(), l[0] <= 0",
)

# Layers computed from the masked weights g of the gate and v of the value.
ON_MASKED_WEIGHTS = (
    "torch.div(linear(x, g), 1 + torch.exp(-linear(x, g)), rounding_mode='floor') * linear(x, v)",
    "linear(x, g).detach() // (1 + torch.exp(-linear(x, g).detach())) * linear(x, v)",
    "torch.div(of_weights(x, g, v), 3, rounding_mode='floor')",
    # Einsum
    "term(einsum('bh,hd->bd', x, g), einsum('bh,dh->bd', x, v))",
    "term(einsum('Bh,Hh->BH', x, g), einsum(' B h , H h -> B H ', x, v))",
    # Products with a bias or a factor
    "term(torch.addmm(o[0], x, g.t(), beta=0, alpha=2), torch.addmm(o[0], x, v.t(), beta=0))",
    "term(torch.addmm(input=o[0], mat1=x, mat2=g.t(), beta=0), torch.addmm(mat2=v.t(), mat1=x, input=o[0] * 0))",
    "term(torch.addmm(torch.zeros(H, dtype=x.dtype), x, g.t(), alpha=0.5), linear(x, v))",
    # Activations and dropout
    "F.gelu(linear(x, g), approximate='tanh') * linear(x, v) + F.gelu(linear(x, v), approximate='none') * linear(x, g)",
    "silu(dropout(linear(x, g), 1.0)) * linear(x, v)",
    "silu(torch.dropout(linear(x, g), 1.0, train=True)) * linear(x, v)",
    "silu(F.alpha_dropout(linear(x, g), 0.5, False)) * linear(x, v)",
    # Shapes
    "term(*linear(x, cat([g, v])).view(2, 5, H).unbind(0))",
)

OTHER_LAYERS = (
    # Transposes of a stack
    "term(x @ (w * b).mT, x @ (w * ~b).transpose(-2, 1)).sum(0)",
    "term(x @ (w * cube(l)).mT, x @ (w * ~cube(l)).transpose(dim0=0, dim1=1).mT).sum(0)",
    # Sums
    "torch.add(*terms(x, w, b[:2]), alpha=2)",
    "y, z = terms(x, w, b[:2]); y.add(z, alpha=-1)",
    "y, z = terms(x, w, b[:2]); y.add_(z, alpha=0.5)",
    "torch.sub(*terms(x, w, b[:2]), alpha=-1)",
    "torch.rsub(*terms(x, w, b[:2]), alpha=2)",
    "term(linear(x, w * b[0]), torch.sub(linear(x, w), linear(x, w * b[0]), alpha=2))",
    "term(linear(x, w * b[0]), torch.rsub(linear(x, w * b[0]), linear(x, w), alpha=0.5))",
    "of_weights(x, w * b[0], w.sub(w * b[0], alpha=2))",
    "of_weights(x, w * b[0], torch.add(w, w * b[0], alpha=-1))",
    "stack(terms(x, w, b)).sum()",
    "stack(terms(x, w, b)).sum(dim=(0, 1))",
    "stack(terms(x, w, b), 1).sum(dim=0)",
    "stack(terms(x, w, b)).sum(dim=None)",
    "stack(terms(x, w, b), -1).sum(axis=-1)",
    "stack(terms(x, w, b)).mean(dim=1)",
    # Products
    "term(einsum('bh,ndh->nbd', x, w * cube(l)), einsum('bh,ndh->dbn', x, w * ~cube(l))).sum(0)",
    "s, m = x.expand(3, -1, -1), w * b; term(torch.baddbmm(o[:1], s, m.mT, beta=0.5), s @ (w * ~b).mT).sum(0)",
    "s = square(x); g = einsum('bh,ndh->nbd', s, w * cube(l)); term(g, linear(s, w).unsqueeze(dim=1) - g).sum(0)",
    # Weights
    "of_weights(x, where(condition=b[0], input=w, other=0), where(other=w, input=torch.zeros_like(w), condition=b[0]))",
    "of_weights(x, w.where(b[0], 0.0), w.where(condition=~b[0], other=torch.zeros_like(w)))",
    "of_weights(x, w.to(dtype=torch.float16).to(w.dtype) * b[0], w * ~b[0])",
    "of_weights(x, w.type(torch.int8).type_as(w) * b[0], w.type(dtype=torch.int8).double() * ~b[0])",
    "of_weights(x, F.normalize(w + 1) * b[0], F.normalize(w + 1, dim=0) * ~b[0])",
)

# Programs that do not multiply one x by two masked forms of one weight, so that the report need not mention them.
MAY_BE_SILENT = (
    "term(linear(square(x).transpose(dim0=1, dim1=1), w * b[0]), linear(square(x).t(), w * ~b[0]))",
    "term(linear(x.repeat(2, 1), w * b[0]), linear(x, w * ~b[0]).repeat(2, 1))",
    "term(x.repeat(3, 1, 1) @ (w * b).mT, x.repeat(3, 1).view(3, 5, H).flip(1) @ (w * ~b).mT).sum(0)",
    "term(linear(x.narrow(0, 0, 4), w * b[0]), linear(x.narrow(0, start=1, length=4), w * ~b[0]))",
    "term(*(torch.addbmm(o[:5], x.expand(3, -1, -1), (w * m).mT, beta=0) for m in (b, ~b)))",
    "of_weights(x, where(b[0], w, 1.0), where(b[0], 0.0, w))",
    "of_weights(x, w.masked_fill(mask=~b[0], value=1.0), w.masked_fill(b[0], value=0.0))",
    "of_weights(x, w.masked_fill(~b[0], o[0, 0].detach()), w.masked_fill(b[0], torch.tensor(0.0)))",
    "z = torch.tensor(0.0).double(); m = w.clone().index_put_((~b[0],), z, accumulate=True); "
    "of_weights(x, m, w.clone().index_put_((b[0],), z))",
    "of_weights(x, torch.mul(input=w, other=b[0]), torch.mul(other=o, input=~b[0]))",
    "term(*(einsum('bh,dh->bdh', x, w * m).sum(-1) for m in (b[0], ~b[0])))",
    "term(*(einsum('bh,dh->d', x, w * m) for m in (b[0], ~b[0])))",
    "term(*(einsum('nh,ndh->nd', square(x), w * m) for m in (cube(l), ~cube(l))))",
)


def terms(x: Tensor, w: Tensor, masks: Tensor) -> list[Tensor]:
    return [gated(x, w, m, ~m) for m in masks]


PROGRAMS = (
    *(f"g, v = w * b[0], w * ~b[0]; g, v = {transposes}; term(x @ g, x @ v)" for transposes in TRANSPOSES),
    *(f"m = cube(l); gated(x, w, {factors})" for factors in FACTORS),
    *(f"g, v = w * b[0], w * ~b[0]; {layer}" for layer in ON_MASKED_WEIGHTS),
    *OTHER_LAYERS,
    *MAY_BE_SILENT,
)


@pytest.mark.parametrize("trained", [ALL, ()], ids=["training", "inference"])
@pytest.mark.parametrize("source", sample(PROGRAMS, every=10))
def test_arguments_of_a_call(source: str, trained: tuple[str, ...]) -> None:
    capture = compare(layer_of(source, globals()), lambda: tensors(trained), SAME)
    if source not in MAY_BE_SILENT:
        assert_says_why(capture)
