"""The evaluation of a graph: it gives each node an abstract value, by rules.

The value of a node follows from its arguments, so the rules compose: a new spelling is one more rule in a module of
`rules`, or only an entry in the table of `symbols`. A node that no rule knows is a leaf.

A graph is read in three steps. Each goes over the nodes once, so the time is linear in the length of the graph:

1. *Roles* (`roles.py`): which real tensors are used as masks.
2. *Masks and weights* (`rules.WEIGHT_RULES`).
3. *Layers* (`rules.LAYER_RULES`): products of x and a weight, activations, terms and sums. This step is skipped if no
   weight is masked, and it looks only at weights that are masked somewhere in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.fx import Node

from .recognise import Recogniser
from .roles import keys_of_masked_weights, keys_of_masks, stack_key
from .rules import LAYER_RULES_BY_SYMBOL, WEIGHT_RULES_BY_SYMBOL, RuleError, RulesBySymbol
from .shapes import dims, dtype_of
from .symbols import as_call
from .values import Binary, Levels, Mask, Scalar, Value
from .view import View


class Evaluation(Recogniser):
    """A recogniser with the values of all nodes, computed once each."""

    def __init__(self, view: View, constants: Mapping[Node, torch.Tensor] | None = None) -> None:
        """Read the graph of a view.

        `constants` are the values of nodes of the original graph that have the same value whenever it runs.
        """
        super().__init__(view)
        graph = view.graph
        self._constants = constants or {}
        self._masks = set(keys_of_masks(graph, self))
        for node in graph.nodes:
            self._values[node] = self._evaluate(node, WEIGHT_RULES_BY_SYMBOL, self._leaf)
        self.masked_weights = frozenset(keys_of_masked_weights(graph, self))
        if self.masked_weights:
            for node in graph.nodes:
                if not isinstance(self._values[node], (Scalar, Levels, Binary)):
                    self._values[node] = self._evaluate(node, LAYER_RULES_BY_SYMBOL, self._values.get)

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
        constant = self._constants.get(self.view.origin[node]) if self.view.is_constant(node) else None
        if constant is not None:
            if constant.dim() == 0:
                return Scalar(float(constant))
            if constant.dim() in (2, 3) and _is_binary(constant[:1]) and _is_binary(constant):
                return Binary(Mask(node, key, "constant"))
        return self.unproved(node) if stack_key(key) in self._masks and dims(node) in (1, 2, 3) else None


def _is_binary(tensor: torch.Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())
