"""Layers that Dynamo's DDP optimiser has split between two graphs, which the report names.

Under `DistributedDataParallel` (DDP), Dynamo splits a graph wherever the parameters read so far fill a bucket of
gradients, and compiles each part separately, so that a bucket is sent while the backward pass of earlier parts runs. A
split can come before any node that reads a parameter, even inside a layer. Then a part has a gate without its value, or
a layer whose mask comes from another part as a plain tensor.

Dynamo's tracing context tells that a graph is such a part. A tensor from another part is a placeholder without a source
in the program. A weight keeps its name in all parts: if one is masked in some part and read again, there or in another
one, and neither read belongs to a layer, then it is the weight of a layer that was split.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch._guards import TracingContext
from torch.fx import Graph, Node

from .report import SiteReport, missed_at
from .shapes import holds_experts, is_like, is_matrix, sources, tensor_example
from .symbols import symbol_of

SPLIT_BY_DDP = (
    "DistributedDataParallel split this layer: torch.compile ends a graph wherever a bucket of gradients is full, and "
    "so compiles gate, value and mask of the layer separately. Set torch._dynamo.config.optimize_ddp = False before "
    "compiling, or use mglu_ops.nn.MGLU, which is one operator and cannot be split"
)

_MASKS = ("mul", "where", "masked_fill")
_SAME_WEIGHT = ("to", "alias", "t", "mT", "transpose", "permute", "getattr")
"""Symbols of calls whose result is the weight in another dtype or layout."""
_PROJECTS = ("linear", "inner", "matmul", "grouped_mm", "addmm", "einsum")


@dataclass
class _Reads:
    """How the parts that were compiled so far read a weight, outside of layers that were found whole."""

    count: int = 0
    masked: SiteReport | None = None
    """The first product of the weight and a mask that multiplies an input."""
    is_reported: bool = False


@dataclass
class _Parts:
    """The parts of one graph that were compiled so far; it holds no strong reference to them or to their examples."""

    graphs: list[ReferenceType[Graph]] = field(default_factory=list)
    weights: dict[str, _Reads] = field(default_factory=dict)
    in_transit: list[tuple[ReferenceType[torch.Tensor], SiteReport, _Reads]] = field(default_factory=list)
    """The examples of masked weights that a part returns; the input of a later part has the same example."""


_parts_by_context: WeakKeyDictionary[Any, _Parts] = WeakKeyDictionary()
"""The parts of each graph, by the object that Dynamo keeps while its DDP optimiser compiles them."""


def is_part_of_a_split_graph() -> bool:
    """Whether the graph that is being compiled is one part of a graph that Dynamo's DDP optimiser split."""
    return _context() is not None


def _context() -> Any | None:
    return getattr(TracingContext.try_get(), "ddp_optimizer_ctx", None)


def comes_from_another_part(node: Node) -> bool:
    """Whether a node is an input that an earlier part of the same graph computes."""
    return is_part_of_a_split_graph() and node.op == "placeholder" and getattr(node, "_dynamo_source", node) is None


def lacks_its_mask(graph: Graph, spelling: Collection[Node]) -> bool:
    """Whether another part makes a mask of a layer, so that this graph cannot prove that it is a mask.

    `report_split_layers` reports such a layer if its nodes are not among `found`.
    """
    return is_part_of_a_split_graph() and any(
        comes_from_another_part(source)
        for weight in _weights(graph)
        for node, operands in _masked(weight)
        if node in spelling
        for operand in operands
        for source in sources(operand)
    )


def report_split_layers(graph: Graph, found: Collection[Node]) -> list[SiteReport]:
    """Report each split layer once, as soon as enough parts were compiled to tell that it was split.

    Call it for each graph before the pass changes it. `found` are the nodes of the layers that are whole in the graph,
    including those that were refused for another reason, since they are reported already.
    """
    context = _context()
    if context is None:
        return []
    parts = _parts_by_context.setdefault(context, _Parts())
    if any(other() is graph for other in parts.graphs):
        return []
    parts.graphs.append(ref(graph))
    masked = []
    for weight in _weights(graph):
        reads = parts.weights.setdefault(str(weight.target), _Reads())
        reads.count += sum(reader not in found for reader, _ in _readers(weight))
        masked += [(node, missed_at(node, SPLIT_BY_DDP), reads) for node, _ in _masked(weight) if node not in found]
    for node in filter(comes_from_another_part, graph.nodes):
        masked += [(node, miss, reads) for value, miss, reads in parts.in_transit if value() is tensor_example(node)]
    for node, miss, reads in masked:
        is_projected, leaving = _fate(node)
        if is_projected:
            reads.masked = reads.masked or miss
        values = [value for value in map(tensor_example, leaving) if value is not None]
        parts.in_transit.extend((ref(value), miss, reads) for value in values)
    split = [reads for reads in parts.weights.values() if reads.masked and reads.count > 1 and not reads.is_reported]
    for reads in split:
        reads.is_reported = True
    return [reads.masked for reads in split if reads.masked]


def _weights(graph: Graph) -> Iterator[Node]:
    """The inputs of a graph that are parameters of the model and matrices, or the matrices of experts."""
    for node in graph.find_nodes(op="placeholder"):
        if _is_parameter(node) and (is_matrix(node) or holds_experts(node)):
            yield node


def _is_parameter(node: Node) -> bool:
    return isinstance(tensor_example(node), torch.nn.Parameter)


def _readers(weight: Node) -> Iterator[tuple[Node, Node]]:
    """The nodes that read a weight, each with the form that it reads: the weight itself, cast or transposed."""
    pending = [weight]
    while pending:
        form = pending.pop()
        for user in form.users:
            if tensor_example(user) is None:
                continue  # it reads only the shape or dtype
            if symbol_of(user) in _SAME_WEIGHT:
                pending.append(user)
            else:
                yield user, form


def _masked(weight: Node) -> Iterator[tuple[Node, list[Node]]]:
    """Products of a weight with a tensor of its shape, and choices of its entries, each with its possible masks."""
    for node, form in _readers(weight):
        others = [operand for operand in node.all_input_nodes if operand is not form]
        operands = [operand for operand in others if is_like(operand, form) and not _is_parameter(operand)]
        if operands and symbol_of(node) in _MASKS:
            yield node, operands


def _fate(masked: Node) -> tuple[bool, list[Node]]:
    """Whether a masked weight multiplies an input, and the nodes in which it leaves this part."""
    is_projected, leaving = False, []
    pending = [masked]
    while pending:
        node = pending.pop()
        for user in node.users:
            symbol = symbol_of(user)
            if user.op == "output":
                leaving.append(node)
            elif symbol in (*_SAME_WEIGHT, "add", "sub"):  # W - W * M
                pending.append(user)
            elif symbol in _PROJECTS:
                is_projected |= symbol != "linear" or user.args[:1] != (node,)
    return is_projected, leaving
