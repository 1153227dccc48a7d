"""The memory of a graph: which nodes write to which storage, and under which modes the nodes run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.fx import Graph, GraphModule, Node

from compile_passes.memory import STORAGE, Memory, Modes

functorch = torch._C._functorch


def input_of(graph: Graph, name: str, example: torch.Tensor | None = None) -> Node:
    node = graph.placeholder(name)
    node.meta["example_value"] = torch.zeros(2, 2) if example is None else example
    return node


def test_modes() -> None:
    graph = Graph()
    x = input_of(graph, "x")
    read: list[Node] = []

    def switch(function: Any, *arguments: Any) -> Node:
        """Add a node that switches a mode, and a node that reads a tensor in this mode."""
        node = graph.call_function(function, arguments)
        read.append(graph.call_method("relu", (x,)))
        return node

    autocast = switch(_enter_autocast, "cpu")
    inference = switch(_enter_inference_mode, True)
    switch(torch._C._set_grad_enabled, False)
    vmap = switch(functorch._vmap_increment_nesting, 2, "error")
    grad = switch(functorch._grad_increment_nesting)
    dual = switch(torch._C._enter_dual_level)
    switch(torch._C._exit_dual_level, dual)
    switch(functorch._grad_decrement_nesting)
    switch(functorch._vmap_decrement_nesting)
    switch(_exit_inference_mode, inference)
    switch(torch._C._set_grad_enabled, True)
    switch(_exit_autocast, autocast)
    graph.output(x)
    outer, inner, transforms = (autocast,), (autocast, inference), (vmap.name, grad.name, dual.name)
    modes = Memory(graph).modes
    assert modes[x] == Modes(True)
    assert [modes[node] for node in read] == [
        Modes(True, outer),
        Modes(True, inner),
        Modes(False, inner),
        *(Modes(False, inner, transforms[:n]) for n in (1, 2, 3, 2, 1, 0)),
        Modes(False, outer),
        Modes(True, outer),
        Modes(True),
    ]
    with torch.no_grad():
        assert Memory(graph).modes[x] == Modes(False)


def test_writes() -> None:
    graph = Graph()
    x, y = input_of(graph, "x"), input_of(graph, "y")
    view = graph.call_method("view", (x, 4))
    first = graph.call_method("add_", (view, 1))
    second = graph.call_method("neg_", (x,))
    copy = graph.call_method("clone", (y,))
    copy.meta["example_value"] = torch.zeros(2, 2)
    graph.call_method("neg_", (copy,))
    graph.output((copy, y))
    memory = Memory(graph)
    (storage,) = memory.storages[x]
    assert memory.storages[first] == memory.storages[x]
    at = memory.order
    assert list(memory.writes(storage, at[x], math.inf)) == [first, second]
    assert list(memory.writes(storage, at[x], at[second])) == [first]
    assert list(memory.writes(storage, at[first], math.inf)) == [second]
    assert list(memory.writes("another", at[x], math.inf)) == []
    assert [memory.last_write(x, at[x], end) for end in (at[first], at[second], math.inf)] == [None, first, second]
    assert [memory.is_written(node) for node in (x, view, y, copy)] == [True, True, False, True]
    assert [memory.is_given(node, at[copy]) for node in (x, view, y, copy)] == [True, True, True, False]
    assert memory.writes_inputs
    assert memory.returns_inputs


@pytest.mark.parametrize("last", ["x", "y"])
def test_storages_that_are_joined_share_only_later_writes(last: str) -> None:
    graph = Graph()
    given = {name: input_of(graph, name) for name in "xy"}
    writes = {name: graph.call_method("neg_", (given[name],)) for name in sorted(given, key=lambda name: name == last)}
    (x, y), (to_x, to_y) = given.values(), (writes[name] for name in given)
    either = graph.call_function(lambda x, y: x, (x, y))  # an unknown call, whose result may be a view of x or y
    to_both = graph.call_method("neg_", (x,))
    graph.output(either)
    memory = Memory(graph)

    def writers(node: Node) -> set[Node]:
        return {writer for storage in memory.storages[node] for writer in memory.writes(storage, -1, math.inf)}

    assert [writers(node) for node in (x, y)] == [{to_x, either, to_both}, {to_y, either, to_both}]


def test_the_last_write_to_several_storages() -> None:
    graph = Graph()
    x, y, pair = input_of(graph, "x"), input_of(graph, "y"), graph.placeholder("pair")
    pair.meta["example_value"] = (x.meta["example_value"], y.meta["example_value"])
    graph.call_method("neg_", (x,))
    graph.call_method("neg_", (y,))
    last = graph.call_method("neg_", (x,))
    graph.output(pair)
    assert Memory(graph).last_write(pair, -1, math.inf) is last


def test_a_graph_that_writes_only_to_its_own_memory() -> None:
    graph = Graph()
    copy = graph.call_method("clone", (input_of(graph, "x"),))
    graph.output(graph.call_method("t_", (copy,)))
    copy.meta["example_value"] = torch.zeros(2, 2)
    memory = Memory(graph)
    assert memory.is_written(copy)
    assert not memory.writes_inputs
    assert not memory.returns_inputs
    assert memory.misdescribed == {id(copy.meta["example_value"])}


def test_only_an_attribute_has_the_storage_of_the_tensor_with_its_name() -> None:
    root = nn.Module()
    root.register_buffer("x", torch.zeros(2, 2))
    graph = Graph(root)
    given, attribute, saved = input_of(graph, "x"), graph.get_attr("x"), input_of(graph, "saved")
    saved.meta[STORAGE] = "saved storage"
    pair = graph.placeholder("pair")
    pair.meta["example_value"] = (given.meta["example_value"], saved.meta["example_value"])
    graph.output(given)
    memory = Memory(graph)
    assert memory.storages[attribute]
    assert memory.storages[given].isdisjoint(memory.storages[attribute])
    assert memory.storages[pair] == (memory.storages[given] | memory.storages[saved]) - {"saved storage"}
    assert "saved storage" in memory.storages[saved]
    assert all(memory.is_given(node, memory.order[pair]) for node in (given, attribute, saved))


def test_attributes_without_examples_share_memory() -> None:
    """Another pass may add attributes without example values. Then only their tensors tell that they share memory."""
    root, graph = nn.Module(), Graph()
    root.register_buffer("whole", torch.zeros(4))
    root.register_buffer("part", root.get_buffer("whole")[:2])
    whole, part = graph.get_attr("whole"), graph.get_attr("part")
    graph.call_method("add_", (part, 1))
    graph.output(graph.call_function(torch.neg, (whole,)))
    copied = GraphModule(root, graph).graph
    memory = Memory(copied)
    assert [memory.is_written(node) for node in copied.find_nodes(op="get_attr")] == [True, True]
