"""The pass for exported programs: fuses the layers, and packs masks whose values are constants.

An exported program contains the values of its parameters, buffers and constants. Masks that are computed from such
tensors are packed once, by this pass: the packed bits become a buffer, and the logits leave the program. The result is
for inference. An export with grad mode on records which tensors require gradients. Such a tensor would make the pass
insert the training operator, so the pass drops these records.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import operator
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from mglu_ops.tensors import bytes_of

from .calls import as_function, bodies_of, calls_of_bodies, storage_of, tensors_in
from .fusion import FusionError, fuse, fuse_graph
from .memory import STORAGE, Memory
from .prepare import inline_no_grad
from .report import WHEN_EXPORTED, FusionReport, SiteReport, module_path
from .shapes import sources, tensor_example
from .symbols import as_call

_aten = torch.ops.aten
_mglu = torch.ops.mglu


def fuse_exported(
    program: ExportedProgram, *, report: FusionReport | None = None, strict: bool = False, assume_binary: bool = False
) -> ExportedProgram:
    """Make a program for inference in which `mglu::forward` with packed masks replaces the MGLU layers of `program`.

    Masks that are functions of parameters, buffers and constants are packed now, and tensors that only the packing
    needs (mask logits, float masks) are dropped. The values of a constant float mask prove that it is binary.
    The training operators, which layers of `mglu_ops.nn` call, are replaced too: `mglu::forward_ste` by `mglu::forward`
    with packed masks, and `mglu::grouped_forward_ste` (for experts) by `mglu::grouped_forward`.

    Args:
        program: the result of `torch.export.export`, traced with or without `no_grad`; it is not changed.
        report: receives the fused layers, and the missed ones with the reasons.
        strict: raise an error if a layer is recognised but not fused, or if the program has no layer.
        assume_binary: also fuse float and integer masks that are inputs, trusting them to be binary (packing checks
            their values at run time).

    Returns:
        A new program with the inputs, outputs and dynamic shapes of `program`. Both programs share the tensors that the
        new program keeps.

    Raises:
        FusionError: under `strict`.
        ValueError: under `assume_binary`, if masks that are computed from constants hold values other than 0 and 1.
    """
    report = FusionReport() if report is None else report
    program = _with_layers_in_one_graph(program)
    with torch._C._DisableAutocast():  # an autocast of the caller would round the constants
        folder = _Folder(program)
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
        constants = _values_of_constants(folder)
        fuse_graph(graph, report, strict=strict, assume_binary=assume_binary, constants=constants)
        in_bodies = list(_layers_in_bodies(graph))
        report.missed.extend(in_bodies)
        if strict and in_bodies:
            raise FusionError("strict fusion: " + "; ".join(map(str, in_bodies)))
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


def _with_layers_in_one_graph(program: ExportedProgram) -> ExportedProgram:
    """The program itself, or if a block of autocast contains layers, an equal program with casts instead of blocks.

    The body of such a block is a graph of its own, where masks are no constants.
    """
    found, graph = FusionReport(), _Folder(program).graph
    for call in graph.find_nodes(op="call_function", target=torch.ops.higher_order.wrap_with_autocast):
        for body in filter(None, bodies_of(call)):
            fuse_graph(body.graph, found)
    if not (found.fused or found.missed or found.present):
        return program
    with ExitStack() as stack:  # an autocast of the caller would add its casts
        for device in {value.device.type for value in tensors_in([*program.state_dict.values()])}:
            stack.enter_context(torch.autocast(device, enabled=False))
        return program.run_decompositions({})


def _layers_in_bodies(graph: Graph) -> Iterator[SiteReport]:
    """The layers in the bodies of higher-order operators, as misses: the bodies stay as they are."""
    for body, (call, *_) in calls_of_bodies(graph).items():
        found = FusionReport()
        with torch.no_grad(), suppress(ValueError):  # a body that cannot be run on fake tensors
            fuse(body, report=found)
        reason = (
            f"it is in the body of `{call.target}`, and in an exported program the pass fuses no bodies; export the "
            "body as a model of its own, or use torch.compile"
        )
        for site in (*found.fused, *found.missed):
            yield replace(site, operator="", weight_format="", packed="", weighted=False, reason=reason, after=())


def layers_of(graph: Graph) -> list[Node]:
    """The calls of `mglu::forward`, `mglu::grouped_forward` and `mglu::experts_forward` in a graph."""
    layers = (_mglu.forward.default, _mglu.grouped_forward.default, _mglu.experts_forward.default)
    return [node for node in graph.nodes if node.target in layers]


_PACK_AND_RUN = {
    _mglu.forward_ste.default: (_mglu.pack_logits.default, _mglu.forward.default),
    _mglu.grouped_forward_ste.default: (_mglu.pack_expert_logits.default, _mglu.grouped_forward.default),
}


def _stop_training(graph: Graph) -> None:
    """Split each training operator into two inference operators: one packs the masks, one takes packed masks."""
    for node in [node for node in graph.nodes if node.target in _PACK_AND_RUN]:
        pack, run = _PACK_AND_RUN[node.target]
        x, weight, logits, *rest = node.args
        with graph.inserting_before(node):
            packed = graph.call_function(pack, (logits,))
            result = graph.call_function(run, (x, weight, packed, *rest), node.kwargs)
        for user in list(node.users):  # each is a `getitem` of one of the two results
            taken = (result, packed)[user.args[1]]
            taken.meta = {**user.meta, **taken.meta}
            user.replace_all_uses_with(taken)
            graph.erase_node(user)
        graph.erase_node(node)


def _lower_to_aten(graph: Graph) -> None:
    """Lower the nodes that the pass made to ATen operators with traced values, as an exported graph requires."""
    mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    for node in list(graph.nodes):
        is_arithmetic = node.target in (operator.add, operator.mul) and isinstance(node.meta.get("val"), Tensor)
        is_result = node.op == "call_method" or is_arithmetic  # a new node to which the pass gave its root's `val`
        is_new = "val" not in node.meta or is_result
        if not is_new or node.op not in ("call_function", "call_method"):
            continue
        inputs = node.all_input_nodes
        with mode or nullcontext():  # so that calls without inputs, such as `arange`, make fake tensors of this mode
            traced = make_fx(_as_function_of(node, inputs))(*(item.meta["val"] for item in inputs)).graph
        copies: dict[Node, Any] = dict(zip(traced.find_nodes(op="placeholder"), inputs, strict=True))
        with graph.inserting_before(node):
            for inner in traced.nodes:
                if inner.op == "call_function":
                    copies[inner] = graph.node_copy(inner, copies.__getitem__)
                    copies[inner].meta = {**node.meta, **inner.meta}
        (output,) = traced.find_nodes(op="output")
        node.replace_all_uses_with(torch.fx.map_arg(output.args[0], copies.__getitem__))
        graph.erase_node(node)


def _as_function_of(node: Node, inputs: list[Node]) -> Callable[..., Any]:
    """The call of a node as a function of the values of `inputs`."""

    def function(*values: Any) -> Any:
        held = dict(zip(inputs, values, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), held.__getitem__)
        return as_function(node)(*args, **kwargs)

    return function


def _fold_operands(folder: _Folder) -> list[bool]:
    """Replace constant packed masks, and weights that are a cast or transpose of a constant, by buffers.

    A weight with other readers, such as a tied embedding, is not replaced, because the buffer would be a second copy.

    Returns:
        For each layer of the graph, True if its masks were packed here.
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


