"""From nodes to abstract values: an interpreter with one small transfer function a symbol.

A transfer function sees a call and the values of its arguments, and says what the result is, or None: nothing known,
the node is a leaf. What a node is never depends on its users, so the functions compose, and each new spelling is one
more of them (or only an entry in `symbols`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from .symbols import Call, as_call, equal_sizes, tensor_example
from .values import (
    Activated,
    Binary,
    Gated,
    Mask,
    Product,
    Projection,
    Scalar,
    Stacked,
    Term,
    Value,
    Weighted,
)

Transfer = Callable[["Recogniser", Node, Call], Value]
_TRANSFERS: dict[str, Transfer] = {}


def _transfer(*symbols: str) -> Callable[[Transfer], Transfer]:
    def register(function: Transfer) -> Transfer:
        for symbol in symbols:
            _TRANSFERS[symbol] = function
        return function

    return register


class Recogniser:
    """The values of the nodes of one graph, computed once each."""

    def __init__(self, graph: Graph) -> None:
        self._values: dict[Node, Value] = {}
        self._keys: dict[Node, int] = {}
        self._interned: dict[Hashable, int] = {}
        for node in graph.nodes:
            self._values[node] = self._evaluate(node)

    def value(self, argument: Any) -> Value:
        """What is known of an argument of a node: of another node, or of a number."""
        if isinstance(argument, Node):
            return self._values[argument]
        return Scalar(float(argument)) if isinstance(argument, (bool, int, float)) else None

    def key(self, argument: Any) -> Hashable:
        """Equal for arguments that hold the same value by construction, as long as nothing they read is mutated."""
        if isinstance(argument, (tuple, list)):
            return tuple(self.key(item) for item in argument)
        if not isinstance(argument, Node):
            return (type(argument).__name__, repr(argument))
        if argument not in self._keys:
            self._keys[argument] = self._intern(argument)
        return ("node", self._keys[argument])

    def _intern(self, node: Node) -> int:
        call = as_call(node)
        structure: Hashable
        if node.op == "get_attr":
            structure = ("get_attr", str(node.target))
        elif call is None or call.symbol == "dropout":
            structure = ("leaf", node.name)
        else:
            kwargs = tuple(sorted((name, self.key(value)) for name, value in call.kwargs.items()))
            dtype = getattr(tensor_example(node), "dtype", None)
            structure = (call.symbol, str(node.target), dtype, self.key(call.args), kwargs)
        return self._interned.setdefault(structure, len(self._interned))

    def _evaluate(self, node: Node) -> Value:
        call = as_call(node)
        value = _TRANSFERS[call.symbol](self, node, call) if call and call.symbol in _TRANSFERS else None
        if value is None and getattr(tensor_example(node), "dtype", None) is torch.bool:
            mask = Mask(bits=node, key=self.key(node), proof="bool")
            return Binary(mask, at=(0, 1), slope=(0, 0))
        return value

    # --- Readings of leaves -----------------------------------------------------------------------------------------

    def as_weighted(self, argument: Any) -> Weighted | None:
        """A weight, masked or not: any matrix of which nothing else is known counts as one."""
        value = self.value(argument)
        if isinstance(value, Weighted):
            return value
        return Weighted(argument, None) if value is None and _is_matrix(argument) else None

    def as_unproved_mask(self, argument: Any) -> Binary | None:
        """A real matrix that is used like a mask (`1 - m`) though nothing proves that it is binary."""
        if self.value(argument) is not None or not _is_real_matrix(argument):
            return None
        carries = argument if _requires_grad(argument) else None
        mask = Mask(bits=argument, key=self.key(argument), proof=None, straight_through=carries)
        return Binary(mask, at=(0, 1), slope=(1, 1))

    def slice_of(self, node: Node) -> tuple[Node, int] | None:
        """`(stacked, i)` where `node` is `stacked[i]`, by whatever spelling."""
        call = as_call(node)
        if call is None:
            return None
        base, index = call.args[0] if call.args else None, call.get(1, "index")
        if call.symbol == "getitem" and isinstance(index, int) and isinstance(base, Node):
            inner = as_call(base)
            if inner is not None and inner.symbol == "unbind" and inner.get(1, "dim", 0) == 0:
                base = inner.args[0]
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


def _is_matrix(argument: Any) -> bool:
    example = tensor_example(argument)
    return isinstance(argument, Node) and example is not None and example.dim() == 2


def _is_real_matrix(argument: Any) -> bool:
    example = tensor_example(argument)
    return _is_matrix(argument) and example is not None and example.dtype is not torch.bool


def _requires_grad(argument: Any) -> bool:
    example = tensor_example(argument)
    return example is not None and example.requires_grad


def _same_shape(*nodes: Any) -> bool:
    examples = [tensor_example(node) for node in nodes]
    first = examples[0]
    return first is not None and all(item is not None and equal_sizes(item.shape, first.shape) for item in examples)


# --- Functions of one mask -----------------------------------------------------------------------------------------


def _checked(node: Node, value: Binary) -> Binary | None:
    """`value` if the node computes it exactly in its dtype and has the mask's own shape."""
    example = tensor_example(node)
    if example is None or not _same_shape(node, value.mask.bits):
        return None
    low = 0 if example.dtype in (torch.uint8, torch.bool) else -128
    exact = all(2 * v == int(2 * v) and low <= v <= 128 for v in value.at)
    return value if exact else None


