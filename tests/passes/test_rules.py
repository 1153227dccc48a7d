"""The rules of the pass: each is listed once, and rules that disagree about a node are found.

Every other test in this folder also checks the rules, because `Capture` checks them for each graph.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compile_passes import rules
from compile_passes.rules import LAYER_RULES, PRECEDENCE, WEIGHT_RULES, Rule
from tests.support.programs import graphs
from tests.support.programs.graphs import Capture
from tests.support.programs.layers import LAYERS, hard, tensors
from tests.support.programs.spellings import gated

MODULES: list[ModuleType] = [value for value in vars(rules).values() if isinstance(value, ModuleType)]


def test_each_rule_is_listed_once() -> None:
    """A rule that is defined but not listed would never run."""
    defined = [value for module in MODULES for value in vars(module).values() if isinstance(value, Rule)]
    for table in (WEIGHT_RULES, LAYER_RULES):
        assert len(set(table)) == len(table)
    assert set(defined) == {*WEIGHT_RULES, *LAYER_RULES}


def test_precedence_is_the_order_of_the_rules() -> None:
    for first, later in PRECEDENCE:
        order = WEIGHT_RULES if first in WEIGHT_RULES else LAYER_RULES
        assert order.index(first) < order.index(later)


def _compared_mask(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    return gated(x, weight, hard(logits[0]), hard(logits[0]) == 0)


def _bit_of_a_mask(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    m = (logits[0] > 0).to(torch.uint8)
    return gated(x, weight, m, ~m & 1)


def _sum_with_itself(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    m = hard(logits[0])
    gate, value = F.linear(x, weight * m), F.linear(x, weight * (1 - m))
    return F.silu(gate) * (value + value)


PROGRAMS: dict[tuple[str, str], Callable[[Tensor, Tensor, Tensor], Any]] = {
    ("pointwise", "comparison"): _compared_mask,
    ("pointwise", "lowest_bit"): _bit_of_a_mask,
    ("pointwise", "sign"): lambda x, weight, logits: gated(x, weight, F.relu(torch.sign(hard(logits[0]) - 0.5))),
    ("masked_weight", "scaled_weight"): lambda x, weight, logits: gated(
        x, weight, torch.sign(logits[0]) * (weight.detach() > 0)
    ),
    ("slice_of_a_stack", "rearranged"): lambda x, weight, logits: gated(x, weight, (logits > 0)[0], ~(logits > 0)[0]),
    ("difference_of_projections", "function_of_two"): _sum_with_itself,
    ("function_of_two", "gated_product"): LAYERS["g * g.sigmoid() * v"][2],
}
"""For each entry of `PRECEDENCE`, a program in which the two rules return different values for one node."""


@pytest.mark.parametrize("pair", PRECEDENCE, ids=lambda pair: f"{pair[0].name} before {pair[1].name}")
def test_precedence_lists_only_rules_that_disagree(pair: tuple[Rule, Rule]) -> None:
    capture = Capture()
    capture.compile(PROGRAMS[pair[0].name, pair[1].name])(**tensors(1))
    assert pair in capture.decided


def test_rules_that_disagree_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "PRECEDENCE", {})
    with pytest.raises(Exception, match="rules `pointwise` and `comparison` know different values of `%eq"):
        Capture().compile(_compared_mask)(**tensors(1))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_rules_make_no_masks_themselves(module: ModuleType) -> None:
    """Only the recogniser makes masks, so that no rule can forget the shape and dtype in a mask's key."""
    assert not re.search(r"\b(Mask|Carrier)\(", inspect.getsource(module))
