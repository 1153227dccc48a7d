"""Programs on which the pass was wrong before it followed the four rules of compile_passes/README.md, rule by rule.

Each gives eager's results and gradients, a missing gradient included, and leaves its inputs as eager does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.nn.functional as F
from budgets import BUDGET, relative_error
from graphs import Capture, results
from spellings import gated, straight_through
from torch import Tensor

SAME = 10 * BUDGET[torch.float64]
SIZE = 11  # all sizes are equal, so that shapes do not tell tensors apart


def tensors(*, training: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    named = {name: torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64) for name in ("x", "y", "w", "l")}
    named = {name: tensor.requires_grad_(training) for name, tensor in named.items()}
    return named | {"m": torch.rand(SIZE, SIZE, generator=generator) > 0.5}


def two(x: Tensor, y: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(y, value)


def masked(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return two(x, x, w * m, w * ~m)


PROGRAMS: dict[str, tuple[str | None, str | None, Callable[..., Any]]] = {}


def program(inference: str | None, training: str | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a program with part of the reason why it is refused in inference and in training; None: it is fused."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[function.__name__] = (inference, training, function)
        return function

    return register


def refused(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return program(reason, reason)


fused = program(None, None)


# --- Rule 1: a value is its callable, its bound arguments, and the versions of its inputs ----------------------------

# The reason, or None where the layer is fused, and what x and the weight of gate and value are.
OPERANDS: dict[str, tuple[str | None, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]]] = {
    "a sum and a difference with a factor": (
        "different inputs",
        lambda x, y, w: (torch.add(x, y, alpha=2), torch.sub(x, y, alpha=2), w, w),
    ),
    "chunks and splits": ("different inputs", lambda x, y, w: (x.chunk(3)[2], x.split(3)[2], w, w)),
    "two draws": ("different inputs", lambda x, y, w: (_draw(x), _draw(x), w, w)),
    # For one row both give the same shape, but `repeat` counts repetitions.
    "repeated and expanded rows": (
        "different weights",
        lambda x, y, w: (x, x, w[:1].expand(SIZE, SIZE), w[:1].repeat(SIZE, 1)),
    ),
    "equal calls in two spellings": (None, lambda x, y, w: (torch.clamp(x, min=0), x.clamp(0, None), w, w)),
}


def _draw(x: Tensor) -> Tensor:
    return torch._standard_gamma(x.abs())


def _of_operands(operands: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    def function(x: Tensor, y: Tensor, w: Tensor, l: Tensor, m: Tensor) -> Tensor:
        a, b, gate, value = operands(x, y, w)
        return two(a, b, gate * m, value * ~m)

    return function


for _name, (_reason, _operands) in OPERANDS.items():
    PROGRAMS[_name] = (_reason, _reason, _of_operands(_operands))


@refused("two different masks")
def choice_by_another_condition(x, y, w, l, m):
    a, b = torch.where(m, l > 0, y > 0), m.where(l > 0, y > 0)
    return two(x, x, w * a, w * ~b)


@fused
def one_draw(x, y, w, l, m):
    return masked(_draw(x), w, m)


# --- Rule 2: one functional view -------------------------------------------------------------------------------------


@refused("nothing proves")
def sigmoid_that_is_scaled_in_place(x, y, w, l, m):
    p = torch.sigmoid(l.detach())
    p.mul_(3.0)
    return gated(x, w, p.round())


@refused("nothing proves")
def difference_that_is_scaled_in_place(x, y, w, l, m):
    difference = (l > 0).to(l.dtype) - l
    difference.mul_(2.0)
    return gated(x, w, difference.detach() + l)


@refused("writes in place")
def mask_that_changes_after_it_was_read(x, y, w, l, m):
    trained = m.to(l.dtype) + l - l.detach()
    m.logical_not_()
    return gated(x, w, trained)


@program(None, "which backward needs")
def weight_that_changes_after_the_layer(x, y, w, l, m):
    result = masked(x, w, m)
    with torch.no_grad():
        w.div_(w.norm())
    return result


@refused("such as detach_")
def result_that_is_detached_in_place_after_its_use(x, y, w, l, m):
    """Tracing records only the last state of a tensor, in which this one has no gradient."""
    result = masked(x, w, m)
    later = result + 1
    result.detach_()
    return later


@refused("does not know")
def masked_weight_that_is_transposed_in_place_twice(x, y, w, l, m):
    """Nothing is known of a tensor before such a call, even if a write to it is a function of its old value."""
    gate = w.clone()
    gate.mul_(m)
    gate.t_()
    gate.t_()
    return two(x, x, gate, w * ~m)


@fused
def weight_that_changes_before_the_layer(x, y, w, l, m):
    with torch.no_grad():
        w.div_(w.norm())
    return masked(x, w, m)


@program(None, "which backward needs")
def mask_that_changes_through_data(x, y, w, l, m):
    """Autograd does not see the write, and eager's backward reads the new values."""
    trained = straight_through(l)
    result = gated(x, w, trained)
    trained.data.mul_(0.5)
    return result


