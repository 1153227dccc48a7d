"""Whole layers as people write them. The pass replaces each layer by one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.programs.spellings import STACK_PROJECTIONS, from_source, gated, straight_through

D, H = 12, 8

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of x, the weight and all mask logits."""


def tensors(n_masks: int, *, three_d: bool = False, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(n_masks)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return {"x": normal(2, 3, H) if three_d else normal(5, H), "weight": normal(D, H), "logits": normal(n_masks, D, H)}


def hard(logits: Tensor) -> Tensor:
    return (logits > 0).to(logits.dtype)


# --- How masks are made ----------------------------------------------------------------------------------------------


class ClippedSign(torch.autograd.Function):
    """A straight-through estimator with a mask of 1 at logit 0. The pass must keep its custom gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return torch.where(logits >= 0, 1.0, 0.0).to(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return F.hardtanh(grad) * (logits.abs() < 1)


def _passing(mask: Tensor, soft: Tensor) -> Tensor:
    """A mask whose gradient goes to `soft`."""
    return mask.to(soft.dtype) + soft - soft.detach()


def _of_negated_logits(logits: Tensor) -> Tensor:
    logits = logits.clone()
    mask = hard(logits)
    logits.mul_(-1)
    return (mask - logits).detach() + logits


def _two_of_four(logits: Tensor) -> Tensor:
    """A mask of the two largest of each four logits of a row."""
    zeros = torch.zeros_like(logits).view(D, -1, 4)
    return zeros.scatter(-1, logits.view(D, -1, 4).topk(2, -1).indices, 1.0).view_as(logits)


def _with_the_largest(logits: Tensor) -> Tensor:
    mask = torch.zeros_like(logits).flatten()
    mask[logits.flatten().topk(D * H // 3).indices] = 1
    return mask.unflatten(0, (D, H))


def _unpacked(logits: Tensor) -> Tensor:
    """A mask that is packed into bytes of four bits, and unpacked again."""
    shifts = torch.arange(4, dtype=torch.uint8)
    packed = ((logits > 0).to(torch.uint8).reshape(D, H // 4, 4) << shifts).sum(-1).to(torch.uint8)
    return ((packed[..., None] >> shifts) & 1).reshape(D, H).to(logits.dtype)


# Functions of one mask's logits that return the mask.
TRAINED_MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "autograd.Function with a gradient of its own": ClippedSign.apply,
    "not negative": lambda l: _passing(l >= 0, l),
    "one minus at most zero": lambda l: _passing(1 - (l <= 0).to(l.dtype), l),
    "the largest of each row": lambda l: _passing(torch.zeros_like(l).scatter(-1, l.topk(3, -1).indices, 1.0), l),
    "a threshold of each row": lambda l: _passing(l >= l.kthvalue(4, -1, keepdim=True).values, l),
    "logits that are negated in place": _of_negated_logits,
    "two of four": lambda l: _passing(_two_of_four(l), l),
    "blocks": lambda l: _passing((l[::2, ::2] > 0).repeat_interleave(2, 0).repeat_interleave(2, 1), l),
    "a gradient of zeros": lambda l: torch.round(F.hardsigmoid(l)),
    "two gradients": lambda l: _passing(hard(l), l) + torch.tanh(l) - torch.tanh(l).detach(),
}
FIXED_MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "a sigmoid above a half": lambda l: (torch.sigmoid(l) > 0.5).to(l.dtype),
    "heaviside": lambda l: torch.heaviside(l.detach(), torch.zeros((), dtype=l.dtype)),
    "a clamped sign": lambda l: l.detach().sign().clamp(min=0),
    "a sign, which may be -1, without its sign": lambda l: F.softshrink(l.detach(), 0.5).sign().abs(),
    "a sign with ones for zeros": lambda l: ((2 * hard(l) - 1) + 1) / 2,
    "the largest of each row, in place": lambda l: torch.zeros_like(l).scatter_(-1, l.topk(3, -1).indices, 1.0),
    "the largest of all": _with_the_largest,
    "one-hot rows": lambda l: F.one_hot(l.argmax(-1), H),
    "a transpose": lambda l: hard(l).mT.contiguous().t(),
    "bits unpacked by an arange": _unpacked,
}


def _with_mask(make: Callable[[Tensor], Tensor]) -> Layer:
    return lambda x, weight, logits: sum(gated(x, weight, make(one)) for one in logits)


def packed(logits: Tensor) -> Tensor:
    """One byte per weight. Bit i is mask i, for at most eight masks."""
    weights = 2 ** torch.arange(min(len(logits), 8)).view(-1, 1, 1)
    return ((logits[:8] > 0) * weights).sum(0).to(torch.uint8)


# --- Activations -----------------------------------------------------------------------------------------------------


def with_product(product: Callable[[Tensor, Tensor], Tensor]) -> Layer:
    """A layer that computes `product(gate, value)` in place of `silu(gate) * value`."""

    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        masks = map(straight_through, logits)
        return sum(product(F.linear(x, weight * m), F.linear(x, weight * (1 - m))) for m in masks)

    return layer


def with_activation(function: Callable[[Tensor], Tensor]) -> Layer:
    return with_product(lambda gate, value: function(gate) * value)


# Activation of the operator -> products of the activated gate g and the value v, with the activation written by hand.
BY_HAND: dict[str, tuple[str, ...]] = {
    "silu": (
        "g / (1 + torch.exp(-g)) * v",
        "g * (1 / ((-g).exp() + 1)) * v",
        "torch.reciprocal(1.0 + torch.exp(-1 * g)) * g * v",
        "g * g.sigmoid() * v",
        "v * (g * sigmoid(g))",
        "g * v * sigmoid(g)",
        "g * v * sigmoid(v)",
        "v * g / (1 + torch.exp(-g))",
        "torch.mul(input=F.silu(input=g), other=v)",
        "F.silu(g, inplace=True) * v",
        "silu(dropout(g, 0.0, True)) * v",
        "dropout(silu(g), p=0.0) * dropout(v, p=0.0)",
        "silu(dropout(g, training=False)) * torch.dropout(v, 0.5, False)",
    ),
    "sigmoid": ("1 / (1 + torch.exp(-g)) * v",),
    "gelu": (
        "0.5 * g * (1 + torch.erf(g / 2**0.5)) * v",
        "g * (torch.erf(g * 0.7071067811865476) + 1.0) / 2 * v",
        "torch.nn.GELU()(g) * v",
    ),
    "gelu_tanh": (
        "0.5 * g * (1 + torch.tanh(0.7978845608028654 * (g + 0.044715 * torch.pow(g, 3)))) * v",
        "0.5 * g * (1 + torch.tanh(g * 0.7978845608028654 * (1 + 0.044715 * g * g))) * v",
    ),
    "relu": ("F.threshold(g, 0.0, 0.0) * v", "g.relu_() * v"),
    "relu_squared": ("torch.relu(g) ** 2 * v", "torch.square(torch.relu(g)) * v"),
    "tanh": ("g.tanh() * v",),
    "identity": ("torch.neg(-g) * v", "g * v"),
}

# --- All masks at once -----------------------------------------------------------------------------------------------

# Products of x `[tokens, H]` and a stack of weights, after the dimension of the result that counts the masks.
STACKS: dict[str, tuple[int, Callable[[Tensor, Tensor], Tensor]]] = STACK_PROJECTIONS | {
    "matmul of three dimensions": (1, lambda x, w: x[None].unsqueeze(1) @ w.transpose(-1, -2)),
    "matmul of leading masks": (0, lambda x, w: x[None][None] @ w.mT.unsqueeze(1)),
}


def _with_stack(dim: int, project: Callable[[Tensor, Tensor], Tensor]) -> Layer:
    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        m, rows = straight_through(logits), x.reshape(-1, H)
        return (F.silu(project(rows, weight * m)) * project(rows, weight * (1 - m))).sum(dim)

    return layer


def stacked(x: Tensor, weight: Tensor, masks: Tensor, complement: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gates and values `[n_masks, ..., d]`."""
    both = masks, 1 - masks if complement is None else complement
    gates, values = (torch.einsum("...h,ndh->n...d", x, factor * weight) for factor in both)
    return gates, values


def weights(x: Tensor, logits: Tensor) -> Tensor:
    """Mask weights `[..., n_masks]`."""
    return torch.softmax(x @ logits[:, 0].mT, -1)


def fixed_terms(x: Tensor, weight: Tensor, logits: Tensor) -> list[Tensor]:
    return [gated(x, weight, m, ~m) for m in logits > 0]


def terms(x: Tensor, weight: Tensor, logits: Tensor) -> list[Tensor]:
    return [gated(x, weight, straight_through(one)) for one in logits]


# --- All layers ------------------------------------------------------------------------------------------------------

# Layers of x, w and logits l. In training, `TRAINED` layers become `forward_ste`, and `FIXED` layers become `forward`.
TRAINED = (
    "sum(gated(x, w, m) for m in Sign.apply(l))",
    "sum(gated(x, w, m) for m in ste(l).unbind(0))",
    "g, v = (einsum('...h,ndh->...nd', x, w.unsqueeze(0) * m) for m in (ste(l), 1 - ste(l))); (silu(g) * v).sum(-2)",
    "(term(*stacked(x, w, ste(l))) * weights(x, l).movedim(-1, 0).unsqueeze(-1)).sum(0)",
    "sum(weights(x, l)[..., i, None] * one for i, one in enumerate(terms(x, w, l)))",
    "sum(of_total(x @ w.T, x @ (w * ste(m)).T) for m in l)",
    "sum(of_total(linear(x, w), einsum('...h,ndh->...nd', x, w * ste(m)[None]).squeeze(-2)) for m in l)",
    "y = torch.empty(*x.shape[:-1], 12, dtype=x.dtype).zero_(); sum(terms(x, w, l), y)",
    "sum(terms(x, w, l), cat([x, x], -1)[..., :12].sin()) * 2",
    "cat([x, x], -1)[..., :12] + sum(terms(x, w, l))",
)
GATED_LINEAR_UNITS = "sum(F.glu(linear(x, cat([w * ~m, w * m]))) for m in l > 0)"
FIXED = (
    "p = packed(l); sum(gated(x, w, ((p >> i) & 1).to(x.dtype)) for i in range(min(len(l), 8)))",
    "p = packed(l); sum(gated(x, w, ((p & (1 << i)) != 0).to(x.dtype)) for i in range(min(len(l), 8)))",
    "p = packed(l); sum(gated(x, w, ((p // 2**i) % 2).to(x.dtype)) for i in range(min(len(l), 8)))",
    "sum(gated(x, w, (l[0] > i / 10).to(w.dtype)) for i in range(len(l)))",
    "sum(gated(x, w, hard(l)[i, :, :]) for i in range(len(l)))",
    "g, v = stacked(x, w, l > 0, l <= 0); sum(term(g[i], v[i]) for i in range(len(l)))",
    "s, m = w.expand(len(l), -1, -1), l > 0; "
    "term(*(einsum('...h,ndh->n...d', x, s.masked_fill(f, 0)) for f in (~m, m))).sum(0)",
    "g, v = stacked(x, w, l > 0, l <= 0); r = sigmoid(x @ l[:, 1].mT).movedim(-1, 0); "
    "(silu(g) * (r.unsqueeze(-1) * v)).sum(0)",
    GATED_LINEAR_UNITS,
    "y = torch.zeros(*x.shape[:-1], 12, dtype=x.dtype); y[0] = 3; sum(fixed_terms(x, w, l), y)",
    "y = w[:, 0] * x.sum(-1, keepdim=True); functools.reduce(operator.iadd, fixed_terms(x, w, l), y)",
)


def _by_name(function: Layer) -> Layer:
    """The layer as a function with the arguments x, weight and logits."""

    def layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        return function(x, weight, logits)

    return layer


def _of_source(source: str) -> Layer:
    return _by_name(from_source("x, w, l", source, globals()))


LAYERS: dict[str, tuple[str, str, Layer]] = {
    **{name: ("forward_ste", "silu", _by_name(_with_mask(make))) for name, make in TRAINED_MASKS.items()},
    **{f"stack, {name}": ("forward_ste", "silu", _by_name(_with_stack(*stack))) for name, stack in STACKS.items()},
    **{source: ("forward_ste", "silu", _of_source(source)) for source in TRAINED},
    **{name: ("forward", "silu", _by_name(_with_mask(make))) for name, make in FIXED_MASKS.items()},
    **{source: ("forward", "silu", _of_source(source)) for source in FIXED},
    **{
        source: ("forward_ste", activation, with_product(from_source("g, v", source, {})))
        for activation, sources in BY_HAND.items()
        for source in sources
    },
}
"""Name -> the operator that the layer becomes in training, its activation, and the layer."""
LAYERS[GATED_LINEAR_UNITS] = ("forward", "sigmoid", LAYERS[GATED_LINEAR_UNITS][2])
