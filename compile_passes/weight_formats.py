"""Finds weights that a program decodes from 8 or 4 bits, so that the operator can read them as they are stored.

`W = q.to(x.dtype) * scale[:, None]` is a matrix like any other, so a layer that reads W is fused in any case. If W is
proved to be a stored weight q times scales in the layout of a format (`mglu_ops.formats`), the operator reads q and the
scales instead.

A program may spread its scales over the weights by views, slices, `expand`, `repeat_interleave` and so on. The pass
does not interpret these calls, but runs them on the positions 0, 1, 2, ... of the scales. The result tells which scale
multiplies each weight, and must agree with the format.

A byte may hold two weights of 4 bits. Then elementwise calls must unpack the low and the high half of the bytes, and
one `stack` must join the halves. The pass runs the elementwise calls on all 256 values of a byte. Other ways to unpack
the weights are not recognised.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from mglu_ops.checks import FLOATING
from mglu_ops.formats import FORMATS, WeightFormat

from .calls import as_function, call_key
from .pointwise import Operand, as_dtype, evaluate
from .recognise import Recogniser
from .report import line
from .shapes import dtype_of, example, has_one_element, holds, requires_grad, same_shape, tensor_example
from .sites import Refusal
from .symbols import REARRANGES, as_call, symbol_of
from .values import Number

_CASTS = frozenset({"to", "alias", "detach"})
_RESHAPES = frozenset({"reshape", "flatten", "unflatten"})  # calls that keep the order of the elements

_SPREADS = _CASTS | REARRANGES
"""Symbols of calls that only move, repeat, drop or cast elements of their first argument."""

_ARITHMETIC = frozenset({"and", "rshift", "floor_divide", "rounded_div", "remainder", "add", "sub"})
"""Symbols of calls that, with a number as the second argument, unpack 4 bits of a byte or shift their range."""

_FARTHEST = 12  # the most calls between a weight and the tensor from which it is decoded


@dataclass(frozen=True)
class StoredWeight:
    """A weight as it is stored: in a format of the operator."""

    weight: Node  # the stored weight, with the shape and orientation of the layer's weight
    scale: Node  # the scales in the order of the format, in any shape; or one scale for all weights
    format: WeightFormat
    scale_shape: tuple[int, ...]  # the shape of the scales in the format


def is_decoded(weight: Node) -> bool:
    """True if a weight is computed, within a few calls, from a tensor of 8 bits that may be its stored form."""
    size, nodes, seen = _count(weight), {weight}, {weight}
    for _ in range(_FARTHEST if size else 0):
        nodes = {item for node in nodes for item in node.all_input_nodes} - seen
        seen |= nodes
        if any(_is_8_bit(node) and _count(node) in (size, size // 2) for node in nodes):
            return True
    return False


def stored_weight(
    recogniser: Recogniser, weight: Node, root: Node, dtype: torch.dtype, *, transposed: bool
) -> StoredWeight:
    """Prove that the weight of a layer is a stored weight times its scales (README.md, condition 8).

    Args:
        recogniser: the recogniser of the graph.
        weight: the weight of the layer.
        root: the node with the layer's result.
        dtype: the dtype of the layer.
        transposed: True if the weight is `[in_features, out_features]`.

    Raises:
        Refusal: the proof fails.
    """
    refusals = []
    for decoding in _decodings(weight, transposed):
        try:
            _check_numbers(decoding, dtype)
            found = _with_scales(decoding, dtype)
            _check_tensors(recogniser, found, weight, root)
        except Refusal as refusal:
            refusals.append(refusal)
        else:
            return found
    raise refusals[0]


# --- The product -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Decoding:
    """A possible reading of a weight as the product of a stored weight and its scales.

    `products`, `casts` and `scales` are paths against the data flow: each node is computed from the next node.
    """

    weight: Node
    transposed: bool  # True if the weight is `[in_features, out_features]`
    products: Sequence[Node]  # from the weight to the product
    casts: Sequence[Node]  # from one factor of the product to the stored weight
    scales: Sequence[Node]  # from the other factor to the scales
    packed: int = 1  # the number of weights in one element of the stored weight

    @property
    def stored(self) -> Node:
        return self.casts[-1]


def _decodings(weight: Node, transposed: bool) -> list[_Decoding]:
    """The possible readings of a weight as a product. Readings with two weights in a byte come first."""
    products = _path(weight, _CASTS | _RESHAPES)
    call = as_call(products[-1])
    packed, found = [], []
    for factor, scale in (call.args, call.args[::-1]) if call is not None and call.symbol == "mul" else ():
        scales = _path(scale, _SPREADS)
        if calls := [] if transposed else _unpacking(factor, weight):
            packed.append(_Decoding(weight, transposed, products, calls, scales, _PACKED.packed))
        casts = _path(factor, _CASTS | _RESHAPES)
        ends = [i for i, node in enumerate(casts) if _is_8_bit(node) and same_shape(node, weight)]
        if ends:
            found.append(_Decoding(weight, transposed, products, casts[: ends[0] + 1], scales))
    if not packed and not found:
        raise Refusal(f"`{line(products[-1])}` is not a product of a tensor of 8 or 4 bits and scales")
    return packed + found


def _path(node: Node | float, symbols: frozenset[str]) -> list[Node]:
    """The path from a node through calls with one of `symbols`: each call reads the next node. Empty for a number."""
    path = [node] if isinstance(node, Node) else []
    while path and (call := as_call(path[-1])) is not None and call.symbol in symbols:
        source, others = call.args[0], path[-1].all_input_nodes[1:]
        keeps_numbers = call.symbol == "to" or dtype_of(source) == dtype_of(path[-1])  # False for `view(dtype)`
        reads_others = others and call.symbol not in _CASTS and call.symbol != "expand_as"  # for example an index
        if tensor_example(source) is None or not keeps_numbers or reads_others:
            break
        path.append(source)
    return path


def _check_numbers(decoding: _Decoding, dtype: torch.dtype) -> None:
    """Refuse a weight that is rounded to a dtype narrower than the layer's, or whose stored numbers are rounded."""
    for node in decoding.products:
        if not _represents(dtype_of(node), dtype):
            rounded = _name(dtype_of(node))
            raise Refusal(f"`{line(node)}` rounds the weight to {rounded}, and the layer is {_name(dtype)}")
    for node in decoding.casts if decoding.packed == 1 else ():
        if not _represents(dtype_of(node), dtype_of(decoding.stored)):
            raise Refusal(f"`{line(node)}` rounds the stored weight to {_name(dtype_of(node))}")


