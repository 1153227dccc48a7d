"""The report of the pass: the layers that it fused, and those that it recognised but refused, with the reasons."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch.fx import Graph, Node

from mglu_ops.words import counted

from .calls import tensors_in
from .shapes import dtype_of, example, size, tensor_example
from .symbols import as_call

SPLIT_BY_DDP = (
    "DistributedDataParallel splits a graph wherever a bucket of gradients is full. A layer whose gate, value and mask "
    "lie in several parts is not fused, and a reason above may name only what one part lacks: set "
    "torch._dynamo.config.optimize_ddp = False before compiling, or use mglu_ops.nn.MGLU, which is one operator and "
    "cannot be split"
)
AT_EACH_CALL = "at each call"
WHEN_COMPILED = "when compiled"
WHEN_EXPORTED = "when exported"
BEFOREHAND = "beforehand"


@dataclass(frozen=True)
class SiteReport:
    """One layer that the pass fused, or recognised but did not fuse (a miss).

    Attributes:
        module_path: the module that computes the layer, e.g. `layers.3.mlp`; empty for a plain function.
        source: file and line of the user's code that computes the layer's result; empty if tracing recorded none.
        n_masks: the number of masks in the sum; 0 if unknown.
        activation: the activation of the gate.
        dtype: the dtype of the result.
        operator: `forward_ste` (trained masks) or `forward` (fixed masks), for experts `grouped_forward_ste` or
            `grouped_forward`; empty for a miss.
        weighted: True if the masks have mask weights.
        weight_format: the format in which the operator reads the weight (`mglu_ops.formats`), `dense` for a weight in
            the layer's dtype; empty for a miss.
        activation_format: the format to which the operator rounds x (`mglu_ops.formats`); `dense` without rounding.
        packed: when the masks are packed: `at each call`, `when compiled` (under freezing), `when exported`, or
            `beforehand` (the model holds packed masks); empty for a miss.
        reason: why a miss was not fused, and what to change; None for a fused layer.
        note: what would make a fused layer faster; empty if nothing is known.
        hides_nan: True if the program may return NaN for a mask logit that is NaN, where a fused layer uses a mask of
            0. False for a miss.
        before: the nodes of the layer, one line each.
        after: the nodes that replace them; empty for a miss.
    """

    module_path: str
    source: str
    n_masks: int
    activation: str
    dtype: str
    operator: str = ""
    weighted: bool = False
    weight_format: str = ""
    activation_format: str = "dense"
    packed: str = ""
    reason: str | None = None
    note: str = ""
    hides_nan: bool = False
    before: tuple[str, ...] = field(default=(), repr=False)
    after: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        place = self.module_path or self.source or "(function)"
        masks = f"n_masks={self.n_masks}" if self.n_masks else ""  # a near miss has neither masks nor an activation
        what = f"{place}: {', '.join(filter(None, (masks, self.activation, self.dtype)))}"
        return f"{what}, fused to mglu::{self.operator}" if self.reason is None else f"{what}, not fused: {self.reason}"

    def picture(self) -> str:
        """The nodes of the layer before and after fusing, as text."""
        parts = [str(self), "before:", *(f"  {line}" for line in self.before)]
        return "\n".join([*parts, *(["after:"] if self.after else []), *(f"  {line}" for line in self.after)])


_COLUMNS = ("module", "source", "masks", "activation", "dtype", "result", "masks packed")


@dataclass(repr=False)
class FusionReport:
    """The layers of all graphs that the pass has read, oldest first. A layer that is compiled twice is listed twice.

    `str(report)` is a table of the layers, followed by the reason for each miss, and by notes on packing and NaN.

    Attributes:
        fused: layers that now run as one operator.
        missed: layers that were recognised but not fused.
        present: layers that call the operator in the program itself, such as `mglu_ops.nn.MGLU`.
        graphs: the number of graphs that the pass has read.
        errors: errors that rules of the pass have raised. The node that the rule was reading stays unchanged.
        is_split: True if DistributedDataParallel split one of the graphs into parts.
    """

    fused: list[SiteReport] = field(default_factory=list)
    missed: list[SiteReport] = field(default_factory=list)
    present: list[SiteReport] = field(default_factory=list)
    graphs: int = 0
    errors: list[str] = field(default_factory=list)
    is_split: bool = False

    def __str__(self) -> str:
        present = f"{len(self.present)} called the operator already, " if self.present else ""
        head = f"{len(self.fused)} fused, {len(self.missed)} missed, {present}{counted(self.graphs, 'graph')} seen"
        if not self.fused and not self.missed and not self.present and not self.errors and not self.is_split:
            return head
        return "\n".join([head, "", *_table([_COLUMNS, *self._rows()]), *self._notes()])

    __repr__ = __str__  # so that a notebook shows the table

    def _rows(self) -> Iterator[tuple[str, ...]]:
        fused = (*self.present, *self.fused)  # a copy, because another thread may add layers meanwhile
        for number, site in enumerate((*fused, *self.missed), 1 - len(fused)):
            result = f"not fused [{number}]"
            if site.reason is None:
                formats = [name for name in (site.weight_format, site.activation_format) if name != "dense"]
                result = ", ".join([f"mglu::{site.operator}", *(["weighted"] if site.weighted else []), *formats])
            source = re.sub(r"^.*[/\\\\]", "", site.source)
            yield (site.module_path, source, str(site.n_masks or ""), site.activation, site.dtype, result, site.packed)

    def _notes(self) -> Iterator[str]:
        for number, site in enumerate(self.missed, 1):
            yield f"\n[{number}] {site.reason}"
        for note in dict.fromkeys(site.note for site in self.fused if site.note):
            yield f"\n{note}"
        if any(site.packed == AT_EACH_CALL and site.operator == "forward" for site in self.fused):
            yield (
                "\nMasks are packed at each call, so that a changed mask takes effect at the next call; to pack them "
                "once, use mglu_ops.freeze, torch._inductor.config.freezing under no_grad, or mglu_ops.export."
            )
        if self.is_split:
            yield f"\n{SPLIT_BY_DDP}"
        for error in dict.fromkeys(self.errors):
            yield f"\nA rule of the pass failed, which is a bug of mglu_ops, and knew nothing of one node: {error}"
        if any(site.hides_nan for site in self.fused):
            yield (
                "\nIn a fused layer a mask logit that is NaN counts as 0, where the program may return NaN; "
                "mglu_ops.nn.MaskStatistics counts such logits."
            )

    def to_json(self) -> str:
        """The report as JSON: the attributes of this object and of each layer."""
        return json.dumps(asdict(self), indent=2)


_LAYERS = tuple(
    getattr(torch.ops.mglu, name)
    for name in ("forward", "forward_ste", "experts_forward", "grouped_forward", "grouped_forward_ste")
)


def layers_present(graph: Graph) -> list[SiteReport]:
    """The layers that the program itself computes with the operator."""
    found = []
    for node in graph.nodes:
        op = getattr(node.target, "_overloadpacket", node.target)
        if op not in _LAYERS:
            continue
        names = (argument.name for argument in op.default._schema.arguments)
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        packs = "mask_logits" in given
        masks = given.get("mask_logits", given.get("packed_masks"))
        layer = report_at(
            node,
            next((result.dtype for result in tensors_in(example(node))), dtype_of(given.get("x"))),
            n_masks=size(masks, -3 if packs else -1) or 0,
            activation=str(given.get("activation", "silu")),
            operator=op.__name__,
            weight_format=str(given.get("weight_format", "dense")),
            activation_format=str(given.get("activation_format", "dense")),
            packed=AT_EACH_CALL if packs else BEFOREHAND,
        )
        found.append(layer)
    return found


def missed_at(node: Node, reason: str) -> SiteReport:
    """The report of a miss at a node, for a layer whose masks and activation are unknown."""
    return report_at(node, dtype_of(node), n_masks=0, activation="", reason=reason, before=(line(node),))


def report_at(node: Node, dtype: torch.dtype | None, **more: Any) -> SiteReport:
    """The report of a layer whose result, or last known part, is at `node`; `more` has the other attributes."""
    named = str(dtype).removeprefix("torch.")
    return SiteReport(module_path=module_path(node), source=source_line(node), dtype=named, **more)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def line(node: Node) -> str:
    """A node as text, such as `gate [5, 12] = linear(x, masked)`; for an input or attribute, only its name."""
    if node.op in ("placeholder", "get_attr"):
        return node.name
    call, example = as_call(node), tensor_example(node)
    target = getattr(node.target, "_overloadpacket", node.target)
    name = target.__name__ if isinstance(target, FunctionType) else str(target)
    operation = name if call is None else call.symbol
    options = [f"{name}={_spelled(value)}" for name, value in node.kwargs.items()]
    shape = "" if example is None else f" {[*map(str, example.shape)]}".replace("'", "")
    return f"{node.name}{shape} = {operation}({', '.join([*map(_spelled, node.args), *options])})"


def _spelled(argument: Any) -> str:
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(_spelled, argument))}]"
    return str(argument)


def module_path(node: Node) -> str:
    """The module that a node belongs to, such as `layers.3.mlp`, as tracing recorded it; else empty."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"^(L\['\w+'\]|self)\.?", "", path)
    path = re.sub(r"_modules\['([^']+)'\]|\['?([^'\]]+)'?\]", lambda m: f".{m[1] or m[2]}", path)
    return re.sub(r"\.+", ".", path).strip(".").replace("_orig_mod.", "").removeprefix("_orig_mod")


def source_line(node: Node) -> str:
    """The line of user code that made a node, such as `file.py:12`, without frames of torch itself."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    user_lines = [line for line in lines if not line[0].startswith(_TORCH)]
    return "{}:{}".format(*(user_lines or lines)[-1]) if lines else ""


_TORCH = os.path.dirname(torch.__file__)
