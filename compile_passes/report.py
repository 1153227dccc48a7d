"""What the pass did: the sites it fused, and those it nearly fused, with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.fx import Node

from .shapes import tensor_example
from .symbols import as_call

AT_EACH_CALL = "at each call"
WHEN_COMPILED = "when compiled"
WHEN_EXPORTED = "when exported"
BEFOREHAND = "beforehand"


@dataclass(frozen=True)
class SiteReport:
    """One layer that the pass fused, or recognised and left.

    Attributes:
        module_path: where the layer stands in the model, e.g. `layers.3.mlp`; empty for a plain function.
        source: file and line of the layer's result in the user's code; empty where tracing recorded none.
        n_masks: masks in the sum.
        activation: the gating function.
        dtype: dtype of the result.
        route: `forward_ste` (trains the masks), `forward` (fixed masks), or empty for a miss.
        routed: whether the masks have route weights.
        packed: when the masks are packed: `at each call`, `when compiled` (under freezing), `when exported`, or
            `beforehand` (the model holds them packed); empty for a miss.
        reason: for a miss, why, and what to change; None where it was fused.
        note: for a fused layer, what would make it faster; empty where nothing is known.
        before: the nodes of the layer, a line each.
        after: the nodes that took their place; empty for a miss.
    """

    module_path: str
    source: str
    n_masks: int
    activation: str
    dtype: str
    route: str = ""
    routed: bool = False
    packed: str = ""
    reason: str | None = None
    note: str = ""
    before: tuple[str, ...] = field(default=(), repr=False)
    after: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        place = self.module_path or self.source or "(function)"
        what = f"{place}: n_masks={self.n_masks}, {self.activation}, {self.dtype}"
        return f"{what}, fused to mglu::{self.route}" if self.reason is None else f"{what}, not fused: {self.reason}"

    def picture(self) -> str:
        """The graph of the layer before and after, as text."""
        parts = [str(self), "before:", *(f"  {line}" for line in self.before)]
        return "\n".join([*parts, *(["after:"] if self.after else []), *(f"  {line}" for line in self.after)])


_COLUMNS = ("module", "source", "masks", "activation", "dtype", "result", "masks packed")


@dataclass
class FusionReport:
    """The sites that compilations met, in their order; a layer compiled twice stands in it twice.

    Printed, it is a table, with the reasons of what was missed and how to spare the packing of masks below.

    Attributes:
        fused: layers that now run as one operator.
        missed: layers that were recognised, but not fused.
        graphs: graphs that the pass has seen.
    """

    fused: list[SiteReport] = field(default_factory=list)
    missed: list[SiteReport] = field(default_factory=list)
    graphs: int = 0

    def __str__(self) -> str:
        head = f"{len(self.fused)} fused, {len(self.missed)} missed, {self.graphs} graphs seen"
        if not self.fused and not self.missed:
            return head
        return "\n".join([head, "", *_table([_COLUMNS, *self._rows()]), *self._notes()])

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for number, site in enumerate((*self.fused, *self.missed), 1 - len(self.fused)):
            result = f"not fused [{number}]"
            if site.reason is None:
                result = f"mglu::{site.route}" + (", routed" if site.routed else "")
            source = re.sub(r"^.*[/\\\\]", "", site.source)
            yield (site.module_path, source, str(site.n_masks), site.activation, site.dtype, result, site.packed)

    def _notes(self) -> Iterator[str]:
        for number, site in enumerate(self.missed, 1):
            yield f"\n[{number}] {site.reason}"
        for note in dict.fromkeys(site.note for site in self.fused if site.note):
            yield f"\n{note}"
        if any(site.packed == AT_EACH_CALL and site.route == "forward" for site in self.fused):
            yield (
                "\nMasks are packed at each call, so that a change of them is seen at the next; to pack them once, use "
                "mglu_ops.freeze, torch._inductor.config.freezing under no_grad, or mglu_ops.export."
            )

    def to_json(self) -> str:
        """The report as JSON: the attributes of this object, and of each site."""
        return json.dumps(asdict(self), indent=2)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def lines(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Nodes as text, `gate [5, 12] = linear(x, masked)`."""
    return tuple(line(node) for node in nodes)


def line(node: Node) -> str:
    """A node as text; one that is an input of the graph by its name."""
    if node.op in ("placeholder", "get_attr"):
        return node.name
    call, example = as_call(node), tensor_example(node)
    operation = call.symbol if call is not None else str(getattr(node.target, "_overloadpacket", node.target))
    options = [f"{name}={_spelled(value)}" for name, value in node.kwargs.items()]
    shape = "" if example is None else f" {[*map(str, example.shape)]}".replace("'", "")
    return f"{node.name}{shape} = {operation}({', '.join([*map(_spelled, node.args), *options])})"


def _spelled(argument: Any) -> str:
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(_spelled, argument))}]"
    return str(argument)


def module_path(node: Node) -> str:
    """`layers.3.mlp` from the module stack that tracing recorded at a node."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"^(L\['\w+'\]|self)\.?", "", path)
    path = re.sub(r"_modules\['([^']+)'\]|\['?([^'\]]+)'?\]", lambda m: f".{m[1] or m[2]}", path)
    return re.sub(r"\.+", ".", path).strip(".").replace("_orig_mod.", "").removeprefix("_orig_mod")


def source_line(node: Node) -> str:
    """`file.py:12` of the last line of user code that made a node."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return "{}:{}".format(*lines[-1]) if lines else ""
