"""The table of spellings: maps all ways to write an operation in torch to one symbol and one list of arguments.

A *spelling* is a torch function, a method, a Python operator or an ATen overload. The table gives its symbol and its
signature (`Signature`), and `as_call` binds the arguments of a node to that signature. The rules of the recogniser see
only the result, a `Call`. So positional, keyword and default arguments look the same to the rules, and so do the graphs
of Dynamo and `torch.export`. A node whose arguments do not all fit the signature is not a `Call`. So no rule can
overlook an argument such as `rounding_mode="floor"`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import nn
from torch.fx import Node
from torch.nn.modules.module import _has_any_global_hook

_mglu = torch.ops.mglu

# --- Signatures ------------------------------------------------------------------------------------------------------

_REQUIRED = object()


@dataclass(frozen=True)
class _Parameter:
    names: tuple[str, ...]
    kind: str  # the mark in the signature's text: `*`, `-`, `==`, or empty
    default: Any


@dataclass(frozen=True)
class Signature:
    r"""The arguments of a spelling, and which of them the rules receive.

    A signature is text, such as `"input, other, alpha==1"`:

    | text | meaning |
    |---|---|
    | `name` | a required argument, which the rules receive |
    | `name=value` | an optional argument with its default, which the rules receive |
    | `a\|b` | an argument with two names |
    | `name==value` | must be absent or have this value; the rules do not receive it |
    | `-name` | ignored, because no rule depends on it (rules read shape and dtype from the example value) |
    | `-inplace` | ignored, because the view (`view.py`) has no writes; must be a bool |
    | `*name` | all further positional arguments, or one sequence, of numbers or nodes; the rules receive a tuple |
    | `...` | any further arguments; ignored like `-name` |
    """

    parameters: tuple[_Parameter, ...]
    is_open: bool  # True if further arguments are accepted

    @staticmethod
    def parse(text: str) -> Signature:
        """Parse the text of a signature."""
        items = [item.strip() for item in text.split(",") if item.strip()]
        return Signature(tuple(_parameter(item) for item in items if item != "..."), "..." in items)

    @cached_property
    def read(self) -> tuple[str, ...]:
        """The names of the arguments that the rules receive, in order."""
        return tuple(p.names[0] for p in self.parameters if p.kind in ("", "*"))

    @cached_property
    def is_whole(self) -> bool:
        """True if the arguments that the rules receive determine the value of the call."""
        unread = [p for p in self.parameters if p.kind == "-" and p.names[0] != "inplace"]
        return not unread and not self.is_open

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments that the rules receive, by name; None if `args` and `kwargs` do not fit the signature."""
        bound: dict[str, Any] = {}
        given, position = dict(kwargs), 0
        for parameter in self.parameters:
            value = parameter.default
            if position < len(args):
                is_rest = parameter.kind == "*"
                value = _as_one_sequence(args[position:]) if is_rest else args[position]
                if is_rest and not all(isinstance(item, (int, torch.SymInt, Node)) for item in value):
                    return None  # `x.view(torch.int32)` is no `x.view(3, 4)`
                position = len(args) if is_rest else position + 1
            else:
                for name in parameter.names:
                    value = given.pop(name, value)
            if value is _REQUIRED or (parameter.kind == "==" and not _is_same(value, parameter.default)):
                return None
            if parameter.names[0] == "inplace" and not isinstance(value, (bool, NoneType)):
                return None
            bound[parameter.names[0]] = value
        if not self.is_open and (given or args[position:]):
            return None
        return {name: bound[name] for name in self.read}


def _parameter(item: str) -> _Parameter:
    kind = item[0] if item[0] in "*-" else "==" if "==" in item else ""
    name, _, text = item.lstrip("*-").replace("==", "=").partition("=")
    default = ast.literal_eval(text) if text else None if kind == "-" else _REQUIRED
    names = tuple(name.split("|"))
    return _Parameter((*names, "self") if names[0] == "input" else names, kind, default)


