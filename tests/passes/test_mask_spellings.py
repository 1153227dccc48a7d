"""Every spelling of masks, complements and masked weights becomes one operator, with every kind of mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.budgets import BUDGET, NAIVE_FACTOR, relative_error
from tests.support.families import family, sample
from tests.support.programs import lookalikes
from tests.support.programs.graphs import Capture, compare, results
from tests.support.programs.kinds import (
    KINDS,
    MODES,
    N_MASKS,
    PAIRS,
    SAME,
    More,
    activated,
    fuses_to_one,
    sum_of,
    tensors,
)
from tests.support.programs.spellings import (
    COMPLEMENTS,
    FIXED,
    MASKED_WEIGHTS,
    TRAINED,
    from_source,
    gated,
    takes,
    term_of_products,
)


def kinds_that_take(table: dict[str, tuple[str, Any]]) -> list[Any]:
    """Test cases: each entry of a table with each kind of mask that it supports, in both modes."""

    def fits(name: str, kind: str, mode: str) -> bool:
        mask_kind = KINDS[kind]
        return takes(
            table[name][0], is_bool=mask_kind.is_bool, is_integer=mask_kind.is_integer, trains=mask_kind.trains
        )

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
    """Each spelling of a mask receives the whole stack of logits or masks."""

    def program(x: Tensor, weight: Tensor, masks: Tensor, **_: Tensor) -> Tensor:
        made = [{"logits": TRAINED, "bool": FIXED}[kind][name](masks, i) for i in range(N_MASKS)]
        return sum(gated(x, weight, m, KINDS[kind].complement(m)) for m in made)

    training = mode == "training"
    capture = compare(program, functools.partial(tensors, KINDS[kind], training=training), SAME)
    assert capture.reasons == []
    operator = "forward_ste" if training and KINDS[kind].trains else "forward"
    assert [site.operator for site in capture.report.fused] == [operator]


@pytest.mark.parametrize(
    "name", sample(["straight_through", "no_grad block", "decorated", ".data", "autograd.Function"], every=5)
)
def test_masks_made_before_autocast(name: str) -> None:
    """The masks are float32, and the products bfloat16."""

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


# --- Float tensors that are used as masks ----------------------------------------------------------------------------

# Functions of a float tensor m that are 1 where m is 0, and 0 where m is 1.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: complement for name, (masks, complement) in COMPLEMENTS.items() if masks in ("any", "real", "fixed")},
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
    "casts to integers": lambda m: 1 - m.byte().short(),
}

# Programs of x, w, float masks m, another matrix o and bool masks b, by the number of operators that they become under
# `assume_binary`.
USED_AS_MASKS: dict[int, tuple[str, ...]] = {
    1: (
        # Two functions of one mask multiply the weight
        "of_weights(x, w * (m[0] * m[1]), w * (1 - m[0] * m[1]))",
        "of_weights(x, w.clone() * m[0], w * (1 - m[0]))",
        "of_weights(x, where(m[0] > 0.5, w, 0), w * (1 - m[0]))",
        "of_weights(x, w.masked_fill(m[0] < 0.5, 0), w * (1 - m[0]))",
        "of_weights(x, filled(w.clone(), m[0] < 0.5), w * (1 - m[0]))",
        # The second function compares 1 - m
        "of_weights(x, w * (m[0] > 0.5), w * (1 - m[0] > 0.5))",
        "of_weights(x, w * (m[0] > 0.5), w * (torch.rsub(m[0], 1) > 0.5))",
        "of_weights(x, w * (m[0] == 1), w * (1 - m[0]).bool())",
        # One function of a mask multiplies the weight, and the unmasked weight is used too
        "of_weights(x, w * m[0], -(w * m[0]) + w)",
        "of_weights(x, w * m[0], w + -(m[0] * w))",
        "of_weights(x, w * m[0], w.clone() - w * m[0])",
        "of_total(x @ w, x @ (w * m[0]))",
        "of_total(x @ w.t(), linear(x, w * m[0]))",
        "of_total(torch.inner(x, w), torch.inner(x, w * m[0]))",
        "of_total(torch.addmm(o.new_zeros(8), x, w.t()), linear(x, w * m[0]))",
        "of_total(einsum('bh,dh->bd', x, w), linear(x, w * m[0]))",
        # In `w * m`, the pass must not take w for the mask of a weight m. In `where(b, w, o)`, it must not take w for
        # the mask of a weight o
        "(of_total(linear(x, w), linear(x, w * m[0])), linear(x, (2 * w) * m[0]))",
        "chosen = where(b[0], w, o).tanh() + where(b[0], w, 1 - o); (gated(x, w * o, b[0], ~b[0]), chosen)",
        # Stacks
        "layer_of_stack(einsum('bh,ndh->nbd', x, cat([w * m, w * (1 - m)])))",
        "of_total(linear(x, w), einsum('bh,ndh->nbd', x, w * m)).sum(0)",
        "layer_of_stack(einsum('bh,ndh->nbd', x, w * stack([m[0], 1 - m[0]])))",
        "layer_of_stack(einsum('bh,ndh->nbd', x, w * cat([m, 1 - m])))",
        # A refused layer with a per-channel mask, and a layer whose weight is scaled by an element of that mask
        PER_CHANNEL_MASK := "(gated(x, w, m[0, 0], 1 - m[0, 0]), gated(x, w * m[0, 0, 1], b[0], ~b[0]))",
    ),
    2: (
        "tuple(gated(x, e, m[0], 1 - m[0]) for e in stack([w, o]).tanh())",
        "(gated(x, w, m[0], 1 - m[0]), gated(x, o * m[0], b[0], ~b[0]))",
        "(gated(x, w, b[0], ~b[0]), gated(x, 1 - w, b[0], ~b[0]))",
    ),
}

# Programs of x, w and logits m, which are not used as masks, by the reason in the report.
NOT_USED_AS_MASKS: dict[str, tuple[str, ...]] = {
    "two different masks": (
        "of_weights(x, w * m[0], w * m[1])",
        "of_weights(x, w * (m[0] > 0), w * (m[0] < 0.5))",
        "of_weights(x, w * (m[0] > 0.5), w * (3 - m[0] > 2.5))",
        "of_weights(x, w * (m[0] > 0.5), w * (0 - m[0] > -0.5))",
        "of_weights(x, w * (m[0] > 0), w * (m[0] + 1 < 1.5))",
        "of_weights(x, w * (m[0] > 0), w * (m[0] * 2 < 1))",
        "of_weights(x, w * (m[0] > 1), w * (1 - 1.0 * (m[0] > 0)))",
        "of_weights(x, w * (m[0].sigmoid() > 0.5), w * (1 - m[0].sigmoid() > 0.5))",
    ),
    "per-channel": ("gated(x, w, m[0, 0])", "gated(x, w, m[0, :, :1])"),
    "not recognised": ("of_weights(x, m[1] * m[0], m[1] * (1 - m[0]))",),
}


def layer_of_stack(products: Tensor) -> Tensor:
    """The result of a layer, from the stack of all gates followed by all values."""
    return term_of_products(*products.chunk(2)).sum(0)


def _assuming(source: str, masks: Callable[[dict[str, Tensor]], Tensor]) -> Capture:
    program = from_source("x, w, m, o, b", source, globals())

    def make() -> dict[str, Tensor]:
        named = lookalikes.tensors(("x", "weight"))
        return {"x": named["x"], "w": named["weight"], "m": masks(named), "o": named["other"], "b": named["bits"]}

    return compare(lambda x, w, m, o, b: program(x, w, m, o, b), make, SAME, assume_binary=True)


def each(table: dict[Any, tuple[str, ...]]) -> list[tuple[Any, str]]:
    return [(key, source) for key, sources in table.items() for source in sources]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_show_a_float_tensor_to_be_used_as_a_mask(name: str) -> None:
    source = f"of_weights(x, w * m[0], w * FUNCTIONS[{name!r}](m[0]))"
    capture = _assuming(source, lambda named: named["bits"].double())
    assert [len(capture.report.fused), capture.reasons] == [1, []]


@pytest.mark.parametrize(("count", "source"), each(USED_AS_MASKS))
def test_a_float_tensor_that_is_used_as_a_mask(count: int, source: str) -> None:
    capture = _assuming(source, lambda named: named["bits"].double())
    assert len(capture.report.fused) == count
    assert len(capture.reasons) == (source == PER_CHANNEL_MASK)


@pytest.mark.parametrize(("reason", "source"), each(NOT_USED_AS_MASKS))
def test_a_float_tensor_that_is_not_used_as_a_mask(reason: str, source: str) -> None:
    capture = _assuming(source, lambda named: named["logits"])
    assert capture.report.fused == []
    assert [reason in text for text in capture.reasons] == [True]
