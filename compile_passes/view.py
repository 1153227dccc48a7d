"""The functional view: a form of the graph in which no tensor changes. The pass finds and rewrites layers on it.

In the graph before autograd, the value of a node may change: `w = W.clone(); w[~M] = 0` changes what later nodes read
as `w`. In the view each node holds one value, as in static single assignment form.

A graph without writes is its own view. Otherwise the view is a copy:

- If `_writes_a_function` is True for a write to a tensor that the graph itself has made (`y += term`,
  `silu(inplace=True)`, `w[M] = 0`), the write becomes a function of the tensor's old value, and later nodes read the
  result of the function. The rules need not know that the node writes.
- After any other write, such as a write to an input, later reads of the tensor become reads of a new node, about which
  nothing is known (`overwritten`). After every write, so do later reads of other tensors that share the memory.

The view also knows which original tensors hold its values. `holders` names the original node with the tensor, and
`overwriter` finds the write after which the tensor holds another value. `write_back` applies the changes of the view to
the original graph.
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
    """The target of new nodes of the view that hold the value of `tensor` after the node `writer`. Never called."""


def opaque(*args: Any, **kwargs: Any) -> None:
    """The target of nodes of the view for calls that it cannot express as functions of their inputs. Never called.

    These are some writes, and calls whose results hold no gradient of the inputs (`View._is_cut`).
    """


class View:
    """A graph in functional form."""

    def __init__(self, graph: Graph) -> None:
        self._source = graph
        self.memory = Memory(graph)  # the storages and writes of the original graph
        self.graph = Graph(graph.owning_module)  # a copy of the graph, with the names and examples of its nodes
        self.origin: dict[Node, Node] = {}
        """The original of each node of the copy. New nodes and `overwritten` nodes have none."""
        self.holders: dict[Node, Node] = {}
        """The original node whose tensor holds the value of a node, until the tensor changes. New nodes have none."""
        self._defined: dict[Node, int] = {}  # the position in the original graph at which a node's value is computed
        self._copied: dict[Node, tuple[Any, Any]] = {}  # the arguments of each node before the rewrite
        # A tensor of the original graph is identified by the node that made it.
        self._tensors: dict[Node, Node] = {}  # for a node that writes to a tensor and returns the tensor: the tensor
        self._latest: dict[Node, Node] = {}  # for a tensor, the last node that returns it
        self._current: dict[Node, Node] = {}  # for a tensor, the node of the view with its value at the last access
        if self.memory.has_writes or any(map(self._is_cut, graph.nodes)):
            for node in graph.nodes:
                self._copy(node)
        else:  # each node holds one value, so the graph is its own view
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
        if (writes and not is_function) or self._is_cut(node):
            copy.op, copy.target = "call_function", opaque
        self._current[node] = copy
        if is_function:
            self._write(node, copy)

    def _read(self, node: Node, position: int) -> Node:
        """The node of the view with the value that the tensor of `node` has at a position of the original graph."""
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

    def _is_cut(self, node: Node) -> bool:
        """True if a node is read where gradients are recorded, and is a tensor whose own gradient was not recorded.

        That is a view made under `no_grad`. Its `requires_grad` is True, but no gradient reaches the tensor behind it.
        A call that returns its input itself, such as `contiguous`, counts too, although its gradient is not cut.
        """
        modes = self.memory.modes
        if not node.op.startswith("call_") or modes[node].grad is not False:
            return False
        value = example(node)
        results = value if isinstance(value, (tuple, list)) else (value,)
        is_trained = any(isinstance(one, Tensor) and one.requires_grad for one in results)
        return is_trained and any(modes[user].grad is not False for user in node.users)

    def _writes_a_function(self, node: Node) -> bool:
        """True if a node writes a function of a tensor's old value to all of the tensor, and the graph made the tensor.

        False for a write to a tensor with a gradient that autograd does not record, as under `no_grad`: the value
        changes, but the gradient stays the gradient of the old value.
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
        """Let later nodes read `copy`, which computes the new value of the tensor that `node` changes."""
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
        """The side effects of a node's original; new nodes have no side effects."""
        return self.memory.effects[self.origin[node]] if node in self.origin else NONE

    def modes(self, node: Node) -> Modes:
        """The modes under which a node runs; for an `overwritten` node, the modes of its tensor's original node."""
        return self.memory.modes[self.holders[node]]

    def is_repeatable(self, node: Node) -> bool:
        """True if a node is a call that gives equal values and gradients for equal arguments.

        Higher-order operators are excluded. They may have a custom backward, and then one call with two users may have
        other gradients than two equal calls with one user each.
        """
        effect = self.effect(node)
        is_call = node.op.startswith("call_") and not isinstance(node.target, torch._ops.HigherOrderOperator)
        is_function = is_call and node.target is not opaque
        return node in self.origin and is_function and effect.is_known and not effect.draws

    def is_constant(self, node: Node) -> bool:
        """True if nothing ever writes to the tensor of a node."""
        return node in self.origin and not self.memory.is_written(self.holders[node])

    def overwriter(self, node: Node, before: Node, without: Iterable[Node] = ()) -> Node | None:
        """The first original node that overwrites the value of `node` before the original of `before` runs, or None.

        Writes by the originals of the nodes `without` do not count.
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
        """The original nodes after `node` that write to its memory. Memory shared with `besides` does not count."""
        storages = self.memory.storages
        for storage in storages[self.holders[node]] - storages[self.holders[besides]]:
            yield from self.memory.writes(storage, self._defined[node], math.inf)

    def originals(self, nodes: Iterable[Node]) -> set[Node]:
        """The originals of nodes of the view."""
        return {self.origin[node] for node in nodes if node in self.origin}

    # --- Changing the original graph ---------------------------------------------------------------------------------

    def discard(self) -> None:
        """Give up the view: erase new nodes, which nothing reads yet, from a graph that is its own view."""
        for node in reversed(self.graph.nodes):
            if self.graph is self._source and node not in self.origin:
                self.graph.erase_node(node)

    def write_back(self, replaced: Mapping[Node, Node]) -> None:
        """Apply the changes of the view to the original graph: new nodes, changed arguments, and erased nodes.

        `replaced` maps each old node to the new node that takes its place.
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
    """Give a tensor's example value the `requires_grad` from before a write. Tracing recorded the state after it."""
    value = example(node)
    if value is not None and value.requires_grad and node.op.startswith("call_"):
        had_gradient = any(requires_grad(item) for item in node.all_input_nodes)
        node.meta = {**node.meta, "example_value": value.detach().requires_grad_(had_gradient)}


def _is_same_kind(value: Any, other: Tensor) -> bool:
    """True if a value is a tensor with the dtype, rank and strides of `other`. For example, `t_` changes strides."""
    if not isinstance(value, Tensor):
        return False
    return (value.dtype, value.dim()) == (other.dtype, other.dim()) and str(value.stride()) == str(other.stride())


def is_fill(node: Node) -> bool:
    """True if a node is `tensor[index] = number`."""
    call = as_call(node)
    return call is not None and call.symbol == "setitem" and isinstance(call.args[2], (int, float))


def _is_bool_mask(fill: Node) -> bool:
    """True if the index of a fill is a bool mask of the tensor's shape."""
    tensor, mask, _ = fill.args
    condition = example(mask)
    return isinstance(condition, Tensor) and condition.dtype is torch.bool and same_shape(mask, tensor)
