"""Replaces the nodes of a layer by one call of `mglu::forward_ste` (trained masks) or `mglu::forward` (fixed masks).

Layers of experts become `mglu::grouped_forward_ste` or `mglu::grouped_forward`, which take the rows of all experts as
one matrix.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch._inductor.config as inductor_config
from torch.fx import Graph, Node

from mglu_ops.checks import FLOATING

from . import shapes
from .interference import check_interference, with_strides_of
from .proof import Layer
from .recognise import Recogniser
from .report import AT_EACH_CALL, BEFOREHAND, WHEN_COMPILED
from .shapes import dims, dtype_of, has_one_element, has_shape, requires_grad, size, slice_of, tensor_example
from .sites import Refusal
from .symbols import as_call
from .values import Binary, Mask, MaskWeight, Slice
from .view import View
from .weight_formats import StoredWeight

_mglu = torch.ops.mglu


@dataclass(frozen=True)
class Replacement:
    """A layer and the nodes that replace it."""

    layer: Layer
    nodes: tuple[Node, ...]  # the last one holds the layer's result
    packed: str  # when the masks are packed: a constant of `report`


def replacement(recogniser: Recogniser, layer: Layer) -> Replacement:
    """Insert nodes that compute a layer before its root in the graph of the view; no node reads them yet.

    The operator reads the stored weight if the layer has one. If that is refused, for example because a node overwrites
    the stored weight, the operator reads the decoded weight.

    Raises:
        Refusal: nodes around the layer prevent fusing. After this or any other error, the view is unchanged.
    """
    try:
        return _replacement(recogniser, layer)
    except Refusal as refusal:
        if layer.stored is None:
            raise
        return _replacement(recogniser, replace(layer, stored=None, why_decoded=str(refusal)))


def _replacement(recogniser: Recogniser, layer: Layer) -> Replacement:
    graph, root, value = recogniser.view.graph, layer.site.root, layer.site.value
    before = root.prev
    try:
        with graph.inserting_before(root):
            result, packed = _fused_call(graph, recogniser, layer)
            if layer.scale != 1:
                result = graph.call_function(operator.mul, (result, layer.scale))
            if value.rest is not None:
                addends = (value.rest, result) if value.rest_first else (result, value.rest)
                result = graph.call_function(operator.add, addends)
            result = with_strides_of(recogniser.view, root, _nodes_between(before, root))
        nodes = tuple(_nodes_between(before, root))
        x = layer.site.terms[0].gate.x
        check_interference(recogniser, root, layer.interior, nodes, x, trains=requires_grad(root))
    except BaseException:
        for node in reversed(_nodes_between(before, root)):
            graph.erase_node(node)
        raise
    result.meta = dict(root.meta)
    return Replacement(layer, nodes, packed)


def _nodes_between(before: Node, after: Node) -> list[Node]:
    nodes = []
    while before.next is not after:
        before = before.next
        nodes.append(before)
    return nodes


def rewrite(view: View, replacements: Sequence[Replacement]) -> None:
    """Redirect the users of the layers to the replacements, erase unused nodes, and update the original graph."""
    for made in replacements:
        made.layer.site.root.replace_all_uses_with(made.nodes[-1])
    _erase_dead(view, {node for made in replacements for node in made.layer.interior})
    view.write_back({made.layer.site.root: made.nodes[-1] for made in replacements})


def _erase_dead(view: View, spelling: set[Node]) -> None:
    """Erase unused nodes of the layers, assertions about the layers' nodes, and nodes that only erased nodes read.

    `spelling` has the nodes of the layers. Calls that draw random numbers stay, because without them later calls would
    draw other numbers.
    """
    dying = set(spelling)
    for node in reversed(view.graph.nodes):
        call = as_call(node)
        is_assertion = call is not None and call.symbol == "assert_metadata" and call.args[0] in dying
        if (node in dying or is_assertion) and not node.users and not view.effect(node).draws:
            dying.update(item for item in node.all_input_nodes if view.is_repeatable(item))
            view.graph.erase_node(node)


def _fused_call(graph: Graph, recogniser: Recogniser, layer: Layer) -> tuple[Node, str]:
    """Make the call of the operator. Returns the node with the layer's result, and when its masks are packed."""
    x = _cast(graph, _made(graph, recogniser, layer.x), layer.dtype)
    stored = layer.stored
    weight = stored.weight if stored else _made(graph, recogniser, layer.weight)
    if layer.weight_scale != 1:
        weight = graph.call_function(operator.mul, (weight, layer.weight_scale))
    if not stored and dtype_of(layer.weight) != layer.dtype:
        weight = graph.call_method("to", (weight, layer.dtype))
    weight = _transpose(graph, layer, weight)
    layer = _in_weight_order(layer)
    mask_weight = _mask_weights(graph, recogniser, layer)
    offs: tuple[Node, ...] = (layer.offs,) if layer.offs is not None else ()
    is_batch = layer.is_of_experts and not offs
    if is_batch:
        offs = (_ends_of_equal_groups(graph, layer),)
        x = graph.call_method("flatten", (x, 0, 1))
        mask_weight = mask_weight and graph.call_method("flatten", (mask_weight, 0, 1))
    call = getattr(_mglu, layer.operator).default
    if layer.trains_masks:
        logits = _transpose(graph, layer, _mask_logits(graph, recogniser, layer))
        pair = graph.call_function(call, (x, weight, logits, *offs, layer.activation, mask_weight))
        result, packed = graph.call_function(operator.getitem, (pair, 0)), AT_EACH_CALL
    else:
        masks, packed = _packed_masks(graph, recogniser, layer)
        format_of_weight = (_scales(graph, stored), stored.format.name) if stored else ()
        arguments = (x, weight, masks, *offs, layer.activation, mask_weight, *format_of_weight)
        result = graph.call_function(call, arguments)
    if is_batch:
        result = graph.call_method("unflatten", (result, 0, (_number_of(graph, layer.x, 0), -1)))
    if layer.site.terms[0].gate.swapped:
        result = graph.call_method("t", (result,))
    return result, packed


