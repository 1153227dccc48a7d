"""Comparison of the fused model with the naive one, and of both with float64: outputs and every gradient."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..accuracy import ERROR_BUDGET, relative_error
from .errors import Disagreement, require
from .model import loss_of
from .settings import Settings
from .train import Forward

Gradients = dict[str, Tensor]

# The largest relative error of a gradient, by the dtype of the matrix products; `ERROR_BUDGET` is that of an output.
# Fused is compared with naive, whose own error counts too. Measured errors are at most a quarter of these.
GRADIENT_BUDGET = {torch.float32: 1e-5, torch.bfloat16: 5e-2}

# Against float64, the error of the fused model may be this many times that of the naive model. The two may therefore
# differ by 1 + 1.5 times the naive error, which exceeds the budget where the terms of a gradient almost cancel.
NAIVE_FACTOR = 1.5

# An error below half a unit in the last place of the dtype is accepted, whatever the naive error is.
NEGLIGIBLE = {dtype: torch.finfo(dtype).eps / 2 for dtype in GRADIENT_BUDGET}


@dataclass(frozen=True)
class Agreement:
    """Relative errors `||a - b|| / ||b||`; for gradients, the largest over the parameters.

    `output` and `gradient` compare fused with naive; `fused_*` and `naive_*` compare with the naive model in float64.
    """

    output: float
    gradient: float
    worst_parameter: str
    fused_output: float
    naive_output: float
    fused_gradient: float
    naive_gradient: float


def compare(model: nn.Module, fused: Forward, inputs: Tensor, targets: Tensor, settings: Settings) -> Agreement:
    """Run a batch through `fused`, through the naive `model` uncompiled, and through a float64 copy of it."""
    fused_output, fused_gradients = _run(model, fused, inputs, targets, settings)
    naive_output, naive_gradients = _run(model, model, inputs, targets, settings)
    exact = deepcopy(model).double()
    exact_output, exact_gradients = _run(exact, exact, inputs, targets, None)
    gradient, worst = _largest(fused_gradients, naive_gradients)
    return Agreement(
        output=relative_error(fused_output, naive_output),
        gradient=gradient,
        worst_parameter=worst,
        fused_output=relative_error(fused_output, exact_output),
        naive_output=relative_error(naive_output, exact_output),
        fused_gradient=_largest(fused_gradients, exact_gradients)[0],
        naive_gradient=_largest(naive_gradients, exact_gradients)[0],
    )


def check(found: Agreement, dtype: torch.dtype, when: str) -> None:
    """Check the errors against the budget of `dtype`, and against those of the naive model in float64.

    Raises:
        Disagreement: with the numbers.
    """
    for what, error, budget, fused, naive in (
        ("outputs", found.output, ERROR_BUDGET[dtype], found.fused_output, found.naive_output),
        (
            f"gradients (worst: {found.worst_parameter})",
            found.gradient,
            GRADIENT_BUDGET[dtype],
            found.fused_gradient,
            found.naive_gradient,
        ),
    ):
        allowed = max(budget, (1 + NAIVE_FACTOR) * naive)
        require(error <= allowed, f"{when}, fused {what} differ from naive by {error:.2e}; the budget is {allowed:.1e}")
        require(
            fused <= max(NAIVE_FACTOR * naive, NEGLIGIBLE[dtype]),
            f"{when}, the error of fused {what} against float64 is {fused:.2e}, "
            f"more than {NAIVE_FACTOR} times that of naive, {naive:.2e}",
        )


def _run(
    model: nn.Module, forward: Forward, inputs: Tensor, targets: Tensor, settings: Settings | None
) -> tuple[Tensor, Gradients]:
    """Return the logits and the gradient of the loss for every parameter; under autocast if `settings` is given."""
    model.zero_grad(set_to_none=True)
    if settings is None:
        logits = forward(inputs)
    else:
        with settings.autocast():
            logits = forward(inputs)
    loss_of(logits, targets).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            raise Disagreement(f"{name} got no gradient")
        gradients[name] = parameter.grad
    model.zero_grad(set_to_none=True)
    return logits.detach(), gradients


def _largest(found: Gradients, expected: Gradients) -> tuple[float, str]:
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return errors[worst], worst
