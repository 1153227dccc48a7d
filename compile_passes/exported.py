"""The pass over an exported program: fuse its layers, and pack their masks at once.

An exported program knows the values of its parameters, buffers and constants. Masks that are made of them are evaluated
here once: the packed bits become a buffer, and the logits leave the program. The result is for inference, so gradients
that tracing recorded (an export with grad mode on) are dropped first; they would select the training operator.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .calls import as_function
from .constants import Folder, values_of_constants
from .fusion import FusionError, fuse_graph
from .report import WHEN_EXPORTED, FusionReport, module_path
from .shapes import sources

_aten = torch.ops.aten
_mglu = torch.ops.mglu


def fuse_exported(
    program: ExportedProgram,
    *,
    report: FusionReport | None = None,
    strict: bool = False,
    assume_binary: bool = False,
) -> ExportedProgram:
    """Make a program for inference that calls `mglu::forward` on packed masks where `program` spells MGLU layers.

    Masks that are functions of parameters, buffers and constants are packed now, and tensors that only they needed
    (mask logits, float masks) are dropped. A real mask among them is proved to be binary by its values.
    `mglu::forward_ste` of an `mglu_ops.nn` layer becomes `mglu::forward` in the same way, and `grouped_forward_ste` of
    experts `grouped_forward`.

    Args:
        program: the result of `torch.export.export`, with or without `no_grad`; it is not changed.
        report: receives what was fused, and what was missed and why.
        strict: raise an error if a layer is recognised but not fused, or if the program has no layer.
        assume_binary: also fuse real masks that are inputs, trusting them to be binary (packing checks at run time).

    Returns:
        A new program with the inputs, outputs and dynamic shapes of `program`, which shares its remaining tensors.

    Raises:
        FusionError: under `strict`.
        ValueError: under `assume_binary`, masks that are made of constants hold values other than 0 and 1.
    """
    report = FusionReport() if report is None else report
    with torch._C._DisableAutocast():  # an autocast around this call would change the constants
        folder = Folder(program)
        graph = folder.graph
        for node in graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.requires_grad:
                node.meta["val"] = value.detach()
        constant = set(folder.constant_nodes())
        for node in graph.find_nodes(op="call_function", target=_aten._assert_tensor_metadata.default):
            if constant.issuperset(node.all_input_nodes):  # the assertion held when the program was traced
                graph.erase_node(node)
        _stop_training(graph)
        given, n_before = set(layers_of(graph)), len(report.fused)
        constants = values_of_constants(folder)
        fuse_graph(graph, report, strict=strict, assume_binary=assume_binary, constants=constants)
        layers = layers_of(graph)
        if strict and not layers:
            raise FusionError("strict fusion: nothing was fused, the program has no MGLU layer")
        fused = [position for position, layer in enumerate(layers) if layer not in given]
        _lower_to_aten(graph)
        is_packed = _fold_operands(folder)
        for number, position in enumerate(fused, n_before):
            if is_packed[position]:
                report.fused[number] = replace(report.fused[number], packed=WHEN_EXPORTED)
        return folder.program()


def layers_of(graph: Graph) -> list[Node]:
    """The calls of `mglu::forward`, `mglu::grouped_forward` and `mglu::experts_forward` in a graph."""
    layers = (_mglu.forward.default, _mglu.grouped_forward.default, _mglu.experts_forward.default)
    return [node for node in graph.nodes if node.target in layers]


_PACK_AND_RUN = {
    _mglu.forward_ste.default: (_mglu.pack_logits.default, _mglu.forward.default),
    _mglu.grouped_forward_ste.default: (_mglu.pack_expert_logits.default, _mglu.grouped_forward.default),
}


def _stop_training(graph: Graph) -> None:
    """Replace operators that pack the masks at each call by one that packs them, and one that takes them packed."""
    for node in [node for node in graph.nodes if node.target in _PACK_AND_RUN]:
        pack, run = _PACK_AND_RUN[node.target]
        x, weight, logits, *rest = node.args
        with graph.inserting_before(node):
            packed = graph.call_function(pack, (logits,))
            result = graph.call_function(run, (x, weight, packed, *rest), node.kwargs)
        for user in list(node.users):  # each takes one of the two results
            taken = (result, packed)[user.args[1]]
            taken.meta = {**user.meta, **taken.meta}
            user.replace_all_uses_with(taken)
            graph.erase_node(user)
        graph.erase_node(node)


def _lower_to_aten(graph: Graph) -> None:
    """Replace new nodes by ATen operators with traced values, which is what an exported graph consists of."""
    mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    for node in list(graph.nodes):
        is_arithmetic = node.target in (operator.add, operator.mul) and isinstance(node.meta.get("val"), Tensor)
        is_result = node.op == "call_method" or is_arithmetic  # with the root's example
        is_new = "val" not in node.meta or is_result
        if not is_new or node.op not in ("call_function", "call_method"):
            continue
        inputs = node.all_input_nodes
        with mode or nullcontext():  # for calls without inputs, which would make tensors of another mode
            traced = make_fx(_of_its_inputs(node, inputs))(*(item.meta["val"] for item in inputs)).graph
        copies: dict[Node, Any] = dict(zip(traced.find_nodes(op="placeholder"), inputs, strict=True))
        with graph.inserting_before(node):
            for inner in traced.nodes:
                if inner.op == "call_function":
                    copies[inner] = graph.node_copy(inner, copies.__getitem__)
                    copies[inner].meta = {**node.meta, **inner.meta}
        (output,) = traced.find_nodes(op="output")
        node.replace_all_uses_with(torch.fx.map_arg(output.args[0], copies.__getitem__))
        graph.erase_node(node)


def _of_its_inputs(node: Node, inputs: list[Node]) -> Callable[..., Any]:
    """A node as a function of the values of its inputs."""

    def function(*values: Any) -> Any:
        held = dict(zip(inputs, values, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), held.__getitem__)
        return as_function(node)(*args, **kwargs)

    return function


def _fold_operands(folder: Folder) -> list[bool]:
    """Replace constant packed masks, and weights that are a cast or transpose of a constant, by buffers.

    A weight that something else reads too (a tied embedding) stays, since a second copy of it would cost memory.

    Returns:
        For each layer of the graph, whether its masks were packed here.
    """
    constant = set(folder.constant_nodes())
    is_packed = []
    for layer in layers_of(folder.graph):
        operands: Any = layer.args
        _, weight, packed, *_ = operands
        path = module_path(layer)
        prefix = f"{path}." if path else ""
        is_packed.append(packed in constant and packed.op != "placeholder")
        if is_packed[-1]:
            folder.replace_by_buffer(packed, f"{prefix}packed_masks")
        if weight in constant and weight.op != "placeholder":
            made_of = sources(weight)
            if all(user in made_of for node in made_of - {weight} for user in node.users):
                folder.replace_by_buffer(weight, f"{prefix}fused_weight")
    return is_packed
