"""Whole layers as people write them, each of which becomes one operator."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from spellings import STACK_PROJECTIONS, Sign, gated, straight_through, term_of_products, term_of_total
from torch import Tensor, nn

D, H = 12, 8

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of x, the weight and the logits of all masks."""


def tensors(n_masks: int, *, three_d: bool = False, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(n_masks)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return {"x": normal(2, 3, H) if three_d else normal(5, H), "weight": normal(D, H), "logits": normal(n_masks, D, H)}


def hard(logits: Tensor) -> Tensor:
    return (logits > 0).to(logits.dtype)


# --- How masks are made ----------------------------------------------------------------------------------------------


class ClippedSign(torch.autograd.Function):
    """A straight-through estimator whose mask is 1 at 0, and whose custom gradient the pass must keep."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return torch.where(logits >= 0, 1.0, 0.0).to(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return F.hardtanh(grad) * (logits.abs() < 1)


def _passing(mask: Tensor, soft: Tensor) -> Tensor:
    """A mask that passes its gradient to a tensor."""
    return mask.to(soft.dtype) + soft - soft.detach()


def _of_negated_logits(logits: Tensor) -> Tensor:
    logits = logits.clone()
    mask = hard(logits)
    logits.mul_(-1)
    return (mask - logits).detach() + logits


def _unpacked(logits: Tensor) -> Tensor:
    """Each byte holds four bits of a row."""
    shifts = torch.arange(4, dtype=torch.uint8)
    packed = ((logits > 0).to(torch.uint8).reshape(D, H // 4, 4) << shifts).sum(-1).to(torch.uint8)
    return ((packed[..., None] >> shifts) & 1).reshape(D, H).to(logits.dtype)


# Masks from the logits of one mask.
TRAINED_MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "autograd.Function": Sign.apply,
    "autograd.Function with a gradient of its own": ClippedSign.apply,
    "a sigmoid": lambda l: _passing(torch.sigmoid(l) > 0.5, torch.sigmoid(l)),
    "not negative": lambda l: _passing(l >= 0, l),
    "one minus at most zero": lambda l: _passing(1 - (l <= 0).to(l.dtype), l),
    "the largest of each row": lambda l: _passing(torch.zeros_like(l).scatter(-1, l.topk(3, -1).indices, 1.0), l),
    "a threshold of each row": lambda l: _passing(l >= l.kthvalue(4, -1, keepdim=True).values, l),
    "logits that are negated in place": _of_negated_logits,
}
FIXED_MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "a sigmoid above a half": lambda l: (torch.sigmoid(l) > 0.5).to(l.dtype),
    "a rounded sigmoid": lambda l: torch.sigmoid(l.detach()).round(),
    "heaviside": lambda l: torch.heaviside(l.detach(), torch.zeros((), dtype=l.dtype)),
    "a positive sign": lambda l: F.relu(torch.sign(l.detach())),
    "a clamped sign": lambda l: l.detach().sign().clamp(min=0),
    "a sign, which may be -1, without its sign": lambda l: F.softshrink(l.detach(), 0.5).sign().abs(),
    "a sign with ones for zeros": lambda l: ((2 * hard(l) - 1) + 1) / 2,
    "the largest of each row, in place": lambda l: torch.zeros_like(l).scatter_(-1, l.topk(3, -1).indices, 1.0),
    "one-hot rows": lambda l: F.one_hot(l.argmax(-1), H),
    "a transpose": lambda l: hard(l).mT.contiguous().t(),
    "bits unpacked by an arange": _unpacked,
}


def _with_mask(make: Callable[[Tensor], Tensor]) -> Layer:
    return lambda x, weight, logits: sum(gated(x, weight, make(one)) for one in logits)


def _packed(logits: Tensor) -> Tensor:
    """One byte per weight, whose bit i is mask i; at most eight masks."""
    weights = 2 ** torch.arange(min(len(logits), 8)).view(-1, 1, 1)
    return ((logits[:8] > 0) * weights).sum(0).to(torch.uint8)


def _with_bits(bit: Callable[[Tensor, int], Tensor]) -> Layer:
    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        packed = _packed(logits)
        return sum(gated(x, weight, bit(packed, i).to(x.dtype)) for i in range(min(len(logits), 8)))

    return layer


# --- Activations -----------------------------------------------------------------------------------------------------


def with_product(product: Callable[[Tensor, Tensor], Tensor]) -> Layer:
    """A layer with a function of gate and value in place of `silu(gate) * value`."""

    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        masks = map(straight_through, logits)
        return sum(product(F.linear(x, weight * m), F.linear(x, weight * (1 - m))) for m in masks)

    return layer


def with_activation(function: Callable[[Tensor], Tensor]) -> Layer:
    return with_product(lambda gate, value: function(gate) * value)


# Activations that are written out by hand, or modules, and the activation of the operator.
BY_HAND: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "g / (1 + exp(-g))": ("silu", lambda g, v: g / (1 + torch.exp(-g)) * v),
    "g * (1 / (exp(-g) + 1))": ("silu", lambda g, v: g * (1 / ((-g).exp() + 1)) * v),
    "g * reciprocal": ("silu", lambda g, v: torch.reciprocal(1.0 + torch.exp(-1 * g)) * g * v),
    "g * sigmoid(g)": ("silu", lambda g, v: g * g.sigmoid() * v),
    "g.mul(sigmoid)": ("silu", lambda g, v: torch.sigmoid(g).mul(g) * v),
    "v * (g * sigmoid(g))": ("silu", lambda g, v: v * (g * torch.sigmoid(g))),
    "g * v * sigmoid(g)": ("silu", lambda g, v: g * v * torch.sigmoid(g)),
    "g * v * sigmoid(v)": ("silu", lambda g, v: g * v * torch.sigmoid(v)),
    "v * g / (1 + exp(-g))": ("silu", lambda g, v: v * g / (1 + torch.exp(-g))),
    "mul by keywords": ("silu", lambda g, v: torch.mul(input=F.silu(input=g), other=v)),
    "silu in place": ("silu", lambda g, v: F.silu(g, inplace=True) * v),
    "module silu": ("silu", lambda g, v: nn.SiLU()(g) * v),
    "Dropout(0.0)": ("silu", lambda g, v: F.silu(F.dropout(g, 0.0, True)) * v),
    "Dropout(0.0) of the product": ("silu", lambda g, v: F.dropout(F.silu(g), p=0.0) * F.dropout(v, p=0.0)),
    "Dropout in eval": ("silu", lambda g, v: F.silu(F.dropout(g, training=False)) * torch.dropout(v, 0.5, False)),
    "1 / (1 + exp(-g))": ("sigmoid", lambda g, v: 1 / (1 + torch.exp(-g)) * v),
    "erf": ("gelu", lambda g, v: 0.5 * g * (1 + torch.erf(g / math.sqrt(2))) * v),
    "erf of a product": ("gelu", lambda g, v: g * (torch.erf(g * 0.7071067811865476) + 1.0) / 2 * v),
    "erf of a root": ("gelu", lambda g, v: 0.5 * g * (1 + torch.erf(g * 0.5**0.5)) * v),
    "module gelu": ("gelu", lambda g, v: nn.GELU()(g) * v),
    "tanh of a cube": (
        "gelu_tanh",
        lambda g, v: 0.5 * g * (1 + torch.tanh(0.7978845608028654 * (g + 0.044715 * torch.pow(g, 3)))) * v,
    ),
    "tanh of products": (
        "gelu_tanh",
        lambda g, v: 0.5 * g * (1 + torch.tanh(g * 0.7978845608028654 * (1 + 0.044715 * g * g))) * v,
    ),
    "module gelu_tanh": ("gelu_tanh", lambda g, v: nn.GELU(approximate="tanh")(g) * v),
    "threshold": ("relu", lambda g, v: F.threshold(g, 0.0, 0.0) * v),
    "relu_": ("relu", lambda g, v: g.relu_() * v),
    "module relu": ("relu", lambda g, v: nn.ReLU(inplace=True)(g) * v),
    "relu ** 2": ("relu_squared", lambda g, v: torch.relu(g) ** 2 * v),
    "square of relu": ("relu_squared", lambda g, v: torch.square(torch.relu(g)) * v),
    "module tanh": ("tanh", lambda g, v: nn.Tanh()(g) * v),
    "method tanh": ("tanh", lambda g, v: g.tanh() * v),
    "module identity": ("identity", lambda g, v: nn.Identity()(g) * v),
    "neg(-g)": ("identity", lambda g, v: torch.neg(-g) * v),
    "g * v": ("identity", lambda g, v: g * v),
}


# --- All masks at once -----------------------------------------------------------------------------------------------


def _with_stack(dim: int, project: Callable[[Tensor, Tensor], Tensor]) -> Layer:
    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        m, rows = straight_through(logits), x.reshape(-1, H)
        return term_of_products(project(rows, weight * m), project(rows, weight * (1 - m))).sum(dim)

    return layer


# Products of x `[tokens, H]` and a stack of weights, with the dimension of the masks.
STACKS: dict[str, tuple[int, Callable[[Tensor, Tensor], Tensor]]] = STACK_PROJECTIONS | {
    "matmul of three dimensions": (1, lambda x, w: x[None].unsqueeze(1) @ w.transpose(-1, -2)),
    "matmul of leading masks": (0, lambda x, w: x[None][None] @ w.mT.unsqueeze(1)),
}


def _stacked(x: Tensor, weight: Tensor, masks: Tensor, complement: Tensor) -> tuple[Tensor, Tensor]:
    gates, values = (torch.einsum("...h,ndh->n...d", x, factor * weight) for factor in (masks, complement))
    return gates, values


def _stacked_terms(x: Tensor, weight: Tensor, masks: Tensor) -> Tensor:
    return term_of_products(*_stacked(x, weight, masks, 1 - masks))


def _einsum_of_all(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    m = straight_through(logits)
    gates = torch.einsum("...h,ndh->...nd", x, weight.unsqueeze(0) * m)
    values = torch.einsum("...h,ndh->...nd", x, weight.unsqueeze(0) * (1.0 - m))
    return torch.einsum("...nd,...nd->...d", F.silu(gates), values)


def _einsum_of_weight_x_and_masks(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    m = straight_through(logits)
    gates, values = (torch.einsum("dh,...h,ndh->n...d", weight, x, factor) for factor in (m, 1 - m))
    return term_of_products(gates, values).sum(0)


def _slices_of_projections(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    gates, values = _stacked(x, weight, logits > 0, logits <= 0)
    return sum(term_of_products(gates[i], values[i]) for i in range(len(logits)))


def _filled_stack(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    weights, m = weight.expand(len(logits), -1, -1), logits > 0
    gates = torch.einsum("...h,ndh->n...d", x, weights.masked_fill(~m, 0))
    values = torch.einsum("...h,ndh->n...d", x, weights.masked_fill(m, 0))
    return term_of_products(gates, values).sum(0)


def _weighted_before_the_value(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    gates, values = _stacked(x, weight, logits > 0, logits <= 0)
    mask_weight = torch.sigmoid(x @ logits[:, 1].mT).movedim(-1, 0)
    return (F.silu(gates) * (mask_weight.unsqueeze(-1) * values)).sum(0)


def _weights(x: Tensor, logits: Tensor) -> Tensor:
    return torch.softmax(x @ logits[:, 0].mT, -1)


# --- Sums ------------------------------------------------------------------------------------------------------------


def _fixed_terms(x: Tensor, weight: Tensor, logits: Tensor) -> list[Tensor]:
    return [gated(x, weight, m, ~m) for m in logits > 0]


def _trained_terms(x: Tensor, weight: Tensor, logits: Tensor) -> list[Tensor]:
    return [gated(x, weight, straight_through(one)) for one in logits]


def _sum_that_is_written_before(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    y = torch.zeros(*x.shape[:-1], D, dtype=x.dtype)
    y[0] = 3
    return sum(_fixed_terms(x, weight, logits), y)


def _terms_added_in_place(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    return functools.reduce(operator.iadd, _fixed_terms(x, weight, logits), weight[:, 0] * x.sum(-1, keepdim=True))


def _sum_that_is_made_empty(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    return sum(_trained_terms(x, weight, logits), torch.empty(*x.shape[:-1], D, dtype=x.dtype).zero_())


# --- All layers ------------------------------------------------------------------------------------------------------

# Layers that become `forward_ste` in training, and layers that become `forward`.
TRAINED: dict[str, Layer] = {
    **{name: _with_mask(make) for name, make in TRAINED_MASKS.items()},
    "autograd.Function of a stack": lambda x, w, l: sum(gated(x, w, m) for m in Sign.apply(l)),
    "stacked masks, unbound": lambda x, w, l: sum(gated(x, w, m) for m in straight_through(l).unbind(0)),
    **{f"stack, {name}": _with_stack(*stack) for name, stack in STACKS.items()},
    "einsum of all": _einsum_of_all,
    "einsum of weight, x and masks": _einsum_of_weight_x_and_masks,
    "vmap over trained masks": lambda x, w, l: torch.vmap(lambda m: gated(x, w, m))(straight_through(l)).sum(0),
    "stack weighted by einsum": lambda x, w, l: torch.einsum(
        "n...d,...n->...d", _stacked_terms(x, w, straight_through(l)), _weights(x, l)
    ),
    "stack weighted by a product": lambda x, w, l: (
        _stacked_terms(x, w, straight_through(l)) * _weights(x, l).movedim(-1, 0).unsqueeze(-1)
    ).sum(0),
    "weighted by columns": lambda x, w, l: sum(
        _weights(x, l)[..., i, None] * gated(x, w, straight_through(l[i])) for i in range(len(l))
    ),
    "complement by subtraction": lambda x, w, l: sum(
        term_of_total(x @ w.T, x @ (w * straight_through(m)).T) for m in l
    ),
    "a sum that is made empty": _sum_that_is_made_empty,
    "a residual inside the sum": lambda x, w, l: sum(_trained_terms(x, w, l), torch.cat([x, x], -1)[..., :D].sin()) * 2,
    "a residual last": lambda x, w, l: torch.cat([x, x], -1)[..., :D] + sum(_trained_terms(x, w, l)),
}
FIXED: dict[str, Layer] = {
    **{name: _with_mask(make) for name, make in FIXED_MASKS.items()},
    "packed bits": _with_bits(lambda packed, i: (packed >> i) & 1),
    "packed bits as bool": _with_bits(lambda packed, i: (packed & (1 << i)) != 0),
    "packed bits by a remainder": _with_bits(lambda packed, i: (packed // 2**i) % 2),
    "thresholds of one matrix": lambda x, w, l: sum(gated(x, w, (l[0] > i / 10).to(w.dtype)) for i in range(len(l))),
    "stacked masks": lambda x, w, l: sum(gated(x, w, hard(l)[i, :, :]) for i in range(len(l))),
    "slices of projections": _slices_of_projections,
    "a filled stack": _filled_stack,
    "stack weighted before the value": _weighted_before_the_value,
    "vmap over masks": lambda x, w, l: torch.vmap(lambda m: gated(x, w, m, ~m))(l > 0).sum(0),
    "vmap over stacked masks": lambda x, w, l: torch.vmap(lambda m: gated(x, w, m, ~m))(
        torch.stack([one > 0 for one in l])
    ).sum(0),
    "gated linear units": lambda x, w, l: sum(F.glu(F.linear(x, torch.cat([w * ~m, w * m]))) for m in l > 0),
    "a sum that is written before": _sum_that_is_written_before,
    "terms that are added in place": _terms_added_in_place,
}


def _by_name(function: Layer) -> Layer:
    """The layer as a function whose arguments have the names of the tensors."""

    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        return function(x, weight, logits)

    return layer


LAYERS: dict[str, tuple[str, str, Layer]] = {
    **{name: ("forward_ste", "silu", _by_name(layer)) for name, layer in TRAINED.items()},
    **{name: ("forward", "silu", _by_name(layer)) for name, layer in FIXED.items()},
    **{name: ("forward_ste", activation, with_product(product)) for name, (activation, product) in BY_HAND.items()},
}
"""Name -> the operator that the layer becomes in training, its activation, and the layer."""
LAYERS["gated linear units"] = ("forward", "sigmoid", _by_name(FIXED["gated linear units"]))
