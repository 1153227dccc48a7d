"""Checks the inputs of a call against a package's description, and copies them to the strides that its code needs.

torch's loader checks none of this. The code of a package reads an input as if it had the strides of the example. It
reads a size that several inputs share from one of them. It contains only one branch of a condition on sizes.

Sizes and conditions are Python expressions in integer symbols, such as `s77 + s98` and `s77 % 2 == 0`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..tensors import check_dense, check_memory
from ..words import counted
from .package import InputInfo, PackageInfo, in_words
from .seal import PackageError

if TYPE_CHECKING:
    from torch.utils._pytree import TreeSpec

_FUNCTIONS = {"abs": abs, "max": max, "min": min}
_NODES = (
    *(ast.Expression, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.Constant),
    *(ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub, ast.Not, ast.And, ast.Or),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)
_LONGEST_EXPRESSION = 2000


class Expression:
    """A Python expression that may contain only integer arithmetic, comparisons, `abs`, `max` and `min`.

    Attributes:
        text: the expression.
        names: its symbols.

    Raises:
        PackageError: `text` is not such an expression.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            tree = ast.parse(text if len(text) <= _LONGEST_EXPRESSION else "", mode="eval")
            self._code: CodeType = compile(tree, "<sizes>", "eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise PackageError(f"its description: {text!r} is no expression in sizes") from None
        nodes = list(ast.walk(tree))
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        if not all(_is_allowed(node, called) for node in nodes):
            raise PackageError(f"its description: {text!r} is no expression in sizes")
        self.names = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in called}

    def __call__(self, values: dict[str, int]) -> Any:
        """Evaluate the expression for values of all symbols. Return None on a division by zero."""
        try:
            return eval(self._code, {"__builtins__": {}, **_FUNCTIONS}, values)
        except ZeroDivisionError:
            return None


def _is_allowed(node: ast.AST, called: set[int]) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    if isinstance(node, ast.Name) and node.id in _FUNCTIONS:
        return id(node) in called
    return isinstance(node, _NODES)


class Sizes:
    """The dynamic sizes of a package's inputs, and the conditions that they must meet.

    A symbol gets its value from a size that is this symbol, or else from a size that is linear in it without another
    unknown, such as `2 * s3 + 1`. All other sizes are computed and compared.

    Raises:
        PackageError: an expression is invalid, or a symbol gets no value.
    """

    def __init__(self, inputs: Sequence[InputInfo], conditions: Sequence[str]) -> None:
        found = [
            (entry, dim, Expression(size[2]))
            for entry in inputs
            for dim, size in enumerate(entry.shape)
            if not isinstance(size, int)
        ]
        self._words: dict[str, str] = {}  # the name of each known symbol in messages
        self._alone: dict[str, tuple[str, int]] = {}
        self._solved: list[tuple[str, str, int, Expression]] = []
        self._computed: list[tuple[str, int, Expression]] = []
        for entry, dim, size in sorted(found, key=lambda each: not each[2].text.isidentifier()):  # lone symbols first
            unknown = sorted(size.names - self._words.keys())
            if unknown == [size.text]:
                self._alone[size.text] = entry.name, dim
                self._words[size.text] = f"{entry.name}.shape[{dim}]"
                continue
            if len(unknown) == 1 and _is_linear(size, unknown[0]):
                self._solved.append((unknown[0], entry.name, dim, size))
                self._words[unknown[0]] = unknown[0]
            self._computed.append((entry.name, dim, size))
        self._conditions = [Expression(text) for text in conditions]
        for size in (*(size for _, _, size in self._computed), *self._conditions):
            if untold := size.names - self._words.keys():
                raise PackageError(f"its description: no size of its inputs tells {min(untold)!r}")

    def check(self, shapes: dict[str, torch.Size]) -> None:
        """Check the shapes of all inputs, by name.

        Raises:
            ValueError: two sizes do not agree, or a condition is not met.
        """
        values = {symbol: shapes[name][dim] for symbol, (name, dim) in self._alone.items()}
        for symbol, name, dim, size in self._solved:
            start, after = (size({**values, symbol: value}) for value in (0, 1))
            values[symbol] = (shapes[name][dim] - start) // ((after - start) or 1)  # 1 if s4 is 0 in `s3 * s4`
        for name, dim, size in self._computed:
            if (wanted := size(values)) != (found := shapes[name][dim]):
                words = in_words(size.text, self._words)
                because = f"which is {words}" if size.names <= self._alone.keys() else f"for some integer in {words}"
                raise ValueError(f"{name}: got size {found} in dimension {dim}, must be {wanted}, {because}")
        for condition in self._conditions:
            if not condition(values):
                words = in_words(condition.text, self._words)
                found_sizes = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
                raise ValueError(f"inputs: got the shapes {found_sizes}; the model was compiled for {words} alone")


