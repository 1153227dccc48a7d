"""The side effects of a call: the arguments it writes to, the arguments its results alias, and its random numbers.

This module has no list of functions. It runs each call once on fake tensors. The call dispatches to operators, and
their schemas and tags tell which arguments the call writes to, and if it draws random numbers. The storages of the
results tell which arguments share memory with the results. If a call cannot be run, the schemas of its overloads tell
its effects. A call without schemas is unknown: the pass assumes that the call writes to all of its arguments, returns
them, and draws random numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.jit._builtins import _find_builtin
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from .shapes import example, submodule
from .symbols import is_as_its_class, is_inplace_name

_TORCH = ("torch", "_operator", "math")  # modules whose functions only call operators, with the exceptions below

_OUTSIDE_OF_OPERATORS = ("torch._dynamo", "torch.autograd", "torch.utils")
"""Parts of torch whose functions do more than call operators. For example, helpers of Dynamo register hooks."""

_GUARDS_OF_EXPORT = "_guards_fn"  # name of the submodule of `ExportedProgram.module()` that checks the sizes of inputs


@dataclass(frozen=True)
class Effect:
    """The side effects of a call. Arguments are given by their positions in `node.all_input_nodes`."""

    writes: frozenset[int] = frozenset()  # the arguments that the call writes to
    shares: frozenset[int] = frozenset()  # the arguments that may share memory with the results
    draws: bool = False  # True if results of equal calls may differ: random numbers, or uninitialised memory
    changes_metadata: bool = False  # True if the call changes the shape or `requires_grad` of argument 0, as `t_` does
    returns_target: bool = False  # True if the call returns argument 0 and changes only the values in it
    multiplies: bool = False  # True if the call multiplies matrices
    is_known: bool = True  # False for a call that may do anything


NONE = Effect()


def _unknown(node: Node) -> Effect:
    everything = frozenset(range(len(node.all_input_nodes)))
    return Effect(everything, everything, draws=True, is_known=False)


class Watcher:
    """Finds the side effects of the calls of a graph. Calls with equal keys (`call_key`) are run once.

    The calls run in a separate fake mode, in which each symbolic size is replaced by the number that it had during
    tracing. So the calls add no guards on symbolic sizes.

    Args:
        of_bodies: finds the side effects of a call that runs other graphs, such as the body of a `checkpoint`.
    """

    def __init__(self, of_bodies: Callable[[Node, Sequence[GraphModule]], Effect]) -> None:
        self._of_bodies = of_bodies
        self._known: dict[Hashable, Effect] = {}
        self._mode = FakeTensorMode()

    def effect(self, node: Node) -> Effect:
        """The side effects of a node."""
        target: Any = node.target
        if node.op in ("placeholder", "get_attr", "output"):
            return NONE
        if isinstance(target, torch._ops.HigherOrderOperator):
            bodies = bodies_of(node)
            known = [body for body in bodies if body is not None]
            # If nothing reads the results, the operator is called for side effects that the bodies may not show.
            is_known = bool(node.users and bodies) and len(known) == len(bodies)
            return self._of_bodies(node, known) if is_known else _unknown(node)
        if node.op == "call_module":
            body = submodule(node.graph, node)
            if body is not None:
                return NONE if target == _GUARDS_OF_EXPORT else self._of_bodies(node, [body])
        elif not _is_of_torch(node):
            return _unknown(node)
        elif "functorch" in _module(target):  # the call wraps or unwraps tensors for `vmap` and `grad`
            return Effect(shares=frozenset(range(len(node.all_input_nodes))))
        elif not node.all_input_nodes and not isinstance(example(node), Tensor):
            return NONE  # the call switches a mode, such as the grad mode
        indexes = target in (operator.getitem, operator.setitem) and isinstance(example(node.args[0]), Tensor)
        key = (call_key(node, any_number=indexes), *(_kind(example(item)) for item in node.all_input_nodes))
        if key not in self._known:
            self._known[key] = _watched(node, self._mode) or _by_schema(node)
        return self._known[key]


def _watched(node: Node, mode: FakeTensorMode) -> Effect | None:
    """The effect of a call, found by running it on fake tensors; None if that fails."""
    inputs, watch = node.all_input_nodes, _Watch()
    given = [example(item) for item in inputs]
    if any(value is None for value in given):  # tracing recorded no value
        return None
    try:
        with mode, torch.no_grad():
            # On an empty tensor an operator may skip its work, and then the run would not show its side effects.
            copies = {item: tree_map(partial(fake_copy, mode, smallest=1), example(item)) for item in inputs}
            call = as_function(node)
            args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
            with watch:
                result = call(*args, **kwargs)
    except Exception:  # the call may raise any error, and sizes may be unknown
        return None
    memory = {i: {storage_of(t) for t in tensors_in(copies[item])} for i, item in enumerate(inputs)}
    returned = {storage_of(t) for t in tensors_in(result)}
    writes = {i for i, held in memory.items() if held & watch.written}
    changes_metadata = bool(inputs) and any(tensor is copies[inputs[0]] for tensor in watch.reshaped)
    if inputs and is_inplace_name(_name(node)) and _module(node.target) != "_operator":
        changes_metadata |= 0 not in writes  # `detach_` and `requires_grad_` change autograd's state, not values
        writes.add(0)
    shares = frozenset(i for i, held in memory.items() if held & returned)
    returns_target = bool(args) and result is args[0] and 0 in writes and not changes_metadata
    multiplies = watch.multiplies or "dot" in _name(node)  # `vecdot` dispatches to a product and a sum
    return Effect(frozenset(writes), shares, watch.draws, changes_metadata, returns_target, multiplies)


def fake_copy(mode: FakeTensorMode, value: Any, smallest: int = 0) -> Any:
    """A fake tensor like `value`, with no size below `smallest`; for a symbolic number, its value during tracing."""
    if isinstance(value, Tensor):
        shape, stride = [max(_number(n), smallest) for n in value.shape], [_number(n) for n in value.stride()]
        with _disable_current_modes():
            meta = torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
            return FakeTensor(mode, meta, value.device)
    return _number(value) if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def _number(value: Any) -> Any:
    """A number; for a symbolic number, its value during tracing. Sizes that depend on data (unbacked) become 5.

    A condition on such sizes becomes True, because it may be the condition of an assertion.
    """
    if isinstance(value, (int, float)):
        return value
    if value.node.hint is not None:
        return value.node.hint
    if value.node.pytype is bool:
        return True
    env = value.node.shape_env
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    return value.node.pytype(value.node.expr.xreplace({s: known.get(s, 5) for s in value.node.expr.free_symbols}))


def as_function(node: Node) -> Callable[..., Any]:
    """The function that a node calls. A module of torch runs with uninitialised tensors as parameters and buffers."""
    if node.op == "call_method":
        return lambda tensor, *args, **kwargs: getattr(tensor, str(node.target))(*args, **kwargs)
    if node.op == "call_function":
        assert callable(node.target)
        return node.target
    assert node.graph.owning_module is not None
    module = node.graph.owning_module.get_submodule(str(node.target))
    if not type(module).__module__.startswith("torch.nn") or not is_as_its_class(module):
        raise ValueError("a module of another library may do anything, and so may hooks")
    tensors = (*module.named_parameters(), *module.named_buffers())
    state = {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for name, t in tensors}
    return lambda *args, **kwargs: torch.func.functional_call(module, state, args, kwargs)


class _Watch(TorchDispatchMode):
    """Records what the dispatched operators write to, and if they draw random numbers or multiply matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[Hashable] = set()
        self.draws = False
        self.multiplies = False
        self.reshaped: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, known = kwargs or {}, _operator(func)
        if known.may_write:
            given = {**dict(zip(known.names, args, strict=False)), **kwargs}
            written = [given.get(name) for name in known.written]
            # Most normalisation layers write running statistics, but their schemas do not declare it.
            if given.get("training", given.get("train")) is True:
                written += [given.get("running_mean"), given.get("running_var")]
            self.written.update(storage_of(tensor) for tensor in tensors_in(written))
        self.draws |= known.draws
        self.multiplies |= known.multiplies
        self.reshaped += args[:1] if known.reshapes else ()
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _Operator:
    """What the schema and the tags of an operator say."""

    names: tuple[str, ...]  # the arguments
    written: tuple[str, ...]  # the arguments that the operator writes to
    draws: bool
    multiplies: bool
    reshapes: bool  # True if the operator changes the shape of its first argument

    @property
    def may_write(self) -> bool:
        return bool(self.written) or not {"training", "train"}.isdisjoint(self.names)


