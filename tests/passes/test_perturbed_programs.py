"""Correct programs with one perturbation have eager's results, and leave their inputs as eager does.

The module `perturbations` says what must hold for such programs, and
`python tests/passes/run_random_programs.py perturbed` runs any number of them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import python
from tests.support.families import sample as quick_sample
from tests.support.programs import perturbations
from tests.support.programs.perturbations import (
    FAMILIES,
    indices,
    perturbation,
    program,
    right_program,
    sample,
)
from tests.support.programs.right_programs import Program, draw
from tests.support.programs.source_programs import Both, difference, outcomes, through_the_pass

PROGRAMS = 300
RUNNER = Path(__file__).with_name("run_random_programs.py")


@pytest.mark.parametrize("number", quick_sample(range(PROGRAMS), every=15))
def test_perturbed_program(number: int) -> None:
    seed, index = sample(number)
    changed = program(seed, index)
    try:
        through_the_pass(changed)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{perturbation(index)}, seed {seed}, index {index}\n{changed}") from error


@pytest.mark.parametrize("seed", quick_sample(range(60), every=10))
def test_right_program(seed: int) -> None:
    """A program without a perturbation has eager's results, and its layers are fused."""
    right = draw(seed)
    outcome = through_the_pass(right)
    assert outcome == "fused" or _may_be_refused(right), f"{outcome}\n{right}"


def _may_be_refused(right: Program) -> bool:
    """True if the pass may refuse a program: a float mask is ambiguous, or logits are trained through `round`."""
    lines = " ".join(right.statements)
    rounded = "torch.round" in lines and "detach" not in lines
    return right.given == "float" or (rounded and any(name[0] in "Ll" for name in right.trained))


@pytest.mark.long
def test_a_seed_and_an_index_are_one_program() -> None:
    drawn = [sample(number) for number in range(60)]
    programs = [program(*key) for key in drawn]
    right_program.cache_clear()
    assert [program(*key) for key in drawn] == programs
    assert len(set(programs)) > 55
    assert {perturbation(index).family for _, index in drawn} == set(FAMILIES)


def test_every_perturbation_at_every_position() -> None:
    """The indices of a seed give different programs, with at least one for each position in the correct program."""
    seed = next(seed for seed in range(100) if len(draw(seed).statements) < 12)
    length = len(draw(seed).statements)
    found = list(indices(seed))
    assert len(found) == len(set(found)) > 1000
    positions = {perturbations.place(seed, index).position for index in found}
    assert positions == set(range(length + 1))
    some = found[:: len(found) // 50]
    assert all(program(seed, index).source != draw(seed).source for index in some)


PLAIN = Program(
    seed=0,
    statements=(
        "a = W * m0",
        "n = ~m0",
        "b = W * n",
        "g = F.linear(x, a)",
        "v = F.linear(x, b)",
        "z = F.silu(g)",
        "y = z * v",
    ),
    given="bool",
    n_masks=1,
    tokens=5,
    trained=("x", "W"),
)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("result 0", lambda y: y * (1 + 1e-12), "result 0: relative error"),
        ("gradient of W", lambda grad: grad * 2, "gradient of W: relative error"),
        ("gradient of W", lambda grad: None, "gradient of W: None, must be a tensor"),
        ("x afterwards", lambda x: x + 1, "x afterwards: relative error"),
        ("m0 afterwards", lambda m: ~m, "m0 afterwards: other values"),
        ("result 0", lambda y: y.float(), "result 0: torch.float32"),
        ("result 0", lambda y: y / 0, "result 0: not finite, must be finite"),
        ("result 0, requires a gradient", lambda y: False, "result 0, requires a gradient: False, must be True"),
        ("result 0, strides", lambda strides: strides[::-1], "result 0, strides: (1, 8), must be (8, 1)"),
        (
            "result 0, shares memory with",
            lambda others: ("x afterwards",),
            "result 0, shares memory with: ('x afterwards',), must be ()",
        ),
        ("W afterwards, strides", lambda strides: (1, 8), "W afterwards, strides: (1, 8), must be (8, 1)"),
        ("state of random numbers", lambda state: state.flip(0), "state of random numbers: other values"),
    ],
)
def test_a_difference_is_seen(name: str, changed: Callable[[Any], Any], message: str) -> None:
    found, wanted = (outcomes(PLAIN, PLAIN.function()) for _ in range(2))
    assert difference(found, wanted) is None
    found[name] = changed(found[name])
    assert (difference(found, wanted) or "").startswith(message)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda y: y + 1, "result 0: relative error"),
        (lambda y: y.t().contiguous().t().clone(), "result 0, strides"),
        (lambda y: y[None].unbind()[0], "result 0, refuses writes"),
        (lambda y: y.detach(), "result 0, requires a gradient"),
    ],
)
def test_a_failure_is_seen(changed: Callable[[Any], Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that the pass breaks counts as a failure."""

    def broken(self: Both, gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        function = whole(self, gm, example_inputs)
        return lambda *inputs: tuple(y if self.runs_plain else changed(y) for y in function(*inputs))

    whole = Both.__call__
    monkeypatch.setattr(Both, "__call__", broken)
    with pytest.raises(AssertionError, match=message):
        through_the_pass(PLAIN)


def test_shared_memory_is_seen() -> None:
    """`outcomes` tells if a result is the same tensor as another result, or shares memory with it or with an input."""

    def layout(*results: str) -> dict[str, Any]:
        program = replace(PLAIN, statements=(*PLAIN.statements, "w = W * 1"), extra=results, trained=())
        found = outcomes(program, program.function())
        return {name: found[f"result {len(results)}, {name}"] for name in ("is also", "shares memory with")}

    assert layout("w") == {"is also": (), "shares memory with": ()}
    assert layout("w", "w") == {"is also": ("result 1",), "shares memory with": ()}
    assert layout("w", "w.t()") == {"is also": (), "shares memory with": ("result 1",)}
    assert layout("W[0]") == {"is also": (), "shares memory with": ("W afterwards",)}


def test_what_cannot_be_compared_is_skipped() -> None:
    def outcome(*statements: str) -> str:
        return through_the_pass(replace(PLAIN, statements=(*PLAIN.statements, *statements)))

    assert outcome() == "fused"
    assert outcome("W.mul_(2)") == "skipped: eager raises an error"
    assert outcome("y = y * math.inf - y * math.inf") == "skipped: not finite"
    assert outcome("torch._dynamo.graph_break()") == "skipped: Dynamo raises an error"


@pytest.mark.long
def test_the_script_counts_programs_by_family() -> None:
    number = next(n for n in itertools.count() if through_the_pass(program(*sample(n))) == "fused")
    seed, index = sample(number)
    for options in (f"--seed {seed} --index {index}", f"--programs 1 --start {number}"):
        found = python(RUNNER, "perturbed", *options.split())
        assert re.search(r"all +1 fused, +0 refused, +0 silent, +0 skipped, +0 failed", found)
