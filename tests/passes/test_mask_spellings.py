"""Each spelling of masks, complements and masked weights becomes one operator, with each kind of mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budgets import BUDGET, NAIVE_FACTOR, relative_error
from families import family, sample
from graphs import Capture, compare, results
from kinds import (
    KINDS,
    MODES,
    N_MASKS,
    PAIRS,
    SAME,
    Kind,
    More,
    fuses_to_one,
    sum_of,
    tensors,
)
from spellings import TRAINED, gated, straight_through
from torch import Tensor

# Name -> the kinds of masks that the spelling takes (`_takes`), and the complement.
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


# Name -> the kinds of masks that the spelling takes, and the masked weight.
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


def _takes(kind: Kind, kinds: str) -> bool:
    return {
        "any": True,
        "real": not kind.is_bool,
        "bool": kind.is_bool,
        "integer": kind.is_integer,
        "fixed bits": kind.is_bool or kind.is_integer,
        "fixed": not kind.trains,
    }[kinds]


def kinds_that_take(table: dict[str, tuple[str, Any]]) -> list[Any]:
    """Each entry of a table with each kind of mask that it takes, in both modes."""
    return family(table, KINDS, MODES, fits=lambda name, kind, _: _takes(KINDS[kind], table[name][0]))


@pytest.mark.parametrize(("name", "kind", "mode"), kinds_that_take(COMPLEMENTS))
def test_complement(name: str, kind: str, mode: str) -> None:
    complement = COMPLEMENTS[name][1]
    fuses_to_one(sum_of(lambda x, w, m, _: gated(x, w, m, complement(m))), KINDS[kind], mode)


@pytest.mark.parametrize(("name", "kind", "mode"), kinds_that_take(MASKED_WEIGHTS))
def test_masked_weight(name: str, kind: str, mode: str) -> None:
    masked, complement = MASKED_WEIGHTS[name][1], KINDS[kind].complement
    fuses_to_one(
        sum_of(lambda x, w, m, _: F.silu(F.linear(x, masked(w, m))) * F.linear(x, masked(w, complement(m)))),
        KINDS[kind],
        mode,
    )


@pytest.mark.parametrize(("name", "kind", "mode"), family(PAIRS, reversed(KINDS), MODES))
def test_gate_and_value(name: str, kind: str, mode: str) -> None:
    def term(x: Tensor, w: Tensor, m: Tensor, _: More) -> Tensor:
        gate, value = PAIRS[name](x, w, m, KINDS[kind].complement(m))
        return F.silu(gate) * value

    fuses_to_one(sum_of(term), KINDS[kind], mode)


# --- Masks of logits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "name"), family(MODES, TRAINED))
def test_mask_of_logits(mode: str, name: str) -> None:
    """Straight-through spellings, which all receive the whole stack of logits."""

    def program(x: Tensor, weight: Tensor, masks: Tensor, **_: Tensor) -> Tensor:
        y: Any = 0
        for i in range(N_MASKS):
            m = TRAINED[name](masks, i)
            y = y + gated(x, weight, m, 1 - m)
        return y

    training = mode == "training"
    capture = compare(program, functools.partial(tensors, KINDS["logits"], training=training), SAME)
    assert capture.reasons == []
    assert [site.route for site in capture.report.fused] == ["forward_ste" if training else "forward"]


# Name -> whether the masks are trained, and the factors of gate and value from the logits of one mask.
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


@pytest.mark.parametrize(("name", "mode"), family(PAIRS_OF_LOGITS, MODES))
def test_pair_of_masks_of_logits(name: str, mode: str) -> None:
    trains, pair = PAIRS_OF_LOGITS[name]
    kind = Kind(lambda l: l, trains=trains)
    fuses_to_one(sum_of(lambda x, w, logits, _: gated(x, w, *pair(logits))), kind, mode)


@pytest.mark.parametrize(
    "name", sample(["straight_through", "no_grad block", "decorated", ".data", "autograd.Function"], every=5)
)
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
