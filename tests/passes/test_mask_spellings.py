"""Each spelling of masks, complements and masked weights becomes one operator, with each kind of mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lookalikes
import pytest
import torch
import torch.nn.functional as F
from budgets import BUDGET, NAIVE_FACTOR, relative_error
from families import family, sample
from graphs import Capture, compare, results
from kinds import KINDS, MODES, N_MASKS, PAIRS, SAME, D, Kind, More, activated, fuses_to_one, sum_of, tensors
from spellings import (
    COMPLEMENTS,
    COMPLEMENTS_OF,
    FIXED,
    MASKED_WEIGHTS,
    MASKS,
    TRAINED,
    filled,
    gated,
    straight_through,
    takes,
    term_of_products,
    term_of_total,
    term_of_weights,
)
from torch import Tensor


def kinds_that_take(table: dict[str, tuple[str, Any]]) -> list[Any]:
    """Each entry of a table with each kind of mask that it takes, in both modes."""

    def fits(name: str, kind: str, mode: str) -> bool:
        one = KINDS[kind]
        return takes(table[name][0], is_bool=one.is_bool, is_integer=one.is_integer, trains=one.trains)

    return family(table, KINDS, MODES, fits=fits)


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
        return activated(PAIRS[name](x, w, m, KINDS[kind].complement(m)))

    fuses_to_one(sum_of(term), KINDS[kind], mode)


# --- Masks of logits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mode", "name"), [*family(["logits"], MODES, TRAINED), *family(["bool"], MODES, FIXED)]
)
def test_mask_of_a_stack(kind: str, mode: str, name: str) -> None:
    """Spellings of a mask, which receive the whole stack of logits or of masks."""

    def program(x: Tensor, weight: Tensor, masks: Tensor, **_: Tensor) -> Tensor:
        made = [MASKS[kind][name](masks, i) for i in range(N_MASKS)]
        return sum(gated(x, weight, m, KINDS[kind].complement(m)) for m in made)

    _fuses_to_one(program, kind, mode)


@pytest.mark.parametrize("mode", MODES)
def test_value_whose_weight_is_the_sum_of_the_weight_and_a_negated_product(mode: str) -> None:
    def program(x: Tensor, weight: Tensor, masks: Tensor, **_: Tensor) -> Tensor:
        gates = [weight * straight_through(logits) for logits in masks]
        return sum(term_of_weights(x, gate, weight + -gate) for gate in gates)

    _fuses_to_one(program, "logits", mode)


def _fuses_to_one(program: Callable[..., Any], kind: str, mode: str) -> None:
    training = mode == "training"
    capture = compare(program, functools.partial(tensors, KINDS[kind], training=training), SAME)
    assert capture.reasons == []
    operator = "forward_ste" if training and KINDS[kind].trains else "forward"
    assert [site.operator for site in capture.report.fused] == [operator]


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

    def program(x: Tensor, weight: Tensor, masks: Tensor, dtype: torch.dtype | None = torch.bfloat16) -> Tensor:
        made = [TRAINED[name](masks, i) for i in range(N_MASKS)]
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            return sum(gated(x, weight, m, 1 - m) for m in made)

    for training in (True, False):
        exact = {k: t for k, t in tensors(KINDS["logits"], training=training).items() if k in ("x", "weight", "masks")}
        named = {k: t.detach().float().requires_grad_(training) for k, t in exact.items()}
        oracle = results(functools.partial(program, dtype=None), exact)
        naive, capture = results(program, named), Capture()
        fused = results(capture.compile(program), named)
        assert capture.reasons == []
        assert [(site.dtype, site.n_masks) for site in capture.report.fused] == [("bfloat16", N_MASKS)]
        for key, wanted in oracle.items():
            assert fused[key].dtype == naive[key].dtype
            bar = max(BUDGET[torch.bfloat16], NAIVE_FACTOR * relative_error(naive[key], wanted))
            assert relative_error(fused[key], wanted) <= bar, key


# --- Real tensors that are used as masks -----------------------------------------------------------------------------

Terms = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]
"""A function `(x, weight, masks, other, bits)` of matrices and of stacks of three real and three bool masks."""


def _of_stacks(x: Tensor, gate_weights: Tensor, value_weights: Tensor) -> Tensor:
    gates, values = (torch.einsum("bh,ndh->nbd", x, weights) for weights in (gate_weights, value_weights))
    return term_of_products(gates, values).sum(0)


def _of_both(x: Tensor, weights: Tensor) -> Tensor:
    gates, values = torch.einsum("bh,ndh->nbd", x, weights).chunk(2)
    return term_of_products(gates, values).sum(0)


# More functions of a real tensor that equal its complement at 0 and 1.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = COMPLEMENTS_OF["float"] | {
    "1 - m / 1": lambda m: 1 - m / 1,
    "1 - m ** 2": lambda m: 1 - m**2,
    "1 - m.square()": lambda m: 1 - m.square(),
    "1 - m.detach()": lambda m: 1 - m.detach(),
    "1 - m.clone()": lambda m: 1 - m.clone(),
    "(m - 1).abs()": lambda m: (m - 1).abs(),
    "sub of alpha": lambda m: -torch.sub(m, 0.5, alpha=2),
    "div of a rounding": lambda m: 1 - torch.div(m, 1, rounding_mode="floor"),
    "m.int() ^ 1": lambda m: m.int() ^ 1,
    "~(m >= 1)": lambda m: ~(m >= 1),
    "casts": lambda m: (1 - m.float()).double(),
}

# Name -> how many operators it becomes under `assume_binary`, and the program.
USED_AS_MASKS: dict[str, tuple[int, Terms]] = {
    # One mask: the weight is multiplied by two functions of it
    "of a product": (1, lambda x, w, m, o, b: term_of_weights(x, w * (m[0] * m[1]), w * (1 - m[0] * m[1]))),
    "of a copy of the weight": (1, lambda x, w, m, o, b: term_of_weights(x, w.clone() * m[0], w * (1 - m[0]))),
    "where": (1, lambda x, w, m, o, b: term_of_weights(x, torch.where(m[0] > 0.5, w, 0), w * (1 - m[0]))),
    "masked_fill": (1, lambda x, w, m, o, b: term_of_weights(x, w.masked_fill(m[0] < 0.5, 0), w * (1 - m[0]))),
    "index_put": (1, lambda x, w, m, o, b: term_of_weights(x, filled(w.clone(), m[0] < 0.5), w * (1 - m[0]))),
    # The second function compares 1 - m
    "compared": (1, lambda x, w, m, o, b: _compared(x, w, m[0], 1 - m[0])),
    "compared by rsub": (1, lambda x, w, m, o, b: _compared(x, w, m[0], torch.rsub(m[0], 1))),
    "cast to bool": (1, lambda x, w, m, o, b: term_of_weights(x, w * (m[0] == 1), w * (1 - m[0]).bool())),
    # One function, and the weight without a mask
    "-(w * m) + w": (1, lambda x, w, m, o, b: term_of_weights(x, w * m[0], -(w * m[0]) + w)),
    "w + -(m * w)": (1, lambda x, w, m, o, b: term_of_weights(x, w * m[0], w + -(m[0] * w))),
    "copy - w * m": (1, lambda x, w, m, o, b: term_of_weights(x, w * m[0], w.clone() - w * m[0])),
    "total by matmul": (1, lambda x, w, m, o, b: term_of_total(x @ w, x @ (w * m[0]))),
    "total by a transpose": (1, lambda x, w, m, o, b: term_of_total(x @ w.t(), F.linear(x, w * m[0]))),
    "total by inner": (1, lambda x, w, m, o, b: term_of_total(torch.inner(x, w), torch.inner(x, w * m[0]))),
    "total by addmm": (
        1,
        lambda x, w, m, o, b: term_of_total(torch.addmm(o.new_zeros(D), x, w.t()), F.linear(x, w * m[0])),
    ),
    "total by einsum": (1, lambda x, w, m, o, b: term_of_total(torch.einsum("bh,dh->bd", x, w), F.linear(x, w * m[0]))),
    "the unmasked weight is no mask of its mask": (
        1,
        lambda x, w, m, o, b: (term_of_total(F.linear(x, w), F.linear(x, w * m[0])), F.linear(x, (2 * w) * m[0])),
    ),
    "the branches of a where are no masks": (1, lambda x, w, m, o, b: _with_branches(x, w, o, b[0])),
    # Stacks
    "a stack": (1, lambda x, w, m, o, b: _of_stacks(x, w * m, w * (1 - m))),
    "a stack, and the total": (
        1,
        lambda x, w, m, o, b: term_of_total(F.linear(x, w), torch.einsum("bh,ndh->nbd", x, w * m)).sum(0),
    ),
    "torch.stack of masks": (1, lambda x, w, m, o, b: _of_both(x, w * torch.stack([m[0], 1 - m[0]]))),
    "torch.cat of stacks": (1, lambda x, w, m, o, b: _of_both(x, w * torch.cat([m, 1 - m]))),
    # Several weights
    "stacked experts with one mask": (
        2,
        lambda x, w, m, o, b: tuple(term_of_weights(x, e * m[0], e * (1 - m[0])) for e in torch.stack([w, o]).tanh()),
    ),
    "a tensor that masks only one of two weights": (
        2,
        lambda x, w, m, o, b: (
            term_of_weights(x, w * m[0], w * (1 - m[0])),
            term_of_weights(x, (o * m[0]) * b[0], (o * m[0]) * ~b[0]),
        ),
    ),
    "a number of a per-channel mask": (1, lambda x, w, m, o, b: _with_a_number(x, w, m[0, 0], b[0])),
    "w and 1 - w with one bool mask": (
        2,
        lambda x, w, m, o, b: (
            term_of_weights(x, w * b[0], w * ~b[0]),
            term_of_weights(x, (1 - w) * b[0], (1 - w) * ~b[0]),
        ),
    ),
}


def _with_branches(x: Tensor, w: Tensor, other: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A layer with the weight `w * other`, and weights that are chosen from w and functions of the other."""
    chosen = torch.where(b, w, other).tanh() + torch.where(b, w, 1 - other)
    return term_of_weights(x, (w * other) * b, (w * other) * ~b), chosen


