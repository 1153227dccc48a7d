"""Programs without an MGLU layer: the pass changes nothing, adds no guard, gives no warning and raises no error.

By default 300 random programs are compared, of which 10 are quick tests. `MGLU_ORDINARY_PROGRAMS=20000` compares
20000, and `MGLU_ORDINARY_START=300` starts after the first 300.
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
from families import sample
from graphs import Capture
from ordinary import Program, assert_equal, draw, outcomes, shortened
from torch._guards import detect_fake_mode
from torch.fx import GraphModule

import mglu_ops
from compile_passes.shapes import example

PROGRAMS = int(os.environ.get("MGLU_ORDINARY_PROGRAMS", "300"))
START = int(os.environ.get("MGLU_ORDINARY_START", "0"))
ATTEMPTS = 100
"""The most programs drawn for one test, which compares the first one that eager torch and Dynamo can run."""
MOST_SECONDS = 2.0
"""The most seconds that the pass may take for one of these graphs, which have about 30 nodes; it takes about 2 ms."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` inside the block after that many seconds of CPU time."""

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
    """A `Capture` that also keeps the original graph, and checks everything that the pass must not change."""

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
        with warnings.catch_warnings(record=True) as warned, limited(MOST_SECONDS):
            warnings.simplefilter("always")
            super().__call__(gm, example_inputs)
        assert not warned, f"the pass warned: {[str(warning.message) for warning in warned]}"
        assert shape_facts(gm) == known, "the pass added a guard"
        assert self.report.fused == [], f"fused, with no MGLU in it: {self.report}"
        assert list(map(str, self.after)) == list(map(str, self.before)), "nothing was fused, but the graph changed"


def shape_facts(gm: GraphModule) -> list[list[str]]:
    """What the shape environment of a graph contains: guards, and sizes that it takes for equal or known."""
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
    """Compare a program that was compiled with fusion to eager; False if it cannot be compared.

    Raises:
        Exception: the pass failed, or the results differ.
    """
    try:
        wanted = outcomes(program, program.function())
    except Exception:
        return False  # autograd forbids a write, or has no such derivative
    watched = Watched(assume_binary=program.assume_binary)
    try:
        with program.configuration():
            compiled = watched.compile(program.function(), dynamic=program.dynamic or None)
            found = outcomes(program, compiled)
    except Exception:
        if watched.error is not None:
            raise watched.error from None
        return False  # Dynamo lacks an operation, or needs the value of an unknown size
    watched.runs_plain = True
    plain = outcomes(program, compiled)
    assert_equal(found, plain)
    try:
        assert_equal(plain, wanted)
    except AssertionError:
        return False  # without the pass, Dynamo's result already differs from eager's
    return True


def fails_alike(error: BaseException) -> Callable[[Program], bool]:
    """A function that tells whether a program fails with the same kind of error."""

    def fails(program: Program) -> bool:
        try:
            check(program)
        except Exception as other:
            return type(other) is type(error) and str(other)[:20] == str(error)[:20]
        return False

    return fails


@pytest.mark.parametrize("number", sample(range(START, START + PROGRAMS), every=30))
def test_random_program_is_not_changed(number: int) -> None:
    for attempt in range(ATTEMPTS):
        program = draw(number * ATTEMPTS + attempt)
        try:
            if check(program):
                return
        except Exception as error:
            raise AssertionError(f"{error!r}\n{shortened(program, fails_alike(error))}") from error
    pytest.fail(f"none of {ATTEMPTS} programs could be compared")


# --- Programs that the pass once broke -------------------------------------------------------------------------------

REGRESSIONS: dict[str, Callable[..., Any]] = {}


def regression(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function on which the pass once failed; its tensors have the names of `ordinary`."""
    REGRESSIONS[function.__name__] = function
    return function


@regression
def permutation_by_keyword(x):
    return x.permute(dims=(1, 0))


@regression
def permutation_by_keywords_of_the_function(x):
    return torch.permute(input=x, dims=(1, 0)) @ x


@regression
def infinite_power(x, W):
    return F.linear(x, W) ** math.inf


@regression
def negative_infinite_power(x, W):
    return F.linear(x, W).pow(exponent=-math.inf)


@regression
def power_that_is_no_number(x, W):
    return F.linear(x, W) ** math.nan


@regression
def huge_power(x, W):
    """The pass must not multiply a formula this many times."""
    return F.linear(x, W) ** 2**40


@regression
def infinite_levels_as_integers(x):
    return (torch.sign(x) * math.inf).long()


@regression
def write_to_a_copy(x):
    """In the functional view, the write makes a new value; if nothing is fused, the graph stays unchanged."""
    copy = x.clone()
    copy.sigmoid_()
    return copy + 1


@regression
def long_chain(x, W):
    h = F.linear(x, W)
    for _ in range(30):
        h = h + 0.1 * torch.tanh(h)
    return h


DYNAMIC_REGRESSIONS: dict[str, Callable[..., Any]] = {}


def dynamic_regression(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function on which the pass once failed with symbolic shapes."""
    DYNAMIC_REGRESSIONS[function.__name__] = function
    return function


@dynamic_regression
def masks_that_do_not_fit(x, W, V, M):
    """The pass adds no guard on the number of masks."""
    return torch.einsum("nbd,nbd->bd", F.gelu(x @ (W * M).mT), x @ (V * ~M).mT)


@dynamic_regression
def write_by_a_mask_of_unknown_length(x):
    """`y[y > 0]` has an unknown number of elements."""
    y = x.abs() + 1
    z = y.flatten().clone()
    z[y[y > 0] > 1.5] = 0
    return z


@dynamic_regression
def choice_of_unknown_length(x, W):
    chosen = x[x[:, 0] > 0]
    return torch.where(chosen > 0, chosen, 0) @ W.T, F.linear(chosen, W * (W > 0))


def assert_unchanged(function: Callable[..., Any], *, is_dynamic: bool) -> None:
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


@pytest.mark.parametrize("name", REGRESSIONS)
def test_regression(name: str) -> None:
    assert_unchanged(REGRESSIONS[name], is_dynamic=False)


@pytest.mark.parametrize("name", DYNAMIC_REGRESSIONS)
def test_regression_with_symbolic_shapes(name: str) -> None:
    assert_unchanged(DYNAMIC_REGRESSIONS[name], is_dynamic=True)


def test_fuse_needs_no_inputs_inside_a_backend() -> None:
    """In a custom Dynamo backend, the graph itself has examples and their fake mode."""

    def backend(gm: GraphModule, _: Any) -> Callable[..., Any]:
        return mglu_ops.fuse(gm).forward

    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(F.linear, backend=backend, fullgraph=True)(x, weight), F.linear(x, weight))
