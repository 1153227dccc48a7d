"""Layers that are cut in pieces before the pass sees them.

Under `DistributedDataParallel` (DDP), Dynamo cuts a graph wherever the parameters read so far fill a bucket of
gradients, and compiles each piece by itself, so that a bucket is sent while the pieces before it go backward. A cut
falls in front of any node that reads a parameter, also inside a layer. A piece then holds a gate without its value, or
a layer whose mask another piece has made and which comes as a plain tensor.

A piece is known by Dynamo's tracing context, and what another piece has made by its placeholder, which has no source in
the program. A weight keeps its name in all pieces: one that is masked in some piece and read again, there or in another
one, without either being part of a layer, is that of a layer which was cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch._guards import TracingContext
from torch.fx import Graph, Node

from .report import SiteReport, lines, module_path, source_line
from .shapes import equal_sizes, tensor_example
from .symbols import as_call

CUT_BY_DDP = (
    "DistributedDataParallel cut this layer in pieces: torch.compile ends a graph wherever a bucket of gradients is "
    "full, and so compiles gate, value and mask of the layer apart. Set torch._dynamo.config.optimize_ddp = False "
    "before compiling, or use mglu_ops.nn.MGLU, which is one operator and is not cut"
)

_MASKS = ("mul", "where", "masked_fill")
_SAME_WEIGHT = ("to", "alias", "t", "mT", "transpose", "permute", "getattr")
"""Symbols of calls whose result is the weight in another dtype or layout."""
_PROJECTS = ("linear", "inner", "matmul", "addmm", "einsum")


@dataclass
class _Reads:
    """What the pieces that have come so far do to a weight, outside the layers that were found whole."""

    count: int = 0
    masked: SiteReport | None = None
    """Its first product with a mask that is projected."""
    is_reported: bool = False


@dataclass
class _Pieces:
    """The pieces of one graph that have come so far. Nothing here keeps them, or their examples, alive."""

    graphs: list[ReferenceType[Graph]] = field(default_factory=list)
    weights: dict[str, _Reads] = field(default_factory=dict)
    underway: list[tuple[ReferenceType[torch.Tensor], SiteReport, _Reads]] = field(default_factory=list)
    """The examples of masked weights that leave their piece; an input of a later piece has the same example."""

    def is_new(self, graph: Graph) -> bool:
        if any(other() is graph for other in self.graphs):
            return False
        self.graphs.append(ref(graph))
        return True

    def follow(self, node: Node, masked: SiteReport, reads: _Reads) -> None:
        """Note what becomes of a masked weight that is at `node`."""
        is_projected, leaving = _fate(node)
        if is_projected:
            reads.masked = reads.masked or masked
        values = [value for value in map(tensor_example, leaving) if value is not None]
        self.underway.extend((ref(value), masked, reads) for value in values)

    def arriving(self, node: Node) -> list[tuple[SiteReport, _Reads]]:
        """The masked weight that an input of a piece is, as it was when it left another."""
        return [(masked, reads) for value, masked, reads in self.underway if value() is tensor_example(node)]


_pieces: WeakKeyDictionary[Any, _Pieces] = WeakKeyDictionary()
"""By the object that Dynamo keeps while DDP's optimiser compiles the pieces of a graph."""


def split_by_ddp() -> bool:
    """Whether the graph that is being compiled is a piece of one that DDP's optimiser cut."""
    return _context() is not None


def _context() -> Any | None:
    return getattr(TracingContext.try_get(), "ddp_optimizer_ctx", None)


def is_made_in_another_piece(node: Node) -> bool:
    """Whether a node is an input that an earlier piece of the same graph computes."""
    return split_by_ddp() and node.op == "placeholder" and getattr(node, "_dynamo_source", node) is None


def lacks_its_mask(graph: Graph, spelling: Collection[Node]) -> bool:
    """Whether another piece makes a mask of a layer, so that nothing here can prove what it is.

    `report_cut_layers` reports such a layer if its nodes are not among those that it is told of.
    """
    return split_by_ddp() and any(
        is_made_in_another_piece(source)
        for weight in _weights(graph)
        for node, operands in _masked(weight)
        if node in spelling
        for operand in operands
        for source in _sources(operand)
    )


