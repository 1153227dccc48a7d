"""Errors inside of the pass.

If a rule raises an error, the node that it reads gets no value. After any other error, the graph is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from compile_passes import evaluate, fusion, rewrite
from compile_passes.fusion import FusionError
from compile_passes.rules import Rule
from tests.support.programs import lookalikes
from tests.support.programs.graphs import Capture, assert_same, results
from tests.support.programs.spellings import from_source

SAME = 1e-12


layer = from_source("x, weight, masks", "sum(gated(x, weight, m, ~m) for m in masks)", {})


def tensors() -> dict[str, Tensor]:
    named = lookalikes.tensors()
    return {"x": named["x"], "weight": named["weight"], "masks": named["bits"][:2]}


@pytest.fixture
def broken_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the rules for `relu` by one that raises an error."""

    def broken(recogniser: Any, node: Node, call: Any) -> Any:
        raise ZeroDivisionError("a bug")

    _add_rule(monkeypatch, Rule(broken, ("relu",)))


def _add_rule(monkeypatch: pytest.MonkeyPatch, rule: Rule) -> None:
    """Replace all rules for a symbol by one rule."""
    rules = {**evaluate.WEIGHT_RULES_BY_SYMBOL, **dict.fromkeys(rule.symbols, (rule,))}
    monkeypatch.setattr(evaluate, "WEIGHT_RULES_BY_SYMBOL", rules)


def _left_alone(capture: Capture) -> None:
    (before,), (after,) = capture.before, capture.after
    assert str(after) == str(before)
    assert (capture.report.fused, capture.report.missed) == ([], [])


@pytest.mark.usefixtures("broken_rule")
@pytest.mark.parametrize("strict", [False, True])
def test_a_rule_that_raises_an_error_knows_nothing_of_a_node(strict: bool) -> None:
    """Other layers of the graph are still fused, and the report lists the error."""

    def two(x: Tensor, weight: Tensor, masks: Tensor) -> Tensor:
        return layer(x, weight, masks) + torch.relu(2 * x).sum()

    capture = Capture(strict=strict, check=False)
    assert_same(results(capture.compile(two), tensors()), results(two, tensors()), SAME)
    assert len(capture.report.fused) == 1
    assert capture.report.missed == []
    assert "rule `broken` at `relu" in str(capture.report)
    (error,) = capture.report.errors
    assert error.endswith("ZeroDivisionError: a bug")


def test_strict_mode_raises_an_error_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(fusion, "find_near_misses", broken)
    with pytest.raises(Exception, match="the fusion pass failed") as raised:
        Capture(strict=True).compile(layer)(**tensors())
    assert isinstance(raised.value.__cause__ or raised.value, FusionError) or "FusionError" in str(raised.value)


@pytest.mark.parametrize("written", [False, True])
def test_an_error_while_nodes_are_made_leaves_the_graph_as_it_was(
    written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two layers fails after the nodes of the first were made.

    With `written`, the program writes to a tensor, so that the view is a copy of the graph.
    """

    def two(x: Tensor, weight: Tensor, masks: Tensor) -> Tensor:
        copy = weight.clone()
        if written:
            copy[masks[0]] = 0
        return layer(x, weight, masks) + layer(x + 1, weight, masks) + F.linear(x, copy)

    made: list[Callable[..., Any]] = []
    real = rewrite._fused_call

    def broken(*args: Any) -> Any:
        made.append(real)
        result = real(*args)
        if len(made) == 2:
            raise KeyError("a bug")
        return result

    monkeypatch.setattr(rewrite, "_fused_call", broken)
    capture = Capture()
    with pytest.warns(UserWarning, match="the fusion pass failed and left the graph as it was"):
        found = results(capture.compile(two), tensors())
    assert len(made) == 2
    assert_same(found, results(two, tensors()), SAME)
    _left_alone(capture)


def test_a_rule_that_adds_a_guard_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that compares a symbolic size as a number would specialise the compiled code."""

    def guarding(recogniser: Any, node: Node, call: Any) -> Any:
        if node.meta["example_value"].shape[0] == 5:
            return None

    _add_rule(monkeypatch, Rule(guarding, ("relu",)))

    def program(x: Tensor) -> Tensor:
        return torch.relu(x * 2)

    capture = Capture(check=False)
    compiled = capture.compile(program, dynamic=True)
    compiled(torch.randn(5, 8))
    compiled(torch.randn(7, 8))
    assert "rule `guarding`" in capture.report.errors[0]
    assert len(capture.before) == 1, "compiled once for all sizes"
