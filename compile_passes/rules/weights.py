"""Rules for weights: masked by products, choices and differences, transposed, cast, stacked and concatenated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ..recognise import Recogniser, weight_rule
from ..shapes import (
    dimension,
    dims,
    dtype_of,
    equal_sizes,
    is_matrix,
    range_of,
    same_shape,
    size,
    slice_of,
    tensor_example,
)
from ..symbols import Call, symbol_of
from ..values import MOST_ITEMS, Binary, Bundle, Gated, Product, Scalar, Value, Weighted, binary_at, combine, multiply

# --- Masked weights --------------------------------------------------------------------------------------------------


@weight_rule("mul")
def masked_weight(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`W * M`, and `W * m` of which nothing tells which is the mask."""
    for mask, weight in (call.args, tuple(reversed(call.args))):
        factor = recogniser.value(mask)
        if isinstance(factor, Binary):
            return _apply_mask(recogniser, node, factor, weight)
        if isinstance(factor, Bundle) and isinstance(factor.items[0], Binary):
            return _apply_masks(recogniser, node, factor, weight)
    left, right = call.args
    if not all(_may_be_either(recogniser, argument) for argument in call.args):
        return None
    for mask, weight in (call.args, tuple(reversed(call.args))):
        if dims(mask) == 3 and recogniser.as_weighted(weight) is not None:
            return _apply_mask(recogniser, node, recogniser.unproved(mask), weight)
    return Product(node, left, right) if same_shape(left, right) and is_matrix(left) else None


def _may_be_either(recogniser: Recogniser, argument: Any) -> bool:
    """Whether a factor may be a weight or a mask, for all that is known."""
    is_known = not (recogniser.value(argument) is None or isinstance(recogniser.value(argument), Product))
    return not is_known and dims(argument) in (2, 3) and dtype_of(argument) is not torch.bool


def _upright(weighted: Weighted | None, argument: Any) -> Weighted | None:
    """`weighted` as it lies at its node, as a mask of it must: a transposed weight is a weight of its own."""
    if weighted is None or not weighted.transposed:
        return weighted
    return Weighted(argument, None) if weighted.factor is None and is_matrix(argument) else None


def _of_each_mask(node: Node, mask: Binary, masked: Callable[[Binary], Weighted | None]) -> Weighted | Bundle | None:
    """The weight masked by a mask, or by each of a stack of masks."""
    if len(mask.mask.shape) != 3:
        return masked(mask)
    count = mask.mask.stack
    if count is None:  # a number that compiling does not know: no layer, but a masked weight that a report names
        return masked(mask)
    if not 1 <= count <= MOST_ITEMS:
        return None
    return bundle([masked(binary_at(mask, i)) for i in range(count)], 0)


def bundle(items: Sequence[Any], dim: int, size: int | None = None) -> Bundle | None:
    """A bundle of values, if all are known."""
    known = tuple(item for item in items if item is not None)
    return Bundle(known, dim, size) if known and len(known) == len(items) <= MOST_ITEMS else None


def _fits(node: Node, weighted: Weighted, mask: Binary, argument: Any) -> bool:
    """Whether `node` has the shape of the masked weight: that of `argument`, or of the stack of masks.

    (A mask of another shape than the weight's, which is broadcast, is refused with its reason at the site.)
    """
    if len(mask.mask.shape) != 3:
        return same_shape(node, argument)
    shape, weight = tensor_example(node), tensor_example(weighted.weight)
    masks = mask.mask.shape
    return (
        shape is not None
        and weight is not None
        and equal_sizes(shape.shape, masks)
        and equal_sizes(weight.shape, masks[1:])
    )


def _apply_mask(recogniser: Recogniser, node: Node, mask: Binary, argument: Any) -> Weighted | Bundle | None:
    held = recogniser.value(argument)
    if isinstance(held, Bundle):  # (of weights that are masked already)
        return _mask_again(node, mask, held)
    weighted = _upright(recogniser.as_weighted(argument), argument)
    if weighted is None or not _fits(node, weighted, mask, argument):
        return None
    return _of_each_mask(node, mask, lambda one: _masked(weighted, one))


