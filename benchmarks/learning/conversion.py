"""Fits the layers of an MGLU model to a trained SwiGLU model, one after the other, on hidden states of real text.

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

If the converted layer is wider, the neurons with the largest errors are split in two of half the output each. Their
masks favour the gate in one half and the value in the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.decoder import Block
from benchmarks.language_model import LanguageModel
from benchmarks.learning.structure import two_of_four
from mglu_ops.activations import Activation, get_activation
from mglu_ops.nn import GLU, MGLU
from mglu_ops.nn.masked_linear import LOGITS_STD

STEPS = ("alternation", "down", "joint")
"""The steps of the fit, in order. Each starts from the result of the step before it."""
DAMPING = 0.01
"""A multiple of the mean diagonal of H that is added to its diagonal."""
RIDGE = 1e-3
"""The ridge of the down projection, as a multiple of the mean diagonal of `E z' z'^T`."""
ADMM_STEPS, RHO = 60, (0.1, 1.0)
"""Iterations of ADMM, and the first and last rho. More iterations lower the quadratic error by less than 1%."""
CG_STEPS = 30
ADAM_STEPS, ADAM_TOKENS, ADAM_RATE = 400, 4096, 0.03
"""Steps of `joint`, hidden states of each, and the largest rate as a multiple of a matrix's root mean square."""
SPLIT = 4.0
"""The factor by which a half of a split neuron favours its gate or its value."""


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
        return float((y - sample.y).square().sum() / sample.y.square().sum())


class Sample(NamedTuple):
    """Hidden states x `[tokens, h]`, what the teacher's layer makes of them, y `[tokens, h]`, and the activation."""

    x: Tensor
    y: Tensor
    act: Activation


class Rows(NamedTuple):
    """The teacher's neurons, some of them split: gate and value `[d', h]`, down `[h, d']`, and the weights `[d', 1]` of
    errors of the gate (a) and of the value (b).
    """

    gate: Tensor
    value: Tensor
    down: Tensor
    a: Tensor
    b: Tensor


@torch.no_grad()
def fit_model(
    model: LanguageModel, teacher: LanguageModel, tokens: Tensor, last: str, structure: str = "free"
) -> list[dict[str, float]]:
    """Fit each feed-forward layer of an MGLU model to the layer of its teacher. Copy all other parameters.

    Args:
        model: the model, with MGLU layers that have learned masks and no router; changed in place.
        teacher: the SwiGLU model.
        tokens: the text of the sample, int64 `[sequences, length]`.
        last: the last step of the fit, one of STEPS.
        structure: `free` or `2:4`, the structure of the masks.

    Returns:
        For each layer, the error `E |y' - y|^2 / E |y|^2` of conversion by magnitude and after each step.
    """
    kept = {name: one for name, one in teacher.state_dict().items() if ".projection." not in name}
    kept = {name: one for name, one in kept.items() if not name.endswith(".down.weight")}
    model.load_state_dict(kept, strict=False)
    rotation = model.cosine[: tokens.shape[1]], model.sine[: tokens.shape[1]]
    x, errors = model.embedding(tokens), []
    for block, own in zip(teacher.blocks, model.blocks, strict=True):
        assert isinstance(block, Block)
        assert isinstance(own, Block)
        assert isinstance(block.projection, GLU)
        assert isinstance(own.projection, MGLU)
        x = torch.cat([part + block.attention(block.attention_norm(part), rotation) for part in x.split(8)])
        normed = block.projection_norm(x).flatten(0, 1)
        teacher_layer = block.projection
        assert teacher_layer.gate_proj is not None
        sample = Sample(normed, block.down(teacher_layer(normed)), get_activation(teacher_layer.activation))
        gate, value = teacher_layer.gate_proj.weight, teacher_layer.up_proj.weight
        rows = Rows(gate, value, block.down.weight, *sensitivities(gate, value, sample))
        layer, of = fit_layer(rows, sample, own.projection, last, structure)
        own.projection.weight.copy_(layer.weight)
        assert own.projection.mask_logits is not None
        own.projection.mask_logits.copy_(torch.where(layer.masks, LOGITS_STD, -LOGITS_STD))
        own.down.weight.copy_(layer.down)
        x = x + F.linear(layer.neurons(normed, sample.act), layer.down).view_as(x)
        errors.append(of)
    return errors


