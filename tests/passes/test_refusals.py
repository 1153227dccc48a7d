"""Refused sites: each has its reason in the report, and the results and gradients equal eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor  # noqa: F401 (a source reads it)

from tests.support.budgets import BUDGET
from tests.support.families import family
from tests.support.programs.graphs import Capture, assert_same, compare, results
from tests.support.programs.lookalikes import SAME, layer_of, tensors
from tests.support.programs.spellings import gated, straight_through, term_of_products

A_STACK_IS_USED = "terms = stack([gated(x, w, m, ~m) for m in b]); (terms.sum(0), terms[0])"
WEIGHTED_BY_ITSELF = "term = gated(x, w, b[0], ~b[0]); term.mean(-1, keepdim=True) * term"
ONE_GATE_IS_USED = (
    "gate, other = linear(x, w * b[0]), linear(x, w * b[1]); "
    "(gate * linear(x, w * ~b[0]) + other * linear(x, w * ~b[1])) * sigmoid(gate)"
)
A_BIAS_IN_ONE_HALF = "sigmoid(linear(x, w * b[0], o[0])) * linear(x, w * b[0]) * linear(x, w * ~b[0])"

FOUR_TIMES_SILU = "g = linear(x, w * b[0]); (silu(silu(silu(silu(g))))"

# Refused layers, keyed by a part of the reason. The key `a|b` means that the reason contains `a` or `b`.
REFUSED: dict[str, tuple[str, ...]] = {
    # Masks
    "nothing proves to be binary": (
        "gated(x, w, sigmoid(l[0]))",
        "gated(x, w, o + 0)",
        "gated(x, w, o.abs().long() % 4)",
    ),
    "(it may hold 0.5)": ("s = torch.sign(l[0]); gated(x, w, 0.5 * (1 + s), 0.5 * (1 - s))",),
    "write the second as 1 - mask": (
        "of_weights(x, w * o, w * l[0])",
        "term(x @ (w * o).t(), x @ (w * o.tanh()).t())",
        "h = (l[0] > 0).double(); m = (h * (h + l[0] - l[0].detach())).detach(); gated(x, w, h, 1 - m.int())",
    ),
    "two different masks;": (
        "m, w = b[0].clone(), w.detach(); gate = silu(linear(x, w * m)); m[0] = True; gate * linear(x, w * ~m)",
    ),
    "two different masks": (
        "gated(x, w, b[0], ~b[1])",
        "gated(x, w, b[0], ~b[0].t())",
        "linear(x, w * b[0]) * sigmoid(linear(x, w * b[1])) * linear(x, w * ~b[0])",
    ),
    "not complementary": (
        "gated(x, w, ste(l[0]), 2 - ste(l[0]))",
        "gated(x, w, b[0], b[0])",
        "m = (b[0] + b[0]) == 2; gated(x, w, m, ~m)",  # True + True is True
        "gated(x, w, b[0], ~((b[0].to(torch.int8) * 127 + 1) > 0))",
    ),
    "a per-channel mask": (
        "gated(x, w, b[0][:, :1], ~b[0][:, :1])",
        "gated(x, w, b[0][:1], ~b[0][:1])",
        "gated(x, w, b[0, 0], ~b[0, 0])",
        "total = linear(x, w); term(total * b[0, 0], total * ~b[0, 0])",
        "total = linear(x, w); term(total * b[0, :1], total * ~b[0, :1])",
        "term(linear(x, w) * b[0, 0], linear(x, w) * ~b[0, 0])",
    ),
    "the value is not masked": ("of_weights(x, w * b[0], w)",),
    "the gate is not masked": (
        "of_weights(x, w, w * b[0])",
        "linear(x, w * b[0]) * sigmoid(linear(x, w)) * linear(x, w * ~b[0])",
    ),
    "at most 16": ("sum(gated(x, w, b[i % 3], ~b[i % 3]) for i in range(17))",),
    # Operands
    "mask different weights": (
        "of_weights(x, w * b[0], o * ~b[0])",
        "of_weights(x, F.normalize(w) * b[0], F.normalize(w, p=1.0) * ~b[0])",
    ),
    "project different inputs": ("gated_on_two(x, x + 1, w, b[0])",),
    # If two inputs or weights differ, the reason names the nodes at which their expressions begin to differ. It names
    # no slices, because the name of a slice tells the user nothing.
    "different inputs, `l_x_` and `add [5, 8] = add(l_x_, 1)`": ("gated_on_two(x.sin(), (x + 1).sin(), w, b[0])",),
    "different inputs, `sin [8, 8] = sin(a)` and `sin_1 [8, 8] = sin(c)`": (
        "a, c = l[0], l[1]; gated_on_two(a.sin(), c.sin(), w, b[0])",
    ),
    "different inputs, `sub [5, 8] = sub(l_x_, add)` and `sub_1 [5, 8] = sub(add_1, l_x_)`": (
        "gated_on_two(x - (x + 1), x + 1 - x, w, b[0])",
    ),
    "different inputs, `sin [5, 8] = sin(l_x_)` and `cos [5, 8] = cos(l_x_)`": (
        "gated_on_two(x.sin(), x.cos(), w, b[0])",
    ),
    "(each call draws new random numbers)": ("gated_on_two(dropout(x, 0.5), dropout(x, 0.5), w, b[0])",),
    "different weights, `w [8, 8] = alias(l_weight_)` and `setitem [8, 8] = setitem(w, 0, 1)`": (
        "w = w.clone(); first = w * 2; w[0] = 1; of_weights(x, first * b[0], (w * 2) * ~b[0])",
    ),
    "(the graph writes in place to one of them)": (
        "w = w.clone(); first = w * 2; w[0] = w[1]; of_weights(x, first * b[0], (w * 2) * ~b[0])",
    ),
    "different orientations": ("term(linear(x, w * b[0]), x @ (w * ~b[0]))",),
    "adds a bias to the gate or to the value, where the operator has none": (
        "term(linear(x, w * b[0], o[0]), linear(x, w * ~b[0]))",
        "term(linear(x, w * b[0]) + o[0], linear(x, w * ~b[0]))",
        "g, v = (x @ cat([w * b[0], w * ~b[0]]).t() + o[:2].flatten()).chunk(2, -1); term(g, v)",
        A_BIAS_IN_ONE_HALF,
        "of_total(linear(x, w, o[0]), linear(x, w * b[0]))",
        "term(linear(x, w * b[0]), linear(x, w) - linear(x, w * b[0], o[0]))",
        "term(torch.addmm(o[0], x, (w * b[0]).t(), beta=2), linear(x, w * ~b[0]))",
    ),
    "the result torch.float64; cast it after the sum": (
        "silu(linear(x.float(), w.float() * b[0])).double() * linear(x.float(), w.float() * ~b[0]).double()",
    ),
    "is a nested tensor, and the operator takes plain tensors": (
        "gated(torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 5])), w, b[0], ~b[0]).values()",
    ),
    "is a TwoTensor, and the operator takes plain tensors": ("gated(x, TwoTensor(w, w), b[0].double()).a",),
    # Expressions of masked weights that no rule knows
    "reads a masked weight by": (
        "term(*(torch.tensordot(x, w * f, ([1], [1])) for f in (b[0], ~b[0])))",
        "term(torch.mv(w * b[0], x[0]), torch.mv(w * ~b[0], x[0]))",
        "of_weights(x, w * b[0], torch.addcmul(w, w, b[0].to(w.dtype), value=-1))",
        "of_weights(x, *(torch.zeros_like(w).masked_scatter(f, w) for f in (b[0], ~b[0])))",
        "of_weights(x, w * (1 + l[0].sign()) / 2, w * (1 - l[0].sign()) / 2)",
        "term(*(einsum('bh,dh,dh->bd', x, w, f.to(w.dtype)) for f in (b[0], ~b[0])))",
        "of_weights(x, (w * b[0]).float().double(), (w * ~b[0]).float().double())",
        "of_weights(x, w * b[0], w - (w * b[0]).float())",
        "of_weights(x, (w * b[0]).float() * b[0].double(), w * ~b[0])",
        "of_weights(x, (w * b[0] * 9).long().double(), (w * 9 * ~b[0]).long().double())",
        "term(x @ (w * b[0]).transpose(0, 0), x @ (w * ~b[0]).t())",
        "term(x @ (w * b[0]).real, x @ (w * ~b[0]).T)",
    ),
    # Expressions of products that no rule knows
    "reads a product with a masked weight by": (
        "term(linear(x, w * b[0]), linear(x, w) - linear(2 * x, w * b[0]))",
        "term(linear(x, w * b[0]), linear(x, w) - x @ (w * b[0]))",
        "term(linear(x, w * b[0]), linear(x, w) - linear(x, o * b[0]))",
        "(o[0] - linear(x, w * b[0])) * linear(x, w * ~b[0])",
        "(linear(x, w * b[0]) - o[0]) * linear(x, w * ~b[0])",
        "silu(linear(x, w * b[0]).float()).double() * linear(x, w * ~b[0])",
        "term(linear(x, w * b[0]) * b[0, 0], linear(x, w * ~b[0]))",
        "silu(linear(x, w * b[0])) + linear(x, w * ~b[0])",
    ),
    "no gate is multiplied by a value": ("(linear(x, w * b[0]), linear(x, w * ~b[0]))",),
    "by `mul` in a way that": ("x[:, :1] * silu(linear(x, w * b[0])) * (x[:, 1:2] * linear(x, w * ~b[0]))",),
    "by `silu`": ("term(x[:, :1] * linear(x, w * b[0]), linear(x, w * ~b[0]))",),
    "by `add` in a way that": (
        "term(linear(x, w * b[0]) + torch.zeros(2, 1, 1, dtype=x.dtype), linear(x, w * ~b[0]))",
    ),
    "by `addcmul` in a way that": (
        "torch.addcmul(o[0], silu(linear(x, w * b[0])), linear(x, w * ~b[0]), value=0)",
        "torch.addcmul(torch.zeros(2, 5, 8).double(), silu(linear(x, w * b[0])), linear(x, w * ~b[0]))",
    ),
    "dropout is applied": (
        "term(dropout(linear(x, w * b[0]), 1.0), linear(x, w * ~b[0]))",
        "dropout(silu(linear(x, w * b[0])), 0.5) * linear(x, w * ~b[0])",
        "silu(linear(x, w * b[0])) * dropout(linear(x, w * ~b[0]), 0.5)",
    ),
    # Activations that the operator lacks
    "mish(g)": ("F.mish(linear(x, w * b[0])) * linear(x, w * ~b[0])",),
    "leaky_relu[0.2](g)": (
        "F.leaky_relu(linear(x, w * b[0]), 0.2) * linear(x, w * ~b[0])",
        "g = linear(x, w * b[0]); (F.leaky_relu(g, negative_slope=0.2) - F.leaky_relu(g, 0.3)) * linear(x, w * ~b[0])",
    ),
    "reads a product with a masked weight by `sin`": ("torch.sin(linear(x, w * b[0])) * linear(x, w * ~b[0])",),
    "2 g": ("silu(2 * linear(x, w * b[0])) * linear(x, w * ~b[0])",),
    # Each activation of this chain doubles the formula. Without the limit of 48 atoms, memory would run out.
    "the gate g goes through g inv(": (f"{FOUR_TIMES_SILU} + torch.tanh(g)) * linear(x, w * ~b[0])",),
    "reads a product": (f"{FOUR_TIMES_SILU} + torch.tanh(torch.tanh(g))) * linear(x, w * ~b[0])",),
    # Other users
    "the program computes 2, and the operator would compute 3": (
        "g, v = linear(x, w * b[0]), linear(x, w * ~b[0]); term(g, v) + term(v, g)",
        "g, v = linear(x, w * b[0]), linear(x, w * ~b[0]); term(g, v) + 0.5 * term(g, v)",
    ),
    "is also used by": (
        "gate = linear(x, w * b[0]); (silu(gate) * linear(x, w * ~b[0]), gate)",
        "activated = silu(linear(x, w * b[0])); activated * linear(x, w * ~b[0]) + activated.mean()",
        "gate = linear(x, w * b[0]); (gate * linear(x, w * ~b[0]) + o[0]) * sigmoid(gate)",
        ONE_GATE_IS_USED,
        "value = linear(x, w * ~b[0]); silu(linear(x, w * b[0])) * value * sigmoid(value)",
    ),
    "another graph reads": (
        "term(*(checkpoint(F.linear, x, w * m) for m in (b[0], ~b[0])))",
        "checkpoint(of_weights, x, w * b[0], w * ~b[0])",
    ),
    # Modes and transforms
    "under another grad mode": (
        "gate, masked = silu(linear(x, w * b[0])), w * ~b[0]; gate * under(torch.no_grad(), x, masked)",
    ),
    "under another autocast|cast it after the sum": (
        "x, w = x.float(), w.float(); gate, masked = silu(linear(x, w * b[0])), w * ~b[0]; "
        "gate * under(torch.autocast('cpu', torch.bfloat16), x, masked)",
    ),
    "functorch transform": (
        "torch.func.grad(lambda x: gated(x, w, b[0], ~b[0]).sum())(x)",
        "torch.vmap(lambda row: gated(row, w, b[0], ~b[0]))(x)",
        "torch.vmap(lambda m: gated(x, w, m, ~m))(b).sum(0)",
    ),
    # Writes
    "in a way that the pass does not know": (
        "gate = linear(x, w * b[0]); F.relu(gate, True) * (linear(x, w) - gate)",
        "gate, value = linear(x, w * b[0]), linear(x, w * ~b[0]); value[0].mul_(2); silu(gate) * value",
    ),
}

# Layers that are refused only in training, keyed by a part of the reason. In inference they may be fused, and the test
# only compares their results with eager's.
REFUSED_IN_TRAINING: dict[str, tuple[str, ...]] = {
    "does not pass straight through": (
        "m = sigmoid(l[0]).round(); of_weights(x, w * m.detach(), -(w * m) + w)",
        "m = sigmoid(l[0]).round(); of_weights(x, w * m.detach(), w - w * m)",
        "m = sigmoid(l[0]).round(); of_weights(x, w * m * m.detach(), w * (1 - m.detach()))",
        "m = sigmoid(l[0]).round(); of_weights(x, w * m.detach() * m, w * (1 - m.detach()))",
        "m = ste(l[0]); gated(x, w, m, m == 0)",
        "m = ste(l[0]); gated(x, w, m, (1 - m).detach())",
        "m = ste(l[0]); gated(x, w, m * m, 1 - m)",
        "m = ste(l[0]); gated(x, w, m > 0.5, 1 - m)",
    ),
    "mask different weights": (
        "of_weights(x, w * b[0], w.detach() * ~b[0])",
        "of_weights(x, w * b[0], without_gradient(w.clone) * ~b[0])",
    ),
    "(only one of them takes a gradient)": ("gated_on_two(x, x.detach(), w, b[0])",),
    "project different inputs": ("gated_on_two(without_gradient(lambda: x * 2), x * 2, w, b[0])",),
    "through different tensors": (
        "m, same = twin_masks(l, o); of_weights(x, w * m, w * (1 - same))",
        "gated(x, w, ste(l[0]), l[0] <= 0)",
        "gated(x, w, l[0] > 0, 1 - ste(l[0]))",
    ),
    "reads a masked weight by `sub`": (
        # `1 - m + m - same` has the gradient of `1 - same`, and `same` has the values of m
        "m, same = twin_masks(l, o); of_weights(x, w * m, w * (1 - m) + w * m - w * same)",
    ),
    "not complementary": (
        "m, same = twin_masks(l, o); linear(x, w * m) * sigmoid(linear(x, w * same)) * linear(x, w * (1 - m))",
        "m = ste(l[0]); linear(x, w * m) * sigmoid(linear(x, w * m.detach())) * linear(x, w * (1 - m))",
    ),
}


def gated_on_two(x: Tensor, other: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return term_of_products(F.linear(x, w * m), F.linear(other, w * ~m))


def under(mode: Any, x: Tensor, w: Tensor, *masks: Tensor) -> Tensor:
    with mode:
        return gated(x, w, *masks) if masks else F.linear(x, w)


@torch.no_grad()
def without_gradient(function: Callable[[], Tensor]) -> Tensor:
    return function()


def twin_masks(logits: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
    """Two masks with equal values, whose gradients go to different tensors."""
    hard = (o > 0).to(o.dtype)
    return (hard - logits[0]).detach() + logits[0], (hard - logits[1]).detach() + logits[1]


# --- Layers that are fused -------------------------------------------------------------------------------------------

# Programs with one layer, which must be fused.
ACCEPTED = (
    "sum(gated(x, w, b[i % 3], ~b[i % 3]) for i in range(16))",
    "linear(x, w * ste(l[0])) * sigmoid(linear(x, ste(l[0]) * w)) * linear(x, w * (1 - ste(l[0])))",
    "hard, m = (l[0] > 0).double(), ste(l[0]); of_weights(x, w * hard + (w * m - w * hard), w * (1 - m))",
    "gated(x, w, ste(l[0]).detach(), (1 - ste(l[0])).detach())",
    "(gated(x, w, b[0], ~b[0]), of_weights(x, w, w))",
    "(gated(x, w, b[0], ~b[0]), of_weights(x, w * b[1], o * b[1]))",
    "(gated(x, w, b[0], ~b[0]), of_weights(x, l[0] * b[1], l[1] * ~b[2]), of_weights(x, l[2] * b[2], o * ~b[1]))",
    "gates = [w * ste(one) for one in l]; sum(of_weights(x, gate, w + -gate) for gate in gates)",
    # `addcmul`, with several first operands and factors
    *(
        f"y = torch.addcmul({start}, silu(linear(x, w * b[0])), linear(x, w * ~b[0]), value={factor}); "
        f"torch.addcmul(y, silu(linear(x, w * b[1])), linear(x, w * ~b[1]), value={factor})"
        for start, factor in (("x.new_zeros(5, 8)", 1), ("x.new_zeros(8)", -1), ("o[0]", 1), ("o[0]", 0.5))
    ),
    # Masks of logits and their complements
    "gated(x, w, l[0] > 0, l[0] <= 0)",
    "gated(x, w, l[0] > 0, ~(l[0] > 0))",
    "gated(x, w, l[0] >= 0, l[0] < 0)",
    "gated(x, w, l[0] > 0.5, l[0] <= 0.5)",
    "gated(x, w, 0 < l[0], 0 >= l[0])",
    "gated(x, w, torch.gt(l[0], other=0), torch.le(input=l[0], other=0))",
    "gated(x, w, (l[0] > 0).double(), (l[0] <= 0).double())",
    "gated(x, w, (l[0] > 0).int(), (l[0] <= 0).int())",
    "gated(x, w, ste(l[0]), 1 - ste(l[0]))",
    # Products with one weight, which is written in different ways
    "of_weights(x.float(), (w * b[0]).float(), (w * ~b[0]).float())",
    "w = w.t().float(); of_total(x.float() @ w, x.float() @ (w * b[0]))",
    "term(x @ (w * b[0]).mH, x @ (w * ~b[0]).H)",
    "term(linear(x, w * b[0]).clone(), linear(x, w * ~b[0]).contiguous())",
    "of_total(linear(x, w * b[0]) + linear(x, w * ~b[0]), linear(x, w * b[0]))",
    "of_weights(x, w * b[0] * b[0], w * ~b[0])",
    "term(x @ (w * b[0]).t(), x @ (w.t() - (w * b[0]).t()))",
    "term(x @ (w.t() * b[0]), x @ (w.t() - w.t() * b[0]))",
    "term(linear(x, w * b[0], o.new_zeros(8)), linear(x, w * ~b[0], torch.zeros_like(o[0])))",
    "term(torch.addmm(o.new_zeros(8), x, (w * b[0]).t(), beta=2), linear(x, w * ~b[0]))",
)


# --- The tests -------------------------------------------------------------------------------------------------------

MODES = {"training": ("x", "weight", "logits"), "inference": ()}

# Sums that are not one layer, with the number of layers in inference and in training.
PARTS: dict[str, tuple[int, int]] = {
    "sum(gated(x.float(), w.float(), m, ~m).double() for m in b)": (3, 3),
    A_STACK_IS_USED: (3, 3),
    WEIGHTED_BY_ITSELF: (1, 1),
    "x[:, :1] * gated(x, w, b[0], ~b[0]) + gated(x, w, b[1], ~b[1])": (2, 2),
    "x[:, :1] * gated(x, w, b[0], ~b[0]) + 0.5 * (x[:, 1:2] * gated(x, w, b[1], ~b[1]))": (2, 2),
    "gated(x, w, ste(l[0])) + gated(x, w, b[0], ~b[0])": (1, 2),
    "y = gated(x, w, b[0], ~b[0]); (y, 0.5 * y)": (1, 1),
    "y = gated(x, w, b[0], ~b[0]); (y, 0.5 * y + gated(x, w, b[1], ~b[1]))": (2, 2),
    "under(torch.no_grad(), x, w, b[0], ~b[0]) + gated(x, w, b[1], ~b[1])": (2, 2),
    "0.5 * under(torch.autocast('cpu', torch.bfloat16), x.float(), w.float(), b[0], ~b[0]).double()": (1, 1),
    "term = gated(x, w, b[0], ~b[0]); y = torch.zeros_like(term); view = y.view(-1); y += term; (y, view)": (1, 1),
}


CASES = {
    source: (reason, only_in_training)
    for table, only_in_training in ((REFUSED, False), (REFUSED_IN_TRAINING, True))
    for reason, sources in table.items()
    for source in sources
}
HAS_OTHER_LAYERS = (ONE_GATE_IS_USED,)


@pytest.mark.parametrize(("source", "mode"), family(CASES, MODES, one_in=1))
def test_layer_is_refused(source: str, mode: str) -> None:
    reason, only_in_training = CASES[source]
    layer, capture = layer_of(source, globals()), Capture()
    torch.manual_seed(0)
    wanted = results(layer, tensors(MODES[mode]))
    torch.manual_seed(0)
    assert_same(results(capture.compile(layer), tensors(MODES[mode])), wanted, SAME)
    if only_in_training and mode == "inference":
        return
    assert any(part in capture.reasons[0] for part in reason.split("|")), capture.reasons
    assert len(capture.reasons) == 1
    assert source == A_BIAS_IN_ONE_HALF or ". Also: " not in capture.reasons[0]
    if source not in HAS_OTHER_LAYERS:
        assert capture.report.fused == []
        assert capture.calls["mglu.forward"] == capture.calls["mglu.forward_ste"] == 0


@pytest.mark.parametrize(("source", "mode"), family(PARTS, MODES, one_in=1))
def test_parts_of_a_sum_are_layers(source: str, mode: str) -> None:
    budget = (
        10 * BUDGET[torch.bfloat16 if "bfloat16" in source else torch.float32 if "float()" in source else torch.float64]
    )
    capture = compare(layer_of(source, globals()), lambda: tensors(MODES[mode]), budget)
    assert [len(capture.report.fused), capture.reasons] == [PARTS[source][mode == "training"], []]


@pytest.mark.parametrize(("source", "mode"), family(ACCEPTED, MODES))
def test_layer_is_accepted(source: str, mode: str) -> None:
    budget = 10 * BUDGET[torch.float32] if "float()" in source else SAME
    capture = compare(layer_of(source, globals()), lambda: tensors(MODES[mode]), budget)
    assert [len(capture.report.fused), capture.reasons] == [1, []]


@pytest.mark.parametrize("numbers", [(1e-9, 1e-3), (1e5, 2e5)])
def test_numbers_that_the_dtype_of_the_layer_cannot_hold(numbers: tuple[float, float]) -> None:
    """The numbers cannot become mask weights, which would be 0 or infinite in float16, so each term is fused alone.

    Eager multiplies by the numbers in float32.
    """

    def function(x: Tensor, weight: Tensor, bits: Tensor) -> Tensor:
        return sum(number * gated(x, weight, m, ~m) for number, m in zip(numbers, bits[:2], strict=True))

    named, capture = tensors(), Capture()
    capture.compile(function)(named["x"].half(), named["weight"].half(), named["bits"])
    assert [site.n_masks for site in capture.report.fused] == [1, 1]
    assert capture.reasons == []


@pytest.mark.parametrize("where", ["gate", "activated", "sum", "mm"])
def test_narrower_parts_are_kept(where: str) -> None:
    """A rounding that the program contains, as in fake quantisation, is kept."""

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


@pytest.mark.parametrize("on_gate", [True, False])
def test_a_nan_that_one_straight_through_factor_makes_is_hidden(on_gate: bool) -> None:
    """In inference one factor may be straight-through, and the other a comparison of the logits, which is never NaN."""

    def function(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        m, hard = straight_through(logits[0]), logits[0] > 0
        return gated(x, weight, m, ~hard) if on_gate else gated(x, weight, hard, 1 - m)

    named, capture = tensors(), Capture()
    named["logits"][0, 0, 0] = torch.nan
    given = named["x"], named["weight"], named["logits"]
    assert function(*given).isnan().any()
    assert capture.compile(function)(*given).isfinite().all()
    assert [site.hides_nan for site in capture.report.fused] == [True]


def test_terms_around_a_residual_of_a_wider_dtype_are_layers_of_their_own() -> None:
    """Each term is fused in float32, which represents the whole numbers of this test exactly. The sum is float64."""

    def function(x: Tensor, weight: Tensor, bits: Tensor, residual: Tensor) -> Tensor:
        first, second = (F.relu(F.linear(x, weight * m)) * F.linear(x, weight * ~m) for m in bits[:2])
        return first + residual + second

    named, capture = tensors(), Capture()
    given = named["x"].round().float(), named["weight"].round().float(), named["bits"], named["other"][0]
    assert_same({"y": capture.compile(function)(*given)}, {"y": function(*given)}, SAME)
    assert [len(capture.report.fused), capture.reasons] == [2, []]
