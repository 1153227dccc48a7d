"""What the pass did: the sites it fused, and those it nearly fused, with the reason."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from torch.fx import Node


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
        reason: for a miss, why, and what to change; None where it was fused.
    """

    module_path: str
    source: str
    n_masks: int
    activation: str
    dtype: str
    route: str = ""
    reason: str | None = None

    def __str__(self) -> str:
        place = self.module_path or self.source or "(function)"
        what = f"{place}: n_masks={self.n_masks}, {self.activation}, {self.dtype}"
        return f"{what}, fused to mglu::{self.route}" if self.reason is None else f"{what}, not fused: {self.reason}"


@dataclass
class FusionReport:
    """The sites that compilations met, in their order; a layer compiled twice stands in it twice.

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
        return "\n".join([head, *(f"  {site}" for site in (*self.fused, *self.missed))])


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
