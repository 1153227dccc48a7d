"""Which nodes write in place, to what, and which tensors live in the same memory."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node

from .symbols import example, is_inplace_name

_INPLACE_OPERATORS = (
    operator.iadd,
    operator.iand,
    operator.iconcat,
    operator.ifloordiv,
    operator.ilshift,
    operator.imatmul,
    operator.imod,
    operator.imul,
    operator.ior,
    operator.ipow,
    operator.irshift,
    operator.isub,
    operator.itruediv,
    operator.ixor,
)
_INPLACE_METHODS = frozenset({"__setitem__", *(f"__{function.__name__}__" for function in _INPLACE_OPERATORS)})

# Functions that write to other arguments than their first, by position.
_WRITTEN_ARGUMENTS: Mapping[str, tuple[int, ...]] = {
    "setitem": (0,),
    "setattr": (0,),
    "batch_norm": (1, 2),
    "instance_norm": (1, 2),
    "embedding": (1,),
    "embedding_bag": (1,),
}
_HARMLESS_MODULES = ("torch", "_operator", "builtins", "math", "operator")


def storages(node: Node) -> set[Hashable]:
    """The identities of the storages that a node's value lives in."""
    value = example(node)
    values = value if isinstance(value, (tuple, list)) else [value]
    return {_storage(item) for item in values if isinstance(item, torch.Tensor)}


def _storage(tensor: torch.Tensor) -> Hashable:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have none
        return ("no storage", id(tensor))


def mutated_storages(graph: Graph) -> set[Hashable] | None:
    """The storages that the nodes of a graph write to; None if one writes to something unknown."""
    targets = {target for node in graph.nodes for target in written(node)}
    if any(example(target) is None and target.op != "get_attr" for target in targets):
        return None  # (the body of a higher-order operator is a get_attr)
    return {storage for target in targets for storage in storages(target)}


def written(node: Node) -> list[Node]:
    """The inputs that a node may write to. What is not known to be harmless counts as writing to all."""
    target: Any = node.target
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    outs = _nodes_in(node.kwargs.get("out"))
    if node.op == "call_method":
        return outs + (_first(node) if is_inplace_name(target) or target in _INPLACE_METHODS else [])
    if node.op == "call_module" or isinstance(target, torch._ops.HigherOrderOperator):
        return node.all_input_nodes
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return node.all_input_nodes if _schema_writes(target) else []
    name, module = getattr(target, "__name__", ""), getattr(target, "__module__", None) or "torch"
    if module.split(".")[0] not in _HARMLESS_MODULES:
        return node.all_input_nodes
    if name in _WRITTEN_ARGUMENTS:
        positions = _WRITTEN_ARGUMENTS[name]
        by_position = max(positions) < len(node.args)
        return _nodes_in([node.args[i] for i in positions]) if by_position else node.all_input_nodes
    is_inplace = is_inplace_name(name) and module != "_operator"  # which has `and_`
    if is_inplace or any(target is candidate for candidate in _INPLACE_OPERATORS) or _asks_for_inplace(node):
        return outs + _first(node)
    return outs


def _first(node: Node) -> list[Node]:
    """What an in-place node writes to: its first tensor, or for the functions of lists all of them."""
    if node.args and isinstance(node.args[0], Node):
        return [node.args[0]]
    return node.all_input_nodes


def _nodes_in(argument: Any) -> list[Node]:
    if isinstance(argument, Node):
        return [argument]
    return [node for item in argument for node in _nodes_in(item)] if isinstance(argument, (list, tuple)) else []


def _asks_for_inplace(node: Node) -> bool:
    """`F.relu(x, inplace=True)`, also by position."""
    if node.kwargs.get("inplace"):
        return True
    return any(argument is True for argument in node.args) and _has_inplace(node.target)


@cache
def _has_inplace(function: Any) -> bool:
    try:
        return "inplace" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _schema_writes(op: torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> bool:
    overloads = [op] if isinstance(op, torch._ops.OpOverload) else [getattr(op, name) for name in op.overloads()]
    return any(overload._schema.is_mutable for overload in overloads)
