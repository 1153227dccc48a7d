"""Random programs of the parts that MGLU is spelled with, right and subtly wrong, give what eager gives.

`random_programs` says what must hold. `python tests/passes/run_random_programs.py` runs any number of programs.
"""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from families import family
from hypothesis import given, settings
from hypothesis import strategies as st
from mglu_programs import Program
from random_programs import SPECIALS, Case, draw_case, draw_program, may_be_silent, run_case
from run_random_programs import run_seed
from spellings import DOUBTFUL_FUNCTIONS, KINDS

RUNNER = Path(__file__).with_name("run_random_programs.py")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return draw_case(lambda options: draw(st.sampled_from(list(options))))


@settings(max_examples=10)
@given(case=cases())
def test_any_program_gives_what_eager_gives(case: Case) -> None:
    run_case(case)


@pytest.mark.long
@settings(max_examples=200)
@given(case=cases())
def test_any_of_many_programs_gives_what_eager_gives(case: Case) -> None:
    run_case(case)


@pytest.mark.parametrize(("kind", "special"), family(KINDS, SPECIALS))
def test_plain_program_with_special_values(kind: str, special: str) -> None:
    """A program made of the first part of each table is fused, whatever values its inputs have."""
    program = draw_program(lambda options: kind if list(options) == list(KINDS) else options[0])
    assert program.kind == kind
    for trained in ((), ("x", "weight", "masks")):
        assert run_case(Case(program, 2, trained, special)) == "fused"


def test_a_seed_is_one_program() -> None:
    """The seed alone determines the program, and different seeds give different programs."""
    drawn = [draw_case(random.Random(seed).choice) for seed in range(200)]
    assert drawn == [draw_case(random.Random(seed).choice) for seed in range(200)]
    assert len(set(drawn)) == 200
    assert {case.program.kind for case in drawn} == set(KINDS)
    assert {case.special for case in drawn} == set(SPECIALS)


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose compiled form computes something else is a failure."""
    changed = iter(range(100))
    monkeypatch.setitem(DOUBTFUL_FUNCTIONS, "clamp", lambda g: g * (1 + next(changed) % 2))
    program = Program(kind="bool", mask="slice", complement="~m", hand_written="clamp")
    with pytest.raises(AssertionError, match="relative error"):
        run_case(Case(program))


@pytest.mark.parametrize(
    "complement",
    [
        "compared mask",
        "m < full_like(0.5)",
        "full_like(1.5) - m",
        "-m of uint8",
        "m - 1 of uint8",
        "ceiling by floor",
        "0 ** m",
    ],
)
def test_only_a_program_with_one_masked_product_may_be_silent(complement: str) -> None:
    """`wrong` makes the value's factor a complement of the mask; `swapped` makes the gate's factor one too.

    The operator does not have the activation, so no layer is found, and the report mentions a program only if one x is
    multiplied by two masked forms of one weight.
    """
    program = Program(kind="bool", mask="slice", complement="~m", hand_written="dropout of all", wrong=complement)
    once = Case(replace(program, swapped=True))
    assert may_be_silent(once)
    assert run_case(once) == "silent"
    for twice in (Case(program), Case(program, n_masks=2), Case(replace(program, swapped=True), n_masks=2)):
        assert not may_be_silent(twice)
        assert run_case(twice) == "refused"


@pytest.mark.long
def test_the_script_counts_what_it_ran() -> None:
    skipped = next(seed for seed in range(1000) if run_seed(seed)[0] == "skipped")
    command = [sys.executable, str(RUNNER), "--programs", "1", "--seed", str(skipped)]
    result = subprocess.run(command, cwd=RUNNER.parents[2], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert f"seeds {skipped} to {skipped}" in result.stdout
    assert "1 programs: 0 fused, 0 refused, 0 silent, 1 skipped, 0 failed" in result.stdout
