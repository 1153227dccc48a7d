"""Random programs of the parts that MGLU is spelled with, right and subtly wrong, give what eager gives.

`random_programs` says what must hold. `HYPOTHESIS_PROFILE=explore` tries thousands of programs.
"""

from __future__ import annotations

import pytest
from families import family
from hypothesis import given, settings
from mglu_programs import Program
from random_programs import SPECIALS, Case, cases, run_case
from spellings import COMPLEMENTS_OF, DOUBTFUL_FUNCTIONS, KINDS, MASKS
from strategies import examples


@settings(max_examples=10)
@given(case=cases())
def test_any_program_gives_what_eager_gives(case: Case) -> None:
    run_case(case)


@pytest.mark.long
@examples(200)
@given(case=cases())
def test_any_of_many_programs_gives_what_eager_gives(case: Case) -> None:
    run_case(case)


@pytest.mark.parametrize(("kind", "special"), family(KINDS, SPECIALS))
def test_plain_program_with_special_values(kind: str, special: str) -> None:
    """A program made of the first part of each table is fused, whatever values its inputs have."""
    program = Program(mask=next(iter(MASKS[kind])), complement=next(iter(COMPLEMENTS_OF[kind])), kind=kind)
    for trained in ((), ("x", "weight", "masks")):
        assert run_case(Case(program, 2, trained, special)) == "fused"


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose compiled form computes something else is a failure."""
    changed = iter(range(100))
    monkeypatch.setitem(DOUBTFUL_FUNCTIONS, "clamp", lambda g: g * (1 + next(changed) % 2))
    program = Program(kind="bool", mask="slice", complement="~m", hand_written="clamp")
    with pytest.raises(AssertionError, match="relative error"):
        run_case(Case(program))
