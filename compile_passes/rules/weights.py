"""Rules for weights that are masked, cast, copied, transposed, stacked and concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from .. import shapes
from ..recognise import Recogniser
from ..shapes import dimension, dims, dtype_of, has_shape, holds_experts, is_matrix, same_shape, size, tensor_example
from ..symbols import Call
from ..values import (
    Binary,
    Bundle,
    Interleaved,
    Levels,
    Number,
    Product,
    Scalar,
    Value,
    Weighted,
    binary_at,
    combine,
    multiply,
)
from .base import bundle, each, pairwise, rule


@rule("mul")
def masked_weight(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`W * M`, or a `Product` if nothing tells which of the factors is the mask."""
    left, right = call.args
    factors = [(recogniser.factor(left, right), right), (recogniser.factor(right, left), left)]
    # A mask comes before other functions of a mask, which may be a weight of few values.
    for factor, weight in sorted(factors, key=lambda pair: not (isinstance(pair[0], Binary) and pair[0].is_mask)):
        if isinstance(factor, Binary):
            return _apply_mask(recogniser, node, factor, weight)
        if isinstance(factor, Bundle) and isinstance(factor.items[0], Binary):
            return _apply_masks(recogniser, node, factor, weight)
    if not all(_may_be_either(recogniser, argument) for argument in call.args):
        return None
    for mask, weight in (call.args, tuple(reversed(call.args))):
        weighted = recogniser.as_weighted(weight)
        if dims(mask) == 3 and weighted is not None and is_matrix(weighted.weight):
            return _apply_mask(recogniser, node, recogniser.unproved(mask), weight)
    return Product(node, left, right) if same_shape(left, right) and is_matrix(left) else None


def _may_be_either(recogniser: Recogniser, argument: Any) -> bool:
    """True if a factor may be either the weight or the mask: its value is unknown, and its shape and dtype fit both."""
    value = recogniser.value(argument)
    is_copy = isinstance(value, Weighted) and value.factor is None and holds_experts(argument)
    is_unknown = value is None or isinstance(value, Product) or is_copy
    return is_unknown and dims(argument) in (2, 3) and dtype_of(argument) is not torch.bool


def _upright(weighted: Weighted | None, argument: Any) -> Weighted | None:
    """The weight in the layout of the node `argument`, which the masks multiply.

    A weight that is transposed before it is masked counts as a new weight: the transposed tensor.
    """
    if weighted is None or not weighted.transposed:
        return weighted
    is_weight = is_matrix(argument) or holds_experts(argument)
    return Weighted(argument, None) if weighted.factor is None and is_weight else None


def _masked_by(recogniser: Recogniser, argument: Any, mask: Binary) -> Weighted | None:
    """The weight that a mask multiplies at `argument`.

    A weight of few values, such as `sign(W)`, could be a function of a mask too. It is a weight where another mask
    multiplies it. A weight of 0 and 1 is not, since nothing tells it from the mask.
    """
    value = recogniser.value(argument)
    is_of_a_mask = isinstance(value, Binary) and (value.is_mask or value.mask.key == mask.mask.key)
    if isinstance(value, (Levels, Binary)) and not is_of_a_mask:
        return _pruned(argument)
    return _upright(recogniser.as_weighted(argument), argument)


def _by_each_mask(weighted: Weighted, mask: Binary) -> Weighted | Bundle | None:
    """The weight times a mask, or a bundle of the weight times each mask of a stack.

    A mask `[experts, out, in]` of the weights of experts is one mask, not a stack.
    """
    count = mask.mask.stack
    if holds_experts(weighted.weight) or count is None:  # also for a symbolic count, which the proof refuses
        return _masked(weighted, mask)
    return bundle([_masked(weighted, binary_at(mask, i)) for i in range(count)], 0) if count else None