# --- Constants -------------------------------------------------------------------------------------------------------

_CONSTANT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class _Folder:
    """A copy of an exported program whose constant nodes can be evaluated and replaced by buffers."""

    def __init__(self, program: ExportedProgram) -> None:
        self._source = program
        self._module = copy.deepcopy(program.graph_module)
        self.graph: Graph = self._module.graph
        for node, original in zip(self.graph.nodes, program.graph.nodes, strict=True):
            node.name = original.name  # copying may rename a node, but the specs refer to the original name
        inline_no_grad(self._module, trains=False)
        self._state: dict[str, Any] = dict(program.state_dict)
        self._held: dict[Node, Tensor] = {}  # the tensor of each parameter, buffer and constant
        self._written_at_end: set[Hashable] = set()
        """The storages of buffers that the program updates. The graph does not write to them but returns new values."""
        self._made: dict[Hashable, Node] = {}  # new buffers, keyed by contents, because layers may share packed masks
        placeholders = self.graph.find_nodes(op="placeholder")
        self._specs = dict(zip(placeholders, program.graph_signature.input_specs, strict=True))
        signature = program.graph_signature
        mutated = {*signature.buffers_to_mutate.values(), *getattr(signature, "parameters_to_mutate", {}).values()}
        for node, spec in self._specs.items():
            if spec.kind in _CONSTANT_KINDS:
                tensors = self._state if spec.target in self._state else program.constants
                self._held[node] = tensors[spec.target].detach()
                node.meta[STORAGE] = storage_of(self._held[node])
                if spec.target in mutated:
                    self._written_at_end.add(node.meta[STORAGE])

    def constant_nodes(self) -> list[Node]:
        """The nodes that are functions of parameters, buffers and constants alone, in the order of the graph.

        A node is excluded if anything writes to its storage, because the next run of the program reads the new value.
        """
        memory = Memory(self.graph)
        memory.write_at_end(self._written_at_end)
        found: dict[Node, None] = {}
        for node in self.graph.nodes:
            is_constant = node in self._held or (not memory.effects[node].writes and _is_pure(node, found))
            if is_constant and not memory.is_written(node):
                found[node] = None
        return list(found)

    def evaluate(self, node: Node) -> Any:
        """Compute the value of a constant node. Intermediate values are not kept."""
        values: dict[Node, Any] = {}
        with torch.no_grad():
            for current in sorted(sources(node)):
                if current in self._held:
                    values[current] = self._held[current]
                else:
                    args, kwargs = torch.fx.map_arg((current.args, current.kwargs), values.__getitem__)
                    assert callable(current.target), "constant nodes are placeholders and calls of functions"
                    values[current] = current.target(*args, **kwargs)
        return values[node]

    def replace_by_buffer(self, node: Node, name: str) -> None:
        """Evaluate a constant node and replace it by a buffer called `name` (or `name_1`, ... if that is taken)."""
        value: Tensor = self.evaluate(node).contiguous()
        contents = (value.dtype, value.device, value.shape, hashlib.sha256(bytes_of(value)).digest())
        if contents not in self._made:
            taken = self._state.keys() | self._source.constants.keys()
            numbered = (f"{name}_{number}" for number in itertools.count(1))
            target = name if name not in taken else next(other for other in numbered if other not in taken)
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                placeholder = self.graph.placeholder("b_" + target.replace(".", "_"))
            placeholder.meta = {"val": node.meta["val"], STORAGE: storage_of(value)}
            argument = TensorArgument(name=placeholder.name)
            self._specs[placeholder] = InputSpec(InputKind.BUFFER, argument, target, persistent=True)
            self._state[target] = self._held[placeholder] = value
            self._made[contents] = placeholder
        node.replace_all_uses_with(self._made[contents])

    def program(self) -> ExportedProgram:
        """Make an exported program of the current graph, without unused constants."""
        source, signature = self._source, self._source.graph_signature
        for node in reversed(self.constant_nodes()):
            if not node.users:
                self.graph.erase_node(node)
        self.graph.lint()
        self._module.recompile()
        for node in self._held:
            node.meta.pop(STORAGE, None)
        specs = [self._specs[node] for node in self.graph.find_nodes(op="placeholder")]
        results: Any = self.graph.output_node().args[0]
        outputs = [
            replace(spec, arg=replace(spec.arg, name=result.name)) if isinstance(result, Node) else spec
            for spec, result in zip(signature.output_specs, results, strict=True)
        ]
        dropped = {spec.target for spec in signature.input_specs if spec.kind in _CONSTANT_KINDS}
        dropped -= {spec.target for spec in specs}
        return ExportedProgram(
            root=self._module,
            graph=self.graph,
            graph_signature=ExportGraphSignature(specs, outputs),
            state_dict={name: value for name, value in self._state.items() if name not in dropped},
            range_constraints=dict(source.range_constraints),
            module_call_graph=copy.deepcopy(source.module_call_graph),
            example_inputs=source.example_inputs,
            constants={name: value for name, value in source.constants.items() if name not in dropped},
            verifiers=list(source.verifiers),
        )


