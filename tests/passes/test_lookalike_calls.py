"""Layers whose meaning depends on one argument of one call give what eager gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from families import quick_only_for
from graphs import assert_says_why, compare
from lookalikes import ALL, SAME, D, H, Layer, by_name, tensors
from spellings import gated, term_of_products, term_of_weights
from torch import Tensor


def _cube(logits: Tensor) -> Tensor:
    """Bool masks `[8, 8, 8]`, so that no shape tells one dimension from another."""
    return torch.cat([logits, -logits.mT, logits.flip(1)])[:8] > 0


def _term(x: Tensor, weight: Tensor, m: Tensor) -> Tensor:
    return gated(x, weight, m, ~m)


def _terms(x: Tensor, weight: Tensor, masks: Tensor, dim: int = 0) -> Tensor:
    return torch.stack([_term(x, weight, m) for m in masks], dim)


def _square(x: Tensor) -> Tensor:
    """An input with as many tokens as features."""
    return torch.cat([x, x.flip(0) * 2])[:H]


# Transposes of the masked weights `[8, 8]` of gate and value.
TRANSPOSES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "transpose(dim0=0, dim1=0)": (lambda w: w.transpose(dim0=0, dim1=0), lambda w: w.transpose(dim0=0, dim1=1)),
    "both transpose(dim0=0, dim1=0)": (lambda w: w.transpose(dim0=0, dim1=0), lambda w: w.transpose(dim0=0, dim1=0)),
    "transpose(0, 0)": (lambda w: torch.transpose(w, 0, 0), lambda w: torch.transpose(w, -1, 1)),
    "swapaxes(axis0=-1, axis1=1)": (lambda w: w.swapaxes(axis0=-1, axis1=1), lambda w: w.swapaxes(axis0=-1, axis1=0)),
    "swapdims(dim0=1, dim1=1)": (lambda w: w.swapdims(dim0=1, dim1=1), lambda w: w.swapdims(dim0=1, dim1=0)),
    "permute(dims=(0, 1))": (lambda w: w.permute(dims=(0, 1)), lambda w: w.permute(dims=(1, 0))),
    "both permute(dims=(0, 1))": (lambda w: w.permute(dims=(0, 1)), lambda w: w.permute(dims=(0, 1))),
    "permute(-1, -2) and permute(-2, -1)": (lambda w: w.permute(-1, -2), lambda w: w.permute([-2, -1])),
    "movedim": (lambda w: w.movedim(source=0, destination=0), lambda w: w.movedim(source=0, destination=1)),
}

# The factors of gate and value from masks `[8, 8, 8]`, logits `[3, 8, 8]` and another matrix.
FACTORS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "select(dim=1)": lambda m, l, o: (m[0], ~m.select(dim=1, index=0)),
    "select(index=0, dim=0)": lambda m, l, o: (m[0], ~m.select(index=0, dim=0)),
    "select of the last dimension": lambda m, l, o: (m[0], ~torch.select(m, -1, 0)),
    "index of the second dimension": lambda m, l, o: (m[0], ~m[:, 0]),
    "unbind(dim=1)": lambda m, l, o: (m[0], ~m.unbind(dim=1)[0]),
    "torch.unbind of the last": lambda m, l, o: (m[0], ~torch.unbind(m, dim=-1)[0]),
    "chunk of another dimension": lambda m, l, o: (m.chunk(8, 0)[0].squeeze(0), ~m.chunk(8, dim=1)[0].squeeze(1)),
    "movedim of masks": lambda m, l, o: (m[0], ~m.movedim(1, 0)[0]),
    "index of a list": lambda m, l, o: (m[[0, 1]][1], ~m[0]),
    "index of a tensor": lambda m, l, o: (m[torch.tensor(1)], ~m[0]),
    "slice with a step": lambda m, l, o: (m[::2][1], ~m[1]),
    "slice with an end": lambda m, l, o: (m[1:][0], ~m[0]),
    "stack of masks along 1": lambda m, l, o: (torch.stack([m[0], m[1]], 1)[:, 0], ~m[1]),
    "expand of a column": lambda m, l, o: (m[0][:, :1].expand(D, H), ~m[0][:1].expand(D, H)),
    "gt of a keyword": lambda m, l, o: (torch.gt(l[0], other=0.5), torch.le(l[0], other=0)),
    "gt and lt": lambda m, l, o: (l[0] > 0.5, l[0] < 0.5),
    "gt and le of another bound": lambda m, l, o: (l[0] > 0.0, l[0] <= 1e-9),
    "gt of swapped operands": lambda m, l, o: (l[0] > o, o > l[0]),
    "ge and le": lambda m, l, o: (l[0] >= -1, l[0] <= -1),  # row 0 is both
    "gt and ge": lambda m, l, o: (l[0] > -1, ~(l[0] >= -1)),
    "gt of a bound a row": lambda m, l, o: (l[0] > o[:1], l[0] <= o[:, :1]),
    "gt of a number and a cast": lambda m, l, o: (l[0] > 0, l[0].int() <= 0),
    "gt of a rounded tensor": lambda m, l, o: (l[0] > 0.3, l[0].half() <= 0.3),
    "isnan": lambda m, l, o: (~(l[0] / l[0].relu()).isnan(), l[0] <= 0),
}

# Layers `(x, weight, logits, bits, other)`, each of which depends on one argument of one call.
CALLS: dict[str, Layer] = {
    # Quotients
    "div floor of the activation": lambda x, w, l, b, o: (
        torch.div(F.linear(x, w * b[0]), 1 + torch.exp(-F.linear(x, w * b[0])), rounding_mode="floor")
        * F.linear(x, w * ~b[0])
    ),
    "floor_divide of the activation": lambda x, w, l, b, o: (
        F.linear(x, w * b[0]).detach() // (1 + torch.exp(-F.linear(x, w * b[0]).detach())) * F.linear(x, w * ~b[0])
    ),
    "div floor of the result": lambda x, w, l, b, o: torch.div(_term(x, w, b[0]), 3, rounding_mode="floor"),
    # Transposes of a stack, and of x
    "mT of a stack": lambda x, w, l, b, o: term_of_products(x @ (w * b).mT, x @ (w * ~b).transpose(-2, 1)).sum(0),
    "transpose of the masks of a stack": lambda x, w, l, b, o: term_of_products(
        x @ (w * _cube(l)).mT, x @ (w * ~_cube(l)).transpose(dim0=0, dim1=1).mT
    ).sum(0),
    "transposed x": lambda x, w, l, b, o: term_of_products(
        F.linear(_square(x).transpose(dim0=1, dim1=1), w * b[0]), F.linear(_square(x).t(), w * ~b[0])
    ),
    # Sums
    "add of alpha": lambda x, w, l, b, o: torch.add(_term(x, w, b[0]), _term(x, w, b[1]), alpha=2),
    "method add of alpha": lambda x, w, l, b, o: _term(x, w, b[0]).add(_term(x, w, b[1]), alpha=-1),
    "add_ of alpha": lambda x, w, l, b, o: _term(x, w, b[0]).add_(_term(x, w, b[1]), alpha=0.5),
    "sub of terms": lambda x, w, l, b, o: torch.sub(_term(x, w, b[0]), _term(x, w, b[1]), alpha=-1),
    "rsub of terms": lambda x, w, l, b, o: torch.rsub(_term(x, w, b[0]), _term(x, w, b[1]), alpha=2),
    "total less alpha gates": lambda x, w, l, b, o: term_of_products(
        F.linear(x, w * b[0]), torch.sub(F.linear(x, w), F.linear(x, w * b[0]), alpha=2)
    ),
    "gate from the total": lambda x, w, l, b, o: term_of_products(
        F.linear(x, w * b[0]), torch.rsub(F.linear(x, w * b[0]), F.linear(x, w), alpha=0.5)
    ),
    "weight less alpha masked": lambda x, w, l, b, o: term_of_weights(x, w * b[0], w.sub(w * b[0], alpha=2)),
    "weight plus -1 masked": lambda x, w, l, b, o: term_of_weights(x, w * b[0], torch.add(w, w * b[0], alpha=-1)),
    "sum of everything": lambda x, w, l, b, o: _terms(x, w, b).sum(),
    "sum of two dimensions": lambda x, w, l, b, o: _terms(x, w, b).sum(dim=(0, 1)),
    "sum of the other dimension": lambda x, w, l, b, o: _terms(x, w, b, 1).sum(dim=0),
    "sum of no dimension": lambda x, w, l, b, o: _terms(x, w, b).sum(dim=None),
    "sum(axis=)": lambda x, w, l, b, o: _terms(x, w, b, -1).sum(axis=-1),
    "mean(dim=1)": lambda x, w, l, b, o: _terms(x, w, b).mean(dim=1),
    # Einsum
    "einsum of hd": lambda x, w, l, b, o: term_of_products(
        torch.einsum("bh,hd->bd", x, w * b[0]), torch.einsum("bh,dh->bd", x, w * ~b[0])
    ),
    "einsum without sum": lambda x, w, l, b, o: term_of_products(
        *(torch.einsum("bh,dh->bdh", x, w * m).sum(-1) for m in (b[0], ~b[0]))
    ),
    "einsum that sums the tokens": lambda x, w, l, b, o: term_of_products(
        *(torch.einsum("bh,dh->d", x, w * m) for m in (b[0], ~b[0]))
    ),
    "einsum of capitals": lambda x, w, l, b, o: term_of_products(
        torch.einsum("Bh,Hh->BH", x, w * b[0]), torch.einsum(" B h , H h -> B H ", x, w * ~b[0])
    ),
    "einsum of a stack by tokens": lambda x, w, l, b, o: term_of_products(
        *(torch.einsum("nh,ndh->nd", _square(x), w * m) for m in (_cube(l), ~_cube(l)))
    ),
    "einsum of exchanged masks": lambda x, w, l, b, o: term_of_products(
        torch.einsum("bh,ndh->nbd", x, w * _cube(l)), torch.einsum("bh,ndh->dbn", x, w * ~_cube(l))
    ).sum(0),
    # Products with a bias or a factor
    "addmm(alpha=2)": lambda x, w, l, b, o: term_of_products(
        torch.addmm(o[0], x, (w * b[0]).t(), beta=0, alpha=2), torch.addmm(o[0], x, (w * ~b[0]).t(), beta=0)
    ),
    "addmm by keywords": lambda x, w, l, b, o: term_of_products(
        torch.addmm(input=o[0], mat1=x, mat2=(w * b[0]).t(), beta=0, alpha=1),
        torch.addmm(mat2=(w * ~b[0]).t(), mat1=x, input=o[0] * 0),
    ),
    "addmm of zeros and alpha": lambda x, w, l, b, o: term_of_products(
        torch.addmm(torch.zeros(D, dtype=x.dtype), x, (w * b[0]).t(), alpha=0.5), F.linear(x, w * ~b[0])
    ),
    "baddbmm": lambda x, w, l, b, o: term_of_products(
        torch.baddbmm(o[:1], x.expand(3, -1, -1), (w * b).mT, beta=0.5),
        torch.baddbmm(o[:1], x.expand(3, -1, -1), (w * ~b).mT, beta=0),
    ).sum(0),
    "addbmm": lambda x, w, l, b, o: term_of_products(
        *(torch.addbmm(o[:5], x.expand(3, -1, -1), (w * m).mT, beta=0) for m in (b, ~b))
    ),
    # Activations and dropout
    "gelu(approximate=)": lambda x, w, l, b, o: (
        F.gelu(F.linear(x, w * b[0]), approximate="tanh") * F.linear(x, w * ~b[0])
        + F.gelu(F.linear(x, w * b[1]), approximate="none") * F.linear(x, w * ~b[1])
    ),
    "dropout of all by default": lambda x, w, l, b, o: (
        F.silu(F.dropout(F.linear(x, w * b[0]), 1.0)) * F.linear(x, w * ~b[0])
    ),
    "torch.dropout(train=True)": lambda x, w, l, b, o: (
        F.silu(torch.dropout(F.linear(x, w * b[0]), 1.0, train=True)) * F.linear(x, w * ~b[0])
    ),
    "alpha_dropout": lambda x, w, l, b, o: (
        F.silu(F.alpha_dropout(F.linear(x, w * b[0]), 0.5, False)) * F.linear(x, w * ~b[0])
    ),
    # Choices
    "where by keywords": lambda x, w, l, b, o: term_of_weights(
        x,
        torch.where(condition=b[0], input=w, other=0),
        torch.where(other=w, input=torch.zeros_like(w), condition=b[0]),
    ),
    "method where": lambda x, w, l, b, o: term_of_weights(
        x, w.where(b[0], 0.0), w.where(condition=~b[0], other=torch.zeros_like(w))
    ),
    "where of another number": lambda x, w, l, b, o: term_of_weights(
        x, torch.where(b[0], w, 1.0), torch.where(b[0], 0.0, w)
    ),
    "masked_fill(value=1)": lambda x, w, l, b, o: term_of_weights(
        x, w.masked_fill(mask=~b[0], value=1.0), w.masked_fill(b[0], value=0.0)
    ),
    "masked_fill of a tensor": lambda x, w, l, b, o: term_of_weights(
        x, w.masked_fill(~b[0], o[0, 0].detach()), w.masked_fill(b[0], torch.tensor(0.0))
    ),
    "index_put(accumulate=True)": lambda x, w, l, b, o: term_of_weights(
        x,
        w.clone().index_put_((~b[0],), torch.tensor(0.0).double(), accumulate=True),
        w.clone().index_put_((b[0],), torch.tensor(0.0).double()),
    ),
    # Numbers and shapes
    "multiply by keywords": lambda x, w, l, b, o: term_of_weights(
        x, torch.mul(input=w, other=b[0]), torch.mul(other=o, input=~b[0])
    ),
    "repeat of x": lambda x, w, l, b, o: term_of_products(
        F.linear(x.repeat(2, 1), w * b[0]), F.linear(x, w * ~b[0]).repeat(2, 1)
    ),
    "repeat along the masks": lambda x, w, l, b, o: term_of_products(
        x.repeat(3, 1, 1) @ (w * b).mT, x.repeat(3, 1).view(3, 5, H).flip(1) @ (w * ~b).mT
    ).sum(0),
    "unsqueeze(dim=1)": lambda x, w, l, b, o: term_of_products(
        torch.einsum("bh,ndh->nbd", _square(x), w * _cube(l)),
        F.linear(_square(x), w).unsqueeze(dim=1) - torch.einsum("bh,ndh->nbd", _square(x), w * _cube(l)),
    ).sum(0),
    "to(dtype=) of a weight": lambda x, w, l, b, o: term_of_weights(
        x, w.to(dtype=torch.float16).to(w.dtype) * b[0], w * ~b[0]
    ),
    "type of a weight": lambda x, w, l, b, o: term_of_weights(
        x, w.type(torch.int8).type_as(w) * b[0], w.type(dtype=torch.int8).double() * ~b[0]
    ),
    "normalize of another dim": lambda x, w, l, b, o: term_of_weights(
        x, F.normalize(w + 1) * b[0], F.normalize(w + 1, dim=0) * ~b[0]
    ),
    "narrow of x": lambda x, w, l, b, o: term_of_products(
        F.linear(x.narrow(0, 0, 4), w * b[0]), F.linear(x.narrow(0, start=1, length=4), w * ~b[0])
    ),
    "view of another order": lambda x, w, l, b, o: term_of_products(
        *F.linear(x, torch.cat([w * b[0], w * ~b[0]])).view(2, 5, D).unbind(0)
    ),
}


def _of_transposes(gate: Callable[[Tensor], Tensor], value: Callable[[Tensor], Tensor]) -> Layer:
    return lambda x, w, l, b, o: term_of_products(x @ gate(w * b[0]), x @ value(w * ~b[0]))


def _of_factors(factors: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Layer:
    return lambda x, w, l, b, o: gated(x, w, *factors(_cube(l), l, o))


PROGRAMS: dict[str, Layer] = {
    **{name: _of_transposes(*transposes) for name, transposes in TRANSPOSES.items()},
    **{name: _of_factors(factors) for name, factors in FACTORS.items()},
    **CALLS,
}

# Programs that do not multiply one x by two masked forms of one weight, so the report need not mention them.
MAY_BE_SILENT = {
    *("transposed x", "repeat of x", "repeat along the masks", "narrow of x", "addbmm"),
    *("where of another number", "masked_fill(value=1)", "masked_fill of a tensor", "index_put(accumulate=True)"),
    *("multiply by keywords", "einsum without sum", "einsum that sums the tokens", "einsum of a stack by tokens"),
}


# A program of each kind, for the quick tests.
TYPICAL = (
    *("transpose(0, 0)", "select(dim=1)", "gt and ge", "transpose of the masks of a stack", "add of alpha"),
    *("einsum of exchanged masks", "addmm(alpha=2)", "where of another number"),
)


@pytest.mark.parametrize("trained", [ALL, ()], ids=["training", "inference"])
@pytest.mark.parametrize("name", quick_only_for(TYPICAL, PROGRAMS))
def test_arguments_of_a_call(name: str, trained: tuple[str, ...]) -> None:
    capture = compare(by_name(PROGRAMS[name]), lambda: tensors(trained), SAME)
    if name not in MAY_BE_SILENT:
        assert_says_why(capture)
