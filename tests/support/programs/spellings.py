"""Tables of spellings of the parts of MGLU, as functions. `right_program_parts` has them as statements."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def straight_through(logits: Tensor) -> Tensor:
    """A mask with the values `logits > 0`, whose gradient goes to the logits unchanged."""
    hard = (logits > 0).to(logits.dtype)
    return (hard - logits).detach() + logits


def _hard_first(logits: Tensor) -> Tensor:
    return (logits > 0).to(logits.dtype) + logits - logits.detach()


def _of_a_sigmoid(logits: Tensor) -> Tensor:
    soft = torch.sigmoid(logits)
    return torch.round(soft).detach() + soft - soft.detach()


class Sign(torch.autograd.Function):
    """The straight-through estimator as an `autograd.Function`."""

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


def _difference_under_no_grad(logits: Tensor) -> Tensor:
    with torch.no_grad():
        difference = torch.where(logits > 0, 1.0, 0.0).to(logits.dtype) - logits
    return difference + logits


def gated(x: Tensor, weight: Tensor, m: Tensor, complement: Tensor | None = None) -> Tensor:
    """One mask's term of a SwiMGLU layer. By default the complement is `1 - m`."""
    return F.silu(F.linear(x, weight * m)) * F.linear(x, weight * (1 - m if complement is None else complement))


