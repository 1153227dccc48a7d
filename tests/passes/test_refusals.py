"""Each refusal of a candidate, with its reason; results and gradients equal eager's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import family
from graphs import Capture, assert_same, compare, results
from lookalikes import SAME, H, Layer, by_name, tensors
from spellings import gated, straight_through, term_of_products, term_of_total, term_of_weights
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

Factors = Callable[[Tensor, Tensor], tuple[Any, Any]]
"""The factors of gate and value, from a straight-through mask m of the first logits and three bool masks b."""

# The reason -> names and factors. Where they depend on gradients, the reason is one only in training.
OF_FACTORS: dict[str, dict[str, Factors]] = {
    "two different masks": {
        "two masks": lambda m, b: (b[0], ~b[1]),
        "a mask and its transposed complement": lambda m, b: (b[0], ~b[0].t()),
    },
    "not complementary": {
        "2 - m": lambda m, b: (m, 2 - m),
        "a mask twice": lambda m, b: (b[0], b[0]),
        "a scaled mask": lambda m, b: (b[0] * 2, ~b[0]),
        "True + True, which is True": lambda m, b: ((b[0] + b[0]) == 2, ~((b[0] + b[0]) == 2)),
        "an overflow of int8": lambda m, b: (b[0], ~((b[0].to(torch.int8) * 127 + 1) > 0)),
    },
    "a per-channel mask": {
        "a mask per row": lambda m, b: (b[0][:, :1], ~b[0][:, :1]),
        "a mask per column": lambda m, b: (b[0][:1], ~b[0][:1]),
        "a mask per column, of one dimension": lambda m, b: (b[0, 0], ~b[0, 0]),
    },
}
OF_GRADIENTS_OF_FACTORS: dict[str, dict[str, Factors]] = {
    "does not pass straight through": {
        "a compared complement": lambda m, b: (m, m == 0),
        "a detached complement": lambda m, b: (m, (1 - m).detach()),
        "a square": lambda m, b: (m * m, 1 - m),
        "a compared mask": lambda m, b: (m > 0.5, 1 - m),
    },
}

# The reason (`a|b`: a or b) -> names and layers.
REFUSED: dict[str, dict[str, Layer]] = {
    # Masks
    "nothing proves to be binary": {
        "a soft mask": lambda x, w, l, b, o: gated(x, w, torch.sigmoid(l[0])),
        "a float tensor": lambda x, w, l, b, o: gated(x, w, o + 0),
        "integers of more values": lambda x, w, l, b, o: gated(x, w, o.abs().long() % 4),
    },
    "write the second as 1 - mask": {
        "two real tensors": lambda x, w, l, b, o: term_of_weights(x, w * o, w * l[0]),
        "transposed products of real tensors": lambda x, w, l, b, o: term_of_products(
            x @ (w * o).t(), x @ (w * o.tanh()).t()
        ),
        "rounding errors that an integer cuts": lambda x, w, l, b, o: _with_rounding_errors(x, w, l[0]),
    },
    "different masks (the graph writes in place to one of them)": {
        "the complement of a mask after a write to part of it": lambda x, w, l, b, o: _after_a_write(x, w, b[0]),
    },
    "two different masks": {
        "the sigmoid of another gate": lambda x, w, l, b, o: (
            F.linear(x, w * b[0]) * torch.sigmoid(F.linear(x, w * b[1])) * F.linear(x, w * ~b[0])
        ),
    },
    "a per-channel mask": {
        "masked outputs": lambda x, w, l, b, o: _of_channels(x, w, b[0, 0]),
        "masked outputs, by a row": lambda x, w, l, b, o: _of_channels(x, w, b[0, :1]),
        "masked outputs of one product each": lambda x, w, l, b, o: term_of_products(
            F.linear(x, w) * b[0, 0], F.linear(x, w) * ~b[0, 0]
        ),
    },
    "the value is not masked": {
        "a masked gate": lambda x, w, l, b, o: term_of_weights(x, w * b[0], w),
    },
    "the gate is not masked": {
        "a masked value": lambda x, w, l, b, o: term_of_weights(x, w, w * b[0]),
        "the sigmoid of an unmasked gate": lambda x, w, l, b, o: (
            F.linear(x, w * b[0]) * torch.sigmoid(F.linear(x, w)) * F.linear(x, w * ~b[0])
        ),
    },
    "at most 16": {
        "17 masks": lambda x, w, l, b, o: sum(gated(x, w, b[i % 3], ~b[i % 3]) for i in range(17)),
    },
    # Operands
    "mask different weights": {
        "another weight": lambda x, w, l, b, o: term_of_weights(x, w * b[0], o * ~b[0]),
        "another norm": lambda x, w, l, b, o: term_of_weights(x, F.normalize(w) * b[0], F.normalize(w, p=1.0) * ~b[0]),
    },
    "project different inputs": {
        "another x": lambda x, w, l, b, o: _of_inputs(x, x + 1, w, b[0]),
    },
    # A reason names the nodes where the two expressions begin to differ, but not slices, whose names tell nothing.
    "different inputs, `l_x_` and `add [5, 8] = add(l_x_, 1)`": {
        "the sine of another x": lambda x, w, l, b, o: _of_inputs(x.sin(), (x + 1).sin(), w, b[0]),
    },
    "different inputs, `sin [8, 8] = sin(a)` and `sin_1 [8, 8] = sin(b)`": {
        "the sines of two slices": lambda x, w, l, b, o: _of_slices(w, l, b[0]),
    },
    "different inputs, `sub [5, 8] = sub(l_x_, add)` and `sub_1 [5, 8] = sub(add_1, l_x_)`": {
        "arguments in another order": lambda x, w, l, b, o: _of_inputs(x - (x + 1), (x + 1) - x, w, b[0]),
    },
    "different inputs, `sin [5, 8] = sin(l_x_)` and `cos [5, 8] = cos(l_x_)`": {
        "two functions of x": lambda x, w, l, b, o: _of_inputs(x.sin(), x.cos(), w, b[0]),
    },
    "(each call draws new random numbers)": {
        "dropout of each input": lambda x, w, l, b, o: _of_inputs(F.dropout(x, 0.5), F.dropout(x, 0.5), w, b[0]),
    },
    "(the graph writes in place to one of them)": {
        "the same expression of a weight before and after a write": lambda x, w, l, b, o: _of_written_weight(
            x, w, b[0]
        ),
    },
    "different orientations": {
        "a transposed weight": lambda x, w, l, b, o: term_of_products(F.linear(x, w * b[0]), x @ (w * ~b[0])),
    },
    "adds a bias": {
        "a bias": lambda x, w, l, b, o: term_of_products(F.linear(x, w * b[0], o[0]), F.linear(x, w * ~b[0])),
        "a bias in one half of silu": lambda x, w, l, b, o: (
            torch.sigmoid(F.linear(x, w * b[0], o[0])) * F.linear(x, w * b[0]) * F.linear(x, w * ~b[0])
        ),
        "a bias of the total": lambda x, w, l, b, o: term_of_total(F.linear(x, w, o[0]), F.linear(x, w * b[0])),
        "a bias of what is subtracted": lambda x, w, l, b, o: term_of_products(
            F.linear(x, w * b[0]), F.linear(x, w) - F.linear(x, w * b[0], o[0])
        ),
        "twice a bias": lambda x, w, l, b, o: term_of_products(
            torch.addmm(o[0], x, (w * b[0]).t(), beta=2), F.linear(x, w * ~b[0])
        ),
    },
    "the result torch.float64; cast it after the sum": {
        "terms that are cast": lambda x, w, l, b, o: sum(gated(x.float(), w.float(), m, ~m).double() for m in b),
    },
    "is a nested tensor, and the operator takes plain tensors": {
        "a nested x": lambda x, w, l, b, o: gated(_nested(x), w, b[0], ~b[0]).values(),
    },
    "is a TwoTensor, and the operator takes plain tensors": {
        "a weight of another class": lambda x, w, l, b, o: gated(x, TwoTensor(w, w), b[0].double()).a,
    },
    # Expressions that no rule knows, of masked weights
    "reads a masked weight by": {
        "tensordot": lambda x, w, l, b, o: term_of_products(
            *(torch.tensordot(x, w * f, ([1], [1])) for f in (b[0], ~b[0]))
        ),
        "bmm of two inputs and weights": lambda x, w, l, b, o: term_of_products(
            *(torch.bmm(torch.stack([x, x + 1]), (torch.stack([w, o]) * f).mT) for f in (b[:2], ~b[:2]))
        ),
        "one token as a vector": lambda x, w, l, b, o: term_of_products(
            torch.mv(w * b[0], x[0]), torch.mv(w * ~b[0], x[0])
        ),
        "addcmul": lambda x, w, l, b, o: term_of_weights(x, w * b[0], torch.addcmul(w, w, b[0].to(w.dtype), value=-1)),
        "masked_scatter": lambda x, w, l, b, o: term_of_weights(
            x, *(torch.zeros_like(w).masked_scatter(f, w) for f in (b[0], ~b[0]))
        ),
        "signs": lambda x, w, l, b, o: term_of_weights(x, w * (1 + l[0].sign()) / 2, w * (1 - l[0].sign()) / 2),
        "roundings to float32": lambda x, w, l, b, o: term_of_weights(x, _rounded(w * b[0]), _rounded(w * ~b[0])),
        "the weight less a rounded one": lambda x, w, l, b, o: term_of_weights(x, w * b[0], w - (w * b[0]).float()),
        "masked again after rounding": lambda x, w, l, b, o: term_of_weights(
            x, (w * b[0]).float() * b[0].double(), w * ~b[0]
        ),
        "roundings to integers": lambda x, w, l, b, o: term_of_weights(
            x, (w * b[0] * 9).long().double(), (w * 9 * ~b[0]).long().double()
        ),
        "a transpose to itself": lambda x, w, l, b, o: term_of_products(
            x @ (w * b[0]).transpose(0, 0), x @ (w * ~b[0]).t()
        ),
        "the real part": lambda x, w, l, b, o: term_of_products(x @ (w * b[0]).real, x @ (w * ~b[0]).T),
    },
    # Expressions that no rule knows, of products
    "reads a product with a masked weight by": {
        "a difference of two inputs": lambda x, w, l, b, o: term_of_products(
            F.linear(x, w * b[0]), F.linear(x, w) - F.linear(2 * x, w * b[0])
        ),
        "a difference of two layouts": lambda x, w, l, b, o: term_of_products(
            F.linear(x, w * b[0]), F.linear(x, w) - x @ (w * b[0])
        ),
        "a difference of two weights": lambda x, w, l, b, o: term_of_products(
            F.linear(x, w * b[0]), F.linear(x, w) - F.linear(x, o * b[0])
        ),
        "a row less the gate": lambda x, w, l, b, o: (o[0] - F.linear(x, w * b[0])) * F.linear(x, w * ~b[0]),
        "the gate less a row": lambda x, w, l, b, o: (F.linear(x, w * b[0]) - o[0]) * F.linear(x, w * ~b[0]),
        "a rounded gate": lambda x, w, l, b, o: F.silu(F.linear(x, w * b[0]).float()).double() * F.linear(x, w * ~b[0]),
        "masked outputs of a masked weight": lambda x, w, l, b, o: term_of_products(
            F.linear(x, w * b[0]) * b[0, 0], F.linear(x, w * ~b[0])
        ),
        "a sum of gate and value": lambda x, w, l, b, o: F.silu(F.linear(x, w * b[0])) + F.linear(x, w * ~b[0]),
        "a bias that is added to the gate": lambda x, w, l, b, o: term_of_products(
            F.linear(x, w * b[0]) + o[0], F.linear(x, w * ~b[0])
        ),
    },
    "no gate is multiplied by a value": {
        "products that are returned": lambda x, w, l, b, o: (F.linear(x, w * b[0]), F.linear(x, w * ~b[0])),
    },
    "by `mul` in a way that": {
        "gate and value with mask weights": lambda x, w, l, b, o: (
            (x[:, :1] * F.silu(F.linear(x, w * b[0]))) * (x[:, 1:2] * F.linear(x, w * ~b[0]))
        ),
    },
    "by `silu`": {
        "a mask weight inside of the activation": lambda x, w, l, b, o: term_of_products(
            x[:, :1] * F.linear(x, w * b[0]), F.linear(x, w * ~b[0])
        ),
    },
    "by `add` in a way that": {
        "a number of more dimensions in the activation": lambda x, w, l, b, o: term_of_products(
            F.linear(x, w * b[0]) + torch.zeros(2, 1, 1, dtype=x.dtype), F.linear(x, w * ~b[0])
        ),
    },
    "by `addcmul` in a way that": {
        "a product that is added no times": lambda x, w, l, b, o: torch.addcmul(o[0], *_halves(x, w, b[0]), value=0),
        "a product that is added to more dimensions": lambda x, w, l, b, o: torch.addcmul(
            torch.zeros(2, 5, H, dtype=x.dtype), *_halves(x, w, b[0])
        ),
    },
    "dropout is applied": {
        "dropout of the gate": lambda x, w, l, b, o: term_of_products(
            F.dropout(F.linear(x, w * b[0]), 1.0), F.linear(x, w * ~b[0])
        ),
        "dropout of the activation": lambda x, w, l, b, o: (
            F.dropout(_halves(x, w, b[0])[0], 0.5) * F.linear(x, w * ~b[0])
        ),
        "dropout of the value": lambda x, w, l, b, o: _halves(x, w, b[0])[0] * F.dropout(F.linear(x, w * ~b[0]), 0.5),
    },
    # Other users
    "is also used by": {
        "the gate is returned": lambda x, w, l, b, o: _with_its_gate(*_products(x, w, b[0])),
        "the activation is used": lambda x, w, l, b, o: _with_its_activation(*_halves(x, w, b[0])),
        "a stack is used": lambda x, w, l, b, o: _with_its_first(torch.stack([gated(x, w, m, ~m) for m in b])),
        "a term, weighted by its own result": lambda x, w, l, b, o: _weighted_by_itself(gated(x, w, b[0], ~b[0])),
        "a product and a bias times a sigmoid": lambda x, w, l, b, o: _times_the_sigmoid(*_products(x, w, b[0]), o[0]),
        "two products times a sigmoid": lambda x, w, l, b, o: _times_the_sigmoid(
            *_products(x, w, b[0]), F.linear(x, w * b[1]) * F.linear(x, w * ~b[1])
        ),
        "silu of the gate times a sigmoid of the value": lambda x, w, l, b, o: _silu_and_sigmoid(
            *_products(x, w, b[0])
        ),
    },
    "another graph reads": {
        "checkpoints of both products": lambda x, w, l, b, o: term_of_products(
            checkpoint(F.linear, x, w * b[0], use_reentrant=False),
            checkpoint(F.linear, x, w * ~b[0], use_reentrant=False),
        ),
        "weights that are masked before a checkpoint": lambda x, w, l, b, o: checkpoint(
            term_of_weights, x, w * b[0], w * ~b[0], use_reentrant=False
        ),
    },
    # Mask weights
    "some terms of the sum have mask weights": {
        "one mask weight": lambda x, w, l, b, o: x[:, :1] * gated(x, w, b[0], ~b[0]) + gated(x, w, b[1], ~b[1]),
    },
    "mask weights and are multiplied by numbers that differ": {
        "mask weights and a number": lambda x, w, l, b, o: (
            x[:, :1] * gated(x, w, b[0], ~b[0]) + 0.5 * (x[:, 1:2] * gated(x, w, b[1], ~b[1]))
        ),
    },
    # Modes and transforms
    "under another grad mode": {
        "a projection without a gradient": lambda x, w, l, b, o: _value_under(torch.no_grad(), x, w, b[0]),
    },
    "under another autocast|cast it after the sum": {
        "autocast of the value": lambda x, w, l, b, o: _value_under(
            torch.autocast("cpu", torch.bfloat16), x.float(), w.float(), b[0]
        ),
    },
    "functorch transform": {
        "grad": lambda x, w, l, b, o: torch.func.grad(lambda x: gated(x, w, b[0], ~b[0]).sum())(x),
        "vmap over tokens": lambda x, w, l, b, o: torch.vmap(lambda row: gated(row, w, b[0], ~b[0]))(x),
    },
    # Writes
    "in a way that the pass does not know": {
        "a gate that is overwritten and read": lambda x, w, l, b, o: _overwritten(x, w, b[0]),
        "a value that is scaled in place": lambda x, w, l, b, o: _scaled_in_place(*_products(x, w, b[0])),
    },
    "writes in place to memory that": {
        "a view of the sum": lambda x, w, l, b, o: _with_a_view(gated(x, w, b[0], ~b[0])),
    },
}

# Layers that are refused, for this reason, only in training. In inference the results are compared.
REFUSED_IN_TRAINING: dict[str, dict[str, Layer]] = {
    "mask different weights": {
        "a detached weight": lambda x, w, l, b, o: term_of_weights(x, w * b[0], w.detach() * ~b[0]),
        "a copy without a gradient": lambda x, w, l, b, o: term_of_weights(x, w * b[0], _copied(w) * ~b[0]),
    },
    "(only one of them takes a gradient)": {
        "a detached x": lambda x, w, l, b, o: _of_inputs(x, x.detach(), w, b[0]),
    },
    "project different inputs": {
        "the same expression under no_grad": lambda x, w, l, b, o: _of_inputs(_doubled(x), x * 2, w, b[0]),
    },
    "through different tensors": {
        "the gradients of one mask to two tensors": lambda x, w, l, b, o: _of_two_gradients(
            l, o, lambda m, same: term_of_weights(x, w * m, w * (1 - same))
        ),
        "a gradient of the gate's mask": lambda x, w, l, b, o: gated(x, w, straight_through(l[0]), l[0] <= 0),
        "a gradient of the value's mask": lambda x, w, l, b, o: gated(x, w, l[0] > 0, 1 - straight_through(l[0])),
    },
    "reads a masked weight by `sub`": {
        # 1 - m + m - same has the gradient of 1 - same, where same has the values of m
        "a gradient that changes the tensor in a sum": lambda x, w, l, b, o: _of_two_gradients(
            l, o, lambda m, same: term_of_weights(x, w * m, w * (1 - m) + w * m - w * same)
        ),
    },
    "not complementary": {
        "the sigmoid of a gate with another gradient": lambda x, w, l, b, o: _of_two_gradients(
            l, o, lambda m, same: F.linear(x, w * m) * F.linear(x, w * same).sigmoid() * F.linear(x, w * (1 - m))
        ),
        "the sigmoid of a gate with a detached mask": lambda x, w, l, b, o: _of_two_gradients(
            l, o, lambda m, _: F.linear(x, w * m) * F.linear(x, w * m.detach()).sigmoid() * F.linear(x, w * (1 - m))
        ),
    },
    "gradient of zeros": {
        "the first weight of a difference": lambda x, w, l, b, o: _with_zeros(
            l, lambda m: (w * m.detach(), -(w * m) + w), x
        ),
        "the second weight of a difference": lambda x, w, l, b, o: _with_zeros(
            l, lambda m: (w * m.detach(), w - w * m), x
        ),
        "the first mask of a product": lambda x, w, l, b, o: _with_zeros(
            l, lambda m: (w * m * m.detach(), w * (1 - m.detach())), x
        ),
        "the second mask of a product": lambda x, w, l, b, o: _with_zeros(
            l, lambda m: (w * m.detach() * m, w * (1 - m.detach())), x
        ),
    },
    "some masks carry a gradient and some do not": {
        "a trained and a fixed mask": lambda x, w, l, b, o: (
            gated(x, w, straight_through(l[0])) + gated(x, w, b[0], ~b[0])
        ),
    },
}


def _with_rounding_errors(x: Tensor, w: Tensor, logits: Tensor) -> Tensor:
    """The product of a mask without rounding errors and a mask with them has rounding errors."""
    hard = (logits > 0).to(logits.dtype)
    m = (hard * (hard + logits - logits.detach())).detach()
    return gated(x, w, hard, 1 - m.int())


def _after_a_write(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    m, w = m.clone(), w.detach()
    gate = F.silu(F.linear(x, w * m))
    m[0] = True
    return gate * F.linear(x, w * ~m)


def _of_channels(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    total = F.linear(x, w)
    return term_of_products(total * m, total * ~m)


def _of_inputs(x: Tensor, other: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return term_of_products(F.linear(x, w * m), F.linear(other, w * ~m))


def _of_slices(w: Tensor, logits: Tensor, m: Tensor) -> Tensor:
    a, b = logits[0], logits[1]
    return _of_inputs(a.sin(), b.sin(), w, m)


def _of_written_weight(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    w = w.clone()
    first = w * 2
    w[0] = 1
    return term_of_weights(x, first * m, (w * 2) * ~m)


def _nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, len(x)]))


def _rounded(t: Tensor) -> Tensor:
    return t.float().double()


def _products(x: Tensor, w: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, w * m), F.linear(x, w * ~m)


def _halves(x: Tensor, w: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    gate, value = _products(x, w, m)
    return F.silu(gate), value


def _with_its_gate(gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return F.silu(gate) * value, gate


def _with_its_activation(activated: Tensor, value: Tensor) -> Tensor:
    return activated * value + activated.mean()


def _with_its_first(stacked: Tensor) -> tuple[Tensor, Tensor]:
    """Each term is a layer of its own; the sum is not a layer."""
    return stacked.sum(0), stacked[0]


def _weighted_by_itself(term: Tensor) -> Tensor:
    return term.mean(-1, keepdim=True) * term


def _times_the_sigmoid(gate: Tensor, value: Tensor, other: Tensor) -> Tensor:
    return (gate * value + other) * torch.sigmoid(gate)


def _silu_and_sigmoid(gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(gate) * value * torch.sigmoid(value)


def _value_under(mode: Any, x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    gate, masked = F.silu(F.linear(x, w * m)), w * ~m
    with mode:
        value = F.linear(x, masked)
    return gate * value


def _overwritten(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    gate = F.linear(x, w * m)
    activated = F.relu(gate, True)
    return activated * (F.linear(x, w) - gate)


def _scaled_in_place(gate: Tensor, value: Tensor) -> Tensor:
    value[0].mul_(2)
    return F.silu(gate) * value


def _with_a_view(term: Tensor) -> tuple[Tensor, Tensor]:
    """The view shows the values that are added to the sum."""
    y = torch.zeros_like(term)
    view = y.view(-1)
    y += term
    return y, view


@torch.no_grad()
def _copied(w: Tensor) -> Tensor:
    return w.clone()


@torch.no_grad()
def _doubled(x: Tensor) -> Tensor:
    return x * 2


def _of_two_gradients(logits: Tensor, o: Tensor, layer: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A layer of two masks that have the same values, each of which passes its gradient to a tensor of its own."""
    hard = (o > 0).to(o.dtype)
    return layer((hard - logits[0]).detach() + logits[0], (hard - logits[1]).detach() + logits[1])


