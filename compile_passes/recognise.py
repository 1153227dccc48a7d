"""From the nodes of a graph to abstract values, by rules.

What a node is follows from its arguments and never from its users, so the rules compose: each new spelling is one
more of them in `mask_rules` or `layer_rules`, or only an entry in `symbols`. A node that no rule knows is a leaf.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import Graph, Node

from . import layer_rules, mask_rules  # noqa: F401 (they register their rules)
from .mutation import mutated_storages, storages
from .rules import rules_for
from .symbols import as_call, is_matrix, requires_grad, tensor_example
from .values import Binary, Mask, Scalar, Value, Weighted


class Recogniser:
    """The values of the nodes of one graph, computed once each."""

    def __init__(self, graph: Graph) -> None:
        self._values: dict[Node, Value] = {}
        self._keys: dict[Node, int] = {}
        self._interned: dict[Hashable, int] = {}
        self._mutated = mutated_storages(graph)
        for node in graph.nodes:
            self._keys[node] = self._intern(node)
            self._values[node] = self._evaluate(node)

    def value(self, argument: Any) -> Value:
        """What is known of an argument of a node: of another node, or of a number."""
        if isinstance(argument, Node):
            return self._values[argument]
        return Scalar(float(argument)) if isinstance(argument, (bool, int, float)) else None

    def key(self, argument: Any) -> Hashable:
        """Equal for arguments that hold the same value, and the same gradient, by construction."""
        if isinstance(argument, (tuple, list)):
            return tuple(self.key(item) for item in argument)
        if not isinstance(argument, Node):
            return (type(argument).__name__, repr(argument))
        return ("node", self._keys[argument])

    def _intern(self, node: Node) -> int:
        call = as_call(node)
        structure: Hashable
        if node.op == "get_attr":
            structure = ("get_attr", str(node.target))
        elif call is None or call.symbol == "dropout" or self._is_mutable(node):
            structure = ("leaf", node.name)
        else:
            kwargs = tuple(sorted((name, self.key(value)) for name, value in call.kwargs.items()))
            dtype = getattr(tensor_example(node), "dtype", None)
            structure = (call.symbol, str(node.target), dtype, requires_grad(node), self.key(call.args), kwargs)
        return self._interned.setdefault(structure, len(self._interned))

    def _is_mutable(self, node: Node) -> bool:
        """Whether the graph writes to what a node reads or makes, so that its expression does not tell its value."""
        return self._mutated is None or any(storages(n) & self._mutated for n in (node, *node.all_input_nodes))

    def _evaluate(self, node: Node) -> Value:
        call = as_call(node)
        if call is not None:
            for rule in rules_for(call.symbol):
                value = rule(self, node, call)
                if value is not None:
                    return value
        if getattr(tensor_example(node), "dtype", None) is torch.bool:
            mask = Mask(bits=node, key=self.key(node), proof="bool")
            return Binary(mask, at=(0, 1), slope=(0, 0))
        return None

    # --- Readings of leaves -----------------------------------------------------------------------------------------

    def as_weighted(self, argument: Any) -> Weighted | None:
        """A weight, masked or not: any matrix of which nothing else is known counts as one."""
        value = self.value(argument)
        if isinstance(value, Weighted):
            return value
        return Weighted(argument, None) if value is None and is_matrix(argument) else None

    def as_unproved_mask(self, argument: Any) -> Binary | None:
        """A real matrix that is used like a mask (`1 - m`) though nothing proves that it is binary."""
        if self.value(argument) is not None or not is_matrix(argument):
            return None
        carries = argument if requires_grad(argument) else None
        mask = Mask(bits=argument, key=self.key(argument), proof=None, straight_through=carries)
        return Binary(mask, at=(0, 1), slope=(1, 1))

    def slice_of(self, node: Node) -> tuple[Node, int] | None:
        """`(stacked, i)` where `node` is `stacked[i]`, by whatever spelling."""
        call = as_call(node)
        if call is None:
            return None
        base, index = call.get(0, "input"), call.get(1, "index")
        if call.symbol == "getitem" and isinstance(index, int) and isinstance(base, Node):
            inner = as_call(base)
            if inner is not None and inner.symbol == "unbind" and inner.get(1, "dim", 0) == 0:
                base = inner.get(0, "input")
        elif call.symbol == "select" and call.get(1, "dim") == 0:
            index = call.get(2, "index")
        else:
            return None
        example = tensor_example(base)
        if example is None or example.dim() != 3 or not isinstance(index, int) or not isinstance(base, Node):
            return None
        return base, index % example.shape[0]

    def column_of(self, node: Node) -> tuple[Node, int] | None:
        """`(tensor, i)` where `node` is `tensor[..., i : i + 1]`."""
        call = as_call(node)
        if call is None or call.symbol != "getitem" or not isinstance(call.args[0], Node):
            return None
        base, index = call.args
        example = tensor_example(base)
        if example is None or not isinstance(index, tuple) or not isinstance(index[-1], slice):
            return None
        whole = all(item is Ellipsis or item == slice(None) for item in index[:-1])
        reaches_last = Ellipsis in index or len(index) == example.dim()
        start, stop, step = index[-1].start, index[-1].stop, index[-1].step
        is_one = isinstance(start, int) and start >= 0 and stop == start + 1 and step in (None, 1)
        return (base, start) if whole and reaches_last and is_one else None
