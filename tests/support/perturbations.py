"""Perturbations of a program, and the places (a variable and a position) where they fit.

`PERTURBATIONS` lists them. `places(perturbation, program, scopes)` are all places in a program where a perturbation
fits, and `perturbed(perturbation, program, place)` is the changed program. Positions are numbers of statements: an
insertion at position p comes before statement p.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from perturbation_tables import (
    DRAWS,
    DTYPES,
    GRADIENTS,
    HOOKS,
    METADATA,
    PAIRS,
    USERS,
    VIEWS,
    WRITES,
    WRITES_TO_VIEWS,
    Fits,
    is_array,
    is_recorded,
)
from right_programs import Program
from source_programs import assigned, reads, sides
from torch import Tensor

NEW, OTHER = "new", "other"
"""Names of the variables that perturbations assign."""


@dataclass(frozen=True)
class Perturbation:
    """A change of a program: a text for a variable at a position, and perhaps a second text at a later position."""

    family: str
    how: str
    """How the texts change the program: `insert`, `later`, `return`, `reassign`, `use` or `pair` (see `perturbed`)."""
    text: str
    fits: Fits
    """True for tensors that can be perturbed in this way."""
    second: str = ""
    """The statement at the later position (`later`), or the expression that later uses read (`pair`)."""

    def __str__(self) -> str:
        texts = f"{self.text} | {self.second}" if self.second else self.text
        return f"{self.family}, {self.how}: {texts}"


class Place(NamedTuple):
    """A variable, and one or two positions."""

    variable: str
    position: int
    later: int


Scopes = Sequence[dict[str, Tensor]]
"""The tensors in scope at each position of a program."""


def places(perturbation: Perturbation, program: Program, scopes: Scopes) -> list[Place]:
    """All places of a program where a perturbation fits."""
    length = len(program.statements)
    found = []
    for position, scope in enumerate(scopes):
        for variable in (name for name, tensor in scope.items() if perturbation.fits(tensor)):
            if perturbation.how == "later":
                found += [Place(variable, position, later) for later in range(position, length + 1)]
            elif perturbation.how == "pair":
                found += [Place(variable, position, later) for later in _later_uses(program, variable, position)]
            elif perturbation.how != "use" or (position < length and variable in reads(program.statements[position])):
                found.append(Place(variable, position, position))
    return found


def _later_uses(program: Program, variable: str, position: int) -> Iterator[int]:
    """The positions of later statements that read the same value of the variable as the statement at `position`."""
    if position == len(program.statements) or variable not in reads(program.statements[position]):
        return
    for later in range(position + 1, len(program.statements)):
        if variable in assigned(program.statements[later - 1]):
            return
        if variable in reads(program.statements[later]):
            yield later


def perturbed(perturbation: Perturbation, program: Program, place: Place) -> Program:
    """The program with a perturbation at a place.

    - `insert`: the statement is inserted.
    - `later`: two statements are inserted, each at its position.
    - `return`: the statement is inserted, and the program also returns the variable that it assigns.
    - `reassign`: the expression is assigned to the variable, for all later statements.
    - `use`: the statement at the position reads the expression instead of the variable.
    - `pair`: uses from the first position on read one expression, and uses from the later position on read the other.
    """
    variable, position, later = place
    text, second = (line.format(v=variable, u=NEW) for line in (perturbation.text, perturbation.second))
    lines = list(program.statements)
    if perturbation.how == "use":
        lines[position] = _renamed(lines[position], variable, NEW)
        lines.insert(position, f"{NEW} = {text}")
    elif perturbation.how == "pair":
        for number in range(position, _end_of_value(program, variable, position)):
            lines[number] = _renamed(lines[number], variable, NEW if number < later else OTHER)
        lines.insert(later, f"{OTHER} = {second}")
        lines.insert(position, f"{NEW} = {text}")
    else:
        if perturbation.how == "later":
            lines.insert(later, second)
        lines.insert(position, f"{variable} = {text}" if perturbation.how == "reassign" else text)
    return replace(
        program,
        statements=tuple(lines),
        extra=(*program.extra, NEW) if perturbation.how == "return" else program.extra,
        compiled_autograd=perturbation.family == "hooks under compiled autograd",
    )


def _renamed(statement: str, old: str, new: str) -> str:
    """The statement with another name for a variable that it reads."""
    left, right = sides(statement)
    return left + re.sub(rf"(?<![\w.]){old}\b", new, right)


def _end_of_value(program: Program, variable: str, position: int) -> int:
    """The position after the next statement that assigns the variable."""
    for number in range(position, len(program.statements)):
        if variable in assigned(program.statements[number]):
            return number + 1
    return len(program.statements)


# --- All perturbations -----------------------------------------------------------------------------------------------


def _of(family: str, how: str, table: dict[Fits, tuple[str, ...]]) -> list[Perturbation]:
    return [Perturbation(family, how, text, fits) for fits, texts in table.items() for text in texts]


def _writes_to_views() -> Iterator[Perturbation]:
    writes = [(fits, write) for fits, texts in WRITES_TO_VIEWS.items() for write in texts]
    for view in _of("views", "later", VIEWS):
        for fits, write in writes:
            both = view.fits if fits is is_array else lambda t, a=view.fits, b=fits: a(t) and b(t)
            yield replace(view, text=f"{{u}} = {view.text}", fits=both, second=write)


PERTURBATIONS: tuple[Perturbation, ...] = (
    *_of("writes", "insert", WRITES),
    *_of("metadata", "insert", METADATA),
    *_writes_to_views(),
    *_of("hooks", "insert", {is_recorded: HOOKS}),
    *_of("hooks under compiled autograd", "insert", {is_recorded: HOOKS}),
    *_of("draws", "reassign", DRAWS),
    *_of("draws", "use", DRAWS),
    *_of("dtypes", "reassign", DTYPES),
    *_of("dtypes", "use", DTYPES),
    *_of("gradients", "reassign", GRADIENTS),
    *_of("gradients", "use", GRADIENTS),
    *_of("users", "return", USERS),
    *(Perturbation("pairs", "pair", a, fits, b) for fits, pairs in PAIRS.items() for a, b in pairs),
)
