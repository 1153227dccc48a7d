"""Does the fused model compute what the naive one does? Outputs and every gradient, against float64 too."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .errors import Disagreement, require
from .model import loss_of
from .settings import Settings
from .train import Forward

Gradients = dict[str, Tensor]

# Largest relative error of fused against naive over a whole model, by the format of the matrix products: some layers,
# each within its own budget, and what stands between them. Measured errors lie at a quarter of it and below.
OUTPUT_BUDGET = {torch.float32: 4e-6, torch.bfloat16: 2.4e-2}
GRADIENT_BUDGET = {torch.float32: 1e-5, torch.bfloat16: 5e-2}

# The design's bar: against float64, no more than this many times the error of the naive model. So the two may differ
# by 1 + 1.5 times naive's error, where a gradient almost cancels and this is more than the budget.
NAIVE_FACTOR = 1.5

# Below half the last place of the format there is nothing to compare.
NEGLIGIBLE = {dtype: torch.finfo(dtype).eps / 2 for dtype in OUTPUT_BUDGET}


@dataclass(frozen=True)
class Agreement:
    """Relative errors `||a - b|| / ||b||`; of gradients, the largest over the parameters.

    `fused_*` and `naive_*` are against the naive model in float64; `output` and `gradient` are fused against naive.
    """

    output: float
    gradient: float
    worst_parameter: str
    fused_output: float
    naive_output: float
    fused_gradient: float
    naive_gradient: float


def relative_error(result: Tensor, expected: Tensor) -> float:
    """`||result - expected|| / ||expected||` in float64; the norm of the difference where `expected` is zero."""
    result, expected = result.detach().double(), expected.detach().double()
    norm, error = expected.norm(), (result - expected).norm()
    return float(error / norm) if norm > 0 else float(error)


def compare(model: nn.Module, fused: Forward, inputs: Tensor, targets: Tensor, settings: Settings) -> Agreement:
    """Run a batch through `fused`, through the naive `model` without compiling, and through its float64 copy."""
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
    """Refuse an agreement over the budget of `dtype`, or over the bar against float64.

    Raises:
        Disagreement: with the numbers.
    """
    for what, error, budget, fused, naive in (
        ("outputs", found.output, OUTPUT_BUDGET[dtype], found.fused_output, found.naive_output),
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
            f"{when}, fused {what} err by {fused:.2e} against float64, "
            f"more than {NAIVE_FACTOR} times naive's {naive:.2e}",
        )


def _run(
    model: nn.Module, forward: Forward, inputs: Tensor, targets: Tensor, settings: Settings | None
) -> tuple[Tensor, Gradients]:
    """The logits, and the gradient of the loss for every parameter; in the training format if `settings` is given."""
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
