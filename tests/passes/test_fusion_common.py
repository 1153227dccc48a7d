"""What people write first: each spelling, with each kind of mask, becomes one operator in training and in inference.

A layer is a function `(x, weight, masks, more)` of a list of masks, so that one spelling meets all kinds: bool, float
and integer buffers, comparisons, and logits that are trained straight through.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budgets import BUDGET, NAIVE_FACTOR, relative_error
from graphs import Capture, assert_same, compare, results
from spellings import TRAINED, straight_through
from torch import Tensor, nn

SAME = 10 * BUDGET[torch.float64]
D = H = 8
N_MASKS = 2

More = dict[str, Tensor]
Layer = Callable[[Tensor, Tensor, list[Tensor], More], Any]


@dataclass(frozen=True)
class Kind:
    """How a program holds its masks, and what it makes of them."""

    stored: Callable[[Tensor], Tensor]
    """What the program is given, of logits."""
    mask: Callable[[Tensor], Tensor] = lambda given: given
    """The mask of one of those."""
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
MAIN_KINDS = ("bool", "float", "logits")


def tensors(kind: Kind, *, training: bool) -> dict[str, Tensor]:
    """All that a layer of this file may be given; row 0 of each mask is all value, row 1 all gate."""
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


def fuses_to_one(layer: Layer, kind: Kind, n_masks: int = N_MASKS, activation: str = "silu") -> None:
    """One operator takes the place of all products, and results and gradients stay, in training and in inference."""

    def program(x: Tensor, weight: Tensor, masks: Tensor, **more: Tensor) -> Any:
        return layer(x, weight, [kind.mask(masks[i]) for i in range(n_masks)], more)

    for training in (True, False):
        mode = "training" if training else "inference"
        make = functools.partial(tensors, kind, training=training)
        capture = compare(program, make, SAME, assume_binary=kind.assume_binary)
        assert capture.reasons == [], f"in {mode}"
        found = [(site.n_masks, site.activation, site.route) for site in capture.report.fused]
        assert found == [(n_masks, activation, "forward_ste" if kind.trains and training else "forward")], f"in {mode}"


def gated(x: Tensor, weight: Tensor, m: Tensor, complement: Tensor) -> Tensor:
    return F.silu(F.linear(x, weight * m)) * F.linear(x, weight * complement)


# --- Each kind of mask with each spelling ----------------------------------------------------------------------------

# Name -> the complement, and the kinds that it is one of: "real" (float, integer, trained), "fixed" (any but trained),
# "integer", "bool".
COMPLEMENTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "1 - m": ("real", lambda m: 1 - m),
    "1.0 - m": ("real", lambda m: 1.0 - m),
    "rsub": ("real", lambda m: torch.rsub(m, 1)),
    "rsub by keyword": ("real", lambda m: torch.rsub(m, other=1)),
    "ones_like - m": ("real", lambda m: torch.ones_like(m) - m),
    "sub of a number": ("real", lambda m: torch.sub(1, other=m)),
    "sub by keywords": ("real", lambda m: torch.sub(input=torch.ones_like(m), other=m)),
    "add of alpha": ("real", lambda m: torch.add(torch.ones_like(m), m, alpha=-1)),
    "-m + 1": ("real", lambda m: -m + 1),
    "~m": ("bool", lambda m: ~m),
    "m ^ True": ("fixed bits", lambda m: m ^ True),
    "m ^ 1": ("integer", lambda m: m ^ 1),
    "bitwise_xor": ("bool", lambda m: torch.bitwise_xor(m, torch.ones_like(m))),
    "logical_xor": ("fixed", lambda m: torch.logical_xor(m, torch.ones_like(m))),
    "logical_not": ("fixed", lambda m: torch.logical_not(m)),
    "m == 0": ("fixed", lambda m: m == 0),
    "m != 1": ("fixed", lambda m: m != 1),
    "m < 1": ("fixed", lambda m: m < 1),
    "m <= 0": ("fixed", lambda m: m <= 0),
    "m < 0.5": ("fixed", lambda m: m < 0.5),
    "~(m > 0)": ("fixed", lambda m: ~(m > 0)),
    "~m.bool()": ("fixed", lambda m: ~m.bool()),
    "eq by keywords": ("fixed", lambda m: torch.eq(input=m, other=0)),
    "where": ("fixed", lambda m: torch.where(m > 0, 0.0, 1.0)),
    "1 - m.double()": ("fixed", lambda m: 1 - m.double()),
}

# Name -> the masked weight, and the kinds of masks that it takes.
MASKED_WEIGHTS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "w * m": ("any", lambda w, m: w * m),
    "m * w": ("any", lambda w, m: m * w),
    "mul by keyword": ("any", lambda w, m: torch.mul(w, other=m)),
    "mul by keywords": ("any", lambda w, m: torch.mul(other=w, input=m)),
    "method mul by keyword": ("any", lambda w, m: w.mul(other=m)),
    "multiply": ("any", torch.multiply),
    "w * m.to(w.dtype)": ("any", lambda w, m: w * m.to(w.dtype)),
    "w * m.to(dtype=)": ("any", lambda w, m: w * m.to(dtype=w.dtype)),
    "w * m.type_as(w)": ("any", lambda w, m: w * m.type_as(w)),
    "clone.mul_": ("any", lambda w, m: w.clone().mul_(m)),
    "where(m.bool())": ("fixed", lambda w, m: torch.where(m.bool(), w, 0)),
    "where(m != 0)": ("fixed", lambda w, m: torch.where(m != 0, w, 0)),
    "where(m == 1)": ("fixed", lambda w, m: torch.where(m == 1, w, torch.zeros_like(w))),
    "where(m > 0.5)": ("fixed", lambda w, m: torch.where(m > 0.5, w, 0.0)),
    "where(m == 0, 0, w)": ("fixed", lambda w, m: torch.where(m == 0, 0, w)),
    "where by keywords": ("fixed", lambda w, m: torch.where(condition=m > 0, input=w, other=0.0)),
    "method where": ("fixed", lambda w, m: w.where(m > 0, 0.0)),
    "masked_fill(m == 0)": ("fixed", lambda w, m: w.masked_fill(m == 0, 0)),
    "masked_fill by keywords": ("fixed", lambda w, m: torch.masked_fill(input=w, mask=m == 0, value=0.0)),
    "clone[m == 0] = 0": ("fixed", lambda w, m: _filled(w.clone(), m == 0)),
}


def _filled(w: Tensor, m: Tensor) -> Tensor:
    w[m] = 0
    return w


def takes(kind: Kind, kinds: str) -> bool:
    return {
        "any": True,
        "real": not kind.is_bool,
        "bool": kind.is_bool,
        "integer": kind.is_integer,
        "fixed bits": kind.is_bool or kind.is_integer,
        "fixed": not kind.trains,
    }[kinds]


def met(table: dict[str, tuple[str, Any]]) -> list[Any]:
    """Each entry of a table with each kind of mask that it takes."""
    pairs = [(kind, name) for name, (kinds, _) in table.items() for kind in KINDS if takes(KINDS[kind], kinds)]
    return [pytest.param(*pair, id="-".join(pair)) for pair in pairs]


def sum_of(term: Callable[[Tensor, Tensor, Tensor, More], Tensor]) -> Layer:
    """A layer that adds up `term(x, weight, mask, more)`."""
    return lambda x, weight, masks, more: sum(term(x, weight, m, more) for m in masks)


@pytest.mark.parametrize(("kind", "name"), met(COMPLEMENTS))
def test_complement(kind: str, name: str) -> None:
    complement = COMPLEMENTS[name][1]
    fuses_to_one(sum_of(lambda x, w, m, _: gated(x, w, m, complement(m))), KINDS[kind])


@pytest.mark.parametrize(("kind", "name"), met(MASKED_WEIGHTS))
def test_masked_weight(kind: str, name: str) -> None:
    masked, complement = MASKED_WEIGHTS[name][1], KINDS[kind].complement
    fuses_to_one(
        sum_of(lambda x, w, m, _: F.silu(F.linear(x, masked(w, m))) * F.linear(x, masked(w, complement(m)))),
        KINDS[kind],
    )


# Gate and value of x, weight, mask and complement.
PAIRS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "masked twice": lambda x, w, m, c: (F.linear(x, w * m), F.linear(x, w * c)),
    "gate by the complement": lambda x, w, m, c: (F.linear(x, w * c), F.linear(x, w * m)),
    "w - w * m": lambda x, w, m, c: (F.linear(x, w * m), F.linear(x, w - w * m)),
    "w - m * w": lambda x, w, m, c: (F.linear(x, m * w), F.linear(x, w - m * w)),
    "w - masked": lambda x, w, m, c: _less_masked(x, w, w * m),
    "torch.sub by keyword": lambda x, w, m, c: (F.linear(x, w * m), F.linear(x, torch.sub(w, other=w * m))),
    "-(w * m) + w": lambda x, w, m, c: (F.linear(x, w * m), F.linear(x, -(w * m) + w)),
    "total - gate": lambda x, w, m, c: _less_gate(F.linear(x, w * m), F.linear(x, w)),
    "total first": lambda x, w, m, c: _less_gate(other=F.linear(x, w), gate=F.linear(x, w * m)),
    "total - gate of matmul": lambda x, w, m, c: _less_gate(x @ (w * m).T, x @ w.T),
    "total - masked": lambda x, w, m, c: (F.linear(x, w) - F.linear(x, w * c), F.linear(x, w * c)),
    "linear(x, w) - linear(x, w * m)": lambda x, w, m, c: (
        F.linear(x, w * m),
        F.linear(x, w) - F.linear(x, w * m),
    ),
    "linear by keywords": lambda x, w, m, c: (F.linear(input=x, weight=w * m), F.linear(x, weight=w * c)),
    "linear of no bias": lambda x, w, m, c: (F.linear(x, w * m, None), F.linear(x, w * c, bias=None)),
    "matmul by keywords": lambda x, w, m, c: (
        torch.matmul(input=x, other=(w * m).t()),
        torch.matmul(x, other=(w * c).T),
    ),
    "method matmul by keyword": lambda x, w, m, c: (x.matmul(other=(w * m).mT), x.mm(mat2=(w * c).t())),
    "permute(dims=)": lambda x, w, m, c: (x @ (w * m).permute(dims=(1, 0)), x @ (w * c).permute(1, 0)),
    "transpose by keywords": lambda x, w, m, c: (
        x @ (w * m).transpose(dim0=0, dim1=1),
        x @ (w * c).swapaxes(axis0=-1, axis1=0),
    ),
    "einsum": lambda x, w, m, c: (torch.einsum("bh,dh->bd", x, w * m), torch.einsum("dh,bh->bd", w * c, x)),
    "einsum without arrow": lambda x, w, m, c: (torch.einsum("bh,dh", x, w * m), torch.einsum("bh,dh", x, w * c)),
    "addmm by keywords": lambda x, w, m, c: (
        torch.addmm(input=x.new_zeros(D), mat1=x, mat2=(w * m).t()),
        torch.addmm(w[0], x, (w * c).t(), beta=0),
    ),
}


def _less_masked(x: Tensor, w: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, masked), F.linear(x, w - masked)


def _less_gate(gate: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return gate, other - gate


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("kind", KINDS)
def test_gate_and_value(kind: str, name: str) -> None:
    def term(x: Tensor, w: Tensor, m: Tensor, _: More) -> Tensor:
        gate, value = PAIRS[name](x, w, m, KINDS[kind].complement(m))
        return F.silu(gate) * value

    fuses_to_one(sum_of(term), KINDS[kind])


HAND_WRITTEN: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "g * sigmoid(g) * v": ("silu", lambda g, v: g * torch.sigmoid(g) * v),
    "v * (g * sigmoid(g))": ("silu", lambda g, v: v * (g * torch.sigmoid(g))),
    "g * v * sigmoid(g)": ("silu", lambda g, v: g * v * torch.sigmoid(g)),
    "g / (1 + exp(-g)) * v": ("silu", lambda g, v: g / (1 + torch.exp(-g)) * v),
    "gelu of erf": ("gelu", lambda g, v: 0.5 * g * (1 + torch.erf(g * 0.5**0.5)) * v),
    "mul by keywords": ("silu", lambda g, v: torch.mul(input=F.silu(input=g), other=v)),
    "g * v": ("identity", lambda g, v: g * v),
    "Dropout(0.0)": ("silu", lambda g, v: F.silu(F.dropout(g, 0.0, True)) * v),
    "Dropout(0.0) of the product": ("silu", lambda g, v: F.dropout(F.silu(g), p=0.0) * F.dropout(v, p=0.0)),
    "Dropout in eval": ("silu", lambda g, v: F.silu(F.dropout(g, training=False)) * torch.dropout(v, 0.5, False)),
}


@pytest.mark.parametrize("name", HAND_WRITTEN)
@pytest.mark.parametrize("pair", ["masked twice", "total - gate"])
@pytest.mark.parametrize("kind", MAIN_KINDS)
def test_hand_written_activation(kind: str, pair: str, name: str) -> None:
    activation, function = HAND_WRITTEN[name]

    def term(x: Tensor, w: Tensor, m: Tensor, _: More) -> Tensor:
        return function(*PAIRS[pair](x, w, m, KINDS[kind].complement(m)))

    fuses_to_one(sum_of(term), KINDS[kind], activation=activation)


# --- Masks of logits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAINED)
def test_mask_of_logits(name: str) -> None:
    """Straight-through spellings, all given the whole stack of logits."""

    def program(x: Tensor, weight: Tensor, masks: Tensor, **_: Tensor) -> Tensor:
        y: Any = 0
        for i in range(N_MASKS):
            m = TRAINED[name](masks, i)
            y = y + gated(x, weight, m, 1 - m)
        return y

    for training in (True, False):
        capture = compare(program, functools.partial(tensors, KINDS["logits"], training=training), SAME)
        assert capture.reasons == []
        assert [site.route for site in capture.report.fused] == ["forward_ste" if training else "forward"]


# Gate's and value's factor of one mask's logits.
PAIRS_OF_LOGITS: dict[str, tuple[bool, Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "L > 0 and L <= 0": (False, lambda l: (l > 0, l <= 0)),
    "L > 0 and ~(L > 0)": (False, lambda l: (l > 0, ~(l > 0))),
    "L >= 0 and L < 0": (False, lambda l: (l >= 0, l < 0)),
    "L > 0.5 and L <= 0.5": (False, lambda l: (l > 0.5, l <= 0.5)),
    "0 < L and 0 >= L": (False, lambda l: (0 < l, 0 >= l)),  # noqa: SIM300
    "gt and le": (False, lambda l: (torch.gt(l, other=0), torch.le(input=l, other=0))),
    "floats": (False, lambda l: ((l > 0).double(), (l <= 0).double())),
    "integers": (False, lambda l: ((l > 0).int(), (l <= 0).int())),
    "a mask of its own each": (True, lambda l: (straight_through(l), 1 - straight_through(l))),
}


@pytest.mark.parametrize("name", PAIRS_OF_LOGITS)
def test_pair_of_masks_of_logits(name: str) -> None:
    trains, pair = PAIRS_OF_LOGITS[name]
    kind = Kind(lambda l: l, trains=trains)
    fuses_to_one(sum_of(lambda x, w, logits, _: gated(x, w, *pair(logits))), kind)


@pytest.mark.parametrize("name", ["straight_through", "no_grad block", "decorated", ".data", "autograd.Function"])
def test_masks_made_before_autocast(name: str) -> None:
    """The masks are float32, the products bfloat16."""

    def program(x: Tensor, weight: Tensor, masks: Tensor) -> Tensor:
        made = [TRAINED[name](masks, i) for i in range(N_MASKS)]
        with torch.autocast("cpu", torch.bfloat16):
            return sum(gated(x, weight, m, 1 - m) for m in made)

    for training in (True, False):
        exact = {k: t for k, t in tensors(KINDS["logits"], training=training).items() if k in ("x", "weight", "masks")}
        named = {k: t.detach().float().requires_grad_(training) for k, t in exact.items()}
        oracle = results(lambda x, weight, masks: _in_float64(x, weight, masks, name), exact)
        naive, capture = results(program, named), Capture()
        fused = results(capture.compile(program), named)
        assert capture.reasons == []
        assert [(site.dtype, site.n_masks) for site in capture.report.fused] == [("bfloat16", N_MASKS)]
        for key, wanted in oracle.items():
            assert fused[key].dtype == naive[key].dtype
            bar = max(BUDGET[torch.bfloat16], NAIVE_FACTOR * relative_error(naive[key], wanted))
            assert relative_error(fused[key], wanted) <= bar, key


def _in_float64(x: Tensor, weight: Tensor, masks: Tensor, name: str) -> Tensor:
    made = [TRAINED[name](masks, i) for i in range(N_MASKS)]
    return sum(gated(x, weight, m, 1 - m) for m in made)


# --- Sums ------------------------------------------------------------------------------------------------------------


def _accumulated(y: Any, terms: list[Tensor]) -> Tensor:
    for term in terms:
        y = y + term
    return y


def _accumulated_in_place(y: Tensor, terms: list[Tensor]) -> Tensor:
    for term in terms:
        y += term
    return y


FLOATS = (0.5, -1.75)

# A total of the terms of all masks.
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
    "dropout of 0 a term": lambda terms, more: sum(F.dropout(t, 0.0) for t in terms),
}


@pytest.mark.parametrize("name", TOTALS)
@pytest.mark.parametrize("kind", MAIN_KINDS)
def test_total(kind: str, name: str) -> None:
    def layer(x: Tensor, weight: Tensor, masks: list[Tensor], more: More) -> Tensor:
        return TOTALS[name]([gated(x, weight, m, KINDS[kind].complement(m)) for m in masks], more)

    fuses_to_one(layer, KINDS[kind])


# --- Gate and value, or all masks, in one product --------------------------------------------------------------------

Masks = list[Tensor]


def _activated(pair: Any) -> Tensor:
    gate, value = pair
    return F.silu(gate) * value


def _pair_cat(w: Tensor, m: Tensor, c: Tensor) -> Tensor:
    return torch.cat([w * m, w * c])


def _pair_stack(w: Tensor, m: Tensor, c: Tensor) -> Tensor:
    return torch.stack([w * m, w * c])


# One mask's gate and value from one product.
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


@pytest.mark.parametrize("name", JOINED_PAIRS)
@pytest.mark.parametrize("kind", MAIN_KINDS)
def test_gate_and_value_in_one_product(kind: str, name: str) -> None:
    def term(x: Tensor, w: Tensor, m: Tensor, _: More) -> Tensor:
        return _activated(JOINED_PAIRS[name](x, w, m, KINDS[kind].complement(m)))

    fuses_to_one(sum_of(term), KINDS[kind])


def _terms(gates: Any, values: Any) -> Tensor:
    return sum(F.silu(g) * v for g, v in zip(gates, values, strict=True))


# All gates and values of x, weight, masks and complements.
JOINED: dict[str, Callable[[Tensor, Tensor, Masks, Masks], Tensor]] = {
    "one cat": lambda x, w, ms, cs: _chunked(F.linear(x, torch.cat([w * m for m in [*ms, *cs]]))),
    "one cat of pairs": lambda x, w, ms, cs: _chunked_pairs(
        F.linear(x, torch.cat([w * f for pair in zip(ms, cs, strict=True) for f in pair]))
    ),
    "a cat each": lambda x, w, ms, cs: _terms(
        F.linear(x, torch.cat([w * m for m in ms])).chunk(len(ms), -1),
        F.linear(x, torch.cat([w * c for c in cs])).split(D, -1),
    ),
    "a cat each, one sum": lambda x, w, ms, cs: (
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


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("kind", MAIN_KINDS)
def test_all_masks_in_one_product(kind: str, name: str) -> None:
    def layer(x: Tensor, weight: Tensor, masks: Masks, more: More) -> Tensor:
        return JOINED[name](x, weight, masks, [KINDS[kind].complement(m) for m in masks])

    fuses_to_one(layer, KINDS[kind])


# --- Weights that are expressions ------------------------------------------------------------------------------------

EXPRESSIONS: dict[str, Callable[[Tensor, More], Tensor]] = {
    "q * scale[:, None]": lambda w, more: w * more["scale"][:, None],
    "scale.unsqueeze(1) * q": lambda w, more: more["scale"].unsqueeze(1) * w,
    "int8 * scale": lambda w, more: more["q"].to(more["scale"].dtype) * more["scale"][:, None],
    "B @ A": lambda w, more: more["left"] @ more["right"],
    "W + B @ A": lambda w, more: w + more["left"] @ more["right"],
    "W + 0.5 * B @ A": lambda w, more: w + 0.5 * (more["left"] @ more["right"]),
    "W * delta": lambda w, more: w * more["delta"],
    "W + delta": lambda w, more: w + more["delta"],
    "normalize": lambda w, more: F.normalize(w),
    "normalize by keywords": lambda w, more: F.normalize(input=w, p=2.0, dim=1),
    "W / norm": lambda w, more: w / w.norm(dim=1, keepdim=True),
    "abs": lambda w, more: w.abs(),
    "tanh": lambda w, more: torch.tanh(w),
    "softmax": lambda w, more: w.softmax(dim=-1),
    "2 * W": lambda w, more: 2 * w,
    "to float64": lambda w, more: more["narrow"].to(torch.float64),
    "to the dtype of x": lambda w, more: more["narrow"].to(more["scale"].dtype),
    "clone": lambda w, more: w.clone(),
    "view of a flat parameter": lambda w, more: more["flat"].view(D, H),
    "slice of a larger parameter": lambda w, more: torch.cat([w, more["delta"]])[:D],
    "dropout of 0": lambda w, more: F.dropout(w, 0.0),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize("pair", ["w - w * m", "total - gate"])
@pytest.mark.parametrize("kind", ["float", "logits"])
def test_weight_is_an_expression(kind: str, pair: str, name: str) -> None:
    """Computed once a mask; `test_weight_is_computed_at_each_use` computes it anew for each product."""

    def term(x: Tensor, w: Tensor, m: Tensor, more: More) -> Tensor:
        return _activated(PAIRS[pair](x, EXPRESSIONS[name](w, more), m, KINDS[kind].complement(m)))

    fuses_to_one(sum_of(term), KINDS[kind])


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize("kind", ["float", "logits"])
def test_weight_is_computed_at_each_use(kind: str, name: str) -> None:
    def term(x: Tensor, w: Tensor, m: Tensor, more: More) -> Tensor:
        gate = F.linear(x, EXPRESSIONS[name](w, more) * m)
        return F.silu(gate) * F.linear(x, EXPRESSIONS[name](w, more) * KINDS[kind].complement(m))

    fuses_to_one(sum_of(term), KINDS[kind])


class Symmetric(nn.Module):
    """A parametrization of one's own."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Masked(nn.Module):
    """A layer of modules: `nn.Linear` for the weight, dropouts, and masks of a kind."""

    def __init__(self, kind: Kind, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(H, D, bias=False, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)
        self.activation = nn.SiLU()
        given = tensors(kind, training=False)["masks"]
        if kind.trains:
            self.masks = nn.Parameter(given)
        else:
            self.register_buffer("masks", given)

    def forward(self, x: Tensor) -> Tensor:
        y: Any = 0
        for given in self.masks:
            m = self.kind.mask(given)
            gate = F.linear(x, self.linear.weight * m)
            value = F.linear(x, self.linear.weight * self.kind.complement(m))
            y = y + self.dropout(self.activation(self.dropout(gate))) * value
        return y


MODULES: dict[str, Callable[[Kind], nn.Module]] = {
    "Dropout(0.0)": Masked,
    "Dropout in eval": lambda kind: Masked(kind, 0.5).eval(),
    "parametrization": lambda kind: _parametrized(kind, Symmetric()),
    "weight_norm": lambda kind: _with_linear(kind, torch.nn.utils.parametrizations.weight_norm),
    "spectral_norm in eval": lambda kind: _with_linear(kind, torch.nn.utils.parametrizations.spectral_norm).eval(),
}


def _parametrized(kind: Kind, parametrization: nn.Module) -> nn.Module:
    return _with_linear(kind, lambda m: nn.utils.parametrize.register_parametrization(m, "weight", parametrization))


def _with_linear(kind: Kind, change: Callable[[nn.Module], Any]) -> nn.Module:
    model = Masked(kind)
    change(model.linear)
    return model


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("kind", MAIN_KINDS)
def test_module(kind: str, name: str) -> None:
    torch.manual_seed(0)
    model = MODULES[name](KINDS[kind])
    x = torch.randn(5, H, dtype=torch.float64)
    for training in (True, False):
        one = copy.deepcopy(model).requires_grad_(training)
        parameters = dict(one.named_parameters())
        capture = Capture(assume_binary=KINDS[kind].assume_binary)
        compiled = capture.compile(one)
        named = {"x": x.clone().requires_grad_(training)}
        assert_same(results(compiled, named, parameters), results(one, named, parameters), SAME)
        assert capture.reasons == []
        assert [site.n_masks for site in capture.report.fused] == [N_MASKS]


# --- The report of what is not fused ---------------------------------------------------------------------------------

# Programs of `(x, weight, bits, logits)` that may stay as they are, and a part of one of the lines of the report.
REPORTED: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor, Tensor], Any]]] = {
    "einsum of three operands": (
        "einsum",
        lambda x, w, b, l: (
            F.silu(torch.einsum("bh,dh,dh->bd", x, w, b[0].double()))
            * torch.einsum("bh,dh,dh->bd", x, w, 1 - b[0].double())
        ),
    ),
    "einsum of three operands and a stack": (
        "einsum",
        lambda x, w, b, l: (
            F.silu(torch.einsum("bh,dh,ndh->nbd", x, w, b.double()))
            * torch.einsum("bh,dh,ndh->nbd", x, w, (~b).double())
        ).sum(0),
    ),
    "tensordot": (
        "tensordot",
        lambda x, w, b, l: (
            F.silu(torch.tensordot(x, w * b[0], ([1], [1]))) * torch.tensordot(x, w * ~b[0], dims=([1], [1]))
        ),
    ),
    "inner": ("inner", lambda x, w, b, l: F.silu(torch.inner(x, w * b[0])) * torch.inner(x, w * ~b[0])),
    "products and sums": (
        "mul|sum|product",
        lambda x, w, b, l: F.silu((x[:, None] * (w * b[0])).sum(-1)) * (x[:, None] * (w * ~b[0])).sum(-1),
    ),
    "one_hot": ("nothing proves to be binary", lambda x, w, b, l: _two_hot(x, w, l)),
    "scatter": (
        "nothing proves to be binary",
        lambda x, w, b, l: _of_one(x, w, torch.zeros_like(w).scatter(1, l[0].topk(4, 1).indices, 1.0)),
    ),
    "scatter_": (
        "nothing proves to be binary",
        lambda x, w, b, l: _of_one(x, w, torch.zeros_like(w).scatter_(1, l[0].topk(4, 1).indices, 1.0)),
    ),
    "vmap over masks": (
        "vmap",
        lambda x, w, b, l: torch.vmap(lambda m: F.silu(F.linear(x, w * m)) * F.linear(x, w * ~m))(b).sum(0),
    ),
    "func.grad": ("functorch", lambda x, w, b, l: torch.func.grad(lambda x: gated(x, w, b[0], ~b[0]).sum())(x)),
    "a mask a row": ("not MGLU", lambda x, w, b, l: gated(x, w, b[0][:, :1], ~b[0][:, :1])),
    "a mask a column": ("not MGLU", lambda x, w, b, l: gated(x, w, b[0][0], ~b[0][0])),
    "a mask a feature": ("not MGLU", lambda x, w, b, l: _of_features(F.linear(x, w), b[0][0])),
    "a mask a feature, by 1 - m": ("not MGLU", lambda x, w, b, l: _of_features(F.linear(x, w), b[0][0].double())),
    "masks of features, trained": (
        "not MGLU",
        lambda x, w, b, l: sum(_of_features(F.linear(x, w), straight_through(l[i, 0])) for i in range(2)),
    ),
    "masks of features, of one product each": (
        "not MGLU",
        lambda x, w, b, l: F.silu(F.linear(x, w) * b[0][0]) * (F.linear(x, w) * ~b[0][0]),
    ),
    "another parameter": ("l[0]|l_logits|logits", lambda x, w, b, l: _of_two(x, w, l[0], b[0])),
    "another norm": ("normalize", lambda x, w, b, l: _of_two(x, F.normalize(w), F.normalize(w, p=1.0), b[0])),
    "another scale": ("l_logits", lambda x, w, b, l: _of_two(x, w * l[0, :, :1], w * l[1, :, :1], b[0])),
    "a detached weight": ("detach", lambda x, w, b, l: _of_two(x, w, w.detach(), b[0])),
    "a weight written to": ("writ|mul_", lambda x, w, b, l: _written_between(x, w, b[0])),
    "a tanh of the value": (
        "tanh|value",
        lambda x, w, b, l: F.silu(F.linear(x, w * b[0])) * F.linear(x, w * ~b[0]).tanh(),
    ),
    "a bias on the gate": (
        "bias",
        lambda x, w, b, l: F.silu(F.linear(x, w * b[0], l[0, 0])) * F.linear(x, w * ~b[0]),
    ),
    "a bias added to the gate": (
        "bias|add",
        lambda x, w, b, l: F.silu(F.linear(x, w * b[0]) + l[0, 0]) * F.linear(x, w * ~b[0]),
    ),
    "dropout": ("dropout", lambda x, w, b, l: F.dropout(F.linear(x, w * b[0]), 1.0) * F.linear(x, w * ~b[0])),
    "the product is a sum": ("product|add", lambda x, w, b, l: F.silu(F.linear(x, w * b[0])) + F.linear(x, w * ~b[0])),
}


