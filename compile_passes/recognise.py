"""The recogniser: holds a key and an abstract value (`values.py`) for each node of a graph.

Each rule receives the recogniser and asks it about nodes. `evaluate.py` calls the rules and stores the values that they
return.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from .memory import Modes
from .shapes import holds_experts, is_matrix, repeated, requires_grad, slice_of, tensor_example
from .symbols import Call, as_call, is_identity_dropout
from .values import Binary, Bundle, Carrier, Levels, Mask, Scalar, Value, Weighted, slice_key
from .view import View


class Recogniser:
    """The keys and values of the nodes of one graph."""

    def __init__(self, view: View) -> None:
        """Give a key to each node of the graph of a view. The nodes have no values yet."""
        self._values: MutableMapping[Node, Value] = {}
        self._assumed: dict[Node, Value] = {}
        self._keys: dict[Node, Hashable] = {}
        self._interned: dict[Hashable, int] = {}
        self.masked_weights: frozenset[Hashable] = frozenset()  # the keys of all weights that are masked
        self.has_masks = False  # True if the value of some node is `Binary` or `Levels`
        self.looked_through: set[Node] = set()  # nodes that rules have read by `through`; they belong to sites
        self._looking: list[Node] = []
        self._imagined: dict[Hashable, Node] = {}
        self.view = view
        for node in view.graph.nodes:
            self._keys[node] = self._intern(node)

    def value(self, argument: Any) -> Value:
        """The abstract value of an argument, which is a node or a number."""
        if isinstance(argument, Node):
            return self._values.get(argument)
        return Scalar(argument) if isinstance(argument, (bool, int, float)) else None

    def factor(self, mask: Any, weight: Any) -> Value:
        """The value of `mask` as a factor of `weight`."""
        return self.value(mask)

    def key(self, argument: Any) -> Hashable:
        """The key of an argument. Arguments with equal keys hold equal values and have equal gradients."""
        if isinstance(argument, (tuple, list)):
            return tuple(self.key(item) for item in argument)
        if not isinstance(argument, Node):
            return (type(argument).__name__, repr(argument))
        return self._keys[argument]

    def _intern(self, node: Node) -> Hashable:
        """The key of a node. It is made of the node's function, arguments (defaults included) and modes.

        The values of a view never change, so the key of an argument identifies the value that the node reads. Calls of
        different functions have equal keys if the table of spellings reads them as the same `Call`.
        """
        if node.op == "get_attr":
            return ("node", self._interned.setdefault(("get_attr", str(node.target)), len(self._interned)))
        if (same := _same_tensor(node)) is not None:
            return self.key(same)
        if not self.view.is_repeatable(node):
            return ("node", self._interned.setdefault(("leaf", node.name), len(self._interned)))
        return self._computed(node, self.view.modes(node))

    def _computed(self, node: Node, modes: Modes) -> Hashable:
        """The key of a node that computes a value under some modes."""
        if (found := slice_of(node)) is not None and found[1] == 0 and requires_grad(found[0]) == requires_grad(node):
            return slice_key(self.key(found[0]), found[2])
        call, example = as_call(node), tensor_example(node)
        named = tuple(sorted((name, self.key(value)) for name, value in node.kwargs.items()))
        identity: Hashable = (node.op, node.target, self.key(node.args), named)
        if call is not None and call.is_whole and example is not None and not example.is_complex():
            identity = (call.symbol, self.key(call.args))
        return self._identity(node, identity, requires_grad(node), modes.blocks, modes.transforms)

    def _identity(self, node: Node, *structure: Hashable) -> Hashable:
        """The key of a computed value; `structure` tells how the value is computed.

        The key contains the shape, dtype and device of the node. So nodes with equal keys agree in all three.
        """
        value = tensor_example(node)
        kind = None if value is None else (value.dtype, str(value.device), *map(_size, value.shape))
        return ("node", self._interned.setdefault((*structure, kind), len(self._interned)))

    def new_mask(
        self,
        node: Node,
        proof: str | None,
        *,
        rounding: float,
        same_as: tuple[Hashable, ...] | None = None,
        inverted: bool = False,
        doubt: str = "",
        logits: Node | None = None,
    ) -> Binary:
        """The value of a node that holds a new mask. If the node requires a gradient, so does the mask.

        Args:
            node: the node.
            proof: why the node is binary; None if nothing proves it.
            rounding: the machine epsilon of the rounding errors in the mask and in its operands (`Mask.rounding`).
            same_as: the operation and the keys of its operands, if other nodes may hold the same mask. The shape, dtype
                and device of the node become part of the key.
            inverted: True if the node holds the complement of the mask.
            doubt: why an unproved mask may not be binary.
            logits: a node such that the mask is `logits > 0`.
        """
        key = self.key(node) if same_as is None else self._identity(node, "mask", same_as)
        trained = requires_grad(node)
        carrier = Carrier(node, self.key(node)) if trained else None
        mask = Mask(node, key, proof, carrier, doubt=doubt, inverted=inverted, logits=logits, rounding=rounding)
        return Binary(mask, at=(1, 0) if inverted else (0, 1), slope=(1, 1) if trained else (0, 0))

    def through(self, argument: Any) -> Call | None:
        """The call that computes an argument. If the calling rule returns a value, the argument belongs to the site."""
        call = as_call(argument)
        if call is not None:
            self._looking.append(argument)
        return call

    def straight_through(self, hard: Mask, node: Node, logits: Node | None, rounding: float) -> Binary:
        """The value of a node that equals the mask `hard`, up to rounding errors, and has a gradient.

        `logits` is the node that receives the gradient if the mask is `logits > 0`; otherwise None.
        """
        proof = hard.proof and "straight-through"
        carrier = Carrier(node, self.key(node), logits)
        rounding = max(rounding, hard.rounding)
        return Binary(replace(hard, proof=proof, carrier=carrier, rounding=rounding), slope=(1, 1))

    def imagine(self, node: Node, function: Callable[..., Any], *args: Any) -> Node:
        """A new node for a tensor that the program never computes, such as `W * s` if it computes `(W * M) * s`.

        The new node is inserted before `node` and runs under the modes of `node`. If an operator reads the new node,
        the rewrite makes a copy for the operator; `fusion._fuse` erases all imagined nodes. Equal calls give one node.

        `function` returns a view of its first argument, or is `torch.mul` or `torch.div` with a result of the same
        shape and dtype as the first argument.
        """
        key = ("imagined", function, self.key(args), self.view.modes(node))
        if key not in self._imagined:
            with self.view.graph.inserting_before(node):
                made = self.view.graph.call_function(function, args)
            value = tensor_example(args[0])
            assert value is not None, "rules imagine functions of tensors"
            value = value if function in (torch.mul, torch.div) else function(value, *args[1:])
            has_gradient = any(map(requires_grad, args)) and self.view.modes(node).grad is not False
            made.meta = {"example_value": value.detach().requires_grad_(has_gradient)}
            self._keys[made] = self._computed(made, self.view.modes(node))
            self._imagined[key] = made
        return self._imagined[key]

    @property
    def imagined(self) -> list[Node]:
        """The nodes that rules have imagined. Each comes after the nodes that it reads."""
        return list(self._imagined.values())

    def unproved(self, node: Node, doubt: str = "") -> Binary:
        """The value of a tensor that is used like a mask although nothing proves that it is binary."""
        return self.new_mask(node, None, rounding=0, doubt=doubt)

    def as_weighted(self, argument: Any) -> Weighted | None:
        """An argument as a weight, masked or not; None if it cannot be a weight.

        Any matrix that is not a mask counts as a weight, but one of few values only if a mask multiplies it. A tensor
        of three dimensions counts as the weights of experts, unless it repeats a matrix; then the matrix is the weight.
        """
        value = self.value(argument)
        if isinstance(value, Weighted):
            return value
        is_masked = isinstance(value, (Levels, Binary)) and self.key(argument) in self.masked_weights
        if isinstance(value, (Scalar, Levels, Binary, Bundle)) and not is_masked:
            return None
        if is_matrix(argument):
            return Weighted(argument, None)
        base, dim = repeated(argument)
        if dim == 0:
            is_weight = is_matrix(base) and not isinstance(self.value(base), (Scalar, Levels, Binary))
            return Weighted(base, None) if is_weight else None
        return Weighted(argument, None) if holds_experts(argument) else None


def _size(size: Any) -> Hashable:
    """A size of a tensor as a part of a key. A symbolic size becomes text, because comparing it would add a guard."""
    return size if type(size) is int else str(size)


def _same_tensor(node: Node) -> Node | None:
    """The input that a node returns unchanged, such as a cast to the same dtype or a dropout in eval mode; or None."""
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