def _masked(weighted: Weighted, mask: Binary) -> Weighted | None:
    factor = mask if weighted.factor is None else multiply(mask, weighted.factor)
    return None if factor is None else replace(weighted, factor=factor)


def _apply_masks(recogniser: Recogniser, node: Node, masks: Bundle, argument: Any) -> Bundle | None:
    """One weight times each of several masks in one tensor."""
    weighted, shape = _upright(recogniser.as_weighted(argument), argument), tensor_example(node)
    weight = None if weighted is None else tensor_example(weighted.weight)
    if weighted is None or weight is None or shape is None or masks.size is not None:
        return None
    if not equal_sizes(shape.shape, (len(masks.items), *weight.shape)):
        return None
    return bundle([_masked(weighted, one) if isinstance(one, Binary) else None for one in masks.items], 0)


def _mask_again(node: Node, mask: Binary, held: Bundle) -> Bundle | None:
    shape = tensor_example(node)
    if held.size is not None or shape is None or mask.mask.stack != len(held.items):
        return None
    if not equal_sizes(shape.shape, mask.mask.shape):
        return None
    pairs = [(item, binary_at(mask, i)) for i, item in enumerate(held.items)]
    return bundle([_masked(item, one) if isinstance(item, Weighted) else None for item, one in pairs], 0)