def _of_one(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return gated(x, w, m, 1 - m)


def _two_hot(x: Tensor, w: Tensor, logits: Tensor) -> Tensor:
    return _of_one(x, w, F.one_hot(logits[0].argmax(-1), H).to(w.dtype))


def _of_features(h: Tensor, m: Tensor) -> Tensor:
    complement = ~m if m.dtype is torch.bool else 1 - m
    return F.silu(h * m) * (h * complement)


def _of_two(x: Tensor, w: Tensor, other: Tensor, m: Tensor) -> Tensor:
    return F.silu(F.linear(x, w * m)) * F.linear(x, other * ~m)


def _written_between(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    w = w.clone()
    gate = F.linear(x, w * m)
    w.mul_(2)
    return F.silu(gate) * F.linear(x, w * ~m)


def reported_tensors(*, training: bool) -> dict[str, Tensor]:
    named = tensors(KINDS["logits"], training=training)
    logits = named["masks"]
    return {"x": named["x"], "weight": named["weight"], "bits": logits.detach() > 0, "logits": logits}


def assert_mentions(capture: Capture, parts: str) -> None:
    """One of the reasons mentions one of `a|b`, by case."""
    assert any(part in reason for part in parts.split("|") for reason in capture.reasons), capture.reasons


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", REPORTED)
def test_what_is_not_fused_is_reported(name: str, training: bool) -> None:
    part, function = REPORTED[name]

    def program(x: Tensor, weight: Tensor, bits: Tensor, logits: Tensor) -> Any:
        return function(x, weight, bits, logits)

    capture = compare(program, lambda: reported_tensors(training=training), SAME)
    if not capture.report.fused:  # a rarer form may fuse, and then there is nothing to say
        assert_mentions(capture, part)


@pytest.mark.parametrize("name", ["another parameter", "another norm", "another scale", "a mask a feature", "dropout"])
def test_what_is_no_layer_is_not_fused(name: str) -> None:
    """The leave that the test above gives to fuse is not for these."""
    _, function = REPORTED[name]

    def program(x: Tensor, weight: Tensor, bits: Tensor, logits: Tensor) -> Any:
        return function(x, weight, bits, logits)

    assert compare(program, lambda: reported_tensors(training=False), SAME).report.fused == []


SEVERAL: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "two activations": lambda x, w, b: (
        F.gelu(F.linear(x, w * b[0])) * F.linear(x, w * ~b[0]) + gated(x, w, b[1], ~b[1])
    ),
    "two inputs": lambda x, w, b: gated(x, w, b[0], ~b[0]) + gated(x + 1, w, b[1], ~b[1]),
    "a part is used": lambda x, w, b: _with_its_part(x, w, b),
}


def _with_its_part(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    first = gated(x, w, b[0], ~b[0])
    return first + gated(x, w, b[1], ~b[1]), first


@pytest.mark.parametrize("name", SEVERAL)
def test_a_sum_that_becomes_several_operators_says_so(name: str) -> None:
    """Each reads the whole weight, which the user may not expect of one sum."""

    def program(x: Tensor, weight: Tensor, bits: Tensor) -> Any:
        return SEVERAL[name](x, weight, bits)

    def make() -> dict[str, Tensor]:
        named = reported_tensors(training=False)
        return {key: named[key] for key in ("x", "weight", "bits")}

    capture = compare(program, make, SAME)
    assert len(capture.report.fused) == 2
    assert "2 operators" in str(capture.report)
