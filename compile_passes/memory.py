"""Shared memory: which tensors of a graph share a storage, so that a write to one is a write to the other.

In a graph that was just traced, the examples of a tensor and of its views share a storage. In a program that was saved
and loaded they do not, because each was stored by itself. Therefore the result of a call is also assumed to share
memory with the arguments that it may be a view of, by its schema.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .shapes import example, submodule

STORAGE = "mglu_storage"
"""Key in the `meta` of an input: the identity of the real storage that it stands for (`storage_of`)."""

_ALIASING_OPERATORS = ("aten::_unsafe_view", "aten::lift", "aten::unsafe_split", "aten::unsafe_split_with_sizes")
"""Operators that return views which their schemas do not declare."""

_FRESH_COMPOSITES = frozenset(
    f"aten::{name}"
    for name in (
        *("linear", "matmul", "bilinear", "conv1d", "conv2d", "conv3d", "softmax", "log_softmax", "layer_norm"),
        *("rms_norm", "group_norm", "batch_norm", "instance_norm", "scaled_dot_product_attention"),
    )
)
"""Composite operators that always return new memory."""


def storages(node: Node, known: Mapping[Node, set[Hashable]] | None = None) -> set[Hashable]:
    """The storages that a node's value may be in; `known` has those of other nodes, to save time."""
    found: set[Hashable] = set()
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        if known is not None and current in known:
            found |= known[current]
            continue
        found |= _traced_storages(current)
        fresh = [item for item in _arguments_shared(current) if item not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    return found


def storages_of_all(graph: Graph) -> dict[Node, set[Hashable]]:
    """The storages of every node, in time linear in the length of the graph."""
    known: dict[Node, set[Hashable]] = {}
    for node in graph.nodes:
        known[node] = storages(node, known)
    return known


def storage_of(tensor: Tensor) -> Hashable:
    """The identity of a tensor's storage."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors and some tensor subclasses have no storage
        return ("no storage", id(tensor))


def _traced_storages(node: Node) -> set[Hashable]:
    """The storages of the examples of a node, and of the real tensor that it names."""
    value = example(node)
    values = value if isinstance(value, (tuple, list)) else [value]
    found = {storage_of(item) for item in values if isinstance(item, Tensor)}
    if STORAGE in node.meta:
        found.add(node.meta[STORAGE])
    if node.op == "get_attr" and node.graph.owning_module is not None:
        named = getattr(node.graph.owning_module, str(node.target), None)
        if isinstance(named, Tensor):
            found.add(storage_of(named))
    return found


def _arguments_shared(node: Node) -> list[Node]:
    """The arguments whose memory the result of a call may share, judged by the call without its example."""
    target: Any = node.target
    if node.op != "call_function":
        return []
    if target is operator.getitem:
        base = node.args[0]
        return [base] if isinstance(base, Node) and not isinstance(example(base), Tensor) else []
    if isinstance(target, torch._ops.HigherOrderOperator):
        return node.all_input_nodes if _bodies_return_arguments(node) else []
    if not isinstance(target, torch._ops.OpOverload):
        return []
    if _may_return_any_argument(target):
        return node.all_input_nodes
    found = []
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and target._schema.returns:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            found += nodes_in(given)
    return found


@cache
def _may_return_any_argument(op: torch._ops.OpOverload) -> bool:
    """Whether an operator may return an argument or a view of one, although its schema does not declare it.

    `aten::dropout` in eval mode and `aten::einsum` with one operand do. Any composite operator may.
    """
    schema = op._schema
    if any(returned.alias_info is not None for returned in schema.returns) or schema.name in _FRESH_COMPOSITES:
        return False
    is_composite = torch._C.DispatchKey.CompositeImplicitAutograd in op.py_kernels or (
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    )
    return is_composite or schema.name in _ALIASING_OPERATORS


def _bodies_return_arguments(node: Node) -> bool:
    """Whether a body of a higher-order operator is unknown, or may return memory of its arguments."""
    bodies = bodies_of(node)
    return not bodies or any(body is None or _returns_arguments(body.graph) for body in bodies)


def _returns_arguments(graph: Graph) -> bool:
    memory = storages_of_all(graph)
    given = {storage for node in graph.find_nodes(op="placeholder") for storage in memory[node]}
    results = graph.output_node().all_input_nodes
    return any(node.op == "placeholder" or memory[node] & given for node in results)


def bodies_of(node: Node) -> list[GraphModule | None]:
    """The bodies of a higher-order operator; None for a body that is no graph module."""
    module = node.graph.owning_module
    named = [argument for argument in node.all_input_nodes if argument.op == "get_attr"]
    return [
        submodule(node.graph, argument)
        for argument in named
        if not isinstance(getattr(module, str(argument.target), None), Tensor)
    ]


def nodes_in(argument: Any) -> list[Node]:
    """The nodes in an argument, which may be a nested list."""
    if isinstance(argument, Node):
        return [argument]
    return [node for item in argument for node in nodes_in(item)] if isinstance(argument, (list, tuple)) else []
