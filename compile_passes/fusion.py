"""The pass: find the layers of a graph, check each, rewrite those that are proved, report all."""

from __future__ import annotations

import copy
import hashlib
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Node

from mglu_ops.backends import traced

from . import formulas
from .distributed import lacks_its_mask, report_cut_layers
from .examples import record_examples
from .mutation import normalise_writes
from .report import FusionReport, SiteReport, lines, module_path, source_line
from .rewrite import rewrite
from .rules import Recogniser
from .sites import Refusal, Site, check, find_sites, interior
from .symbols import example

log = logging.getLogger(__name__)

GraphPass = Callable[[Graph], Any]


class FusionError(RuntimeError):
    """Strict mode: a layer was recognised but not fused, or nothing was."""


def fuse_graph(
    graph: Graph,
    report: FusionReport,
    *,
    strict: bool = False,
    assume_binary: bool = False,
    constants: Mapping[Node, Tensor] | None = None,
) -> None:
    """Rewrite, in place, the MGLU layers of a graph, and add to `report` what became of each.

    `constants` are the values of nodes that hold them whenever the graph runs; a real mask among them is proved to be
    binary by its values.

    Raises:
        FusionError: under `strict`, if a layer is not fused. The others are.
    """
    if not _has_examples(graph):
        warnings.warn(
            "mglu_ops: a graph came without the examples that tracing records, so nothing in it can be proved and "
            "fused (torch 2.11 drops them on a CPU under torch._inductor.config.freezing; use mglu_ops.freeze instead)",
            UserWarning,
            stacklevel=2,
        )
    normalise_writes(graph)
    recogniser = Recogniser(graph, constants)
    layers, missed = [], []
    found: set[Node] = set()
    for site in find_sites(graph, recogniser):
        spelling = interior(graph, site)
        try:
            layers.append(check(graph, recogniser, site, assume_binary))
        except Refusal as refusal:
            if lacks_its_mask(graph, spelling):
                continue
            missed.append(_describe(site, reason=str(refusal), before=lines(spelling)))
        found.update(spelling)
    missed.extend(report_cut_layers(graph, found))
    spelled = [lines(layer.interior) for layer in layers]
    for layer, before, replaced in zip(layers, spelled, rewrite(graph, recogniser, layers), strict=True):
        report.fused.append(
            _describe(
                layer.site,
                route="forward_ste" if layer.trains_masks else "forward",
                routed=bool(layer.routes),
                packed=replaced.packed,
                before=before,
                after=lines(replaced.nodes),
            )
        )
        log.debug("%s", report.fused[-1])
    for description in missed:
        log.info("%s", description)
    report.graphs += 1
    report.missed.extend(missed)
    if strict and missed:
        raise FusionError("strict fusion: " + "; ".join(str(description) for description in missed))


def fuse(
    gm: GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    report: FusionReport | None = None,
    strict: bool = False,
    assume_binary: bool = False,
) -> GraphModule:
    """A copy of a graph module with its MGLU layers fused, sharing its parameters and buffers.

    Args:
        gm: of `torch.export` (`ep.module()`), Dynamo or `torch.fx.symbolic_trace`.
        example_inputs: inputs of the dtypes and shapes to come, real or fake, on which nothing is computed; may be left
            out where tracing recorded them at the placeholders, as Dynamo and `torch.export` do.
        report: takes what became of each layer.
        strict: raise `FusionError` if a layer is not fused, or nothing is.
        assume_binary: as of `mglu_ops.enable_fusion`.

    What requires a gradient, and whether gradients are recorded, are taken as they are now: call it under
    `torch.no_grad()` for a module that infers, outside for one that trains.

    Raises:
        FusionError: under `strict`.
        ValueError: `example_inputs` is missing or does not fit the module.
    """
    fused = _copy(gm)
    record_examples(fused, example_inputs)
    report = FusionReport() if report is None else report
    lifted = _lifted_numbers(gm)
    constants = {node: lifted[node.target] for node in fused.graph.nodes if node.target in lifted}
    fuse_graph(fused.graph, report, strict=strict, assume_binary=assume_binary, constants=constants)
    if strict and not report.fused:
        raise FusionError("strict fusion: nothing was fused")
    fused.recompile()
    return fused