def _check_tensors(recogniser: Recogniser, found: StoredWeight, weight: Node, root: Node) -> None:
    """Refuse tensors that require a gradient, that are on another device, or whose shards may divide blocks."""
    records = recogniser.view.modes(root).grad is not False
    for node in (found.weight, found.scale):
        if records and requires_grad(node):
            raise Refusal(f"`{node.name}` requires a gradient, which a stored weight and its scales do not have")
        if example(node).device != example(weight).device:
            raise Refusal(f"`{node.name}` is on {example(node).device}, and the weight on {example(weight).device}")
    if found.format.rows > 1 and type(example(weight)).__module__.startswith("torch.distributed"):
        raise Refusal(f"`{found.weight.name}` is a DTensor, whose shards may divide blocks that share a scale")


# --- Two weights in a byte -------------------------------------------------------------------------------------------

_PACKED = FORMATS["int4_group"]


def _unpacking(factor: Node | float, weight: Node) -> Sequence[Node]:
    """The path from a factor to the bytes that it unpacks; empty if it does not unpack bytes.

    The factor must be a function of the flattened `stack((low, high), -1)`, where low and high are functions of bytes.
    """
    shape = _shape(weight)
    joint = _path(factor, _CASTS | _RESHAPES | _ARITHMETIC)
    call = as_call(joint[-1]) if joint else None
    if shape is None or len(shape) != 2 or call is None or call.symbol != "stack" or len(call.args[0]) != 2:
        return []
    halves = [_path(half, _CASTS | _ARITHMETIC) for half in call.args[0]]
    bytes_of_halves = {path[-1] for path in halves if path}
    wanted = (shape[0], shape[1] // 2)
    if len(bytes_of_halves) != 1 or _shape(joint[-1]) not in {(*wanted, 2)} or call.args[1] not in (-1, 2):
        return []
    (stored,) = bytes_of_halves
    if dtype_of(stored) != _PACKED.dtype or _shape(stored) != wanted:
        return []
    octets = torch.arange(256, dtype=_PACKED.dtype, device="cpu")
    numbers = _PACKED.dequantize(octets[:, None], torch.ones(256, 1, device="cpu"), torch.float32).T.tolist()
    for path, unpacked in zip(halves, numbers, strict=True):
        values: tuple[Number, ...] | None = tuple(range(256))
        for node in (*path[-2::-1], *joint[-2::-1]):
            values = values and _applied(node, values)
        if values is None or list(values) != unpacked:
            return []
    return [*joint, *dict.fromkeys(node for path in halves for node in path[:-1]), stored]


def _applied(node: Node, values: tuple[Number, ...]) -> tuple[Number, ...] | None:
    """The results of an elementwise call for each of `values`; None if a result does not fit the dtype of `node`."""
    (item, *_), dtype = node.all_input_nodes, dtype_of(node)
    before = dtype_of(item)
    if symbol_of(node) in _RESHAPES or dtype is None or before is None:
        return values
    if symbol_of(node) in _CASTS:  # not run, because the call may name a device
        cast = [number for value in values if (number := as_dtype(value, dtype)) is not None]
        return tuple(cast) if len(cast) == len(values) else None
    result = evaluate(node, {item: Operand(values, before)}, dtype)
    return None if result is None else result.values


def _run(node: Node, inputs: Mapping[Node, Tensor]) -> Tensor | None:
    """Run a call, which only moves elements, on the positions of the elements.

    Returns None for a view that needs the strides or the dtype of the program's tensor.
    """
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), inputs.__getitem__)
    try:
        moved = as_function(node)(*args, **kwargs)
    except RuntimeError:
        return None
    return moved if moved.dtype is torch.int32 and moved.shape == _shape(node) else None


