"""Every part of `spellings` in a program of its own, and some programs of several uncommon parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budgets import BUDGET, relative_error
from families import family
from graphs import Capture, assert_same, masked_products, packings, results
from mglu_programs import Program, StackProgram, layer_tensors, program_tensors
from random_programs import Case, run_case
from spellings import (
    BOOL_COMPLEMENTS,
    BOOL_PRODUCTS,
    COMPLEMENTS,
    COMPLEMENTS_OF,
    FIXED,
    HAND_WRITTEN,
    JOINTS,
    MASKS,
    PRODUCTS,
    PROJECTIONS,
    SCALES,
    STACK_PRODUCTS,
    STACK_PROJECTIONS,
    SUMS,
    TRAINED,
    WEIGHTS,
    WRONG_JOINTS,
    gated,
    straight_through,
)
from torch import Tensor

# The fused and the unfused layer each have rounding errors within the budget of their dtype.
SAME = 10 * BUDGET[torch.float64]


SPELLINGS = [
    *(Program(mask=name) for name in TRAINED),
    *(Program(complement=name) for name in COMPLEMENTS),
    *(Program(product=name) for name in PRODUCTS),
    *(Program(projection=name) for name in PROJECTIONS),
    *(Program(total=name) for name in SUMS),
    *(Program(value=name) for name in ("w - w * m", "t - gate")),
    Program(value_first=True),
    Program(swapped=True),
    *(Program(mask=name, complement="~m", kind="bool") for name in FIXED),
    *(Program(mask="slice", complement=name, kind="bool") for name in BOOL_COMPLEMENTS),
    *(Program(mask="slice", complement="~m", product=name, kind="bool") for name in BOOL_PRODUCTS),
    Program(mask="slice", complement="~m", value="t - gate", kind="bool"),
    Program(mask="slice", complement="~m", value="w - w * m", kind="bool"),
    Program(mask="slice", complement="m == 0", swapped=True, kind="bool"),
]
TRANSPOSED = [
    Program(mask="slice", complement="~m", product=name, projection="x @ w.T", kind="bool") for name in BOOL_PRODUCTS
]
OTHERS = [
    *(Program(weight=name) for name in WEIGHTS),
    *(Program(hand_written=name) for name in HAND_WRITTEN),
    *(Program(scale=name) for name in SCALES),
    *(Program(joint=name) for name in JOINTS if name not in WRONG_JOINTS),
    *(
        Program(mask=mask, complement=complement, kind=kind)
        for kind in ("float", "uint8")
        for mask, complement in itertools.zip_longest(MASKS[kind], COMPLEMENTS_OF[kind], fillvalue="slice")
    ),
    *(StackProgram(product=name) for name in STACK_PRODUCTS),
    *(StackProgram(projection=name) for name in STACK_PROJECTIONS),
]
"""Programs whose graphs may keep a product, or whose masks are given as numbers."""
INTEGERS = [Program(mask="slice", complement=name, kind="int64") for name in COMPLEMENTS_OF["int64"]]


def spelling_name(program: Program | StackProgram) -> str:
    """The parts that differ from the default program."""
    default = type(program)()
    return ", ".join(str(v) for k, v in vars(program).items() if v != getattr(default, k)) or "default"


def spellings(programs: Iterable[Any], *, is_long: bool = False) -> list[Any]:
    """The parameters of different programs; every second one is quick, or none if `is_long`."""
    different = list(dict.fromkeys(programs))
    quick = () if is_long else different[::2]
    return [
        pytest.param(one, id=spelling_name(one), marks=() if one in quick else pytest.mark.long) for one in different
    ]


@pytest.mark.parametrize("program", [*spellings(SPELLINGS), *spellings(TRANSPOSED, is_long=True)])
def test_spelling(program: Program) -> None:
    capture = Capture(strict=True)
    found = results(capture.compile(program), program_tensors(program))
    assert_same(found, results(program, program_tensors(program)), SAME)
    counts = capture.calls
    assert masked_products(counts) == counts["silu"] == 0
    assert counts["mglu.forward_ste"] == program.trained
    assert packings(counts) == counts["mglu.forward"] == (not program.trained)
    assert len(capture.report.fused) == 1
    assert capture.report.missed == []


@pytest.mark.parametrize("program", [*spellings(OTHERS), *spellings(INTEGERS, is_long=True)])
def test_spelling_of_other_parts(program: Program | StackProgram) -> None:
    assert run_case(Case(program, n_masks=2, with_gradient=("x", "weight", "masks"))) == "fused"


def test_hand_written_silu_and_inplace_activation() -> None:
    def by_hand(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        m = straight_through(logits[0])
        gate = F.linear(x, weight * m)
        return gate * torch.sigmoid(gate) * F.linear(x, weight * (1 - m))

    def in_place(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        m = straight_through(logits[0])
        gate, value = F.linear(x, weight * m), F.linear(x, weight * (1 - m))
        return F.silu(gate, inplace=True) * value

    for layer in (by_hand, in_place):
        capture = Capture(strict=True)
        found = results(capture.compile(layer), layer_tensors())
        assert_same(found, results(layer, layer_tensors()), SAME)
        assert capture.calls["mglu.forward_ste"] == 1
        assert [site.activation for site in capture.report.fused] == ["silu"]


MASK_WEIGHTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "columns": lambda mask_weight, i: mask_weight[..., i : i + 1],
    "columns in another order": lambda mask_weight, i: mask_weight[..., (i + 1) % 3 : (i + 1) % 3 + 1],
    "one column": lambda mask_weight, i: mask_weight[..., :1],
    "tensors of their own": lambda mask_weight, i: mask_weight.clone()[..., i : i + 1].exp(),
    "unsqueezed": lambda mask_weight, i: mask_weight[..., i].unsqueeze(-1),
}


@pytest.mark.parametrize("way", list(MASK_WEIGHTS))
def test_mask_weights(way: str) -> None:
    def layer(x: Tensor, weight: Tensor, logits: Tensor, mask_weight: Tensor) -> Tensor:
        weights = [MASK_WEIGHTS[way](mask_weight, i) for i in range(3)]
        return sum(r * gated(x, weight, straight_through(one)) for r, one in zip(weights, logits, strict=True))

    def named() -> dict[str, Tensor]:
        return layer_tensors(mask_weight=torch.linspace(-1, 2, 15, dtype=torch.float64).view(5, 3).requires_grad_())

    capture = Capture(strict=True)
    assert_same(results(capture.compile(layer), named()), results(layer, named()), SAME)
    assert capture.calls["mglu.forward_ste"] == 1
    assert masked_products(capture.calls) == 0
    assert capture.calls["cat"] == (way in ("one column", "tensors of their own")), (
        "the operator reads `mask_weight` itself"
    )


def test_mask_weights_of_a_part_of_a_stack() -> None:
    def layer(x: Tensor, weight: Tensor, logits: Tensor, mask_weight: Tensor) -> Tensor:
        terms = torch.stack([gated(x, weight, straight_through(one)) for one in logits])
        return (mask_weight[..., None] * terms)[1:].sum(0)

    def named() -> dict[str, Tensor]:
        return layer_tensors(mask_weight=torch.linspace(-1, 2, 15, dtype=torch.float64).view(3, 5).requires_grad_())

    capture = Capture(strict=True)
    assert_same(results(capture.compile(layer), named()), results(layer, named()), SAME)
    assert [site.n_masks for site in capture.report.fused] == [2]


def test_repeated_and_subset_masks() -> None:
    """A mask occurs twice and another one not at all; the operator has as many masks as the sum."""

    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        masks = [straight_through(logits[i]) for i in (0, 2, 0)]
        return sum(gated(x, weight, m) for m in masks)

    capture = Capture(strict=True)
    found = results(capture.compile(layer), layer_tensors())
    assert_same(found, results(layer, layer_tensors()), SAME)
    assert [site.n_masks for site in capture.report.fused] == [3]


def test_a_mask_with_other_uses_stays() -> None:
    """A penalty on the masks adds its gradient to the layer's gradient."""

    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        m = straight_through(logits[0])
        return gated(x, weight, m), m.sum() * 0.1

    capture = Capture(strict=True)
    found = results(capture.compile(layer), layer_tensors())
    assert_same(found, results(layer, layer_tensors()), SAME)