def report_cut_layers(graph: Graph, found: Collection[Node]) -> list[SiteReport]:
    """The layers of which enough pieces have come to tell that they were cut, each once.

    To be called for each graph before the pass changes it. `found` are the nodes of the layers that are whole in it;
    those that were refused for another reason count, too, as they are reported already.
    """
    context = _context()
    if context is None:
        return []
    pieces = _pieces.setdefault(context, _Pieces())
    if not pieces.is_new(graph):
        return []
    for weight in _weights(graph):
        reads = pieces.weights.setdefault(str(weight.target), _Reads())
        reads.count += sum(reader not in found for reader, _ in _readers(weight))
        for node, _ in _masked(weight):
            if node not in found:
                pieces.follow(node, _describe(node), reads)
    for node in filter(is_made_in_another_piece, graph.nodes):
        for masked, reads in pieces.arriving(node):
            pieces.follow(node, masked, reads)
    cut = []
    for reads in pieces.weights.values():
        if reads.masked is not None and reads.count > 1 and not reads.is_reported:
            reads.is_reported = True
            cut.append(reads.masked)
    return cut


def _describe(masked: Node) -> SiteReport:
    dtype = getattr(tensor_example(masked), "dtype", None)
    return SiteReport(
        module_path=module_path(masked),
        source=source_line(masked),
        n_masks=0,
        activation="",
        dtype=str(dtype).removeprefix("torch."),
        reason=CUT_BY_DDP,
        before=lines([masked]),
    )


def _weights(graph: Graph) -> Iterator[Node]:
    """The inputs of a graph that are matrices among the model's parameters."""
    for node in graph.find_nodes(op="placeholder"):
        if _is_parameter(node) and tensor_example(node).dim() == 2:  # type: ignore[union-attr] # a parameter is a tensor
            yield node


def _is_parameter(node: Node) -> bool:
    return isinstance(tensor_example(node), torch.nn.Parameter)


def _readers(weight: Node) -> Iterator[tuple[Node, Node]]:
    """The nodes that read a weight, and as what they read it: as it is, cast or transposed."""
    pending = [weight]
    while pending:
        form = pending.pop()
        for user in form.users:
            call, value = as_call(user), tensor_example(user)
            if call is not None and call.symbol in _SAME_WEIGHT and value is not None:
                pending.append(user)
            elif value is not None:  # not its shape or dtype
                yield user, form


def _masked(weight: Node) -> Iterator[tuple[Node, list[Node]]]:
    """Products of a weight and a tensor of its shape, or choices of its entries; with each what may be its mask."""
    for node, form in _readers(weight):
        call = as_call(node)
        if call is not None and call.symbol in _MASKS:
            operands = [operand for operand in node.all_input_nodes if operand is not form and _covers(operand, form)]
            if operands:
                yield node, operands


def _covers(mask: Node, weight: Node) -> bool:
    """Whether a tensor has the shape of a weight, or of a stack of its masks, and is no parameter itself."""
    value, matrix = tensor_example(mask), tensor_example(weight)
    if value is None or matrix is None or _is_parameter(mask):
        return False
    return value.dim() in (2, 3) and equal_sizes(value.shape[-2:], matrix.shape)


def _fate(masked: Node) -> tuple[bool, list[Node]]:
    """Whether a masked weight is one of a projection, and the nodes as which it leaves the piece."""
    is_projected, leaving = False, []
    pending = [masked]
    while pending:
        node = pending.pop()
        for user in node.users:
            call = as_call(user)
            if user.op == "output":
                leaving.append(node)
            elif call is not None and call.symbol in (*_SAME_WEIGHT, "add", "sub"):  # W - W * M
                pending.append(user)
            elif call is not None and call.symbol in _PROJECTS:
                is_projected |= call.symbol != "linear" or user.args[:1] != (node,)
    return is_projected, leaving


def _sources(node: Node) -> Iterator[Node]:
    """The inputs of the graph that a node is made of."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        if current.op == "placeholder":
            yield current
        fresh = [item for item in current.all_input_nodes if item not in seen]
        seen.update(fresh)
        pending.extend(fresh)
