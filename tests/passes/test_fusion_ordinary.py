"""Programs with no MGLU layer in them: the pass changes nothing, adds no guard, warns of nothing and never raises.

300 random programs are compared by default. `MGLU_ORDINARY_PROGRAMS=20000` compares as many, and
`MGLU_ORDINARY_START=300` begins after the first 300.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import Capture
from ordinary import Program, assert_equal, draw, outcomes, shortened
from torch._guards import detect_fake_mode
from torch.fx import GraphModule

import mglu_ops
from compile_passes.shapes import example

PROGRAMS = int(os.environ.get("MGLU_ORDINARY_PROGRAMS", "300"))
START = int(os.environ.get("MGLU_ORDINARY_START", "0"))
ATTEMPTS = 100
"""Programs of one number, of which the first is taken that eager torch and Dynamo understand."""
LONGEST_PASS = 2.0
"""Seconds that the pass may take over one of these graphs, of some 30 nodes; it takes about 2 ms."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` inside the block once it has computed for so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"the pass takes more than {seconds} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


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


# --- Programs that once were harmed ---------------------------------------------------------------------------------

HARMED: dict[str, Callable[..., Any]] = {}


def harmed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors that are named as those of `ordinary`, on which the pass once failed."""
    HARMED[function.__name__] = function
    return function


@harmed
def permutation_by_keyword(x):
    return x.permute(dims=(1, 0))


@harmed
def permutation_by_keywords_of_the_function(x):
    return torch.permute(input=x, dims=(1, 0)) @ x


@harmed
def infinite_power(x, W):
    return F.linear(x, W) ** math.inf


@harmed
def negative_infinite_power(x, W):
    return F.linear(x, W).pow(exponent=-math.inf)


@harmed
def power_that_is_no_number(x, W):
    return F.linear(x, W) ** math.nan


@harmed
def huge_power(x, W):
    """A whole exponent is not counted up to."""
    return F.linear(x, W) ** 2**40


@harmed
def infinite_levels_as_integers(x):
    return (torch.sign(x) * math.inf).long()


@harmed
def write_to_a_copy(x):
    """Reading the copy after the write is not spelled otherwise where nothing is fused."""
    copy = x.clone()
    copy.sigmoid_()
    return copy + 1


@harmed
def long_chain(x, W):
    h = F.linear(x, W)
    for _ in range(30):
        h = h + 0.1 * torch.tanh(h)
    return h


DYNAMIC: dict[str, Callable[..., Any]] = {}


def dynamic(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same of shapes that compiling does not know."""
    DYNAMIC[function.__name__] = function
    return function


@dynamic
def masks_that_do_not_fit(x, W, V, M):
    """The number of masks stays unknown where nothing is fused."""
    return torch.einsum("nbd,nbd->bd", F.gelu(x @ (W * M).mT), x @ (V * ~M).mT)


@dynamic
def write_by_a_mask_of_unknown_length(x):
    """`x[x > 0]` has as many elements as x has positive ones, here all."""
    y = x.abs() + 1
    z = y.flatten().clone()
    z[y[y > 0] > 1.5] = 0
    return z


@dynamic
def choice_of_unknown_length(x, W):
    chosen = x[x[:, 0] > 0]
    return torch.where(chosen > 0, chosen, 0) @ W.T, F.linear(chosen, W * (W > 0))


def run_whole(function: Callable[..., Any], *, is_dynamic: bool) -> None:
    program = Program(0, ("v0 = None",), trained=True, dynamic=is_dynamic, data_dependent=is_dynamic)
    names = inspect.signature(function).parameters

    def outcome(called: Callable[..., Any]) -> list[Any]:
        tensors = {name: value for name, value in program.all_inputs().items() if name in names}
        found = called(**tensors)
        results = found if isinstance(found, tuple) else (found,)
        wanted = [tensor for tensor in tensors.values() if tensor.requires_grad]
        recorded = [result.sum() for result in results if result.requires_grad]
        return [*results, *(torch.autograd.grad(sum(recorded), wanted, allow_unused=True) if recorded else ())]

    wanted = outcome(function)
    watched = Watched()
    with program.configuration():
        found = outcome(watched.compile(function, dynamic=is_dynamic or None))
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", HARMED)
def test_a_program_is_no_longer_harmed(name: str) -> None:
    run_whole(HARMED[name], is_dynamic=False)


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_program_of_unknown_shapes_is_no_longer_harmed(name: str) -> None:
    run_whole(DYNAMIC[name], is_dynamic=True)


def test_fuse_takes_the_examples_of_a_graph_inside_a_backend() -> None:
    """`mglu_ops.fuse(gm)` in a custom Dynamo backend needs no inputs: the graph carries them, and their fake mode."""

    def backend(gm: GraphModule, _: Any) -> Callable[..., Any]:
        return mglu_ops.fuse(gm).forward

    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(F.linear, backend=backend, fullgraph=True)(x, weight), F.linear(x, weight))