def _made(graph: Graph, recogniser: Recogniser, node: Node) -> Node:
    """A node of the program unchanged; for a node that a rule has imagined, a copy."""
    if node not in recogniser.imagined:
        return node
    return graph.node_copy(node, lambda item: _made(graph, recogniser, item))


def _ends_of_equal_groups(graph: Graph, layer: Layer) -> Node:
    """The offsets t, 2 t, ..., E t: where each expert's rows end after x `[E, t, in_features]` is flattened."""
    example = tensor_example(layer.x)
    assert example is not None, "checked by proof.check"
    experts = _number_of(graph, layer.x, 0)
    stop = experts + 1 if isinstance(experts, int) else graph.call_function(operator.add, (experts, 1))
    numbers = graph.call_function(torch.arange, (1, stop), {"dtype": torch.int32, "device": example.device})
    return graph.call_function(operator.mul, (numbers, _number_of(graph, layer.x, 1)))


def _number_of(graph: Graph, node: Node, dim: int) -> Node | int:
    """The size of a tensor along a dimension: a number, or a node for a symbolic size."""
    known = size(node, dim)
    return graph.call_method("size", (node, dim)) if known is None else known


def _scales(graph: Graph, stored: StoredWeight) -> Node:
    """The scales of a stored weight in the dtype and shape of its format."""
    assert stored.format.scale_dtype is not None, "a stored weight has scales"
    scales = _cast(graph, stored.scale, stored.format.scale_dtype)
    if has_shape(stored.scale, stored.scale_shape):
        return scales
    if has_one_element(stored.scale):
        ones = graph.call_method("reshape", (scales, (1,) * len(stored.scale_shape)))
        return graph.call_method("expand", (ones, stored.scale_shape))
    return graph.call_method("reshape", (scales, stored.scale_shape))


def _in_weight_order(layer: Layer) -> Layer:
    """The layer with its masks sorted by their columns in the mask weights, if all mask weights are columns."""
    columns = [column for column in map(_column_of, layer.mask_weights) if column is not None]
    if not columns or len(columns) != len(layer.mask_weights):
        return layer
    order = sorted(range(len(columns)), key=lambda i: columns[i][1])
    return replace(
        layer, masks=tuple(layer.masks[i] for i in order), mask_weights=tuple(layer.mask_weights[i] for i in order)
    )


def _column_of(mask_weight: MaskWeight | float) -> tuple[Node, int] | None:
    """`(tensor, i)` if a mask weight is column i of a tensor."""
    if not isinstance(mask_weight, MaskWeight) or mask_weight.is_number:
        return None
    return shapes.column_of(mask_weight.node) if mask_weight.index is None else (mask_weight.node, mask_weight.index)


def _mask_weights(graph: Graph, recogniser: Recogniser, layer: Layer) -> Node | None:
    """The mask weights `[..., n_masks]`: a tensor that has exactly these columns, or else their concatenation."""
    if not layer.mask_weights:
        return None
    columns = [column for column in map(_column_of, layer.mask_weights) if column is not None]
    if len(columns) == len(layer.mask_weights) and len({recogniser.key(base) for base, _ in columns}) == 1:
        base, first = columns[0][0], layer.mask_weights[0]
        assert isinstance(first, MaskWeight)
        stack_dim = -1 if first.index is None else first.dim
        if [index for _, index in columns] == list(range(size(base, stack_dim) or 0)):
            return _masks_last(graph, layer, base, stack_dim)
    made = [_as_column(graph, layer, mask_weight) for mask_weight in layer.mask_weights]
    return graph.call_function(torch.cat, (made, -1))


