"""From the nodes of a graph to abstract values, by rules.

What a node is follows from its arguments, so the rules compose: each new spelling is one more of them in one of the
modules of `rules`, or only an entry in `symbols`. A node that no rule knows is a leaf.

A graph is read in three steps, each from end to end, so that the time is linear in its length:

1. *Roles*: which real tensors are used as masks (`W * m` beside `1 - m`, or beside a product with `W` itself).
2. *Masks and weights*, by the rules for these.
3. *Layers*: products of x and a weight, activations, terms and sums. This is done only if some product has a masked
   weight, and only with the weights that are masked somewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .mutation import Effects, is_repeatable
from .shapes import broadcasts_to, dims, dtype_of, is_matrix, repeated, requires_grad, slice_of, tensor_example
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
        """A node of which no rule knows more: a mask by its dtype, by its constant values, or by its use."""
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


def _same_tensor(node: Node) -> Node | None:
    """The input that a node gives back as it is: a cast to the dtype that it has, or a dropout that drops nothing."""
    call = as_call(node)
    if call is None or call.symbol not in ("to", "dropout") or not isinstance(call.args[0], Node):
        return None
    source = call.args[0]
    if call.symbol == "dropout" and not drops_nothing(call):
        return None
    before, after = tensor_example(source), tensor_example(node)
    if before is None or after is None or before.requires_grad != after.requires_grad:
        return None
    return source if before.dtype == after.dtype and before.device == after.device else None


def drops_nothing(call: Call) -> bool:
    """Whether a dropout is the identity: in eval mode, or with a probability of 0."""
    _, probability, training = call.args
    return training is False or (isinstance(probability, (int, float)) and probability == 0)


# --- Roles -----------------------------------------------------------------------------------------------------------

_NUMBERS = frozenset({"ones", "zeros", "full", "tensor"})
"""Symbols of tensors that are filled with one number."""

_ARITHMETIC = frozenset(
    {
        *("add", "sub", "rsub", "scaled_add", "neg", "mul", "div", "rounded_div", "pow", "square", "abs", "xor"),
        *("to", "alias", "detach"),
    }
)
_LOGIC = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_xor", "not"})
"""Operations of one mask, or of one and a number, that make functions of it. (What makes a mask of something else, as
`round` does of a sigmoid, is not among them: the tensor is then the result.)
"""


def _keys_of_masks(graph: Graph, recogniser: Recogniser) -> Iterator[Hashable]:
    """The keys of real tensors (of whole stacks, for slices of them) that are used as masks.

    What a weight is multiplied with, or chosen by, is a function of some tensor, `1 - m` of m. The tensor is used as a
    mask if a weight is multiplied with two functions of it of which one is of arithmetic, since comparisons alone are
    masks of their own (`logits > 0`, `logits > 1`). An input or attribute of the graph is one too if it is compared
    after it was taken from 1. And it is one if a weight is multiplied with one function of it, and the weight itself
    stands in another product, or in a difference with that one.
    """
    bare = set(_keys_of_bare_weights(graph, recogniser))
    functions: dict[tuple[Hashable, Hashable], set[Hashable]] = {}
    arithmetic: set[Hashable] = set()
    for weight, factor in _masked_products(graph):  # neither of them a copy
        root = _root(factor)
        key = _stack_key(recogniser.key(root.node))
        if recogniser.key(factor) in bare or not _is_real(root.node):
            continue
        functions.setdefault((_stack_key(recogniser.key(weight)), key), set()).add(recogniser.key(factor))
        if recogniser.key(weight) in bare and root.is_arithmetic and broadcasts_to(factor, weight):
            yield key
        if root.is_arithmetic or (root.is_complemented and _is_given(root.node)):
            arithmetic.add(key)
    for (weight_key, key), factors in functions.items():
        if len(factors) > 1 and key in arithmetic and weight_key != key:
            yield key


def _is_given(node: Node) -> bool:
    """Whether a node is an input or attribute of the graph, or a slice of one."""
    found = slice_of(node)
    return node.op in ("placeholder", "get_attr") if found is None else _is_given(found[0])


def _masked_products(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """`(weight, factor)` of products, both ways round, and of choices by a condition."""
    for node in graph.nodes:
        call = as_call(node)
        if call is None or call.symbol not in ("mul", "where", "masked_fill", "index_put", "einsum"):
            continue
        nodes = [item for item in node.all_input_nodes if dims(item) in (1, 2, 3)]
        if call.symbol in ("where", "masked_fill", "index_put"):
            pairs = [
                (a, b) for a in nodes for b in nodes if dtype_of(b) is torch.bool and dtype_of(a) is not torch.bool
            ]
        else:
            pairs = [(a, b) for a in nodes for b in nodes if a is not b]
        for weight, factor in pairs:
            yield from ((_source(weight), _source(part)) for part in _parts(factor))


def _source(weight: Node) -> Node:
    """What a copy is a copy of."""
    while (call := as_call(weight)) is not None and call.symbol == "alias" and isinstance(call.args[0], Node):
        weight = call.args[0]
    return weight


def _parts(factor: Node) -> list[Node]:
    """The tensors that a factor is stacked from, or the factor alone."""
    call = as_call(factor)
    if call is None or call.symbol not in ("stack", "cat") or not isinstance(call.args[0], (list, tuple)):
        return [factor]
    return [item for item in call.args[0] if isinstance(item, Node)]


def _keys_of_bare_weights(graph: Graph, recogniser: Recogniser) -> Iterator[Hashable]:
    """The keys of weights that stand in a product as they are, or in a sum with what they are multiplied with."""
    for node in graph.nodes:
        call = as_call(node)
        if call is None:
            continue
        operands = call.args[1] if call.symbol == "einsum" else (weight_operand(call),)
        yield from (recogniser.key(item) for item in operands if is_matrix(item))
        if call.symbol in ("add", "sub"):
            for one, other in (call.args, reversed(call.args)):
                inner = as_call(other)
                inner = as_call(inner.args[0]) if inner is not None and inner.symbol == "neg" else inner
                if isinstance(one, Node) and inner is not None and inner.symbol == "mul":
                    factors = [recogniser.key(_source(item)) for item in inner.args if isinstance(item, Node)]
                    yield from {recogniser.key(one)}.intersection(factors)


@dataclass(frozen=True)
class _Root:
    """The tensor of which a factor is a function; whether that function is one of arithmetic, without comparisons; and
    whether it takes the tensor from 1 before it compares it.
    """

    node: Node
    is_arithmetic: bool
    is_complemented: bool


def _root(factor: Node) -> _Root:
    is_arithmetic, is_complemented = dtype_of(factor) is not torch.bool, False
    while True:
        call = as_call(factor)
        if call is None or call.symbol not in (*_ARITHMETIC, *_LOGIC):
            break
        if call.symbol in ("to", "alias"):
            nodes = [call.args[0]]
        else:
            nodes = [item for item in factor.all_input_nodes if symbol_of(item) not in _NUMBERS]
        if len(nodes) != 1 or not isinstance(nodes[0], Node):
            break
        takes_from_1 = call.symbol in ("sub", "rsub") and any(type(n) in (int, float) and n == 1 for n in call.args)
        is_complemented = takes_from_1 or (is_complemented and call.symbol not in _LOGIC)
        (factor,) = nodes
        is_arithmetic = is_arithmetic and dtype_of(factor) is not torch.bool
    return _Root(factor, is_arithmetic, is_complemented)


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
    """The keys of the matrices that are masked, and of the weights whose product is masked by channels."""
    for node in graph.nodes:
        value = recogniser.value(node)
        if isinstance(value, (Bundle, Weighted)):
            yield from _masked_keys(recogniser, value)
        call = as_call(node)
        if call is None:
            continue
        operands = call.args[1] if call.symbol == "einsum" else (weight_operand(call),)
        for operand in operands:
            yield from _masked_keys(recogniser, recogniser.value(operand))
        if call.symbol == "einsum" and any(isinstance(recogniser.value(item), Binary) for item in operands):
            yield from (recogniser.key(item) for item in operands if is_matrix(item))
        if call.symbol == "mul":
            for factor, other in (call.args, reversed(call.args)):
                inner = as_call(other)
                weight = None if inner is None else weight_operand(inner)
                if weight is not None and isinstance(recogniser.value(factor), Binary):
                    yield recogniser.key(weight)


def _masked_keys(recogniser: Recogniser, value: Value) -> Iterator[Hashable]:
    if isinstance(value, Bundle):
        for item in value.items:
            yield from _masked_keys(recogniser, item)
    elif isinstance(value, Weighted) and value.factor is not None:
        yield recogniser.key(value.weight)
    elif isinstance(value, Product):
        yield from (recogniser.key(item) for item in (value.a, value.b))
