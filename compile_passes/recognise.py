"""From the nodes of a graph to abstract values, by rules.

What a node is follows from its arguments and never from its users, so the rules compose: each new spelling is one
more of them in one of the modules of rules (all of which `rules` brings), or only an entry in `symbols`. A node that no
rule knows is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from .mutation import Effects
from .symbols import Call, as_call, dims, is_matrix, repeated, requires_grad, slice_of, tensor_example
from .values import Binary, Carrier, Mask, Scalar, Value, Weighted, slice_key

_UNREPEATABLE = ("dropout", "empty")
"""Symbols of calls whose result their arguments do not tell."""

Rule = Callable[["Recogniser", Node, Call], Value]
"""From a node, the call it is, and the values of its arguments, to the value of the node; None where it knows none."""

_RULES: dict[str, list[Rule]] = {}


def rule(*symbols: str) -> Callable[[Rule], Rule]:
    """Add a rule for calls of `symbols`. Of several rules the first that knows a value has it."""

    def register(function: Rule) -> Rule:
        for symbol in symbols:
            _RULES.setdefault(symbol, []).append(function)
        return function

    return register


class Recogniser:
    """The values of the nodes of one graph, computed once each."""

    def __init__(self, graph: Graph, constants: Mapping[Node, torch.Tensor] | None = None) -> None:
        """`constants`: the values of nodes that hold them whenever the graph runs."""
        self._values: dict[Node, Value] = {}
        self._keys: dict[Node, Hashable] = {}
        self._interned: dict[Hashable, int] = {}
        self._constants = constants or {}
        self.effects = Effects(graph)
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
        return self._keys[argument]

    def _intern(self, node: Node) -> Hashable:
        call = as_call(node)
        structure: Hashable
        if node.op == "get_attr":
            structure = ("get_attr", str(node.target))
        elif call is None or call.symbol in _UNREPEATABLE or self._is_mutable(node):
            structure = ("leaf", node.name)
        elif (found := slice_of(node)) is not None and found[1] == 0 and requires_grad(found[0]) == requires_grad(node):
            return slice_key(self.key(found[0]), found[2])
        else:
            kwargs = tuple(sorted((name, self.key(value)) for name, value in call.kwargs.items()))
            dtype = getattr(tensor_example(node), "dtype", None)
            structure = (call.symbol, str(node.target), dtype, requires_grad(node), self.key(call.args), kwargs)
        return ("node", self._interned.setdefault(structure, len(self._interned)))

    def _is_mutable(self, node: Node) -> bool:
        """Whether the graph writes to what a node reads or makes, so that its expression does not tell its value."""
        return any(self.effects.is_written(n) for n in (node, *node.all_input_nodes))

    def _evaluate(self, node: Node) -> Value:
        call = as_call(node)
        if call is not None:
            for known in _RULES.get(call.symbol, ()):
                value = known(self, node, call)
                if value is not None:
                    return value
        return self._leaf(node)

    def _leaf(self, node: Node) -> Value:
        """A node of which no rule knows more: a mask by its dtype, or what its values are where they are constant."""
        proof = None
        if getattr(tensor_example(node), "dtype", None) is torch.bool:
            proof = "bool"
        elif (constant := self._constants.get(node)) is not None and not self.effects.is_written(node):
            if constant.dim() == 0:
                return Scalar(float(constant))
            if constant.dim() in (2, 3) and _is_binary(constant[:1]) and _is_binary(constant):
                proof = "constant"
        return None if proof is None else Binary(Mask(node, self.key(node), proof), at=(0, 1), slope=(0, 0))

    # --- Readings of leaves -----------------------------------------------------------------------------------------

    def as_weighted(self, argument: Any) -> Weighted | None:
        """A weight, masked or not: any matrix of which nothing else is known counts as one."""
        value = self.value(argument)
        if isinstance(value, Weighted):
            return value
        if value is not None:
            return None
        if is_matrix(argument):
            return Weighted(argument, None)
        base, dim = repeated(argument)
        return Weighted(base, None) if dim == 0 and is_matrix(base) and self.value(base) is None else None

    def as_unproved_mask(self, argument: Any) -> Binary | None:
        """A real matrix, or a stack of them, that is used like a mask (`1 - m`) though nothing proves it binary."""
        if self.value(argument) is not None or dims(argument) not in (2, 3):
            return None
        key = self.key(argument)
        carrier = Carrier(argument, key) if requires_grad(argument) else None
        return Binary(Mask(argument, key, proof=None, carrier=carrier), at=(0, 1), slope=(1, 1))


def _is_binary(tensor: torch.Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())