def fit_layer(rows: Rows, sample: Sample, layer: MGLU, last: str, structure: str) -> tuple[Fit, dict[str, float]]:
    """Fit a layer with the sizes of `layer` to a teacher's neurons, as `fit_model` does."""
    covariance = sample.x.T @ sample.x / len(sample.x)
    covariance.diagonal().add_(DAMPING * covariance.diagonal().mean())
    n_masks, width = layer.n_masks, layer.out_features
    difference = rows.gate.abs() - rows.value.abs()
    mask = two_of_four(difference) if structure == "2:4" else difference >= 0
    magnitude = Fit(torch.where(mask, rows.gate, rows.value), mask[None], rows.down)
    errors = {"magnitude": magnitude.error(sample)}
    if width > len(rows.gate):
        z = sample.act.forward(F.linear(sample.x, rows.gate)) * F.linear(sample.x, rows.value)
        plain = alternation(rows, covariance, 1, structure)
        rows = split(rows, plain.neurons(sample.x, sample.act) - z, width)
    steps = {
        "alternation": lambda fit: alternation(rows, covariance, n_masks, structure),
        "down": lambda fit: Fit(fit.weight, fit.masks, solve_down(fit, sample)),
        "joint": lambda fit: joint(fit, sample),
    }
    fit = magnitude
    for name in STEPS[: STEPS.index(last) + 1]:
        fit = steps[name](fit)
        errors[name] = fit.error(sample)
    return fit, errors


