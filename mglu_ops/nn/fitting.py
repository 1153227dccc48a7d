"""Fits an MGLU layer to a gated linear unit, such as a SwiGLU layer, on a sample of its hidden states.

The teacher's feed-forward layer maps a hidden state x `[h]` to `y = D z`, with one element of z for each neuron j:

    z_j = act(g_j x) * (v_j x)        rows g_j of G and v_j of V, both [d, h]; D [h, d]

The converted layer has one matrix W, n masks M_i and a down projection D' of its own:

    z'_j = sum_i act((m_ij * w_j) x) * (((1 - m_ij) * w_j) x)        y' = D' z'

With one mask, gate and value of a neuron have disjoint supports, so half of G and V is pruned, and W holds the rest.
The fit minimises `E |y' - y|^2` over a sample of x: those that the layers already converted produce. Its steps are:

1. `alternation` chooses masks and W. Let (e, f) be the errors of the rows (g_j, v_j). To first order,
   `z'_j - z_j = act'(g_j x) (v_j x) (e x) + act(g_j x) (f x)`. With `H = E x x^T` and factors independent of x,

       E (z'_j - z_j)^2  ~  a_j e H e^T + b_j f H f^T,    a_j = E (act'(g_j x) v_j x)^2,    b_j = E act(g_j x)^2.

   Let p `[d, h]` be the shares of masks that are 1. The means over masks of the rows are p * w and (1 - p) * w, so this
   is a quadratic problem over `C = {(p w, (1 - p) w) : p in {0, 1/n, .., 1}}` for each element. ADMM, as for pruning in
   arXiv 2401.02938, finds a good solution for all rows at once. Y are the rows [g; v], scaled by sqrt(a) or sqrt(b),
   with columns scaled so that the diagonal of H is 1. From Y = Y0, the teacher's rows, and U = 0, it repeats:

       Z = the point of C next to Y + U                      masks given weights, by the sign of the gain
       U = U + Y - Z
       Y = (Y0 H + rho (Z - U)) (H + rho)^-1                 weights given masks, by least squares

   While rho grows, Y and Z meet. Conjugate gradients then find the best W for the masks, for all rows at once.
2. `down` solves `D' = argmin E |D' z' - y|^2 + ridge |D' - D|^2`.
3. `joint` trains W and D' on the products themselves, with Adam on `E |y' - y|^2`. The masks stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import Activation

STEPS = ("alternation", "down", "joint")
"""The steps of the fit, in order. Each starts from the result of the step before it."""
DAMPING = 0.01
"""A multiple of the mean diagonal of H that is added to its diagonal."""
RIDGE = 1e-3
"""The ridge of the down projection, as a multiple of the mean diagonal of `E z' z'^T`."""
LEAST_SHARE = 1e-12
"""The least value of a / (a + b) and of b / (a + b)."""
TINY = 1e-30
"""Stands for sums of squares that are zero, so that nothing is divided by zero."""
ADMM_STEPS, RHO = 60, (0.1, 1.0)
"""Iterations of ADMM, and the first and last rho. More iterations lower the quadratic error by less than 1%."""
CG_STEPS = 30
ADAM_STEPS, ADAM_TOKENS, ADAM_RATE = 400, 4096, 0.03
"""Steps of `joint`, hidden states of each, and the largest rate as a multiple of a matrix's root mean square."""


@dataclass
class Fit:
    """A converted layer: weight `[d', h]`, masks bool `[n_masks, d', h]` and down `[h, d']`."""

    weight: Tensor
    masks: Tensor
    down: Tensor

    def neurons(self, x: Tensor, act: Activation) -> Tensor:
        """Z' `[tokens, d']` of hidden states x `[tokens, h]`."""
        terms = (act.forward(F.linear(x, self.weight * mask)) * F.linear(x, self.weight * ~mask) for mask in self.masks)
        return sum(terms, x.new_zeros(()))

    def error(self, sample: Sample) -> float:
        """`E |y' - y|^2 / E |y|^2` over the sample."""
        y = F.linear(self.neurons(sample.x, sample.act), self.down)
        return float((y - sample.y).square().mean() / sample.power())


class Sample(NamedTuple):
    """Hidden states x `[tokens, h]`, what the teacher's layer makes of them, y `[tokens, h]`, and the activation."""

    x: Tensor
    y: Tensor
    act: Activation

    def power(self) -> Tensor:
        """The mean square of y, by which errors are divided, or 1 if y is zero: a down projection may be zero."""
        power = self.y.square().mean()
        return torch.where(power > 0, power, 1)


class Rows(NamedTuple):
    """The teacher's neurons, some of them split: gate and value `[d', h]`, down `[h, d']`, and the weights `[d', 1]` of
    errors of the gate (a) and of the value (b).
    """

    gate: Tensor
    value: Tensor
    down: Tensor
    a: Tensor
    b: Tensor