def _with_a_number(x: Tensor, w: Tensor, m: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A layer with a per-channel mask, which is refused, and one whose weight is scaled by an element of that mask."""
    scaled = w * m[1]
    return term_of_weights(x, w * m, w * (1 - m)), term_of_weights(x, scaled * b, scaled * ~b)


def _assuming(terms: Terms, masks: Callable[[dict[str, Tensor]], Tensor]) -> Capture:
    def program(x: Tensor, weight: Tensor, masks: Tensor, other: Tensor, bits: Tensor) -> Any:
        return terms(x, weight, masks, other, bits)

    def make() -> dict[str, Tensor]:
        named = lookalikes.tensors(("x", "weight"))
        return {"masks": masks(named), **{name: named[name] for name in ("x", "weight", "other", "bits")}}

    return compare(program, make, SAME, assume_binary=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_show_a_real_tensor_to_be_used_as_a_mask(name: str) -> None:
    capture = _assuming(
        lambda x, w, m, o, b: term_of_weights(x, w * m[0], w * FUNCTIONS[name](m[0])),
        lambda named: named["bits"].to(torch.float64),
    )
    assert [len(capture.report.fused), capture.reasons] == [1, []]


@pytest.mark.parametrize("name", USED_AS_MASKS)
def test_a_real_tensor_that_is_used_as_a_mask(name: str) -> None:
    count, terms = USED_AS_MASKS[name]
    capture = _assuming(terms, lambda named: named["bits"].to(torch.float64))
    assert len(capture.report.fused) == count
    assert len(capture.reasons) == ("per-channel" in name)


# Programs whose real tensors are logits and not masks, and the reason in the report.
NOT_USED_AS_MASKS: dict[str, tuple[str, Terms]] = {
    "two slices": ("two different masks", lambda x, w, l, o, b: term_of_weights(x, w * l[0], w * l[1])),
    "two comparisons": (
        "two different masks",
        lambda x, w, l, o, b: term_of_weights(x, w * (l[0] > 0), w * (l[0] < 0.5)),
    ),
    "3 - l": ("two different masks", lambda x, w, l, o, b: _compared(x, w, l[0], 3 - l[0], 2.5)),
    "0 - l": ("two different masks", lambda x, w, l, o, b: _compared(x, w, l[0], 0 - l[0], -0.5)),
    "l + 1": ("two different masks", lambda x, w, l, o, b: term_of_weights(x, w * (l[0] > 0), w * ((l[0] + 1) < 1.5))),
    "l * 2": ("two different masks", lambda x, w, l, o, b: term_of_weights(x, w * (l[0] > 0), w * ((l[0] * 2) < 1))),
    "1 - a comparison": (
        "two different masks",
        lambda x, w, l, o, b: term_of_weights(x, w * (l[0] > 1), w * (1 - 1.0 * (l[0] > 0))),
    ),
    "a sigmoid": ("two different masks", lambda x, w, l, o, b: _compared(x, w, l[0].sigmoid(), 1 - l[0].sigmoid())),
    "a row": ("per-channel", lambda x, w, l, o, b: term_of_weights(x, w * l[0, 0], w * (1 - l[0, 0]))),
    "a column": ("per-channel", lambda x, w, l, o, b: term_of_weights(x, w * l[0, :, :1], w * (1 - l[0, :, :1]))),
    "slices of one stack": ("not recognised", lambda x, w, l, o, b: term_of_weights(x, l[1] * l[0], l[1] * (1 - l[0]))),
}


def _compared(x: Tensor, w: Tensor, m: Tensor, complement: Tensor, bound: float = 0.5) -> Tensor:
    return term_of_weights(x, w * (m > 0.5), w * (complement > bound))


@pytest.mark.parametrize("name", NOT_USED_AS_MASKS)
def test_a_real_tensor_that_is_not_used_as_a_mask(name: str) -> None:
    reason, terms = NOT_USED_AS_MASKS[name]
    capture = _assuming(terms, lambda named: named["logits"])
    assert capture.report.fused == []
    assert [reason in text for text in capture.reasons] == [True]
