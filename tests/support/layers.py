"""Whole layers as people write them, each of which becomes one operator."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from spellings import Sign, gated, straight_through
from torch import Tensor, nn

D, H = 12, 8


def tensors(n_masks: int, *, three_d: bool = False, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(n_masks)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return {"x": normal(2, 3, H) if three_d else normal(5, H), "weight": normal(D, H), "logits": normal(n_masks, D, H)}


LAYERS: dict[str, tuple[str, str, Callable[..., Any]]] = {}
"""Name -> the operator that the layer becomes in training, its activation, and `function(x, weight, logits)`."""


def fuses(operator: str, activation: str = "silu") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a layer with the operator that it becomes in training."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        LAYERS[function.__name__] = (operator, activation, function)
        return function

    return register


def hard(logits: Tensor) -> Tensor:
    return (logits > 0).to(logits.dtype)


# --- All masks at once -----------------------------------------------------------------------------------------------


@fuses("forward_ste")
def stacked_masks_in_a_loop(x, weight, logits):
    masks, y = straight_through(logits), 0
    for i in range(len(logits)):
        y = y + gated(x, weight, masks[i])
    return y


@fuses("forward_ste")
def stacked_masks_unbound(x, weight, logits):
    return sum(gated(x, weight, m) for m in straight_through(logits).unbind(0))


@fuses("forward")
def stacked_fixed_masks(x, weight, logits):
    masks = hard(logits)
    return sum(gated(x, weight, masks[i, :, :]) for i in range(len(logits)))


@fuses("forward_ste")
def einsum(x, weight, logits):
    m = straight_through(logits)
    gate = torch.einsum("...h,ndh->n...d", x, m * weight)
    value = torch.einsum("...h,ndh->n...d", x, (1 - m) * weight)
    return (F.silu(gate) * value).sum(0)


@fuses("forward")
def einsum_masks_last_and_operands_swapped(x, weight, logits):
    m = logits > 0
    gate = torch.einsum("ndh,...h->...dn", torch.where(m, weight, 0), x)
    value = torch.einsum("nhd,...h->...dn", (weight[None] * ~m).mT, x)
    return (F.silu(gate) * value).sum(dim=-1)


@fuses("forward_ste")
def einsum_of_all(x, weight, logits):
    m = straight_through(logits)
    gate = torch.einsum("...h,ndh->...nd", x, weight.unsqueeze(0) * m)
    value = torch.einsum("...h,ndh->...nd", x, weight.unsqueeze(0) * (1.0 - m))
    return torch.einsum("...nd,...nd->...d", F.silu(gate), value)


@fuses("forward_ste")
def einsum_of_weight_x_and_masks(x, weight, logits):
    m = straight_through(logits)
    gate, value = (torch.einsum("dh,...h,ndh->n...d", weight, x, factor) for factor in (m, 1 - m))
    return (F.silu(gate) * value).sum(0)


@fuses("forward_ste")
def einsum_per_mask(x, weight, logits):
    y = 0
    for m in straight_through(logits):
        gate, value = (torch.einsum("...h,dh->...d", x, weight * s) for s in (m, 1 - m))
        y = y + F.silu(gate) * value
    return y


@fuses("forward_ste")
def bmm(x, weight, logits):
    m, rows = straight_through(logits), x.reshape(-1, H)
    repeated = rows.expand(len(logits), -1, -1)
    gate = torch.bmm(repeated, (weight * m).transpose(1, 2))
    value = torch.bmm(repeated, (weight * (1 - m)).transpose(1, 2))
    return (F.silu(gate) * value).sum(0)


@fuses("forward")
def bmm_of_copies(x, weight, logits):
    m, rows = hard(logits), x.reshape(-1, H).unsqueeze(0).repeat(len(logits), 1, 1)
    gate, value = rows @ (weight * m).mT, rows.bmm((weight - weight * m).permute(0, 2, 1))
    return torch.sum(F.silu(gate) * value, dim=0)


@fuses("forward_ste")
def broadcast_matmul(x, weight, logits):
    m, rows = straight_through(logits), x.reshape(-1, H)
    gate, value = rows @ (weight * m).mT, rows @ (weight * (1 - m)).mT
    return (F.silu(gate) * value).sum(0)


@fuses("forward")
def broadcast_matmul_of_three_dimensions(x, weight, logits):
    m, rows = logits > 0, x.reshape(1, -1, H)
    gate = rows.unsqueeze(1) @ (weight * m).transpose(-1, -2)
    value = rows.unsqueeze(1) @ (weight * ~m).transpose(-1, -2)
    return (F.silu(gate) * value).sum(1)


@fuses("forward")
def broadcast_matmul_with_leading_masks(x, weight, logits):
    m, rows = logits > 0, x.reshape(1, -1, H)
    gate = rows[None] @ (weight * m).mT.unsqueeze(1)
    value = rows[None] @ (weight * ~m).mT.unsqueeze(1)
    return (F.silu(gate) * value).sum(0)


@fuses("forward")
def complement_of_a_stack_by_subtraction(x, weight, logits):
    gate = torch.einsum("...h,ndh->n...d", x, hard(logits) * weight)
    return (F.silu(gate) * (F.linear(x, weight) - gate)).sum(0)


@fuses("forward")
def complement_of_a_stack_by_unsqueezed_subtraction(x, weight, logits):
    gate = torch.einsum("...h,ndh->...nd", x, hard(logits) * weight)
    return (F.silu(gate) * (F.linear(x, weight).unsqueeze(-2) - gate)).sum(-2)


@fuses("forward")
def slices_of_projections(x, weight, logits):
    m = logits > 0
    gates = torch.einsum("...h,ndh->n...d", x, m * weight)
    values = torch.einsum("...h,ndh->n...d", x, ~m * weight)
    return sum(F.silu(gates[i]) * values[i] for i in range(len(logits)))


@fuses("forward")
def filled_stack(x, weight, logits):
    m = logits > 0
    weights = weight.expand(len(logits), -1, -1)
    gate = torch.einsum("...h,ndh->n...d", x, weights.masked_fill(~m, 0))
    value = torch.einsum("...h,ndh->n...d", x, weights.masked_fill(m, 0))
    return (F.silu(gate) * value).sum(0)


# --- Mask weights of stacks -----------------------------------------------------------------------------------------


def _weighted_stack(x: Tensor, weight: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    m = straight_through(logits)
    gate = torch.einsum("...h,ndh->n...d", x, m * weight)
    terms = F.silu(gate) * torch.einsum("...h,ndh->n...d", x, (1 - m) * weight)
    return terms, torch.softmax(x @ logits[:, 0].mT, -1)


@fuses("forward_ste")
def stack_weighted_by_einsum(x, weight, logits):
    terms, mask_weight = _weighted_stack(x, weight, logits)
    return torch.einsum("n...d,...n->...d", terms, mask_weight)


@fuses("forward_ste")
def stack_weighted_by_a_product(x, weight, logits):
    terms, mask_weight = _weighted_stack(x, weight, logits)
    return (terms * mask_weight.movedim(-1, 0).unsqueeze(-1)).sum(0)


@fuses("forward")
def stack_weighted_before_the_value(x, weight, logits):
    m = logits > 0
    mask_weight = torch.sigmoid(x @ logits[:, 1].mT)
    gate = torch.einsum("...h,ndh->...nd", x, m * weight)
    value = torch.einsum("...h,ndh->...nd", x, ~m * weight)
    return (F.silu(gate) * (mask_weight.unsqueeze(-1) * value)).sum(-2)


@fuses("forward_ste")
def weighted_by_columns(x, weight, logits):
    mask_weight = torch.softmax(x @ logits[:, 0].mT, -1)
    y = 0
    for i in range(len(logits)):
        y = y + mask_weight[..., i, None] * gated(x, weight, straight_through(logits[i]))
    return y


@fuses("forward_ste")
def weighted_by_unsqueezed_columns(x, weight, logits):
    mask_weight = torch.softmax(x @ logits[:, 0].mT, -1)
    y = 0
    for r, m in zip(mask_weight.unbind(-1), logits, strict=True):
        y = y + gated(x, weight, straight_through(m)) * r.unsqueeze(-1)
    return y


# --- How masks are made ----------------------------------------------------------------------------------------------


class ClippedSign(torch.autograd.Function):
    """A straight-through estimator with a custom gradient, which the pass must keep."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return torch.where(logits > 0, 1.0, 0.0).to(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return F.hardtanh(grad) * (logits.abs() < 1)


