"""Rules for the same weights in another dtype, layout or tensor: cast, copied, transposed, stacked, concatenated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ..recognise import Recogniser
from ..shapes import (
    dimension,
    dims,
    dtype_of,
    has_shape,
    holds,
    is_matrix,
    requires_grad,
    same_shape,
    size,
    tensor_example,
)
from ..symbols import Call
from ..values import Bundle, Interleaved, Product, Value, Weighted
from .bundles import bundle, each
from .rule import rule


@rule("to", "alias")
def cast_weight(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A masked weight in another dtype, if the operator's own cast gives the same; a copy of a weight."""
    (source,), dtype = call.args, dtype_of(node)
    value = recogniser.value(source)
    if isinstance(value, Weighted) and value.factor is None and call.symbol == "to":
        return None  # a weight in another dtype is another weight
    if isinstance(value, (Weighted, Bundle)) and dtype is not None:
        return each(value, lambda one: one if isinstance(one, Weighted) and rounds_once(one, source, dtype) else None)
    is_copy = call.symbol == "alias" and requires_grad(source) == requires_grad(node)
    return recogniser.as_weighted(source) if is_copy else None


def rounds_once(weighted: Weighted, node: Any, dtype: torch.dtype) -> bool:
    """Whether casting the masked weight at `node` to `dtype` equals casting the weight first and masking it then.

    That fails where an earlier cast has already rounded the weight.
    """
    source = dtype_of(node)
    return source is not None and (source == dtype_of(weighted.weight) or holds(source, dtype))


@rule("getattr", "t", "mT", "transpose", "permute")
def transpose(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """The transpose of a weight, or of each weight in a stack or a concatenation."""
    source = call.args[0]
    value = recogniser.value(source)
    if not swaps_last_two(call):
        return None
    if isinstance(value, Bundle):
        flipped = each(value, lambda one: _flipped(one) if isinstance(one, Weighted) else None)
        if not isinstance(flipped, Bundle) or flipped.size is None:
            return flipped
        return replace(flipped, dim=1 - flipped.dim)
    weighted = value if isinstance(value, Product) else recogniser.as_weighted(source)
    return None if weighted is None else _flipped(weighted)


def _flipped(weighted: Weighted | Product) -> Weighted | Product:
    return replace(weighted, transposed=not weighted.transposed)


def swaps_last_two(call: Call) -> bool:
    """Whether a call swaps the last two dimensions of its argument and leaves the others in place."""
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
    """A stack of weights `[n_masks, h, d]` as `[n_masks, 1, h, d]`, for a product with x of three dimensions."""
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
    """The items as weights, if all of them are weights and at least one is masked; otherwise an empty list."""
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
    if len(bundles) == len(values):  # along their own dimension
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
    """`stack([W * M, W * (1 - M)], 1)` as one tensor `[d * 2, h]`, which interleaves their rows."""
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
    """A stack of weights `[n, d, h]` as one tensor `[n * d, h]`."""
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
