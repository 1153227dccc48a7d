"""In-place writes: which nodes of a graph write to which tensors, and which calls give the same result each time."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Hashable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch.fx import Graph, Node

from .memory import bodies_of, nodes_in, storages, storages_of_all
from .shapes import example, same_shape, submodule
from .symbols import as_call, is_inplace_name

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

# Functions of torch that write to the arguments at these positions, although their names do not say so.
_WRITTEN_ARGUMENTS: Mapping[str, tuple[int, ...]] = {
    "setitem": (0,),
    "setattr": (0,),
    "batch_norm": (1, 2),
    "instance_norm": (1, 2),
    "embedding": (1,),
    "embedding_bag": (1,),
}
_ENTERS = ("_enter_autocast", "_enter_inference_mode")
_EXITS = ("_exit_autocast", "_exit_inference_mode")
_FUNCTORCH_MARKS = ("_increment_nesting", "_jvp_", "_enter_dual_level")
_HARMLESS_MODULES = ("torch", "_operator", "builtins", "math", "operator")
_GUARDS_OF_EXPORT = "_guards_fn"  # a module that `ExportedProgram.module()` calls to check the sizes of its inputs


class Effects:
    """The writes of a graph, the order of its nodes, and the modes under which they run."""

    def __init__(self, graph: Graph) -> None:
        self.order = {node: position for position, node in enumerate(graph.nodes)}
        self.writes = [(node, targets) for node in graph.nodes if (targets := written(node))]
        names = {n: getattr(n.target, "__name__", "") for n in graph.nodes if n.op == "call_function"}
        self.modes = _modes(names, graph)
        self.under_functorch = any(mark in name for name in set(names.values()) for mark in _FUNCTORCH_MARKS)
        self._storages = storages_of_all(graph) if self.writes else {}
        self._written = self._written_storages()

    def _written_storages(self) -> set[Hashable] | None:
        targets = {target for _, targets in self.writes for target in targets}
        if any(example(target) is None and target.op != "get_attr" for target in targets):
            return None  # unknown; (the body of a higher-order operator is a get_attr and has no example)
        return {storage for target in targets for storage in self._storages[target]}

    @property
    def writes_nothing(self) -> bool:
        return not self.writes

    def is_written(self, node: Node) -> bool:
        """Whether the graph writes to the storage of a node's result, or to an unknown one."""
        if not self.writes:
            return False
        return self._written is None or bool(storages(node, self._storages) & self._written)


def _modes(names: Mapping[Node, str], graph: Graph) -> dict[Node, tuple[Any, tuple[str, ...]]]:
    """The grad mode of each node, and the blocks of autocast and inference mode that contain it."""
    grad: Any = torch.is_grad_enabled()
    blocks: tuple[str, ...] = ()
    modes: dict[Node, tuple[Any, tuple[str, ...]]] = {}
    for node in graph.nodes:
        name = names.get(node, "")
        if name == "_set_grad_enabled":
            grad = node.args[0]
        elif name in _ENTERS:
            blocks = (*blocks, node.name)
        elif name in _EXITS:
            blocks = blocks[:-1]
        modes[node] = (grad, blocks)
    return modes


def normalise_writes(graph: Graph) -> Callable[[], None]:
    """Let each reader of a copy read the result of the last in-place write before it, which is the same tensor.

    `w = W.clone(); w.mul_(M); F.linear(x, w)` becomes `w = W.clone().mul_(M); F.linear(x, w)`, and `w[~M] = 0` becomes
    a `masked_fill_`.

    Returns:
        A function that restores the graph.
    """
    undo: list[Callable[[], None]] = []
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        call = as_call(node)
        if call is None or call.symbol != "alias" or len(node.users) < 2:
            continue
        current = node
        for user in sorted(node.users, key=order.__getitem__):
            if _as_fill(user, node):
                undo.append(_changed(user, "call_method", "masked_fill_", (current, *user.args[1:]), {}))
                user.meta = {**user.meta, "example_value": example(node)}
            elif current is not node:
                args, kwargs = torch.fx.map_arg((user.args, user.kwargs), partial(_replaced, node, current))
                undo.append(_changed(user, user.op, user.target, args, kwargs))
            if user.args and user.args[0] is current and _returns_self(user):
                current = user

    def restore() -> None:
        for step in reversed(undo):
            step()

    return restore


def _replaced(old: Node, new: Node, node: Node) -> Node:
    return new if node is old else node


def _changed(node: Node, op: str, target: Any, args: Any, kwargs: Any) -> Callable[[], None]:
    """Change the call of a node; returns a function that restores it."""
    before, meta = (node.op, node.target, node.args, node.kwargs), dict(node.meta)
    node.op, node.target, node.args, node.kwargs = op, target, args, kwargs

    def restore() -> None:
        node.op, node.target, node.args, node.kwargs = before
        node.meta = meta

    return restore


def _as_fill(user: Node, copy: Node) -> bool:
    """Whether a user of a copy is `copy[mask] = number`."""
    if user.op != "call_function" or user.target is not operator.setitem or user.args[0] is not copy:
        return False
    _, mask, number = user.args
    condition = example(mask)
    is_mask = isinstance(condition, torch.Tensor) and condition.dtype is torch.bool
    return is_mask and same_shape(mask, copy) and isinstance(number, (int, float))


