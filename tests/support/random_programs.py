"""Random programs made of the parts in `spellings`, their inputs, and what must hold for each.

One function draws a case from any source of choices: hypothesis, which shrinks failures, or `random.Random(seed)`.

What must hold:

1. If eager raises an error, the program is skipped.
2. The compiled program gives the results and the gradients of eager (`assert_agrees` has the rule for NaN and inf).
3. A program of right parts becomes one operator, and nothing is missed.
4. A program with one x and one weight that is not fused has a line in the report.
5. A float or integer mask that nothing proves to be binary is fused only under `assume_binary`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
from budgets import BUDGET
from graphs import Capture, assert_says_why, results
from graphs import assert_same_where_finite as assert_same
from mglu_programs import (
    MASK_WRONGS,
    OF_OTHER_OPERANDS,
    STACK_WRONGS,
    STACKS_OF_OTHER_OPERANDS,
    WRONGS,
    Program,
    StackProgram,
)
from spellings import (
    COMPLEMENTS_OF,
    DOUBTFUL_FUNCTIONS,
    HAND_WRITTEN,
    JOINTS,
    KINDS,
    MASKS,
    PRODUCTS_OF,
    PROJECTIONS,
    SCALES,
    STACK_PRODUCTS,
    STACK_PROJECTIONS,
    SUMS,
    WEIGHTS,
    WRONG_JOINTS,
)
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError

from mglu_ops.activations import ACTIVATIONS

SAME = 10 * BUDGET[torch.float64]
D = H = 8  # square, so that shapes do not reveal a transpose
TOKENS = 5

Choose: TypeAlias = Callable[[Sequence[Any]], Any]
"""Chooses one of several options; the first is the simplest."""

TRAINED = ("x", "weight", "masks", "other_x", "other_weight")


# Special values in the inputs of a case, always in row 0 of x and in row 2 of the weight.
def _zero_row_of_x(named: dict[str, Tensor]) -> None:
    named["x"][0] = 0


def _zero_row_of_the_weight(named: dict[str, Tensor]) -> None:
    named["weight"][2] = 0


def _rows_of_one_value(named: dict[str, Tensor]) -> None:
    """Row 0 of each mask is all value and row 1 all gate, so the other one is exactly 0."""
    named["logits"][:, 0], named["logits"][:, 1] = -1, 1


def _all_value(named: dict[str, Tensor]) -> None:
    named["logits"].copy_(-named["logits"].abs())


def _all_gate(named: dict[str, Tensor]) -> None:
    named["logits"].copy_(named["logits"].abs())


def _negative_zeros(named: dict[str, Tensor]) -> None:
    named["x"][0], named["weight"][2] = -0.0, -0.0


def _put(name: str, row: int, value: float) -> Callable[[dict[str, Tensor]], None]:
    def put(named: dict[str, Tensor]) -> None:
        named[name][row, 0] = value

    return put


# (The logits hold no NaN, for which `L > 0` and `L <= 0` are both False.)
SPECIALS: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "none": lambda named: None,
    "rows of one value": _rows_of_one_value,
    "zero row of x": _zero_row_of_x,
    "zero row of the weight": _zero_row_of_the_weight,
    "all value": _all_value,
    "all gate": _all_gate,
    "negative zeros": _negative_zeros,
    "NaN in x": _put("x", 0, math.nan),
    "inf in x": _put("x", 0, math.inf),
    "NaN in the weight": _put("weight", 2, math.nan),
    "-inf in the weight": _put("weight", 2, -math.inf),
}


@dataclass(frozen=True)
class Case:
    """A program and how it is called."""

    program: Program | StackProgram
    n_masks: int = 1
    with_gradient: tuple[str, ...] = ()
    special: str = "none"
    assume_binary: bool = True
    """Only float and integer masks depend on it."""

    @property
    def needs_trust(self) -> bool:
        """Whether nothing in the graph proves the masks to be binary."""
        return self.program.kind in ("float", "uint8", "int64")

    def tensors(self) -> dict[str, Tensor]:
        """New tensors: x and other_x `[tokens, 8]`, weight and other_weight `[8, 8]`, masks `[n_masks, 8, 8]`."""
        generator = torch.Generator().manual_seed(self.n_masks)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        # A stack program has as many tokens as features, so that shapes do not tell its dimensions apart.
        tokens = H if isinstance(self.program, StackProgram) else TOKENS
        named = {"x": normal(tokens, H), "weight": normal(D, H), "logits": normal(self.n_masks, D, H)}
        named |= {"other_x": normal(tokens, H), "other_weight": normal(D, H)}
        SPECIALS[self.special](named)
        named["masks"] = KINDS[self.program.kind](named.pop("logits"))
        wanted = {name for name in self.with_gradient if name != "masks" or self.program.trained}
        return {name: named[name].requires_grad_(name in wanted) for name in TRAINED}


# --- Drawing ---------------------------------------------------------------------------------------------------------


def draw_program(choose: Choose) -> Program:
    kind = choose(list(KINDS))
    value = choose(["masked", "w - w * m", "t - gate"])
    wrong = choose([None, None, choose(WRONGS)])
    joinable = value == "masked" and (wrong is None or wrong in MASK_WRONGS)
    weight = choose(list(WEIGHTS))
    return Program(
        mask=choose(list(MASKS[kind])),
        complement=choose(list(COMPLEMENTS_OF[kind])),
        product=choose(list(PRODUCTS_OF[kind])),
        projection=choose(list(PROJECTIONS)),
        value=value,
        activation=choose(list(ACTIVATIONS)),
        hand_written=choose([None, None, choose(list(HAND_WRITTEN)), choose(list(DOUBTFUL_FUNCTIONS))]),
        total=choose(list(SUMS)),
        kind=kind,
        weight=weight,
        at_each_use=choose([False, True]),
        scale=choose([None, None, choose(list(SCALES))]),
        joint=choose([None, None, choose(list(JOINTS))]) if joinable else None,
        value_first=choose([False, True]),
        swapped=value == "masked" and choose([False, True]),
        wrong=wrong,
    )


def draw_stack_program(choose: Choose) -> StackProgram:
    kind = choose(list(KINDS))
    return StackProgram(
        complement=choose(list(COMPLEMENTS_OF[kind])),
        product=choose(list(STACK_PRODUCTS)),
        projection=choose(list(STACK_PROJECTIONS)),
        value=choose(["masked", "t - gate"]),
        total=choose(["sum", "einsum", "unbind", "select", "mean"]),
        mask_weight=choose([None, "einsum", "product", "scalars"]),
        activation=choose(list(ACTIVATIONS)),
        kind=kind,
        wrong=choose([None, None, choose(STACK_WRONGS)]),
    )


def draw_case(choose: Choose) -> Case:
    stacks = choose([False, False, True])
    program = draw_stack_program(choose) if stacks else draw_program(choose)
    return Case(
        program,
        n_masks=choose([1, 2, H] if stacks else [1, 2, 4]),
        with_gradient=choose([(), TRAINED, tuple(name for name in TRAINED if choose([True, False]))]),
        special=choose(["none", choose(list(SPECIALS))]),
        assume_binary=choose([True, True, True, False]),
    )


# --- Judging ---------------------------------------------------------------------------------------------------------


def is_right(case: Case) -> bool:
    """Whether all parts are right, so that the program must become one operator."""
    program = case.program
    if program.wrong is not None or (case.needs_trust and not case.assume_binary):
        return False
    if isinstance(program, StackProgram):
        return True
    # A function with a kink may be fused as relu, or not, where no gradient is recorded.
    return program.joint not in WRONG_JOINTS and program.hand_written not in DOUBTFUL_FUNCTIONS


def may_be_silent(case: Case) -> bool:
    """Whether the report may omit the program, because it does not multiply one x by two forms of one weight."""
    wrong = case.program.wrong or ""
    if wrong.startswith("mutate") or (wrong and case.needs_trust):
        return True  # after a mutation x or the weight is another tensor; or it is unknown which factor is the mask
    if isinstance(case.program, Program) and case.n_masks == 1 and _has_one_factor(case.program):
        return True  # gate and value are one product
    return wrong in (*OF_OTHER_OPERANDS, *STACKS_OF_OTHER_OPERANDS)


def _has_one_factor(program: Program) -> bool:
    """Whether gate and value of a program with one mask multiply the weight by one function of that mask.

    A mistake replaces the factor of the value. If the new factor is the complement of the mask, and the program also
    uses the complement for the gate, both factors are equal.
    """
    asymmetric = torch.tensor([[[-1.0, 1.0], [-1.0, 1.0]]], dtype=torch.float64)  # differs from its transpose
    return program.has_one_factor(KINDS[program.kind](asymmetric))


def run_case(case: Case) -> str:
    """Run a case; returns `fused`, `refused`, `silent`, or `skipped` if eager raises an error.

    Raises:
        AssertionError: something does not hold.
    """
    try:
        wanted = results(case.program, case.tensors())
    except (RuntimeError, TypeError, IndexError):
        return "skipped"  # shapes that do not fit, a mutation that autograd forbids, 1 - bool
    capture = Capture(assume_binary=case.assume_binary and case.needs_trust)
    try:
        found = results(capture.compile(case.program), case.tensors())
    except ValueError as error:  # packing found that the trusted masks are soft
        if "must be binary" in str(error) and "soft" in (case.program.wrong or ""):
            return "refused"
        raise
    except TorchRuntimeError:
        with pytest.raises(TorchRuntimeError):  # Dynamo itself fails
            results(Capture(fuse=False).compile(case.program), case.tensors())
        return "skipped"
    assert_agrees(found, wanted, case.tensors())
    report = capture.report
    if is_right(case):
        assert report.missed == [], f"missed: {capture.reasons}"
        fused = [site.n_masks for site in report.fused]
        assert fused == [case.n_masks], f"operators with {fused} masks, must be one with {case.n_masks}"
    elif not may_be_silent(case):
        assert_says_why(capture)
    if case.needs_trust and not case.assume_binary and case.program.wrong is None:
        assert report.fused == [], "fused masks that nothing proves to be binary"
    return "fused" if report.fused else "refused" if report.missed else "silent"


_NOISE = 1e-11
"""A tensor whose absolute values add up to less holds only rounding errors, of a difference of equal numbers."""


def assert_agrees(
    found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None], given: Mapping[str, Tensor]
) -> None:
    """Check that results and gradients agree wherever eager's are finite and depend only on finite inputs.

    The operator multiplies each element of the weight by x, for the gate or for the value. So NaN or inf in row t of x
    makes row t of the result NaN, and NaN or inf in row d of the weight makes column d NaN. Eager may have finite
    numbers there, because it replaces the element by 0 (`where(M, W, 0)`) or saturates (`sigmoid(-inf)`). All other
    rows and columns must agree. (For an element `[d, h]` of the weight, columns d and h are skipped, since a program
    may transpose the weight.) A gradient is a sum over tokens or features: with NaN or inf in x, only rows of the
    gradient of x are compared, and with NaN or inf in the weight only rows of the gradients of weight and masks.
    """
    tokens = given["x"].detach().isfinite().all(1)
    bad = ~given["weight"].detach().isfinite()
    features = ~(bad.any(1) | bad.any(0))
    kept = {name for name in wanted if name.startswith("result")}
    kept |= {"x"} if not tokens.all() else {"weight", "masks"} if not features.all() else set(wanted)
    for name in sorted(kept & wanted.keys()):
        a, b = found[name], wanted[name]
        if a is not None and b is not None and b.abs().nan_to_num(0).sum() < _NOISE:
            assert a.abs().nan_to_num(0).sum() < _NOISE, f"{name}: must be 0 up to rounding"
            continue
        assert_same({name: _rows(a, name, tokens, features)}, {name: _rows(b, name, tokens, features)}, SAME)


def _rows(tensor: Tensor | None, name: str, tokens: Tensor, features: Tensor) -> Tensor | None:
    """The rows or columns of a result or gradient that depend only on finite inputs."""
    if tensor is None or (tokens.all() and features.all()):
        return tensor
    if name.startswith("result"):
        # A program may also return a stack of gates, which has another shape.
        fits = tensor.shape[-2:] == (len(tokens), len(features))
        return tensor[..., tokens, :][..., features] if fits else None
    if name == "x":
        return tensor[tokens]
    return tensor[..., features, :]
