"""The rules of the recogniser: for each symbol, functions that say what a call of it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch.fx import Node

from .symbols import Call
from .values import Value

if TYPE_CHECKING:
    from .recognise import Recogniser

Rule = Callable[["Recogniser", Node, Call], Value]
"""From a node, the call it is, and the values of its arguments, to the value of the node; None where it knows none."""

_RULES: dict[str, list[Rule]] = {}


def rule(*symbols: str) -> Callable[[Rule], Rule]:
    """Add a rule for calls of `symbols`. Of several rules the first that knows a value has it."""

    def register(function: Rule) -> Rule:
        for symbol in symbols:
            _RULES.setdefault(symbol, []).append(function)
        return function

    return register


def rules_for(symbol: str) -> Sequence[Rule]:
    """The rules for a symbol, in the order in which they stand in their module."""
    return _RULES.get(symbol, ())