@fuses("forward_ste")
def autograd_function(x, weight, logits):
    return sum(gated(x, weight, Sign.apply(m)) for m in logits)


@fuses("forward_ste")
def autograd_function_of_a_stack(x, weight, logits):
    masks = Sign.apply(logits)
    return sum(gated(x, weight, m) for m in masks)


@fuses("forward_ste")
def autograd_function_with_a_gradient_of_its_own(x, weight, logits):
    return sum(gated(x, weight, ClippedSign.apply(m)) for m in logits)


@fuses("forward_ste")
def straight_through_of_a_sigmoid(x, weight, logits):
    y = 0
    for m in logits:
        soft = torch.sigmoid(m)
        y = y + gated(x, weight, (soft > 0.5).to(m.dtype) + soft - soft.detach())
    return y


@fuses("forward_ste")
def straight_through_of_a_rounded_sigmoid(x, weight, logits):
    soft = torch.sigmoid(logits)
    masks = torch.round(soft).detach() + (soft - soft.detach())
    return sum(gated(x, weight, masks[i]) for i in range(len(logits)))


@fuses("forward_ste")
def straight_through_twice(x, weight, logits):
    """Gate and value each compute the mask."""
    y = 0
    for m in logits:
        y = y + F.silu(F.linear(x, weight * straight_through(m))) * F.linear(x, weight * (1 - straight_through(m)))
    return y