def _merge_masks(a: Mask, b: Mask) -> Mask | None:
    """The one mask that both are; None where they are two, or carry two gradients."""
    if a.key != b.key:
        return None
    if a.straight_through is not None and b.straight_through is not None and a.straight_through != b.straight_through:
        return None
    return a if a.straight_through is not None else b


def _constant(mask: Mask, value: float) -> Binary:
    return Binary(mask, at=(value, value), slope=(0, 0))


def _combine(a: Binary, b: Binary, sign: float) -> Binary | None:
    """`a + sign * b` of one mask."""
    mask = _merge_masks(a.mask, b.mask)
    if mask is None:
        return None
    at = (a.at[0] + sign * b.at[0], a.at[1] + sign * b.at[1])
    slope = (a.slope[0] + sign * b.slope[0], a.slope[1] + sign * b.slope[1])
    return Binary(mask, at, slope)


def _multiply(a: Binary, b: Binary) -> Binary | None:
    """`a * b` of one mask."""
    mask = _merge_masks(a.mask, b.mask)
    if mask is None:
        return None
    at = (a.at[0] * b.at[0], a.at[1] * b.at[1])
    slope = (
        a.slope[0] * b.at[0] + a.at[0] * b.slope[0],
        a.slope[1] * b.at[1] + a.at[1] * b.slope[1],
    )
    return Binary(mask, at, slope)


def _combine_factors(a: Binary | None, b: Binary | None, sign: float) -> Binary | None:
    """`a + sign * b`, where None is 1 and at least one is not None."""
    known = a or b
    if known is None:
        return None
    return _combine(a or _constant(known.mask, 1), b or _constant(known.mask, 1), sign)


# --- Straight-through masks ----------------------------------------------------------------------------------------


def _linear_terms(
    recogniser: Recogniser, argument: Any, sign: float, carries: bool, into: dict[Any, list[Any]]
) -> bool:
    """Add `sign * argument` to `into`: `key -> [coefficient, that of the gradient, node]`; False if it is no sum."""
    if not isinstance(argument, Node):
        return False
    call = as_call(argument)
    if call is not None and call.symbol in ("add", "sub") and "alpha" not in call.kwargs and len(call.args) == 2:
        second = sign if call.symbol == "add" else -sign
        return _linear_terms(recogniser, call.args[0], sign, carries, into) and _linear_terms(
            recogniser, call.args[1], second, carries, into
        )
    if call is not None and call.symbol == "neg":
        return _linear_terms(recogniser, call.args[0], -sign, carries, into)
    if call is not None and call.symbol == "detach":
        return _linear_terms(recogniser, call.args[0], sign, False, into)
    entry = into.setdefault(recogniser.key(argument), [0.0, 0.0, argument])
    entry[0] += sign
    if carries and _requires_grad(argument):
        entry[1] += sign
    return True


