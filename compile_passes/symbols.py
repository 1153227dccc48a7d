"""One table from the ways torch spells an operation to one symbol: functions, methods, operators and ATen overloads.

The recogniser sees only `Call`s, so that Dynamo's graphs and those of `torch.export` read alike, and a new spelling
of a known operation is one more entry here.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

import mglu_ops.ops  # noqa: F401 (registers torch.ops.mglu)

_mglu = torch.ops.mglu


def _aten(*names: str) -> tuple[Any, ...]:
    """ATen operators of these names (which torch 2.15 has in its graphs), and their overloads but those with `out`."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    overloads = [
        getattr(packet, overload) for packet in packets for overload in packet.overloads() if "out" not in overload
    ]
    return (*packets, *overloads)


def _elementwise(name: str, *more: Any) -> tuple[Any, ...]:
    """`torch.name`, the method and the ATen operator, all of one name, and more spellings."""
    return (getattr(torch, name), name, *_aten(name), *more)


# Symbol -> its spellings. A string is a method name; in-place forms are found by their trailing underscore.
_SPELLINGS: Mapping[str, tuple[Any, ...]] = {
    # Arithmetic
    "add": _elementwise("add", operator.add, operator.iadd, "__add__", "__radd__"),
    "sub": _elementwise("sub", operator.sub, operator.isub, torch.subtract, "subtract", "__sub__"),
    "rsub": (torch.rsub, "__rsub__", *_aten("rsub")),
    "mul": _elementwise("mul", operator.mul, operator.imul, torch.multiply, "multiply", "__mul__", "__rmul__"),
    "div": _elementwise("div", operator.truediv, operator.itruediv, torch.true_divide, "true_divide", "__truediv__"),
    "neg": _elementwise("neg", operator.neg, torch.negative, "negative"),
    "reciprocal": _elementwise("reciprocal"),
    "pow": _elementwise("pow", operator.pow),
    "square": _elementwise("square"),
    "exp": _elementwise("exp"),
    "erf": _elementwise("erf", torch.special.erf),
    "clamp": _elementwise("clamp", torch.clip, "clip"),
    "clamp_min": _elementwise("clamp_min"),
    "maximum": _elementwise("maximum", torch.ops.aten.max.other),
    "round": _elementwise("round"),
    "sign": _elementwise("sign", torch.sgn, "sgn", *_aten("sgn")),
    "heaviside": _elementwise("heaviside"),
    "remainder": _elementwise("remainder", operator.mod, "__mod__"),
    # Logic
    "not": (operator.invert, torch.bitwise_not, "bitwise_not", "__invert__", *_aten("bitwise_not")),
    "logical_not": _elementwise("logical_not"),
    "and": (operator.and_, torch.bitwise_and, "bitwise_and", "__and__", "__rand__", *_aten("bitwise_and", "__and__")),
    "gt": _elementwise("gt", operator.gt, torch.greater, "greater", "__gt__"),
    "ge": _elementwise("ge", operator.ge, torch.greater_equal, "greater_equal", "__ge__"),
    "lt": _elementwise("lt", operator.lt, torch.less, "less", "__lt__"),
    "le": _elementwise("le", operator.le, torch.less_equal, "less_equal", "__le__"),
    "eq": _elementwise("eq", operator.eq, "__eq__"),
    "ne": _elementwise("ne", operator.ne, torch.not_equal, "not_equal", "__ne__"),
    "where": _elementwise("where"),
    "masked_fill": _elementwise("masked_fill"),
    "index_put": _elementwise("index_put"),
    # The same values in another dtype, place or tensor
    "to": (
        "to",
        "type",
        "float",
        "half",
        "bfloat16",
        "double",
        "int",
        "long",
        "bool",
        "type_as",
        *_aten("to", "_to_copy"),
    ),
    "detach": _elementwise("detach"),
    "alias": (
        torch.clone,
        "contiguous",
        "clone",
        *_aten("clone", "alias", "contiguous", "lift_fresh_copy", "lift_fresh"),
    ),
    # Numbers
    "zeros": (
        *(torch.zeros_like, torch.zeros, "new_zeros", "zero_", torch.zero_),
        *_aten("zeros_like", "zeros", "new_zeros", "zero", "zero_"),
    ),
    "ones": (torch.ones_like, torch.ones, "new_ones", *_aten("ones_like", "ones", "new_ones")),
    "full": (torch.full, torch.full_like, "new_full", *_aten("full", "full_like", "new_full")),
    "empty": (torch.empty, torch.empty_like, "new_empty", *_aten("empty", "empty_like", "new_empty")),
    "tensor": (torch.tensor, torch.scalar_tensor, *_aten("scalar_tensor")),
    # Shape
    "getitem": (operator.getitem, "__getitem__"),
    "select": _elementwise("select"),
    "unbind": _elementwise("unbind"),
    "stack": (torch.stack, *_aten("stack")),
    "sum": _elementwise("sum"),
    "unsqueeze": _elementwise("unsqueeze"),
    "expand": ("expand", "repeat", torch.broadcast_to, "broadcast_to", *_aten("expand", "repeat", "broadcast_to")),
    "expand_as": ("expand_as", *_aten("expand_as")),
    "transpose": (
        *(torch.t, "t", torch.transpose, "transpose", torch.swapaxes, "swapaxes"),
        *_aten("t", "numpy_T", "mT", "transpose"),
    ),
    "permute": _elementwise("permute"),
    "getattr": (getattr,),
    "size": ("size", "dim", *_aten("sym_size")),
    "assert_metadata": _aten("_assert_tensor_metadata"),
    # Layers
    "linear": (F.linear, *_aten("linear")),
    "matmul": (
        *(operator.matmul, torch.matmul, torch.mm, torch.bmm, "matmul", "mm", "bmm", "__matmul__"),
        *_aten("matmul", "mm", "bmm"),
    ),
    "addmm": _elementwise("addmm"),
    "einsum": (torch.einsum, *_aten("einsum")),
    "silu": (F.silu, *_aten("silu")),
    "gelu": (F.gelu, *_aten("gelu")),
    "relu": _elementwise("relu", F.relu),
    "sigmoid": _elementwise("sigmoid", F.sigmoid, torch.special.expit),
    "tanh": _elementwise("tanh", F.tanh),
    "other_activation": (
        *(F.mish, F.elu, F.selu, F.celu, F.leaky_relu, F.hardswish, F.hardsigmoid, F.hardtanh, F.relu6, F.softplus),
        *_aten("mish", "elu", "selu", "celu", "leaky_relu", "hardswish", "hardsigmoid", "hardtanh", "softplus"),
    ),
    "unpack_masks": (_mglu.unpack_masks, _mglu.unpack_masks.default),
    "dropout": (F.dropout, torch.dropout, *_aten("dropout")),
}