def _fits(node: Node, weighted: Weighted, mask: Binary, argument: Any) -> bool:
    """True if `node` has the shape of the masked weight: the shape of `argument`, or of the stack of masks.

    A mask that is broadcast to the weight is accepted here, so that the proof can refuse it with a reason. A mask of
    three dimensions that is broadcast along the last two is not accepted, because it may mark the tokens of a batch.
    """
    masks = mask.mask.shape
    if holds_experts(weighted.weight):
        weight = tensor_example(weighted.weight)
        return weight is not None and shapes.equal_sizes(masks[-2:], weight.shape[-2:]) and same_shape(node, argument)
    if len(masks) != 3:
        return same_shape(node, argument)
    return has_shape(node, masks) and has_shape(weighted.weight, masks[1:])


def _apply_mask(recogniser: Recogniser, node: Node, mask: Binary, argument: Any) -> Weighted | Bundle | None:
    held = recogniser.value(argument)
    if isinstance(held, Bundle):  # a stack of masked weights, which are masked again
        if mask.mask.stack != len(held.items) or not has_shape(node, mask.mask.shape):
            return None
        return bundle([_masked(item, binary_at(mask, i)) for i, item in enumerate(held.items)], 0)
    weighted = _masked_by(recogniser, argument, mask)
    if weighted is None or not _fits(node, weighted, mask, argument):
        return None
    found, pruned = _by_each_mask(weighted, mask), _pruned(argument)
    return _by_each_mask(pruned, mask) if found is None and pruned is not None else found


def _pruned(argument: Any) -> Weighted | None:
    """A tensor as a weight of its own, such as a weight that another mask has pruned."""
    return Weighted(argument, None) if is_matrix(argument) or holds_experts(argument) else None


def _masked(weighted: Value, mask: Value) -> Weighted | None:
    if not isinstance(weighted, Weighted) or not isinstance(mask, Binary):
        return None
    factor = mask if weighted.factor is None else multiply(mask, weighted.factor)
    return None if factor is None else replace(weighted, factor=factor)


def _apply_masks(recogniser: Recogniser, node: Node, masks: Bundle, argument: Any) -> Bundle | None:
    """A weight times each mask of a bundle."""
    weighted = _upright(recogniser.as_weighted(argument), argument)
    weight = None if weighted is None else tensor_example(weighted.weight)
    if weight is None or not has_shape(node, (len(masks.items), *weight.shape)):
        return None
    return bundle([_masked(weighted, item) for item in masks.items], 0)