def _straight_through(recogniser: Recogniser, node: Node) -> Binary | None:
    """`(hard - soft).detach() + soft` in any order: the value of `hard`, the gradient of `soft`.

    (Exact while |soft| is at most 256 in bfloat16, 2048 in float16, 2^24 in float32; past that the spelling itself
    is no longer binary.)
    """
    terms: dict[Any, list[Any]] = {}
    if not _linear_terms(recogniser, node, 1.0, True, terms) or len(terms) < 2:
        return None
    present = [entry for entry in terms.values() if entry[0] != 0]
    differentiable = [entry for entry in terms.values() if entry[1] != 0]
    if len(present) != 1 or present[0][0] != 1:
        return None
    hard = recogniser.value(present[0][2])
    if not isinstance(hard, Binary) or not hard.is_gate(1) or hard.mask.straight_through is not None:
        return None
    if not differentiable or not _requires_grad(node):
        return replace(hard, slope=(0, 0))
    if len(differentiable) > 1 or differentiable[0][1] != 1:
        return None
    soft = differentiable[0][2]
    is_logits = _is_positive(recogniser, hard.mask.bits, soft)
    mask = replace(hard.mask, proof="straight-through", straight_through=node, logits=soft if is_logits else None)
    return Binary(mask, at=(0, 1), slope=(1, 1))


def _is_positive(recogniser: Recogniser, bits: Node, soft: Node) -> bool:
    """Whether `bits` is `soft > 0`."""
    call = as_call(bits)
    if call is None or call.symbol != "gt" or len(call.args) != 2:
        return False
    return recogniser.key(call.args[0]) == recogniser.key(soft) and recogniser.value(call.args[1]) == Scalar(0)


# --- Transfer functions --------------------------------------------------------------------------------------------


@_transfer("add", "sub", "rsub")
def _add(recogniser: Recogniser, node: Node, call: Call) -> Value:
    if len(call.args) != 2 or call.kwargs.get("alpha", 1) != 1:
        return None
    left, right = reversed(call.args) if call.symbol == "rsub" else call.args
    sign = 1 if call.symbol == "add" else -1
    straight_through = _straight_through(recogniser, node)
    if straight_through is not None:
        return straight_through
    a, b = recogniser.value(left), recogniser.value(right)
    if isinstance(a, Scalar) and b is None:
        b = recogniser.as_unproved_mask(right)
    if isinstance(a, Scalar) and isinstance(b, Scalar):
        return Scalar(a.value + sign * b.value)
    if isinstance(a, Binary) or isinstance(b, Binary):
        return _add_binary(node, a, b, sign)
    if isinstance(a, Gated) or isinstance(b, Gated):
        return _add_gated(recogniser, node, (left, a), (right, b)) if sign == 1 else None
    if isinstance(a, Projection) and isinstance(b, Projection):
        return _add_projections(recogniser, a, b, sign)
    return _add_weighted(recogniser, left, right, sign)


def _add_binary(node: Node, a: Value, b: Value, sign: float) -> Binary | None:
    if isinstance(a, Binary) and isinstance(b, Scalar):
        b = _constant(a.mask, b.value)
    elif isinstance(b, Binary) and isinstance(a, Scalar):
        a = _constant(b.mask, a.value)
    if not isinstance(a, Binary) or not isinstance(b, Binary):
        return None
    combined = _combine(a, b, sign)
    return None if combined is None else _checked(node, combined)


def _add_weighted(recogniser: Recogniser, left: Any, right: Any, sign: float) -> Weighted | None:
    """`W - W * M`."""
    a, b = recogniser.as_weighted(left), recogniser.as_weighted(right)
    if a is None or b is None or a.transposed != b.transposed or (a.factor is None and b.factor is None):
        return None
    if recogniser.key(a.weight) != recogniser.key(b.weight):
        return None
    factor = _combine_factors(a.factor, b.factor, sign)
    return None if factor is None else replace(a, factor=factor)


def _add_projections(recogniser: Recogniser, a: Projection, b: Projection, sign: float) -> Projection | None:
    """`F.linear(x, W) - gate`."""
    if not _same_operands(recogniser, a, b) or (a.factor is None and b.factor is None):
        return None
    factor = _combine_factors(a.factor, b.factor, sign)
    return None if factor is None else replace(a, factor=factor, problem=a.problem or b.problem)


