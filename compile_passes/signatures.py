r"""Signatures: which arguments a spelling of an operation has, and which of them the rules receive.

A signature is text, such as `"input, other, alpha==1"`:

| item | meaning |
|---|---|
| `name` | a required argument, which the rules receive |
| `name=value` | an optional argument, which the rules receive, with its default |
| `a\|b` | an argument with two names |
| `name==value` | the call is understood only if the argument is absent or has this value; the rules do not receive it |
| `-name` | an argument that cannot change what the rules conclude (they read shape and dtype of the result) |
| `-inplace` | whether the call may overwrite its input, which the view (`view.py`) has dealt with; a bool |
| `*name` | all further positional arguments, or one sequence: the rules receive a tuple |
| `...` | any further arguments, none of which can change what the rules conclude |
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Any

_REQUIRED = object()


@dataclass(frozen=True)
class _Parameter:
    names: tuple[str, ...]
    kind: str
    """Its mark in the text: `*`, `-`, `==`, or nothing for any other argument that the rules receive."""
    default: Any


@dataclass(frozen=True)
class Signature:
    """The parameters of a spelling."""

    parameters: tuple[_Parameter, ...]
    is_open: bool
    """Whether further arguments are accepted."""

    @staticmethod
    def parse(text: str) -> Signature:
        """Parse the syntax at the head of this module."""
        items = [item.strip() for item in text.split(",") if item.strip()]
        return Signature(tuple(_parameter(item) for item in items if item != "..."), "..." in items)

    @cached_property
    def read(self) -> tuple[str, ...]:
        """The names of the arguments that the rules receive."""
        return tuple(p.names[0] for p in self.parameters if p.kind in ("", "*"))

    @cached_property
    def is_whole(self) -> bool:
        """Whether the arguments that the rules receive determine the value of the call."""
        unread = [p for p in self.parameters if p.kind == "-" and p.names[0] != "inplace"]
        return not unread and not self.is_open

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments that the rules receive, by name; None if the given ones do not fit the signature."""
        bound: dict[str, Any] = {}
        given, position = dict(kwargs), 0
        for parameter in self.parameters:
            value = parameter.default
            if position < len(args):
                is_rest = parameter.kind == "*"
                value = _as_one_sequence(args[position:]) if is_rest else args[position]
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
    """Equality that adds no guard on a symbolic number and does not compare tensors."""
    return value is default or (isinstance(value, (bool, int, float, str)) and bool(value == default))
