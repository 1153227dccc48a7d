"""The evaluation of a graph: it gives each node an abstract value, by rules.

The value of a node follows from its arguments, so the rules compose: a new spelling is one more rule in a module of
`rules`, or only an entry in the table of `symbols`. A node that no rule knows is a leaf.

A graph is read in three steps. Each goes over the nodes once, so the time is linear in the length of the graph:

1. *Roles* (`roles.py`): which real tensors are used as masks, and which weights they mask.
2. *Masks and weights* (`rules.WEIGHT_RULES`). A real tensor with the role of a mask has a second value, which holds
   only as a factor of its weights (`factor`).
3. *Layers* (`rules.LAYER_RULES`): products of x and a weight, activations, terms and sums. This step is skipped if no
   weight is masked, and it looks only at weights that are masked somewhere in the graph.
"""

from __future__ import annotations

import hashlib
from collections import ChainMap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from mglu_ops.tensors import bytes_of

from .recognise import Recogniser
from .report import line
from .roles import keys_of_masked_weights, original, roles_of_masks, stack_key
from .rules import LAYER_RULES_BY_SYMBOL, WEIGHT_RULES_BY_SYMBOL
from .rules.rule import RulesBySymbol
from .rules.weights import rounds_once
from .shapes import dims, dtype_of, requires_grad
from .symbols import as_call
from .values import Binary, Bundle, Levels, Scalar, Value, Weighted, first_of
from .view import View


class Evaluation(Recogniser):
    """A recogniser with the values of all nodes, computed once each.

    Attributes:
        errors: what rules have raised. A rule that raises an error knows nothing of the node.
    """

    def __init__(self, view: View, constants: Callable[[Node], torch.Tensor | None] = lambda _: None) -> None:
        """Read the graph of a view.

        `constants` gives the value of a node of the original graph if it has the same value whenever it runs.
        """
        super().__init__(view)
        self.errors: list[str] = []
        graph = view.graph
        self._constants = constants
        self._roles = frozenset(roles_of_masks(graph, self))
        masks = {mask for _, mask in self._roles}
        nodes = list(graph.nodes)  # without those that rules imagine
        for node in nodes:
            value = self._values[node] = self._evaluate(node, WEIGHT_RULES_BY_SYMBOL, self._leaf)
            self.has_masks |= isinstance(value, (Binary, Levels))
            if masks:
                self._assume(node, is_mask=stack_key(self.key(node)) in masks and dims(node) in (1, 2, 3))
        self.masked_weights = frozenset(keys_of_masked_weights(graph, self))
        if self.masked_weights:
            for node in nodes:
                if not isinstance(self._values[node], (Scalar, Levels, Binary)):
                    self._values[node] = self._evaluate(node, LAYER_RULES_BY_SYMBOL, self._values.get)

    def _assume(self, node: Node, is_mask: bool) -> None:
        """Evaluate a node once more, as a function of real tensors that are used as masks, if it is one."""
        is_known = isinstance(self._values[node], (Scalar, Levels, Binary, Bundle))
        if is_mask and not is_known and dtype_of(node) is not torch.bool:
            self._assumed[node] = self.unproved(node)
        elif any(item in self._assumed for item in node.all_input_nodes):
            values, self._values = self._values, ChainMap(self._assumed, self._values)
            try:
                value = self._evaluate(node, WEIGHT_RULES_BY_SYMBOL, lambda _: None)
            finally:
                self._values = values
            if isinstance(first_of(value), Binary):
                self._assumed[node] = value

    def factor(self, mask: Any, weight: Any) -> Value:
        """The value of `mask` as a factor of `weight`.

        A real tensor is taken for a mask only where it multiplies the weights that it was found to mask.
        """
        assumed = self._assumed.get(mask) if isinstance(mask, Node) else None
        first = first_of(assumed)
        if isinstance(first, Binary) and (self.key(original(weight)), stack_key(first.mask.key)) in self._roles:
            return assumed
        return self.value(mask)

    def _evaluate(self, node: Node, rules: RulesBySymbol, otherwise: Callable[[Node], Value]) -> Value:
        """The value from the first rule that knows one, or else from `otherwise`."""
        call = as_call(node)
        if call is not None:
            for rule in rules.get(call.symbol, ()):
                self._looking.clear()
                try:
                    value = rule.function(self, node, call)
                except Exception as error:
                    self.errors.append(f"rule `{rule.name}` at `{line(node)}`: {type(error).__name__}: {error}")
                    continue
                if value is not None and self._keeps_precision(node, value):
                    self.looked_through.update(self._looking)
                    if isinstance(value, Binary) and requires_grad(node) and not any(value.slope):
                        return replace(value, zero_gradient=True)
                    return value
        return otherwise(node)

    def _keeps_precision(self, node: Node, value: Value) -> bool:
        """Whether no masked weight that a node reads was rounded to a narrower dtype than the node has."""
        dtype = dtype_of(node)
        if dtype is None or not isinstance(value, (Weighted, Bundle)):
            return True
        held = [(item, first_of(self.value(item))) for item in node.all_input_nodes]
        return all(rounds_once(one, item, dtype) for item, one in held if isinstance(one, Weighted))

    def _leaf(self, node: Node) -> Value:
        """The value of a node that no rule knows: a mask by its dtype, by its constant values, or by its use."""
        is_bool = dtype_of(node) is torch.bool
        constant = self._constants(self.view.origin[node]) if self.view.is_constant(node) else None
        if constant is not None and constant.dim() == 0 and not is_bool:
            return Scalar(constant.item())
        if constant is not None and constant.dim() in (2, 3) and _is_binary(constant[:1]) and _is_binary(constant):
            return self._constant_mask(node, constant != 0)
        return self.new_mask(node, "bool", rounding=0) if is_bool else None

    def _constant_mask(self, node: Node, bits: torch.Tensor) -> Binary:
        """A mask whose values are known: equal values are one mask, also in two tensors that hold M and 1 - M."""
        first = bits.flatten()[:1]
        inverted = bool(first.any())
        digest = hashlib.sha256(bytes_of((bits ^ first).contiguous())).hexdigest()
        return self.new_mask(node, "constant", rounding=0, same_as=("constant", digest), inverted=inverted)


def _is_binary(tensor: torch.Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())