SYMBOLS: Mapping[Any, str] = MappingProxyType(
    {spelling: symbol for symbol, spellings in _SPELLINGS.items() for spelling in spellings}
)

READS_NO_VALUES = frozenset({"zeros", "ones", "full", "empty", "size", "assert_metadata"})
"""Symbols of calls that look at the shape, dtype or device of their arguments only."""


@dataclass(frozen=True)
class Call:
    """A node read through the table."""

    symbol: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at `position`, or called `name`, or `default`."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


def as_call(node: Node) -> Call | None:
    """`node` as a `Call`; None where the table does not have its target."""
    target: Any = node.target
    if node.op == "call_module":
        return _call_of_module(node)
    if not node.op.startswith("call_") or not isinstance(target, Hashable):
        return None
    symbol = SYMBOLS.get(target) or SYMBOLS.get(_out_of_place(target))
    return None if symbol is None else Call(symbol, node.args, node.kwargs)


_MODULES: Mapping[type[nn.Module], str] = MappingProxyType(
    {
        nn.SiLU: "silu",
        nn.GELU: "gelu",
        nn.ReLU: "relu",
        nn.Sigmoid: "sigmoid",
        nn.Tanh: "tanh",
        nn.Identity: "alias",
        nn.Dropout: "dropout",
    }
)
"""Modules that `torch.fx.symbolic_trace` leaves whole."""


def _call_of_module(node: Node) -> Call | None:
    root = node.graph.owning_module
    module = None if root is None else root.get_submodule(str(node.target))
    symbol = _MODULES.get(type(module))  # type: ignore[arg-type] # None is in no table
    if symbol is None or getattr(module, "inplace", False):
        return None
    options = {name: getattr(module, name) for name in ("approximate", "training") if hasattr(module, name)}
    return Call(symbol, node.args, {**node.kwargs, **options})


def _out_of_place(target: Any) -> Any:
    """The spelling without the trailing underscore of one that works in place."""
    if isinstance(target, str):
        return target[:-1] if is_inplace_name(target) else target
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.split("::")[1]
        packet = getattr(torch.ops.aten, name[:-1], None) if is_inplace_name(name) else None
        return getattr(packet, target._overloadname, target)
    name = getattr(target, "__name__", "")
    return getattr(torch, name[:-1], target) if is_inplace_name(name) else target


def is_inplace_name(name: str) -> bool:
    """`relu_`, but not `__add__` or `relu`."""
    return name.endswith("_") and not name.endswith("__")


def example(node: Any) -> Any:
    """The (fake) value that tracing saw at a node: Dynamo's `example_value`, or export's `val`."""
    if not isinstance(node, Node):
        return node
    return node.meta["example_value"] if "example_value" in node.meta else node.meta.get("val")


def tensor_example(node: Any) -> torch.Tensor | None:
    """`example(node)` if it is a tensor."""
    value = example(node)
    return value if isinstance(value, torch.Tensor) else None


