"""A write in place between gate and value stops the fusion, whatever spelling it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import sample
from graphs import Capture, assert_same, results
from lookalikes import SAME, H, tensors
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from compile_passes.memory import Memory

# `test_calls` has what each call writes to. These are the ways in which a write reaches what a layer reads.
BETWEEN: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "x.add_": lambda x, weight, m: x.add_(1),
    "x **= 2": lambda x, weight, m: x.__ipow__(2),
    "x[0] = 1": lambda x, weight, m: x.__setitem__(0, 1),
    "a view of x": lambda x, weight, m: x.t().view(H, -1)[1:3].mul_(3),
    "x.data": lambda x, weight, m: x.data.neg_(),
    "out=x": lambda x, weight, m: torch.add(x, 1, out=x),
    "silu(inplace)": lambda x, weight, m: F.silu(x, inplace=True),
    "a list": lambda x, weight, m: torch._foreach_add_([torch.ones(2), x], 1.0),
    "running statistics": lambda x, weight, m: F.batch_norm(x.t().t(), x[0], x[1].abs(), training=True),
    "weight[0]": lambda x, weight, m: weight.__setitem__(0, 1),
    "embedding": lambda x, weight, m: F.embedding(torch.arange(4), weight, max_norm=0.1),
    "m &= other": lambda x, weight, m: m.__iand__(~m),
    "m[0].fill_": lambda x, weight, m: m[0].fill_(True),
}


@pytest.mark.parametrize("mutation", sample(BETWEEN, every=3))
def test_write_between_gate_and_value(mutation: str) -> None:
    def function(x: Tensor, weight: Tensor, m: Tensor) -> Tensor:
        gate = F.linear(x, weight * m)
        BETWEEN[mutation](x, weight, m)
        return F.silu(gate) * F.linear(x, weight * ~m)

    def named() -> dict[str, Tensor]:
        all_tensors = {name: t.detach() for name, t in tensors().items()}
        return {"x": all_tensors["x"], "weight": all_tensors["weight"], "m": all_tensors["bits"][0].clone()}

    eager, compiled = named(), named()
    wanted = results(function, eager)
    capture = Capture()
    assert_same(results(capture.compile(function), compiled), wanted, SAME)
    assert_same(compiled, eager, SAME)
    assert capture.report.fused == []
    assert len(capture.reasons) == 1
    assert "writes in place" in capture.reasons[0]


def test_inputs_that_share_memory() -> None:
    """One input of the program is a view of another."""

    def function(x: Tensor, view: Tensor, weight: Tensor, m: Tensor) -> Tensor:
        gate = F.linear(x, weight * m)
        view.add_(1)
        return F.silu(gate) * F.linear(x, weight * ~m)

    def named() -> dict[str, Tensor]:
        t = tensors(trained=())
        return {"x": t["x"], "view": t["x"][1:3], "weight": t["weight"], "m": t["bits"][0]}

    capture = Capture()
    assert_same(results(capture.compile(function), named()), results(function, named()), SAME)
    assert capture.report.fused == []


def test_attributes_without_examples_share_memory() -> None:
    """Another pass may add attributes to a graph without examples; then only their tensors tell that they share it."""
    root, graph = nn.Module(), Graph()
    root.register_buffer("whole", torch.zeros(4))
    root.register_buffer("part", root.get_buffer("whole")[:2])
    whole, part = graph.get_attr("whole"), graph.get_attr("part")
    graph.call_method("add_", (part, 1))
    graph.output(graph.call_function(torch.neg, (whole,)))
    copied = GraphModule(root, graph).graph
    memory = Memory(copied)
    assert [memory.is_written(node) for node in copied.find_nodes(op="get_attr")] == [True, True]
