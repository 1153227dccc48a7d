"""Random programs made of the parts in `spellings`, their inputs, and what must hold for each.

1. If eager raises an error, the program is skipped.
2. The compiled program gives the results and the gradients of eager (`assert_agrees` has the rule for NaN and inf).
3. A program of right parts becomes one operator, and nothing is missed.
4. A program without a mistake in its operands that is not fused has a line in the report.
5. A float or integer mask that nothing proves to be binary is fused only under `assume_binary`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from budgets import BUDGET
from graphs import Capture, assert_says_why, results
from graphs import assert_same_where_finite as assert_same
from hypothesis import strategies as st
from mglu_programs import STACK_TOTALS, WRONGS, Program, StackProgram, normal_tensors
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
TRAINED = ("x", "weight", "masks", "other_x", "other_weight")

# Special values in the inputs of a case, always in row 0 of x, in row 2 of the weight, or in the logits. (These hold no
# NaN, for which `L > 0` and `L <= 0` are both False.) With "rows of one value", row 0 of each mask is all value and
# row 1 all gate, so that the other one is exactly 0.
SPECIALS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "none": lambda named: None,
    "rows of one value": lambda named: named["logits"][:, :2].copy_(torch.tensor([[-1.0], [1.0]])),
    "all value": lambda named: named["logits"].abs_().neg_(),
    "all gate": lambda named: named["logits"].abs_(),
    "zero row of x": lambda named: named["x"][0].zero_(),
    "zero row of the weight": lambda named: named["weight"][2].zero_(),
    "negative zeros": lambda named: (named["x"][0].fill_(-0.0), named["weight"][2].fill_(-0.0)),
    "NaN in x": lambda named: named["x"][0, 0].fill_(math.nan),
    "inf in x": lambda named: named["x"][0, 0].fill_(math.inf),
    "NaN in the weight": lambda named: named["weight"][2, 0].fill_(math.nan),
    "-inf in the weight": lambda named: named["weight"][2, 0].fill_(-math.inf),
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
        # A stack program has as many tokens as features, so that shapes do not tell its dimensions apart.
        named = normal_tensors(self.n_masks, tokens=8 if isinstance(self.program, StackProgram) else 5)
        SPECIALS[self.special](named)
        named["masks"] = KINDS[self.program.kind](named.pop("logits"))
        wanted = {name for name in self.with_gradient if name != "masks" or self.program.trained}
        return {name: named[name].requires_grad_(name in wanted) for name in TRAINED}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def one(options: Sequence[Any] | Mapping[str, Any]) -> Any:
        return draw(st.sampled_from(list(options)))

    stacks = one([False, False, True])
    kind = one(KINDS)
    wrong = one([None, None, one(WRONGS)])
    complement, activation = one(COMPLEMENTS_OF[kind]), one(ACTIVATIONS)
    program: Program | StackProgram
    if stacks:
        program = StackProgram(
            complement=complement,
            product=one(STACK_PRODUCTS),
            projection=one(STACK_PROJECTIONS),
            value=one(["masked", "t - gate"]),
            total=one(STACK_TOTALS),
            mask_weight=one([None, "einsum", "product", "scalars"]),
            activation=activation,
            kind=kind,
            wrong=wrong,
        )
    else:
        value = one(["masked", "w - w * m", "t - gate"])
        program = Program(
            mask=one(MASKS[kind]),
            complement=complement,
            product=one(PRODUCTS_OF[kind]),
            projection=one(PROJECTIONS),
            value=value,
            activation=activation,
            hand_written=one([None, None, one(HAND_WRITTEN), one(DOUBTFUL_FUNCTIONS)]),
            total=one(SUMS),
            kind=kind,
            weight=one(WEIGHTS),
            at_each_use=one([False, True]),
            scale=one([None, None, one(SCALES)]),
            joint=one([None, None, one(JOINTS)]) if value == "masked" else None,
            value_first=one([False, True]),
            swapped=value == "masked" and one([False, True]),
            wrong=wrong,
        )
    return Case(
        program,
        n_masks=one([1, 2, 8] if stacks else [1, 2, 4]),
        with_gradient=one([(), TRAINED, tuple(name for name in TRAINED if one([True, False]))]),
        special=one(["none", one(SPECIALS)]),
        assume_binary=one([True, True, True, False]),
    )


# --- Judging ---------------------------------------------------------------------------------------------------------


def is_right(case: Case) -> bool:
    """Whether all parts are right, so that the program must become one operator."""
    program = case.program
    if program.wrong is not None or (case.needs_trust and not case.assume_binary):
        return False
    if isinstance(program, StackProgram):
        return program.mask_weight == "einsum" or program.total != "sum over tokens"
    # A function with a kink may be fused as relu, or not, where no gradient is recorded.
    return program.joint not in WRONG_JOINTS and program.hand_written not in DOUBTFUL_FUNCTIONS


def run_case(case: Case) -> str:
    """Run a case; returns `fused`, `refused`, `silent`, or `skipped` if eager raises an error.

    Raises:
        AssertionError: something does not hold.
    """
    try:
        wanted = results(case.program, case.tensors())
    except (RuntimeError, TypeError, IndexError):
        return "skipped"  # shapes that do not fit, 1 - bool
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
    elif case.program.wrong is None:  # with a mistake, x or weight may differ, or no factor may look like a mask
        assert_says_why(capture)
        if case.needs_trust and not case.assume_binary:
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
