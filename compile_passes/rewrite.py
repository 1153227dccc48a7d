"""Replace the nodes of a layer by one call of `mglu::forward_ste` (masks that are trained) or `mglu::forward`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from .recognise import Recogniser
from .sites import Layer
from .symbols import as_call, tensor_example
from .values import Mask

_mglu = torch.ops.mglu


def rewrite(graph: Graph, recogniser: Recogniser, layers: Sequence[Layer]) -> None:
    """Replace layers, given in the order of the graph, and erase what that made dead.

    The last comes first, so that a layer whose input is the result of another finds it still in place.
    """
    for layer in reversed(layers):
        root = layer.site.root
        with graph.inserting_before(root):
            result = _fused_call(graph, recogniser, layer)
        result.meta = dict(root.meta)
        root.replace_all_uses_with(result)
    spelling = {node for layer in layers for node in layer.interior}
    for node in reversed(graph.nodes):
        if node in spelling and not node.users:
            graph.erase_node(node)


def _fused_call(graph: Graph, recogniser: Recogniser, layer: Layer) -> Node:
    x = _cast(graph, layer.x, layer.dtype)
    weight = _transpose(graph, layer, _cast(graph, layer.weight, layer.dtype))
    layer = _in_route_order(recogniser, layer)
    route = _route_weights(graph, recogniser, layer)
    if layer.trains_masks:
        logits = _transpose(graph, layer, _mask_logits(graph, recogniser, layer))
        pair = graph.call_function(_mglu.forward_ste.default, (x, weight, logits, layer.activation, route))
        return graph.call_function(operator.getitem, (pair, 0))
    packed = _packed_masks(graph, layer, _mask_bits(graph, recogniser, layer))
    return graph.call_function(_mglu.forward.default, (x, weight, packed, layer.activation, route))


def _in_route_order(recogniser: Recogniser, layer: Layer) -> Layer:
    """The masks in the order of their columns of one tensor of route weights, where they have one."""
    columns = [column for column in map(recogniser.column_of, layer.routes) if column is not None]
    if not columns or len(columns) != len(layer.routes):
        return layer
    order = sorted(range(len(columns)), key=lambda i: columns[i][1])
    return replace(layer, masks=tuple(layer.masks[i] for i in order), routes=tuple(layer.routes[i] for i in order))


def _route_weights(graph: Graph, recogniser: Recogniser, layer: Layer) -> Node | None:
    """`[..., n_masks]`: the tensor whose columns the routes are, or the routes put side by side."""
    if not layer.routes:
        return None
    columns = [column for column in map(recogniser.column_of, layer.routes) if column is not None]
    if len(columns) == len(layer.routes) and len({recogniser.key(base) for base, _ in columns}) == 1:
        base = columns[0][0]
        example = tensor_example(base)
        if example is not None and [index for _, index in columns] == list(range(example.shape[-1])):
            return base
    return graph.call_function(torch.cat, (list(layer.routes), -1))


def _cast(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    example = tensor_example(node)
    assert example is not None, "checked at the site"
    return node if example.dtype == dtype else graph.call_method("to", (node, dtype))


def _transpose(graph: Graph, layer: Layer, node: Node) -> Node:
    """Of a weight stored `[in_features, out_features]`, and its masks."""
    return graph.call_method("transpose", (node, -2, -1)) if layer.transposed else node


def _mask_logits(graph: Graph, recogniser: Recogniser, layer: Layer) -> Node:
    """`[n_masks, ...]`, positive where the gate's masks are 1, whose gradient is the straight-through masks'.

    The user's own logits where the graph has them; else the straight-through masks less 1/2, through which autograd
    goes on as it did before.
    """
    logits = [mask.logits for mask, complement in layer.masks if not complement and mask.logits is not None]
    if len(logits) == len(layer.masks):
        return _all_slices(recogniser, logits, bool(layer.routes)) or _stack(graph, logits)
    centred = []
    for mask, complement in layer.masks:
        assert mask.straight_through is not None, "checked at the site"
        arguments = (0.5, mask.straight_through) if complement else (mask.straight_through, 0.5)
        centred.append(graph.call_function(operator.sub, arguments))
    return _stack(graph, centred)


def _mask_bits(graph: Graph, recogniser: Recogniser, layer: Layer) -> Node:
    """The gate's masks as one tensor `[n_masks, ...]` that `mglu::pack_masks` takes."""
    if not any(complement for _, complement in layer.masks):
        bits = [mask.bits for mask, _ in layer.masks]
        whole = _all_slices(recogniser, bits, bool(layer.routes))
        if whole is not None:
            return whole
        positive = _all_positive_slices(recogniser, bits, bool(layer.routes))
        if positive is not None:
            return graph.call_function(operator.gt, (positive, 0))
    return _stack(graph, [_gate_bits(graph, mask, complement) for mask, complement in layer.masks])


def _packed_masks(graph: Graph, layer: Layer, bits: Node) -> Node:
    """Packed: again, where the model unpacked them itself."""
    call = as_call(bits)
    if call is not None and call.symbol == "unpack_masks" and isinstance(call.args[0], Node) and not layer.transposed:
        return call.args[0]
    return graph.call_function(_mglu.pack_masks.default, (_transpose(graph, layer, bits),))


def _gate_bits(graph: Graph, mask: Mask, complement: bool) -> Node:
    if not complement:
        return mask.bits
    if mask.proof is None:  # not by a comparison, which would hide from packing a value other than 0 and 1
        return graph.call_function(operator.sub, (1, mask.bits))
    return graph.call_function(operator.eq, (mask.bits, 0))


def _all_positive_slices(recogniser: Recogniser, bits: Sequence[Node], ordered: bool) -> Node | None:
    """The stacked logits `L` where the bits are `L[i] > 0` for every i."""
    sources = []
    for node in bits:
        call = as_call(node)
        if (
            call is None
            or call.symbol != "gt"
            or call.args[1:] not in ((0,), (0.0,))
            or not isinstance(call.args[0], Node)
        ):
            return None
        sources.append(call.args[0])
    return _all_slices(recogniser, sources, ordered)


def _all_slices(recogniser: Recogniser, nodes: Sequence[Node], ordered: bool) -> Node | None:
    """The stacked tensor of which the nodes are all slices, once each; `ordered` where their order matters."""
    slices = [recogniser.slice_of(node) for node in nodes]
    found = [item for item in slices if item is not None]
    if len(found) != len(nodes) or len({recogniser.key(base) for base, _ in found}) != 1:
        return None
    base = found[0][0]
    example = tensor_example(base)
    assert example is not None, "slice_of looked at it"
    indices = [index for _, index in found]
    return base if (indices if ordered else sorted(indices)) == list(range(example.shape[0])) else None


def _stack(graph: Graph, nodes: Sequence[Node]) -> Node:
    if len(nodes) == 1:
        return graph.call_method("unsqueeze", (nodes[0], 0))
    return graph.call_function(torch.stack, (list(nodes),))
