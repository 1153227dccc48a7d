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
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

import mglu_ops.ops  # noqa: F401 (registers torch.ops.mglu)

_aten = torch.ops.aten
_mglu = torch.ops.mglu

# Symbol -> its spellings. A string is a method name; in-place forms are found by their trailing underscore.
_SPELLINGS: Mapping[str, tuple[Any, ...]] = {
    "add": (operator.add, operator.iadd, torch.add, "add", "__add__", "__radd__", _aten.add.Tensor, _aten.add.Scalar),
    "sub": (
        operator.sub,
        operator.isub,
        torch.sub,
        torch.subtract,
        "sub",
        "subtract",
        _aten.sub.Tensor,
        _aten.sub.Scalar,
    ),
    "rsub": (torch.rsub, "__rsub__", _aten.rsub.Scalar, _aten.rsub.Tensor),
    "mul": (
        operator.mul,
        operator.imul,
        torch.mul,
        torch.multiply,
        "mul",
        "multiply",
        _aten.mul.Tensor,
        _aten.mul.Scalar,
    ),
    "neg": (operator.neg, torch.neg, torch.negative, "neg", "negative", _aten.neg.default),
    "not": (
        operator.invert,
        torch.bitwise_not,
        "bitwise_not",
        _aten.bitwise_not.default,
    ),
    "logical_not": (torch.logical_not, "logical_not", _aten.logical_not.default),
    "gt": (operator.gt, torch.gt, "gt", "__gt__", _aten.gt.Scalar, _aten.gt.Tensor),
    "ge": (operator.ge, torch.ge, "ge", "__ge__", _aten.ge.Scalar, _aten.ge.Tensor),
    "lt": (operator.lt, torch.lt, "lt", "__lt__", _aten.lt.Scalar, _aten.lt.Tensor),
    "le": (operator.le, torch.le, "le", "__le__", _aten.le.Scalar, _aten.le.Tensor),
    "eq": (operator.eq, torch.eq, "eq", "__eq__", _aten.eq.Scalar, _aten.eq.Tensor),
    "ne": (operator.ne, torch.ne, "ne", "__ne__", _aten.ne.Scalar, _aten.ne.Tensor),
    "to": (
        "to",
        "type",
        "float",
        "half",
        "bfloat16",
        "double",
        "bool",
        "type_as",
        _aten.to.dtype,
        _aten._to_copy.default,
    ),
    "where": (torch.where, "where", _aten.where.self, _aten.where.ScalarOther, _aten.where.ScalarSelf),
    "masked_fill": (torch.masked_fill, "masked_fill", _aten.masked_fill.Scalar),
    "detach": (torch.detach, "detach", _aten.detach.default),
    "alias": ("contiguous", "clone", torch.clone, _aten.clone.default, _aten.alias.default),
    "zeros_like": (torch.zeros_like, "new_zeros", torch.zeros, _aten.zeros_like.default, _aten.zeros.default),
    "ones_like": (torch.ones_like, "new_ones", torch.ones, _aten.ones_like.default, _aten.ones.default),
    "getitem": (operator.getitem,),
    "select": (torch.select, "select", _aten.select.int),
    "unbind": (torch.unbind, "unbind", _aten.unbind.int),
    "stack": (torch.stack, _aten.stack.default),
    "sum": (torch.sum, "sum", _aten.sum.dim_IntList),
    "transpose": (
        torch.t,
        "t",
        "numpy_T",
        _aten.t.default,
        _aten.numpy_T.default,
        torch.transpose,
        "transpose",
        _aten.transpose.int,
    ),
    "getattr": (getattr,),
    "linear": (F.linear, _aten.linear.default),
    "matmul": (
        operator.matmul,
        torch.matmul,
        torch.mm,
        "matmul",
        "mm",
        "__matmul__",
        _aten.matmul.default,
        _aten.mm.default,
    ),
    "silu": (F.silu, _aten.silu.default),
    "gelu": (F.gelu, _aten.gelu.default),
    "relu": (F.relu, torch.relu, "relu", _aten.relu.default),
    "sigmoid": (torch.sigmoid, F.sigmoid, torch.special.expit, "sigmoid", _aten.sigmoid.default),
    "tanh": (torch.tanh, F.tanh, "tanh", _aten.tanh.default),
    "unpack_masks": (_mglu.unpack_masks, _mglu.unpack_masks.default),
    "dropout": (F.dropout, torch.dropout, _aten.dropout.default),
}

SYMBOLS: Mapping[Any, str] = MappingProxyType(
    {spelling: symbol for symbol, spellings in _SPELLINGS.items() for spelling in spellings}
)


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
    if node.op == "call_method" and isinstance(target, str) and is_inplace_name(target):
        target = target[:-1]
    elif node.op not in ("call_function", "call_method"):
        return None
    elif node.op == "call_function" and is_inplace_name(getattr(target, "__name__", "")):
        target = getattr(torch, target.__name__[:-1], target)
    symbol = SYMBOLS.get(target) if isinstance(target, Hashable) else None
    return None if symbol is None else Call(symbol, node.args, node.kwargs)


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


def is_matrix(argument: Any) -> bool:
    """Whether an argument is a node whose value has two dimensions."""
    value = tensor_example(argument)
    return isinstance(argument, Node) and value is not None and value.dim() == 2


def requires_grad(argument: Any) -> bool:
    """Whether tracing saw a gradient being recorded at a node."""
    value = tensor_example(argument)
    return value is not None and value.requires_grad