class Structure(NamedTuple):
    """How masks may be chosen.

    Attributes:
        shares: chooses the shares of ones `[d', h]` from the gain of each share, `[n + 1, d', h]`, and the shares
            `[n + 1]`, which go from 0 to 1.
        masks: masks bool `[n, d', h]`, of which as many are 1 at each element as the counts `[d', h]` say, from the
            counts and n.
        columns: the number of neighbouring columns that are exchanged together between masks.
    """

    shares: Callable[[Tensor, Tensor], Tensor]
    masks: Callable[[Tensor, int], Tensor]
    columns: int


FREE = Structure(
    lambda gains, levels: levels[gains.argmax(0)],
    lambda counts, n_masks: torch.stack([counts > i for i in range(n_masks)]),
    1,
)
"""Masks whose elements are chosen one by one."""


@torch.no_grad()
def fit(
    rows: Rows, sample: Sample, n_masks: int, last: str = STEPS[-1], structure: Structure = FREE
) -> tuple[Fit, dict[str, float]]:
    """Fit a layer with n masks to a teacher's neurons.

    Args:
        rows: the teacher's neurons, in float32.
        sample: hidden states and results of the teacher's layer, in float32.
        n_masks: number of masks.
        last: the last step of the fit, one of STEPS.
        structure: how masks may be chosen.

    Returns:
        The layer, and the error `E |y' - y|^2 / E |y|^2` of conversion by magnitude and after each step.
    """
    covariance = covariance_of(sample)
    magnitudes = torch.stack((rows.value.abs(), rows.gate.abs()))
    is_gate = structure.shares(magnitudes, magnitudes.new_tensor([0.0, 1.0])) > 0
    fit = Fit(torch.where(is_gate, rows.gate, rows.value), is_gate[None], rows.down)
    steps = {
        "alternation": lambda fit: alternation(rows, covariance, n_masks, structure),
        "down": lambda fit: Fit(fit.weight, fit.masks, solve_down(fit, sample)),
        "joint": lambda fit: joint(fit, sample),
    }
    errors = {"magnitude": fit.error(sample)}
    for name in STEPS[: STEPS.index(last) + 1]:
        fit = steps[name](fit)
        errors[name] = fit.error(sample)
    return fit, errors


def covariance_of(sample: Sample) -> Tensor:
    """H `[h, h]`, the mean of x x^T, with DAMPING."""
    covariance = sample.x.T @ sample.x / len(sample.x)
    covariance.diagonal().add_(DAMPING * covariance.diagonal().mean().clamp(min=TINY))
    return covariance


