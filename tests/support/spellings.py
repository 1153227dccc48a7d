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


def _of_a_sigmoid(logits: Tensor) -> Tensor:
    soft = torch.sigmoid(logits)
    return torch.round(soft).detach() + soft - soft.detach()


class Sign(torch.autograd.Function):
    """The straight-through estimator as most people write it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return (logits > 0).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@torch.no_grad()
def _hard(logits: Tensor) -> Tensor:
    return (logits > 0).to(logits.dtype)


def _under_no_grad(logits: Tensor) -> Tensor:
    with torch.no_grad():
        hard = (logits > 0).to(logits.dtype)
    return hard + logits - logits.detach()


def _detached_under_no_grad(logits: Tensor) -> Tensor:
    with torch.no_grad():
        hard = torch.where(logits > 0, 1.0, 0.0).to(logits.dtype)
    return (hard - logits).detach() + logits


def _difference_under_no_grad(logits: Tensor) -> Tensor:
    with torch.no_grad():
        difference = (logits > 0).to(logits.dtype) - logits
    return difference + logits


def _zero_under_no_grad(logits: Tensor) -> Tensor:
    """A difference of 0 carries the gradient, and is exact for logits of any size."""
    return _hard(logits) + (logits - logits.detach())


# Mask i as a real tensor, of trained logits `[n_masks, d, h]`.
TRAINED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "straight_through": lambda logits, i: straight_through(logits[i]),
    "hard_first": lambda logits, i: _hard_first(logits[i]),
    "select": lambda logits, i: straight_through(logits.select(0, i)),
    "unbind": lambda logits, i: straight_through(logits.unbind(0)[i]),
    "last_first": lambda logits, i: straight_through(logits[-1 - i]),
    "slice of a stack": lambda logits, i: straight_through(logits)[i],
    "of a sigmoid": lambda logits, i: _of_a_sigmoid(logits)[i],
    "autograd.Function": lambda logits, i: Sign.apply(logits[i]),
    "clone": lambda logits, i: straight_through(logits[i].clone()),
    "no_grad block": lambda logits, i: _under_no_grad(logits[i]),
    "no_grad block of all": lambda logits, i: _under_no_grad(logits)[i],
    "no_grad, then detach": lambda logits, i: _detached_under_no_grad(logits[i]),
    "difference under no_grad": lambda logits, i: _difference_under_no_grad(logits[i]),
    "decorated": lambda logits, i: _hard(logits[i]) + logits[i] - logits[i].detach(),
    "decorated, a zero": lambda logits, i: _zero_under_no_grad(logits[i]),
    ".data": lambda logits, i: (logits[i].data > 0).to(logits.dtype) + logits[i] - logits[i].data,
    ".data of the difference": lambda logits, i: ((logits[i] > 0).to(logits.dtype) - logits[i]).data + logits[i],
    "detached comparison": lambda logits, i: (logits[i].detach() > 0).to(logits.dtype) - logits[i].detach() + logits[i],
    "by keywords": lambda logits, i: torch.add(input=(_hard(logits[i]) - logits[i]).detach(), other=logits[i]),
}

# Mask i as a bool tensor, of bool masks `[n_masks, d, h]`.
FIXED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "slice": lambda bits, i: bits[i],
    "unbind": lambda bits, i: bits.unbind(0)[i],
    "negative_index": lambda bits, i: bits[i - len(bits)],
    "clone": lambda bits, i: bits[i].clone(),
    "and": lambda bits, i: bits[i] & bits[-1],
    "comparison": lambda bits, i: bits[i].double() > 0.5,
    "bit": lambda bits, i: ((bits[i].to(torch.uint8) * 6 >> 1) & 1).bool(),
    "sign": lambda bits, i: torch.relu(torch.sign(bits[i].double() - 0.5)) > 0,
}

# Mask i as a tensor of floats or integers, of such masks `[n_masks, d, h]`.
GIVEN: dict[str, Callable[[Tensor, int], Tensor]] = {
    name: FIXED[name] for name in ("slice", "unbind", "negative_index", "clone")
}

COMPLEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "1 - m": lambda m: 1 - m,
    "1.0 - m": lambda m: 1.0 - m,
    "rsub": lambda m: torch.rsub(m, 1),
    "-(m - 1)": lambda m: -(m - 1),
    "ones_like - m": lambda m: torch.ones_like(m) - m,
    "rsub by keyword": lambda m: torch.rsub(m, other=1),
    "(1 - 2 * m) * 0.5 + 0.5": lambda m: (1 - 2 * m) * 0.5 + 0.5,
}

BOOL_COMPLEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "~m": lambda m: ~m,
    "logical_not": lambda m: torch.logical_not(m),
    "m == 0": lambda m: m == 0,
    "1 - m.double()": lambda m: 1 - m.double(),
    "m.double() < 0.5": lambda m: m.double() < 0.5,
    "uint8": lambda m: 1 - m.to(torch.uint8),
    "m ^ True": lambda m: m ^ True,
}

# Of tensors of any dtype that hold 0 and 1 and carry no gradient.
FIXED_COMPLEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "m == 0": lambda m: m == 0,
    "m < 1": lambda m: m < 1,
    "logical_not": lambda m: torch.logical_not(m),
    "1 - m.double()": lambda m: 1 - m.double(),
}

INTEGER_COMPLEMENTS: dict[str, Callable[[Tensor], Tensor]] = FIXED_COMPLEMENTS | {
    "1 - m": lambda m: 1 - m,
    "ones_like - m": lambda m: torch.ones_like(m) - m,
    "m ^ 1": lambda m: m ^ 1,
}

# Complements in some dtypes only: numbers take the dtype of their tensor, and integers overflow.
DOUBTFUL_COMPLEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "m < full_like(0.5)": lambda m: m < torch.full_like(m, 0.5),
    "full_like(1.5) - m": lambda m: torch.full_like(m, 1.5).double() - m.double(),
    "m.bfloat16() > 0.999": lambda m: ~(m.bfloat16() > torch.tensor(0.999, dtype=torch.bfloat16)),
    "-m of uint8": lambda m: -m.to(torch.uint8) + 1,
    "m - 1 of uint8": lambda m: (m.to(torch.uint8) - 1) > 0,
    "m > -1 of uint8": lambda m: m.to(torch.uint8) > -1,
    "~m of int8": lambda m: ~m.to(torch.int8),
    "floor": lambda m: 1 - torch.div(m.double(), 2, rounding_mode="floor"),
    "ceiling by floor": lambda m: 1 + torch.div(-m.double(), 2, rounding_mode="floor"),
    "rsub of alpha": lambda m: torch.rsub(m.double(), 1, alpha=2),
    "transpose(dim0=0, dim1=0)": lambda m: 1 - m.double().transpose(dim0=0, dim1=0),
    "transpose(dim0=0, dim1=1)": lambda m: 1 - m.double().transpose(dim0=0, dim1=1),
    "round(decimals=-1)": lambda m: 1 - torch.round(m.double(), decimals=-1),
    "0 ** m": lambda m: 0 ** m.double(),
    "clamp(max=0)": lambda m: 1 - m.double().clamp(max=0),
}

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "w * m": lambda w, m: w * m,
    "m * w": lambda w, m: m * w,
    "torch.mul": torch.mul,
    "clone.mul_": lambda w, m: w.clone().mul_(m),
    "mul by keyword": lambda w, m: torch.mul(w, other=m),
    "mul by keywords": lambda w, m: torch.mul(other=w, input=m),
    "clone *= m": lambda w, m: _multiplied_in_place(w.clone(), m),
}


def _multiplied_in_place(w: Tensor, m: Tensor) -> Tensor:
    w *= m
    return w


BOOL_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = PRODUCTS | {
    "where": lambda w, m: torch.where(m, w, 0),
    "where_not": lambda w, m: torch.where(~m, 0, w),
    "masked_fill": lambda w, m: w.masked_fill(~m, 0),
    "clone[~m] = 0": lambda w, m: _filled_in_place(w.clone(), ~m),
}


def _filled_in_place(w: Tensor, m: Tensor) -> Tensor:
    w[m] = 0
    return w


PROJECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "x @ w.T": lambda x, w: x @ w.T,
    "matmul": lambda x, w: torch.matmul(x, w.t()),
    "einsum": lambda x, w: torch.einsum("bh,dh->bd", x, w),
    "addmm": lambda x, w: torch.addmm(torch.zeros(1, dtype=x.dtype), x, w.t()),
    "linear by keywords": lambda x, w: F.linear(weight=w, input=x),
    "matmul by keywords": lambda x, w: torch.matmul(input=x, other=w.permute(dims=(1, 0))),
    "swapaxes by keywords": lambda x, w: x.matmul(other=w.swapaxes(axis0=-1, axis1=0)),
}

# Activations written out; of a name, the first is the operator's own.
HANDS: dict[str, Callable[[Tensor], Tensor]] = {
    "g / (1 + exp(-g))": lambda g: g / (1 + torch.exp(-g)),
    "g * sigmoid(g)": lambda g: g * torch.sigmoid(g),
    "g * (0.5 + erf / 2)": lambda g: g * (0.5 + torch.erf(g * 0.5**0.5) / 2),
    "dropout of 0": lambda g: F.silu(F.dropout(g, 0.0)),
}

# Functions with a kink, which are relu at every number and not so in their derivative at 0, and sums that cancel only
# for who forgets an argument.
DOUBTFUL_HANDS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda g: g.clamp(min=0),
    "clamp_min": lambda g: torch.clamp_min(g, 0),
    "maximum": lambda g: torch.maximum(g, torch.zeros_like(g)),
    "where(g > 0)": lambda g: torch.where(g > 0, g, 0),
    "where(g >= 0)": lambda g: torch.where(g >= 0, g, 0),
    "g * (g > 0)": lambda g: g * (g > 0),
    "threshold": lambda g: F.threshold(g, 0, 0),
    "clamp(0, 1)": lambda g: g.clamp(min=0, max=1),
    "clamp - relu + silu": lambda g: g.clamp(min=0) - F.relu(g) + F.silu(g),
    "slopes": lambda g: F.leaky_relu(g, 0.2) - F.leaky_relu(g, 0.01) + F.silu(g),
    "gelus": lambda g: F.gelu(g, approximate="tanh") - F.gelu(g) + F.silu(g),
    "alpha": lambda g: torch.add(F.silu(g), g, alpha=2) - g,
    "floor": lambda g: torch.div(g, 1 + torch.exp(-g), rounding_mode="floor"),
    "dropout of all": lambda g: F.dropout(g, p=1.0, training=True) + F.silu(g),
    "detached factor": lambda g: g * torch.sigmoid(g).detach(),
    "constant of an integer": lambda g: g * torch.full_like(g, 0.5, dtype=torch.int64) + F.silu(g),
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


def _residual(term: Tensor) -> Tensor:
    return torch.full(term.shape, 2.0, dtype=term.dtype).cumsum(-1)


def _bias(term: Tensor) -> Tensor:
    return torch.linspace(-1, 1, term.shape[-1], dtype=term.dtype)


SUMS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "y = 0": _running_sum,
    "y = None": _running_sum_from_none,
    "y += term": _accumulated,
    "sum": sum,
    "stack": lambda terms: torch.stack(terms).sum(0),
    "stack_last": lambda terms: torch.stack(terms, dim=-1).sum(dim=-1),
    "reduce": lambda terms: functools.reduce(operator.add, terms),
    "residual": lambda terms: functools.reduce(operator.add, terms, _residual(terms[0])),
    "mean": lambda terms: torch.stack(terms).mean(0),
    "sum / n": lambda terms: sum(terms) / len(terms),
    "terms / n": lambda terms: sum(0.5 * term for term in terms),
    "bias": lambda terms: functools.reduce(operator.add, terms, _bias(terms[0])),
    "add by keywords": lambda terms: functools.reduce(lambda y, term: torch.add(input=y, other=term), terms),
    "pairs": lambda terms: sum(terms[: len(terms) // 2]) + sum(terms[len(terms) // 2 :]),
}

# Weights that are expressions of two parameters `[d, h]`.
WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weight": lambda weight, other: weight,
    "scaled rows": lambda weight, other: weight * other[:, :1],
    "sum": lambda weight, other: weight + 0.5 * other,
    "product": lambda weight, other: weight @ other,
    "normalized": lambda weight, other: F.normalize(weight, dim=-1),
    "abs": lambda weight, other: weight.abs(),
    "elementwise": lambda weight, other: weight * other,
}

# A factor of term i, of a tensor of scalars.
SCALES: dict[str, Callable[[Tensor, int], Any]] = {
    "number": lambda scalars, i: 0.5,
    "numbers": lambda scalars, i: (0.5, 1.0, -2.0, 3.0)[i % 4],
    "learned": lambda scalars, i: scalars[i],
    "softmax": lambda scalars, i: scalars.softmax(0)[i],
}

# Gate and value from one product of x and two masked weights `[d, h]`.
JOINTS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "cat, chunk": lambda x, a, b: F.linear(x, torch.cat([a, b])).chunk(2, dim=-1),
    "cat, split": lambda x, a, b: F.linear(x, torch.cat([a, b], dim=0)).split(a.shape[0], -1),
    "cat, slices": lambda x, a, b: _halves(F.linear(x, torch.cat([a, b]))),
    "cat, unflatten": lambda x, a, b: F.linear(x, torch.cat([a, b])).unflatten(-1, (2, -1)).unbind(-2),
    "stack, einsum": lambda x, a, b: torch.einsum("bh,kdh->kbd", x, torch.stack([a, b])),
    "stack, matmul": lambda x, a, b: torch.matmul(x, torch.stack([a, b]).mT),
    "stack, flatten": lambda x, a, b: F.linear(x, torch.stack([a, b]).flatten(0, 1)).view(len(x), 2, -1).unbind(1),
    # Wrong, for the order of the rows is another one.
    "interleaved": lambda x, a, b: F.linear(x, torch.stack([a, b], 1).flatten(0, 1)).chunk(2, dim=-1),
    "strided": lambda x, a, b: F.linear(x, torch.cat([a, b])).unflatten(-1, (-1, 2)).unbind(-1),
}
WRONG_JOINTS = ("interleaved", "strided")


def _halves(both: Tensor) -> tuple[Tensor, Tensor]:
    middle = both.shape[-1] // 2
    return both[..., :middle], both[..., middle:]


# Kinds of masks: what makes the masks of a program of logits, and the spellings of each kind.
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "logits": lambda logits: logits,
    "bool": lambda logits: logits > 0,
    "float": lambda logits: (logits > 0).to(logits.dtype),
    "uint8": lambda logits: (logits > 0).to(torch.uint8),
    "int64": lambda logits: (logits > 0).long(),
}
MASKS = {"logits": TRAINED, "bool": FIXED, "float": GIVEN, "uint8": GIVEN, "int64": GIVEN}
COMPLEMENTS_OF = {
    "logits": COMPLEMENTS,
    "bool": BOOL_COMPLEMENTS,
    "float": COMPLEMENTS | FIXED_COMPLEMENTS,
    "uint8": INTEGER_COMPLEMENTS,
    "int64": INTEGER_COMPLEMENTS,
}
PRODUCTS_OF = {kind: BOOL_PRODUCTS if kind == "bool" else PRODUCTS for kind in KINDS}
ALL_COMPLEMENTS = COMPLEMENTS | BOOL_COMPLEMENTS | INTEGER_COMPLEMENTS

# What turns a square matrix, or does not.
TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "turned by nothing": lambda w: w.transpose(dim0=0, dim1=0),
    "turned by axes": lambda w: w.swapaxes(axis0=-1, axis1=0),
    "turned by the same axis": lambda w: torch.swapaxes(w, axis0=-1, axis1=1),
    "permuted by nothing": lambda w: w.permute(dims=(0, 1)),
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
    hand: str | None = None
    total: str = "y = 0"
    kind: str = "logits"
    weight: str = "weight"
    """What is masked (`WEIGHTS`)."""
    at_each_use: bool = False
    """The weight is computed anew for the value."""
    scale: str | None = None
    joint: str | None = None
    value_first: bool = False
    swapped: bool = False
    wrong: str | None = None

    @property
    def trained(self) -> bool:
        return self.kind == "logits"

    def __call__(self, x: Tensor, weight: Tensor, masks: Tensor, other_x: Tensor, other_weight: Tensor) -> Any:
        """X and other_x `[..., h]`, weight and other_weight `[d, h]`, masks `[n, d, h]` of a kind (`KINDS`)."""
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
        if wrong == "mask of a channel":
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
        if wrong in TURNS:
            gate_weight = TURNS[wrong](gate_weight)
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
        m_value = m if self.swapped else complement(m)
        if wrong == "2 - m":
            m_value = 2 - m * 1.0
        if wrong == "m and m":
            m_value = m
        if wrong == "compared mask":
            m_value = m < 0.5
        if wrong == "next mask":
            m_value = masks[(i + 1) % len(masks)] > 0
        if wrong is not None and wrong in DOUBTFUL_COMPLEMENTS:
            m_value = DOUBTFUL_COMPLEMENTS[wrong](m)
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

    def _activated(self, gate: Tensor) -> Tensor:
        if self.hand is None:
            return ACTIVATIONS[self.activation].forward(gate)
        return (HANDS | DOUBTFUL_HANDS)[self.hand](gate)

    def _product(self, gate: Tensor, value: Tensor, activated: Tensor | None = None) -> Tensor:
        activated = self._activated(gate) if activated is None else activated
        return value * activated if self.value_first else activated * value


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
    "alpha of the difference",
    "floor of the value",
    *TURNS,
    *DOUBTFUL_COMPLEMENTS,
)

# Of these, gate and value have two inputs or two weights.
OF_OTHER_OPERANDS = ("other x", "detached x", "copied x", "other weight", "detached weight")

# What is wrong with the masks alone, so that gate and value may also come from one product.
MASK_WRONGS = ("soft mask", "squared mask", "one mask is detached", *TURNS)


# --- Layers with all masks in one tensor -----------------------------------------------------------------------------

# Masks `[n, d, h]` times a weight `[d, h]`.
STACK_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "w * m": lambda w, m: w * m,
    "m * w[None]": lambda w, m: m * w[None],
    "w.unsqueeze(0) * m": lambda w, m: w.unsqueeze(0) * m,
    "w.expand * m": lambda w, m: w.expand(m.shape[0], -1, -1) * m,
    "where": lambda w, m: torch.where(m != 0, w, 0) if m.dtype is torch.bool else w * m,
}

# x `[b, h]` and weights `[n, d, h]` to products, with the dimension of the masks.
STACK_PROJECTIONS: dict[str, tuple[int, Callable[[Tensor, Tensor], Tensor]]] = {
    "bh,ndh->nbd": (0, lambda x, w: torch.einsum("bh,ndh->nbd", x, w)),
    "bh,ndh->bnd": (1, lambda x, w: torch.einsum("bh,ndh->bnd", x, w)),
    "ndh,bh->bdn": (2, lambda x, w: torch.einsum("ndh,bh->bdn", w, x)),
    "...h,nhd->n...d": (0, lambda x, w: torch.einsum("...h,nhd->n...d", x, w.transpose(1, 2))),
    "x @ w.mT": (0, lambda x, w: x @ w.mT),
    "matmul of x[None]": (0, lambda x, w: torch.matmul(x[None], w.transpose(-2, -1))),
    "bmm of expand": (0, lambda x, w: torch.bmm(x.expand(len(w), -1, -1), w.permute(0, 2, 1))),
    "bmm of repeat": (0, lambda x, w: torch.bmm(x.repeat(len(w), 1, 1), w.mT)),
}


@dataclass(frozen=True)
class StackProgram:
    """An MGLU layer whose masks are one tensor. All sizes may be equal, so that no shape tells what is what."""

    complement: str = "1 - m"
    product: str = "w * m"
    projection: str = "bh,ndh->nbd"
    value: str = "masked"
    total: str = "sum"
    route: str | None = None
    activation: str = "silu"
    kind: str = "logits"
    wrong: str | None = None

    @property
    def trained(self) -> bool:
        return self.kind == "logits"

    def __call__(self, x: Tensor, weight: Tensor, masks: Tensor, other_x: Tensor, other_weight: Tensor) -> Any:
        """The tensors of `Program`."""
        wrong = self.wrong
        m = straight_through(masks) if self.trained else masks
        dim, project = STACK_PROJECTIONS[self.projection]
        product = STACK_PRODUCTS[self.product]
        if wrong == "soft masks":
            m = torch.sigmoid(masks) if self.trained else masks * 0.5
        gate_x = torch.stack([x, other_x])[: len(masks)].repeat(len(masks), 1, 1) if wrong == "x a mask" else x
        gate_weights = product(weight, m)
        if wrong == "weight a mask":
            gate_weights = torch.stack([weight, other_weight] * len(masks))[: len(masks)] * m
        if wrong == "x a mask":
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
        route = torch.softmax(other_x @ other_weight[: len(masks)].mT, -1)
        return self._total(terms, dim, route)

    def _total(self, terms: Tensor, dim: int, route: Tensor) -> Tensor:
        if self.wrong == "sum over tokens":
            return terms.sum(1 if dim == 0 else 0)
        if self.wrong == "route of another order":
            route = route.flip(-1).t() if dim == 0 and route.shape[0] == route.shape[1] else route.flip(-1)
        letters = ("nbd", "bnd", "bdn")[dim]
        if self.route == "scalars":
            terms = terms * route[0].reshape([-1 if i == dim else 1 for i in range(3)])
        if self.route == "einsum":
            return torch.einsum(f"{letters},bn->bd", terms, route)
        if self.route == "product":
            terms = terms * route.movedim(-1, 0 if dim == 0 else -1).unsqueeze((2, 2, 1)[dim])
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
    "x a mask",
    "weight a mask",
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
    "route of another order",
    *DOUBTFUL_COMPLEMENTS,
)
STACKS_OF_OTHER_OPERANDS = ("x a mask", "weight a mask", "other x", "other weight")