def _add_gated(recogniser: Recogniser, node: Node, left: tuple[Any, Value], right: tuple[Any, Value]) -> Gated | None:
    """A longer sum. A partial sum that someone else uses too stays a layer of its own."""
    terms: tuple[Term, ...] = ()
    for argument, value in (left, right):
        if isinstance(value, Gated):
            if len(argument.users) > 1 or not _same_shape(node, argument):
                return None
            terms += value.terms
        elif value != Scalar(0):
            return None
    first = terms[0]
    for term in terms[1:]:
        if term.activation != first.activation or not _same_operands(recogniser, term.gate, first.gate):
            return None
    return Gated(terms)


def _same_operands(recogniser: Recogniser, a: Projection, b: Projection) -> bool:
    return (
        recogniser.key(a.x) == recogniser.key(b.x)
        and a.transposed == b.transposed
        and isinstance(a.weight, Node)
        and isinstance(b.weight, Node)
        and recogniser.key(a.weight) == recogniser.key(b.weight)
    )


@_transfer("mul")
def _mul(recogniser: Recogniser, node: Node, call: Call) -> Value:
    if len(call.args) != 2:
        return None
    left, right = call.args
    a, b = recogniser.value(left), recogniser.value(right)
    if isinstance(a, (Activated, Projection)) and isinstance(b, (Activated, Projection)):
        return _gate_times_value(recogniser, a, b)
    if isinstance(a, (Activated, Gated)):
        return _route(recogniser, node, a, right)
    if isinstance(b, (Activated, Gated)):
        return _route(recogniser, node, b, left)
    if isinstance(a, Scalar) and isinstance(b, Scalar):
        return Scalar(a.value * b.value)
    if isinstance(a, Binary) and isinstance(b, Scalar):
        b = _constant(a.mask, b.value)
    elif isinstance(b, Binary) and isinstance(a, Scalar):
        a = _constant(b.mask, a.value)
    if isinstance(a, Binary) and isinstance(b, Binary):
        product = _multiply(a, b)
        return None if product is None else _checked(node, product)
    if isinstance(a, Binary):
        return _apply_mask(recogniser, node, a, right)
    if isinstance(b, Binary):
        return _apply_mask(recogniser, node, b, left)
    if a is None and b is None and _is_real_matrix(left) and _is_real_matrix(right):
        return Product(left, right)
    return None


def _apply_mask(recogniser: Recogniser, node: Node, mask: Binary, argument: Any) -> Weighted | None:
    weighted = recogniser.as_weighted(argument)
    if weighted is None or not _same_shape(node, argument):
        return None
    factor = mask if weighted.factor is None else _multiply(mask, weighted.factor)
    return None if factor is None else replace(weighted, factor=factor)


def _route(recogniser: Recogniser, node: Node, value: Activated | Gated, weight: Any) -> Value:
    """`r * act(gate) * value` with one number r a token, `[..., 1]`."""
    term = value.terms[0] if isinstance(value, Gated) else value
    projection = term.gate if isinstance(term, Term) else term.projection
    r, x, result = tensor_example(weight), tensor_example(projection.x), tensor_example(node)
    if r is None or x is None or result is None or recogniser.value(weight) is not None:
        return None
    if not r.dtype.is_floating_point or not equal_sizes(r.shape, (*x.shape[:-1], 1)) or result.dim() != x.dim():
        return None
    if term.route is not None or (isinstance(value, Gated) and len(value.terms) > 1):
        return None
    routed = replace(term, route=weight)
    return Gated((routed,)) if isinstance(routed, Term) else routed


def _gate_times_value(recogniser: Recogniser, a: Activated | Projection, b: Activated | Projection) -> Value:
    if isinstance(b, Activated):
        a, b = b, a
    if isinstance(b, Activated):
        return None
    if isinstance(a, Activated):
        if (
            a.route is None
            and a.activation == "sigmoid"
            and _same_operands(recogniser, a.projection, b)
            and a.projection.factor == b.factor
        ):
            return Activated("silu", b)
        activation, gate, value, route = a.activation, a.projection, b, a.route
    else:
        activation, gate, value, route = "identity", a, b, None
        if value.factor is not None and value.factor.is_gate(1):
            gate, value = value, gate
    gate, value = _resolve(recogniser, gate, value), _resolve(recogniser, value, gate)
    masked = [isinstance(p.weight, Product) or p.factor is not None for p in (gate, value)]
    if not any(masked) or (not all(masked) and not _same_operands(recogniser, gate, value)):
        return None
    return Gated((Term(activation, gate, value, route),))


