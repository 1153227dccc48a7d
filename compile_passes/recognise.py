"""The recogniser: the keys of the nodes of a graph, their abstract values, and the questions that rules ask about them.

The first argument of each rule is a recogniser. `evaluate.py` asks the rules and keeps the values that they return.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from typing import Any

from torch.fx import Node

from .shapes import holds_experts, is_matrix, repeated, requires_grad, slice_of, tensor_example
from .symbols import Call, as_call, is_identity_dropout
from .values import Binary, Bundle, Carrier, Levels, Mask, Scalar, Value, Weighted, slice_key
from .view import View


class Recogniser:
    """The keys and values of the nodes of one graph."""

    def __init__(self, view: View) -> None:
        """Give each node of the graph of a view a key, but no value yet."""
        self._values: MutableMapping[Node, Value] = {}
        self._assumed: dict[Node, Value] = {}
        self._keys: dict[Node, Hashable] = {}
        self._interned: dict[Hashable, int] = {}
        self.masked_weights: frozenset[Hashable] = frozenset()
        """The keys of the weights that some product masks."""
        self.looked_through: set[Node] = set()
        """The nodes that rules have looked through (`through`) to a value."""
        self._looking: list[Node] = []
        self.view = view
        for node in view.graph.nodes:
            self._keys[node] = self._intern(node)

    def value(self, argument: Any) -> Value:
        """The value of an argument of a node, which may be another node or a number."""
        if isinstance(argument, Node):
            return self._values.get(argument)
        return Scalar(float(argument)) if isinstance(argument, (bool, int, float)) else None

    def factor(self, mask: Any, weight: Any) -> Value:
        """The value of `mask` as a factor of `weight`."""
        return self.value(mask)

    def key(self, argument: Any) -> Hashable:
        """A key that is equal for two arguments only if they have the same value and the same gradient."""
        if isinstance(argument, (tuple, list)):
            return tuple(self.key(item) for item in argument)
        if not isinstance(argument, Node):
            return (type(argument).__name__, repr(argument))
        return self._keys[argument]

    def _intern(self, node: Node) -> Hashable:
        """The key of a node: what it calls, with all arguments and defaults, on which values, and under which modes.

        The values of a view never change, so the key of an argument identifies the value that the node has read. Two
        functions are equal where the table of spellings reads both as one `Call`.
        """
        if node.op == "get_attr":
            return ("node", self._interned.setdefault(("get_attr", str(node.target)), len(self._interned)))
        if (same := _same_tensor(node)) is not None:
            return self.key(same)
        if not self.view.is_repeatable(node):
            return ("node", self._interned.setdefault(("leaf", node.name), len(self._interned)))
        if (found := slice_of(node)) is not None and found[1] == 0 and requires_grad(found[0]) == requires_grad(node):
            return slice_key(self.key(found[0]), found[2])
        call, example = as_call(node), tensor_example(node)
        named = tuple(sorted((name, self.key(value)) for name, value in node.kwargs.items()))
        identity: Hashable = (node.op, node.target, self.key(node.args), named)
        if call is not None and call.is_whole and example is not None and not example.is_complex():
            identity = (call.symbol, self.key(call.args))
        kind = None if example is None else (example.dtype, str(example.device), requires_grad(node))
        modes = self.view.modes(node)
        structure = (identity, kind, modes.blocks, modes.transforms)
        return ("node", self._interned.setdefault(structure, len(self._interned)))

    def through(self, argument: Any) -> Call | None:
        """The call behind an argument, for a rule that looks through it; its node then belongs to the site."""
        call = as_call(argument)
        if call is not None:
            self._looking.append(argument)
        return call

    def unproved(self, node: Node) -> Binary:
        """The value of a real tensor that is used like a mask although nothing proves that it is binary."""
        key, trained = self.key(node), requires_grad(node)
        mask = Mask(node, key, proof=None, carrier=Carrier(node, key) if trained else None)
        return Binary(mask, slope=(1, 1) if trained else (0, 0))

    def as_weighted(self, argument: Any) -> Weighted | None:
        """An argument as a weight, masked or not.

        Any matrix that is not a mask counts as a weight, and any other tensor of three dimensions as the weights of
        experts, unless it repeats a matrix.
        """
        value = self.value(argument)
        if isinstance(value, Weighted):
            return value
        if isinstance(value, (Scalar, Levels, Binary, Bundle)):
            return None
        if is_matrix(argument):
            return Weighted(argument, None)
        base, dim = repeated(argument)
        if dim == 0:
            is_weight = is_matrix(base) and not isinstance(self.value(base), (Scalar, Levels, Binary))
            return Weighted(base, None) if is_weight else None
        return Weighted(argument, None) if holds_experts(argument) else None


def _same_tensor(node: Node) -> Node | None:
    """The input that a node returns unchanged, as a cast to the same dtype does, or dropout in eval mode."""
    call = as_call(node)
    if call is None or call.symbol not in ("to", "dropout") or not isinstance(call.args[0], Node):
        return None
    source = call.args[0]
    if call.symbol == "dropout" and not is_identity_dropout(call):
        return None
    before, after = tensor_example(source), tensor_example(node)
    if before is None or after is None or requires_grad(source) != requires_grad(node):
        return None
    return source if before.dtype == after.dtype and before.device == after.device else None