@weight_rule("add", "sub")
def difference_of_weights(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`W - W * M`, also of a stack of masks."""
    left, right = call.args
    sign = 1 if call.symbol == "add" else -1
    first, second = recogniser.value(left), recogniser.value(right)
    if isinstance(first, Bundle) or isinstance(second, Bundle):
        return _difference_of_stacks(recogniser, node, (left, first), (right, second), sign)
    a, b = recogniser.as_weighted(left), recogniser.as_weighted(right)
    if a is not None and b is not None and a.transposed != b.transposed:
        a, b = _upright(a, left), _upright(b, right)
    return _difference(recogniser, a, b, sign) if same_shape(node, left, right) else None


def _difference(recogniser: Recogniser, a: Weighted | None, b: Weighted | None, sign: float) -> Weighted | None:
    if a is None or b is None or a.transposed != b.transposed or (a.factor is None and b.factor is None):
        return None
    if recogniser.key(a.weight) != recogniser.key(b.weight):
        return None
    factor = combine(a.factor, b.factor, sign)
    return None if factor is None else replace(a, factor=factor)


def _difference_of_stacks(
    recogniser: Recogniser, node: Node, left: tuple[Any, Value], right: tuple[Any, Value], sign: float
) -> Bundle | None:
    """`W - W * M` of all masks at once; W may be one weight, which is broadcast."""
    stacks = [value for _, value in (left, right) if isinstance(value, Bundle)]
    count = len(stacks[0].items)
    if any(stack.size is not None or stack.dim != 0 or len(stack.items) != count for stack in stacks):
        return None
    sides = []
    for argument, value in (left, right):
        if isinstance(value, Bundle):
            sides.append([item if isinstance(item, Weighted) else None for item in value.items])
        else:
            sides.append([recogniser.as_weighted(argument)] * count)
    shape, weights = tensor_example(node), [side[0] for side in sides]
    weight = None if weights[0] is None else tensor_example(weights[0].weight)
    if shape is None or weight is None or shape.dim() != 3:
        return None
    differences = [_difference(recogniser, a, b, sign) for a, b in zip(*sides, strict=True)]
    return bundle(differences, 0)


@weight_rule("neg")
def negated_weight(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`-(W * M)`, for `W + -(W * M)`."""
    value = recogniser.value(call.args[0])
    if not isinstance(value, Weighted) or value.factor is None:
        return None
    factor = value.factor
    at, slope = (-factor.at[0], -factor.at[1]), (-factor.slope[0], -factor.slope[1])
    return replace(value, factor=replace(factor, at=at, slope=slope))


@weight_rule("where")
def where(recogniser: Recogniser, node: Node, call: Call) -> Value:
    condition, if_true, if_false = call.args
    return _choose(recogniser, node, recogniser.value(condition), if_true, if_false)


@weight_rule("masked_fill")
def masked_fill(recogniser: Recogniser, node: Node, call: Call) -> Value:
    tensor, mask, fill = call.args
    return _choose(recogniser, node, recogniser.value(mask), fill, tensor)


@weight_rule("index_put")
def index_put(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`w[~M] = 0`."""
    tensor, indices, fill = call.args
    if not isinstance(indices, Sequence) or len(indices) != 1:
        return None
    (mask,) = indices
    number = tensor_example(fill)
    if not same_shape(tensor, mask) or number is None or number.dim() != 0:
        return None
    return _choose(recogniser, node, recogniser.value(mask), fill, tensor)


def _choose(recogniser: Recogniser, node: Node, condition: Value, if_true: Any, if_false: Any) -> Value:
    """`where(M, W, 0)` and its like: a weight or 0, chosen by a mask."""
    if not isinstance(condition, Binary):
        return None
    numbers = [recogniser.value(branch) == Scalar(0) for branch in (if_true, if_false)]
    if numbers.count(True) != 1:
        return None
    weight = if_false if numbers[0] else if_true
    weighted = _upright(recogniser.as_weighted(weight), weight)
    if weighted is None or weighted.factor is not None or not _fits(node, weighted, condition, weight):
        return None
    kept = [float(bool(at) != numbers[0]) for at in condition.at]
    factor = Binary(condition.mask, at=(kept[0], kept[1]))
    return _of_each_mask(node, factor, lambda one: _masked(weighted, one))


# --- The same weights in another place -------------------------------------------------------------------------------


def _each(value: Value, function: Callable[[Weighted], Any]) -> Value:
    """A function of a masked weight, or of each in a bundle."""
    if isinstance(value, Bundle):
        return bundle(
            [function(item) if isinstance(item, Weighted) else None for item in value.items], value.dim, value.size
        )
    return function(value) if isinstance(value, Weighted) else None


@weight_rule("to", "alias")
def cast_weight(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A masked weight in another dtype, as the operator casts it; a copy of a weight that is then written to."""
    source, dtype = call.args[0], dtype_of(node)
    value = recogniser.value(source)
    if isinstance(value, (Weighted, Bundle)) and dtype is not None:
        return _each(value, lambda one: one if rounds_once(one, source, dtype) else None)
    is_copy = call.symbol == "alias" and is_matrix(source) and recogniser.effects.is_written(node)
    return Weighted(source, None) if is_copy and recogniser.as_weighted(source) is not None else None


def rounds_once(weighted: Weighted, node: Any, dtype: torch.dtype) -> bool:
    """Whether a masked weight, at `node`, cast to `dtype` is what casting the weight itself gives."""
    weight, source = dtype_of(weighted.weight), dtype_of(node)
    if weight is None or source is None or not dtype.is_floating_point:
        return False
    return source == weight or holds(source, dtype)


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether `wide` represents every value of `narrow`."""
    return torch.promote_types(wide, narrow) == wide


@weight_rule("getattr", "t", "mT", "transpose", "permute")
def transpose(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """The transpose of a weight, or of each in a stack or a concatenation."""
    source = call.args[0]
    value = recogniser.value(source)
    if not _swaps_last_two(call, source):
        return None
    if isinstance(value, Bundle):
        turned = _each(value, lambda one: replace(one, transposed=not one.transposed))
        if not isinstance(turned, Bundle) or turned.size is None:
            return turned
        return replace(turned, dim=1 - turned.dim)
    weighted = value if isinstance(value, Product) else recogniser.as_weighted(source)
    return None if weighted is None else replace(weighted, transposed=not weighted.transposed)


def _swaps_last_two(call: Call, source: Any) -> bool:
    count = dims(source)
    last_two = [count - 2, count - 1]
    if call.symbol == "getattr":
        return call.args[1] in ("mT", "mH") or (call.args[1] in ("T", "H") and count == 2)
    if call.symbol in ("t", "mT"):
        return count == 2 or (count > 2 and call.symbol == "mT")
    dims_given = call.args[1] if call.symbol == "permute" else call.args[1:]
    order = [dimension(dim, source) for dim in dims_given]
    if call.symbol == "permute":
        return count >= 2 and order == [*range(count - 2), *reversed(last_two)]
    return count >= 2 and sorted(dim for dim in order if dim is not None) == last_two


@weight_rule("unsqueeze")
def stack_to_be_broadcast(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`[n_masks, 1, h, d]` of a stack of weights, for a product with x of three dimensions."""
    value, dim = recogniser.value(call.args[0]), dimension(call.args[1], node)
    if not isinstance(value, Bundle) or value.size is not None or dim is None:
        return None
    return value if 1 <= dim <= dims(node) - 3 else None


# --- Several weights in one tensor -----------------------------------------------------------------------------------


@weight_rule("stack")
def stacked_weights(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`stack([W * M, W * (1 - M)])`."""
    items = _masked_items(recogniser, call.args[0])
    return bundle(items, 0) if items and dimension(call.args[1], node) == 0 else None


def _masked_items(recogniser: Recogniser, items: Any) -> list[Weighted]:
    """Weights of which at least one is masked; none where one of the items is no weight."""
    values = [recogniser.as_weighted(item) for item in items] if isinstance(items, (list, tuple)) else []
    weights = [value for value in values if value is not None]
    is_masked = any(value.factor is not None for value in weights)
    return weights if is_masked and len(weights) == len(values) and all(map(is_matrix, items)) else []


@weight_rule("cat", "vstack")
def concatenated_weights(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`cat([W * M, W * (1 - M)])` along the output features."""
    parts, dim = call.args[0], dimension(call.args[1] if call.symbol == "cat" else 0, node)
    if not isinstance(parts, (list, tuple)) or dim is None:
        return None
    values = [recogniser.value(part) for part in parts]
    if values and all(isinstance(value, Bundle) for value in values):
        return _concatenated_bundles([value for value in values if isinstance(value, Bundle)], dim)
    items, length = _masked_items(recogniser, parts), size(parts[0], dim) if parts else None
    if not items or length is None or not same_shape(*parts) or any(item.transposed != (dim == 1) for item in items):
        return None
    return bundle(items, dim, length)


def _concatenated_bundles(parts: Sequence[Bundle], dim: int) -> Bundle | None:
    """Bundles side by side: stacks along their own dimension, or concatenations along theirs."""
    first = parts[0]
    alike = all((part.dim, part.size) == (dim, first.size) for part in parts)
    return bundle([item for part in parts for item in part.items], dim, first.size) if alike else None


@weight_rule("flatten", "reshape")
def flattened_stack(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`[n, d, h]` of a stack of weights as `[n * d, h]`."""
    source = call.args[0]
    value, before, after = recogniser.value(source), tensor_example(source), tensor_example(node)
    if not isinstance(value, Bundle) or value.size is not None or before is None or after is None:
        return None
    rows = size(source, 1)
    if rows is None or after.dim() != 2 or before.dim() != 3 or after.dtype != before.dtype:
        return None
    if not equal_sizes(after.shape, (len(value.items) * rows, before.shape[2])):
        return None
    upright = all(isinstance(item, Weighted) and not item.transposed for item in value.items)
    return Bundle(value.items, 0, rows) if upright else None


@weight_rule("getitem", "select", "narrow", "slice")
def part_of_a_bundle(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """One of a bundle, or some that lie side by side, by an index, a slice, `unbind`, `chunk` or `split`."""
    return part_of(recogniser, node)


def part_of(recogniser: Recogniser, node: Node) -> Value:
    """What a slice, or a range of slices, of a bundle holds."""
    found = slice_of(node)
    if found is not None:
        base, dim, index = found
        value = recogniser.value(base)
        if not isinstance(value, Bundle) or value.size is not None or value.dim != dim or index >= len(value.items):
            return None
        item = value.items[index]
        is_term = (
            isinstance(item, Gated) and symbol_of(base) == "stack"
        )  # a term that is asked for is a layer of its own
        return None if is_term else item
    part = range_of(node)
    value = None if part is None else recogniser.value(part[0])
    if part is None or not isinstance(value, Bundle) or value.dim != part[1]:
        return None
    _, _, start, stop = part
    step = value.size or 1
    if start % step or stop % step:
        return None
    items = value.items[start // step : stop // step]
    if value.size is not None and len(items) == 1:
        return items[0]
    return replace(value, items=items) if items else None
