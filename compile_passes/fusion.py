"""The pass: finds the layers of a graph, checks each, rewrites the proved ones, and reports all of them."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, GraphModule, Node

from mglu_ops import formats, given, notices, ops

from .evaluate import Evaluation
from .memory import Memory, Surroundings
from .near_misses import find_near_misses
from .prepare import inline_no_grad, record_examples, recorded_bodies
from .proof import Layer, check, check_products, spelled
from .recognise import Recogniser
from .report import FusionReport, SiteReport, layers_present, line, report_at
from .rewrite import Replacement, replacement, rewrite
from .shapes import example, requires_grad, submodule, tensor_example
from .sites import Refusal, Site, find_sites, interior, parts_of
from .symbols import calls_read_once
from .view import View

log = logging.getLogger(__name__)

GraphPass = Callable[[Graph], Any]


class FusionError(RuntimeError):
    """Raised in strict mode: a layer was recognised but not fused, or nothing was fused."""


def fuse_graph(
    graph: Graph,
    report: FusionReport,
    *,
    strict: bool = False,
    assume_binary: bool = False,
    constants: Callable[[Node], Tensor | None] = lambda _: None,
    surroundings: Surroundings | None = None,
) -> None:
    """Rewrite the MGLU layers of a graph in place, and report each of them.

    Args:
        graph: a graph before autograd, with the example values that tracing records.
        report: receives the fused layers, and the missed ones with the reasons.
        strict: raise an error if a layer is not fused, or if the pass fails.
        assume_binary: also fuse float and integer masks that nothing proves to be binary, trusting them (packing checks
            their values at run time).
        constants: returns the value of a node if the value is the same at every run of the graph, else None. Such a
            value can prove that a float mask is binary.
        surroundings: the graphs around `graph`, if `graph` may be the body of a higher-order operator.

    Raises:
        FusionError: under `strict`, if a layer is not fused (the other layers are), or if the pass itself fails.
            Without `strict`, a failure of the pass only warns and leaves the graph unchanged.
    """
    inputs = graph.find_nodes(op="placeholder")
    if inputs and all(example(node) is None for node in inputs):
        notices.warn(
            "mglu_ops: a graph came without the examples that tracing records, so nothing in it can be proved and "
            "fused (torch 2.11 drops them on a CPU under torch._inductor.config.freezing; use mglu_ops.freeze instead)",
            stacklevel=2,
        )
    report.graphs += 1
    # Dynamo's DDP optimiser compiles each part of a graph separately, so that a layer's mask may be in another part.
    report.is_split |= getattr(TracingContext.try_get(), "ddp_optimizer_ctx", None) is not None
    present = layers_present(graph)
    try:
        with _no_new_guards(graph), _without_saved_tensors_hooks(), calls_read_once():
            fused, missed = _fuse(graph, report, constants, assume_binary, surroundings)
    except Exception as error:
        message = (
            f"mglu_ops: the fusion pass failed and left the graph as it was ({_cause(error)}). This is a bug of "
            "mglu_ops: please report it with the program that was compiled"
        )
        if strict:
            raise FusionError(message) from error
        notices.warn(message, stacklevel=2)
        return
    report.fused.extend(fused)
    report.missed.extend(missed)
    report.present.extend(present)
    for site in fused:
        log.debug("%s", site)
    for site in missed:
        log.info("%s", site)
    if strict and missed:
        raise FusionError("strict fusion: " + "; ".join(str(description) for description in missed))


def _fuse(
    graph: Graph,
    report: FusionReport,
    constants: Callable[[Node], Tensor | None],
    assume_binary: bool,
    surroundings: Surroundings | None,
) -> tuple[list[SiteReport], list[SiteReport]]:
    """Fuse the layers of a graph; returns the reports of the fused layers and of the missed ones."""
    view = View(graph)
    try:
        recogniser = Evaluation(view, constants)
        made, missed = _replacements(recogniser, graph, assume_binary, surroundings)
        notes = _notes(recogniser, [entry.layer for entry in made])
        fused = [
            _describe(
                entry.layer.site,
                operator=entry.layer.operator,
                weighted=bool(entry.layer.mask_weights),
                weight_format="dense" if entry.layer.stored is None else entry.layer.stored.format.name,
                packed=entry.packed,
                note=note,
                hides_nan=entry.layer.hides_nan,
                before=tuple(map(line, entry.layer.interior)),
                after=tuple(map(line, entry.nodes)),
            )
            for entry, note in zip(made, notes, strict=True)
        ]
    except BaseException:
        view.discard()
        raise
    for node in reversed(recogniser.imagined):
        view.graph.erase_node(node)
    if made:
        rewrite(view, made)
    report.errors.extend(recogniser.errors)
    return fused, missed


def _replacements(
    recogniser: Evaluation, graph: Graph, assume_binary: bool, surroundings: Surroundings | None
) -> tuple[list[Replacement], list[SiteReport]]:
    """Insert the nodes that will replace the layers of a graph; no node reads them yet.

    Returns:
        The replacements, and the reports of the missed layers.
    """
    view = recogniser.view
    sites = find_sites(view.graph, recogniser)
    spellings = [interior(recogniser, site) for site in sites]
    in_sites = {node for spelling in spellings for node in spelling}
    near = find_near_misses(recogniser, in_sites)
    missed = []
    if sites and surroundings is not None:
        surroundings.tell(view.memory, graph.owning_module)
    replaced: dict[Node, Replacement] = {}
    for site in sites:
        _, refused = _fuse_site(recogniser, site, assume_binary, replaced)
        for part, reason in refused:
            missed.append(_describe(part, reason=reason, before=tuple(map(line, interior(recogniser, part)))))
            for projection in part.projections:
                near.pop(recogniser.key(projection.weight), None)
    return list(replaced.values()), [*missed, *near.values()]


def _fuse_site(
    recogniser: Recogniser, site: Site, assume_binary: bool, replaced: dict[Node, Replacement]
) -> tuple[bool, list[tuple[Site, str]]]:
    """Add the replacement of a site to `replaced`, keyed by the site's root. If the site is refused, try its parts.

    Returns:
        `(is_fused, refused)`: True if anything is replaced, and the refused parts with their reasons. If nothing is
        replaced, `refused` has only the whole site with its reason.
    """
    if site.root in replaced:
        return True, []
    try:
        layer = check(recogniser, site, assume_binary)
        check_products(recogniser, layer)
        replaced[site.root] = replacement(recogniser, layer)
        return True, []
    except Refusal as refusal:
        parts = [_fuse_site(recogniser, part, assume_binary, replaced) for part in parts_of(recogniser, site)]
        if any(is_fused for is_fused, _ in parts):
            return True, [refusal for _, refused in parts for refusal in refused]
        return False, [(site, str(refusal))]


def _notes(recogniser: Recogniser, layers: Sequence[Layer]) -> list[str]:
    """A note for each layer, or an empty text.

    A note says that several operators read the layer's weight, why the layer's operator reads a decoded weight, or that
    a policy of selective checkpointing must name the operator.
    """
    body = recogniser.view.graph.owning_module
    has_policy = body is not None and "_checkpoint_context_fn" in body.meta
    keys = [recogniser.key(layer.weight) for layer in layers]
    notes = []
    for key, layer in zip(keys, layers, strict=True):
        note = []
        if keys.count(key) > 1:
            note.append(
                f"{keys.count(key)} operators read this weight, each of them all of it, because they do not compute "
                "one sum of terms with one input and one activation"
            )
        if layer.why_decoded:
            note.append(
                f"The program decodes the weight `{layer.weight.name}` from 8 or 4 bits at each call, and the "
                f"operator does not read it as it is stored: {layer.why_decoded}"
            )
        if has_policy and requires_grad(layer.site.root):
            operator = "grouped_forward_train" if layer.is_of_experts else "forward_train"
            note.append(
                "The layer is in a selective checkpoint, whose policy no longer sees matrix products of the layer; to "
                f"save what backward reads, name torch.ops.mglu.{operator} in the policy"
            )
        notes.append(". ".join(note))
    return notes


def _cause(error: Exception) -> str:
    inner = error.__cause__ or error
    return f"{error}: {type(inner).__name__}: {inner}" if inner is not error else f"{type(error).__name__}: {error}"


def _no_new_guards(graph: Graph) -> AbstractContextManager[None]:
    """A context in which a new guard on a symbolic size raises an error: reading a graph must not specialise it."""
    modes = (getattr(tensor_example(node), "fake_mode", None) for node in graph.nodes)
    env = next((mode.shape_env for mode in modes if mode is not None and mode.shape_env is not None), None)
    if env is None:
        return nullcontext()
    return env.error_on_new_guards() if hasattr(env, "error_on_new_guards") else _errors_on_new_guards(env)


def _without_saved_tensors_hooks() -> AbstractContextManager[Any]:
    """A context in which hooks of the program, such as those of `checkpoint`, do not see what autograd saves."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:  # also if a transform has disabled hooks
        return nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)  # only the innermost hooks are called


