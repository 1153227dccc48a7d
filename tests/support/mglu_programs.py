"""Programs composed of the parts in `spellings`: MGLU layers that are right, or subtly wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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

    def __call__(self, x: Tensor, weight: Tensor, masks: Tensor, other_x: Tensor, other_weight: Tensor) -> Any:
        """The layer for x and other_x `[..., h]`, weight and other_weight `[d, h]`, and masks `[n, d, h]` of a kind."""
        if self.wrong is not None and self.wrong.startswith("mutate"):
            x, weight, masks = x.clone(), weight.clone(), masks.clone()
        terms, extra = [], []
        for i in range(masks.shape[0]):
            term, more = self._term(i, x, weight, masks, other_x, other_weight)
            terms.append(term if self.scale is None else SCALES[self.scale](other_x.flatten(), i) * term)
            extra += more
        total = SUMS[self.total](terms)
        return (total, *extra)

    def _term(
        self, i: int, x: Tensor, weight: Tensor, masks: Tensor, other_x: Tensor, other_weight: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        wrong = self.wrong if i == 0 else None
        product, project = BOOL_PRODUCTS[self.product], PROJECTIONS[self.projection]
        m = MASKS[self.kind][self.mask](masks, i)
        if wrong == "soft mask":
            m = torch.sigmoid(masks[i]) if self.trained else masks[i] * 0.5 + 0.25
        if wrong == "mask per channel":
            m = m[:, :1]
        if wrong == "one mask is detached":
            m = m.detach()
        if wrong == "squared mask":
            m = m * m
        complement = ALL_COMPLEMENTS[self.complement]
        masked_weight = WEIGHTS[self.weight](weight, other_weight)
        value_x = {"other x": other_x, "detached x": x.detach(), "copied x": x * 1}.get(wrong or "", x)
        value_weight = {"other weight": other_weight, "detached weight": masked_weight.detach()}.get(
            wrong or "", masked_weight
        )

        gate_weight = product(masked_weight, complement(m) if self.swapped else m)
        if wrong == "rounded":
            gate_weight = gate_weight.to(torch.bfloat16).to(weight.dtype)
        if wrong in TRANSPOSES:
            gate_weight = TRANSPOSES[wrong](gate_weight)
        if self.joint is not None:
            gate, value = JOINTS[self.joint](
                x, gate_weight, product(value_weight, m if self.swapped else complement(m))
            )
            return self._product(gate, value), []
        gate = project(x, gate_weight)
        if wrong == "bias":
            gate = gate + other_x.flatten()[0]
        if wrong == "detached gate":
            gate = gate.detach()
        extra = _mutate(wrong, x, weight, masks, i, gate)
        if wrong == "gate is used elsewhere":
            extra.append(gate)

        if self.at_each_use and value_weight is masked_weight:
            value_weight = WEIGHTS[self.weight](weight, other_weight)
        m_value = self._value_factor(m, masks, i, wrong)
        if self.value == "masked":
            value = project(value_x, product(value_weight, m_value))
        elif self.value == "w - w * m":
            value = project(value_x, value_weight - product(value_weight, m))
        else:
            value = project(value_x, value_weight) - gate
        if wrong == "alpha of the difference":
            value = torch.sub(project(value_x, value_weight), gate, alpha=2)
        if wrong == "no_grad":
            with torch.no_grad():
                value = project(value_x, product(value_weight, m_value))
        if wrong == "activation":
            value = torch.tanh(value)
        if wrong == "floor of the value":
            value = torch.div(value, 2, rounding_mode="floor")
        if wrong == "mutate gate after":
            gate.mul_(0.5)
        activated = self._activated(gate)
        if wrong == "activation is used elsewhere":
            extra.append(activated)
        return self._product(gate, value, activated), extra

    def _value_factor(self, m: Tensor, masks: Tensor, i: int, wrong: str | None) -> Tensor:
        """The factor of the weight in the value of term i, whose mask is m."""
        if wrong == "2 - m":
            return 2 - m * 1.0
        if wrong == "m and m":
            return m
        if wrong == "compared mask":
            return m < 0.5
        if wrong == "next mask":
            return masks[(i + 1) % len(masks)] > 0
        if wrong is not None and wrong in DOUBTFUL_COMPLEMENTS:
            return DOUBTFUL_COMPLEMENTS[wrong](m)
        return m if self.swapped else ALL_COMPLEMENTS[self.complement](m)

    def has_one_factor(self, masks: Tensor) -> bool:
        """Whether gate and value of the first term multiply the weight by equal factors, given masks `[n, d, h]`."""
        if self.value != "masked":
            return False
        m = MASKS[self.kind][self.mask](masks, 0)
        gate_factor = ALL_COMPLEMENTS[self.complement](m) if self.swapped else m
        return torch.equal(gate_factor.double(), self._value_factor(m, masks, 0, self.wrong).double())

    def _activated(self, gate: Tensor) -> Tensor:
        if self.hand_written is None:
            return ACTIVATIONS[self.activation].forward(gate)
        return (HAND_WRITTEN | DOUBTFUL_FUNCTIONS)[self.hand_written](gate)

    def _product(self, gate: Tensor, value: Tensor, activated: Tensor | None = None) -> Tensor:
        activated = self._activated(gate) if activated is None else activated
        return value * activated if self.value_first else activated * value


def _mutate(wrong: str | None, x: Tensor, weight: Tensor, masks: Tensor, i: int, gate: Tensor) -> list[Tensor]:
    """Write in place between gate and value."""
    if wrong == "mutate x":
        x.add_(1)
    elif wrong == "mutate x by operator":
        x /= 2
    elif wrong == "mutate x through a view":
        x.view(-1)[0] = 5
    elif wrong == "mutate x by out":
        torch.add(x, 1, out=x)
    elif wrong == "mutate weight":
        weight.detach().mul_(2)
    elif wrong == "mutate weight by setitem":
        weight[0] = 1
    elif wrong == "mutate masks":
        masks.copy_(masks.flip(0) if masks.dtype is torch.bool else -masks)
    elif wrong == "mutate masks through a view":
        row = masks[i].detach()[0]
        row.copy_(torch.zeros_like(row))
    elif wrong == "mutate gate by a list":
        torch._foreach_mul_([gate], 2.0)
    return []


# Changes of the first term of a program. Some of them leave it an MGLU program, which the pass cannot always prove.
WRONGS = (
    "soft mask",
    "mask per channel",
    "one mask is detached",
    "squared mask",
    "other x",
    "detached x",
    "copied x",
    "other weight",
    "detached weight",
    "rounded",
    "bias",
    "detached gate",
    "gate is used elsewhere",
    "activation is used elsewhere",
    "2 - m",
    "m and m",
    "compared mask",
    "next mask",
    "no_grad",
    "activation",
    "mutate x",
    "mutate x by operator",
    "mutate x through a view",
    "mutate x by out",
    "mutate weight",
    "mutate weight by setitem",
    "mutate masks",
    "mutate masks through a view",
    "mutate gate by a list",
    "mutate gate after",
    "alpha of the difference",
    "floor of the value",
    *TRANSPOSES,
    *DOUBTFUL_COMPLEMENTS,
)


# Changes that give gate and value different inputs or weights.
OF_OTHER_OPERANDS = ("other x", "detached x", "copied x", "other weight", "detached weight")


# Changes of the masks alone, which also fit programs whose gate and value come from one product.
MASK_WRONGS = ("soft mask", "squared mask", "one mask is detached", *TRANSPOSES)


def program_tensors(program: Program, n_masks: int = 3, d: int = 8, h: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(n_masks)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = normal(n_masks, d, h)
    named = {
        "x": normal(5, h),
        "weight": normal(d, h),
        "masks": logits if program.trained else logits > 0,
        "other_x": normal(5, h),
        "other_weight": normal(d, h),
    }
    return {name: t.requires_grad_() if t.is_floating_point() else t for name, t in named.items()}


def layer_tensors(**changed: Any) -> dict[str, Tensor]:
    named = program_tensors(Program())
    return {"x": named["x"], "weight": named["weight"], "logits": named["masks"]} | changed


# --- Layers with all masks in one tensor -----------------------------------------------------------------------------


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

    @property
    def trained(self) -> bool:
        return self.kind == "logits"

    def __call__(self, x: Tensor, weight: Tensor, masks: Tensor, other_x: Tensor, other_weight: Tensor) -> Any:
        """The layer for the tensors that a `Program` takes."""
        wrong = self.wrong
        m = straight_through(masks) if self.trained else masks
        dim, project = STACK_PROJECTIONS[self.projection]
        product = STACK_PRODUCTS[self.product]
        if wrong == "soft masks":
            m = torch.sigmoid(masks) if self.trained else masks * 0.5
        gate_x = torch.stack([x, other_x])[: len(masks)].repeat(len(masks), 1, 1) if wrong == "x per mask" else x
        gate_weights = product(weight, m)
        if wrong == "weight per mask":
            gate_weights = torch.stack([weight, other_weight] * len(masks))[: len(masks)] * m
        if wrong == "x per mask":
            gate = torch.bmm(gate_x[: len(masks)], gate_weights.mT).movedim(0, dim)
        else:
            gate = project(x, gate_weights)
        if wrong == "masks and tokens are exchanged":
            gate = gate.transpose(0, 1)
        if wrong == "masks and features are exchanged":
            gate = gate.transpose(0, 2)
        if wrong == "mutate weight":
            weight.detach().mul_(2)
        complement = ALL_COMPLEMENTS[self.complement](m)
        if wrong is not None and wrong in DOUBTFUL_COMPLEMENTS:
            complement = DOUBTFUL_COMPLEMENTS[wrong](m)
        if wrong == "masks in another order":
            complement = complement.flip(0)
        if wrong == "transposed masks":
            complement = complement.mT
        if wrong == "2 - m":
            complement = 2 - m * 1.0
        value_x = other_x if wrong == "other x" else x
        value_weight = other_weight if wrong == "other weight" else weight
        if self.value == "masked":
            value = project(value_x, product(value_weight, complement))
        else:
            value = F.linear(value_x, value_weight).unsqueeze(dim) - gate
        terms = ACTIVATIONS[self.activation].forward(gate) * value
        if wrong == "a term twice":
            terms = torch.cat([terms, terms], dim).narrow(dim, 1, len(masks))
        mask_weight = torch.softmax(other_x @ other_weight[: len(masks)].mT, -1)
        return self._total(terms, dim, mask_weight)

    def _total(self, terms: Tensor, dim: int, mask_weight: Tensor) -> Tensor:
        if self.wrong == "sum over tokens":
            return terms.sum(1 if dim == 0 else 0)
        if self.wrong == "mask_weight of another order":
            mask_weight = (
                mask_weight.flip(-1).t()
                if dim == 0 and mask_weight.shape[0] == mask_weight.shape[1]
                else mask_weight.flip(-1)
            )
        letters = ("nbd", "bnd", "bdn")[dim]
        if self.mask_weight == "scalars":
            terms = terms * mask_weight[0].reshape([-1 if i == dim else 1 for i in range(3)])
        if self.mask_weight == "einsum":
            return torch.einsum(f"{letters},bn->bd", terms, mask_weight)
        if self.mask_weight == "product":
            terms = terms * mask_weight.movedim(-1, 0 if dim == 0 else -1).unsqueeze((2, 2, 1)[dim])
        if self.total == "sum":
            return terms.sum(dim)
        if self.total == "einsum":
            return torch.einsum(f"{letters}->bd", terms)
        if self.total == "mean":
            return terms.mean(dim)
        return (
            sum(terms.unbind(dim))
            if self.total == "unbind"
            else sum(terms.select(dim, i) for i in range(terms.shape[dim]))
        )


STACK_WRONGS = (
    "soft masks",
    "x per mask",
    "weight per mask",
    "masks and tokens are exchanged",
    "masks and features are exchanged",
    "mutate weight",
    "masks in another order",
    "transposed masks",
    "2 - m",
    "other x",
    "other weight",
    "a term twice",
    "sum over tokens",
    "mask_weight of another order",
    *DOUBTFUL_COMPLEMENTS,
)


STACKS_OF_OTHER_OPERANDS = ("x per mask", "weight per mask", "other x", "other weight")
