"""Tables of right and subtly wrong ways to spell the parts of MGLU; `mglu_programs` composes programs from them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def straight_through(logits: Tensor) -> Tensor:
    """A mask whose value is `logits > 0`, and whose gradient passes to the logits."""
    hard = (logits > 0).to(logits.dtype)
    return (hard - logits).detach() + logits


def _hard_first(logits: Tensor) -> Tensor:
    return (logits > 0).to(logits.dtype) + logits - logits.detach()


def _of_a_sigmoid(logits: Tensor) -> Tensor:
    soft = torch.sigmoid(logits)
    return torch.round(soft).detach() + soft - soft.detach()


class Sign(torch.autograd.Function):
    """The straight-through estimator as a custom function."""

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
    """A difference that is exactly 0, for logits of any size, carries the gradient."""
    return _hard(logits) + (logits - logits.detach())


def gated(x: Tensor, weight: Tensor, m: Tensor, complement: Tensor | None = None) -> Tensor:
    """The term of one mask of a SwiMGLU layer, by default with the complement `1 - m`."""
    return F.silu(F.linear(x, weight * m)) * F.linear(x, weight * (1 - m if complement is None else complement))


def term_of_products(gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(gate) * value


def term_of_weights(x: Tensor, gate_weight: Tensor, value_weight: Tensor) -> Tensor:
    return term_of_products(F.linear(x, gate_weight), F.linear(x, value_weight))


def term_of_total(total: Tensor, gate: Tensor) -> Tensor:
    """The term whose value is `F.linear(x, weight)` minus the gate."""
    return term_of_products(gate, total - gate)


# Mask i as a real tensor, from trained logits `[n_masks, d, h]`.
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

# Mask i as a bool tensor, from bool masks `[n_masks, d, h]`.
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

# Mask i as a tensor of floats or integers, from masks of the same dtype `[n_masks, d, h]`.
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

# Complements of tensors of any dtype that carry no gradient.
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

# Functions that are the complement only in some dtypes, because numbers are rounded to the tensor's dtype and integers
# overflow, or that never are.
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

# Activations written out as formulas.
HAND_WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "g / (1 + exp(-g))": lambda g: g / (1 + torch.exp(-g)),
    "g * sigmoid(g)": lambda g: g * torch.sigmoid(g),
    "g * (0.5 + erf / 2)": lambda g: g * (0.5 + torch.erf(g * 0.5**0.5) / 2),
    "dropout of 0": lambda g: F.silu(F.dropout(g, 0.0)),
}

# Functions with the values of relu but another derivative at 0, and functions that equal silu only if an argument of
# one of their parts is ignored.
DOUBTFUL_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
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

# The factor for term i, from a tensor of scalars.
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
    # Wrong: the rows have another order.
    "interleaved": lambda x, a, b: F.linear(x, torch.stack([a, b], 1).flatten(0, 1)).chunk(2, dim=-1),
    "strided": lambda x, a, b: F.linear(x, torch.cat([a, b])).unflatten(-1, (-1, 2)).unbind(-1),
}
WRONG_JOINTS = ("interleaved", "strided")


def _halves(both: Tensor) -> tuple[Tensor, Tensor]:
    middle = both.shape[-1] // 2
    return both[..., :middle], both[..., middle:]


# Kinds of masks: functions that make the masks of a program from logits, and the spellings of each kind.
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

# Transposes, and calls that look like one, of a square matrix.
TRANSPOSES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed by nothing": lambda w: w.transpose(dim0=0, dim1=0),
    "transposed by axes": lambda w: w.swapaxes(axis0=-1, axis1=0),
    "transposed by the same axis": lambda w: torch.swapaxes(w, axis0=-1, axis1=1),
    "permuted by nothing": lambda w: w.permute(dims=(0, 1)),
}


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