def _resolve(recogniser: Recogniser, projection: Projection, other: Projection) -> Projection:
    """Tell weight from mask in `weight * mask`, where the other branch, `weight * (1 - mask)`, has told."""
    product, factor = projection.weight, other.factor
    if not isinstance(product, Product) or not isinstance(other.weight, Node) or factor is None:
        return projection
    for weight, mask in ((product.a, product.b), (product.b, product.a)):
        if recogniser.key(weight) == recogniser.key(other.weight) and recogniser.key(mask) == factor.mask.key:
            return replace(projection, weight=weight, factor=recogniser.as_unproved_mask(mask))
    return projection


@_transfer("neg")
def _neg(recogniser: Recogniser, node: Node, call: Call) -> Value:
    value = recogniser.value(call.args[0])
    if isinstance(value, Scalar):
        return Scalar(-value.value)
    return _checked(node, value.map(operator.neg, lambda v: -1.0)) if isinstance(value, Binary) else None


@_transfer("not", "logical_not")
def _not(recogniser: Recogniser, node: Node, call: Call) -> Value:
    value = recogniser.value(call.args[0])
    example = tensor_example(node)
    if not isinstance(value, Binary) or example is None or example.dtype is not torch.bool:
        return None
    return _checked(node, value.map(lambda v: float(v == 0), lambda v: 0.0))


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
}


@_transfer(*_COMPARISONS)
def _compare(recogniser: Recogniser, node: Node, call: Call) -> Value:
    a, b = (recogniser.value(argument) for argument in call.args[:2]) if len(call.args) == 2 else (None, None)
    compare = _COMPARISONS[call.symbol]
    if isinstance(a, Binary) and isinstance(b, Scalar):
        bound = b.value
        return _checked(node, a.map(lambda v: float(compare(v, bound)), lambda v: 0.0))
    return None