@rule("add", "sub")
def difference_of_weights(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`W - W * M`. If M is a stack of masks, W may be broadcast to the stack."""
    left, right = call.args
    sign = 1 if call.symbol == "add" else -1

    def weighted(argument: Any) -> Value:
        value = recogniser.value(argument)
        return value if isinstance(value, Bundle) else recogniser.as_weighted(argument)

    a, b = weighted(left), weighted(right)
    stacks = [value for value in (a, b) if isinstance(value, Bundle)]
    if stacks:
        # A stack must have as many items as the result. This excludes a stack of one weight that is broadcast.
        count = size(node, 0) if dims(node) == 3 else None
        if any((stack.dim, stack.size, len(stack.items)) != (0, None, count) for stack in stacks):
            return None
        return pairwise(node, (left, a), (right, b), partial(_difference, recogniser, sign))
    if isinstance(b, Weighted) and isinstance(left, Node) and recogniser.key(left) == recogniser.key(b.weight):
        a = Weighted(left, None)  # W may be pruned by another mask
    if isinstance(a, Weighted) and isinstance(b, Weighted) and a.transposed != b.transposed:
        a, b = _upright(a, left), _upright(b, right)
    return _difference(recogniser, sign, a, b) if same_shape(node, left, right) else None


def _difference(recogniser: Recogniser, sign: float, a: Value, b: Value) -> Weighted | None:
    if not isinstance(a, Weighted) or not isinstance(b, Weighted) or a.transposed != b.transposed:
        return None
    if (a.factor is None and b.factor is None) or recogniser.key(a.weight) != recogniser.key(b.weight):
        return None
    factor = combine(a.factor, b.factor, sign)
    return None if factor is None else replace(a, factor=factor)


@rule("neg", "mul", "div")
def scaled_weight(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`-(W * M)`, `W * M * 0.5`, `W * M / p`, and `W * M * scale` with a tensor, where `W * scale` is the weight."""
    if call.symbol == "neg":
        return _times_number(recogniser.value(call.args[0]), -1.0)
    for masked, scale in (call.args, call.args[::-1])[: 1 if call.symbol == "div" else 2]:
        value, number = recogniser.value(masked), recogniser.value(scale)
        if not isinstance(value, Weighted) or value.factor is None or not same_shape(node, masked):
            continue
        if isinstance(number, Scalar) and dtype_of(node) == dtype_of(masked):
            return _times_number(value, number.value if call.symbol == "mul" else 1 / number.value)
        is_tensor = isinstance(scale, Node) and number is None and dims(scale) >= 0
        same_dtype = dtype_of(node) == dtype_of(value.weight) == dtype_of(scale)
        if is_tensor and same_dtype and not value.transposed:
            function = torch.mul if call.symbol == "mul" else torch.div
            return replace(value, weight=recogniser.imagine(node, function, value.weight, scale))
    return None


def _times_number(value: Value, number: Number) -> Weighted | None:
    if not isinstance(value, Weighted) or value.factor is None:
        return None
    (at_0, at_1), (slope_0, slope_1) = value.factor.at, value.factor.slope
    at, slope = (number * at_0, number * at_1), (number * slope_0, number * slope_1)
    return replace(value, factor=replace(value.factor, at=at, slope=slope))


@rule("where", "masked_fill", "index_put")
def chosen_weight(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`where(M, W, 0)`, `where(M, 0, W)`, `W.masked_fill(M, 0)`, and `W[~M] = 0`, which export records as `index_put`.

    The result is the weight at one value of the mask, and 0 at the other.
    """
    if call.symbol == "where":
        mask, if_true, if_false = call.args
    else:
        if_false, mask, if_true = call.args
    if call.symbol == "index_put":
        if not isinstance(mask, Sequence) or len(mask) != 1 or dims(if_true) != 0:
            return None
        (mask,) = mask
        if not same_shape(if_false, mask):
            return None
    zero_if_true, zero_if_false = (recogniser.value(branch) == Scalar(0) for branch in (if_true, if_false))
    weight = if_false if zero_if_true else if_true
    condition = recogniser.factor(mask, weight)
    if zero_if_true == zero_if_false or not isinstance(condition, Binary):
        return None
    weighted = _masked_by(recogniser, weight, condition)
    if weighted is not None and weighted.factor is not None:
        weighted = _pruned(weight)
    if weighted is None or not _fits(node, weighted, condition, weight):
        return None
    at_0, at_1 = (float(bool(at) != zero_if_true) for at in condition.at)
    return _by_each_mask(weighted, Binary(condition.mask, at=(at_0, at_1)))


@rule("to", "alias")
def cast_weight(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A masked weight in another dtype, if casting before masking gives the same result; or a copy of a weight."""
    (source,), dtype = call.args, dtype_of(node)
    value = recogniser.value(source)
    if isinstance(value, Weighted) and value.factor is None and call.symbol == "to":
        return None  # the cast tensor is a weight of its own
    if isinstance(value, (Weighted, Bundle)) and dtype is not None:
        return each(value, lambda w: w if isinstance(w, Weighted) and rounds_once(w, source, dtype) else None)
    is_copy = call.symbol == "alias" and shapes.requires_grad(source) == shapes.requires_grad(node)
    return recogniser.as_weighted(source) if is_copy else None


def rounds_once(weighted: Weighted, node: Any, dtype: torch.dtype) -> bool:
    """True if casting the masked weight at `node` to `dtype` equals casting the weight before masking it.

    The result is False if an earlier cast has rounded the weight.
    """
    source = dtype_of(node)
    return source is not None and (source == dtype_of(weighted.weight) or shapes.holds(source, dtype))


@rule("getattr", "t", "mT", "transpose", "permute")
def transpose(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """The transpose of a weight, or of each weight in a bundle."""
    source = call.args[0]
    value = recogniser.value(source)
    if not swaps_last_two(call):
        return None
    if isinstance(value, Bundle):
        flipped = each(value, lambda w: _flipped(w) if isinstance(w, Weighted) else None)
        if not isinstance(flipped, Bundle) or flipped.size is None:
            return flipped
        return replace(flipped, dim=1 - flipped.dim)
    weighted = value if isinstance(value, Product) else recogniser.as_weighted(source)
    return None if weighted is None else _flipped(weighted)


def _flipped(weighted: Weighted | Product) -> Weighted | Product:
    return replace(weighted, transposed=not weighted.transposed)


def swaps_last_two(call: Call) -> bool:
    """True if a call swaps the last two dimensions of its argument and leaves the others in place."""
    symbol, (source, *how) = call.symbol, call.args or (None,)
    if symbol not in ("getattr", "t", "mT", "transpose", "permute"):
        return False
    if symbol == "getattr":
        (symbol,) = how
    if symbol in ("mT", "mH"):
        return True
    if symbol in ("t", "T", "H"):
        return is_matrix(source)
    count = dims(source)
    if symbol == "permute":
        (order,) = how
        return [dimension(dim, source) for dim in order] == [*range(count - 2), count - 1, count - 2]
    return {dimension(dim, source) for dim in how} == {count - 2, count - 1}


@rule("unsqueeze")
def stack_to_be_broadcast(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A stack of weights `[n, in, out]` viewed as `[n, 1, in, out]`, to multiply an x of three dimensions."""
    source, position = call.args
    value, dim = recogniser.value(source), dimension(position, node)
    if not isinstance(value, Bundle) or dim is None:
        return None
    return value if 1 <= dim <= dims(node) - 3 else None


@rule("stack")
def stacked_weights(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`stack([W * M, W * (1 - M)])`."""
    weights, dim = call.args
    items = _masked_items(recogniser, weights)
    return bundle(items, 0) if items and dimension(dim, node) == 0 else None


def _masked_items(recogniser: Recogniser, items: Any) -> list[Weighted]:
    """The items as weights, if all are matrices of weights and at least one is masked; otherwise an empty list."""
    values = [recogniser.as_weighted(item) for item in items] if isinstance(items, (list, tuple)) else []
    weights = [value for value in values if value is not None]
    is_masked = any(value.factor is not None for value in weights)
    return weights if is_masked and len(weights) == len(values) and all(map(is_matrix, items)) else []


@rule("cat", "vstack")
def concatenated_weights(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`cat([W * M, W * (1 - M)])` along the output features."""
    parts, position = call.args if call.symbol == "cat" else (*call.args, 0)
    dim = dimension(position, node)
    if not isinstance(parts, (list, tuple)) or dim is None:
        return None
    values = [recogniser.value(part) for part in parts]
    bundles = [value for value in values if isinstance(value, Bundle)]
    if len(bundles) == len(values):  # all parts are concatenations, which must be joined along their own dimension
        each_size = bundles[0].size
        alike = all((part.dim, part.size) == (dim, each_size) for part in bundles)
        return bundle([item for part in bundles for item in part.items], dim, each_size) if alike else None
    first, *_ = parts
    items, length = _masked_items(recogniser, parts), size(first, dim)
    if not items or length is None or not same_shape(*parts):
        return None
    return bundle(items, dim, length)


@rule("flatten", "reshape")
def interleaved_weights(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`stack([W * M, W * (1 - M)], 1)` flattened to `[out * 2, in]`, which interleaves the rows of the weights."""
    stack = recogniser.through(call.args[0])
    if stack is None or stack.symbol != "stack" or dimension(stack.args[1], call.args[0]) != 1:
        return None
    items, before = _masked_items(recogniser, stack.args[0]), tensor_example(call.args[0])
    if not items or before is None or any(item.transposed for item in items):
        return None
    rows, count, columns = before.shape
    return Interleaved(tuple(items), 0) if has_shape(node, (rows * count, columns)) else None


@rule("flatten", "reshape")
def flattened_stack(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A stack of weights `[n, out, in]` flattened to `[n * out, in]`."""
    source, *_ = call.args
    value, before = recogniser.value(source), tensor_example(source)
    if not isinstance(value, Bundle) or value.dim != 0 or before is None:
        return None
    first, *_ = value.items
    if before.dim() != 3 or not isinstance(first, Weighted):
        return None
    n_items, rows, columns = before.shape
    is_flat = isinstance(rows, int) and has_shape(node, (n_items * rows, columns))
    return Bundle(value.items, 0, rows) if is_flat else None
