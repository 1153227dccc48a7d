"""The recogniser: it gives the nodes of a graph abstract values, by rules.

The value of a node follows from its arguments, so the rules compose: a new spelling is one more rule in a module of
`rules`, or only an entry in the table of `symbols`. A node that no rule knows is a leaf.

A graph is read in three steps. Each goes over the nodes once, so the time is linear in the length of the graph:

1. *Roles* (`roles.py`): which real tensors are used as masks.
2. *Masks and weights* (`rules.WEIGHT_RULES`).
3. *Layers* (`rules.LAYER_RULES`): products of x and a weight, activations, terms and sums. This step is skipped if no
   weight is masked, and it looks only at weights that are masked somewhere in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from .mutation import Effects, is_repeatable
from .roles import keys_of_masked_weights, keys_of_masks, stack_key
from .rules import LAYER_RULES_BY_SYMBOL, WEIGHT_RULES_BY_SYMBOL, RuleError, RulesBySymbol
from .shapes import dims, dtype_of, is_matrix, repeated, requires_grad, slice_of, tensor_example
from .symbols import as_call, is_identity_dropout, symbol_of
from .values import Binary, Bundle, Carrier, Levels, Mask, Scalar, Value, Weighted, slice_key


class Recogniser:
    """The values of the nodes of one graph, computed once each."""

    def __init__(self, graph: Graph, constants: Mapping[Node, torch.Tensor] | None = None) -> None:
        """Read a graph; `constants` are the values of nodes that have the same value whenever the graph runs."""
        self._values: dict[Node, Value] = {}
        self._keys: dict[Node, Hashable] = {}
        self._interned: dict[Hashable, int] = {}
        self._constants = constants or {}
        self.effects = Effects(graph)
        for node in graph.nodes:
            self._keys[node] = self._intern(node)
        self._masks = set(keys_of_masks(graph, self))
        for node in graph.nodes:
            self._values[node] = self._evaluate(node, WEIGHT_RULES_BY_SYMBOL, self._leaf)
        self.masked_weights = frozenset(keys_of_masked_weights(graph, self))
        """The keys of the weights that some product masks."""
        if self.masked_weights:
            for node in graph.nodes:
                if not isinstance(self._values[node], (Scalar, Levels, Binary)):
                    self._values[node] = self._evaluate(node, LAYER_RULES_BY_SYMBOL, self._values.get)

    def value(self, argument: Any) -> Value:
        """The value of an argument of a node, which may be another node or a number."""
        if isinstance(argument, Node):
            return self._values.get(argument)
        return Scalar(float(argument)) if isinstance(argument, (bool, int, float)) else None

    def key(self, argument: Any) -> Hashable:
        """A key that is equal for two arguments only if they have the same value and the same gradient."""
        if isinstance(argument, (tuple, list)):
            return tuple(self.key(item) for item in argument)
        if not isinstance(argument, Node):
            return (type(argument).__name__, repr(argument))
        return self._keys[argument]

    def _intern(self, node: Node) -> Hashable:
        structure: Hashable
        if node.op == "get_attr":
            structure = ("get_attr", str(node.target))
        elif (same := _same_tensor(node)) is not None and not self.is_mutable(node):
            return self.key(same)
        elif not is_repeatable(node) or self.is_mutable(node):
            structure = ("leaf", node.name)
        elif (found := slice_of(node)) is not None and found[1] == 0 and requires_grad(found[0]) == requires_grad(node):
            return slice_key(self.key(found[0]), found[2])
        else:
            kwargs = tuple(sorted((name, self.key(value)) for name, value in node.kwargs.items()))
            target = symbol_of(node) or str(node.target)
            example = tensor_example(node)
            device = None if example is None else str(example.device)
            structure = (target, dtype_of(node), device, requires_grad(node), self.key(node.args), kwargs)
        return ("node", self._interned.setdefault(structure, len(self._interned)))

    def is_mutable(self, node: Node) -> bool:
        """Whether the graph writes to an input or the result of a node, so that its expression may have two values."""
        return any(self.effects.is_written(n) for n in (node, *node.all_input_nodes))

    def _evaluate(self, node: Node, rules: RulesBySymbol, otherwise: Callable[[Node], Value]) -> Value:
        """The value by the first rule that knows one."""
        call = as_call(node)
        if call is not None:
            for rule in rules.get(call.symbol, ()):
                try:
                    value = rule.function(self, node, call)
                except Exception as error:
                    raise RuleError(node, rule) from error
                if value is not None:
                    return value
        return otherwise(node)

    def _leaf(self, node: Node) -> Value:
        """The value of a node that no rule knows: a mask by its dtype, by its constant values, or by its use."""
        key = self.key(node)
        if dtype_of(node) is torch.bool:
            return Binary(Mask(node, key, "bool"))
        constant = self._constants.get(node)
        if constant is not None and not self.effects.is_written(node):
            if constant.dim() == 0:
                return Scalar(float(constant))
            if constant.dim() in (2, 3) and _is_binary(constant[:1]) and _is_binary(constant):
                return Binary(Mask(node, key, "constant"))
        return self.unproved(node) if stack_key(key) in self._masks and dims(node) in (1, 2, 3) else None

    def unproved(self, node: Node) -> Binary:
        """The value of a real tensor that is used like a mask although nothing proves that it is binary."""
        key, trained = self.key(node), requires_grad(node)
        mask = Mask(node, key, proof=None, carrier=Carrier(node, key) if trained else None)
        return Binary(mask, slope=(1, 1) if trained else (0, 0))

    def as_weighted(self, argument: Any) -> Weighted | None:
        """An argument as a weight, masked or not; any matrix that is no mask counts as a weight."""
        value = self.value(argument)
        if isinstance(value, Weighted):
            return value
        if isinstance(value, (Scalar, Levels, Binary, Bundle)):
            return None
        if is_matrix(argument):
            return Weighted(argument, None)
        base, dim = repeated(argument)
        is_repeated_weight = dim == 0 and is_matrix(base) and not isinstance(self.value(base), (Scalar, Levels, Binary))
        return Weighted(base, None) if is_repeated_weight else None


def _is_binary(tensor: torch.Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())


def _same_tensor(node: Node) -> Node | None:
    """The input that a node returns unchanged: a cast to the dtype that it has already, or a dropout of nothing."""
    call = as_call(node)
    if call is None or call.symbol not in ("to", "dropout") or not isinstance(call.args[0], Node):
        return None
    source = call.args[0]
    if call.symbol == "dropout" and not is_identity_dropout(call):
        return None
    before, after = tensor_example(source), tensor_example(node)
    if before is None or after is None or before.requires_grad != after.requires_grad:
        return None
    return source if before.dtype == after.dtype and before.device == after.device else None
