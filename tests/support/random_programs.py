"""Random programs made of the parts in `spellings`, right or with a mistake, and what must hold for each.

1. If eager raises an error, the program is skipped.
2. The compiled program gives the results and the gradients of eager.
3. A program of right parts becomes one operator, and nothing is missed.
4. A program without a mistake in its operands that is not fused has a line in the report.
5. A float or integer mask that nothing proves to be binary is fused only under `assume_binary`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from budgets import BUDGET
from graphs import Capture, assert_same_where_finite, assert_says_why, results
from hypothesis import strategies as st
from spellings import (
    ALL_COMPLEMENTS,
    BOOL_PRODUCTS,
    COMPLEMENTS_OF,
    DOUBTFUL_COMPLEMENTS,
    DOUBTFUL_FUNCTIONS,
    HAND_WRITTEN,
    JOINTS,
    KINDS,
    MASKS,
    PRODUCTS_OF,
    PROJECTIONS,
    SCALES,
    SUMS,
    WEIGHTS,
    WRONG_JOINTS,
)
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError

from mglu_ops.activations import ACTIVATIONS

SAME = 10 * BUDGET[torch.float64]
TRAINED = ("x", "weight", "masks", "other_x", "other_weight")
_NOISE = 1e-11
"""A tensor whose absolute values add up to less holds only rounding errors, of a difference of equal numbers."""


class Operands(NamedTuple):
    """The mask of a gate, and x, weight and mask of its value."""

    gate_mask: Tensor
    x: Tensor
    weight: Tensor
    value_mask: Tensor
    other_x: Tensor
    other_weight: Tensor


# Mistakes: changes of the operands of a term. Some of them leave an MGLU layer, which the pass cannot always prove.
WRONGS: dict[str, Callable[[Operands], Operands]] = {
    "soft mask": lambda o: o._replace(gate_mask=o.gate_mask * 0.5 + 0.25),
    "squared mask": lambda o: o._replace(gate_mask=o.gate_mask * o.gate_mask),
    "detached mask": lambda o: o._replace(gate_mask=o.gate_mask.detach()),
    "transposed mask": lambda o: o._replace(gate_mask=o.gate_mask.mT),
    "mask per channel": lambda o: o._replace(gate_mask=o.gate_mask[..., :1]),
    "other x": lambda o: o._replace(x=o.other_x),
    "detached x": lambda o: o._replace(x=o.x.detach()),
    "copied x": lambda o: o._replace(x=o.x * 1),
    "other weight": lambda o: o._replace(weight=o.other_weight),
    "detached weight": lambda o: o._replace(weight=o.weight.detach()),
    "rounded weight": lambda o: o._replace(weight=o.weight.bfloat16().to(o.weight.dtype)),
    "2 - m": lambda o: o._replace(value_mask=2 - o.gate_mask * 1.0),
    "m and m": lambda o: o._replace(value_mask=o.gate_mask),
    **{
        name: lambda o, function=function: o._replace(value_mask=function(o.gate_mask))
        for name, function in DOUBTFUL_COMPLEMENTS.items()
    },
}

# Special values in the inputs. With "rows of one value", row 0 of each mask is all value and row 1 all gate, so that
# the other one is exactly 0.
SPECIALS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "none": lambda named: None,
    "rows of one value": lambda named: named["masks"][:, :2].copy_(torch.tensor([[-1.0], [1.0]])),
    "all value": lambda named: named["masks"].abs_().neg_(),
    "all gate": lambda named: named["masks"].abs_(),
    "zero row of x": lambda named: named["x"][0].zero_(),
    "zero row of the weight": lambda named: named["weight"][2].zero_(),
    "negative zeros": lambda named: (named["x"][0].fill_(-0.0), named["weight"][2].fill_(-0.0)),
}


@dataclass(frozen=True)
class Program:
    """An MGLU layer that is composed of named parts, and how it is called."""

    mask: str = "straight_through"
    complement: str = "1 - m"
    product: str = "w * m"
    projection: str = "linear"
    value: str = "masked"
    activation: str = "silu"
    hand_written: str | None = None
    total: str = "y = 0"
    kind: str = "logits"
    weight: str = "weight"
    """The masked weight, a key of `WEIGHTS`."""
    at_each_use: bool = False
    """Whether the weight is computed again for the value."""
    scale: str | None = None
    joint: str | None = None
    value_first: bool = False
    swapped: bool = False
    wrong: str | None = None
    """A mistake in the first term."""
    n_masks: int = 1
    with_gradient: tuple[str, ...] = ()
    special: str = "none"
    assume_binary: bool = True
    """Only float and integer masks depend on it."""

    @property
    def needs_trust(self) -> bool:
        """Whether nothing in the graph proves the masks to be binary."""
        return self.kind in ("float", "uint8", "int64")

    @property
    def is_right(self) -> bool:
        """Whether all parts are right, so that the program must become one operator."""
        if self.wrong is not None or (self.needs_trust and not self.assume_binary):
            return False
        # A function with a kink may be fused as relu, or not, where no gradient is recorded.
        return self.joint not in WRONG_JOINTS and self.hand_written not in DOUBTFUL_FUNCTIONS

    def tensors(self) -> dict[str, Tensor]:
        """New tensors: x and other_x `[5, 8]`, weight and other_weight `[8, 8]`, masks `[n_masks, 8, 8]`."""
        generator = torch.Generator().manual_seed(self.n_masks)
        shapes = {"masks": (self.n_masks, 8, 8), "x": (5, 8), "weight": (8, 8), "other_x": (5, 8)}
        shapes["other_weight"] = (8, 8)
        named = {name: torch.randn(*shape, generator=generator).double() for name, shape in shapes.items()}
        SPECIALS[self.special](named)
        named["masks"] = KINDS[self.kind](named["masks"])
        wanted = {name for name in self.with_gradient if name != "masks" or self.kind == "logits"}
        return {name: named[name].requires_grad_(name in wanted) for name in TRAINED}

    def __call__(self, x: Tensor, weight: Tensor, masks: Tensor, other_x: Tensor, other_weight: Tensor) -> Tensor:
        terms = []
        for i in range(masks.shape[0]):
            term = self._term(i, x, weight, masks, other_x, other_weight)
            terms.append(term if self.scale is None else SCALES[self.scale](other_x.flatten(), i) * term)
        return SUMS[self.total](terms)

    def _term(self, i: int, x: Tensor, weight: Tensor, masks: Tensor, other_x: Tensor, other_weight: Tensor) -> Tensor:
        product, project = BOOL_PRODUCTS[self.product], PROJECTIONS[self.projection]
        m = MASKS[self.kind][self.mask](masks, i)
        pair = m, ALL_COMPLEMENTS[self.complement](m)
        gate_mask, value_mask = reversed(pair) if self.swapped else pair
        masked = WEIGHTS[self.weight](weight, other_weight)
        again = WEIGHTS[self.weight](weight, other_weight) if self.at_each_use else masked
        of = Operands(gate_mask, x, again, value_mask, other_x, other_weight)
        if self.wrong is not None and i == 0:
            of = WRONGS[self.wrong](of)
        gate_weight = product(masked, of.gate_mask)
        if self.joint is not None:
            gate, value = JOINTS[self.joint](x, gate_weight, product(of.weight, of.value_mask))
        else:
            gate = project(x, gate_weight)
            if self.value == "masked":
                value = project(of.x, product(of.weight, of.value_mask))
            elif self.value == "w - w * m":
                value = project(of.x, of.weight - product(of.weight, of.gate_mask))
            else:
                value = project(of.x, of.weight) - gate
        functions = HAND_WRITTEN | DOUBTFUL_FUNCTIONS
        activated = functions.get(self.hand_written or "", ACTIVATIONS[self.activation].forward)(gate)
        return value * activated if self.value_first else activated * value


@st.composite
def programs(draw: st.DrawFn) -> Program:
    def one(options: Sequence[Any] | Mapping[str, Any]) -> Any:
        return draw(st.sampled_from(list(options)))

    kind, value = one(KINDS), one(["masked", "w - w * m", "t - gate"])
    return Program(
        mask=one(MASKS[kind]),
        complement=one(COMPLEMENTS_OF[kind]),
        product=one(PRODUCTS_OF[kind]),
        projection=one(PROJECTIONS),
        value=value,
        activation=one(ACTIVATIONS),
        hand_written=one([None, None, one(HAND_WRITTEN), one(DOUBTFUL_FUNCTIONS)]),
        total=one(SUMS),
        kind=kind,
        weight=one(WEIGHTS),
        at_each_use=one([False, True]),
        scale=one([None, None, one(SCALES)]),
        joint=one([None, None, one(JOINTS)]) if value == "masked" else None,
        value_first=one([False, True]),
        swapped=value == "masked" and one([False, True]),
        wrong=one([None, None, one(WRONGS)]),
        n_masks=one([1, 2, 4]),
        with_gradient=one([(), TRAINED, tuple(name for name in TRAINED if one([True, False]))]),
        special=one(["none", one(SPECIALS)]),
        assume_binary=one([True, True, True, False]),
    )


def run(program: Program) -> str:
    """Run a program; returns `fused`, `refused`, `silent`, or `skipped` if eager raises an error.

    Raises:
        AssertionError: something does not hold.
    """
    try:
        wanted = results(program, program.tensors())
    except (RuntimeError, TypeError, IndexError):
        return "skipped"  # shapes that do not fit, 1 - bool
    capture = Capture(assume_binary=program.assume_binary and program.needs_trust)
    try:
        found = results(capture.compile(program), program.tensors())
    except ValueError as error:  # packing found that the trusted masks are soft
        if "must be binary" in str(error) and "soft" in (program.wrong or ""):
            return "refused"
        raise
    except TorchRuntimeError:
        with pytest.raises(TorchRuntimeError):  # Dynamo itself fails
            results(Capture(fuse=False).compile(program), program.tensors())
        return "skipped"
    noise = {
        name for name, tensor in wanted.items() if tensor is not None and tensor.abs().nan_to_num(0).sum() < _NOISE
    }
    assert all(found[name] is None or found[name].abs().nan_to_num(0).sum() < _NOISE for name in noise)
    assert_same_where_finite(*({k: t for k, t in of.items() if k not in noise} for of in (found, wanted)), SAME)
    report = capture.report
    if program.is_right:
        assert report.missed == [], f"missed: {capture.reasons}"
        fused = [site.n_masks for site in report.fused]
        assert fused == [program.n_masks], f"operators with {fused} masks, must be one with {program.n_masks}"
    elif program.wrong is None:  # with a mistake, x or weight may differ, or no factor may look like a mask
        assert_says_why(capture)
        if program.needs_trust and not program.assume_binary:
            assert report.fused == [], "fused masks that nothing proves to be binary"
    return "fused" if report.fused else "refused" if report.missed else "silent"
