"""Tracks which nodes share memory, which nodes write to it, and under which modes each node runs.

In a graph that was just traced, the example values of a tensor and of its views share a storage. In a program that was
saved and loaded they do not, because each example value was stored separately. For such a program, the side effects of
calls tell which nodes share memory (`calls.py`).

The result of a call with unknown effects may be a view of any argument. So the storages of the arguments are *joined*:
from the position of the call on, a write to one joined storage counts as a write to all. Joined storages form trees
(union-find by size). Each edge has the position of its join, so a query takes logarithmic time for any number of
unknown calls.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .calls import Effect, Watcher, calls_of_bodies, storage_of
from .shapes import example

STORAGE = "mglu_storage"  # key in the `meta` of an input for the identity of its real storage (`storage_of`)


@dataclass(frozen=True)
class Modes:
    """The modes under which a node runs."""

    grad: Any  # True if gradients are recorded
    blocks: tuple[Node, ...] = ()  # the nodes that enter the surrounding autocasts and inference modes
    transforms: tuple[str, ...] = ()  # the names of the surrounding functorch transforms (`vmap`, `grad`, ...)

    @property
    def in_inference_mode(self) -> bool:
        """True if the node runs in a block of inference mode."""
        return any("inference" in str(node.target) for node in self.blocks)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter these autocasts and inference modes for a `with` block."""
        with ExitStack() as stack:
            for node in self.blocks:
                entered: Any = node.target
                state = entered(*node.args, **node.kwargs)
                module = torch.autograd.grad_mode if "inference" in entered.__name__ else torch.amp.autocast_mode
                stack.callback(getattr(module, entered.__name__.replace("enter", "exit")), state)
            yield


class Memory:
    """The storages, writes and modes of the nodes of one graph. The graph must not change."""

    def __init__(self, graph: Graph) -> None:
        watcher = Watcher(effect_of_bodies)
        self.order = {node: position for position, node in enumerate(graph.nodes)}
        self.effects: dict[Node, Effect] = {}
        self.modes = dict(_modes(graph))
        self.storages: dict[Node, frozenset[Hashable]] = {}
        self.misdescribed: set[int] = set()
        """The ids of example values whose shape or `requires_grad` a call changes in place.

        Tracing recorded the state after the call, which is wrong for the nodes before it.
        """
        self.is_differentiated_around = False
        """True if a graph around this one computes gradients that can be differentiated again (`Surroundings`)."""
        self.differentiating: list[Node] = []  # calls of autograd whose gradients can be differentiated again
        self.writes_inputs = False  # True if some node writes to an input or constant of the graph
        self._parents: dict[Hashable, tuple[Hashable, int]] = {}
        """The union-find tree: for a joined storage, its parent and the position of the join."""
        self._sizes: dict[Hashable, int] = {}
        self._given: dict[Hashable, int] = {}
        """For a storage of an input, parameter or constant, the position of its node.

        If such a storage is joined to another root, that root is added with the position of the join.
        """
        self._writes: dict[Hashable, tuple[list[int], list[Node]]] = {}
        self._returned = graph.output_node().all_input_nodes
        for node in graph.nodes:
            self._add(node, watcher.effect(node))

    def write_at_end(self, storages: Iterable[Hashable]) -> None:
        """Record a write to storages after the graph has run. The output node counts as the writer."""
        end = next(reversed(self.order))
        for storage in storages:
            self._write(storage, end, len(self.order))

    def _add(self, node: Node, effect: Effect) -> None:
        inputs, position = node.all_input_nodes, self.order[node]
        self.effects[node] = effect
        held = {storage for i in effect.shares for storage in self.storages[inputs[i]]}
        own = set(_traced(node))
        if held and effect.is_known and own and own <= held:
            held = own  # more precise than the effect, which does not tell the results of a call apart
        held = held | own
        if not effect.is_known and not own and not node.users:
            held = set()  # the call returns nothing
        if len(held) > 1 and not own >= held:
            held = {self._join(held, position)}
        self.storages[node] = frozenset(held)
        if node.op in ("placeholder", "get_attr"):
            self._given.update(dict.fromkeys(held, position))
        if effect.changes_metadata:
            self.misdescribed.add(id(example(inputs[0])))
        if _differentiates(node):
            self.differentiating.append(node)
        for storage in {storage for i in effect.writes for storage in self.storages[inputs[i]]}:
            self._write(storage, node, position)

    def _write(self, storage: Hashable, writer: Node, position: int) -> None:
        root = self._root(storage, position)
        positions, writers = self._writes.setdefault(root, ([], []))
        positions.append(position)
        writers.append(writer)
        self.writes_inputs |= root in self._given

    # --- Joined storages ---------------------------------------------------------------------------------------------

    def _join(self, storages: Iterable[Hashable], position: int) -> Hashable:
        """Join storages from a position on; returns the root of their tree."""
        largest, *others = sorted({self._root(s, position) for s in storages}, key=lambda s: -self._sizes.get(s, 1))
        for other in others:
            self._parents[other] = (largest, position)
            self._sizes[largest] = self._sizes.get(largest, 1) + self._sizes.get(other, 1)
            if other in self._given:
                self._given.setdefault(largest, position)
        return largest

    def _root(self, storage: Hashable, position: float) -> Hashable:
        """The root of a storage's tree at a position; joined storages have the same root."""
        while (parent := self._parents.get(storage)) is not None and parent[1] <= position:
            storage = parent[0]
        return storage

    def share(self, node: Node, others: Iterable[Node], position: int) -> bool:
        """True if a node shares memory with one of `others` at a position."""
        roots = {self._root(storage, position) for storage in self.storages[node]}
        return any(self._root(storage, position) in roots for other in others for storage in self.storages[other])

    def is_given(self, node: Node, position: int) -> bool:
        """True if a node shares memory with an input or constant of the graph at a position."""
        roots = (self._root(storage, position) for storage in self.storages[node])
        return any(self._given.get(root, position + 1) <= position for root in roots)

    @property
    def returns_inputs(self) -> bool:
        """True if the graph returns memory of an input or constant."""
        return any(self.is_given(node, len(self.order)) for node in self._returned)

    # --- Writes ------------------------------------------------------------------------------------------------------

    @property
    def has_writes(self) -> bool:
        """True if some node writes to memory."""
        return bool(self._writes)

    def is_written(self, node: Node) -> bool:
        """True if some node writes to the memory of a node's result."""
        return self.last_write(node, -1, len(self.order) + 1) is not None

    def writes(self, storage: Hashable, after: int, before: float) -> Iterator[Node]:
        """The nodes between two positions that write to a storage."""
        for _, writers, start, end in self._written(storage, after, before):
            yield from writers[start:end]

    def last_write(self, node: Node, after: int, before: float) -> Node | None:
        """The last node between two positions that writes to the memory of a node's result."""
        if not self._writes:
            return None
        last = [
            (positions[end - 1], writers[end - 1])
            for storage in self.storages[node]
            for positions, writers, start, end in self._written(storage, after, before)
            if start < end
        ]
        return max(last, key=lambda write: write[0])[1] if last else None

    def _written(
        self, storage: Hashable, after: int, before: float
    ) -> Iterator[tuple[list[int], list[Node], int, int]]:
        """The writes between two positions to a storage and to all storages joined to it.

        Yields `(positions, writers, start, end)`; the writes are the entries from `start` to `end` of both lists.
        """
        joined = -1
        while joined < before:
            parent, left = self._parents.get(storage, (None, before))
            if storage in self._writes:
                positions, writers = self._writes[storage]
                start = bisect_right(positions, max(after, joined - 1))
                yield positions, writers, start, max(start, bisect_left(positions, min(left, before)))
            if parent is None:
                return
            storage, joined = parent, int(left)


