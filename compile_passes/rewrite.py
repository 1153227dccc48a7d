"""Replace the nodes of a layer by one call of `mglu::forward_ste` (masks that are trained) or `mglu::forward`."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

import mglu_ops.ops  # noqa: F401 (registers torch.ops.mglu)

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
    if layer.trains_masks:
        logits = _transpose(graph, layer, _mask_logits(graph, recogniser, layer))
        pair = graph.call_function(_mglu.forward_ste.default, (x, weight, logits, layer.activation))
        return graph.call_function(operator.getitem, (pair, 0))
    bits = _transpose(graph, layer, _mask_bits(graph, recogniser, layer))
    packed = graph.call_function(_mglu.pack_masks.default, (bits,))
    return graph.call_function(_mglu.forward.default, (x, weight, packed, layer.activation))


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
        return _all_slices(recogniser, logits) or _stack(graph, logits)
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
        whole = _all_slices(recogniser, bits)
        if whole is not None:
            return whole
        positive = _all_positive_slices(recogniser, bits)
        if positive is not None:
            return graph.call_function(operator.gt, (positive, 0))
    return _stack(graph, [_gate_bits(graph, mask, complement) for mask, complement in layer.masks])


def _gate_bits(graph: Graph, mask: Mask, complement: bool) -> Node:
    if not complement:
        return mask.bits
    return graph.call_function(operator.eq, (mask.bits, 0))


def _all_positive_slices(recogniser: Recogniser, bits: Sequence[Node]) -> Node | None:
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
    return _all_slices(recogniser, sources)


def _all_slices(recogniser: Recogniser, nodes: Sequence[Node]) -> Node | None:
    """The stacked tensor of which the nodes are all slices, once each; the order of a sum does not matter."""
    slices = [recogniser.slice_of(node) for node in nodes]
    found = [item for item in slices if item is not None]
    if len(found) != len(nodes) or len({recogniser.key(base) for base, _ in found}) != 1:
        return None
    base = found[0][0]
    example = tensor_example(base)
    assert example is not None, "slice_of looked at it"
    return base if sorted(index for _, index in found) == list(range(example.shape[0])) else None


def _stack(graph: Graph, nodes: Sequence[Node]) -> Node:
    if len(nodes) == 1:
        return graph.call_method("unsqueeze", (nodes[0], 0))
    return graph.call_function(torch.stack, (list(nodes),))