def _masks_last(graph: Graph, layer: Layer, mask_weight: Node, stack_dim: int) -> Node:
    """The mask weights of a stack as `[..., n_masks]`. A dimension of size 1 for the features is removed."""
    has_features = dims(mask_weight) > dims(layer.x)
    if stack_dim not in (-1, dims(mask_weight) - 1):
        mask_weight = graph.call_method("movedim", (mask_weight, stack_dim, -1))
    return graph.call_method("squeeze", (mask_weight, -2)) if has_features else mask_weight


def _as_column(graph: Graph, layer: Layer, mask_weight: MaskWeight | float) -> Node:
    """The mask weights of one mask as `[..., 1]`."""
    if isinstance(mask_weight, MaskWeight) and not mask_weight.is_number:
        if mask_weight.index is None:
            return mask_weight.node
        whole = _masks_last(graph, layer, mask_weight.node, mask_weight.dim)
        return graph.call_method("narrow", (whole, -1, mask_weight.index, 1))
    tokens = graph.call_method("narrow", (layer.x, -1, 0, 1))  # read only for its shape `[..., 1]`
    if not isinstance(mask_weight, MaskWeight):
        return graph.call_function(torch.full_like, (tokens, mask_weight), {"dtype": layer.dtype})
    number = mask_weight.node
    if mask_weight.index is not None:
        number = graph.call_method("select", (number, mask_weight.dim, mask_weight.index))
    return graph.call_method("expand_as", (graph.call_method("reshape", (number, 1)), tokens))


