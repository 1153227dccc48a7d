"""A rule: a function that may know the value of a node, and the symbols of the calls that it is asked about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

from torch.fx import Node

from ..recognise import Recogniser
from ..symbols import Call
from ..values import Value

RuleFunction = Callable[[Recogniser, Node, Call], Value]
"""Maps a node and its `Call` to the value of the node, or to None if the rule does not know it.

A rule reads shapes only through the functions of `shapes`, so that it adds no guard to the compiled program.
"""


@dataclass(frozen=True)
class Rule:
    """A function and the symbols (`symbols.py`) of the calls that it understands."""

    function: RuleFunction
    symbols: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.function.__name__


def rule(*symbols: str) -> Callable[[RuleFunction], Rule]:
    """Make a rule of a function."""
    return lambda function: Rule(function, symbols)


def rules_of(*modules: ModuleType) -> tuple[Rule, ...]:
    """The rules of some modules, in the order in which they are written there."""
    return tuple(one for module in modules for one in vars(module).values() if isinstance(one, Rule))


RulesBySymbol = Mapping[str, tuple[Rule, ...]]


def by_symbol(rules: Iterable[Rule]) -> RulesBySymbol:
    """The rules of each symbol, in the order given, so that a node is shown only to rules that may know it."""
    table: dict[str, tuple[Rule, ...]] = {}
    for one in rules:
        for symbol in one.symbols:
            table[symbol] = (*table.get(symbol, ()), one)
    return table
