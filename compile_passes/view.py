"""The functional view: a graph in which no tensor changes, on which the pass recognises and rewrites layers.

Writes in place are the reason why a node of the graph before autograd does not hold one value:
`w = W.clone(); w[~M] = 0` changes what later nodes read as `w`. In the view each node holds one value, as in single
assignment form:

A graph without writes is its own view. Otherwise the view is a copy:

- A write to all of a tensor that the graph itself has made (`y += term`, `silu(inplace=True)`, `w[M] = 0`) is a
  function of the old value, and later nodes read its result. The rules need not know that it writes.
- After any other write, a later read is a node of its own, about which nothing is known (`overwritten`). So is a read
  of a tensor that shares memory with what was written.

The view also knows where its values are: `holders` has the node of the graph whose tensor has a value, and `overwriter`
finds a write that replaces the value. `write_back` makes the changes of the view in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .calls import NONE, Effect
from .memory import Memory, Modes
from .shapes import example, requires_grad, same_shape
from .symbols import as_call


def overwritten(tensor: Any, writer: Any) -> None:
    """Stand for what `tensor` holds after the node `writer`; this is a mark in a graph and is never called."""


def opaque(*args: Any, **kwargs: Any) -> None:
    """Stand for a call that writes in a way that the view does not express; this is a mark and is never called."""


class View:
    """A graph in functional form."""

    def __init__(self, graph: Graph) -> None:
        self._source = graph
        self.memory = Memory(graph)  # the storages and writes of the original graph
        self.graph = Graph(graph.owning_module)  # a copy of the graph, with the names and examples of its nodes
        self.origin: dict[Node, Node] = {}
        """The original node that each node of the copy stands for; new nodes and `overwritten` ones have none."""
        self.holders: dict[Node, Node] = {}
        """The original node whose tensor has the value of a node, until something overwrites it; new ones have none."""
        self._defined: dict[Node, int] = {}  # the position of the original node that made the value of a node
        self._copied: dict[Node, tuple[Any, Any]] = {}
        self._tensors: dict[Node, Node] = {}  # the node that made the tensor which a node writes to and returns
        self._latest: dict[Node, Node] = {}  # the last node that returns a tensor, by the node that made the tensor
        self._current: dict[Node, Node] = {}
        """The node of the view that holds what a tensor of the graph held when it was last read or written."""
        if self.memory.has_writes:
            for node in graph.nodes:
                self._copy(node)
        else:  # each node holds one value already, so the graph is its own view
            self.graph = graph
            self.origin = dict(zip(graph.nodes, graph.nodes, strict=True))
            self.holders, self._defined = dict(self.origin), self.memory.order
        self.order = {node: position for position, node in enumerate(self.graph.nodes)}

    # --- Making the view ---------------------------------------------------------------------------------------------

    def _copy(self, node: Node) -> None:
        writes, is_function = self.memory.effects[node].writes, self._writes_a_function(node)
        position = self.memory.order[node]
        copy = self.graph.node_copy(node, lambda item: self._read(item, position))
        copy.name = node.name
        if id(example(node)) in self.memory.misdescribed:
            copy.meta = {key: value for key, value in copy.meta.items() if key not in ("example_value", "val")}
        self.origin[copy] = self.holders[copy] = node
        self._defined[copy] = position
        self._copied[copy] = (copy.args, copy.kwargs)
        if writes and not is_function:
            copy.op, copy.target = "call_function", opaque
        self._current[node] = copy
        if is_function:
            self._write(node, copy)

    def _read(self, node: Node, position: int) -> Node:
        """The node of the view that holds what a tensor of the graph holds at a position."""
        tensor = self._tensors.get(node, node)
        current = self._current[tensor]
        writer = self.memory.last_write(tensor, self._defined[current], position)
        if writer is not None:
            name = f"{tensor.name}_after_{writer.name}"
            leaf = self.graph.create_node("call_function", overwritten, (current, self._current[writer]), name=name)
            leaf.meta = dict(tensor.meta)
            self._current[tensor], self.holders[leaf] = leaf, self._latest.get(tensor, tensor)
            self._defined[leaf] = self.memory.order[writer]
        return self._current[tensor]

    def _writes_a_function(self, node: Node) -> bool:
        """Whether a node writes a function of the old value to all of a tensor, in memory that the graph has made.

        A write that autograd does not record, as under `no_grad`, changes the value and not the gradient.
        """
        effect, inputs = self.memory.effects[node], node.all_input_nodes
        if effect.writes != {0} or not node.args or node.args[0] is not inputs[0]:
            return False
        (target, *others), position = inputs, self.memory.order[node]
        if self.memory.is_given(target, position) or self.memory.share(target, others, position):
            return False
        value, modes = example(target), self.memory.modes[node]
        if not isinstance(value, Tensor) or modes.transforms:
            return False
        if value.requires_grad and modes.grad is not True:
            return False
        return is_fill(node) or (effect.returns_target and _is_same_kind(example(node), value))

    def _write(self, node: Node, copy: Node) -> None:
        """Make later nodes that read the tensor which a node has written to see the function that it wrote."""
        target = node.all_input_nodes[0]
        tensor = self._tensors.get(target, target)
        _record_gradient(self._current[tensor])
        self._current[tensor] = copy
        if is_fill(node):
            self.holders[copy] = self._latest.get(tensor, tensor)
            copy.meta = {**copy.meta, "example_value": example(tensor)}
            if _is_bool_mask(node):
                copy.op, copy.target = "call_method", "masked_fill"
        else:
            self._tensors[node], self._latest[tensor] = tensor, node

    # --- Questions about the original graph --------------------------------------------------------------------------

    def effect(self, node: Node) -> Effect:
        """What the original call of a node does; nothing for new nodes."""
        return self.memory.effects[self.origin[node]] if node in self.origin else NONE

    def modes(self, node: Node) -> Modes:
        """The modes under which the original of a node runs, or the original whose tensor the node stands for."""
        return self.memory.modes[self.holders[node]]

    def is_repeatable(self, node: Node) -> bool:
        """Whether a node is a call that returns the same, with the same gradient, for the same arguments.

        A higher-order operator may have a backward of its own, so two calls may have another gradient than one
        call that is used twice.
        """
        effect = self.effect(node)
        is_call = node.op.startswith("call_") and not isinstance(node.target, torch._ops.HigherOrderOperator)
        return node in self.origin and is_call and effect.is_known and not effect.draws

    def is_constant(self, node: Node) -> bool:
        """Whether no write, at any time, changes the tensor that a node stands for."""
        return node in self.origin and not self.memory.is_written(self.holders[node])

    def overwriter(self, node: Node, before: Node, without: Iterable[Node] = ()) -> Node | None:
        """The first node that overwrites the holder of a value before the original of `before` runs, if there is one.

        Writes by the nodes `without` of the view do not count.
        """
        excluded = {self.origin.get(item) for item in without}
        end = self.memory.order[self.origin[before]]
        found = [
            writer
            for storage in self.memory.storages[self.holders[node]]
            for writer in self.memory.writes(storage, self._defined[node], end)
            if writer not in excluded
        ]
        return min(found, key=self.memory.order.__getitem__, default=None)

    def later_writers(self, node: Node, besides: Node) -> Iterator[Node]:
        """The original nodes that later write to the holder of a value, except to memory of the holder of `besides`."""
        storages = self.memory.storages
        for storage in storages[self.holders[node]] - storages[self.holders[besides]]:
            yield from self.memory.writes(storage, self._defined[node], math.inf)

    def originals(self, nodes: Iterable[Node]) -> set[Node]:
        """The original nodes of nodes of the view."""
        return {self.origin[node] for node in nodes if node in self.origin}

    # --- Changing the original graph ---------------------------------------------------------------------------------

    def discard(self) -> None:
        """Erase the new nodes of a graph that is its own view, which nothing reads yet."""
        for node in reversed(self.graph.nodes):
            if self.graph is self._source and node not in self.origin:
                self.graph.erase_node(node)

    def write_back(self, replaced: Mapping[Node, Node]) -> None:
        """Make the changes of the view in the original graph: new nodes, other arguments, and erased nodes.

        `replaced` maps each old node to the new node whose tensor takes its place.
        """
        if self.graph is self._source:
            return
        made: dict[Node, Node] = {}
        pending: list[Node] = []
        erased = {source for node, source in self.origin.items() if node._erased}
        instead = {self.origin[old]: new for old, new in replaced.items()}

        def original(node: Node) -> Node:
            holder = self.holders.get(node)
            return made[node] if holder is None else made[instead[holder]] if holder in instead else holder

        for node in self.graph.nodes:
            if node not in self.holders:
                pending.append(node)
            if node not in self.origin:
                continue
            source = self.origin[node]
            with self._source.inserting_before(source):
                for new in pending:
                    made[new] = self._source.node_copy(new, original)
            pending.clear()
            args, kwargs = self._copied[node]
            is_changed = node.args is not args or node.kwargs is not kwargs
            if is_changed or not erased.isdisjoint(source.all_input_nodes):
                source.args, source.kwargs = torch.fx.map_arg((node.args, node.kwargs), original)
        for source in reversed(self._source.nodes):
            if source in erased:
                self._source.erase_node(source)


def _record_gradient(node: Node) -> None:
    """Make the example of a tensor say whether it had a gradient before a write; tracing shows what it had after."""
    value = example(node)
    if value is not None and value.requires_grad and node.op.startswith("call_"):
        had_gradient = any(requires_grad(item) for item in node.all_input_nodes)
        node.meta = {**node.meta, "example_value": value.detach().requires_grad_(had_gradient)}


def _is_same_kind(one: Any, other: Tensor) -> bool:
    """Whether a value is a tensor with the shape, strides and dtype of another; in-place views have other strides."""
    if not isinstance(one, Tensor):
        return False
    return (one.dtype, one.dim()) == (other.dtype, other.dim()) and str(one.stride()) == str(other.stride())


def is_fill(node: Node) -> bool:
    """Whether a node is `tensor[index] = number`."""
    call = as_call(node)
    return call is not None and call.symbol == "setitem" and isinstance(call.args[2], (int, float))


def _is_bool_mask(fill: Node) -> bool:
    """Whether the index of a fill is a bool mask of the tensor's shape."""
    tensor, mask, _ = fill.args
    condition = example(mask)
    return isinstance(condition, Tensor) and condition.dtype is torch.bool and same_shape(mask, tensor)