def _is_linear(size: Expression, symbol: str) -> bool:
    """True if a size is linear in a symbol, tested at several values of it and of the other symbols."""
    for others in (2, 5):
        at_0, at_1, *more = (size({**dict.fromkeys(size.names, others), symbol: value}) for value in (0, 1, 2, 101))
        if None in (at_0, at_1, *more) or at_1 == at_0 or more != [2 * at_1 - at_0, 101 * at_1 - 100 * at_0]:
            return False
    return True


# --- Strides --------------------------------------------------------------------------------------------------------


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose dimensions have this order in memory, outermost first."""
    strides, step = [0] * len(order), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim] or 1
    return tuple(strides)


def dense_order(shape: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """The order for which `dense_strides` gives these strides, or None. Strides of dimensions of size 1 are ignored."""
    order = sorted(range(len(shape)), key=lambda dim: (strides[dim], shape[dim]), reverse=True)
    wanted = dense_strides(shape, order)
    is_dense = all(size == 1 or a == b for size, a, b in zip(shape, strides, wanted, strict=True))
    return order if is_dense or 0 in shape else None


# --- Calls ----------------------------------------------------------------------------------------------------------


class Inputs:
    """Turns the arguments of a call into the tensors that the code of a package takes."""

    def __init__(self, info: PackageInfo) -> None:
        self._info = info
        self._dtypes = [getattr(torch, entry.dtype) if entry.constant is None else None for entry in info.inputs]
        self._sizes = Sizes(info.inputs, info.conditions)

    def tensors(self, arguments: Any, spec: TreeSpec) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Return the tensors for the code, in order, and pairs `(copy, input)` to copy back after the call.

        An input whose strides differ from the example's is copied. If the model writes to it, it writes to the copy.

        Args:
            arguments: `(args, kwargs)` of the call.
            spec: the tree of the example's arguments.

        Raises:
            TypeError, ValueError: as in `Package.__call__`.
        """
        found, written = [], []
        for entry, dtype, value in zip(self._info.inputs, self._dtypes, self._leaves(arguments, spec), strict=True):
            if dtype is None:
                _check_constant(entry, value)
                continue
            self._check(entry, dtype, value)
            tensor = _laid_out(value, entry.order)
            if entry.is_written and tensor is not value:
                written.append((tensor, value))
            found.append(tensor)
        names = (entry.name for entry in self._info.inputs if entry.constant is None)
        self._sizes.check({name: tensor.shape for name, tensor in zip(names, found, strict=True)})
        return found, written

    def _leaves(self, arguments: Any, spec: TreeSpec) -> list[Any]:
        try:
            return spec.flatten_up_to(arguments)
        except ValueError as error:
            args, kwargs = arguments
            given, wanted = _counts(len(args), kwargs), _counts(spec.child(0).num_children, spec.child(1).context)
            expected = "; ".join(str(entry) for entry in self._info.inputs)
            raise ValueError(
                f"inputs: got {given}, must be nested like the example of export, {wanted} ({expected}): {error}"
            ) from None

    def _check(self, entry: InputInfo, dtype: torch.dtype, tensor: Any) -> None:
        check_dense(entry.name, tensor)
        if tensor.dtype is not dtype or not _fits(entry, tensor) or tensor.device.type != self._info.device:
            shape = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
            raise ValueError(f"{entry.name}: got {shape}, must be {entry} on {self._info.device}")
        check_memory(**{entry.name: tensor})


def _counts(positional: int, keywords: Iterable[str]) -> str:
    return ", ".join([counted(positional, "positional argument"), *(f"{name}=" for name in keywords)])


def _fits(expected: InputInfo, tensor: Tensor) -> bool:
    return tensor.dim() == len(expected.shape) and all(
        size == wanted if isinstance(wanted, int) else wanted[0] <= size and (wanted[1] is None or size <= wanted[1])
        for wanted, size in zip(expected.shape, tensor.shape, strict=True)
    )


def _check_constant(entry: InputInfo, value: Any) -> None:
    if repr(value) != entry.constant:
        found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.100}"
        raise ValueError(
            f"{entry.name}: got {found}, must be {entry.constant}, the value that the model was exported with"
        )


def _laid_out(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Return the tensor if its strides are dense in this order of dimensions, else a copy that has them."""
    strides = dense_strides(tensor.shape, order)
    if tensor.stride() == strides and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