def sensitivities(gate: Tensor, value: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
    """Return the weights `[d, 1]` of squared errors of each neuron's gate (a) and value (b)."""
    g, v = F.linear(sample.x, gate), F.linear(sample.x, value)
    a, b = (one.square().mean(0)[:, None] for one in (sample.act.backward(v, g), sample.act.forward(g)))
    return a, b


def split(rows: Rows, errors: Tensor, width: int) -> Rows:
    """Split the neurons with the largest errors in two, so that there are `width`.

    `errors` are `z' - z` `[tokens, d]`. One half weights errors of the gate by SPLIT, the other those of the value.
    """
    count = width - len(rows.gate)
    if count > len(rows.gate):
        raise ValueError(f"width: got {width}, must be at most twice the teacher's {len(rows.gate)}")
    size = errors.square().mean(0) * rows.down.square().sum(0)
    chosen = size.argsort(descending=True)[:count]
    factor = torch.ones_like(size)
    factor[chosen] = 0.5
    down, b = rows.down * factor, rows.b.clone()
    b[chosen] *= SPLIT
    return Rows(
        torch.cat((rows.gate, rows.gate[chosen])),
        torch.cat((rows.value, rows.value[chosen])),
        torch.cat((down, down[:, chosen]), 1),
        torch.cat((rows.a, rows.a[chosen] * SPLIT)),
        torch.cat((b, rows.b[chosen])),
    )


def alternation(rows: Rows, covariance: Tensor, n_masks: int, structure: str) -> Fit:
    """Choose masks and weights for the quadratic error, by ADMM and then conjugate gradients."""
    scale = covariance.diagonal().sqrt()
    roots = torch.stack((rows.a, rows.b)).sqrt().clamp(min=1e-12)  # [2, d', 1]
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


def nearest(dense: Tensor, rows: Rows, n_masks: int, structure: str) -> tuple[Tensor, Tensor]:
    """The weight w and the shares p, `[d', h]`, that minimise `a (p w - g)^2 + b ((1 - p) w - v)^2` at each element.

    For given p, w is `(a p g + b (1 - p) v) / (a p^2 + b (1 - p)^2)`, and the error falls by
    `(a p g + b (1 - p) v)^2 / (a p^2 + b (1 - p)^2)`, the gain. For one mask, p = 1 if the gate has the larger gain.

    Args:
        dense: the rows [g; v], `[2, d', h]`.
        rows: a and b.
        n_masks: n, for p in {0, 1/n, .., 1}.
        structure: `free`, or `2:4` for shares that are 1, p, 1 - p and 0 in each four columns. The gate's gain exceeds
            the value's gain by most where the share is 1, and by least where it is 0.
    """
    (g, v), (a, b) = dense, (rows.a, rows.b)
    levels = torch.linspace(0, 1, n_masks + 1, device=g.device)
    gains = torch.stack([(a * p * g + b * (1 - p) * v).square() / (a * p**2 + b * (1 - p) ** 2) for p in levels])
    shares = levels[gains.argmax(0)]
    if structure == "2:4":
        order = (gains[-1] - gains[0]).unflatten(-1, (-1, 4)).argsort(-1, descending=True)
        sorted_gains = gains.unflatten(-1, (-1, 4)).gather(-1, order.expand(n_masks + 1, -1, -1, -1))
        p = levels[(sorted_gains[..., 1] + sorted_gains[..., 2].flip(0)).argmax(0)]
        ranked = torch.stack((torch.ones_like(p), p, 1 - p, torch.zeros_like(p)), -1)
        shares = torch.empty_like(ranked).scatter_(-1, order, ranked).flatten(-2)
    return (a * shares * g + b * (1 - shares) * v) / (a * shares.square() + b * (1 - shares).square()), shares


def pairs_of_four(counts: Tensor, n_masks: int) -> Tensor:
    """Masks `[n_masks, d', h]` of structure 2:4 that are 1 `counts` times at each element."""
    masks, left = [], counts
    for _ in range(n_masks):
        masks.append(two_of_four(left))
        left = left - masks[-1].to(left)
    return torch.stack(masks)


def masks_of(shares: Tensor, n_masks: int, structure: str) -> Tensor:
    """Masks `[n_masks, d', h]` with these shares of ones. Which masks are 1 is random at each element or each four."""
    counts = (shares * n_masks).round()
    is_free = structure == "free"
    masks = torch.stack([counts > i for i in range(n_masks)]) if is_free else pairs_of_four(counts, n_masks)
    generator = torch.Generator(shares.device).manual_seed(0)
    *rows, columns = masks.shape
    group = 1 if is_free else 4
    order = torch.rand(*rows, columns // group, generator=generator, device=shares.device).argsort(0)
    return masks.gather(0, order.repeat_interleave(group, -1))


def solve_weight(rows: Rows, covariance: Tensor, shares: Tensor, weight: Tensor) -> Tensor:
    """Minimise the quadratic error over W given the shares of ones, by conjugate gradients on all rows at once."""
    factors = torch.stack((shares, 1 - shares))
    weighted = torch.stack((rows.a, rows.b)) * factors

    def normal(w: Tensor) -> Tensor:
        return (weighted * (factors * w @ covariance)).sum(0)

    preconditioner = 1 / ((weighted * factors).sum(0) * covariance.diagonal()).clamp(min=1e-30)
    residual = (weighted * (torch.stack((rows.gate, rows.value)) @ covariance)).sum(0) - normal(weight)
    step = direction = preconditioner * residual
    size = (residual * step).sum(-1, keepdim=True)
    for _ in range(CG_STEPS):
        moved = normal(direction)
        length = size / (direction * moved).sum(-1, keepdim=True).clamp(min=1e-30)
        weight, residual = weight + length * direction, residual - length * moved
        step, before = preconditioner * residual, size
        size = (residual * step).sum(-1, keepdim=True)
        direction = step + size / before.clamp(min=1e-30) * direction
    return weight


def solve_down(fit: Fit, sample: Sample) -> Tensor:
    """The down projection `[h, d']` with the least squared error of y, with a ridge around the present one."""
    z = fit.neurons(sample.x, sample.act)
    normal = z.T @ z
    ridge = RIDGE * normal.diagonal().mean()
    normal.diagonal().add_(ridge)
    return torch.linalg.solve(normal, z.T @ sample.y + ridge * fit.down.T).T


def joint(fit: Fit, sample: Sample) -> Fit:
    """Train W and the down projection on `E |y' - y|^2` with Adam. The rate warms up, then falls with a cosine to 0."""
    generator = torch.Generator(sample.x.device).manual_seed(0)
    weight, down = (one.clone().requires_grad_() for one in (fit.weight, fit.down))
    trained = Fit(weight, fit.masks, down)
    groups = [{"params": [one], "lr": ADAM_RATE * one.detach().square().mean().sqrt().item()} for one in (weight, down)]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / ADAM_STEPS))
    )
    size = sample.y.square().mean()
    for _ in range(ADAM_STEPS):
        chosen = torch.randint(len(sample.x), (ADAM_TOKENS,), generator=generator, device=sample.x.device)
        with torch.enable_grad():
            y = F.linear(trained.neurons(sample.x[chosen], sample.act), down)
            ((y - sample.y[chosen]).square().mean() / size).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return Fit(weight.detach(), fit.masks, down.detach())