@contextmanager
def _errors_on_new_guards(env: Any) -> Iterator[None]:
    """Do what `ShapeEnv.error_on_new_guards` does, which torch 2.11 lacks.

    A `ShapeEnv` calls its method `_check_frozen` before it adds a guard or a run-time assertion. In torch 2.11 that
    method only logs. If the method raises an error, the guards and the known sizes stay unchanged.
    """

    def refuse(expression: Any, value: Any) -> None:
        raise RuntimeError(f"a guard would be added: {expression} == {value}")

    env._check_frozen = refuse
    try:
        yield
    finally:
        del env._check_frozen


def fuse(
    gm: GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    report: FusionReport | None = None,
    strict: bool = False,
    assume_binary: bool = False,
) -> GraphModule:
    """Copy a graph module, with its MGLU layers fused. The copy shares the parameters and buffers.

    Layers in the bodies of higher-order operators, such as `checkpoint` and `torch.cond`, are fused too.

    The pass follows the current grad mode: call this function under `torch.no_grad()` for inference, and with grad mode
    on for training.

    Args:
        gm: a graph module of `torch.export` (`ep.module()`), Dynamo or `torch.fx.symbolic_trace`.
        example_inputs: real or fake inputs with the dtypes and shapes of later calls; nothing is computed on them.
            They may be omitted if tracing recorded them at the placeholders, as Dynamo and `torch.export` do.
        report: receives the fused layers, and the missed ones with the reasons.
        strict: raise `FusionError` if a layer is not fused, or if nothing is.
        assume_binary: as in `mglu_ops.enable_fusion`.

    Raises:
        FusionError: under `strict`.
        TypeError: `gm` is not a graph module, or `example_inputs` is not a sequence.
        ValueError: `example_inputs` are missing or do not fit the module.
    """
    if not isinstance(gm, GraphModule):
        raise TypeError(
            f"gm: got {type(gm).__name__}, must be a torch.fx.GraphModule; for a model use "
            'torch.compile(model, backend="mglu")'
        )
    if example_inputs is not None and not isinstance(example_inputs, Sequence):
        raise TypeError(f"example_inputs: got {type(example_inputs).__name__}, must be a list or a tuple of inputs")
    fused = _copy(gm)
    inline_no_grad(fused, trains=torch.is_grad_enabled())
    with _without_saved_tensors_hooks():
        record_examples(fused, example_inputs)
        bodies = list(recorded_bodies(fused))
    report = FusionReport() if report is None else report
    lifted, surroundings = _lifted_numbers(gm), Surroundings(fused)
    for module in (*bodies, fused):
        fuse_graph(
            module.graph,
            report,
            strict=strict,
            assume_binary=assume_binary,
            constants=lambda node: lifted.get(node.target) if node.graph.owning_module is fused else None,
            surroundings=surroundings,
        )
        module.recompile()
    if strict and not report.fused and not report.present:
        raise FusionError("strict fusion: nothing was fused")
    return fused


