"""Evaluates a graph: the rules give each node an abstract value (`values.py`).

The value of a node follows from the values of its arguments, so the rules compose. A new spelling is one more rule in a
module of `rules`, or only an entry in the table of `symbols`. A node that no rule knows is a leaf.

A graph is read in three steps. Each step visits every node once, so the time is linear in the length of the graph:

1. *Roles*: which float and integer tensors are used as masks, and which weights they mask. Only the use of a float
   tensor tells if it is a mask or a weight, because both factors of `W * m` are float tensors.
2. *Masks and weights* (`rules.WEIGHT_RULES`). A float tensor that is the mask of a role gets a second, assumed value: a
   binary mask. The assumed value counts only where the tensor multiplies the weight of the role (`factor`).
3. *Layers* (`rules.LAYER_RULES`): products of x and a weight, activations, terms and sums. This step is skipped if no
   weight is masked, and it reads only weights that are masked somewhere in the graph.
"""

from __future__ import annotations

import hashlib
from collections import ChainMap
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from mglu_ops.tensors import bytes_of

from .recognise import Recogniser
from .report import line
from .rules import LAYER_RULES_BY_SYMBOL, WEIGHT_RULES_BY_SYMBOL
from .rules.base import RulesBySymbol
from .rules.weights import rounds_once
from .shapes import broadcasts_to, dims, dtype_of, is_given, requires_grad
from .symbols import Call, as_call, symbol_of
from .values import Binary, Bundle, Levels, Product, Scalar, Value, Weighted, first_of
from .view import View


class Evaluation(Recogniser):
    """A recogniser that has computed the value of every node."""

    def __init__(self, view: View, constants: Callable[[Node], torch.Tensor | None] = lambda _: None) -> None:
        """Read the graph of a view.

        `constants` returns the value of a node of the original graph, if the value is the same at every run; else None.
        """
        super().__init__(view)
        self.errors: list[str] = []  # errors that rules raised; a rule that fails counts as not knowing the node
        graph = view.graph
        self._constants = constants
        self._roles = frozenset(_roles_of_masks(graph, self))
        masks = {mask for _, mask in self._roles}
        nodes = list(graph.nodes)  # a copy, because rules add nodes to the graph (`Recogniser.imagine`)
        for node in nodes:
            value = self._values[node] = self._evaluate(node, WEIGHT_RULES_BY_SYMBOL, self._leaf)
            self.has_masks |= isinstance(value, (Binary, Levels))
            if masks:
                self._assume(node, is_mask=_stack_key(self.key(node)) in masks and dims(node) in (1, 2, 3))
        self.masked_weights = frozenset(_keys_of_masked_weights(graph, self))
        if self.masked_weights:
            for node in nodes:
                if not isinstance(self._values[node], (Scalar, Levels, Binary)):
                    self._values[node] = self._evaluate(node, LAYER_RULES_BY_SYMBOL, self._values.get)

    def _assume(self, node: Node, is_mask: bool) -> None:
        """Record that a node is assumed to be a binary mask, if it is used as a mask or computed from assumed masks.

        `is_mask` is True if the node is used as a mask.
        """
        is_known = isinstance(self._values[node], (Scalar, Levels, Binary, Bundle))
        if is_mask and not is_known and dtype_of(node) is not torch.bool:
            constant = self._constant(node)
            others = () if constant is None else constant[(constant != 0) & (constant != 1)][:1].tolist()
            self._assumed[node] = self.unproved(node, "".join(f"it holds {value:g}" for value in others))
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

        A float or integer tensor counts as a mask only where it multiplies a weight with which it forms a role.
        """
        assumed = self._assumed.get(mask) if isinstance(mask, Node) else None
        first = first_of(assumed)
        if isinstance(first, Binary) and (self.key(_original(weight)), _stack_key(first.mask.key)) in self._roles:
            return assumed
        return self.value(mask)

    def _evaluate(self, node: Node, rules: RulesBySymbol, otherwise: Callable[[Node], Value]) -> Value:
        """The value from the first rule that knows the node, or from `otherwise` if none does."""
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
                    if not isinstance(value, Binary) or not requires_grad(node) or any(value.slope):
                        return value
                    # Autograd passes a gradient of zeros through a node such as `round(m)`. So the node is a mask of
                    # its own: the operator gives it a gradient, from which autograd makes the zeros.
                    proof, rounding = value.mask.proof, value.mask.rounding
                    return self.new_mask(node, proof, rounding=rounding) if value.is_mask else None
        return otherwise(node)

    def _keeps_precision(self, node: Node, value: Value) -> bool:
        """True if every masked weight that a node reads is as precise as the node's dtype (`rounds_once`)."""
        dtype = dtype_of(node)
        if dtype is None or not isinstance(value, (Weighted, Bundle)):
            return True
        held = [(item, first_of(self.value(item))) for item in node.all_input_nodes]
        return all(rounds_once(read, item, dtype) for item, read in held if isinstance(read, Weighted))

    def _leaf(self, node: Node) -> Value:
        """The value of a node that no rule knows: a bool mask, a constant that holds only 0 and 1, or a number."""
        is_bool = dtype_of(node) is torch.bool
        constant = self._constant(node)
        if constant is not None and constant.dim() == 0 and not is_bool:
            return Scalar(constant.item())
        if constant is not None and constant.dim() in (2, 3) and _is_binary(constant[:1]) and _is_binary(constant):
            return self._constant_mask(node, constant != 0)
        return self.new_mask(node, "bool", rounding=0) if is_bool else None

    def _constant(self, node: Node) -> torch.Tensor | None:
        """The value of a node, if it is the same at every run of the graph."""
        return self._constants(self.view.origin[node]) if self.view.is_constant(node) else None

    def _constant_mask(self, node: Node, bits: torch.Tensor) -> Binary:
        """A mask with known values. Two nodes with equal values, or with M and 1 - M, get the same mask."""
        first = bits.flatten()[:1]
        inverted = bool(first.any())
        digest = hashlib.sha256(bytes_of((bits ^ first).contiguous())).hexdigest()
        return self.new_mask(node, "constant", rounding=0, same_as=("constant", digest), inverted=inverted)


