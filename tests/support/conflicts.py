"""Finds pairs of rules that give one node different values, so that the order of the rules decides.

`graphs.Capture` runs the check on every graph.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph, Node

from compile_passes.evaluate import Evaluation
from compile_passes.rules import PRECEDENCE
from compile_passes.rules.base import Rule, RulesBySymbol
from compile_passes.symbols import as_call, calls_read_once
from compile_passes.values import Value
from compile_passes.view import View


class RuleConflict(Exception):  # noqa: N818 (a conflict is a property of the rules, not of the program)
    """Two rules give a node different values, and `rules.PRECEDENCE` has no entry for the pair."""


def check_rules(graph: Graph) -> set[tuple[Rule, Rule]]:
    """Apply all rules to all nodes of a graph, without changing it.

    Returns:
        The pairs of `PRECEDENCE` that decided about a node.

    Raises:
        RuleConflict: two rules disagree about a node, and the pair is not in `PRECEDENCE`.
    """
    view = View(graph)
    try:
        with calls_read_once():
            return _AskAll(view).decided
    finally:
        view.discard()


class _AskAll(Evaluation):
    """An evaluation that tries all rules of a symbol, and does not stop at the first one that gives a value."""

    def __init__(self, view: View) -> None:
        self.decided: set[tuple[Rule, Rule]] = set()
        super().__init__(view)

    def _evaluate(self, node: Node, rules: RulesBySymbol, otherwise: Callable[[Node], Value]) -> Value:
        call = as_call(node)
        answers: list[tuple[Rule, Value]] = []
        if call is not None:
            answers = [(rule, rule.function(self, node, call)) for rule in rules.get(call.symbol, ())]
        known = [(rule, value) for rule, value in answers if value is not None]
        for rule, value in known[1:]:
            first, decided = known[0]
            if value != decided:
                if (first, rule) not in PRECEDENCE:
                    raise RuleConflict(
                        f"rules `{first.name}` and `{rule.name}` know different values of `{node.format_node()}`: "
                        f"{decided} and {value}; make one of them refuse such a node, or add the pair to PRECEDENCE in "
                        "compile_passes/rules/__init__.py with the reason why the first is right"
                    )
                self.decided.add((first, rule))
        return known[0][1] if known else otherwise(node)