@lru_cache(maxsize=4096)
def _operator(op: torch._ops.OpOverload) -> _Operator:
    arguments = op._schema.arguments
    return _Operator(
        names=tuple(a.name for a in arguments),
        written=tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        draws=_draws(op),
        multiplies=_multiplies(op),
        reshapes=torch.Tag.inplace_view in op.tags,
    )


def _draws(op: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags or "empty" in op._schema.name


def _multiplies(op: torch._ops.OpOverload) -> bool:
    return op.overloadpacket in flop_registry or op._schema.name.endswith(("mm", "mv", "dot"))


def _is_of_torch(node: Node) -> bool:
    """True if a node calls a function of torch or of Python that only calls operators."""
    module = _module(node.target) or "torch"  # the target of a method call is a name, which has no module
    is_of_torch = module.split(".")[0] in _TORCH and not module.startswith(_OUTSIDE_OF_OPERATORS)
    return is_of_torch or node.target is getattr


def _module(target: Any) -> str:
    return getattr(target, "__module__", None) or ""


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


# --- Keys of calls ---------------------------------------------------------------------------------------------------


def call_key(node: Node, *, any_number: bool = False) -> Hashable:
    """A key that is equal for calls of one function with equal arguments. Each input node is replaced by its position.

    With `any_number` all integers count as equal, because the side effects of `x[i] = y` do not depend on i.
    """
    positions = {item: position for position, item in enumerate(node.all_input_nodes)}

    def frozen(argument: Any) -> Hashable:
        if isinstance(argument, Node):
            return ("input", positions[argument])
        if isinstance(argument, (list, tuple)):
            return (type(argument).__name__, *map(frozen, argument))
        if isinstance(argument, dict):
            return tuple((name, frozen(item)) for name, item in argument.items())
        if any_number and type(argument) is int:
            return int
        return (type(argument).__name__, repr(argument))

    return (node.op, node.target, frozen(node.args), frozen(node.kwargs))


def _kind(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout is torch.strided and not value.is_nested else (value.layout,)
        shape = tuple(n if type(n) is int else str(n) for n in (*value.shape, *strides))
        return (type(value), value.dtype, value.device, shape)
    return tuple(map(_kind, value)) if isinstance(value, (tuple, list)) else (type(value).__name__, str(value))


# --- Calls that cannot be run ----------------------------------------------------------------------------------------


def _by_schema(node: Node) -> Effect:
    """The effect of a call, from the schemas of all overloads that it may reach."""
    overloads = _overloads(node)
    if not overloads:
        return _unknown(node)
    everything = frozenset(range(len(node.all_input_nodes)))
    writes = "out" in node.kwargs or any(op._schema.is_mutable for op in overloads)
    draws, multiplies = any(map(_draws, overloads)), any(map(_multiplies, overloads))
    changes_metadata = any(torch.Tag.inplace_view in op.tags for op in overloads)
    return Effect(everything if writes else frozenset(), everything, draws, changes_metadata, multiplies=multiplies)


def _overloads(node: Node) -> Sequence[torch._ops.OpOverload]:
    target: Any = node.target
    if node.op == "call_module":
        return []
    if isinstance(target, torch._ops.OpOverload):
        return [target]
    if not isinstance(target, torch._ops.OpOverloadPacket):
        name = target if isinstance(target, str) else (_find_builtin(target) or target.__name__).removeprefix("aten::")
        target = getattr(torch.ops.aten, name, None)
    if not isinstance(target, torch._ops.OpOverloadPacket):  # None, or a Python method such as `__eq__`
        return []
    return [getattr(target, name) for name in target.overloads() if "out" not in name]


# --- Higher-order operators ------------------------------------------------------------------------------------------


def bodies_of(node: Node) -> list[GraphModule | None]:
    """The bodies of a higher-order operator; None for a body that is not a graph module."""
    module = node.graph.owning_module
    named = [argument for argument in node.all_input_nodes if argument.op == "get_attr"]
    return [
        submodule(node.graph, argument)
        for argument in named
        if not isinstance(getattr(module, str(argument.target), None), Tensor)
    ]


def calls_of_bodies(graph: Graph) -> dict[GraphModule, list[Node]]:
    """The bodies of the higher-order operators in a graph, with the calls of each body."""
    found: dict[GraphModule, list[Node]] = {}
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            for body in filter(None, bodies_of(node)):
                found.setdefault(body, []).append(node)
    return found


# --- Tensors ---------------------------------------------------------------------------------------------------------


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, which may be nested tuples or lists."""
    return (item for item in tree_leaves(value) if isinstance(item, Tensor))


def storage_of(tensor: Tensor) -> Hashable:
    """The identity of a tensor's storage."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors and some tensor subclasses have no storage
        return ("no storage", id(tensor))