def _as_one_sequence(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else args


def _is_same(value: Any, default: Any) -> bool:
    """True if two arguments are equal. Adds no guard on a symbolic number, and compares no tensors."""
    return value is default or (isinstance(value, (bool, int, float, str)) and bool(value == default))


# --- Spellings -------------------------------------------------------------------------------------------------------


def _aten(*names: str) -> tuple[Any, ...]:
    """The ATen operators with these names and their overloads, without overloads that have an `out` argument.

    Graphs of `torch.export` contain overloads. Since torch 2.15 Dynamo's graphs contain the operators themselves.
    """
    packets = [getattr(torch.ops.aten, name) for name in names]
    overloads = [
        getattr(packet, overload) for packet in packets for overload in packet.overloads() if "out" not in overload
    ]
    return (*packets, *overloads)


def _elementwise(name: str, *more: Any) -> tuple[Any, ...]:
    """`torch.name`, the method `name`, the ATen operator `name`, and more spellings."""
    return (getattr(torch, name), name, *_aten(name), *more)


_TWO = "input, other"


def _spellings() -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """`(symbol, signature, spellings)` for every symbol.

    A string is the name of a method. In-place forms need no entry, because `_out_of_place` finds them by their trailing
    underscore. All signatures of one symbol must pass the same arguments to the rules.
    """
    # Arithmetic
    scaled = f"{_TWO}, alpha==1"
    yield "add", scaled, _elementwise("add", operator.add, operator.iadd, "__add__", "__radd__")
    yield "sub", scaled, _elementwise("sub", operator.sub, operator.isub, torch.subtract, "subtract", "__sub__")
    yield "rsub", scaled, (torch.rsub, "__rsub__", *_aten("rsub"))
    products = (operator.mul, operator.imul, torch.multiply, "multiply", "__mul__", "__rmul__")
    yield "mul", _TWO, _elementwise("mul", *products)
    quotients = (operator.truediv, operator.itruediv, torch.true_divide, "true_divide", "__truediv__")
    yield "div", f"{_TWO}, rounding_mode==None", _elementwise("div", *quotients)
    # `add` and `sub` with a factor, and `div` with a rounding mode. Of the rules, only `masks.pointwise` knows these
    # symbols, because it runs the calls and need not interpret the arguments.
    yield "scaled_add", f"{_TWO}, alpha", _elementwise("add")
    yield "scaled_sub", f"{_TWO}, alpha", _elementwise("sub", torch.subtract, "subtract")
    yield "rounded_div", f"{_TWO}, rounding_mode", _elementwise("div")
    yield "round", "input, decimals==0", _elementwise("round")
    yield "floor", "input", _elementwise("floor")
    yield "ceil", "input", _elementwise("ceil")
    yield "round_to", "input, decimals", _elementwise("round")
    yield "neg", "input", _elementwise("neg", operator.neg, torch.negative, "negative", "__neg__")
    yield "abs", "input", _elementwise("abs", operator.abs, torch.absolute, "absolute", "__abs__")
    yield "reciprocal", "input", _elementwise("reciprocal")
    yield "pow", "input, exponent", _elementwise("pow", operator.pow, "__pow__")
    yield "square", "input", _elementwise("square")
    yield "exp", "input", _elementwise("exp")
    yield "erf", "input", _elementwise("erf", torch.special.erf)
    clamp = "input, min=None, max=None"
    yield "clamp", clamp, _elementwise("clamp", torch.clip, "clip", *_aten("clip"))
    yield "clamp_min", "input, min", _elementwise("clamp_min")
    yield "maximum", _TWO, _elementwise("maximum", torch.ops.aten.max.other)
    yield "max", _TWO, (torch.max, "max")  # elementwise if `other` is a tensor; a number is the dimension to reduce
    yield "threshold", "input, threshold, value, -inplace", (F.threshold, torch.threshold, *_aten("threshold"))
    yield "sign", "input", _elementwise("sign", torch.sgn, "sgn", *_aten("sgn"))
    yield "heaviside", "input, values", _elementwise("heaviside")
    yield "remainder", _TWO, _elementwise("remainder", operator.mod, "__mod__")
    floors = (operator.floordiv, torch.floor_divide, "floor_divide", "__floordiv__", *_aten("floor_divide"))
    yield "floor_divide", _TWO, floors
    shifts = (operator.rshift, torch.bitwise_right_shift, "bitwise_right_shift", "__rshift__")
    yield "rshift", _TWO, (*shifts, *_aten("bitwise_right_shift", "__rshift__"))
    # Logic
    inversions = (operator.invert, torch.bitwise_not, "bitwise_not", "__invert__", *_aten("bitwise_not"))
    yield "not", "input", inversions
    yield "logical_not", "input", _elementwise("logical_not")
    for name, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        methods = (f"__{name}__", f"__r{name}__", f"bitwise_{name}")
        functions = (function, getattr(torch, f"bitwise_{name}"))
        yield name, _TWO, (*functions, *methods, *_aten(f"bitwise_{name}", f"__{name}__"))
        yield f"logical_{name}", _TWO, _elementwise(f"logical_{name}")
    yield "gt", _TWO, _elementwise("gt", operator.gt, torch.greater, "greater", "__gt__")
    yield "ge", _TWO, _elementwise("ge", operator.ge, torch.greater_equal, "greater_equal", "__ge__")
    yield "lt", _TWO, _elementwise("lt", operator.lt, torch.less, "less", "__lt__")
    yield "le", _TWO, _elementwise("le", operator.le, torch.less_equal, "less_equal", "__le__")
    yield "eq", _TWO, _elementwise("eq", operator.eq, "__eq__")
    yield "ne", _TWO, _elementwise("ne", operator.ne, torch.not_equal, "not_equal", "__ne__")
    yield "where", "condition, input, other", (torch.where, *_aten("where"))
    yield "where", "input, condition, other", ("where",)
    yield "masked_fill", "input, mask, value", _elementwise("masked_fill")
    yield "scatter", "input, dim, index, value|src, reduce==None", _elementwise("scatter")
    yield "index_fill", "input, dim, index, value", _elementwise("index_fill")
    yield "gumbel_softmax", "logits, -tau, hard==True, -eps, -dim", (F.gumbel_softmax,)
    yield "one_hot", "input|tensor, num_classes=-1", (F.one_hot, *_aten("one_hot"))
    yield "bernoulli", "input, ...", _elementwise("bernoulli")
    yield "index_put", "input, indices, values, accumulate==False", _elementwise("index_put")
    yield "setitem", "input, index, value", (operator.setitem, "__setitem__")
    # Casts and copies
    casts = ("to", "type", "type_as", "float", "half", "bfloat16", "double")
    casts_to_integers = ("bool", "byte", "char", "short", "int", "long")
    yield "to", "input, ...", (*casts, *casts_to_integers, *_aten("to", "_to_copy"))
    yield "detach", "input", _elementwise("detach", getattr(torch._C._autograd, "_get_data_attr"))  # noqa: B009
    yield "alias", "input, ...", (torch.clone, "contiguous", "clone", *_aten("clone", "alias", "contiguous"))
    yield "alias", "input", _aten("lift_fresh_copy", "lift_fresh")
    # Numbers
    yield "zeros", "...", (torch.zeros_like, torch.zeros, "new_zeros", "zero_", torch.zero_)
    yield "zeros", "...", _aten("zeros_like", "zeros", "new_zeros", "zero", "zero_")
    yield "ones", "...", (torch.ones_like, torch.ones, "new_ones", *_aten("ones_like", "ones", "new_ones"))
    yield "full", "-size|input|self, fill_value, ...", (torch.full, torch.full_like, *_aten("full", "full_like"))
    yield "full", "-input, -size, fill_value, ...", ("new_full", *_aten("new_full"))
    random = ("rand_like", "randn_like", "randint_like")
    yield "random_like", "...", (*(getattr(torch, name) for name in random), *_aten(*random))
    yield "empty", "...", (torch.empty, torch.empty_like, "new_empty", *_aten("empty", "empty_like", "new_empty"))
    yield "tensor", "data|s, ...", (torch.tensor, torch.scalar_tensor, *_aten("scalar_tensor"))
    # Shape
    yield "getitem", "input, index", (operator.getitem, "__getitem__")
    yield "select", "input, dim, index", _elementwise("select")
    yield "slice", "input, dim=0, start=None, end=None, step=1", _aten("slice")
    yield "narrow", "input, dim, start, length", _elementwise("narrow")
    yield "unbind", "input, dim=0", _elementwise("unbind")
    sections = (
        "input, -chunks|split_size|split_size_or_sections|split_sizes|indices_or_sections|sections|indices, dim=0"
    )
    splits = (torch.split, torch.functional.split, "split", "split_with_sizes", *_aten("split", "split_with_sizes"))
    yield "split", sections, (*_elementwise("chunk", *splits), torch.tensor_split, "tensor_split")
    yield "split", sections, _aten("tensor_split")
    yield "stack", "tensors, dim=0", (torch.stack, *_aten("stack"))
    concatenations = (torch.cat, torch.concat, torch.concatenate, *_aten("cat", "concat", "concatenate"))
    yield "cat", "tensors, dim|axis=0", concatenations
    yield "vstack", "tensors", (torch.vstack, torch.row_stack, *_aten("vstack"))
    reduction = "input, dim|axis=None, keepdim|keepdims=False, dtype==None"
    yield "sum", reduction, _elementwise("sum")
    yield "mean", reduction, _elementwise("mean")
    yield "unsqueeze", "input, dim", _elementwise("unsqueeze")
    yield "squeeze", "input, dim", _elementwise("squeeze")
    yield "expand", "input, *sizes", ("expand", *_aten("expand"))
    yield "repeat", "input, *sizes", ("repeat", *_aten("repeat"))
    yield "repeat_interleave", "input, repeats, dim=None, -output_size", _elementwise("repeat_interleave")
    yield "expand", "input, *sizes|size|shape", (torch.broadcast_to, "broadcast_to", *_aten("broadcast_to"))
    yield "expand_as", _TWO, ("expand_as", *_aten("expand_as"))
    yield "t", "input", (torch.t, "t", *_aten("t", "numpy_T", "matrix_H"))
    yield "mT", "input", (*_aten("mT", "mH", "adjoint"), torch.adjoint, "adjoint")
    swaps = (torch.transpose, "transpose", torch.swapaxes, "swapaxes", torch.swapdims, "swapdims")
    yield "transpose", "input, dim0|axis0, dim1|axis1", (*swaps, *_aten("transpose", "swapaxes", "swapdims"))
    yield "permute", "input, *dims", _elementwise("permute")
    yield "flatten", "input, start_dim=0, end_dim=-1", _elementwise("flatten")
    yield "unflatten", "input, dim, -sizes", _elementwise("unflatten")
    yield "reshape", "input, *shape|size", (torch.reshape, "reshape", "view", *_aten("reshape", "view", "_unsafe_view"))
    yield "reshape_as", _TWO, ("reshape_as", "view_as", *_aten("reshape_as", "view_as"))
    yield "getattr", "input, name", (getattr,)
    yield "size", "...", ("size", "dim", *_aten("sym_size"))
    yield "assert_metadata", "input|a, ...", _aten("_assert_tensor_metadata")
    # Layers
    yield "linear", "input, weight, bias=None", (F.linear, *_aten("linear"))
    yield "inner", _TWO, (torch.inner, "inner", *_aten("inner"))
    multiplying = (operator.matmul, torch.matmul, torch.mm, torch.bmm, "matmul", "mm", "bmm", "__matmul__")
    yield ("matmul", "input, other|mat2|tensor2", (*multiplying, torch.linalg.matmul, *_aten("matmul", "mm", "bmm")))
    groups = "input|mat_a, mat2|mat_b, offs=None, bias==None, out_dtype==None"
    yield "grouped_mm", groups, (F.grouped_mm, torch._grouped_mm, *_aten("_grouped_mm"))
    yield "addmm", "input, mat1, mat2, beta=1, alpha==1", _elementwise("addmm")
    yield "einsum", "equation, *operands|tensors, -path", (torch.einsum, *_aten("einsum"))
    yield "glu", "input, dim=-1", (F.glu, *_aten("glu"))
    yield "addcmul", "input, tensor1, tensor2, value=1", _elementwise("addcmul")
    yield "silu", "input, -inplace", (F.silu, *_aten("silu"))
    yield "gelu", "input, approximate='none'", (F.gelu, *_aten("gelu"))
    yield "relu", "input, -inplace", _elementwise("relu", F.relu)
    yield "sigmoid", "input", _elementwise("sigmoid", F.sigmoid, torch.special.expit)
    yield "tanh", "input", _elementwise("tanh", F.tanh)
    for name, options in OTHER_ACTIVATIONS.items():
        aten = "log_sigmoid" if name == "logsigmoid" else name
        yield name, f"input, {options}-inplace", (getattr(F, name), *_aten(aten))
    yield "unpack_masks", "packed_masks, -in_features", (_mglu.unpack_masks, _mglu.unpack_masks.default)
    dropouts = (F.dropout, torch.dropout, *_aten("dropout"))
    yield "dropout", "input, p=0.5, training|train=True, -inplace", dropouts


OTHER_ACTIVATIONS: Mapping[str, str] = {
    **dict.fromkeys(("mish", "selu", "hardswish", "hardsigmoid", "relu6", "logsigmoid"), ""),
    **dict.fromkeys(("elu", "celu"), "alpha=1.0, "),
    "leaky_relu": "negative_slope=0.01, ",
    "hardtanh": "min_val=-1.0, max_val=1.0, ",
    "softplus": "beta=1, threshold=20, ",
}
"""Activations that the operator lacks, and their options. They are in the table so that a refusal can name them."""

_TABLE: dict[Any, list[tuple[str, Signature]]] = {}  # for each spelling, the signatures to try in order

_ORDER: dict[str, tuple[str, ...]] = {}  # for each symbol, the order of its arguments, from its first signature

for _symbol, _text, _targets in _spellings():
    _signature = Signature.parse(_text)
    _ORDER.setdefault(_symbol, _signature.read)
    for _target in dict.fromkeys(_targets):
        _TABLE.setdefault(_target, []).append((_symbol, _signature))

REARRANGES = frozenset(
    (
        *("reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "t", "mT", "transpose", "permute"),
        *("getattr", "getitem", "select", "slice", "narrow", "expand", "expand_as", "repeat", "repeat_interleave"),
    )
)
"""Symbols of calls that only move, repeat or drop elements of their first argument."""

READS_NO_VALUES = frozenset({"zeros", "ones", "full", "empty", "random_like", "size", "assert_metadata"})
"""Symbols of calls that read only the shape, dtype or device of their arguments."""


@dataclass(frozen=True)
class Call:
    """A call of a graph as the rules see it."""

    symbol: str
    args: tuple[Any, ...]  # the arguments that the rules receive, with defaults filled in
    is_whole: bool = False  # True if symbol and arguments determine the value, so that equal calls have equal results


_calls_read: ContextVar[dict[Node, Call | None] | None] = ContextVar("calls_read", default=None)
"""Inside `calls_read_once`, the `Call` of each node that was read."""


@contextmanager
def calls_read_once() -> Iterator[None]:
    """Cache the results of `as_call` in a `with` block. In the block, the arguments of nodes must not change."""
    token = _calls_read.set({})
    try:
        yield
    finally:
        _calls_read.reset(token)


def as_call(node: Any) -> Call | None:
    """`node` as a `Call`; None if its target is not in the table, or if its arguments do not fit."""
    if not isinstance(node, Node):
        return None
    calls = _calls_read.get()
    if calls is None:
        return _read(node)
    if node not in calls:
        calls[node] = _read(node)
    return calls[node]


def _read(node: Node) -> Call | None:
    if node.op == "call_module":
        return _call_of_module(node)
    if not node.op.startswith("call_"):
        return None
    spellings = _TABLE.get(node.target) or _TABLE.get(_out_of_place(node.target)) or ()
    calls = (_bind(symbol, signature, node.args, node.kwargs) for symbol, signature in spellings)
    return next((call for call in calls if call is not None), None)


def symbol_of(node: Any) -> str:
    """The symbol of a node; empty if the node is not a `Call`."""
    call = as_call(node)
    return "" if call is None else call.symbol


def value_users(node: Node) -> list[Node]:
    """The users of a node that read more than its shape, dtype or device."""
    calls = {user: as_call(user) for user in node.users}
    return [user for user, call in calls.items() if call is None or call.symbol not in READS_NO_VALUES]


def is_identity_dropout(call: Call) -> bool:
    """True if a dropout is the identity: in eval mode, or with p = 0."""
    _, probability, training = call.args
    return training is False or (isinstance(probability, (int, float)) and probability == 0)


def _bind(symbol: str, signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    bound = signature.bind(args, kwargs)
    return None if bound is None else Call(symbol, tuple(bound[name] for name in _ORDER[symbol]), signature.is_whole)


_MODULES: Mapping[type[nn.Module], str] = {
    nn.SiLU: "silu",
    nn.GELU: "gelu",
    nn.ReLU: "relu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    nn.Identity: "alias",
    nn.Dropout: "dropout",
}
"""The symbols of modules that are nodes of a graph, because `torch.fx.symbolic_trace` does not trace into them."""


def _call_of_module(node: Node) -> Call | None:
    root = node.graph.owning_module
    module = None if root is None else root.get_submodule(str(node.target))
    symbol = _MODULES.get(type(module))  # type: ignore[arg-type] # None is in no table
    if module is None or symbol is None or getattr(module, "inplace", False) or not is_as_its_class(module):
        return None
    signature = _TABLE["clone" if symbol == "alias" else getattr(F, symbol)][0][1]
    names = (parameter.names[0] for parameter in signature.parameters)
    options = {name: getattr(module, name) for name in names if hasattr(module, name)}
    return _bind(symbol, signature, node.args, {**node.kwargs, **options})


def is_as_its_class(module: nn.Module) -> bool:
    """True if calling a module runs the `forward` of its class and nothing else, such as hooks."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and not _has_any_global_hook() and "forward" not in vars(module)


def _out_of_place(target: Any) -> Any:
    """The out-of-place spelling of an in-place operation; any other target unchanged."""
    if isinstance(target, str):
        return target[:-1] if is_inplace_name(target) else target
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.split("::")[1]
        packet = getattr(torch.ops.aten, name[:-1], None) if is_inplace_name(name) else None
        return getattr(packet, target._overloadname, target)
    name = getattr(target, "__name__", "")
    return getattr(torch, name[:-1], target) if is_inplace_name(name) else target


def is_inplace_name(name: str) -> bool:
    """True for the name of an in-place operation: `relu_`, but not `relu` or `__add__`."""
    return name.endswith("_") and not name.endswith("__")