def _copy(gm: GraphModule) -> GraphModule:
    """A graph module with copies of the graph of `gm` and of the bodies of its higher-order operators.

    It has the metadata that a Dynamo backend reads.
    """
    copied = GraphModule(gm, copy.deepcopy(gm.graph))
    for node in copied.graph.find_nodes(op="get_attr"):
        body = submodule(gm.graph, node)
        if body is not None:
            setattr(copied, str(node.target), _copy(body))
    copied.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):  # tells AOTAutograd which inputs are parameters
        copied._param_name_to_source = gm._param_name_to_source
        for node, original in zip(copied.graph.nodes, gm.graph.nodes, strict=True):
            if original.op == "placeholder":
                node._dynamo_source = original._dynamo_source
    return copied


def _lifted_numbers(gm: GraphModule) -> dict[Any, Tensor]:
    """The numbers that `torch.export` made plain attributes, such as the `0` in `w[mask] = 0`."""
    registered = {name for name, _ in (*gm.named_parameters(), *gm.named_buffers())}
    names = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")} - registered
    tensors = {name: getattr(gm, name, None) for name in names}
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor) and tensor.dim() == 0}


def _describe(site: Site, **more: Any) -> SiteReport:
    term = site.terms[0]
    return report_at(site.root, term.gate.dtype, n_masks=len(site.terms), activation=spelled(term), **more)


