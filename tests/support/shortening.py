"""Shortens a perturbed program that fails to the part that matters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from perturbed_programs import through_the_pass
from right_programs import Program, assigned, reads, sides


def shortened(program: Program, judge: Callable[[Program], str] = through_the_pass) -> Program:
    """The shortest program found that fails in the same way: without statements and options that do not matter."""
    reason = kind_of_failure(program, judge)
    while True:
        shorter = (other for other in _simpler(program) if kind_of_failure(other, judge) == reason)
        if (found := next(shorter, None)) is None:
            return program
        program = found


def kind_of_failure(program: Program, judge: Callable[[Program], str] = through_the_pass) -> str | None:
    """The message of a failure without names and numbers; None if the program does not fail."""
    try:
        judge(program)
    except AssertionError as error:
        line = str(error).splitlines()[0]  # pytest adds more
        return re.sub(r"^(result|gradient|state|\w+ afterwards)?[^:]*:", r"\1:", line).rstrip("0123456789.e+-")
    except Exception as error:
        return type(error).__name__
    return None


def _simpler(program: Program) -> Iterator[Program]:
    for name in program.trained:
        yield replace(program, trained=tuple(other for other in program.trained if other != name))
    for changed in ({"shared": ""}, {"no_grad": False}, {"compiled_autograd": False}, {"extra": ()}):
        if any(getattr(program, name) != value for name, value in changed.items()):
            yield replace(program, **changed)
    lines = program.statements
    for i in reversed(range(len(lines))):
        yield replace(program, statements=(*lines[:i], *lines[i + 1 :]))
    for i in reversed(range(len(lines))):
        yield from (replace(program, statements=other) for other in _without(lines, i))


def _without(lines: tuple[str, ...], i: int) -> Iterator[tuple[str, ...]]:
    """The statements without statement i, where each variable that it reads takes the place of the one it assigns."""
    if len(targets := assigned(lines[i])) != 1:
        return
    for name in dict.fromkeys(reads(lines[i])):
        if targets == ["y"]:
            if sides(lines[i])[1] != name:
                yield (*lines[:i], f"y = {name}", *lines[i + 1 :])
        else:
            yield (*lines[:i], *(re.sub(rf"\b{targets[0]}\b", name, line) for line in lines[i + 1 :]))