@fuses("forward")
def sigmoid_above_a_half(x, weight, logits):
    return sum(gated(x, weight, (torch.sigmoid(m) > 0.5).to(x.dtype)) for m in logits)


@fuses("forward")
def rounded_sigmoid(x, weight, logits):
    return sum(gated(x, weight, torch.sigmoid(m.detach()).round()) for m in logits)


@fuses("forward")
def heaviside(x, weight, logits):
    zero = torch.zeros((), dtype=logits.dtype)
    return sum(gated(x, weight, torch.heaviside(m.detach(), zero)) for m in logits)


@fuses("forward")
def positive_sign(x, weight, logits):
    return sum(gated(x, weight, F.relu(torch.sign(m.detach()))) for m in logits)


@fuses("forward")
def clamped_sign(x, weight, logits):
    return sum(gated(x, weight, m.detach().sign().clamp(min=0)) for m in logits)


@fuses("forward")
def sign_of_what_a_threshold_leaves(x, weight, logits):
    """The sign may be -1, whose absolute value is 1."""
    return sum(gated(x, weight, F.softshrink(m.detach(), 0.5).sign().abs()) for m in logits)


@fuses("forward")
def sign_with_ones_for_zeros(x, weight, logits):
    return sum(gated(x, weight, ((2 * (m > 0).to(x.dtype) - 1) + 1) / 2) for m in logits)


def _to_straight_through(hard: Tensor, logits: Tensor) -> Tensor:
    return hard.to(logits.dtype) + logits - logits.detach()


@fuses("forward_ste")
def not_negative(x, weight, logits):
    return sum(gated(x, weight, _to_straight_through(m >= 0, m)) for m in logits)


@fuses("forward_ste")
def sigmoid_of_at_least_a_half(x, weight, logits):
    y = 0
    for m in logits:
        p = torch.sigmoid(m)
        y = y + gated(x, weight, ((p >= 0.5).to(p.dtype) - p).detach() + p)
    return y


@fuses("forward_ste")
def not_below_zero(x, weight, logits):
    return sum(gated(x, weight, _to_straight_through(~(m < 0), m)) for m in logits)


@fuses("forward_ste")
def one_minus_at_most_zero(x, weight, logits):
    return sum(gated(x, weight, _to_straight_through(1 - (m <= 0).to(m.dtype), m)) for m in logits)


