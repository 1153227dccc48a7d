"""The parts that MGLU is spelled with, right and subtly wrong, and programs composed of them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mglu_ops.activations import ACTIVATIONS


def straight_through(logits: Tensor) -> Tensor:
    """0 or 1 forward, the identity backward."""
    hard = (logits > 0).to(logits.dtype)
    return (hard - logits).detach() + logits


def _hard_first(logits: Tensor) -> Tensor:
    return (logits > 0).to(logits.dtype) + logits - logits.detach()


# Mask i as a real tensor, of trained logits `[n_masks, d, h]`.
TRAINED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "straight_through": lambda logits, i: straight_through(logits[i]),
    "hard_first": lambda logits, i: _hard_first(logits[i]),
    "select": lambda logits, i: straight_through(logits.select(0, i)),
    "unbind": lambda logits, i: straight_through(logits.unbind(0)[i]),
    "last_first": lambda logits, i: straight_through(logits[-1 - i]),
}

# Mask i as a bool tensor, of bool masks `[n_masks, d, h]`.
FIXED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "slice": lambda bits, i: bits[i],
    "unbind": lambda bits, i: bits.unbind(0)[i],
    "negative_index": lambda bits, i: bits[i - len(bits)],
    "clone": lambda bits, i: bits[i].clone(),
    "and": lambda bits, i: bits[i] & bits[-1],
    "comparison": lambda bits, i: bits[i].double() > 0.5,
}

COMPLEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "1 - m": lambda m: 1 - m,
    "1.0 - m": lambda m: 1.0 - m,
    "rsub": lambda m: torch.rsub(m, 1),
    "-(m - 1)": lambda m: -(m - 1),
    "ones_like - m": lambda m: torch.ones_like(m) - m,
    "(1 - 2 * m) * 0.5 + 0.5": lambda m: (1 - 2 * m) * 0.5 + 0.5,
}

BOOL_COMPLEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "~m": lambda m: ~m,
    "logical_not": lambda m: torch.logical_not(m),
    "m == 0": lambda m: m == 0,
    "1 - m.double()": lambda m: 1 - m.double(),
    "m.double() < 0.5": lambda m: m.double() < 0.5,
    "uint8": lambda m: 1 - m.to(torch.uint8),
}

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "w * m": lambda w, m: w * m,
    "m * w": lambda w, m: m * w,
    "torch.mul": torch.mul,
}

BOOL_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = PRODUCTS | {
    "where": lambda w, m: torch.where(m, w, 0),
    "where_not": lambda w, m: torch.where(~m, 0, w),
    "masked_fill": lambda w, m: w.masked_fill(~m, 0),
}

PROJECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "x @ w.T": lambda x, w: x @ w.T,
    "matmul": lambda x, w: torch.matmul(x, w.t()),
}


def _running_sum(terms: list[Tensor]) -> Tensor:
    y: Any = 0
    for term in terms:
        y = y + term
    return y


def _running_sum_from_none(terms: list[Tensor]) -> Tensor:
    y = None
    for term in terms:
        y = term if y is None else y + term
    return y


def _accumulated(terms: list[Tensor]) -> Tensor:
    y = torch.zeros(terms[0].shape, dtype=terms[0].dtype)
    for term in terms:
        y += term
    return y


SUMS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "y = 0": _running_sum,
    "y = None": _running_sum_from_none,
    "y += term": _accumulated,
    "sum": sum,
    "stack": lambda terms: torch.stack(terms).sum(0),
    "stack_last": lambda terms: torch.stack(terms, dim=-1).sum(dim=-1),
    "reduce": lambda terms: functools.reduce(operator.add, terms),
    "pairs": lambda terms: sum(terms[: len(terms) // 2]) + sum(terms[len(terms) // 2 :]),
}


@dataclass(frozen=True)
class Program:
    """An MGLU layer of named parts. `wrong` names what is done to it that the pass must see (`WRONGS`)."""

    mask: str = "straight_through"
    complement: str = "1 - m"
    product: str = "w * m"
    projection: str = "linear"
    value: str = "masked"
    activation: str = "silu"
    total: str = "y = 0"
    trained: bool = True
    value_first: bool = False
    swapped: bool = False
    wrong: str | None = None

    def __call__(self, x: Tensor, weight: Tensor, masks: Tensor, other_x: Tensor, other_weight: Tensor) -> Any:
        """X and other_x `[..., h]`, weight and other_weight `[d, h]`, masks `[n, d, h]`, logits or bool."""
        if self.wrong is not None and self.wrong.startswith("mutate"):
            x, weight, masks = x.clone(), weight.clone(), masks.clone()
        terms, extra = [], []
        for i in range(masks.shape[0]):
            term, more = self._term(i, x, weight, masks, other_x, other_weight)
            terms.append(term)
            extra += more
        total = SUMS[self.total](terms)
        return (total, *extra)

    def _term(
        self, i: int, x: Tensor, weight: Tensor, masks: Tensor, other_x: Tensor, other_weight: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        wrong = self.wrong if i == 0 else None
        product, project = BOOL_PRODUCTS[self.product], PROJECTIONS[self.projection]
        m = TRAINED[self.mask](masks, i) if self.trained else FIXED[self.mask](masks, i)
        if wrong == "soft mask":
            m = torch.sigmoid(masks[i]) if self.trained else masks[i] * 0.5 + 0.25
        if wrong == "mask of a channel":
            m = m[:, :1]
        if wrong == "one mask is detached":
            m = m.detach()
        if wrong == "squared mask":
            m = m * m
        complement = (COMPLEMENTS | BOOL_COMPLEMENTS)[self.complement]
        value_x = {"other x": other_x, "detached x": x.detach(), "copied x": x * 1}.get(wrong or "", x)
        value_weight = {"other weight": other_weight, "detached weight": weight.detach()}.get(wrong or "", weight)

        gate_weight = product(weight, complement(m) if self.swapped else m)
        if wrong == "rounded":
            gate_weight = gate_weight.to(torch.bfloat16).to(weight.dtype)
        gate = project(x, gate_weight)
        if wrong == "bias":
            gate = gate + other_x.flatten()[0]
        if wrong == "detached gate":
            gate = gate.detach()
        extra = _mutate(wrong, x, weight, masks, i, gate)
        if wrong == "gate is used elsewhere":
            extra.append(gate)

        m_value = m if self.swapped else complement(m)
        if wrong == "2 - m":
            m_value = 2 - m * 1.0
        if wrong == "m and m":
            m_value = m
        if wrong == "compared mask":
            m_value = m < 0.5
        if wrong == "next mask":
            m_value = masks[(i + 1) % len(masks)] > 0
        if self.value == "masked":
            value = project(value_x, product(value_weight, m_value))
        elif self.value == "w - w * m":
            value = project(value_x, value_weight - product(value_weight, m))
        else:
            value = project(value_x, value_weight) - gate
        if wrong == "no_grad":
            with torch.no_grad():
                value = project(value_x, product(value_weight, m_value))
        if wrong == "activation":
            value = torch.tanh(value)
        if wrong == "mutate gate after":
            gate.mul_(0.5)
        activated = ACTIVATIONS[self.activation].forward(gate)
        if wrong == "activation is used elsewhere":
            extra.append(activated)
        return (value * activated if self.value_first else activated * value), extra


def _mutate(wrong: str | None, x: Tensor, weight: Tensor, masks: Tensor, i: int, gate: Tensor) -> list[Tensor]:
    """What happens in place between gate and value."""
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


# What may be done to the first term of a program. After some of it the layer is MGLU still, or not as the pass
# can prove.
WRONGS = (
    "soft mask",
    "mask of a channel",
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
)
