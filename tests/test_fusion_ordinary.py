"""Programs with no MGLU layer in them: the pass changes nothing, adds no guard, warns of nothing and never raises.

300 random programs are compared by default. `MGLU_ORDINARY_PROGRAMS=20000` compares as many, and
`MGLU_ORDINARY_START=300` begins after the first 300.
"""

from __future__ import annotations

import copy
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from graphs import Capture
from ordinary import Program, assert_equal, draw, outcomes, shortened
from torch._guards import detect_fake_mode
from torch.fx import GraphModule

from compile_passes.symbols import example

PROGRAMS = int(os.environ.get("MGLU_ORDINARY_PROGRAMS", "300"))
START = int(os.environ.get("MGLU_ORDINARY_START", "0"))
ATTEMPTS = 100
"""Programs of one number, of which the first is taken that eager torch and Dynamo understand."""
LONGEST_PASS = 2.0
"""Seconds that the pass may take over one of these graphs, of some 30 nodes; it takes about 2 ms."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` inside the block once it has run for so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"the pass takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Watched(Capture):
    """A `Capture` that also keeps the graph as it was, and looks at all that the pass must leave alone."""

    plain: GraphModule | None = None
    error: BaseException | None = None
    runs_plain = False

    def __call__(self, gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        assert self.plain is None, "one graph is captured"
        self.plain = copy.deepcopy(gm)
        try:
            self._pass(gm, example_inputs)
        except BaseException as error:
            self.error = error
            raise
        plain = self.plain
        return lambda *inputs: (plain if self.runs_plain else gm).forward(*inputs)

    def _pass(self, gm: GraphModule, example_inputs: Any) -> None:
        known = shape_facts(gm)
        with warnings.catch_warnings(record=True) as warned, limited(LONGEST_PASS):
            warnings.simplefilter("always")
            super().__call__(gm, example_inputs)
        assert not warned, f"the pass warned: {[str(warning.message) for warning in warned]}"
        assert shape_facts(gm) == known, "the pass added a guard"
        assert self.report.fused == [], f"fused, with no MGLU in it: {self.report}"
        assert list(map(str, self.after)) == list(map(str, self.before)), "nothing was fused, but the graph changed"


def shape_facts(gm: GraphModule) -> list[list[str]]:
    """What the shape environment of a graph was told so far: guards, and sizes that it takes for equal or for known."""
    mode = detect_fake_mode([example(node) for node in gm.graph.find_nodes(op="placeholder")])
    if mode is None or mode.shape_env is None:
        return []
    env = mode.shape_env
    return [
        [str(guard.expr) for guard in env.guards],
        sorted(f"{symbol} = {value}" for symbol, value in env.replacements.items()),
        sorted(
            f"{symbol}: {[str(a.expr) for a in asserts]}" for symbol, asserts in env.deferred_runtime_asserts.items()
        ),
        sorted(f"{symbol} in {bounds}" for symbol, bounds in env.var_to_range.items()),
    ]


def check(program: Program) -> bool:
    """Compare a program, compiled with fusion on, with eager; False where there is nothing to compare.

    Raises:
        Exception: what went wrong.
    """
    try:
        wanted = outcomes(program, program.function())
    except Exception:
        return False  # autograd does not let a write happen, or has no such derivative
    watched = Watched(assume_binary=program.assume_binary)
    try:
        with program.configuration():
            compiled = watched.compile(program.function(), dynamic=program.dynamic or None)
            found = outcomes(program, compiled)
    except Exception:
        if watched.error is not None:
            raise watched.error from None
        return False  # Dynamo does not know an operation, or asks for the value of an unknown size
    watched.runs_plain = True
    plain = outcomes(program, compiled)
    assert_equal(found, plain)
    try:
        assert_equal(plain, wanted)
    except AssertionError:
        return False  # Dynamo, without the pass, computes something else than eager
    return True


def fails_alike(error: BaseException) -> Callable[[Program], bool]:
    """Whether a program fails with an error of this kind."""

    def fails(program: Program) -> bool:
        try:
            check(program)
        except Exception as other:
            return type(other) is type(error) and str(other)[:20] == str(error)[:20]
        return False

    return fails


@pytest.mark.parametrize("number", range(START, START + PROGRAMS))
def test_a_random_program_is_left_as_it_is(number: int) -> None:
    for attempt in range(ATTEMPTS):
        program = draw(number * ATTEMPTS + attempt)
        try:
            if check(program):
                return
        except Exception as error:
            raise AssertionError(f"{error!r}\n{shortened(program, fails_alike(error))}") from error
    pytest.fail(f"none of {ATTEMPTS} programs could be compared")