def _with_zeros(logits: Tensor, weights: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    """A layer with a mask that passes a gradient of zeros to its logits."""
    return term_of_weights(x, *weights(torch.sigmoid(logits[0]).round()))


# --- Layers that are fused -------------------------------------------------------------------------------------------

# Programs with one layer, which no condition may refuse.
ACCEPTED: dict[str, Layer] = {
    "16 masks": lambda x, w, l, b, o: sum(gated(x, w, b[i % 3], ~b[i % 3]) for i in range(16)),
    "both halves of silu from projections of their own": lambda x, w, l, b, o: (
        F.linear(x, w * straight_through(l[0]))
        * torch.sigmoid(F.linear(x, straight_through(l[0]) * w))
        * F.linear(x, w * (1 - straight_through(l[0])))
    ),
    "a mask without a gradient plus the rest of one with it": lambda x, w, l, b, o: _with_the_rest(
        x, w, (l[0] > 0).to(w.dtype), straight_through(l[0])
    ),
    "a detached straight-through mask": lambda x, w, l, b, o: gated(
        x, w, straight_through(l[0]).detach(), (1 - straight_through(l[0])).detach()
    ),
    "a plain product of a weight that is masked elsewhere": lambda x, w, l, b, o: (
        gated(x, w, b[0], ~b[0]),
        term_of_weights(x, w, w),
    ),
    "a pruned product of two weights": lambda x, w, l, b, o: (
        gated(x, w, b[0], ~b[0]),
        term_of_weights(x, w * b[1], o * b[1]),
    ),
    "products of two weights with two masks": lambda x, w, l, b, o: (
        gated(x, w, b[0], ~b[0]),
        term_of_weights(x, l[0] * b[1], l[1] * ~b[2]),
        term_of_weights(x, l[2] * b[2], o * ~b[1]),
    ),
}


def _with_the_rest(x: Tensor, w: Tensor, hard: Tensor, m: Tensor) -> Tensor:
    return term_of_weights(x, w * hard + (w * m - w * hard), w * (1 - m))


# --- The tests -------------------------------------------------------------------------------------------------------

MODES = {"training": ("x", "weight", "logits"), "inference": ()}


def _of(factors: Factors) -> Layer:
    return lambda x, w, l, b, o: gated(x, w, *factors(straight_through(l[0]), b))


def _cases() -> Iterator[tuple[str, str, Layer, bool]]:
    """`(name, reason, layer, whether the reason is one only in training)`."""
    for by_reason, only_in_training in ((OF_FACTORS, False), (OF_GRADIENTS_OF_FACTORS, True)):
        for reason, factors in by_reason.items():
            yield from ((name, reason, _of(one), only_in_training) for name, one in factors.items())
    for layers, only_in_training in ((REFUSED, False), (REFUSED_IN_TRAINING, True)):
        for reason, of_reason in layers.items():
            yield from ((name, reason, layer, only_in_training) for name, layer in of_reason.items())


CASES = {name: case for name, *case in _cases()}


@pytest.mark.parametrize(("name", "mode"), family(CASES, MODES, one_in=1))
def test_layer_is_refused(name: str, mode: str) -> None:
    reason, program, only_in_training = CASES[name]
    layer, capture = by_name(program), Capture()
    torch.manual_seed(0)
    wanted = results(layer, tensors(MODES[mode]))
    torch.manual_seed(0)
    assert_same(results(capture.compile(layer), tensors(MODES[mode])), wanted, SAME)
    if only_in_training and mode == "inference":
        return
    assert any(part in capture.reasons[0] for part in reason.split("|")), capture.reasons
    assert len(capture.reasons) == 1
    assert name == "a bias in one half of silu" or ". Also: " not in capture.reasons[0]
    if name not in ("a stack is used", "a term, weighted by its own result"):  # their terms are layers too
        assert capture.report.fused == []
        assert capture.calls["mglu.forward"] == capture.calls["mglu.forward_ste"] == 0


@pytest.mark.parametrize(("name", "mode"), family(ACCEPTED, MODES))
def test_layer_is_accepted(name: str, mode: str) -> None:
    capture = compare(by_name(ACCEPTED[name]), lambda: tensors(MODES[mode]), SAME)
    assert [len(capture.report.fused), capture.reasons] == [1, []]


@pytest.mark.parametrize("numbers", [(1e-9, 1e-3), (1e5, 2e5)])
def test_numbers_that_the_dtype_of_the_layer_cannot_hold(numbers: tuple[float, float]) -> None:
    """Eager multiplies by the number in float32; as a weight of a term it would be 0 or infinite."""

    def function(x: Tensor, weight: Tensor, bits: Tensor) -> Tensor:
        return sum(number * gated(x, weight, m, ~m) for number, m in zip(numbers, bits[:2], strict=True))

    named, capture = tensors(), Capture()
    capture.compile(function)(named["x"].half(), named["weight"].half(), named["bits"])
    assert capture.report.fused == []
    assert "cannot hold" in capture.reasons[0]


@pytest.mark.parametrize("where", ["gate", "activated", "sum", "mm"])
def test_narrower_parts_are_kept(where: str) -> None:
    """A rounding that the user asks for, as in fake quantisation, is kept."""

    def narrow(t: Tensor, here: str) -> Tensor:
        return t.half().double() if where == here else t

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.half(), weight.half()).double() if where == "mm" else F.linear(x, weight)

    def function(x: Tensor, weight: Tensor, bits: Tensor) -> Tensor:
        y: Any = 0
        for m in bits:
            gate, value = product(x, weight * m), product(x, weight * ~m)
            y = narrow(y + narrow(F.silu(narrow(gate, "gate")), "activated") * value, "sum")
        return y

    named = {name: t for name, t in tensors().items() if name in ("x", "weight", "bits")}
    capture = Capture()
    assert_same(results(capture.compile(function), named), results(function, named), SAME)
    assert where == "sum" or capture.report.fused == []