def _is_binary(tensor: torch.Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())


# --- Roles -----------------------------------------------------------------------------------------------------------

_NUMBERS = frozenset({"ones", "zeros", "full", "tensor"})  # symbols of calls that make a tensor filled with one number

_ARITHMETIC = frozenset(
    (
        *("add", "sub", "rsub", "scaled_add", "scaled_sub", "neg", "mul", "div", "rounded_div"),
        *("pow", "square", "abs", "xor", "to", "alias", "detach"),
    )
)

_LOGIC = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_xor", "not"})
"""Symbols of comparisons and logical operations, whose result counts as a function of the operand, as in `_ARITHMETIC`.

An operation that makes a mask, such as `round` of a sigmoid, is in neither set: its result counts as the mask itself.
"""

Role = tuple[Hashable, Hashable]
"""The key of a weight, and the key of the float or integer tensor that masks it.

If that tensor is a slice of a stack, the key is the stack's.
"""


def _roles_of_masks(graph: Graph, recogniser: Recogniser) -> Iterator[Role]:
    """The float and integer tensors that are used as masks, each with the weight that it masks.

    A factor of a weight is a function of some tensor m, for example `1 - m`. The tensor m is a mask of the weight if
    one of three conditions holds:

    - Two functions of m multiply the weight, and at least one of them is arithmetic. (Two comparisons, such as
      `logits > 0` and `logits > 1`, make two masks of their own.)
    - Two functions of m multiply the weight, one of them compares `1 - m`, and m is an input or attribute of the graph.
    - One arithmetic function of m multiplies the weight, and the unmasked weight is an operand of another product, or
      of a difference with the masked weight.

    Two slices of one stack also count as two functions of the stack, as in a layer with many masks. Stacked weights of
    experts that share a mask are excluded, because otherwise the stack of weights would count as a stack of masks.
    """
    bare = set(_keys_of_bare_weights(graph, recogniser))
    functions: dict[Role, set[Hashable]] = {}
    roots_of_weights: dict[Hashable, Hashable] = {}
    arithmetic: set[Role] = set()
    for weight, factor in _masked_products(graph):
        root, weight_key = _root(factor), recogniser.key(weight)
        key = recogniser.key(root.node)
        if recogniser.key(factor) in bare or not _is_real(root.node):
            continue
        functions.setdefault((weight_key, key), set()).add(recogniser.key(factor))
        roots_of_weights[weight_key] = recogniser.key(_root(weight).node)
        if weight_key in bare and root.is_arithmetic and broadcasts_to(factor, weight):
            yield weight_key, _stack_key(key)
        if root.is_arithmetic or (root.is_complemented and is_given(root.node)):
            arithmetic.add((weight_key, _stack_key(key)))
    roles = set(_of_several_functions(functions, arithmetic))
    yield from roles
    masks = {mask for _, mask in roles}
    functions_of_stacks: dict[Role, set[Hashable]] = {}
    for (weight_key, key), factors in functions.items():
        if _stack_key(key) in masks or _stack_key(roots_of_weights[weight_key]) not in masks:
            functions_of_stacks.setdefault((weight_key, _stack_key(key)), set()).update(factors)
    yield from _of_several_functions(functions_of_stacks, arithmetic)


