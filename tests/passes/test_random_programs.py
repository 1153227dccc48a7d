"""Random programs of the parts that MGLU is spelled with, right and subtly wrong, give what eager gives.

`random_programs` says what must hold. `HYPOTHESIS_PROFILE=explore` tries thousands of programs.
"""

from __future__ import annotations

import pytest
from families import family
from hypothesis import given, settings
from random_programs import SPECIALS, Program, programs, run
from spellings import COMPLEMENTS_OF, DOUBTFUL_FUNCTIONS, KINDS, MASKS
from strategies import examples


@settings(max_examples=10)
@given(program=programs())
def test_any_program_gives_what_eager_gives(program: Program) -> None:
    run(program)


@pytest.mark.long
@examples(200)
@given(program=programs())
def test_any_of_many_programs_gives_what_eager_gives(program: Program) -> None:
    run(program)


@pytest.mark.parametrize(("kind", "special"), family(KINDS, SPECIALS))
def test_plain_program_with_special_values(kind: str, special: str) -> None:
    """A program made of the first part of each table is fused, whatever values its inputs have."""
    parts = {"mask": next(iter(MASKS[kind])), "complement": next(iter(COMPLEMENTS_OF[kind])), "kind": kind}
    for trained in ((), ("x", "weight", "masks")):
        assert run(Program(**parts, n_masks=2, with_gradient=trained, special=special)) == "fused"


@pytest.mark.parametrize("parts", [{"value_first": True}, {"swapped": True}], ids=str)
def test_order_of_gate_and_value(parts: dict[str, bool]) -> None:
    assert run(Program(**parts, n_masks=2, with_gradient=("x", "weight", "masks"))) == "fused"


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose compiled form computes something else is a failure."""
    changed = iter(range(100))
    monkeypatch.setitem(DOUBTFUL_FUNCTIONS, "clamp", lambda g: g * (1 + next(changed) % 2))
    with pytest.raises(AssertionError, match="relative error"):
        run(Program(kind="bool", mask="slice", complement="~m", hand_written="clamp"))