# --- Scales ----------------------------------------------------------------------------------------------------------


def _with_scales(decoding: _Decoding, dtype: torch.dtype) -> StoredWeight:
    """The stored weight with the tensor of its scales, in the first format that fits both."""
    stored, path, shape = decoding.stored, decoding.scales, _shape(decoding.weight)
    assert shape is not None, "`is_decoded` has counted the elements"
    taken = [fmt for fmt in FORMATS.values() if fmt.packed == decoding.packed and fmt.dtype is not None]
    formats = [fmt for fmt in taken if fmt.dtype == dtype_of(stored)]
    if not formats:
        names = " and ".join(sorted({_name(fmt.dtype) for fmt in taken}))
        raise Refusal(f"`{stored.name}` is {_name(dtype_of(stored))}, and the operator takes {names}")
    for end in reversed(range(len(path))):  # from the end of the path, so that the fewest calls precede the operator
        if _is_rounded(path[: end + 1], dtype):
            continue
        for fmt in formats:
            if not _is_scale(dtype_of(path[end]), fmt):
                continue
            scale_shape = fmt.scale_shape(*(shape[::-1] if decoding.transposed else shape))
            if _spreads(decoding, path[end], path[:end][::-1], fmt, scale_shape):
                return StoredWeight(stored, path[end], fmt, scale_shape)
    layouts = ["row" if fmt.columns is None else f"block of {fmt.rows} x {fmt.columns}" for fmt in formats]
    number = _name(formats[0].scale_dtype)
    scale = f"`{line(path[-1])}` ({_name(dtype_of(path[-1]))})" if path else "a number"
    raise Refusal(
        f"the scales of `{stored.name}` are {scale}, which is not proved to be one {number} number for each "
        f"{' or '.join(layouts)}"
    )


