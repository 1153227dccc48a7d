"""Random programs of the parts that MGLU is spelled with, right and subtly wrong: compiled gives what eager gives."""

from __future__ import annotations

import torch
from graphs import Capture, assert_same, results
from hypothesis import given, settings
from hypothesis import strategies as st
from spellings import (
    BOOL_COMPLEMENTS,
    BOOL_PRODUCTS,
    COMPLEMENTS,
    FIXED,
    HANDS,
    PRODUCTS,
    PROJECTIONS,
    STACK_PRODUCTS,
    STACK_PROJECTIONS,
    STACK_WRONGS,
    SUMS,
    TRAINED,
    WRONGS,
    Program,
    StackProgram,
)
from test_fusion_negative import SAME, tensors
from torch import Tensor

from mglu_ops.activations import ACTIVATIONS


@st.composite
def programs(draw: st.DrawFn) -> Program:
    trained = draw(st.booleans())
    value = draw(st.sampled_from(["masked", "w - w * m", "t - gate"]))
    return Program(
        mask=draw(st.sampled_from(list(TRAINED if trained else FIXED))),
        complement=draw(st.sampled_from(list(COMPLEMENTS if trained else BOOL_COMPLEMENTS))),
        product=draw(st.sampled_from(list(PRODUCTS if trained else BOOL_PRODUCTS))),
        projection=draw(st.sampled_from(list(PROJECTIONS))),
        value=value,
        activation=draw(st.sampled_from(list(ACTIVATIONS))),
        hand=draw(st.one_of(st.none(), st.sampled_from(list(HANDS)))),
        total=draw(st.sampled_from(list(SUMS))),
        trained=trained,
        value_first=draw(st.booleans()),
        swapped=value == "masked" and draw(st.booleans()),
        wrong=draw(st.sampled_from([None, *WRONGS])),
    )


def program_tensors(program: Program | StackProgram, n_masks: int, with_gradient: set[str]) -> dict[str, Tensor]:
    named = tensors(n_masks, trained=())
    logits = torch.cat([named["logits"], -named["logits"].flip(1), named["logits"].mT])[:n_masks]
    chosen = {
        "x": named["x"],
        "weight": named["weight"],
        "masks": logits if program.trained else logits > 0,
        "other_x": named["x"].flip(0).clone(),
        "other_weight": named["other"],
    }
    return {k: t.requires_grad_(k in with_gradient and t.is_floating_point()) for k, t in chosen.items()}


@settings(max_examples=120)
@given(
    program=programs(),
    n_masks=st.sampled_from([1, 2, 4]),
    with_gradient=st.one_of(
        st.just({"x", "weight", "masks", "other_x", "other_weight"}),
        st.just(set()),
        st.sets(st.sampled_from(["x", "weight", "masks"])),
    ),
)
def test_any_program_gives_what_eager_gives(program: Program, n_masks: int, with_gradient: set[str]) -> None:
    """Results and all gradients; and a program of right parts fuses to one operator."""
    try:
        wanted = results(program, program_tensors(program, n_masks, with_gradient))
    except (RuntimeError, TypeError):
        return  # a mutation that autograd does not let happen
    capture = Capture()
    found = results(capture.compile(program), program_tensors(program, n_masks, with_gradient))
    assert_same(found, wanted, SAME)
    if program.wrong is None:
        assert len(capture.report.fused) == 1
        assert capture.report.missed == []
        assert capture.calls["linear"] == capture.calls["matmul"] == 0


@st.composite
def stack_programs(draw: st.DrawFn) -> StackProgram:
    trained = draw(st.booleans())
    return StackProgram(
        complement=draw(st.sampled_from(list(COMPLEMENTS if trained else BOOL_COMPLEMENTS))),
        product=draw(st.sampled_from(list(STACK_PRODUCTS))),
        projection=draw(st.sampled_from(list(STACK_PROJECTIONS))),
        value=draw(st.sampled_from(["masked", "t - gate"])),
        total=draw(st.sampled_from(["sum", "einsum", "unbind", "select"])),
        route=draw(st.sampled_from([None, "einsum", "product"])),
        activation=draw(st.sampled_from(list(ACTIVATIONS))),
        trained=trained,
        wrong=draw(st.sampled_from([None, None, *STACK_WRONGS])),
    )


@settings(max_examples=120)
@given(program=stack_programs(), n_masks=st.sampled_from([1, 2, 8]), trains=st.booleans())
def test_any_stack_of_masks_gives_what_eager_gives(program: StackProgram, n_masks: int, trains: bool) -> None:
    """With as many masks as tokens, features and inputs (8) no shape tells one dimension from another."""

    def named() -> dict[str, Tensor]:
        given = program_tensors(program, n_masks, {"x", "weight", "masks"} if trains else set())
        rows = {k: torch.cat([given[k], given[k] * 2])[:8].detach() for k in ("x", "other_x")}
        return given | {k: v.requires_grad_(given[k].requires_grad) for k, v in rows.items()}

    try:
        wanted = results(program, named())
    except (RuntimeError, TypeError):
        return  # shapes that do not fit, or a mutation that autograd does not let happen
    capture = Capture()
    assert_same(results(capture.compile(program), named()), wanted, SAME)
    if program.wrong is None:
        assert [site.n_masks for site in capture.report.fused] == [n_masks]
        assert capture.report.missed == []
        assert capture.calls["matmul"] == 1  # the router's
        assert capture.calls["einsum"] == capture.calls["linear"] == 0