def _copy(gm: GraphModule) -> GraphModule:
    """A module of its own graph, with what a Dynamo backend goes on to read of its module."""
    copied = GraphModule(gm, copy.deepcopy(gm.graph))
    copied.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):  # by which AOTAutograd knows the inputs that are parameters
        copied._param_name_to_source = gm._param_name_to_source
        for node, original in zip(copied.graph.nodes, gm.graph.nodes, strict=True):
            if original.op == "placeholder":
                node._dynamo_source = original._dynamo_source
    return copied


def _lifted_numbers(gm: GraphModule) -> dict[Any, Tensor]:
    """The numbers that `torch.export` made tensors of, `0` in `w[mask] = 0`: attributes that are no buffers."""
    registered = {name for name, _ in (*gm.named_parameters(), *gm.named_buffers())}
    names = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")} - registered
    tensors = {name: getattr(gm, name, None) for name in names}
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor) and tensor.dim() == 0}


def _has_examples(graph: Graph) -> bool:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return not inputs or any(example(node) is not None for node in inputs)


def _describe(site: Site, **more: Any) -> SiteReport:
    term = site.terms[0]
    return SiteReport(
        module_path=module_path(site.root),
        source=source_line(site.root),
        n_masks=len(site.terms),
        activation=term.activation or formulas.spelled(term.formula),
        dtype=str(term.gate.dtype).removeprefix("torch."),
        **more,
    )


def _frozen(graph: Graph) -> dict[Node, Tensor]:
    """What Inductor's freezing makes constants of, so that masks in it may be proved by their values."""
    if graph.owning_module is None or not inductor_config.freezing or torch.is_grad_enabled():
        return {}
    values = {node: getattr(graph.owning_module, str(node.target), None) for node in graph.find_nodes(op="get_attr")}
    return {node: value.detach() for node, value in values.items() if isinstance(value, Tensor)}


@lru_cache(maxsize=1)
def _source_hash() -> str:
    """Of everything that decides what the pass does, and what Inductor makes of its operators."""
    digest = hashlib.sha256()
    for source in (Path(__file__), Path(traced.__file__)):
        for path in sorted(source.parent.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


class FusionPass(CustomGraphPass):
    """The pass in the form that Inductor's `pre_grad_custom_pass` takes; first come the passes found there before.

    Pickled, it keeps its options and loses its report, so that compile caches and worker processes may carry it.
    """

    def __init__(
        self,
        report: FusionReport,
        *,
        strict: bool = False,
        assume_binary: bool = False,
        before: Sequence[GraphPass] = (),
    ) -> None:
        self.report = report
        self.strict = strict
        self.assume_binary = assume_binary
        self.before = tuple(before)

    def __call__(self, graph: Graph) -> None:
        for graph_pass in self.before:
            graph_pass(graph)
        fuse_graph(
            graph,
            self.report,
            strict=self.strict,
            assume_binary=self.assume_binary,
            constants=_frozen(graph),
        )

    def uuid(self) -> Any | None:
        """Changes with the sources, the options and the passes that come first; None if one of those has none."""
        uuids = [graph_pass.uuid() if isinstance(graph_pass, CustomGraphPass) else None for graph_pass in self.before]
        if any(uuid is None for uuid in uuids):
            return None
        return (
            "mglu_ops",
            _source_hash(),
            self.strict,
            self.assume_binary,
            tuple(str(uuid) for uuid in uuids),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.strict, self.assume_binary, self.before)


def _rebuild(strict: bool, assume_binary: bool, before: Sequence[GraphPass]) -> FusionPass:
    return FusionPass(FusionReport(), strict=strict, assume_binary=assume_binary, before=before)
