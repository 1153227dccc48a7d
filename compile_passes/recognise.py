"""From the nodes of a graph to abstract values, by rules.

What a node is follows from its arguments, so the rules compose: each new spelling is one more of them in one of the
modules of `rules`, or only an entry in `symbols`. A node that no rule knows is a leaf.

A graph is read three times, each time once from end to end, so that the time is linear in its length:

1. *Roles*: which real tensors are used as masks (`W * m` beside `1 - m`, or beside a product with `W` itself).
2. *Masks and weights*, by the rules for these.
3. *Layers*: products of x and a weight, activations, terms and sums. This is done only if some product has a masked
   weight, and only with the weights that are masked somewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from .mutation import Effects, is_repeatable
from .shapes import dims, dtype_of, is_matrix, repeated, requires_grad, same_shape, slice_of, tensor_example
from .symbols import Call, as_call, symbol_of
from .values import Binary, Bundle, Carrier, Levels, Mask, Product, Scalar, Value, Weighted, slice_key

Rule = Callable[["Recogniser", Node, Call], Value]
"""From a node and the call it is to the value of the node; None where the rule knows none. A rule reads shapes by the
functions of `shapes`, so that it adds no guard.
"""

_WEIGHT_RULES: dict[str, list[Rule]] = {}
_LAYER_RULES: dict[str, list[Rule]] = {}


def weight_rule(*symbols: str) -> Callable[[Rule], Rule]:
    """Add a rule that tells masks and weights. Of several rules for a symbol the first that knows a value has it."""
    return _register(_WEIGHT_RULES, symbols)


def layer_rule(*symbols: str) -> Callable[[Rule], Rule]:
    """Add a rule that tells what is made of masked weights."""
    return _register(_LAYER_RULES, symbols)


def _register(rules: dict[str, list[Rule]], symbols: tuple[str, ...]) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for symbol in symbols:
            rules.setdefault(symbol, []).append(function)
        return function

    return register


class RuleError(Exception):
    """A rule raised an error at a node, which is a bug of the rule."""

    def __init__(self, node: Node, rule: Rule) -> None:
        super().__init__(f"rule `{rule.__name__}` at node `{node.format_node()}`")


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
        self._masks = set(_keys_of_masks(graph, self))
        for node in graph.nodes:
            self._values[node] = self._evaluate(node, _WEIGHT_RULES, self._leaf)
        self.masked_weights = frozenset(_keys_of_masked_weights(graph, self))
        """The keys of the weights that stand masked in some product."""
        if self.masked_weights:
            for node in graph.nodes:
                if not isinstance(self._values[node], (Scalar, Levels, Binary)):
                    self._values[node] = self._evaluate(node, _LAYER_RULES, self._values.get)

    def value(self, argument: Any) -> Value:
        """What is known of an argument of a node: of another node, or of a number."""
        if isinstance(argument, Node):
            return self._values.get(argument)
        return Scalar(float(argument)) if isinstance(argument, (bool, int, float)) else None

    def key(self, argument: Any) -> Hashable:
        """Equal for arguments that hold the same value, and the same gradient, by construction."""
        if isinstance(argument, (tuple, list)):
            return tuple(self.key(item) for item in argument)
        if not isinstance(argument, Node):
            return (type(argument).__name__, repr(argument))
        return self._keys[argument]

    def _intern(self, node: Node) -> Hashable:
        structure: Hashable
        if node.op == "get_attr":
            structure = ("get_attr", str(node.target))
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
        """Whether the graph writes to what a node reads or makes, so that its expression does not tell its value."""
        return any(self.effects.is_written(n) for n in (node, *node.all_input_nodes))

    def _evaluate(self, node: Node, rules: dict[str, list[Rule]], otherwise: Callable[[Node], Value]) -> Value:
        call = as_call(node)
        if call is not None:
            for known in rules.get(call.symbol, ()):
                try:
                    value = known(self, node, call)
                except Exception as error:
                    raise RuleError(node, known) from error
                if value is not None:
                    return value
        return otherwise(node)

    def _leaf(self, node: Node) -> Value:
        """A node of which no rule knows more: a mask by its dtype, by its values where they are constant, or by its use."""
        key = self.key(node)
        if dtype_of(node) is torch.bool:
            return Binary(Mask(node, key, "bool"))
        constant = self._constants.get(node)
        if constant is not None and not self.effects.is_written(node):
            if constant.dim() == 0:
                return Scalar(float(constant))
            if constant.dim() in (2, 3) and _is_binary(constant[:1]) and _is_binary(constant):
                return Binary(Mask(node, key, "constant"))
        return self.unproved(node) if _stack_key(key) in self._masks and dims(node) in (1, 2, 3) else None

    def unproved(self, node: Node) -> Binary:
        """A real tensor that is used like a mask though nothing proves it binary."""
        key, trained = self.key(node), requires_grad(node)
        mask = Mask(node, key, proof=None, carrier=Carrier(node, key) if trained else None)
        return Binary(mask, slope=(1, 1) if trained else (0, 0))

    def as_weighted(self, argument: Any) -> Weighted | None:
        """A weight, masked or not: any matrix that is no mask counts as one."""
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


# --- Roles -----------------------------------------------------------------------------------------------------------

_COMPLEMENTING = frozenset(
    {"add", "sub", "rsub", "eq", "ne", "lt", "le", "gt", "ge", "xor", "logical_xor", "logical_not"}
)
"""Operations of a mask, or of a mask and a number, that a complement is made with."""

_NUMBERS = frozenset({"ones", "zeros", "full", "tensor"})
"""Symbols of tensors that are filled with one number."""


def _keys_of_masks(graph: Graph, recogniser: Recogniser) -> Iterator[Hashable]:
    """The keys of real tensors (of whole stacks, for slices of them) that are used as masks.

    A factor of `W * m` is one if its complement is made too (`1 - m`, `m == 0`), or if the other factor alone is the
    weight of another product, or what the product is subtracted from.
    """
    factors: list[tuple[Node, Node]] = []
    complemented: set[Hashable] = set()
    bare: set[Hashable] = set()
    for node in graph.nodes:
        call = as_call(node)
        if call is None:
            continue
        nodes = [argument for argument in call.args if isinstance(argument, Node)]
        if call.symbol == "mul" and len(nodes) == 2 and all(_is_real(item) for item in nodes):
            factors.append((nodes[0], nodes[1]))
        elif call.symbol in _COMPLEMENTING:
            numbers = [item for item in nodes if symbol_of(item) in _NUMBERS]
            if len(nodes) - len(numbers) == 1:
                complemented.update(_stack_key(recogniser.key(item)) for item in nodes if item not in numbers)
        if call.symbol == "sub" and len(nodes) == 2:
            bare.add(recogniser.key(nodes[0]))
        if (weight := weight_operand(call)) is not None:
            bare.add(recogniser.key(weight))
    for pair in factors:
        keys = [_stack_key(recogniser.key(item)) for item in pair]
        marked = [key in complemented and key not in bare for key in keys]
        if not any(marked) and same_shape(*pair):
            marked = [keys[1 - i] in bare and keys[i] not in bare for i in (0, 1)]
        if marked.count(True) == 1:
            yield keys[marked.index(True)]


def _is_real(node: Node) -> bool:
    return dims(node) in (1, 2, 3) and dtype_of(node) is not torch.bool


def _stack_key(key: Hashable) -> Hashable:
    """The key of the stack of which a key is a slice's, or the key itself."""
    return key[1] if isinstance(key, tuple) and key[0] == "at" else key