_PURE_NAMESPACES = ("aten", "prims", "mglu")
"""Namespaces of operators whose schemas and tags declare all side effects. Other operators may, say, read a file."""


def _is_pure(node: Node, constant: dict[Node, None]) -> bool:
    """True if a node is a deterministic function of constants without side effects."""
    target, inputs = node.target, node.all_input_nodes
    if not inputs or not all(item in constant for item in inputs):
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", None) in ("_operator", "math")
    if target.namespace not in _PURE_NAMESPACES or not target._schema.returns:  # a call without results is an assertion
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


_KEEP_A_WEIGHT = ("mul", "linear", "matmul", "t", "mT", "transpose")
"""Symbols of the calls that read a weight. A mask has at least one other user: the call that makes its complement."""


def _values_of_constants(folder: _Folder) -> Callable[[Node], Tensor | None]:
    """A function that returns the value of a constant node, if the node may be a mask or a number; else None.

    Values are computed on demand to save memory.
    """
    nodes = set(filter(_may_tell, folder.constant_nodes()))
    return lambda node: folder.evaluate(node) if node in nodes else None


def _may_tell(node: Node) -> bool:
    """True if the users of a constant may read it as a mask or a number.

    The users decide and not the values, because a weight may also hold only 0 and 1.
    """
    example = tensor_example(node)
    if example is None or example.dim() not in (0, 2, 3) or example.is_complex():
        return False
    calls = [as_call(user) for user in node.users]
    return example.dtype is torch.bool or not all(call and call.symbol in _KEEP_A_WEIGHT for call in calls)