@fused
def statistics_of_another_tensor(x, y, w, l, m):
    mean, variance = torch.zeros(SIZE, dtype=x.dtype), torch.ones(SIZE, dtype=x.dtype)
    rows = F.batch_norm(x, mean, variance, training=True)
    return masked(rows, w, m), mean, variance


@refused("different inputs")
def statistics_that_are_x(x, y, w, l, m):
    """`batch_norm` writes to its arguments 1 and 2, and its schema does not say so."""
    x = x.detach()
    gate = F.linear(x[0], w * m)
    torch.batch_norm(y, None, None, x[0], x[1].abs(), True, 0.1, 1e-5, False)
    return F.silu(gate) * F.linear(x[0], w * ~m)


@refused("different inputs")
def dropout_in_evaluation_is_an_alias(x, y, w, l, m):
    x, w = x.detach().clone(), w.detach()
    alias = F.dropout(x, 0.5, training=False)
    gate = F.linear(x, w * m)
    alias.mul_(2)
    return F.silu(gate) * F.linear(x, w * ~m)


@fused
def sum_that_is_read_by_its_first_name(x, y, w, l, m):
    total = torch.zeros_like(x)
    total.add_(masked(x, w, m))
    total.mul_(2)
    return total + 1


@fused
def draw_that_the_operator_does_not_need(x, y, w, l, m):
    """In inference the soft mask is not needed, but its draw decides which numbers are drawn afterwards."""
    soft = l * torch.bernoulli(torch.full_like(l, 0.5))
    hard = (l > 0).to(l.dtype)
    mask = hard + soft - soft.detach()
    return two(x, x, w * mask, w * (1 - mask)), torch.rand(3, dtype=torch.float64)


# --- Rule 3: what a rule looks through is part of the site -----------------------------------------------------------


def _hooked(x: Tensor, w: Tensor, l: Tensor, where: str) -> Tensor:
    hard = (l > 0).to(l.dtype)
    total = hard + l
    m = total - l.detach()
    gate_weight = w * m
    hooked = {"mask": m, "sum": total, "weight": gate_weight}[where]
    result = two(x, x, gate_weight, w * (1 - m))
    hooked.register_hook(lambda grad: grad * 0.1)
    return result


@pytest.mark.parametrize("compiled_autograd", [False, True])
@pytest.mark.parametrize("where", ["mask", "sum", "weight"])
def test_a_gradient_hook_inside_of_a_layer_refuses_it(where: str, compiled_autograd: bool) -> None:
    """The operator would give the hook another gradient, or none. A newer torch records every hook in the graph."""
    named = {name: t for name, t in tensors(training=True).items() if name in ("x", "w", "l")}

    def hooked(x: Tensor, w: Tensor, l: Tensor) -> Tensor:
        return _hooked(x, w, l, where)

    capture = Capture()
    with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
        found = results(capture.compile(hooked), named)
    wanted = results(hooked, named)
    for key in wanted:
        _assert_equal(found[key], wanted[key], key)
    assert capture.report.fused == []
    assert capture.reasons


