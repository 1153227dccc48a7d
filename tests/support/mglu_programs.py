"""Programs composed of the parts in `spellings`: MGLU layers that are right, or wrong in their first term."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from spellings import (
    ALL_COMPLEMENTS,
    BOOL_PRODUCTS,
    DOUBTFUL_COMPLEMENTS,
    DOUBTFUL_FUNCTIONS,
    HAND_WRITTEN,
    JOINTS,
    MASKS,
    PROJECTIONS,
    SCALES,
    STACK_PRODUCTS,
    STACK_PROJECTIONS,
    SUMS,
    TRANSPOSES,
    WEIGHTS,
    straight_through,
)
from torch import Tensor

from mglu_ops.activations import ACTIVATIONS


class Operands(NamedTuple):
    """The mask of a gate, and x, weight and mask of its value; each mask is one matrix or a stack."""

    gate_mask: Tensor
    x: Tensor
    weight: Tensor
    value_mask: Tensor
    other_x: Tensor
    other_weight: Tensor


# Mistakes: changes of the operands of a term. Some of them leave an MGLU layer, which the pass cannot always prove.
WRONGS: dict[str, Callable[[Operands], Operands]] = {
    "soft mask": lambda o: o._replace(gate_mask=o.gate_mask * 0.5 + 0.25),
    "squared mask": lambda o: o._replace(gate_mask=o.gate_mask * o.gate_mask),
    "detached mask": lambda o: o._replace(gate_mask=o.gate_mask.detach()),
    "transposed mask": lambda o: o._replace(gate_mask=o.gate_mask.mT),
    "mask per channel": lambda o: o._replace(gate_mask=o.gate_mask[..., :1]),
    "other x": lambda o: o._replace(x=o.other_x),
    "detached x": lambda o: o._replace(x=o.x.detach()),
    "copied x": lambda o: o._replace(x=o.x * 1),
    "other weight": lambda o: o._replace(weight=o.other_weight),
    "detached weight": lambda o: o._replace(weight=o.weight.detach()),
    "rounded weight": lambda o: o._replace(weight=o.weight.bfloat16().to(o.weight.dtype)),
    "2 - m": lambda o: o._replace(value_mask=2 - o.gate_mask * 1.0),
    "m and m": lambda o: o._replace(value_mask=o.gate_mask),
    "masks in another order": lambda o: o._replace(value_mask=o.value_mask.flip(0)),
    **{
        name: lambda o, function=function: o._replace(gate_mask=function(o.gate_mask))
        for name, function in TRANSPOSES.items()
    },
    **{
        name: lambda o, function=function: o._replace(value_mask=function(o.gate_mask))
        for name, function in DOUBTFUL_COMPLEMENTS.items()
    },
}


@dataclass(frozen=True)
class Program:
    """An MGLU layer that is composed of named parts; `wrong` names a mistake in it (`WRONGS`)."""

    mask: str = "straight_through"
    complement: str = "1 - m"
    product: str = "w * m"
    projection: str = "linear"
    value: str = "masked"
    activation: str = "silu"
    hand_written: str | None = None
    total: str = "y = 0"
    kind: str = "logits"
    weight: str = "weight"
    """The masked weight, a key of `WEIGHTS`."""
    at_each_use: bool = False
    """Whether the weight is computed again for the value."""
    scale: str | None = None
    joint: str | None = None
    value_first: bool = False
    swapped: bool = False
    wrong: str | None = None

    @property
    def trained(self) -> bool:
        return self.kind == "logits"

    def __call__(self, x: Tensor, weight: Tensor, masks: Tensor, other_x: Tensor, other_weight: Tensor) -> Tensor:
        """The layer for x and other_x `[..., h]`, weight and other_weight `[d, h]`, and masks `[n, d, h]` of a kind."""
        terms = []
        for i in range(masks.shape[0]):
            term = self._term(i, x, weight, masks, other_x, other_weight)
            terms.append(term if self.scale is None else SCALES[self.scale](other_x.flatten(), i) * term)
        return SUMS[self.total](terms)

    def _term(self, i: int, x: Tensor, weight: Tensor, masks: Tensor, other_x: Tensor, other_weight: Tensor) -> Tensor:
        product, project = BOOL_PRODUCTS[self.product], PROJECTIONS[self.projection]
        m = MASKS[self.kind][self.mask](masks, i)
        pair = m, ALL_COMPLEMENTS[self.complement](m)
        gate_mask, value_mask = reversed(pair) if self.swapped else pair
        masked = WEIGHTS[self.weight](weight, other_weight)
        again = WEIGHTS[self.weight](weight, other_weight) if self.at_each_use else masked
        operands = Operands(gate_mask, x, again, value_mask, other_x, other_weight)
        if self.wrong is not None and i == 0:
            operands = WRONGS[self.wrong](operands)
        gate_weight = product(masked, operands.gate_mask)
        if self.joint is not None:
            gate, value = JOINTS[self.joint](x, gate_weight, product(operands.weight, operands.value_mask))
        else:
            gate = project(x, gate_weight)
            value = self._value(operands, gate)
        activated = self._activated(gate)
        return value * activated if self.value_first else activated * value

    def _value(self, operands: Operands, gate: Tensor) -> Tensor:
        product, project = BOOL_PRODUCTS[self.product], PROJECTIONS[self.projection]
        if self.value == "masked":
            return project(operands.x, product(operands.weight, operands.value_mask))
        if self.value == "w - w * m":
            return project(operands.x, operands.weight - product(operands.weight, operands.gate_mask))
        return project(operands.x, operands.weight) - gate

    def _activated(self, gate: Tensor) -> Tensor:
        if self.hand_written is None:
            return ACTIVATIONS[self.activation].forward(gate)
        return (HAND_WRITTEN | DOUBTFUL_FUNCTIONS)[self.hand_written](gate)


@dataclass(frozen=True)
class StackProgram:
    """An MGLU layer with all masks in one tensor. All sizes may be equal, so that shapes tell no dimensions apart."""

    complement: str = "1 - m"
    product: str = "w * m"
    projection: str = "bh,ndh->nbd"
    value: str = "masked"
    total: str = "sum"
    mask_weight: str | None = None
    activation: str = "silu"
    kind: str = "logits"
    wrong: str | None = None
    """A mistake of `WRONGS`, made for all masks."""

    @property
    def trained(self) -> bool:
        return self.kind == "logits"

    def __call__(self, x: Tensor, weight: Tensor, masks: Tensor, other_x: Tensor, other_weight: Tensor) -> Tensor:
        """The layer for the tensors that a `Program` takes."""
        m = straight_through(masks) if self.trained else masks
        dim, project = STACK_PROJECTIONS[self.projection]
        product = STACK_PRODUCTS[self.product]
        operands = Operands(m, x, weight, ALL_COMPLEMENTS[self.complement](m), other_x, other_weight)
        if self.wrong is not None:
            operands = WRONGS[self.wrong](operands)
        gate = project(x, product(weight, operands.gate_mask))
        if self.value == "masked":
            value = project(operands.x, product(operands.weight, operands.value_mask))
        else:
            value = F.linear(operands.x, operands.weight).unsqueeze(dim) - gate
        terms = ACTIVATIONS[self.activation].forward(gate) * value
        return self._total(terms, dim, torch.softmax(other_x @ other_weight[: len(masks)].mT, -1))

    def _total(self, terms: Tensor, dim: int, mask_weight: Tensor) -> Tensor:
        letters = ("nbd", "bnd", "bdn")[dim]
        if self.mask_weight == "scalars":
            terms = terms * mask_weight[0].reshape([-1 if i == dim else 1 for i in range(3)])
        if self.mask_weight == "einsum":
            return torch.einsum(f"{letters},bn->bd", terms, mask_weight)
        if self.mask_weight == "product":
            terms = terms * mask_weight.movedim(-1, 0 if dim == 0 else -1).unsqueeze((2, 2, 1)[dim])
        return STACK_TOTALS[self.total](terms, dim)


# From terms, and the dimension of the masks. The last one is wrong.
STACK_TOTALS: dict[str, Callable[[Tensor, int], Any]] = {
    "sum": lambda terms, dim: terms.sum(dim),
    "einsum": lambda terms, dim: torch.einsum(f"{('nbd', 'bnd', 'bdn')[dim]}->bd", terms),
    "unbind": lambda terms, dim: sum(terms.unbind(dim)),
    "select": lambda terms, dim: sum(terms.select(dim, i) for i in range(terms.shape[dim])),
    "mean": lambda terms, dim: terms.mean(dim),
    "sum over tokens": lambda terms, dim: terms.sum(1 if dim == 0 else 0),
}


# --- Their tensors ---------------------------------------------------------------------------------------------------


def normal_tensors(n_masks: int, tokens: int = 5, d: int = 8, h: int = 8) -> dict[str, Tensor]:
    """The float64 tensors x and other_x `[tokens, h]`, weight and other_weight `[d, h]`, and logits `[n_masks, d, h]`.

    They are square by default, so that shapes do not reveal a transpose.
    """
    generator = torch.Generator().manual_seed(n_masks)
    shapes = {
        "logits": (n_masks, d, h),
        "x": (tokens, h),
        "weight": (d, h),
        "other_x": (tokens, h),
        "other_weight": (d, h),
    }
    return {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def program_tensors(program: Program, n_masks: int = 3) -> dict[str, Tensor]:
    """The tensors of a program with trained or bool masks; those with floating point require a gradient."""
    named = normal_tensors(n_masks)
    logits = named.pop("logits")
    named["masks"] = logits if program.trained else logits > 0
    return {name: t.requires_grad_() if t.is_floating_point() else t for name, t in named.items()}


def layer_tensors(**changed: Any) -> dict[str, Tensor]:
    named = normal_tensors(3)
    return {name: named[name].requires_grad_() for name in ("x", "weight", "logits")} | changed
