"""For a layer that is not fused, a line of the report says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import family
from graphs import Capture, assert_same, compare, results
from kinds import (
    KINDS,
    SAME,
    tensors,
)
from layers import tensors as layer_tensors
from spellings import gated, straight_through
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

# Programs of `(x, weight, bits, logits)` that need not be fused, and a text that one reason must contain (`a|b`).
REPORTED: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor, Tensor], Any]]] = {
    "einsum of three operands": (
        "einsum",
        lambda x, w, b, l: (
            F.silu(torch.einsum("bh,dh,dh->bd", x, w, b[0].double()))
            * torch.einsum("bh,dh,dh->bd", x, w, 1 - b[0].double())
        ),
    ),
    "einsum of three operands and a stack": (
        "einsum",
        lambda x, w, b, l: (
            F.silu(torch.einsum("bh,dh,ndh->nbd", x, w, b.double()))
            * torch.einsum("bh,dh,ndh->nbd", x, w, (~b).double())
        ).sum(0),
    ),
    "tensordot": (
        "tensordot",
        lambda x, w, b, l: (
            F.silu(torch.tensordot(x, w * b[0], ([1], [1]))) * torch.tensordot(x, w * ~b[0], dims=([1], [1]))
        ),
    ),
    "inner": ("inner", lambda x, w, b, l: F.silu(torch.inner(x, w * b[0])) * torch.inner(x, w * ~b[0])),
    "products and sums": (
        "mul|sum|product",
        lambda x, w, b, l: F.silu((x[:, None] * (w * b[0])).sum(-1)) * (x[:, None] * (w * ~b[0])).sum(-1),
    ),
    "linalg.matmul": (
        "linalg_matmul",
        lambda x, w, b, l: F.silu(torch.linalg.matmul(x, (w * b[0]).T)) * torch.linalg.matmul(x, (w * ~b[0]).T),
    ),
    "linalg.vecdot": (
        "vecdot",
        lambda x, w, b, l: (
            F.silu(torch.linalg.vecdot(x[:, None], w * b[0])) * torch.linalg.vecdot(x[:, None], w * ~b[0])
        ),
    ),
    "masked_scatter": ("masked_scatter", lambda x, w, b, l: _of_masked(x, _scattered(w, b[0]), _scattered(w, ~b[0]))),
    "addcmul": (
        "addcmul",
        lambda x, w, b, l: _of_masked(x, w * b[0], torch.addcmul(w, w, b[0].to(w.dtype), value=-1)),
    ),
    "lerp": ("lerp", lambda x, w, b, l: _of_masked(x, _lerp(w, b[0]), _lerp(w, ~b[0]))),
    "signs": ("div", lambda x, w, b, l: _of_masked(x, w * (1 + l[0].sign()) / 2, w * (1 - l[0].sign()) / 2)),
    "bmm": ("mul|bmm", lambda x, w, b, l: _of_batches(torch.stack([x, x + 1]), torch.stack([w, w + 1]), b)),
    "checkpoint of each product": (
        "another graph reads",
        lambda x, w, b, l: (
            F.silu(checkpoint(F.linear, x, w * b[0], use_reentrant=False))
            * checkpoint(F.linear, x, w * ~b[0], use_reentrant=False)
        ),
    ),
    "checkpoint of the gate alone": (
        "another graph reads",
        lambda x, w, b, l: F.silu(checkpoint(F.linear, x, w * b[0], use_reentrant=False)) * F.linear(x, w * ~b[0]),
    ),
    "func.grad": ("functorch", lambda x, w, b, l: torch.func.grad(lambda x: gated(x, w, b[0], ~b[0]).sum())(x)),
    "one mask per row": ("not MGLU", lambda x, w, b, l: gated(x, w, b[0][:, :1], ~b[0][:, :1])),
    "one mask per column": ("not MGLU", lambda x, w, b, l: gated(x, w, b[0][0], ~b[0][0])),
    "one mask per feature": ("not MGLU", lambda x, w, b, l: _of_features(F.linear(x, w), b[0][0])),
    "one mask per feature, by 1 - m": ("not MGLU", lambda x, w, b, l: _of_features(F.linear(x, w), b[0][0].double())),
    "masks of features, trained": (
        "not MGLU",
        lambda x, w, b, l: sum(_of_features(F.linear(x, w), straight_through(l[i, 0])) for i in range(2)),
    ),
    "masks of features, of one product each": (
        "not MGLU",
        lambda x, w, b, l: F.silu(F.linear(x, w) * b[0][0]) * (F.linear(x, w) * ~b[0][0]),
    ),
    "another parameter": ("l[0]|l_logits|logits", lambda x, w, b, l: _of_two(x, w, l[0], b[0])),
    "another norm": ("normalize", lambda x, w, b, l: _of_two(x, F.normalize(w), F.normalize(w, p=1.0), b[0])),
    "another scale": ("l_logits", lambda x, w, b, l: _of_two(x, w * l[0, :, :1], w * l[1, :, :1], b[0])),
    "a detached weight": ("detach", lambda x, w, b, l: _of_two(x, w, w.detach(), b[0])),
    "a weight written to": ("writ|mul_", lambda x, w, b, l: _written_between(x, w, b[0])),
    "a tanh of the value": (
        "tanh|value",
        lambda x, w, b, l: F.silu(F.linear(x, w * b[0])) * F.linear(x, w * ~b[0]).tanh(),
    ),
    "a bias on the gate": (
        "bias",
        lambda x, w, b, l: F.silu(F.linear(x, w * b[0], l[0, 0])) * F.linear(x, w * ~b[0]),
    ),
    "a bias added to the gate": (
        "bias|add",
        lambda x, w, b, l: F.silu(F.linear(x, w * b[0]) + l[0, 0]) * F.linear(x, w * ~b[0]),
    ),
    "dropout": ("dropout", lambda x, w, b, l: F.dropout(F.linear(x, w * b[0]), 1.0) * F.linear(x, w * ~b[0])),
    "one token as a vector": ("mv", lambda x, w, b, l: F.silu(torch.mv(w * b[0], x[0])) * torch.mv(w * ~b[0], x[0])),
    "one token as a vector, by matmul": ("matmul", lambda x, w, b, l: F.silu((w * b[0]) @ x[0]) * ((w * ~b[0]) @ x[0])),
    "masked before checkpoint": (
        "another graph reads",
        lambda x, w, b, l: checkpoint(_of_masked, x, w * b[0], w * ~b[0], use_reentrant=False),
    ),
    "nested x": ("nested tensor", lambda x, w, b, l: _of_nested(x, w, b[0])),
    "a weight of another class": ("TwoTensor", lambda x, w, b, l: _of_one(x, TwoTensor(w, w), b[0].double()).a),
    "a sine of each masked weight": ("sin", lambda x, w, b, l: _of_masked(x, (w * b[0]).sin(), (w * ~b[0]).sin())),
    "products that are returned": (
        "no gate is multiplied",
        lambda x, w, b, l: (F.linear(x, w * b[0]), F.linear(x, w * ~b[0])),
    ),
    "the product is a sum": ("product|add", lambda x, w, b, l: F.silu(F.linear(x, w * b[0])) + F.linear(x, w * ~b[0])),
}


def _of_one(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return gated(x, w, m, 1 - m)


def _of_masked(x: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, value)


def _scattered(w: Tensor, m: Tensor) -> Tensor:
    return torch.zeros_like(w).masked_scatter(m, w)


def _lerp(w: Tensor, m: Tensor) -> Tensor:
    return torch.lerp(torch.zeros_like(w), w, m.to(w.dtype))


def _of_batches(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """Two inputs, each with a weight and a mask of its own."""
    m = m[:2]
    return F.silu(torch.bmm(x, (w * m).mT)) * torch.bmm(x, (w * ~m).mT)


def _of_nested(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, len(x)]))
    return gated(rows, w, m, ~m).values()


def _of_features(h: Tensor, m: Tensor) -> Tensor:
    complement = ~m if m.dtype is torch.bool else 1 - m
    return F.silu(h * m) * (h * complement)


def _of_two(x: Tensor, w: Tensor, other: Tensor, m: Tensor) -> Tensor:
    return F.silu(F.linear(x, w * m)) * F.linear(x, other * ~m)


def _written_between(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    w = w.clone()
    gate = F.linear(x, w * m)
    w.mul_(2)
    return F.silu(gate) * F.linear(x, w * ~m)


def reported_tensors(*, training: bool) -> dict[str, Tensor]:
    named = tensors(KINDS["logits"], training=training)
    logits = named["masks"]
    return {"x": named["x"], "weight": named["weight"], "bits": logits.detach() > 0, "logits": logits}


def assert_mentions(capture: Capture, parts: str) -> None:
    """Check that one of the reasons contains one of the texts `a|b`."""
    assert any(part in reason for part in parts.split("|") for reason in capture.reasons), capture.reasons


@pytest.mark.parametrize(("name", "training"), family(REPORTED, [True, False]))
def test_layer_that_is_not_fused_is_reported(name: str, training: bool) -> None:
    part, function = REPORTED[name]

    def program(x: Tensor, weight: Tensor, bits: Tensor, logits: Tensor) -> Any:
        return function(x, weight, bits, logits)

    capture = compare(program, lambda: reported_tensors(training=training), SAME)
    if not capture.report.fused:  # some of these spellings are fused in one mode, and then need no reason
        assert_mentions(capture, part)


@pytest.mark.parametrize(
    "name",
    [
        *("another parameter", "another norm", "another scale", "one mask per feature", "dropout", "nested x"),
        "a weight of another class",
    ],
)
def test_lookalike_is_not_fused(name: str) -> None:
    """These must not be fused, which the test above would allow."""
    _, function = REPORTED[name]

    def program(x: Tensor, weight: Tensor, bits: Tensor, logits: Tensor) -> Any:
        return function(x, weight, bits, logits)

    assert compare(program, lambda: reported_tensors(training=False), SAME).report.fused == []


def test_weights_masked_before_a_graph_break_are_reported() -> None:
    def layer(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
        gate, value = w * m, w * ~m
        torch._dynamo.graph_break()
        return _of_masked(x, gate, value)

    x, w = torch.randn(5, 8), torch.randn(8, 8)
    capture = Capture()
    torch._dynamo.reset()
    torch.compile(layer, backend=capture)(x, w, w > 0)
    assert_mentions(capture, "another graph reads")
    assert ["invert" in line for site in capture.report.missed for line in site.before] == [True], "the last is named"


def test_a_symbolic_number_of_masks_is_reported() -> None:
    """Fusing would need a guard on the number."""

    def layer(x: Tensor, weight: Tensor, masks: Tensor) -> Tensor:
        gate, value = (torch.einsum("bh,ndh->nbd", x, weight * m) for m in (masks, ~masks))
        return (F.silu(gate) * value).sum(0)

    named, capture = layer_tensors(3), Capture()
    given = {"x": named["x"].detach(), "weight": named["weight"].detach(), "masks": named["logits"] > 0}
    assert_same(results(capture.compile(layer, dynamic=True), given), results(layer, given), SAME)
    assert capture.report.fused == []
    assert ["reads a masked weight by `einsum`" in reason for reason in capture.reasons] == [True]


# --- Sums that become several operators ------------------------------------------------------------------------------


SEVERAL: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "two activations": lambda x, w, b: (
        F.gelu(F.linear(x, w * b[0])) * F.linear(x, w * ~b[0]) + gated(x, w, b[1], ~b[1])
    ),
    "two inputs": lambda x, w, b: gated(x, w, b[0], ~b[0]) + gated(x + 1, w, b[1], ~b[1]),
    "a part is used": lambda x, w, b: _with_its_part(x, w, b),
}


def _with_its_part(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    first = gated(x, w, b[0], ~b[0])
    return first + gated(x, w, b[1], ~b[1]), first


@pytest.mark.parametrize("name", SEVERAL)
def test_a_sum_that_becomes_several_operators_says_so(name: str) -> None:
    """Each operator reads the whole weight, which a user may not expect of one sum."""

    def program(x: Tensor, weight: Tensor, bits: Tensor) -> Any:
        return SEVERAL[name](x, weight, bits)

    def make() -> dict[str, Tensor]:
        named = reported_tensors(training=False)
        return {key: named[key] for key in ("x", "weight", "bits")}

    capture = compare(program, make, SAME)
    assert len(capture.report.fused) == 2
    assert "2 operators" in str(capture.report)