def sensitivities(gate: Tensor, value: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
    """Return the weights `[d, 1]` of squared errors of each neuron's gate (a) and value (b)."""
    g, v = F.linear(sample.x, gate), F.linear(sample.x, value)
    a, b = (one.square().mean(0)[:, None] for one in (sample.act.backward(v, g), sample.act.forward(g)))
    return a, b


def alternation(rows: Rows, covariance: Tensor, n_masks: int, structure: Structure) -> Fit:
    """Choose masks and weights for the quadratic error, by ADMM and then conjugate gradients."""
    # A common factor of a neuron's a and b changes no solution. With a sum of 1, their products cannot underflow; and
    # with the least value, a dead neuron, for which one or both are 0, has no quotient 0 / 0.
    size = (rows.a + rows.b).clamp(min=TINY)
    rows = rows._replace(a=(rows.a / size).clamp(min=LEAST_SHARE), b=(rows.b / size).clamp(min=LEAST_SHARE))
    scale = covariance.diagonal().sqrt()
    roots = torch.stack((rows.a, rows.b)).sqrt()  # [2, d', 1]
    values, vectors = torch.linalg.eigh(covariance / scale / scale[:, None])
    target = torch.stack((rows.gate, rows.value)) * roots * scale  # Y0, [2, d', h]
    pulled = target @ ((vectors * values) @ vectors.T)
    y, u = target, torch.zeros_like(target)
    for i in range(ADMM_STEPS):
        rho = RHO[0] * (RHO[1] / RHO[0]) ** (i / (ADMM_STEPS - 1))
        weight, shares = nearest((y + u) / roots, rows, n_masks, structure)
        z = torch.stack((shares, 1 - shares)) * weight * roots
        u = u + y - z
        y = (pulled + rho * (z - u)) @ ((vectors / (values + rho)) @ vectors.T)
    masks = masks_of(shares, n_masks, structure)
    weight = solve_weight(rows, covariance, masks.float().mean(0), weight / scale)
    return Fit(weight, masks, rows.down / n_masks)


def nearest(dense: Tensor, rows: Rows, n_masks: int, structure: Structure) -> tuple[Tensor, Tensor]:
    """The weight w and the shares p, `[d', h]`, that minimise `a (p w - g)^2 + b ((1 - p) w - v)^2` at each element.

    For given p, w is `(a p g + b (1 - p) v) / (a p^2 + b (1 - p)^2)`, and the error falls by
    `(a p g + b (1 - p) v)^2 / (a p^2 + b (1 - p)^2)`, the gain. For one mask, p = 1 if the gate has the larger gain.

    Args:
        dense: the rows [g; v], `[2, d', h]`.
        rows: a and b.
        n_masks: n, for p in {0, 1/n, .., 1}.
        structure: how masks may be chosen.
    """
    (g, v), (a, b) = dense, (rows.a, rows.b)
    levels = torch.linspace(0, 1, n_masks + 1, device=g.device, dtype=g.dtype)
    gains = torch.stack([(a * p * g + b * (1 - p) * v).square() / (a * p**2 + b * (1 - p) ** 2) for p in levels])
    shares = structure.shares(gains, levels)
    return (a * shares * g + b * (1 - shares) * v) / (a * shares.square() + b * (1 - shares).square()), shares


def masks_of(shares: Tensor, n_masks: int, structure: Structure) -> Tensor:
    """Masks `[n_masks, d', h]` with these shares of ones. Which masks are 1 is random in each group of columns."""
    masks = structure.masks((shares * n_masks).round(), n_masks)
    generator = torch.Generator(shares.device).manual_seed(0)
    *rows, columns = masks.shape
    random = torch.empty(*rows, columns // structure.columns, device=shares.device, dtype=torch.float32)
    order = random.uniform_(generator=generator).argsort(0)
    return masks.gather(0, order.repeat_interleave(structure.columns, -1))


def solve_weight(rows: Rows, covariance: Tensor, shares: Tensor, weight: Tensor) -> Tensor:
    """Minimise the quadratic error over W given the shares of ones, by conjugate gradients on all rows at once."""
    factors = torch.stack((shares, 1 - shares))
    weighted = torch.stack((rows.a, rows.b)) * factors

    def normal(w: Tensor) -> Tensor:
        return (weighted * (factors * w @ covariance)).sum(0)

    preconditioner = 1 / ((weighted * factors).sum(0) * covariance.diagonal()).clamp(min=TINY)
    residual = (weighted * (torch.stack((rows.gate, rows.value)) @ covariance)).sum(0) - normal(weight)
    step = direction = preconditioner * residual
    size = (residual * step).sum(-1, keepdim=True)
    for _ in range(CG_STEPS):
        moved = normal(direction)
        length = size / (direction * moved).sum(-1, keepdim=True).clamp(min=TINY)
        weight, residual = weight + length * direction, residual - length * moved
        step, before = preconditioner * residual, size
        size = (residual * step).sum(-1, keepdim=True)
        direction = step + size / before.clamp(min=TINY) * direction
    return weight


def solve_down(fit: Fit, sample: Sample) -> Tensor:
    """The down projection `[h, d']` with the least squared error of y, with a ridge around the present one."""
    z = fit.neurons(sample.x, sample.act)
    normal = z.T @ z
    ridge = RIDGE * normal.diagonal().mean().clamp(min=TINY)
    normal.diagonal().add_(ridge)
    return torch.linalg.solve(normal, z.T @ sample.y + ridge * fit.down.T).T


@contextmanager
def in_tf32() -> Iterator[None]:
    """Let NVIDIA GPUs multiply float32 matrices in TF32, whatever the caller has set."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@in_tf32()
def joint(fit: Fit, sample: Sample) -> Fit:
    """Train W and the down projection on `E |y' - y|^2` with Adam. The rate warms up, then falls with a cosine to 0.

    Of all steps, this one takes longest. On an H200, a fit of 8192 neurons and random hidden states of 2048 elements
    had the same errors with all products in TF32 as in float32, and took a fifth of the time.
    """
    generator = torch.Generator(sample.x.device).manual_seed(0)
    weight, down = (one.clone().requires_grad_() for one in (fit.weight, fit.down))
    trained = Fit(weight, fit.masks, down)
    groups = [{"params": [one], "lr": ADAM_RATE * one.detach().square().mean().sqrt().item()} for one in (weight, down)]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / ADAM_STEPS))
    )
    size = sample.power()
    for _ in range(ADAM_STEPS):
        chosen = torch.randint(len(sample.x), (ADAM_TOKENS,), generator=generator, device=sample.x.device)
        with torch.enable_grad():
            y = F.linear(trained.neurons(sample.x[chosen], sample.act), down)
            ((y - sample.y[chosen]).square().mean() / size).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return Fit(weight.detach(), fit.masks, down.detach())
