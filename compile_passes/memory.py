"""The memory of a graph: which tensors share a storage, which nodes write to which storages, and under which modes.

In a graph that was just traced, the examples of a tensor and of its views share a storage. In a program that was saved
and loaded they do not, because each was stored separately; there the calls tell what they share (`calls.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .calls import Effect, Watcher, storage_of
from .shapes import example

STORAGE = "mglu_storage"
"""Key in the `meta` of an input: the identity of the real storage that it stands for (`storage_of`)."""


@dataclass(frozen=True)
class Modes:
    """The modes under which a node runs.

    Attributes:
        grad: whether gradients are recorded.
        blocks: the blocks of autocast and inference mode around the node.
        transforms: the functorch transforms (`vmap`, `grad`, ...) around it.
    """

    grad: Any
    blocks: tuple[str, ...] = ()
    transforms: tuple[str, ...] = ()


class Memory:
    """The storages, writes and modes of the nodes of one graph, which is not changed."""

    def __init__(self, graph: Graph) -> None:
        watcher = Watcher()
        self.order = {node: position for position, node in enumerate(graph.nodes)}
        self.effects: dict[Node, Effect] = {}
        self.modes = dict(_modes(graph))
        self.storages: dict[Node, frozenset[Hashable]] = {}
        self.given: set[Hashable] = set()
        """The storages of the graph's inputs, parameters and constants."""
        self.misdescribed: set[int] = set()
        """The ids of examples whose shape or gradient a later call changes: they show what their tensor becomes."""
        self._writes: dict[Hashable, list[Node]] = {}
        self._returned = graph.output_node().all_input_nodes
        for node in graph.nodes:
            effect = self.effects[node] = watcher.effect(node)
            inputs = node.all_input_nodes
            held = {storage for i in effect.shares for storage in self.storages[inputs[i]]}
            self.storages[node] = frozenset(held.union(_traced(node)))
            if node.op in ("placeholder", "get_attr"):
                self.given |= self.storages[node]
            if effect.changes_metadata:
                self.misdescribed.add(id(example(inputs[0])))
            for storage in {storage for i in effect.writes for storage in self.storages[inputs[i]]}:
                self._writes.setdefault(storage, []).append(node)

    @property
    def written(self) -> set[Hashable]:
        """The storages that some node writes to."""
        return set(self._writes)

    def is_written(self, node: Node) -> bool:
        """Whether some node writes to the memory of a node's result."""
        return not self.storages[node].isdisjoint(self._writes)

    def writes(self, storage: Hashable, after: int, before: float) -> Iterator[Node]:
        """The nodes between two positions that write to a storage."""
        writers = self._writes.get(storage, [])
        start = bisect_right(writers, after, key=self.order.__getitem__)
        for writer in writers[start:]:
            if self.order[writer] >= before:
                return
            yield writer

    @property
    def writes_inputs(self) -> bool:
        """Whether some node writes to an input or constant of the graph."""
        return not self.given.isdisjoint(self._writes)

    @property
    def returns_inputs(self) -> bool:
        """Whether the graph returns memory of an input or constant."""
        return any(self.storages[node] & self.given for node in self._returned)


def _traced(node: Node) -> Iterator[Hashable]:
    """The storages of the examples of a node, and of the real tensor that it names."""
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
            modes = replace(modes, blocks=(*modes.blocks, node.name))
        elif name in _EXITS:
            modes = replace(modes, blocks=modes.blocks[:-1])
        elif name.endswith("_increment_nesting") or name == "_enter_dual_level":
            modes = replace(modes, transforms=(*modes.transforms, node.name))
        elif name.endswith("_decrement_nesting") or name == "_exit_dual_level":
            modes = replace(modes, transforms=modes.transforms[:-1])
        yield node, modes