def _returns_self(node: Node) -> bool:
    """Whether a node writes to its first argument in place and returns it."""
    if node.op == "call_method":
        return is_inplace_name(str(node.target))
    return any(node.target is candidate for candidate in _INPLACE_OPERATORS)


def written(node: Node) -> list[Node]:
    """The inputs that a node may write to; a function that is not known to be harmless may write to all of them."""
    target: Any = node.target
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    outs = nodes_in(node.kwargs.get("out"))
    if node.op == "call_method":
        return outs + (_first(node) if is_inplace_name(target) or target in _INPLACE_METHODS else [])
    if node.op == "call_module":
        body = submodule(node.graph, node)
        is_known = as_call(node) is not None or (body is not None and Effects(body.graph).writes_nothing)
        return [] if is_known or target == _GUARDS_OF_EXPORT else node.all_input_nodes
    if isinstance(target, torch._ops.HigherOrderOperator):
        return [] if _bodies_write_nothing(node) else node.all_input_nodes
    if isinstance(target, torch._ops.OpOverload):
        return _written_by_schema(node, target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads() if "out" not in name]
        return node.all_input_nodes if any(overload._schema.is_mutable for overload in overloads) else outs
    name, module = getattr(target, "__name__", ""), getattr(target, "__module__", None) or "torch"
    if module.split(".")[0] not in _HARMLESS_MODULES:
        return node.all_input_nodes
    if name in _WRITTEN_ARGUMENTS:
        positions = _WRITTEN_ARGUMENTS[name]
        by_position = max(positions) < len(node.args)
        return nodes_in([node.args[i] for i in positions]) if by_position else node.all_input_nodes
    is_inplace = is_inplace_name(name) and module != "_operator"  # `operator.and_` is not in place
    if is_inplace or any(target is candidate for candidate in _INPLACE_OPERATORS) or _asks_for_inplace(node):
        return outs + _first(node)
    return outs


def _first(node: Node) -> list[Node]:
    """The tensors that an in-place node writes to: its first argument, or all of them if that is a list."""
    if node.args and isinstance(node.args[0], Node):
        return [node.args[0]]
    return node.all_input_nodes


def _asks_for_inplace(node: Node) -> bool:
    """Whether a call has `inplace=True`, by keyword or by position."""
    if node.kwargs.get("inplace"):
        return True
    return any(argument is True for argument in node.args) and _has_inplace(node.target)


@cache
def _has_inplace(function: Any) -> bool:
    try:
        return "inplace" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _written_by_schema(node: Node, op: torch._ops.OpOverload) -> list[Node]:
    """The arguments that an ATen operator writes to, by its schema."""
    found: list[Node] = []
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            found += nodes_in(given)
    return found + [statistic for statistic in _statistics_written(node, op) if statistic not in found]


_STATISTICS = ("running_mean", "running_var")
_KEEP_STATISTICS = ("backward", "functional", "no_update", "no_training")


def _statistics_written(node: Node, op: torch._ops.OpOverload) -> list[Node]:
    """The running statistics that a norm updates in training; most schemas do not declare this write."""
    if not any(argument.name in _STATISTICS for argument in op._schema.arguments):
        return []
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    trains = [given[name] for name in ("training", "train", "use_input_stats") if name in given]
    if any(word in op._schema.name for word in _KEEP_STATISTICS) or trains == [False]:
        return []
    return [node for name in _STATISTICS for node in nodes_in(given.get(name))]


def _bodies_write_nothing(node: Node) -> bool:
    """Whether all bodies of a higher-order operator are known and none of them writes in place."""
    bodies = bodies_of(node)
    return bool(bodies) and all(body is not None and Effects(body.graph).writes_nothing for body in bodies)


# --- Calls that return the same each time ----------------------------------------------------------------------------

_UNREPEATABLE = frozenset(
    {
        *("alpha_dropout", "bernoulli", "binomial", "cauchy", "dropout", "dropout1d", "dropout2d", "dropout3d"),
        *(
            "exponential",
            "feature_alpha_dropout",
            "feature_dropout",
            "geometric",
            "gumbel_softmax",
            "gru",
            "log_normal",
        ),
        *("fractional_max_pool2d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d", "lstm"),
        *("fractional_max_pool3d_with_indices", "multi_head_attention_forward", "multinomial", "native_dropout"),
        *("normal", "normal_functional", "poisson", "rand", "rand_like", "randint", "randint_like", "randn"),
        *("randn_like", "random", "randperm", "rnn_relu", "rnn_tanh", "rrelu", "rrelu_with_noise"),
        *("rrelu_with_noise_functional", "scaled_dot_product_attention", "uniform"),
        *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
        *("initial_seed", "manual_seed", "seed"),
    }
)
"""Names of functions of torch that draw random numbers or return uninitialised memory."""


def is_random(node: Node) -> bool:
    """Whether a node calls a function of torch that may return something else each time."""
    target: Any = node.target
    if "generator" in node.kwargs:
        return True
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags or target._schema.name.startswith("aten::empty")
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.rstrip("_") in _UNREPEATABLE


def is_repeatable(node: Node) -> bool:
    """Whether a node calls a function of torch that returns the same for the same arguments."""
    target: Any = node.target
    if node.op not in ("call_function", "call_method") or is_random(node):
        return False
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target).startswith("aten.")
    if isinstance(target, torch._ops.HigherOrderOperator):
        return False
    module = getattr(target, "__module__", None) or "torch"
    return node.op == "call_method" or module.split(".")[0] in _HARMLESS_MODULES