def term_of_products(gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(gate) * value


def term_of_weights(x: Tensor, gate_weight: Tensor, value_weight: Tensor) -> Tensor:
    return term_of_products(F.linear(x, gate_weight), F.linear(x, value_weight))


def term_of_total(total: Tensor, gate: Tensor) -> Tensor:
    """The term whose value is `F.linear(x, weight)` minus the gate."""
    return term_of_products(gate, total - gate)


def filled(w: Tensor, m: Tensor) -> Tensor:
    """Write zeros to w where m is true."""
    w[m] = 0
    return w


# Short names for programs that are given as source.
SHORT: dict[str, Any] = {
    **{"torch": torch, "F": F, "linear": F.linear, "silu": F.silu, "dropout": F.dropout, "sigmoid": torch.sigmoid},
    **{"einsum": torch.einsum, "cat": torch.cat, "stack": torch.stack, "where": torch.where},
    **{"checkpoint": functools.partial(checkpoint, use_reentrant=False)},
    **{"functools": functools, "operator": operator, "Sign": Sign},
    **{"gated": gated, "ste": straight_through, "filled": filled},
    **{"term": term_of_products, "of_weights": term_of_weights, "of_total": term_of_total},
}


def from_source(arguments: str, source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """A function from source: statements and an expression to return, separated by "; ".

    The source may use `SHORT` and `names`.
    """
    *statements, result = source.split("; ")
    # With `__name__` in the globals, Dynamo would look up globals in the module of that name.
    space = {**SHORT, **{name: value for name, value in names.items() if not name.startswith("__")}}
    exec("\n    ".join([f"def program({arguments}):", *statements, f"return {result}"]), space)
    return space["program"]


# Mask i as a real tensor, from trained logits `[n_masks, d, h]`.
TRAINED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "straight_through": lambda logits, i: straight_through(logits[i]),
    "hard_first": lambda logits, i: _hard_first(logits[i]),
    "select": lambda logits, i: straight_through(logits.select(0, i)),
    "unbind": lambda logits, i: straight_through(logits.unbind(0)[i]),
    "squeeze": lambda logits, i: straight_through(logits[i : i + 1].squeeze(0)),
    "of a sigmoid": lambda logits, i: _of_a_sigmoid(logits)[i],
    "autograd.Function": lambda logits, i: Sign.apply(logits[i]),
    "clone": lambda logits, i: straight_through(logits[i].clone()),
    "no_grad block": lambda logits, i: _under_no_grad(logits[i]),
    "no_grad block of all": lambda logits, i: _under_no_grad(logits)[i],
    "difference under no_grad": lambda logits, i: _difference_under_no_grad(logits[i]),
    "decorated": lambda logits, i: _hard(logits[i]) + logits[i] - logits[i].detach(),
    "decorated, a zero": lambda logits, i: _hard(logits[i]) + (logits[i] - logits[i].detach()),
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


def takes(masks: str, *, is_bool: bool, is_integer: bool, trains: bool) -> bool:
    """True if a spelling that takes `masks` fits this kind of masks."""
    return {
        "any": True,
        "real": not is_bool,
        "bool": is_bool,
        "integer": is_integer,
        "fixed bits": is_bool or is_integer,
        "fixed": not trains,
    }[masks]


# Name -> kind of masks (for `takes`), and function from mask to complement.
COMPLEMENTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "~m": ("bool", lambda m: ~m),
    "1 - m": ("real", lambda m: 1 - m),
    "1.0 - m": ("real", lambda m: 1.0 - m),
    "rsub": ("real", lambda m: torch.rsub(m, 1)),
    "-(m - 1)": ("real", lambda m: -(m - 1)),
    "ones_like - m": ("real", lambda m: torch.ones_like(m) - m),
    "(1 - 2 * m) * 0.5 + 0.5": ("real", lambda m: (1 - 2 * m.double()) * 0.5 + 0.5),
    "sub of a number": ("real", lambda m: torch.sub(1, other=m)),
    "add of alpha": ("real", lambda m: torch.add(torch.ones_like(m), m, alpha=-1)),
    "uint8": ("bool", lambda m: 1 - m.to(torch.uint8)),
    "m ^ True": ("fixed bits", lambda m: m ^ True),
    "m ^ 1": ("integer", lambda m: m ^ 1),
    "logical_xor": ("fixed", lambda m: torch.logical_xor(m, torch.ones_like(m))),
    "logical_not": ("fixed", lambda m: torch.logical_not(m)),
    "m == 0": ("fixed", lambda m: m == 0),
    "m.double() < 0.5": ("fixed", lambda m: m.double() < 0.5),
    "~(m > 0)": ("fixed", lambda m: ~(m > 0)),
    "eq by keywords": ("fixed", lambda m: torch.eq(input=m, other=0)),
    "where": ("bool", lambda m: torch.where(m > 0, 0.0, 1.0)),
    "1 - m.double()": ("fixed", lambda m: 1 - m.double()),
}
# Name -> kind of masks (for `takes`), and function from weight and mask to masked weight.
MASKED_WEIGHTS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "w * m": ("any", lambda w, m: w * m),
    "m * w": ("any", lambda w, m: m * w),
    "torch.mul": ("any", torch.mul),
    "mul by keywords": ("any", lambda w, m: torch.mul(other=w, input=m)),
    "w * m.to(w.dtype)": ("any", lambda w, m: w * m.to(w.dtype)),
    "w * m.type_as(w)": ("any", lambda w, m: w * m.type_as(w)),
    "clone.mul_": ("any", lambda w, m: w.clone().mul_(m)),
    "clone *= m": ("any", lambda w, m: operator.imul(w.clone(), m)),
    "where(m.bool())": ("fixed", lambda w, m: torch.where(m.bool(), w, 0)),
    "where(m == 1)": ("fixed", lambda w, m: torch.where(m == 1, w, torch.zeros_like(w))),
    "where(m == 0, 0, w)": ("fixed", lambda w, m: torch.where(m == 0, 0, w)),
    "where by keywords": ("fixed", lambda w, m: torch.where(condition=m > 0, input=w, other=0.0)),
    "method where": ("fixed", lambda w, m: w.where(m > 0, 0.0)),
    "masked_fill(m == 0)": ("fixed", lambda w, m: w.masked_fill(m == 0, 0)),
    "clone[m == 0] = 0": ("fixed", lambda w, m: filled(w.clone(), m == 0)),
}
PROJECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "linear by keywords": lambda x, w: F.linear(weight=w, input=x),
    "linear of bias=None": lambda x, w: F.linear(x, weight=w, bias=None),
    "x @ w.T": lambda x, w: x @ w.T,
    "matmul": lambda x, w: torch.matmul(x, w.t()),
    "matmul by keywords": lambda x, w: torch.matmul(input=x, other=w.permute(dims=(1, 0))),
    "mm by keyword": lambda x, w: x.mm(mat2=w.t()),
    "permute": lambda x, w: x @ w.permute(1, 0),
    "transpose by keywords": lambda x, w: x @ w.transpose(dim0=0, dim1=1),
    "einsum": lambda x, w: torch.einsum("bh,dh->bd", x, w),
    "einsum of the weight first": lambda x, w: torch.einsum("dh,bh->bd", w, x),
    "addmm by keywords": lambda x, w: torch.addmm(input=x.new_zeros(len(w)), mat1=x, mat2=w.t()),
    "addmm of beta 0": lambda x, w: torch.addmm(w[0], x, w.t(), beta=0),
}


def _residual(term: Tensor) -> Tensor:
    return torch.full(term.shape, 2.0, dtype=term.dtype).cumsum(-1)


def _bias(term: Tensor) -> Tensor:
    return torch.linspace(-1, 1, term.shape[-1], dtype=term.dtype)