def test_result_that_is_cast_or_copied() -> None:
    """The layer ends before a cast of its result, even if the result is also read without the cast."""

    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        y = gated(x, weight, straight_through(logits[0]))
        return y.double(), y.clone(), y

    named = {name: t.detach().float().requires_grad_() for name, t in layer_tensors().items()}
    capture = Capture(strict=True)
    found = results(capture.compile(layer), named)
    assert_same(found, results(layer, named), 4 * BUDGET[torch.float32])
    assert len(capture.report.fused) == 1


def test_sixteen_bits_summed_in_float32() -> None:
    """Gate, value and sum are computed in float32 and rounded once at the end."""

    def layer(x: Tensor, weight: Tensor, bits: Tensor) -> Tensor:
        y: Any = 0
        for m in bits:
            gate, value = F.linear(x, weight * m).float(), F.linear(x, weight * ~m).float()
            y = y + F.silu(gate) * value
        return y.to(x.dtype)

    torch.manual_seed(0)
    x, weight, bits = torch.randn(6, 16).bfloat16(), torch.randn(12, 16).bfloat16(), torch.rand(3, 12, 16) > 0.5
    capture = Capture(strict=True)
    found = capture.compile(layer)(x, weight, bits)
    oracle = layer(x.double(), weight.double(), bits)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, oracle) <= BUDGET[torch.bfloat16]
    assert capture.calls["mglu.forward"] == 1