def effect_of_bodies(node: Node, bodies: Sequence[GraphModule]) -> Effect:
    """The effect of a call that runs other graphs."""
    memories = [Memory(body.graph) for body in bodies]
    everything = frozenset(range(len(node.all_input_nodes)))
    writes = any(memory.writes_inputs for memory in memories)
    shares = any(memory.returns_inputs for memory in memories)
    draws = any(effect.draws for memory in memories for effect in memory.effects.values())
    return Effect(everything if writes else frozenset(), everything if shares else frozenset(), draws)


def _differentiates(node: Node) -> bool:
    """True if a node computes gradients that may be differentiated again."""
    is_autograd = node.target == "backward" or getattr(node.target, "__module__", None) == "torch.autograd"
    return node.op.startswith("call_") and is_autograd and node.kwargs.get("create_graph", False) is not False


class Surroundings:
    """The graphs of a module, including the bodies of its higher-order operators, such as `checkpoint`."""

    def __init__(self, module: GraphModule) -> None:
        self._calls: dict[GraphModule, list[Node]] = {}  # the calls of each body
        self._memories: dict[Graph, Memory] = {}
        for graph in [inner.graph for inner in module.modules() if isinstance(inner, GraphModule)]:
            for body, calls in calls_of_bodies(graph).items():
                self._calls.setdefault(body, []).extend(calls)

    def tell(self, memory: Memory, body: GraphModule | None) -> None:
        """Record in the memory of a body what the graphs around it do.

        After a call of the body, the graphs around it may write to the call's operands. They may also compute gradients
        that can be differentiated again. An input of the body has the example value of the operand that is passed to
        it, so both have the same storage.
        """
        for call in self._calls.get(body, ()) if body is not None else ():
            around = self._memories.get(call.graph)
            if around is None:
                around = self._memories[call.graph] = Memory(call.graph)
                self.tell(around, call.graph.owning_module)
            memory.is_differentiated_around |= around.is_differentiated_around or bool(around.differentiating)
            for node in call.all_input_nodes:
                if around.last_write(node, around.order[call], math.inf) is not None:
                    memory.write_at_end(around.storages[node])


def _traced(node: Node) -> Iterator[Hashable]:
    """The storages of a node's example values, and of the real tensor that a `get_attr` node names."""
    value = example(node)
    values = [*value] if isinstance(value, (tuple, list)) else [value]
    if node.op == "get_attr":
        values.append(getattr(node.graph.owning_module, str(node.target), None))
    yield from (storage_of(item) for item in values if isinstance(item, Tensor))
    if STORAGE in node.meta:
        yield node.meta[STORAGE]


# --- Modes -----------------------------------------------------------------------------------------------------------

_ENTERS = ("_enter_autocast", "_enter_inference_mode")
_EXITS = ("_exit_autocast", "_exit_inference_mode")


def _modes(graph: Graph) -> Iterator[tuple[Node, Modes]]:
    modes = Modes(torch.is_grad_enabled())
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "_set_grad_enabled":
            modes = replace(modes, grad=node.args[0])
        elif name in _ENTERS:
            modes = replace(modes, blocks=(*modes.blocks, node))
        elif name in _EXITS:
            modes = replace(modes, blocks=modes.blocks[:-1])
        elif name.endswith("_increment_nesting") or name == "_enter_dual_level":
            modes = replace(modes, transforms=(*modes.transforms, node.name))
        elif name.endswith("_decrement_nesting") or name == "_exit_dual_level":
            modes = replace(modes, transforms=modes.transforms[:-1])
        yield node, modes