def _cast(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    example = tensor_example(node)
    assert example is not None, "checked by proof.check"
    return node if example.dtype == dtype else graph.call_method("to", (node, dtype))


def _transpose(graph: Graph, layer: Layer, node: Node) -> Node:
    """Transpose a weight `[in_features, out_features]` or its masks. A weight `[out_features, in_features]` stays."""
    return graph.call_method("transpose", (node, -2, -1)) if layer.transposed else node


def _mask_logits(graph: Graph, recogniser: Recogniser, layer: Layer) -> Node:
    """A tensor `[n_masks, ...]` that is positive where the gate's masks are 1, and that receives their gradient.

    The tensor holds the user's logits if the graph has them. Otherwise it holds the straight-through masks minus 1/2,
    and autograd reaches the logits through these masks, as without the operator.
    """
    carriers = [(mask.carrier, complement) for mask, complement in layer.masks]
    logits = [(c.logits, c.index) for c, complement in carriers if c and c.logits and not complement]
    if len(logits) == len(layer.masks):
        return _joined(graph, recogniser, layer, logits)
    masks = [(carrier.node, carrier.index) for carrier, _ in carriers if carrier is not None]
    if not any(complement for _, complement in carriers):
        joined = _joined(graph, recogniser, layer, masks)
        return _logits_of(recogniser, joined) or graph.call_function(operator.sub, (joined, 0.5))
    slices = [_slice(graph, node, index) for node, index in masks]
    signed = zip(slices, (complement for _, complement in carriers), strict=True)
    return _stack(graph, layer, [graph.call_function(operator.sub, (0.5, m) if c else (m, 0.5)) for m, c in signed])


def _logits_of(recogniser: Recogniser, masks: Node) -> Node | None:
    """The logits of the straight-through masks that a node holds, if the graph has the logits."""
    value = recogniser.value(masks)
    carrier = value.mask.carrier if isinstance(value, Binary) else None
    return carrier.logits if carrier is not None and carrier.node is masks else None


def _packed_masks(graph: Graph, recogniser: Recogniser, layer: Layer) -> tuple[Node, str]:
    """The packed masks of the gate, and when they are packed.

    If the masks are `logits > 0`, one operator compares and packs the logits.
    """
    logits = _whole_logits(recogniser, layer)
    if logits is not None:
        packed = _pack(graph, layer, _mglu.pack_logits.default, logits)
    else:
        bits = _mask_bits(graph, recogniser, layer)
        call = as_call(bits)
        if call is not None and call.symbol == "unpack_masks" and not layer.transposed:
            assert isinstance(call.args[0], Node)
            return call.args[0], BEFOREHAND
        packed = _pack(graph, layer, _mglu.pack_masks.default, bits)
    return packed, WHEN_COMPILED if _is_folded(recogniser, packed) else AT_EACH_CALL


def _pack(graph: Graph, layer: Layer, packing: torch._ops.OpOverload, masks: Node) -> Node:
    """Pack masks `[n_masks, ...]`. The masks `[E, n_masks, ...]` of experts are packed as rows of one large layer."""
    masks = _transpose(graph, layer, masks)
    if not layer.is_of_experts:
        return graph.call_function(packing, (masks,))
    rows = graph.call_method("flatten", (graph.call_method("movedim", (masks, 0, 1)), 1, 2))
    packed = graph.call_function(packing, (rows,))
    return graph.call_method("unflatten", (packed, 0, (_number_of(graph, layer.weight, 0), -1)))


def _is_folded(recogniser: Recogniser, node: Node) -> bool:
    """True if Inductor's freezing evaluates a node while compiling, because it depends on module attributes alone."""
    if not inductor_config.freezing or torch.is_grad_enabled():
        return False
    given = [item for item in shapes.sources(node) if item.op in ("placeholder", "get_attr")]
    return all(item.op == "get_attr" and recogniser.view.is_constant(item) for item in given)


def _whole_logits(recogniser: Recogniser, layer: Layer) -> Node | None:
    """The tensor L `[n_masks, ...]` such that mask i of the gate is `L[i] > 0` for every i; None if there is none."""
    if any(mask.logits is None or complement for mask, complement in layer.masks):
        return None
    sources: list[Slice] = [(mask.logits, mask.index) for mask, _ in layer.masks if mask.logits is not None]
    logits = _whole(recogniser, layer, sources)
    example = tensor_example(logits)
    return logits if example is not None and example.dtype in FLOATING else None


def _mask_bits(graph: Graph, recogniser: Recogniser, layer: Layer) -> Node:
    """The gate's masks as one tensor `[n_masks, ...]` for `mglu::pack_masks`."""
    if len({(complement, mask.inverted) for mask, complement in layer.masks}) == 1:
        whole = _whole(recogniser, layer, [(mask.bits, mask.index) for mask, _ in layer.masks])
        if whole is not None:
            return _gate_bits(graph, whole, *layer.masks[0])
    return _stack(graph, layer, [_gate_bits(graph, _slice(graph, m.bits, m.index), m, c) for m, c in layer.masks])


def _gate_bits(graph: Graph, bits: Node, mask: Mask, complement: bool) -> Node:
    """The mask or stack of masks `bits` as the gate uses it. The result is bool if `bits` is proved to be binary.

    `mask` describes `bits`, or one mask of the stack. With `complement`, the gate uses the complement of `mask`.
    """
    complement = complement != mask.inverted
    if mask.proof is None:  # no comparison, which would hide values other than 0 and 1 from the check in packing
        return graph.call_function(operator.sub, (1, bits)) if complement else bits
    if complement:
        return graph.call_function(operator.eq, (bits, 0))
    dtype = dtype_of(mask.bits)
    if dtype is torch.bool:
        return bits
    # `> 0` turns a NaN in a float mask into 0, as `forward_ste` does with a NaN logit. `!= 0` would turn it into 1.
    is_real = dtype is not None and dtype.is_floating_point
    return graph.call_function(operator.gt if is_real else operator.ne, (bits, 0))


def _dim_of_masks(layer: Layer) -> int:
    """The dimension along which the masks of a layer are stacked: the second with experts, else the first."""
    return 1 if layer.is_of_experts else 0


def _whole(recogniser: Recogniser, layer: Layer, slices: Sequence[Slice]) -> Node | None:
    """The stacked tensor with exactly these slices (in this order, if there are mask weights), or None."""
    dim, ordered = _dim_of_masks(layer), bool(layer.mask_weights)
    found = [_resolved(item, dim) for item in slices]
    if any(index is None for _, index in found) or len({recogniser.key(node) for node, _ in found}) != 1:
        return None
    stack, indices = found[0][0], [index for _, index in found if index is not None]
    is_whole = (indices if ordered else sorted(indices)) == list(range(size(stack, dim) or 0))
    return stack if is_whole and dims(stack) == 3 + dim else None


def _resolved(item: Slice, dim: int) -> Slice:
    """A slice as `(stack, i)`, if its node is slice i of `stack` along `dim`; otherwise unchanged."""
    node, index = item
    found = slice_of(node) if index is None else None
    return (found[0], found[2]) if found is not None and found[1] == dim else item


def _joined(graph: Graph, recogniser: Recogniser, layer: Layer, slices: Sequence[Slice]) -> Node:
    """Slices as one tensor `[n_masks, ...]`: the tensor with exactly these slices, or else a new stack."""
    whole = _whole(recogniser, layer, slices)
    return whole if whole is not None else _stack(graph, layer, [_slice(graph, node, index) for node, index in slices])


def _slice(graph: Graph, node: Node, index: int | None) -> Node:
    return node if index is None else graph.call_function(operator.getitem, (node, index))


def _stack(graph: Graph, layer: Layer, nodes: Sequence[Node]) -> Node:
    dim = _dim_of_masks(layer)
    if len(nodes) == 1 and layer.takes_views:
        return graph.call_method("unsqueeze", (*nodes, dim))
    return graph.call_function(torch.stack, (list(nodes), dim) if dim else (list(nodes),))