def _frozen(graph: Graph) -> dict[Node, Tensor]:
    """The tensors that Inductor's freezing makes constants: their values can prove that masks are binary.

    Freezing excludes tensors that share memory with a result of the graph.
    """
    if graph.owning_module is None or not inductor_config.freezing or torch.is_grad_enabled():
        return {}
    values = {node: getattr(graph.owning_module, str(node.target), None) for node in graph.find_nodes(op="get_attr")}
    memory, end = Memory(graph), graph.output_node()
    return {
        node: value.detach()
        for node, value in values.items()
        if isinstance(value, Tensor) and not memory.share(node, end.all_input_nodes, memory.order[end])
    }


@lru_cache(maxsize=1)
def _source_hash() -> str:
    """A hash of the sources of the pass, and of the operators that it inserts."""
    digest = hashlib.sha256()
    operators = (Path(str(module.__file__)) for module in (ops, given, formats))
    for path in (*sorted(Path(__file__).parent.rglob("*.py")), *operators):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class FusionPass(CustomGraphPass):
    """The pass as an object for Inductor's `pre_grad_custom_pass`. It first runs the passes `before`.

    Compile caches and worker processes pickle the pass. Pickling keeps the options and drops the report.

    Attributes:
        has_run: True if the pass was called.
        surroundings: the graphs of the module that is being compiled.
    """

    def __init__(
        self,
        report: FusionReport,
        *,
        strict: bool = False,
        assume_binary: bool = False,
        before: Sequence[GraphPass] = (),
    ) -> None:
        for name, value in {"strict": strict, "assume_binary": assume_binary}.items():
            if not isinstance(value, bool):
                raise TypeError(f"{name}: got {value!r}, must be True or False")
        self.report = report
        self.strict = strict
        self.assume_binary = assume_binary
        self.before = tuple(before)
        self.has_run = False
        self.surroundings: Surroundings | None = None

    def after(self, before: Sequence[GraphPass]) -> FusionPass:
        """A pass with the same options and report that first runs the passes `before`."""
        return FusionPass(self.report, strict=self.strict, assume_binary=self.assume_binary, before=before)

    def __call__(self, graph: Graph) -> None:
        self.has_run = True
        for graph_pass in self.before:
            graph_pass(graph)
        fuse_graph(
            graph,
            self.report,
            strict=self.strict,
            assume_binary=self.assume_binary,
            constants=_frozen(graph).get,
            surroundings=self.surroundings,
        )

    def uuid(self) -> Any | None:
        """A key for compile caches, from sources, options and earlier passes; None if an earlier pass has no uuid."""
        uuids = [graph_pass.uuid() if isinstance(graph_pass, CustomGraphPass) else None for graph_pass in self.before]
        if any(uuid is None for uuid in uuids):
            return None
        return ("mglu_ops", _source_hash(), self.strict, self.assume_binary, tuple(str(uuid) for uuid in uuids))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "report": FusionReport(), "has_run": False, "surroundings": None}