@_transfer("to")
def _to(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A change of dtype (or of nothing: `.to(device)`); rounding to the layer's own dtype is checked at the site."""
    value, example = recogniser.value(call.args[0]), tensor_example(node)
    if example is None or isinstance(value, (Scalar, Product, Stacked)):
        return None
    if not isinstance(value, Binary):
        return value
    if example.dtype is torch.bool:
        value = value.map(lambda v: float(v != 0), lambda v: 0.0)
    elif not example.dtype.is_floating_point:
        value = value.map(float.__trunc__, lambda v: 0.0)
    return _checked(node, value)


@_transfer("detach")
def _detach(recogniser: Recogniser, node: Node, call: Call) -> Value:
    value = recogniser.value(call.args[0])
    return replace(value, slope=(0, 0)) if isinstance(value, Binary) else None


@_transfer("alias")
def _alias(recogniser: Recogniser, node: Node, call: Call) -> Value:
    value = recogniser.value(call.args[0])
    return value if isinstance(value, (Binary, Weighted, Projection, Gated)) else None


@_transfer("zeros_like")
def _zeros(recogniser: Recogniser, node: Node, call: Call) -> Value:
    return Scalar(0)


@_transfer("ones_like")
def _ones(recogniser: Recogniser, node: Node, call: Call) -> Value:
    return Scalar(1)


@_transfer("where")
def _where(recogniser: Recogniser, node: Node, call: Call) -> Value:
    if len(call.args) != 3:
        return None
    condition, if_true, if_false = call.args
    if call.symbol == "where" and node.op == "call_method":
        condition, if_true = if_true, condition
    return _choose(recogniser, node, recogniser.value(condition), if_true, if_false)


@_transfer("masked_fill")
def _masked_fill(recogniser: Recogniser, node: Node, call: Call) -> Value:
    if len(call.args) != 3:
        return None
    tensor, mask, fill = call.args
    return _choose(recogniser, node, recogniser.value(mask), fill, tensor)


def _choose(recogniser: Recogniser, node: Node, condition: Value, if_true: Any, if_false: Any) -> Value:
    """`where(M, W, 0)` and its like: a weight, or numbers, chosen by a mask."""
    if not isinstance(condition, Binary):
        return None
    values = [recogniser.value(if_true), recogniser.value(if_false)]
    branches = [if_true, if_false]
    coefficients = [value.value if isinstance(value, Scalar) else 1.0 for value in values]
    picked = [coefficients[0] if at else coefficients[1] for at in condition.at]
    factor = Binary(condition.mask, at=(picked[0], picked[1]), slope=(0, 0))
    if all(isinstance(value, Scalar) for value in values):
        return _checked(node, factor)
    weights = [recogniser.as_weighted(b) for b, v in zip(branches, values, strict=True) if not isinstance(v, Scalar)]
    weighted = weights[0]
    if len(weights) != 1 or weighted is None or weighted.factor is not None or not _same_shape(node, weighted.weight):
        return None
    return replace(weighted, factor=factor) if 0.0 in coefficients else None


@_transfer("getattr", "transpose")
def _transpose(recogniser: Recogniser, node: Node, call: Call) -> Value:
    weighted = recogniser.as_weighted(call.args[0]) if call.args else None
    if weighted is None:
        return None
    if call.symbol == "getattr":
        swaps = call.args[1] in ("T", "mT")
    else:
        dims = [d % 2 for d in call.args[1:] if isinstance(d, int)]
        swaps = len(dims) == 0 or sorted(dims) == [0, 1]
    return replace(weighted, transposed=not weighted.transposed) if swaps else None


@_transfer("linear", "matmul")
def _project(recogniser: Recogniser, node: Node, call: Call) -> Value:
    x, weight = call.get(0, "input"), call.get(1, "weight" if call.symbol == "linear" else "other")
    bias = call.get(2, "bias") if call.symbol == "linear" else None
    if not isinstance(x, Node) or not isinstance(weight, Node):
        return None
    problem = None if bias is None else "the projection adds a bias, which MGLU does not have; add it after the product"
    product, result = recogniser.value(weight), tensor_example(node)
    if result is None:
        return None
    if isinstance(product, Product) and call.symbol == "linear":
        return Projection(x, product, None, result.dtype, problem=problem)
    weighted = recogniser.as_weighted(weight)
    if weighted is None:
        return None
    stored_in_first = weighted.transposed == (call.symbol == "linear")
    return Projection(x, weighted.weight, weighted.factor, result.dtype, transposed=stored_in_first, problem=problem)


@_transfer("silu", "relu", "sigmoid", "tanh", "gelu")
def _activation(recogniser: Recogniser, node: Node, call: Call) -> Value:
    value = recogniser.value(call.get(0, "input"))
    if not isinstance(value, Projection):
        return None
    name = call.symbol
    if name == "gelu" and call.get(1, "approximate", "none") == "tanh":
        name = "gelu_tanh"
    return Activated(name, value)


@_transfer("dropout")
def _dropout(recogniser: Recogniser, node: Node, call: Call) -> Value:
    value = recogniser.value(call.get(0, "input"))
    if not call.get(2, "training" if node.target is not torch.ops.aten.dropout.default else "train", True):
        return value
    problem = "dropout stands between the projection and the product"
    if isinstance(value, Projection):
        return replace(value, problem=value.problem or problem)
    if isinstance(value, Activated):
        return replace(value, projection=replace(value.projection, problem=problem))
    return None


@_transfer("stack")
def _stack(recogniser: Recogniser, node: Node, call: Call) -> Value:
    items = call.get(0, "tensors")
    if not isinstance(items, (list, tuple)) or not all(isinstance(recogniser.value(i), Gated) for i in items):
        return None
    return Stacked(tuple(items), dim=call.get(1, "dim", 0))


@_transfer("sum")
def _sum(recogniser: Recogniser, node: Node, call: Call) -> Value:
    stacked = recogniser.value(call.get(0, "input"))
    dim = call.get(1, "dim")
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    if not isinstance(stacked, Stacked) or list(dims) != [stacked.dim] or call.get(2, "keepdim", False):
        return None
    total: Value = Scalar(0)
    for item in stacked.items:
        total = _add_gated(recogniser, item, (node, total), (item, recogniser.value(item)))
        if total is None:
            return None
    return total
