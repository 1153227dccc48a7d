"""Layers in which a factor is almost the complement of the mask have eager's results, fused or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.families import family, sample
from tests.support.programs.lookalikes import ALL, D, H, Layer, check
from tests.support.programs.spellings import gated, straight_through

# The dtype of the mask m (the factor of the gate), and the factor of the value as a function of m. Torch rounds numbers
# to the dtype of their tensor, so some of these functions are the complement in some dtypes only.
CONSTANTS: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor]]] = {
    "m < full_like(0.5) of int64": (torch.int64, lambda m: m < torch.full_like(m, 0.5)),
    "m < full_like(0.5) cast": (torch.int64, lambda m: m < torch.full_like(m, 0.5, dtype=torch.float32)),
    "m < full_like(0.5) narrowed": (torch.float64, lambda m: m < torch.full_like(m, 0.5, dtype=torch.int8)),
    "m < new_full(0.5)": (torch.int64, lambda m: m < m.new_full(m.shape, 0.5)),
    "m < new_full(0.5), dtype": (torch.int64, lambda m: m < m.new_full((), 0.5, dtype=torch.float64)),
    "m < full(0.5, int)": (torch.int64, lambda m: m < torch.full((D, H), 0.5, dtype=torch.int64)),
    "m < tensor(0.5, int)": (torch.int64, lambda m: m < torch.tensor(0.5, dtype=torch.int64)),
    "m < tensor(0.5).long()": (torch.int64, lambda m: m < torch.tensor(0.5).long()),
    "m < scalar_tensor(0.5, int)": (torch.int64, lambda m: m < torch.scalar_tensor(0.5, dtype=torch.int32)),
    "m < as_tensor(0.5, int)": (torch.int64, lambda m: m < torch.as_tensor(0.5, dtype=torch.int16)),
    "m > full_like(0.999) of bfloat16": (torch.bfloat16, lambda m: ~(m > torch.full_like(m, 0.999))),
    "m > 0.999 of bfloat16": (torch.bfloat16, lambda m: ~(m > 0.999)),
    "full_like(257) - m of uint8": (torch.uint8, lambda m: torch.full_like(m, 256, dtype=torch.int64).to(m) - m + 1),
    "ones_like(bool) * (1 - m)": (torch.float64, lambda m: torch.ones_like(m, dtype=torch.bool) * (1 - m)),
    "m == zeros_like": (torch.bfloat16, lambda m: m == torch.zeros_like(m)),
    "1 - 1.0001 * m of bfloat16": (torch.bfloat16, lambda m: 1 - 1.0001 * m),
    "where(m, 0, 0.5) of int64": (torch.bool, lambda m: torch.where(m, 0, torch.full((), 1.5, dtype=torch.int64))),
    "heaviside(0.5 of an integer)": (torch.int64, lambda m: 1 - torch.heaviside(m, torch.full_like(m, 0.5))),
}

# More dtypes and factors, in the form of `CONSTANTS`. The mask m is 0 or 1. Comments beside entries say what torch
# computes.
ARITHMETIC: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor]]] = {
    "m - 1 of uint8": (torch.uint8, lambda m: m - 1),  # 255 at m = 0
    "m > -1 of uint8": (torch.uint8, lambda m: m > -1),  # torch compares with 255
    "~m of uint8": (torch.uint8, lambda m: ~m),  # 255 and 254
    "m + m of bool": (torch.bool, lambda m: ~(m + m)),  # True + True is True
    "m + True of bool": (torch.bool, lambda m: m + True),
    "1 >> m": (torch.int64, lambda m: 1 >> m),  # the complement
    "m * 255 + 1 of uint8": (torch.uint8, lambda m: m * 255 + 1),  # 0 at m = 1: the complement
    "(1 - m * 0.5).int()": (torch.float64, lambda m: (1 - m * 0.5).int()),  # the complement
    "m * 1.5 rounded to even": (torch.float64, lambda m: torch.round(1.5 - m * 1.5)),
    "round(decimals=-1)": (torch.float64, lambda m: 1 - torch.round(m, decimals=-1)),
    "div floor of a negative": (torch.int64, lambda m: 1 + torch.div(-m, 2, rounding_mode="floor")),  # the complement
    "-m % 2": (torch.int64, lambda m: 1 - (-m) % 2),  # -1 % 2 is 1, as in Python
    "0 ** m": (torch.float64, lambda m: 0**m),  # the complement
    "rsub of alpha": (torch.float64, lambda m: torch.rsub(m, 1, alpha=2)),
    "clamp(0.5, 0.2)": (torch.float64, lambda m: 1 - m.clamp(0.5, 0.2)),  # always 0.2, the upper bound
    "maximum of another tensor": (torch.float64, lambda m: 1 - torch.maximum(m, m.flip(0))),
    "eq of itself": (torch.float64, lambda m: m == m),
    "flip": (torch.float64, lambda m: 1 - m.flip(0)),
    "sum of a dimension": (torch.int64, lambda m: 1 - m.sum(0, keepdim=True)),
    "transpose(dim0=0, dim1=1)": (torch.float64, lambda m: 1 - m.transpose(dim0=0, dim1=1)),
    "view of the transpose": (torch.float64, lambda m: 1 - m.t().reshape(D, H)),
    "nan_to_num": (torch.float64, lambda m: 1 - torch.nan_to_num(m / m, nan=1.0)),
    "sign of a difference": (torch.float64, lambda m: torch.sign(0.5 - m)),
    "clamp of sign to uint8": (torch.float64, lambda m: torch.sign(m - 0.5).to(torch.int8).to(torch.uint8).clamp(0, 1)),
    "heaviside(values=0.5)": (
        torch.float64,
        lambda m: 1 - torch.heaviside(m.detach() - 1, values=torch.full_like(m, 0.5)),
    ),
    "where(m == 0, 2, 0)": (torch.float64, lambda m: torch.where(m == 0, 2.0, 0.0)),
}

MASK_FUNCTIONS = CONSTANTS | ARITHMETIC


def with_factor(name: str, source: str, *, on_value: bool) -> Layer:
    """A layer in which the function of the mask is the factor of the value (with `on_value`) or of the gate."""
    dtype, function = MASK_FUNCTIONS[name]

    def layer(x: Tensor, weight: Tensor, logits: Tensor, bits: Tensor, other: Tensor) -> Tensor:
        m = bits[0] if source == "buffer" else logits[0] > 0
        m = straight_through(logits[0]) if source == "straight-through" else m.to(dtype)
        return gated(x, weight, m, function(m)) if on_value else gated(x, weight, function(m), m == 0)

    return layer


@pytest.mark.parametrize("name", sample(MASK_FUNCTIONS, every=3))
def test_function_of_a_compared_mask(name: str) -> None:
    for on_value in (True, False):
        check(with_factor(name, "comparison", on_value=on_value), ("x", "weight"))


@pytest.mark.parametrize(
    "name", sample((name for name, (dtype, _) in MASK_FUNCTIONS.items() if dtype is torch.float64), every=16)
)
def test_function_of_a_straight_through_mask(name: str) -> None:
    """With a straight-through mask, gradients depend on the derivatives of the function at 0 and 1."""
    check(with_factor(name, "straight-through", on_value=True), ALL)


# --- Straight-through masks with rounding errors ---------------------------------------------------------------------


HARD_FIRST: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    # True if the layer is fused, and the factor of the value as a function of m, the factor of the gate. With the
    # logits L and hard = (L > 0), m is hard + L - L.detach().
    "1 - m": (True, lambda m: 1 - m),
    "m < 0.5": (True, lambda m: m < 0.5),
    "not m.bool()": (True, lambda m: ~m.bool()),
    "m == 0": (True, lambda m: m == 0),
    "1 - round(m)": (True, lambda m: 1 - m.detach().round()),
    "m < 1": (False, lambda m: m < 1),
    "m != 1": (False, lambda m: m != 1),
    "m >= 1": (False, lambda m: ~(m >= 1)),
    "not (1 - m)": (False, lambda m: (1 - m) != 0),
    "m as an integer": (False, lambda m: 1 - m.to(torch.int32)),
    "m as an integer of bfloat16": (False, lambda m: 1 - m.bfloat16().to(torch.int32)),
    "(m - 1) of uint8": (False, lambda m: (m.to(torch.uint8) - 1) > 0),
    "floor(m)": (False, lambda m: 1 - m.detach().floor()),
}
TRAINED = {"frozen masks": ("x", "weight"), "training": ALL, "inference": ()}


@pytest.mark.parametrize(("name", "mode"), family(HARD_FIRST, TRAINED))
def test_function_of_a_mask_with_rounding_errors(name: str, mode: str) -> None:
    """`hard + L - L.detach()` has rounding errors where it is 1, so a function with a jump at 1 is not fused."""
    fuses, function = HARD_FIRST[name]
    trained = TRAINED[mode]

    def layer(x: Tensor, weight: Tensor, logits: Tensor, bits: Tensor, other: Tensor) -> Tensor:
        m = (logits[0] > 0).to(logits.dtype) + logits[0] - logits[0].detach()
        return gated(x, weight, m, function(m))

    capture = check(layer, trained)
    assert len(capture.report.fused) == (1 if fuses and not (trained == ALL and name != "1 - m") else 0)


# --- Masks of logits -------------------------------------------------------------------------------------------------


def _hard(logits: Tensor) -> Tensor:
    return (logits > 0).to(logits.dtype)


def _integers(logits: Tensor) -> Tensor:
    return (logits.detach() * 4).long()


def _chosen(logits: Tensor, base: Tensor, values: float | Tensor) -> Tensor:
    return base.scatter(1, logits.argsort(1)[:, :3], values)


# Name -> True if the layer is fused, and a function of logits and another matrix. The function returns the factors of
# gate and value; None for the value stands for 1 minus the gate's factor.
MASKS_FROM_LOGITS: dict[str, tuple[bool, Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]]] = {
    # Straight-through sums with another value or gradient
    "the gradient of another tensor": (True, lambda l, o: ((_hard(l) - o).detach() + o, None)),
    "the gradient of a function": (True, lambda l, o: ((_hard(l) - l.tanh()).detach() + l.tanh(), None)),
    "of a comparison that broadcasts": (True, lambda l, o: (_compared_row(l), None)),
    "twice the mask, by a product": (False, lambda l, o: ((2 * _hard(l) - l).detach() + l, None)),
    "twice the mask, by a function": (False, lambda l, o: (_Twice.apply(l), None)),
    "a negated mask, subtracted": (True, lambda l, o: (l - l.detach() - (-_hard(l)), None)),
    "twice the gradient": (True, lambda l, o: (_hard(l) + l + l - l.detach() - l.detach(), None)),
    "the negative gradient": (True, lambda l, o: (_hard(l) - l + l.detach(), None)),
    "two gradients": (True, lambda l, o: (_hard(l) + l + o - l.detach() - o.detach(), None)),
    "a straight-through mask of a straight-through mask": (
        True,
        lambda l, o: ((straight_through(l) - o).detach() + o, None),
    ),
    "a row of masks": (False, lambda l, o: ((_hard(l[:1]) - o).detach() + o, None)),
    "a long sum": (False, lambda l, o: (_hard(l) + sum([o] * 9) - sum([o.detach()] * 9), None)),
    "the transpose of a complement": (True, lambda l, o: ((1 - straight_through(l)).t(), None)),
    "the transpose of a mask": (True, lambda l, o: (straight_through(l).t(), None)),
    # Tensors of few values
    "the relu of a sign": (True, lambda l, o: (F.relu(torch.sign(l.detach())), None)),
    "1 less a sign": (False, lambda l, o: (1 - torch.sign(l.detach()), None)),
    "a sign times a mask": (False, lambda l, o: (torch.sign(l.detach()) * _hard(o), None)),
    "> in place": (False, lambda l, o: (l.detach().clone().gt_(0), None)),
    "a rounded tanh": (False, lambda l, o: (torch.round(torch.tanh(l.detach())), None)),
    "other values that are scattered": (False, lambda l, o: (_chosen(l, torch.zeros_like(l), o.detach()), None)),
    "ones scattered into another tensor": (False, lambda l, o: (_chosen(l, o.detach(), 1.0), None)),
    "ones scattered into zeros": (True, lambda l, o: (_chosen(l, torch.zeros_like(l), 1.0), None)),
    "heaviside with another tensor": (False, lambda l, o: (torch.heaviside(l.detach(), o.detach()), None)),
    "a product of two masks": (False, lambda l, o: (_hard(l) * _hard(o), None)),
    # Bits
    "% 2": (True, lambda l, o: (_integers(l) % 2, None)),
    "% 2 of floats": (False, lambda l, o: (l.detach() % 2, None)),
    "% 3": (False, lambda l, o: (_integers(l) % 3, None)),
    "& 2": (True, lambda l, o: ((_integers(l) & 2) > 0, ~((_integers(l) & 2) > 0))),
    "& 2, divided": (True, lambda l, o: (torch.div(_integers(l) & 2, 2, rounding_mode="floor"), None)),
    "& 0": (True, lambda l, o: (_integers(l) & 0, None)),
    "& -2": (False, lambda l, o: (_integers(l) & -2, None)),
    "& of two tensors": (False, lambda l, o: (_integers(l) & _integers(o), None)),
    # Comparisons
    "== and != in another order": (
        True,
        lambda l, o: (_integers(l) == _integers(o), torch.ne(_integers(o), _integers(l))),
    ),
    "== and bool()": (True, lambda l, o: (_integers(l).bool(), torch.zeros_like(_integers(l)) == _integers(l))),
    "> and its opposite": (True, lambda l, o: (l > o, o >= l)),
    "> True and <= 1": (True, lambda l, o: (l > True, l <= 1)),
    "> and <": (False, lambda l, o: (l > o, l < o)),
    "== and > of integers": (False, lambda l, o: (_integers(l) > 0, _integers(l) == 0)),
}


class _Twice(torch.autograd.Function):
    """A function whose forward returns 0 and 2."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return 2 * _hard(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _compared_row(logits: Tensor) -> Tensor:
    hard = (logits[:1] > torch.zeros_like(logits)).to(logits.dtype)
    return (hard - logits[:1]).detach() + logits[:1]


@pytest.mark.parametrize("name", MASKS_FROM_LOGITS)
def test_function_of_logits(name: str) -> None:
    fuses, factors = MASKS_FROM_LOGITS[name]

    def layer(x: Tensor, weight: Tensor, logits: Tensor, bits: Tensor, other: Tensor) -> Tensor:
        m, complement = factors(logits[0], other)
        return gated(x, weight, m, 1 - m if complement is None else complement)

    capture = check(layer, ALL)
    assert len(capture.report.fused) == fuses
