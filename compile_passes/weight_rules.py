"""Rules for weights: masked by products, choices and differences, transposed, and cast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from .mask_algebra import checked, combine, multiply
from .recognise import Recogniser, rule
from .symbols import Call, dimension, dims, equal_sizes, is_matrix, same_shape, tensor_example
from .values import Binary, Product, Scalar, Value, Weighted, stack_of


@rule("mul")
def masked_weight(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`W * M`, and `W * m` of which nothing tells yet which is the mask."""
    if len(call.args) != 2:
        return None
    for mask, weight in (call.args, tuple(reversed(call.args))):
        factor = recogniser.value(mask)
        if isinstance(factor, Binary):
            return _apply_mask(recogniser, node, factor, weight)
    if not all(recogniser.value(argument) is None and _is_real(argument) for argument in call.args):
        return None
    for mask, weight in (call.args, tuple(reversed(call.args))):
        unproved = recogniser.as_unproved_mask(mask) if dims(mask) == 3 else None
        if unproved is not None and recogniser.as_weighted(weight) is not None:
            return _apply_mask(recogniser, node, unproved, weight)
    left, right = call.args
    return Product(left, right) if is_matrix(left) and is_matrix(right) else None


def _is_real(argument: Any) -> bool:
    example = tensor_example(argument)
    return example is not None and example.dtype is not torch.bool


def _upright(weighted: Weighted | None, argument: Any) -> Weighted | None:
    """`weighted` as it lies at its node, as a mask of it must: a transposed weight is a weight of its own."""
    if weighted is None or not weighted.transposed:
        return weighted
    return Weighted(argument, None) if weighted.factor is None and is_matrix(argument) else None


def _fits(node: Node, weighted: Weighted, argument: Any) -> bool:
    """Whether `node` has the shape of the masked weight: that of `argument`, or of the stack of masks.

    (A mask of another shape than the weight's, which is broadcast, is refused with its reason at the site.)
    """
    shape, weight = tensor_example(node), tensor_example(weighted.weight)
    if weighted.factor is None or weighted.factor.mask.stack is None:
        return same_shape(node, argument)
    masks = weighted.factor.mask.shape
    return (
        shape is not None
        and weight is not None
        and equal_sizes(shape.shape, masks)
        and equal_sizes(weight.shape, masks[1:])
    )


def _apply_mask(recogniser: Recogniser, node: Node, mask: Binary, argument: Any) -> Weighted | None:
    weighted = _upright(recogniser.as_weighted(argument), argument)
    if weighted is None:
        return None
    factor = mask if weighted.factor is None else multiply(mask, weighted.factor)
    if factor is None:
        return None
    masked = replace(weighted, factor=factor)
    return masked if _fits(node, masked, argument) else None


@rule("add", "sub")
def difference_of_weights(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`W - W * M`."""
    if len(call.args) != 2 or call.kwargs.get("alpha", 1) != 1:
        return None
    left, right = call.args
    a, b = recogniser.as_weighted(left), recogniser.as_weighted(right)
    if a is not None and b is not None and a.transposed != b.transposed:
        a, b = _upright(a, left), _upright(b, right)
    if a is None or b is None or a.transposed != b.transposed or (a.factor is None and b.factor is None):
        return None
    if recogniser.key(a.weight) != recogniser.key(b.weight):
        return None
    factor = combine(a.factor, b.factor, 1 if call.symbol == "add" else -1)
    if factor is None:
        return None
    masked = replace(a, factor=factor)
    return masked if masked.transposed or _fits(node, masked, left if a.factor is not None else right) else None


@rule("where")
def where(recogniser: Recogniser, node: Node, call: Call) -> Value:
    if len(call.args) != 3:
        return None
    condition, if_true, if_false = call.args
    if node.op == "call_method":
        condition, if_true = if_true, condition
    return _choose(recogniser, node, recogniser.value(condition), if_true, if_false)


@rule("masked_fill")
def masked_fill(recogniser: Recogniser, node: Node, call: Call) -> Value:
    if len(call.args) != 3:
        return None
    tensor, mask, fill = call.args
    return _choose(recogniser, node, recogniser.value(mask), fill, tensor)


@rule("index_put")
def index_put(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`w[~M] = 0`."""
    if len(call.args) != 3 or not isinstance(call.args[1], Sequence) or len(call.args[1]) != 1:
        return None
    tensor, (mask,), fill = call.args
    condition, number = recogniser.value(mask), tensor_example(fill)
    if not same_shape(tensor, mask) or number is None or number.dim() != 0:
        return None
    return _choose(recogniser, node, condition, fill, tensor)


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
        return checked(node, factor)
    weights = [branch for branch, value in zip(branches, values, strict=True) if not isinstance(value, Scalar)]
    weighted = _upright(recogniser.as_weighted(weights[0]), weights[0])
    if len(weights) != 1 or weighted is None or weighted.factor is not None or 0.0 not in coefficients:
        return None
    masked = replace(weighted, factor=factor)
    return masked if _fits(node, masked, weights[0]) else None


@rule("to", "alias")
def cast_weight(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A masked weight in another dtype, as the operator casts it; a copy of a weight that is then written to."""
    source, result = call.get(0, "input"), tensor_example(node)
    value = recogniser.value(source)
    if isinstance(value, Weighted) and result is not None:
        return value if rounds_once(value, source, result.dtype) else None
    if call.symbol == "alias" and value is None and is_matrix(source) and recogniser.effects.is_written(node):
        return Weighted(source, None)
    return None


def rounds_once(weighted: Weighted, node: Any, dtype: torch.dtype) -> bool:
    """Whether a masked weight, at `node`, cast to `dtype` is what casting the weight itself gives."""
    weight, source = tensor_example(weighted.weight), tensor_example(node)
    if weight is None or source is None or not dtype.is_floating_point:
        return False
    return source.dtype == weight.dtype or holds(source.dtype, dtype)


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether `wide` represents every value of `narrow`."""
    return torch.promote_types(wide, narrow) == wide


@rule("getattr", "transpose", "permute")
def transpose(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """The transpose of a weight, or of each in a stack."""
    source = call.get(0, "input")
    value = recogniser.value(source)
    weighted = value if isinstance(value, Product) else recogniser.as_weighted(source)
    if weighted is None or not _swaps_last_two(node, call, source):
        return None
    return replace(weighted, transposed=not weighted.transposed)


def _swaps_last_two(node: Node, call: Call, source: Any) -> bool:
    count = dims(source)
    last_two = [count - 2, count - 1]
    if call.symbol == "getattr":
        return call.args[1] == "mT" or (call.args[1] == "T" and count == 2)
    if call.symbol == "permute":
        order = call.args[1] if isinstance(call.args[1], Sequence) else call.args[1:]
        return [dimension(dim, source) for dim in order] == [*range(count - 2), *reversed(last_two)]
    if len(call.args) == 1:  # `t`, `numpy_T`, `mT`
        return count == 2 or "mT" in str(node.target)
    swapped = [dimension(call.get(1, "dim0"), source), dimension(call.get(2, "dim1"), source)]
    return sorted(dim for dim in swapped if dim is not None) == last_two


@rule("unsqueeze")
def stack_to_be_broadcast(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`[n_masks, 1, h, d]` of a stack of weights, for a product with x of three dimensions."""
    value = recogniser.value(call.get(0, "input"))
    dim = dimension(call.get(1, "dim"), node)
    if not isinstance(value, Weighted) or stack_of(value) is None or dim is None:
        return None
    return value if 1 <= dim <= dims(node) - 3 else None
