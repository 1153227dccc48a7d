"""NaN and infinity in fused programs: where a fused layer differs from the program, and where it must not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mglu_ops.activations import ACTIVATIONS
from tests.support.families import family
from tests.support.hard_values import assert_right_or_not_finite
from tests.support.programs.graphs import Capture, packings
from tests.support.programs.spellings import TRAINED, straight_through

NAN_AS_0 = "a mask logit that is NaN counts as 0"

# A function that makes a mask from logits, and True if the report says that the program may return NaN for a NaN logit.
MASKS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "round(sigmoid)": (lambda l: torch.round(torch.sigmoid(l.detach())), True),
    "heaviside": (lambda l: torch.heaviside(l.detach(), torch.zeros(())), True),
    "relu(sign)": (lambda l: torch.relu(torch.sign(l.detach())), True),
    **{name: (lambda l, make=make: make(l[None], 0), True) for name, make in TRAINED.items()},
    "comparison": (lambda l: l > 0, False),
    "comparison as float": (lambda l: (l > 0).to(l.dtype), False),
}


def mglu(x: Tensor, weight: Tensor, logits: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    m = make(logits)
    other = ~m if m.dtype is torch.bool else 1 - m
    return F.silu(F.linear(x, weight * m)) * F.linear(x, weight * other)


@pytest.mark.parametrize(("name", "training"), family(MASKS, [True, False]))
def test_a_nan_logit_is_a_0_of_the_mask(name: str, training: bool) -> None:
    """A NaN logit gives a mask of 0 in training and in inference. With infinite logits, results are finite too."""
    make, is_said = MASKS[name]
    if name == "autograd.Function" and not training:
        is_said = False  # the graph contains only the forward of the function, a comparison
    torch.manual_seed(0)
    x, weight, logits = torch.randn(3, 16), torch.randn(8, 16), torch.randn(8, 16)
    below = logits.clone()
    logits[1, 2], below[1, 2] = math.nan, -1.0
    logits[3, 4:6] = torch.tensor([math.inf, -math.inf])
    for tensor in (weight, logits, below):
        tensor.requires_grad_(training)
    capture = Capture(strict=True)
    y = capture.compile(lambda x, w, l: mglu(x, w, l, make))(x, weight, logits)
    assert y.isfinite().all()
    rows = [0, 1, 2, 4, 5, 6, 7]
    torch.testing.assert_close(y[:, rows], mglu(x, weight, below, make)[:, rows])
    assert [site.hides_nan for site in capture.report.fused] == [is_said]
    assert (NAN_AS_0 in str(capture.report)) == is_said
    unfused = mglu(x, weight, logits, make)
    assert is_said or torch.equal(unfused.isfinite(), y.isfinite())


def test_programs_that_make_nan_of_a_nan_logit() -> None:
    """The report warns of these programs. If torch changes and this test fails, remove the warning."""
    x, weight, logits = torch.randn(3, 16), torch.randn(8, 16), torch.randn(8, 16)
    logits[1, 2] = math.nan
    for make in (straight_through, MASKS["round(sigmoid)"][0]):
        y = mglu(x, weight, logits, make)
        assert y[:, 1].isnan().all()
        assert y[:, [0, *range(2, 8)]].isfinite().all()


def test_given_masks_cause_no_warning() -> None:
    masks, x, weight = torch.rand(8, 16) > 0.5, torch.randn(3, 16), torch.randn(8, 16)
    for given, assume_binary in ((masks, False), (masks.float(), True)):
        capture = Capture(strict=True, assume_binary=assume_binary)
        capture.compile(lambda x, w, m: mglu(x, w, m, lambda m: m))(x, weight, given)
        assert [site.hides_nan for site in capture.report.fused] == [False]
    masks_with_nan = masks.float().index_fill(1, torch.tensor([3]), math.nan)
    fused = capture.compile(lambda x, w, m: mglu(x, w, m, lambda m: m))
    with pytest.raises(ValueError, match="values are neither 0 nor 1"):
        fused(x, weight, masks_with_nan)
    assert packings(capture.calls) > 0


# Functions of a weight and a mask that give the masked weight.
MASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "w * m": lambda w, m: w * m,
    "where": lambda w, m: torch.where(m, w, 0),
    "masked_fill": lambda w, m: w.masked_fill(~m, 0),
    "w - w * ~m": lambda w, m: w - w * ~m,
}


@pytest.mark.parametrize(("name", "activation"), family(MASKED, ["silu", "relu", "tanh"]))
def test_no_wrong_number_comes_out_where_a_weight_is_not_finite(name: str, activation: str) -> None:
    """One weight is infinite, NaN or so large that a product overflows, and its mask is 0 or 1."""
    masked, act = MASKED[name], ACTIVATIONS[activation].forward

    def program(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
        return act(F.linear(x, masked(w, m))) * F.linear(x, masked(w, ~m))

    torch.manual_seed(0)
    x, weight = torch.randn(40, 16), torch.randn(8, 16)
    x[:, 3] = 4.0
    fused = Capture(strict=True).compile(program)
    for bit in (False, True):
        masks = torch.rand(8, 16) > 0.5
        masks[2, 3] = bit
        for value in (math.nan, math.inf, -math.inf, 3e38, -3e38):
            wrong = weight.clone()
            wrong[2, 3] = value
            for tokens in (1, 2, 40):
                y = fused(x[:tokens], wrong, masks)
                assert_right_or_not_finite(y, x[:tokens], wrong, masks[None], activation)
                assert y[:, 2].isnan().all() or not math.isnan(value)


def test_where_and_a_product_differ_under_an_infinite_weight() -> None:
    """The results of the two programs differ, so no fused layer can agree with both (compile_passes/README.md)."""
    x, weight, masks = torch.ones(2, 8), torch.randn(4, 8), torch.ones(4, 8, dtype=torch.bool)
    masks[:, 0] = False
    weight[1, 2] = -math.inf

    def program(masked: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
        return lambda x, w, m: F.relu(F.linear(x, masked(w, m))) * F.linear(x, masked(w, ~m))

    results = [program(MASKED[name])(x, weight, masks) for name in ("where", "w * m")]
    assert results[0][:, 1].isfinite().all()
    assert results[1][:, 1].isnan().all()
    for name in ("where", "w * m"):
        y = Capture(strict=True).compile(program(MASKED[name]))(x, weight, masks)
        assert_right_or_not_finite(y, x, weight, masks[None], "relu")