SUMS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "y = 0": sum,
    "y += term": lambda terms: functools.reduce(
        operator.iadd, terms, torch.zeros(terms[0].shape, dtype=terms[0].dtype)
    ),
    "reduce": lambda terms: functools.reduce(operator.add, terms),
    "add by keywords": lambda terms: functools.reduce(lambda y, term: torch.add(input=y, other=term), terms),
    "pairs": lambda terms: sum(terms[: len(terms) // 2]) + sum(terms[len(terms) // 2 :]),
    "stack": lambda terms: torch.stack(terms).sum(0),
    "stack by keywords": lambda terms: torch.sum(input=torch.stack(tensors=terms, dim=0), dim=0),
    "sum of a tuple of dims": lambda terms: torch.stack(terms).sum(dim=(0,)),
    "mean": lambda terms: torch.stack(terms).mean(0),
    "sum / n": lambda terms: sum(terms) / len(terms),
    "sum * (1 / n)": lambda terms: sum(terms) * (1 / len(terms)),
    "terms / n": lambda terms: sum(0.5 * term for term in terms),
    "stack, scaled": lambda terms: (0.5 * torch.stack(terms)).sum(0),
    "zeros after": lambda terms: sum(terms) + torch.zeros_like(terms[0]),
    "dropout of 0 per term": lambda terms: sum(F.dropout(term, 0.0) for term in terms),
    "residual": lambda terms: functools.reduce(operator.add, terms, _residual(terms[0])),
    "bias": lambda terms: functools.reduce(operator.add, terms, _bias(terms[0])),
    "bias last": lambda terms: sum(terms) + _bias(terms[0]),
}

# Functions of x and two masked weights `[d, h]` that compute gate and value in one product.
JOINTS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "cat, chunk": lambda x, a, b: F.linear(x, torch.cat([a, b])).chunk(2, dim=-1),
    "cat, chunk by keywords": lambda x, a, b: torch.chunk(input=F.linear(x, torch.cat([a, b])), chunks=2, dim=1),
    "cat, split by sizes": lambda x, a, b: torch.split(F.linear(x, torch.cat([a, b])), [len(a), len(b)], dim=-1),
    "cat, tensor_split": lambda x, a, b: F.linear(x, torch.cat([a, b])).tensor_split(2, dim=-1),
    "cat, slices": lambda x, a, b: _halves(F.linear(x, torch.cat([a, b]))),
    "cat, unflatten": lambda x, a, b: F.linear(x, torch.cat([a, b])).unflatten(-1, (2, -1)).unbind(-2),
    "cat, view": lambda x, a, b: F.linear(x, torch.cat([a, b])).view(len(x), 2, len(a)).unbind(1),
    "cat, matmul": lambda x, a, b: (x @ torch.cat([a, b]).t()).chunk(2, dim=-1),
    "cat of transposes": lambda x, a, b: (x @ torch.cat([a.t(), b.t()], dim=1)).chunk(2, dim=-1),
    "cat of transposes, transposed": lambda x, a, b: F.linear(x, torch.cat([a.t(), b.t()], 1).t()).chunk(2, -1),
    "cat, unflatten of three dimensions": lambda x, a, b: (
        F.linear(x[None], torch.cat([a, b])).unflatten(-1, (2, -1)).unbind(-2)
    ),
    "concat": lambda x, a, b: F.linear(x, torch.concat((a, b), dim=0)).chunk(2, dim=-1),
    "stack, einsum": lambda x, a, b: torch.einsum("bh,kdh->kbd", x, torch.stack([a, b])),
    "stack, einsum of tokens first": lambda x, a, b: torch.einsum("bh,kdh->bkd", x, torch.stack([a, b])).unbind(1),
    "stack, matmul": lambda x, a, b: torch.matmul(x, torch.stack([a, b]).mT),
    "stack, bmm": lambda x, a, b: torch.bmm(x.expand(2, -1, -1), torch.stack([a, b]).mT).unbind(0),
    "stack, flatten, unflatten": lambda x, a, b: (
        F.linear(x, torch.stack([a, b]).flatten(0, 1)).unflatten(-1, (2, -1)).unbind(-2)
    ),
    "stack, reshape": lambda x, a, b: F.linear(x, torch.stack([a, b]).reshape(-1, x.shape[-1])).chunk(2, -1),
    "stack, linear of each": lambda x, a, b: [F.linear(x, one) for one in torch.stack([a, b])],
    # The next two functions are wrong: each part has rows of gate and value.
    "interleaved": lambda x, a, b: F.linear(x, torch.stack([a, b], 1).flatten(0, 1)).chunk(2, dim=-1),
    "strided": lambda x, a, b: F.linear(x, torch.cat([a, b])).unflatten(-1, (-1, 2)).unbind(-1),
}
WRONG_JOINTS = ("interleaved", "strided")


def _halves(both: Tensor) -> tuple[Tensor, Tensor]:
    middle = both.shape[-1] // 2
    return both[..., :middle], both[..., middle:]


# Products of x `[b, h]` and a stack of weights `[n, d, h]`, one for each mask. The number before a product is the
# dimension of its result that counts the masks.
STACK_PROJECTIONS: dict[str, tuple[int, Callable[[Tensor, Tensor], Tensor]]] = {
    "bh,ndh->nbd": (0, lambda x, w: torch.einsum("bh,ndh->nbd", x, w)),
    "bh,ndh->bnd": (1, lambda x, w: torch.einsum("bh,ndh->bnd", x, w)),
    "ndh,bh->bdn": (2, lambda x, w: torch.einsum("ndh,bh->bdn", w, x)),
    "...h,nhd->n...d": (0, lambda x, w: torch.einsum("...h,nhd->n...d", x, w.transpose(1, 2))),
    "x @ w.mT": (0, lambda x, w: x @ w.mT),
    "matmul of x[None]": (0, lambda x, w: torch.matmul(x[None], w.transpose(-2, -1))),
    "bmm of expand": (0, lambda x, w: torch.bmm(x.expand(len(w), -1, -1), w.permute(0, 2, 1))),
}