_TRANSPOSING = frozenset({"t", "mT", "transpose", "permute", "getattr", "unsqueeze"})


def weight_operand(call: Call) -> Node | None:
    """The weight of a product of x and a weight, before it is transposed."""
    position = {"linear": 1, "inner": 1, "matmul": 1, "addmm": 2}.get(call.symbol)
    weight = None if position is None else call.args[position]
    while (inner := as_call(weight)) is not None and inner.symbol in _TRANSPOSING:
        weight = inner.args[0]
    return weight if isinstance(weight, Node) else None


def _keys_of_masked_weights(graph: Graph, recogniser: Recogniser) -> Iterator[Hashable]:
    """The keys of the weights that stand masked in a product, or whose product is masked by channels."""
    for node in graph.nodes:
        call = as_call(node)
        if call is None:
            continue
        operands = call.args[1] if call.symbol == "einsum" else (weight_operand(call),)
        for operand in operands:
            yield from _masked_keys(recogniser, recogniser.value(operand), operand)
        if call.symbol == "einsum" and any(isinstance(recogniser.value(item), Binary) for item in operands):
            yield from (recogniser.key(item) for item in operands if is_matrix(item))
        if call.symbol == "mul":
            for factor, other in (call.args, reversed(call.args)):
                inner = as_call(other)
                weight = None if inner is None else weight_operand(inner)
                if weight is not None and isinstance(recogniser.value(factor), Binary):
                    yield recogniser.key(weight)


def _masked_keys(recogniser: Recogniser, value: Value, node: Any) -> Iterator[Hashable]:
    if isinstance(value, Bundle):
        for item in value.items:
            yield from _masked_keys(recogniser, item, node)
    elif isinstance(value, Weighted) and value.factor is not None:
        yield recogniser.key(value.weight)
    elif isinstance(value, Product):
        yield from (recogniser.key(item) for item in (value.a, value.b))