@pytest.mark.parametrize("of_the_gate", [True, False])
def test_a_nan_that_one_straight_through_factor_makes_is_hidden(of_the_gate: bool) -> None:
    """In inference the other factor may be a comparison of the same logits, which makes no NaN."""

    def function(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        m, hard = straight_through(logits[0]), logits[0] > 0
        return gated(x, weight, m, ~hard) if of_the_gate else gated(x, weight, hard, 1 - m)

    named, capture = tensors(), Capture()
    named["logits"][0, 0, 0] = torch.nan
    given = named["x"], named["weight"], named["logits"]
    assert function(*given).isnan().any()
    assert capture.compile(function)(*given).isfinite().all()
    assert [site.hides_nan for site in capture.report.fused] == [True]


def test_terms_around_a_residual_of_a_wider_dtype_are_layers_of_their_own() -> None:
    """Each is fused in its own dtype, in which these whole numbers are exact; their sum has no dtype that all share."""

    def function(x: Tensor, weight: Tensor, bits: Tensor, residual: Tensor) -> Tensor:
        first, second = (F.relu(F.linear(x, weight * m)) * F.linear(x, weight * ~m) for m in bits[:2])
        return first + residual + second

    named, capture = tensors(), Capture()
    given = named["x"].round().float(), named["weight"].round().float(), named["bits"], named["other"][0]
    assert_same({"y": capture.compile(function)(*given)}, {"y": function(*given)}, SAME)
    assert [len(capture.report.fused), capture.reasons] == [2, []]