def equal_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are known to agree, without a guard on a symbolic size."""
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def same_shape(*nodes: Any) -> bool:
    """Whether nodes are tensors of one shape."""
    examples = [tensor_example(node) for node in nodes]
    first = examples[0]
    return first is not None and all(item is not None and equal_sizes(item.shape, first.shape) for item in examples)


def dims(argument: Any) -> int:
    """How many dimensions the value of a node has; -1 for what is no tensor."""
    value = tensor_example(argument) if isinstance(argument, Node) else None
    return -1 if value is None else value.dim()


def is_matrix(argument: Any) -> bool:
    """Whether an argument is a node whose value has two dimensions."""
    return dims(argument) == 2


def dimension(argument: Any, of: Any) -> int | None:
    """A `dim` argument counted from the front, of a node's value; None if it is no single dimension of it."""
    (single,) = argument if isinstance(argument, (list, tuple)) and len(argument) == 1 else (argument,)
    count = dims(of)
    if isinstance(single, bool) or not isinstance(single, int) or not -count <= single < count:
        return None
    return single % count


def requires_grad(argument: Any) -> bool:
    """Whether tracing saw a gradient being recorded at a node."""
    value = tensor_example(argument)
    return value is not None and value.requires_grad


def slice_of(node: Node) -> tuple[Node, int, int] | None:
    """`(tensor, dim, index)` where `node` is one slice of a tensor along a dimension, by whatever spelling."""
    call = as_call(node)
    base = None if call is None else call.get(0, "input")
    if call is None or not isinstance(base, Node):
        return None
    dim: Any = 0
    if call.symbol == "select":
        dim, index = call.get(1, "dim"), call.get(2, "index")
    elif call.symbol == "getitem":
        index, inner = call.get(1, "index"), as_call(base)
        if inner is not None and inner.symbol == "unbind":
            base, dim = inner.get(0, "input"), inner.get(1, "dim", 0)
        elif isinstance(index, tuple) and Ellipsis not in index and None not in index:
            (dim, index), *more = [(i, item) for i, item in enumerate(index) if item != slice(None)] or [(0, None)]
            if more:
                return None
    else:
        return None
    dim = dimension(dim, base)
    value = tensor_example(base)
    if dim is None or value is None or isinstance(index, bool) or not isinstance(index, int):
        return None
    index = index if index >= 0 else index + value.shape[dim]
    return (base, dim, index) if isinstance(index, int) else None


def column_of(node: Node) -> tuple[Node, int] | None:
    """`(tensor, i)` where `node` is `tensor[..., i : i + 1]`, by whatever spelling."""
    call = as_call(node)
    base = None if call is None else call.get(0, "input")
    if call is None or not isinstance(base, Node):
        return None
    if call.symbol == "unsqueeze" and dimension(call.get(1, "dim"), node) == dims(node) - 1:
        found = slice_of(base)
        return None if found is None or found[1] != dims(found[0]) - 1 else (found[0], found[2])
    if call.symbol != "getitem" or not isinstance(call.args[1], tuple):
        return None
    *rest, last = call.args[1]
    if last is None and rest and isinstance(rest[-1], int):  # [..., i, None]
        *rest, index = rest
        last = slice(index, index + 1)
    if not isinstance(last, slice):
        return None
    whole = all(item is Ellipsis or item == slice(None) for item in rest)
    reaches_last = Ellipsis in rest or len(rest) + 1 == dims(base)
    start, stop, step = last.start, last.stop, last.step
    is_one = isinstance(start, int) and start >= 0 and stop == start + 1 and step in (None, 1)
    return (base, start) if whole and reaches_last and is_one else None


def repeated(node: Any) -> tuple[Any, int | None]:
    """`(tensor, dim)` where `node` is the tensor with one more dimension, along which it is the same; or
    `(node, None)`.
    """
    call = as_call(node) if isinstance(node, Node) else None
    base = None if call is None else call.get(0, "input")
    if call is None or not isinstance(base, Node):
        return node, None
    dim: int | None = None
    if call.symbol == "unsqueeze":
        dim = dimension(call.get(1, "dim"), node)
    elif call.symbol == "getitem" and isinstance(call.args[1], tuple) and call.args[1].count(None) == 1:
        rest = [item for item in call.args[1] if item is not None]
        if all(item == slice(None) for item in rest):
            dim = call.args[1].index(None)
    elif call.symbol == "getitem" and call.args[1] is None:
        dim = 0
    elif call.symbol in ("expand", "expand_as"):
        base, dim = repeated(base) if dims(base) == dims(node) else (base, 0)
    if dim is None or not _is_repetition(base, node, dim):
        return node, None
    return base, dim


def _is_repetition(base: Any, node: Node, dim: int) -> bool:
    """Whether the shapes are those of a tensor and of its repetition along `dim`."""
    one, many = tensor_example(base), tensor_example(node)
    if one is None or many is None or many.dim() != one.dim() + 1:
        return False
    return equal_sizes(one.shape, (*many.shape[:dim], *many.shape[dim + 1 :]))


def submodule(graph: Graph, node: Any) -> GraphModule | None:
    """The graph module that a node of a graph calls, or names as the body of a higher-order operator."""
    if graph.owning_module is None or not isinstance(node, Node) or node.op not in ("get_attr", "call_module"):
        return None
    module = getattr(graph.owning_module, str(node.target), None)
    return module if isinstance(module, GraphModule) else None
