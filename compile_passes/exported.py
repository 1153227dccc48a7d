"""The pass over an exported program: fuse its layers, and pack their masks while they are still at hand.

An exported program knows the values of its parameters, buffers and constants. So masks made of them are evaluated here,
once: the packed bits become a buffer, and the logits leave the program. A program is for inference: gradients that
tracing recorded (an export made with grad mode on) are dropped first, as they would ask for the training operator.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .fusion import FusionError, fuse_graph
from .inlining import inline_no_grad
from .memory import STORAGE, storage_of, storages_of_all
from .mutation import written
from .report import WHEN_EXPORTED, FusionReport, module_path
from .shapes import tensor_example
from .symbols import as_call

_aten = torch.ops.aten
_mglu = torch.ops.mglu
_CONSTANT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def fuse_exported(
    program: ExportedProgram,
    *,
    report: FusionReport | None = None,
    strict: bool = False,
    assume_binary: bool = False,
) -> ExportedProgram:
    """A program for inference that calls `mglu::forward` on packed masks where `program` spells MGLU layers.

    Masks that follow from parameters, buffers and constants are packed now, and what only they used (mask logits,
    float masks) is gone from the result. A real tensor among those whose values are 0 and 1 only is proved binary by
    its values. `mglu::forward_ste` of an `mglu_ops.nn` layer becomes `mglu::forward` in the same way.

    Args:
        program: of `torch.export.export`, made with or without `no_grad`; it stays as it is.
        report: to add to: what was fused, and what was missed and why.
        strict: a layer that is recognised and not fused is an error, and so is a program without any layer.
        assume_binary: also fuse real masks that are inputs, trusting them to be binary (packing checks at run time).

    Returns:
        A new program with the inputs, outputs and dynamic shapes of `program`, which shares its remaining tensors.

    Raises:
        FusionError: under `strict`.
        ValueError: under `assume_binary`, masks that follow from constants hold values other than 0 and 1.
    """
    report = FusionReport() if report is None else report
    with torch._C._DisableAutocast():  # around the call, it would be applied to the constants
        folder = _Folder(program)
        graph = folder.graph
        for node in graph.nodes:
            _drop_gradient(node)
        constant = set(folder.constant_nodes())
        for node in graph.find_nodes(op="call_function", target=_aten._assert_tensor_metadata.default):
            if constant.issuperset(node.all_input_nodes):  # it held when the program was traced
                graph.erase_node(node)
        _stop_training(graph)
        given, n_before = set(layers_of(graph)), len(report.fused)
        fuse_graph(graph, report, strict=strict, assume_binary=assume_binary, constants=_Values(folder))
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
    """The calls of `mglu::forward` in a graph."""
    return graph.find_nodes(op="call_function", target=_mglu.forward.default)


def _drop_gradient(node: Node) -> None:
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.requires_grad:
        node.meta["val"] = value.detach()


# --- Constants ------------------------------------------------------------------------------------------------------


class _Folder:
    """A copy of a program whose nodes can be evaluated, and replaced by buffers, where they are constant."""

    def __init__(self, program: ExportedProgram) -> None:
        self._source = program
        self._module = copy.deepcopy(program.graph_module)
        self.graph: Graph = self._module.graph
        for node, original in zip(self.graph.nodes, program.graph.nodes, strict=True):
            node.name = original.name  # a copied graph renames what is called like a builtin, and specs go by name
        inline_no_grad(self._module, trains=False)
        self._state: dict[str, Any] = dict(program.state_dict)
        self._held: dict[Node, Tensor] = {}
        """What the placeholders of parameters, buffers and constants hold when the program is exported."""
        self._written_at_end: set[Hashable] = set()
        """The storages that a call changes when it ends: a functional graph returns what is to be written to them."""
        self._made: dict[Hashable, Node] = {}
        """Buffers made here, by their contents: layers that share masks share the packed ones."""
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
        """The nodes whose values follow from parameters, buffers and constants alone, in the graph's order.

        Nothing writes to them: not to their memory, through whichever tensor, before or after them. A write after them
        is seen by the next call.
        """
        memory = storages_of_all(self.graph)
        overwritten = self._written_at_end.union(
            *(memory[target] for node in self.graph.nodes for target in written(node))
        )
        found: dict[Node, None] = {}
        for node in self.graph.nodes:
            if (node in self._held or _is_pure(node, found)) and memory[node].isdisjoint(overwritten):
                found[node] = None
        return list(found)

    def sources(self, node: Node) -> set[Node]:
        """A node and all that it is made of."""
        found: set[Node] = set()
        stack = [node]
        while stack:
            if (current := stack.pop()) not in found:
                found.add(current)
                stack.extend(current.all_input_nodes)
        return found

    def evaluate(self, node: Node) -> Any:
        """The value of a constant node; what it takes on the way is dropped again."""
        done: dict[Node, Any] = {}
        pending = [node]
        with torch.no_grad():
            while pending:
                current = pending[-1]
                missing = [item for item in current.all_input_nodes if item not in done]
                if current in self._held:
                    done[current] = self._held[current]
                elif missing:
                    pending.extend(missing)
                    continue
                elif current not in done:
                    args, kwargs = torch.fx.map_arg((current.args, current.kwargs), done.__getitem__)
                    assert callable(current.target), "constant nodes are placeholders and calls of functions"
                    done[current] = current.target(*args, **kwargs)
                pending.pop()
        return done[node]

    def replace_by_buffer(self, node: Node, name: str) -> None:
        """Evaluate a constant node and let a buffer `name` (or `name_1`, ...) take its place."""
        value: Tensor = self.evaluate(node).contiguous()
        digest = hashlib.sha256(value.cpu().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
        contents = (value.dtype, value.device, value.shape, digest.digest())
        if contents not in self._made:
            taken = self._state.keys() | self._source.constants.keys()
            numbered = (f"{name}_{number}" for number in range(1, len(taken) + 2))
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
        """The program of the graph as it is now, without the constants that nothing uses."""
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
"""Namespaces of operators that do what their schemas and tags say. Others may count their calls, or read a file."""


def _is_pure(node: Node, constant: dict[Node, None]) -> bool:
    """Whether a node is a function of constants that gives the same at every call, and does nothing else."""
    target, inputs = node.target, node.all_input_nodes
    if node.op != "call_function" or written(node) or not inputs or not all(item in constant for item in inputs):
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", None) in ("_operator", "math")
    if target.namespace not in _PURE_NAMESPACES or not target._schema.returns:  # one without results is an assertion
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


_KEEP_A_WEIGHT = ("mul", "linear", "matmul", "t", "mT", "transpose")
"""What is done to a weight. A mask has a user beside these, which makes its complement."""


class _Values(Mapping[Node, Tensor]):
    """The values of the constants that may be masks or numbers, each computed when it is asked for, to save memory."""

    def __init__(self, folder: _Folder) -> None:
        self._folder = folder
        self._nodes = dict.fromkeys(filter(_may_tell, folder.constant_nodes()))

    def __getitem__(self, node: Node) -> Tensor:
        if node not in self._nodes:
            raise KeyError(node)
        value: Tensor = self._folder.evaluate(node)
        return value

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


def _may_tell(node: Node) -> bool:
    """Whether the value of a constant may say what it is: a weight of zeros and ones is no mask."""
    example = tensor_example(node)
    if example is None or example.dim() not in (0, 2, 3) or example.is_complex():
        return False
    calls = [as_call(user) for user in node.users]
    return not all(call and call.symbol in _KEEP_A_WEIGHT for call in calls)


# --- Rewriting ------------------------------------------------------------------------------------------------------


def _stop_training(graph: Graph) -> None:
    """`mglu::forward_ste`, which packs the masks at each call, as `mglu::pack_masks` and `mglu::forward`."""
    for node in graph.find_nodes(op="call_function", target=_mglu.forward_ste.default):
        x, weight, logits, *rest = node.args
        with graph.inserting_before(node):
            bits = graph.call_function(_aten.gt.Scalar, (logits, 0))
            packed = graph.call_function(_mglu.pack_masks.default, (bits,))
            result = graph.call_function(_mglu.forward.default, (x, weight, packed, *rest), node.kwargs)
        for user in list(node.users):  # each takes one of the two results
            taken = (result, packed)[user.args[1]]
            taken.meta = {**user.meta, **taken.meta}
            user.replace_all_uses_with(taken)
            graph.erase_node(user)
        graph.erase_node(node)


def _lower_to_aten(graph: Graph) -> None:
    """Spell new nodes in ATen operators with traced values, as the rest of an exported graph is."""
    for node in list(graph.nodes):
        is_new = "val" not in node.meta or node.target in (torch.add, torch.mul)  # which give a layer's result
        if not is_new or node.op not in ("call_function", "call_method"):
            continue
        inputs = node.all_input_nodes
        traced = make_fx(_as_function(node, inputs))(*(item.meta["val"] for item in inputs)).graph
        copies: dict[Node, Any] = dict(zip(traced.find_nodes(op="placeholder"), inputs, strict=True))
        with graph.inserting_before(node):
            for inner in traced.nodes:
                if inner.op == "call_function":
                    copies[inner] = graph.node_copy(inner, copies.__getitem__)
                    copies[inner].meta = {**node.meta, **inner.meta}
        (output,) = traced.find_nodes(op="output")
        node.replace_all_uses_with(torch.fx.map_arg(output.args[0], copies.__getitem__))
        graph.erase_node(node)


def _as_function(node: Node, inputs: list[Node]) -> Callable[..., Any]:
    """What a node does, as a function of its inputs' values."""

    def function(*values: Any) -> Any:
        held = dict(zip(inputs, values, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), held.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    return function


def _operand(layer: Node, position: int) -> Node:
    operand = layer.args[position]
    assert isinstance(operand, Node), "a tensor of the layer"
    return operand


def _fold_operands(folder: _Folder) -> list[bool]:
    """Make buffers of the packed masks of constants, and of weights that are only stored in another way.

    A weight that something else reads too (a tied embedding) is left: a second copy of it would cost memory.

    Returns:
        For each layer of the graph, whether its masks were packed here.
    """
    constant = set(folder.constant_nodes())
    is_packed = []
    for layer in layers_of(folder.graph):
        weight, packed = _operand(layer, 1), _operand(layer, 2)
        path = module_path(layer)
        prefix = f"{path}." if path else ""
        is_packed.append(packed in constant and packed.op != "placeholder")
        if is_packed[-1]:
            folder.replace_by_buffer(packed, f"{prefix}packed_masks")
        if weight in constant and weight.op != "placeholder":
            sources = folder.sources(weight)
            if all(user in sources for node in sources - {weight} for user in node.users):
                folder.replace_by_buffer(weight, f"{prefix}fused_weight")
    return is_packed