def _of_several_functions(functions: Mapping[Role, set[Hashable]], arithmetic: Collection[Role]) -> Iterator[Role]:
    """The roles in which several functions of one tensor multiply a weight, at least one of them arithmetic.

    Args:
        functions: the keys of the functions, for each weight and tensor.
        arithmetic: the pairs of a weight and a tensor (or its stack) for which one of the functions is arithmetic.
    """
    for (weight_key, key), factors in functions.items():
        role = (weight_key, _stack_key(key))
        if len(factors) > 1 and role in arithmetic and _stack_key(weight_key) != role[1]:
            yield role


def _masked_products(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """`(weight, factor)` for the calls that may mask a weight, such as `mul` (in both orders) and `where`.

    A copy of a tensor counts as the tensor.
    """
    for node in graph.nodes:
        call = as_call(node)
        if call is None or call.symbol not in ("mul", "where", "masked_fill", "index_put", "einsum"):
            continue
        nodes = node.all_input_nodes
        weights = [item for item in nodes if dtype_of(item) is not torch.bool]
        factors = [item for item in nodes if dtype_of(item) is torch.bool] if call.symbol == "where" else nodes
        for weight, factor in ((a, b) for a in weights for b in factors if a is not b):
            yield from ((_original(weight), _original(part)) for part in _parts(factor))


def _original(weight: Any) -> Any:
    """The tensor that a node copies, directly or through other copies; the node itself if it is not a copy."""
    while (call := as_call(weight)) is not None and call.symbol == "alias":
        weight = call.args[0]
    return weight


def _parts(factor: Node) -> list[Node]:
    """The tensors that a factor joins, if it is a `stack` or `cat`; otherwise `[factor]`."""
    call = as_call(factor)
    if call is None or call.symbol not in ("stack", "cat") or not isinstance(call.args[0], (list, tuple)):
        return [factor]
    return [item for item in call.args[0] if isinstance(item, Node)]


def _keys_of_bare_weights(graph: Graph, recogniser: Recogniser) -> Iterator[Hashable]:
    """The keys of weights that are used unmasked: in a product with x, or in a sum such as `W - W * m`."""
    for node in graph.nodes:
        call = as_call(node)
        if call is None:
            continue
        operands = call.args[1] if call.symbol == "einsum" else (_weight_operand(call),)
        yield from (recogniser.key(_original(item)) for item in operands if dims(item) in (2, 3))
        if call.symbol in ("add", "sub"):
            for a, b in (call.args, reversed(call.args)):
                inner = as_call(b)
                inner = as_call(inner.args[0]) if inner is not None and inner.symbol == "neg" else inner
                if inner is not None and inner.symbol == "mul":
                    factors = [recogniser.key(_original(item)) for item in inner.args]
                    yield from {recogniser.key(_original(a))}.intersection(factors)


@dataclass(frozen=True)
class _Root:
    """The tensor that a factor is a function of, with a description of the function."""

    node: Node
    is_arithmetic: bool  # True if the function has no comparison
    is_complemented: bool  # True if the function compares 1 minus the tensor


def _root(factor: Node) -> _Root:
    is_arithmetic, is_complemented = dtype_of(factor) is not torch.bool, False
    while True:
        call = as_call(factor)
        if call is None or call.symbol not in (*_ARITHMETIC, *_LOGIC):
            break
        if call.symbol in ("to", "alias"):
            nodes = list(call.args)
        else:
            nodes = [item for item in factor.all_input_nodes if symbol_of(item) not in _NUMBERS]
        if len(nodes) != 1:
            break
        subtracts_from_1 = call.symbol in ("sub", "rsub") and 1 in call.args
        is_complemented = subtracts_from_1 or (is_complemented and call.symbol not in _LOGIC)
        (factor,) = nodes
        is_arithmetic = is_arithmetic and dtype_of(factor) is not torch.bool
    return _Root(factor, is_arithmetic, is_complemented)


def _is_real(node: Node) -> bool:
    return dims(node) in (1, 2, 3) and dtype_of(node) is not torch.bool


def _stack_key(key: Hashable) -> Hashable:
    """The key of the stack, given the key of one of its slices; any other key unchanged."""
    return key[1] if isinstance(key, tuple) and key[0] == "at" else key


# --- Masked weights --------------------------------------------------------------------------------------------------

_TRANSPOSING = frozenset({"t", "mT", "transpose", "permute", "getattr", "unsqueeze"})


def _weight_operand(call: Call) -> Node | None:
    """The weight in a product of x and a weight, before it is transposed; None for other calls."""
    position = {"linear": 1, "inner": 1, "matmul": 1, "grouped_mm": 1, "addmm": 2}.get(call.symbol)
    weight = None if position is None else call.args[position]
    while (inner := as_call(weight)) is not None and inner.symbol in _TRANSPOSING:
        weight = inner.args[0]
    return weight if isinstance(weight, Node) else None


def _keys_of_masked_weights(graph: Graph, recogniser: Recogniser) -> Iterator[Hashable]:
    """The keys of masked weights, and of each weight W in a product that is masked afterwards: `F.linear(x, W) * m`."""
    for node in graph.nodes:
        value = recogniser.value(node)
        if isinstance(value, (Bundle, Weighted)):
            yield from _masked_keys(recogniser, value)
        call = as_call(node)
        if call is None:
            continue
        operands = call.args[1] if call.symbol == "einsum" else (_weight_operand(call),)
        for operand in operands:
            yield from _masked_keys(recogniser, recogniser.value(operand))
        if call.symbol == "mul":
            for factor, other in (call.args, reversed(call.args)):
                inner = as_call(other)
                weight = None if inner is None else _weight_operand(inner)
                if weight is not None and isinstance(recogniser.factor(factor, weight), Binary):
                    yield recogniser.key(weight)


def _masked_keys(recogniser: Recogniser, value: Value) -> Iterator[Hashable]:
    for item in value.items if isinstance(value, Bundle) else (value,):
        if isinstance(item, Weighted) and item.factor is not None:
            yield recogniser.key(item.weight)
        elif isinstance(item, Product):
            yield from map(recogniser.key, item.weights)
