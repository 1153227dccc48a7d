"""Random programs of the parts that MGLU is spelled with, right and subtly wrong: compiled gives what eager gives.

`random_programs` says what must hold. `python tests/passes/run_random_programs.py` runs as many programs as one likes.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import SPECIALS, Case, draw_case, draw_program, run_case
from run_random_programs import run_seed
from spellings import DOUBTFUL_HANDS, KINDS, Program

RUNNER = Path(__file__).with_name("run_random_programs.py")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return draw_case(lambda options: draw(st.sampled_from(list(options))))


@settings(max_examples=200)
@given(case=cases())
def test_any_program_gives_what_eager_gives(case: Case) -> None:
    run_case(case)


@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_program_of_each_kind(kind: str, special: str) -> None:
    """The first of each table, with each of the special values."""
    program = draw_program(lambda options: kind if list(options) == list(KINDS) else options[0])
    assert program.kind == kind
    for trained in ((), ("x", "weight", "masks")):
        assert run_case(Case(program, 2, trained, special)) == "fused"


def test_a_seed_is_one_program() -> None:
    """The script's programs follow from their seeds alone, and differ."""
    drawn = [draw_case(random.Random(seed).choice) for seed in range(200)]
    assert drawn == [draw_case(random.Random(seed).choice) for seed in range(200)]
    assert len(set(drawn)) == 200
    assert {case.program.kind for case in drawn} == set(KINDS)
    assert {case.special for case in drawn} == set(SPECIALS)


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiles to another function is a failure with its case."""
    changed = iter(range(100))
    monkeypatch.setitem(DOUBTFUL_HANDS, "clamp", lambda g: g * (1 + next(changed) % 2))
    program = Program(kind="bool", mask="slice", complement="~m", hand="clamp")
    with pytest.raises(AssertionError, match="relative error"):
        run_case(Case(program))


def test_the_script_counts_what_it_ran() -> None:
    skipped = next(seed for seed in range(1000) if run_seed(seed)[0] == "skipped")
    command = [sys.executable, str(RUNNER), "--programs", "1", "--seed", str(skipped)]
    result = subprocess.run(command, cwd=RUNNER.parents[2], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert f"seeds {skipped} to {skipped}" in result.stdout
    assert "1 programs: 0 fused, 0 refused, 0 silent, 1 skipped, 0 failed" in result.stdout