@pytest.mark.parametrize("trained", [("x", "logits"), ("logits",), ("x", "weight"), ("weight",), ("x",), ()])
def test_what_requires_a_gradient(trained: tuple[str, ...]) -> None:
    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        return sum(gated(x, weight, straight_through(one)) for one in logits)

    def named() -> dict[str, Tensor]:
        return {name: t.detach().requires_grad_(name in trained) for name, t in layer_tensors().items()}

    capture = Capture(strict=True)
    assert_same(results(capture.compile(layer), named()), results(layer, named()), SAME)
    operator = "forward_ste" if "logits" in trained else "forward"
    assert [site.operator for site in capture.report.fused] == [operator]


def test_detached_masks_are_fixed_masks() -> None:
    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        return gated(x, weight, straight_through(logits[0]).detach())

    capture = Capture(strict=True)
    found = results(capture.compile(layer), layer_tensors())
    assert_same(found, results(layer, layer_tensors()), SAME)
    assert found["logits"] is None
    assert [site.operator for site in capture.report.fused] == ["forward"]


@pytest.mark.parametrize(("swapped", "projection"), family([False, True], [*PROJECTIONS, "stored [h, d]"]))
def test_assume_binary_fuses_real_masks(swapped: bool, projection: str) -> None:
    project = PROJECTIONS.get(projection, torch.matmul)

    def layer(x: Tensor, weight: Tensor, m: Tensor) -> Tensor:
        gate, value = project(x, weight * m), project(x, (1 - m) * weight)
        return F.silu(value) * gate if swapped else F.silu(gate) * value

    named = layer_tensors()
    del named["logits"]
    m = (torch.rand(8, 8, dtype=torch.float64) > 0.5).double()
    capture = Capture(strict=True, assume_binary=True)
    compiled = capture.compile(layer)
    assert_same(results(compiled, named | {"m": m}), results(layer, named | {"m": m}), SAME)
    assert capture.calls["mglu.forward"] == 1
    m[0, 0] = 2
    with pytest.raises(ValueError, match="must be binary"):
        compiled(**named, m=m)