def _is_scale(dtype: torch.dtype | None, fmt: WeightFormat) -> bool:
    """True if `dtype` is a float of at least 16 bits, and the format's scale dtype represents all of its numbers."""
    return dtype in FLOATING and fmt.scale_dtype is not None and _represents(fmt.scale_dtype, dtype)


def _is_rounded(path: Sequence[Node], dtype: torch.dtype) -> bool:
    """True if a cast on a path rounds, because its dtype is narrower than its input's and than the layer's."""
    dtypes = [dtype_of(node) for node in reversed(path)]
    return any(not _represents(b, a) and not _represents(b, dtype) for a, b in pairwise(dtypes))


_known: dict[Hashable, bool] = {}  # results of `_spreads`, which takes up to a second for a large weight


def _spreads(
    decoding: _Decoding, scale: Node, calls: Sequence[Node], fmt: WeightFormat, scale_shape: Sequence[int]
) -> bool:
    """True if `calls` spread the scales over the product so that each weight gets the scale that the format assigns.

    A single scale fits every format, because the rewrite repeats it.
    """
    if has_one_element(scale):
        return True
    weight, product = decoding.weight, decoding.products[-1]
    nodes = [scale, weight, product, *(item for node in calls for item in node.all_input_nodes)]
    shapes = {node: shape for node in nodes if (shape := _shape(node)) is not None}
    if len(shapes) < len(set(nodes)) or _count(scale) != math.prod(scale_shape):
        return False
    key = (fmt.name, decoding.transposed, *map(call_key, calls), *map(shapes.get, nodes))
    if key not in _known:
        with _disable_current_modes():
            found = _spread_positions(scale, calls, shapes)
            found = None if found is None else found.expand(shapes[product]).reshape(shapes[weight])
            _known[key] = found is not None and _is_layout(found.T if decoding.transposed else found, fmt)
    return _known[key]


def _spread_positions(scale: Node, calls: Sequence[Node], shapes: Mapping[Node, tuple[int, ...]]) -> Tensor | None:
    """Run `calls` on the positions of the scales. Returns None if a view needs the strides of the program's scales."""
    made = {node: torch.empty(shape, device="meta") for node, shape in shapes.items()}  # `expand_as` reads the shape
    made[scale] = _positions(shapes[scale])
    for node, source in zip(calls, (scale, *calls), strict=False):
        call = as_call(node)
        if call is not None and call.symbol == "to":
            made[node] = made[source]
            continue
        moved = _run(node, made)
        if moved is None:
            return None
        made[node] = moved
    return made[calls[-1] if calls else scale]


def _is_layout(positions: Tensor, fmt: WeightFormat) -> bool:
    """True if each weight has the position of its scale in the format."""
    wanted = fmt.of_weights(_positions(fmt.scale_shape(*positions.shape)), *positions.shape)
    return torch.equal(positions, wanted.expand(positions.shape))


def _positions(shape: Sequence[int]) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.int32, device="cpu").view(*shape)


# --- Tensors ---------------------------------------------------------------------------------------------------------


def _is_8_bit(node: Node) -> bool:
    dtype = dtype_of(node)
    return dtype is not None and dtype.itemsize == 1 and dtype is not torch.bool


def _represents(wide: torch.dtype | None, narrow: torch.dtype | None) -> bool:
    """True if `wide` represents every number of `narrow`. Unlike `holds`, this also works for floats of 8 bits."""
    if wide is None or narrow is None:
        return False
    if wide.is_floating_point and wide.itemsize == 1:
        return wide == narrow
    return wide in FLOATING if narrow.is_floating_point and narrow.itemsize == 1 else holds(wide, narrow)


def _shape(node: Node) -> tuple[int, ...] | None:
    """The shape of a tensor, if all its sizes are numbers."""
    value = tensor_example(node)
    return None if value is None or not all(type(n) is int for n in value.shape) else tuple(value.shape)


def _count(node: Node) -> int:
    """The number of elements of a tensor; 0 if it is not known."""
    shape = _shape(node)
    return 0 if shape is None else math.prod(shape)


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
