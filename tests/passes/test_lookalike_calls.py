"""Layers whose meaning depends on one argument of one call give what eager gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import sample
from graphs import assert_says_why, compare
from lookalikes import ALL, SAME, D, H, Layer, tensors
from spellings import gated
from torch import Tensor


def _cube(logits: Tensor) -> Tensor:
    """Bool masks `[8, 8, 8]`, so that no shape tells one dimension from another."""
    return torch.cat([logits, -logits.mT, logits.flip(1)])[:8] > 0


def _term(x: Tensor, weight: Tensor, m: Tensor) -> Tensor:
    return gated(x, weight, m, ~m)


def _pair(x: Tensor, weight: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, weight * m), F.linear(x, weight * ~m)


def _activated(g: Tensor, v: Tensor) -> Tensor:
    return F.silu(g) * v


def _square(x: Tensor) -> Tensor:
    """An input with as many tokens as features."""
    return torch.cat([x, x.flip(0) * 2])[:H]


# Layers `(x, weight, logits, bits, other)`, each of which depends on one argument of one call.
CALLS: dict[str, Layer] = {
    # Quotients
    "div floor of the activation": lambda x, w, l, b, o: (
        torch.div(F.linear(x, w * b[0]), 1 + torch.exp(-F.linear(x, w * b[0])), rounding_mode="floor")
        * F.linear(x, w * ~b[0])
    ),
    "div trunc of the activation": lambda x, w, l, b, o: (
        F.linear(x, w * b[0]).div(1 + torch.exp(-F.linear(x, w * b[0])), rounding_mode="trunc") * F.linear(x, w * ~b[0])
    ),
    "floor_divide of the activation": lambda x, w, l, b, o: (
        F.linear(x, w * b[0]).detach() // (1 + torch.exp(-F.linear(x, w * b[0]).detach())) * F.linear(x, w * ~b[0])
    ),
    "div floor of the result": lambda x, w, l, b, o: torch.div(_term(x, w, b[0]), 3, rounding_mode="floor"),
    # Transposes: 8 x 8 everywhere
    "transpose(dim0=0, dim1=0)": lambda x, w, l, b, o: _activated(
        x @ (w * b[0]).transpose(dim0=0, dim1=0), x @ (w * ~b[0]).transpose(dim0=0, dim1=1)
    ),
    "both transpose(dim0=0, dim1=0)": lambda x, w, l, b, o: _activated(
        x @ (w * b[0]).transpose(dim0=0, dim1=0), x @ (w * ~b[0]).transpose(dim0=0, dim1=0)
    ),
    "transpose(0, 0)": lambda x, w, l, b, o: _activated(
        x @ torch.transpose(w * b[0], 0, 0), x @ torch.transpose(w * ~b[0], -1, 1)
    ),
    "swapaxes(axis0=-1, axis1=1)": lambda x, w, l, b, o: _activated(
        x @ (w * b[0]).swapaxes(axis0=-1, axis1=1), x @ (w * ~b[0]).swapaxes(axis0=-1, axis1=0)
    ),
    "both swapaxes(axis0=-1, axis1=1)": lambda x, w, l, b, o: _activated(
        x @ (w * b[0]).swapaxes(axis0=-1, axis1=1), x @ torch.swapaxes(w * ~b[0], axis0=-1, axis1=1)
    ),
    "swapdims(dim0=1, dim1=1)": lambda x, w, l, b, o: _activated(
        x @ (w * b[0]).swapdims(dim0=1, dim1=1), x @ (w * ~b[0]).swapdims(dim0=1, dim1=0)
    ),
    "permute(dims=(0, 1))": lambda x, w, l, b, o: _activated(
        x @ (w * b[0]).permute(dims=(0, 1)), x @ (w * ~b[0]).permute(dims=(1, 0))
    ),
    "both permute(dims=(0, 1))": lambda x, w, l, b, o: _activated(
        x @ (w * b[0]).permute(dims=(0, 1)), x @ (w * ~b[0]).permute(dims=(0, 1))
    ),
    "permute(-1, -2) and permute(-2, -1)": lambda x, w, l, b, o: _activated(
        x @ (w * b[0]).permute(-1, -2), x @ (w * ~b[0]).permute([-2, -1])
    ),
    "movedim(source=0, destination=0)": lambda x, w, l, b, o: _activated(
        x @ (w * b[0]).movedim(source=0, destination=0), x @ (w * ~b[0]).movedim(source=0, destination=1)
    ),
    "mT of a stack": lambda x, w, l, b, o: (F.silu(x @ (w * b).mT) * (x @ (w * ~b).transpose(-2, 1))).sum(0),
    "transpose of the masks of a stack": lambda x, w, l, b, o: (
        F.silu(x @ (w * _cube(l)).mT) * (x @ (w * ~_cube(l)).transpose(dim0=0, dim1=1).mT)
    ).sum(0),
    "transposed x": lambda x, w, l, b, o: _activated(
        F.linear(_square(x).transpose(dim0=1, dim1=1), w * b[0]), F.linear(_square(x).t(), w * ~b[0])
    ),
    # Sums
    "add of alpha": lambda x, w, l, b, o: torch.add(_term(x, w, b[0]), _term(x, w, b[1]), alpha=2),
    "method add of alpha": lambda x, w, l, b, o: _term(x, w, b[0]).add(_term(x, w, b[1]), alpha=-1),
    "add_ of alpha": lambda x, w, l, b, o: _term(x, w, b[0]).add_(_term(x, w, b[1]), alpha=0.5),
    "sub of terms": lambda x, w, l, b, o: torch.sub(_term(x, w, b[0]), _term(x, w, b[1]), alpha=-1),
    "rsub of terms": lambda x, w, l, b, o: torch.rsub(_term(x, w, b[0]), _term(x, w, b[1]), alpha=2),
    "total less alpha gates": lambda x, w, l, b, o: _activated(
        F.linear(x, w * b[0]), torch.sub(F.linear(x, w), F.linear(x, w * b[0]), alpha=2)
    ),
    "gate from the total": lambda x, w, l, b, o: _activated(
        F.linear(x, w * b[0]), torch.rsub(F.linear(x, w * b[0]), F.linear(x, w), alpha=0.5)
    ),
    "weight less alpha masked": lambda x, w, l, b, o: _activated(
        F.linear(x, w * b[0]), F.linear(x, w.sub(w * b[0], alpha=2))
    ),
    "weight plus -1 masked": lambda x, w, l, b, o: _activated(
        F.linear(x, w * b[0]), F.linear(x, torch.add(w, w * b[0], alpha=-1))
    ),
    "addcmul of value": lambda x, w, l, b, o: _activated(
        F.linear(x, w * b[0]), F.linear(x, torch.addcmul(w, w, b[0].double(), value=-0.5))
    ),
    "lerp": lambda x, w, l, b, o: _activated(
        F.linear(x, w * b[0]), F.linear(x, torch.lerp(w, torch.zeros_like(w), 0.5 * b[0].double()))
    ),
    "sum(keepdim=True)": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).sum(0, keepdim=True),
    "sum(0, True)": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).sum(0, True),
    "sum of a dtype": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).sum(dim=0, dtype=torch.float32),
    "sum of everything": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).sum(),
    "sum of two dimensions": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).sum(dim=(0, 1)),
    "sum of the other dimension": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b], dim=1).sum(dim=0),
    "sum of no dimension": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).sum(dim=None),
    "sum(axis=)": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b], -1).sum(axis=-1),
    "mean(dim=1)": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).mean(dim=1),
    "nansum": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).nansum(0),
    "prod": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).prod(0),
    "cumsum": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).cumsum(0)[-2],
    "logical and of terms": lambda x, w, l, b, o: (_term(x, w, b[0]) > 0) & (_term(x, w, b[0]) < 1),
    # Einsum
    "einsum to db": lambda x, w, l, b, o: _activated(
        torch.einsum("bh,dh->db", _square(x), w * b[0]), torch.einsum("bh,dh->db", _square(x), w * ~b[0])
    ),
    "einsum to bd and db": lambda x, w, l, b, o: _activated(
        torch.einsum("bh,dh->bd", _square(x), w * b[0]), torch.einsum("bh,dh->db", _square(x), w * ~b[0])
    ),
    "einsum of hd": lambda x, w, l, b, o: _activated(
        torch.einsum("bh,hd->bd", x, w * b[0]), torch.einsum("bh,dh->bd", x, w * ~b[0])
    ),
    "einsum without arrow": lambda x, w, l, b, o: _activated(
        torch.einsum("bh,dh", x, w * b[0]), torch.einsum("bh,dh", x, w * ~b[0])
    ),
    "einsum without arrow, other letters": lambda x, w, l, b, o: _activated(
        torch.einsum("zh,ah", _square(x), w * b[0]), torch.einsum("zh,ah->za", _square(x), w * ~b[0])
    ),
    "einsum of the diagonal": lambda x, w, l, b, o: _activated(
        torch.einsum("bd,dd->bd", x, w * b[0]), torch.einsum("bd,dd->bd", x, w * ~b[0])
    ),
    "einsum without sum": lambda x, w, l, b, o: _activated(
        torch.einsum("bh,dh->bdh", x, w * b[0]).sum(-1), torch.einsum("bh,dh->bdh", x, w * ~b[0]).sum(-1)
    ),
    "einsum that sums the tokens": lambda x, w, l, b, o: _activated(
        torch.einsum("bh,dh->d", x, w * b[0]), torch.einsum("bh,dh->d", x, w * ~b[0])
    ),
    "einsum of sublists": lambda x, w, l, b, o: _activated(
        torch.einsum(x, [0, 1], w * b[0], [2, 1], [0, 2]), torch.einsum(x, [0, 1], w * ~b[0], [2, 1], [0, 2])
    ),
    "einsum of capitals": lambda x, w, l, b, o: _activated(
        torch.einsum("Bh,Hh->BH", x, w * b[0]), torch.einsum(" B h , H h -> B H ", x, w * ~b[0])
    ),
    "einsum of a stack by tokens": lambda x, w, l, b, o: (
        F.silu(torch.einsum("nh,ndh->nd", _square(x), w * _cube(l)))
        * torch.einsum("nh,ndh->nd", _square(x), w * ~_cube(l))
    ),
    "einsum of exchanged masks": lambda x, w, l, b, o: (
        F.silu(torch.einsum("bh,ndh->nbd", x, w * _cube(l))) * torch.einsum("bh,ndh->dbn", x, w * ~_cube(l))
    ).sum(0),
    # Products with a bias or a factor
    "linear(bias=)": lambda x, w, l, b, o: _activated(
        F.linear(x, w * b[0], bias=o[0]), F.linear(input=x, weight=w * ~b[0], bias=None)
    ),
    "linear of a positional bias": lambda x, w, l, b, o: _activated(
        F.linear(x, w * b[0]), F.linear(x, w * ~b[0], o[0])
    ),
    "addmm(beta=2)": lambda x, w, l, b, o: _activated(
        torch.addmm(o[0], x, (w * b[0]).t(), beta=2), torch.addmm(o[0], x, (w * ~b[0]).t(), beta=0)
    ),
    "addmm(alpha=2)": lambda x, w, l, b, o: _activated(
        torch.addmm(o[0], x, (w * b[0]).t(), beta=0, alpha=2), torch.addmm(o[0], x, (w * ~b[0]).t(), beta=0)
    ),
    "addmm by keywords": lambda x, w, l, b, o: _activated(
        torch.addmm(input=o[0], mat1=x, mat2=(w * b[0]).t(), beta=0, alpha=1),
        torch.addmm(mat2=(w * ~b[0]).t(), mat1=x, input=o[0] * 0),
    ),
    "addmm of zeros and alpha": lambda x, w, l, b, o: _activated(
        torch.addmm(torch.zeros(D, dtype=x.dtype), x, (w * b[0]).t(), alpha=0.5), F.linear(x, w * ~b[0])
    ),
    "baddbmm": lambda x, w, l, b, o: (
        F.silu(torch.baddbmm(o[:1], x.expand(3, -1, -1), (w * b).mT, beta=0.5))
        * torch.baddbmm(o[:1], x.expand(3, -1, -1), (w * ~b).mT, beta=0)
    ).sum(0),
    "addbmm": lambda x, w, l, b, o: _activated(
        torch.addbmm(o[:5], x.expand(3, -1, -1), (w * b).mT, beta=0),
        torch.addbmm(o[:5], x.expand(3, -1, -1), (w * ~b).mT, beta=0),
    ),
    "bilinear": lambda x, w, l, b, o: _activated(F.bilinear(x, x, (w * b).mT), F.bilinear(x, x, (w * ~b).mT)),
    # Activations and dropout
    "gelu(approximate=)": lambda x, w, l, b, o: (
        F.gelu(F.linear(x, w * b[0]), approximate="tanh") * F.linear(x, w * ~b[0])
        + F.gelu(F.linear(x, w * b[1]), approximate="none") * F.linear(x, w * ~b[1])
    ),
    "gelu of two terms": lambda x, w, l, b, o: (
        F.gelu(input=F.linear(x, w * b[0])) * F.linear(x, w * ~b[0])
        + F.gelu(approximate="tanh", input=F.linear(x, w * b[1])) * F.linear(x, w * ~b[1])
    ),
    "dropout(p=1, training=True)": lambda x, w, l, b, o: (
        F.silu(F.dropout(F.linear(x, w * b[0]), p=1.0, training=True)) * F.linear(x, w * ~b[0])
    ),
    "dropout(training=False)": lambda x, w, l, b, o: (
        F.silu(F.dropout(F.linear(x, w * b[0]), p=0.9, training=False)) * F.linear(x, w * ~b[0])
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
    "silu(input=)": lambda x, w, l, b, o: F.silu(input=F.linear(x, w * b[0])) * F.linear(x, w * ~b[0]),
    "softmax of gates": lambda x, w, l, b, o: F.linear(x, w * b[0]).softmax(dim=-1) * F.linear(x, w * ~b[0]),
    "glu": lambda x, w, l, b, o: F.glu(torch.cat(_pair(x, w, b[0]), 0), dim=0),
    "glu of the last dimension": lambda x, w, l, b, o: F.glu(torch.cat(_pair(x, w, b[0]), -1)),
    # Choices
    "where by keywords": lambda x, w, l, b, o: _activated(
        F.linear(x, torch.where(condition=b[0], input=w, other=0)),
        F.linear(x, torch.where(other=w, input=torch.zeros_like(w), condition=b[0])),
    ),
    "where of swapped keywords": lambda x, w, l, b, o: _activated(
        F.linear(x, torch.where(input=torch.zeros_like(w), other=w, condition=b[0])),
        F.linear(x, torch.where(b[0], other=w, input=torch.zeros_like(w))),
    ),
    "method where": lambda x, w, l, b, o: _activated(
        F.linear(x, w.where(b[0], 0.0)), F.linear(x, w.where(condition=~b[0], other=torch.zeros_like(w)))
    ),
    "where of another number": lambda x, w, l, b, o: _activated(
        F.linear(x, torch.where(b[0], w, 1.0)), F.linear(x, torch.where(b[0], 0.0, w))
    ),
    "masked_fill(value=1)": lambda x, w, l, b, o: _activated(
        F.linear(x, w.masked_fill(mask=~b[0], value=1.0)), F.linear(x, w.masked_fill(b[0], value=0.0))
    ),
    "masked_fill of a tensor": lambda x, w, l, b, o: _activated(
        F.linear(x, w.masked_fill(~b[0], o[0, 0].detach())), F.linear(x, w.masked_fill(b[0], torch.tensor(0.0)))
    ),
    "masked_scatter": lambda x, w, l, b, o: _activated(
        F.linear(x, w.masked_scatter(~b[0], torch.zeros_like(w))), F.linear(x, w.masked_scatter(b[0], o))
    ),
    "index_put(accumulate=True)": lambda x, w, l, b, o: _activated(
        F.linear(x, w.clone().index_put_((~b[0],), torch.tensor(0.0).double(), accumulate=True)),
        F.linear(x, w.clone().index_put_((b[0],), torch.tensor(0.0).double())),
    ),
    # Slices of masks
    "select(dim=1)": lambda x, w, l, b, o: gated(x, w, _cube(l)[0], ~_cube(l).select(dim=1, index=0)),
    "select(index=0, dim=0)": lambda x, w, l, b, o: gated(x, w, _cube(l)[0], ~_cube(l).select(index=0, dim=0)),
    "select of the last dimension": lambda x, w, l, b, o: gated(x, w, _cube(l)[0], ~torch.select(_cube(l), -1, 0)),
    "index of the second dimension": lambda x, w, l, b, o: gated(x, w, _cube(l)[0], ~_cube(l)[:, 0]),
    "unbind(dim=1)": lambda x, w, l, b, o: gated(x, w, _cube(l)[0], ~_cube(l).unbind(dim=1)[0]),
    "torch.unbind of the last": lambda x, w, l, b, o: gated(x, w, _cube(l)[0], ~torch.unbind(_cube(l), dim=-1)[0]),
    "chunk of another dimension": lambda x, w, l, b, o: gated(
        x, w, _cube(l).chunk(8, dim=0)[0].squeeze(0), ~_cube(l).chunk(8, dim=1)[0].squeeze(1)
    ),
    "movedim of masks": lambda x, w, l, b, o: gated(x, w, _cube(l)[0], ~_cube(l).movedim(1, 0)[0]),
    "index of a list": lambda x, w, l, b, o: gated(x, w, _cube(l)[[0, 1]][1], ~_cube(l)[0]),
    "index of a tensor": lambda x, w, l, b, o: gated(x, w, _cube(l)[torch.tensor(1)], ~_cube(l)[0]),
    "slice with a step": lambda x, w, l, b, o: gated(x, w, _cube(l)[::2][1], ~_cube(l)[1]),
    "slice with an end": lambda x, w, l, b, o: gated(x, w, _cube(l)[1:][0], ~_cube(l)[0]),
    "stack of masks along 1": lambda x, w, l, b, o: gated(x, w, torch.stack([b[0], b[1]], 1)[:, 0], ~b[1]),
    # Comparisons
    "gt of a keyword": lambda x, w, l, b, o: gated(x, w, torch.gt(l[0], other=0.5), torch.le(l[0], other=0)),
    "gt by keywords": lambda x, w, l, b, o: gated(
        x, w, torch.gt(input=l[0], other=0.0), torch.le(input=l[0], other=0.0)
    ),
    "gt and lt": lambda x, w, l, b, o: gated(x, w, l[0] > 0.5, l[0] < 0.5),
    "gt and le of another bound": lambda x, w, l, b, o: gated(x, w, l[0] > 0.0, l[0] <= 1e-9),
    "gt of swapped operands": lambda x, w, l, b, o: gated(x, w, l[0] > o, o > l[0]),
    "ge and le": lambda x, w, l, b, o: gated(x, w, l[0] >= -1, l[0] <= -1),  # row 0 is both
    "gt and ge": lambda x, w, l, b, o: gated(x, w, l[0] > -1, ~(l[0] >= -1)),
    "gt of a bound a row": lambda x, w, l, b, o: gated(x, w, l[0] > o[:1], l[0] <= o[:, :1]),
    "lt of a number and a cast": lambda x, w, l, b, o: gated(x, w, l[0] > 0, l[0].int() <= 0),
    "gt of a rounded tensor": lambda x, w, l, b, o: gated(x, w, l[0] > 0.3, l[0].half() <= 0.3),
    "isnan": lambda x, w, l, b, o: gated(x, w, ~(l[0] / l[0].relu()).isnan(), l[0] <= 0),
    # Numbers and shapes
    "multiply by keywords": lambda x, w, l, b, o: _activated(
        F.linear(x, torch.mul(input=w, other=b[0])), F.linear(x, torch.mul(other=o, input=~b[0]))
    ),
    "expand(size=)": lambda x, w, l, b, o: gated(x, w, b[0][:1].expand(size=(D, H)), ~b[0][:1].expand(D, H)),
    "expand of a column": lambda x, w, l, b, o: gated(x, w, b[0][:, :1].expand(D, H), ~b[0][:1].expand(D, H)),
    "repeat of x": lambda x, w, l, b, o: _activated(
        F.linear(x.repeat(2, 1), w * b[0]), F.linear(x, w * ~b[0]).repeat(2, 1)
    ),
    "repeat along the masks": lambda x, w, l, b, o: (
        F.silu(x.repeat(3, 1, 1) @ (w * b).mT) * (x.repeat(3, 1).view(3, 5, H).flip(1) @ (w * ~b).mT)
    ).sum(0),
    "unsqueeze(dim=1)": lambda x, w, l, b, o: (
        F.silu(torch.einsum("bh,ndh->nbd", _square(x), w * _cube(l)))
        * (F.linear(_square(x), w).unsqueeze(dim=1) - torch.einsum("bh,ndh->nbd", _square(x), w * _cube(l)))
    ).sum(0),
    "to(dtype=) of a weight": lambda x, w, l, b, o: _activated(
        F.linear(x, w.to(dtype=torch.float16).to(w.dtype) * b[0]), F.linear(x, w * ~b[0])
    ),
    "type of a weight": lambda x, w, l, b, o: _activated(
        F.linear(x, w.type(torch.int8).type_as(w) * b[0]), F.linear(x, w.type(dtype=torch.int8).double() * ~b[0])
    ),
    "normalize of another p": lambda x, w, l, b, o: _activated(
        F.linear(x, F.normalize(w + 1) * b[0]), F.linear(x, F.normalize(w + 1, p=1) * ~b[0])
    ),
    "normalize of another dim": lambda x, w, l, b, o: _activated(
        F.linear(x, F.normalize(w + 1) * b[0]), F.linear(x, F.normalize(w + 1, dim=0) * ~b[0])
    ),
    "narrow of x": lambda x, w, l, b, o: _activated(
        F.linear(x.narrow(0, 0, 4), w * b[0]), F.linear(x.narrow(0, start=1, length=4), w * ~b[0])
    ),
    "roll of x": lambda x, w, l, b, o: _activated(F.linear(x.roll(1, 0), w * b[0]), F.linear(x.roll(1, 1), w * ~b[0])),
    "cat of weights along 1": lambda x, w, l, b, o: _activated(
        *F.linear(torch.cat([x, x], 1), torch.cat([w * b[0], w * ~b[0]], dim=1)).expand(2, -1, -1).unbind(0)
    ),
    "chunk of the tokens": lambda x, w, l, b, o: _activated(
        *F.linear(x[:4], torch.cat([w * b[0], w * ~b[0]], dim=0)).chunk(2, dim=0)
    ),
    "chunk in four": lambda x, w, l, b, o: _activated(
        *F.linear(x, torch.cat([w * b[0], w * ~b[0]])).chunk(4, dim=-1)[1:3]
    ),
    "split at another row": lambda x, w, l, b, o: _activated(
        *F.linear(x, torch.cat([w * b[0], w * ~b[0]])).split([4, 12], dim=-1)[:1], o[:5, :4]
    ),
    "interleaved cat": lambda x, w, l, b, o: _activated(
        *F.linear(x, torch.stack([w * b[0], w * ~b[0]], dim=1).flatten(0, 1)).chunk(2, dim=-1)
    ),
    "strided slices of a cat": lambda x, w, l, b, o: _activated(
        F.linear(x, torch.cat([w * b[0], w * ~b[0]]))[:, ::2], F.linear(x, torch.cat([w * b[0], w * ~b[0]]))[:, 1::2]
    ),
    "unflatten of another order": lambda x, w, l, b, o: _activated(
        *F.linear(x, torch.cat([w * b[0], w * ~b[0]])).unflatten(-1, (D, 2)).unbind(-1)
    ),
    "view of another order": lambda x, w, l, b, o: _activated(
        *F.linear(x, torch.cat([w * b[0], w * ~b[0]])).view(2, 5, D).unbind(0)
    ),
}


# Programs that do not multiply one x by two masked forms of one weight, so the report need not mention them.
MAY_BE_SILENT = {
    *("transposed x", "repeat of x", "repeat along the masks", "narrow of x", "roll of x"),
    *("addcmul of value", "lerp", "where of another number", "masked_fill(value=1)", "masked_fill of a tensor"),
    *("masked_scatter", "index_put(accumulate=True)", "multiply by keywords", "bilinear", "addbmm"),
    *("einsum of the diagonal", "einsum without sum", "einsum that sums the tokens", "einsum of a stack by tokens"),
    *("cat of weights along 1", "split at another row"),
}


@pytest.mark.parametrize("trained", [ALL, ()], ids=["training", "inference"])
@pytest.mark.parametrize("name", sample(CALLS, every=24))
def test_arguments_of_a_call(name: str, trained: tuple[str, ...]) -> None:
    def layer(x: Tensor, weight: Tensor, logits: Tensor, bits: Tensor, other: Tensor) -> Any:
        return CALLS[name](x, weight, logits, bits, other)

    capture = compare(layer, lambda: tensors(trained), SAME)
    if name not in MAY_BE_SILENT:
        assert_says_why(capture)