# --- Rule 4: roles belong to a weight and a site ---------------------------------------------------------------------


@fused
def logits_that_are_also_gated_by_themselves(x, y, w, l, m):
    return two(x, x, w * (l > 0), w * ~(l > 0)), (l * torch.sigmoid(l)).mean()


@program(None, "gradient of zeros")
def mask_with_a_gradient_of_zeros(x, y, w, l, m):
    """Eager gives the logits a gradient of zeros, with which an optimizer decays them."""
    return gated(x, w, torch.sigmoid(l).round())


# --- The tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, training: bool) -> None:
    *reasons, function = PROGRAMS[name]
    reason = reasons[training]
    given, compiled = tensors(training=training), tensors(training=training)
    capture = Capture(assume_binary=name.startswith("logits"))
    with torch.set_grad_enabled(training):
        torch.manual_seed(0)
        wanted = results(function, given)
        torch.manual_seed(0)
        found = results(capture.compile(function), compiled)
    for key in wanted:
        _assert_equal(found[key], wanted[key], key)
    for key in given:
        _assert_equal(compiled[key].detach(), given[key].detach(), f"{key} afterwards")
    assert [bool(capture.report.fused), bool(capture.report.missed)] == [reason is None, reason is not None]
    assert reason is None or reason in capture.reasons[0], capture.reasons


def _assert_equal(found: Tensor | None, wanted: Tensor | None, what: str) -> None:
    assert (found is None) == (wanted is None), f"{what}: a gradient on one side only"
    if found is not None and wanted is not None:
        same = torch.equal(found, wanted) if wanted.dtype is torch.bool else relative_error(found, wanted) <= SAME
        assert same, f"{what}: other values"


@pytest.mark.parametrize(("method", "dims"), [("transpose_", (0, 1)), ("unsqueeze_", (0,))])
def test_an_input_whose_shape_changes_in_place_after_the_layer(method: str, dims: tuple[int, ...]) -> None:
    """Tracing records only the last shape of a tensor, so the pass does not know which shape the layer reads."""

    def function(x: Tensor, w: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone()
        result = masked(x, w, m)
        getattr(x, method)(*dims)
        return result, x

    named = {name: tensor for name, tensor in tensors(training=False).items() if name in "xwm"}
    capture = Capture()
    for found, wanted in zip(capture.compile(function)(**named), function(**named), strict=True):
        assert torch.equal(found, wanted)
    assert ["the shape of `x` is unknown, or a call such as t_" in reason for reason in capture.reasons] == [True]


def test_a_fill_outside_of_a_layer_stays_unchanged() -> None:
    def function(x: Tensor, m: Tensor) -> Tensor:
        copy = x.clone()
        copy[m] = 1e5
        return copy * 2

    named = tensors(training=False)
    capture = Capture()
    compiled = capture.compile(function)
    half = named["x"].half()
    try:
        wanted = function(half, named["m"])
    except RuntimeError:  # torch 2.15 refuses the number
        with pytest.raises(RuntimeError, match="without overflow"):
            compiled(half, named["m"])
        return
    assert torch.equal(compiled(half, named["m"]), wanted)
    assert list(map(str, capture.after)) == list(map(str, capture.before))


def test_a_weight_that_is_filled_with_zeros_gives_zeros() -> None:
    """The pass evaluates `zeros.mul_(mask)` at both values of the mask."""

    def function(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
        w.zero_()
        gate, value = w.clone(), w.clone()
        gate.mul_(m)
        value.mul_(~m)
        return two(x, x, gate, value)

    named = tensors(training=False)
    compiled = Capture().compile(lambda x, w, m: function(x, w * 2, m))
    assert torch.equal(compiled(named["x"], named["w"], named["m"]), torch.zeros(SIZE, SIZE, dtype=torch.float64))