class NotNegative(torch.autograd.Function):
    """A straight-through estimator whose mask is 1 at 0."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return (logits >= 0).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@fuses("forward_ste")
def autograd_function_that_is_1_at_0(x, weight, logits):
    return sum(gated(x, weight, NotNegative.apply(m)) for m in logits)


@fuses("forward_ste")
def largest_of_each_row(x, weight, logits):
    y = 0
    for m in logits:
        hard = torch.zeros_like(m).scatter(-1, m.topk(3, -1).indices, 1.0)
        y = y + gated(x, weight, _to_straight_through(hard, m))
    return y


@fuses("forward")
def largest_of_each_row_in_place(x, weight, logits):
    masks = (torch.zeros_like(m).scatter_(-1, m.topk(3, -1).indices, 1.0) for m in logits)
    return sum(gated(x, weight, m) for m in masks)


@fuses("forward_ste")
def threshold_of_each_row(x, weight, logits):
    thresholds = (m.kthvalue(4, -1, keepdim=True).values for m in logits)
    return sum(gated(x, weight, _to_straight_through(m >= k, m)) for m, k in zip(logits, thresholds, strict=True))


@fuses("forward")
def one_hot_rows(x, weight, logits):
    return sum(gated(x, weight, F.one_hot(m.argmax(-1), H)) for m in logits)


@fuses("forward")
def transposed_masks(x, weight, logits):
    masks = (logits > 0).to(x.dtype).mT.contiguous()
    return sum(gated(x, weight, masks[i].t()) for i in range(len(logits)))


@fuses("forward")
def unpacked_by_an_arange(x, weight, logits):
    """Each byte holds four bits of a row."""
    shifts, y = torch.arange(4, dtype=torch.uint8), 0
    for m in logits:
        packed = ((m > 0).to(torch.uint8).reshape(D, H // 4, 4) << shifts).sum(-1).to(torch.uint8)
        y = y + gated(x, weight, ((packed[..., None] >> shifts) & 1).reshape(D, H).to(x.dtype))
    return y


@fuses("forward")
def vmap_over_masks(x, weight, logits):
    return torch.vmap(lambda m: gated(x, weight, m, ~m))(logits > 0).sum(0)


@fuses("forward")
def vmap_over_masks_that_are_stacked(x, weight, logits):
    return torch.vmap(lambda m: gated(x, weight, m, ~m))(torch.stack([m > 0 for m in logits])).sum(0)


@fuses("forward_ste")
def vmap_over_trained_masks(x, weight, logits):
    return torch.vmap(lambda m: gated(x, weight, m))(straight_through(logits)).sum(0)


@fuses("forward", "sigmoid")
def gated_linear_units(x, weight, logits):
    return sum(F.glu(F.linear(x, torch.cat([weight * ~m, weight * m]))) for m in logits > 0)


@fuses("forward")
def accumulated_by_addcmul(x, weight, logits):
    y = torch.zeros(*x.shape[:-1], D, dtype=x.dtype)
    for m in logits > 0:
        y = torch.addcmul(y, F.silu(F.linear(x, weight * m)), F.linear(x, weight * ~m))
    return y


@fuses("forward")
def terms_times_weights(x, weight, logits):
    terms = torch.stack([gated(x, weight, m, ~m) for m in logits > 0], -1)
    return terms @ torch.softmax(logits[:, 0, 0], 0)


def _packed(logits: Tensor) -> Tensor:
    """One byte per weight, whose bit i is mask i; at most eight masks."""
    weights = 2 ** torch.arange(min(len(logits), 8)).view(-1, 1, 1)
    return ((logits[:8] > 0) * weights).sum(0).to(torch.uint8)


@fuses("forward")
def packed_bits(x, weight, logits):
    packed = _packed(logits)
    return sum(gated(x, weight, ((packed >> i) & 1).to(x.dtype)) for i in range(min(len(logits), 8)))


@fuses("forward")
def packed_bits_as_bool(x, weight, logits):
    packed, y = _packed(logits), 0
    for i in range(min(len(logits), 8)):
        m = (packed & (1 << i)) != 0
        y = y + F.silu(F.linear(x, weight * m)) * F.linear(x, weight * ~m)
    return y


@fuses("forward")
def packed_bits_by_remainder(x, weight, logits):
    packed = _packed(logits)
    return sum(gated(x, weight, (packed // 2**i) % 2) for i in range(min(len(logits), 8)))


@fuses("forward")
def thresholds_of_one_tensor(x, weight, logits):
    """All masks are comparisons of one matrix."""
    return sum(gated(x, weight, (logits[0] > bound / 10).to(x.dtype)) for bound in range(len(logits)))


# --- Masked weights --------------------------------------------------------------------------------------------------


@fuses("forward")
def clone_written_to(x, weight, logits):
    y = 0
    for m in logits > 0:
        gate, value = weight.clone(), weight.clone()
        gate.mul_(m)
        value[m] = 0
        y = y + F.silu(F.linear(x, gate)) * F.linear(x, value)
    return y


@fuses("forward_ste")
def logits_negated_inside_the_straight_through(x, weight, logits):
    y = 0
    for m in logits.clone():
        m = m.clone()
        hard = (m > 0).to(m.dtype)
        m.mul_(-1)
        y = y + gated(x, weight, (hard - m).detach() + m)
    return y


@fuses("forward")
def sum_that_is_written_before(x, weight, logits):
    y = torch.zeros(*x.shape[:-1], D, dtype=x.dtype)
    y[0] = 3
    for m in logits > 0:
        y = y + gated(x, weight, m, ~m)
    return y


@fuses("forward")
def residual_that_terms_are_added_to(x, weight, logits):
    y = weight[:, 0] * x.sum(-1, keepdim=True)
    for m in logits > 0:
        y += gated(x, weight, m, ~m)
    return y


@fuses("forward")
def clone_filled(x, weight, logits):
    y = 0
    for m in logits > 0:
        gate = weight.clone().masked_fill_(~m, 0.0)
        value = weight.clone()
        value *= ~m
        y = y + F.silu(F.linear(x, gate)) * F.linear(x, value)
    return y


@fuses("forward_ste")
def addmm_without_bias(x, weight, logits):
    rows, y = x.reshape(-1, H), 0
    for i in range(len(logits)):
        m = straight_through(logits[i])
        gate = torch.addmm(torch.zeros(D, dtype=x.dtype), rows, (weight * m).t())
        value = torch.addmm(weight[:, 0], rows, (weight * (1 - m)).t(), beta=0)
        y = y + F.silu(gate) * value
    return y


@fuses("forward_ste")
def complement_by_subtraction(x, weight, logits):
    total, y = x @ weight.T, 0
    for m in logits:
        gate = x @ (weight * straight_through(m)).T
        y = y + F.silu(gate) * (total - gate)
    return y


# --- Activations -----------------------------------------------------------------------------------------------------


def with_activation(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        y = 0
        for m in logits:
            m = straight_through(m)
            y = y + function(F.linear(x, weight * m)) * F.linear(x, weight * (1 - m))
        return y

    return layer


BY_HAND: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "g / (1 + exp(-g))": ("silu", lambda g: g / (1 + torch.exp(-g))),
    "g * (1 / (exp(-g) + 1))": ("silu", lambda g: g * (1 / ((-g).exp() + 1))),
    "g * reciprocal": ("silu", lambda g: torch.reciprocal(1.0 + torch.exp(-1 * g)) * g),
    "g * sigmoid(g)": ("silu", lambda g: g * g.sigmoid()),
    "g.mul(sigmoid)": ("silu", lambda g: torch.sigmoid(g).mul(g)),
    "module silu": ("silu", nn.SiLU()),
    "1 / (1 + exp(-g))": ("sigmoid", lambda g: 1 / (1 + torch.exp(-g))),
    "erf": ("gelu", lambda g: 0.5 * g * (1 + torch.erf(g / math.sqrt(2)))),
    "erf of a product": ("gelu", lambda g: g * (torch.erf(g * 0.7071067811865476) + 1.0) / 2),
    "module gelu": ("gelu", nn.GELU()),
    "tanh of a cube": (
        "gelu_tanh",
        lambda g: 0.5 * g * (1 + torch.tanh(0.7978845608028654 * (g + 0.044715 * torch.pow(g, 3)))),
    ),
    "tanh of products": (
        "gelu_tanh",
        lambda g: 0.5 * g * (1 + torch.tanh(g * 0.7978845608028654 * (1 + 0.044715 * g * g))),
    ),
    "module gelu_tanh": ("gelu_tanh", nn.GELU(approximate="tanh")),
    "threshold": ("relu", lambda g: F.threshold(g, 0.0, 0.0)),
    "relu_": ("relu", lambda g: g.relu_()),
    "module relu": ("relu", nn.ReLU(inplace=True)),
    "module tanh": ("tanh", nn.Tanh()),
    "method tanh": ("tanh", lambda g: g.tanh()),
    "module identity": ("identity", nn.Identity()),
}

for _name, (_activation, _function) in BY_HAND.items():
    LAYERS[_name] = ("forward_ste", _activation, with_activation(_function))


@fuses("forward_ste")
def activation_in_three_factors(x, weight, logits):
    y = 0
    for m in logits:
        m = straight_through(m)
        gate, value = F.linear(x, weight * m), F.linear(x, weight * (1 - m))
        y = y + gate * value * torch.sigmoid(gate)
    return y


@fuses("forward_ste")
def activation_by_a_quotient(x, weight, logits):
    y = 0
    for m in logits:
        m = straight_through(m)
        gate, value = F.linear(x, weight * m), F.linear(x, weight * (1 - m))
        y = y + value * gate / (1 + torch.exp(-gate))
    return y


# --- Sums ------------------------------------------------------------------------------------------------------------


@fuses("forward_ste")
def accumulator_like_a_term(x, weight, logits):
    y = None
    for m in logits:
        term = gated(x, weight, straight_through(m))
        if y is None:
            y = torch.zeros_like(term)
        y += term
    return y


@fuses("forward_ste")
def accumulator_made_empty(x, weight, logits):
    y = torch.empty(*x.shape[:-1], D, dtype=x.dtype).zero_()
    for m in logits:
        y = y + gated(x, weight, straight_through(m))
    return y


@fuses("forward_ste")
def residual_inside_the_sum(x, weight, logits):
    y = torch.cat([x, x], -1)[..., :D].sin()
    for m in logits:
        y = y + gated(x, weight, straight_through(m))
    return y * 2


@fuses("forward_ste")
def residual_last(x, weight, logits):
    y = functools.reduce(torch.add, [gated(x, weight, straight_through(m)) for m in logits])
    return torch.cat([x, x], -1)[..., :D] + y
