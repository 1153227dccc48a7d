"""Constants of an exported program: finding them, evaluating them, and replacing them by buffers."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import Graph, Node

from mglu_ops.tensors import bytes_of

from .calls import storage_of
from .inlining import inline_no_grad
from .memory import STORAGE, Memory
from .shapes import sources, tensor_example
from .symbols import as_call

_CONSTANT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class Folder:
    """A copy of an exported program whose constant nodes can be evaluated and replaced by buffers."""

    def __init__(self, program: ExportedProgram) -> None:
        self._source = program
        self._module = copy.deepcopy(program.graph_module)
        self.graph: Graph = self._module.graph
        for node, original in zip(self.graph.nodes, program.graph.nodes, strict=True):
            node.name = original.name  # copying a graph renames nodes that are named like a builtin; specs need names
        inline_no_grad(self._module, trains=False)
        self._state: dict[str, Any] = dict(program.state_dict)
        self._held: dict[Node, Tensor] = {}
        """The tensors of the placeholders of parameters, buffers and constants when the program is exported."""
        self._written_at_end: set[Hashable] = set()
        """The storages that a call overwrites at its end, because a functional graph returns their new values."""
        self._made: dict[Hashable, Node] = {}
        """Buffers made here, by their contents, so that layers that share masks also share the packed masks."""
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

        No node ever writes to their storages: even a later write would be seen by the next call.
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
        """The value of a constant node; intermediate values are not kept."""
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
        """The program of the current graph, without unused constants."""
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
"""Namespaces whose operators do no more than their schemas and tags say; others may count calls or read a file."""


def _is_pure(node: Node, constant: dict[Node, None]) -> bool:
    """Whether a node is a function of constants without side effects that returns the same at every call."""
    target, inputs = node.target, node.all_input_nodes
    if not inputs or not all(item in constant for item in inputs):
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", None) in ("_operator", "math")
    if target.namespace not in _PURE_NAMESPACES or not target._schema.returns:  # no results: an assertion
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


_KEEP_A_WEIGHT = ("mul", "linear", "matmul", "t", "mT", "transpose")
"""Symbols of the calls that read a weight. A mask also has another user, which makes its complement."""


def values_of_constants(folder: Folder) -> Callable[[Node], Tensor | None]:
    """A function that computes the value of a constant that may be a mask or a number, on demand to save memory."""
    nodes = set(filter(_may_tell, folder.constant_nodes()))
    return lambda node: folder.evaluate(node) if node in nodes else None


def _may_tell(node: Node) -> bool:
    """Whether a constant may be a mask or a number, by shape and users: a weight of 0s and 1s must not count as one."""
    example = tensor_example(node)
    if example is None or example.dim() not in (0, 2, 3) or example.is_complex():
        return False
    calls = [as_call(user) for user in node.users]
    return not all(call and call.symbol in _KEEP_A_WEIGHT for call in calls)
