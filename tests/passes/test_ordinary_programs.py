"""Programs without an MGLU layer: the pass changes nothing, adds no guard, gives no warning and raises no error.

By default 300 random programs are compared, of which 10 are quick tests. `MGLU_ORDINARY_PROGRAMS=20000` compares
20000, and `MGLU_ORDINARY_START=300` starts after the first 300.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import sample
from ordinary import Program, draw
from source_programs import Both, judged, outcomes, shortened
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


class Watched(Both):
    """A backend that checks everything that the pass must not change."""

    def run_pass(self, gm: GraphModule, example_inputs: Any) -> None:
        assert not self.before, "one graph is captured"
        known = shape_facts(gm)
        with limited(MOST_SECONDS):
            super().run_pass(gm, example_inputs)
        assert shape_facts(gm) == known, "the pass added a guard"


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
    """Judge a program; False if it cannot be compared, because autograd, Dynamo or a data-dependent size forbids it."""
    try:
        wanted = outcomes(program, program.function())
    except Exception:
        return False
    outcome = judged(program, wanted, Watched(assume_binary=program.assume_binary))
    assert outcome != "fused", "fused, with no MGLU in it"
    return not outcome.startswith("skipped")


@pytest.mark.parametrize("number", sample(range(START, START + PROGRAMS), every=30))
def test_random_program_is_not_changed(number: int) -> None:
    for attempt in range(ATTEMPTS):
        program = draw(number * ATTEMPTS + attempt)
        try:
            if check(program):
                return
        except Exception as error:
            raise AssertionError(f"{error!r}\n{shortened(program, check)}") from error
    pytest.fail(f"none of {ATTEMPTS} programs could be compared")


# Programs that the pass once broke, by what was wrong.
REGRESSIONS: dict[str, tuple[str, ...]] = {
    "permutation by keyword": ("v0 = x.permute(dims=(1, 0))",),
    "permutation by keywords of the function": ("v0 = torch.permute(input=x, dims=(1, 0)) @ x",),
    "infinite power": ("v0 = F.linear(x, W) ** math.inf",),
    "negative infinite power": ("v0 = F.linear(x, W).pow(exponent=-math.inf)",),
    "power that is no number": ("v0 = F.linear(x, W) ** math.nan",),
    "formula multiplied too many times": ("v0 = F.linear(x, W) ** 2**40",),
    "infinite levels as integers": ("v0 = (torch.sign(x) * math.inf).long()",),
    "write to a copy, and nothing is fused": ("v0 = x.clone()", "v1 = v0.sigmoid_()", "v2 = v0 + 1"),
    "long chain": ("v0 = F.linear(x, W)", *("v0 = v0 + 0.1 * torch.tanh(v0)",) * 30),
}
DYNAMIC_REGRESSIONS: dict[str, tuple[str, ...]] = {
    "guard on the number of masks": ("v0 = torch.einsum('nbd,nbd->bd', F.gelu(x @ (W * M).mT), x @ (V * ~M).mT)",),
    "write by a mask of unknown length": (
        "v0 = x.abs() + 1",
        "v1 = v0.flatten().clone()",
        "v1[v0[v0 > 0] > 1.5] = 0",
    ),
    "choice of unknown length": (
        "v0 = x[x[:, 0] > 0]",
        "v1 = torch.where(v0 > 0, v0, 0) @ W.T",
        "v2 = F.linear(v0, W * (W > 0))",
    ),
}


@pytest.mark.parametrize("name", [*REGRESSIONS, *DYNAMIC_REGRESSIONS])
def test_regression(name: str) -> None:
    is_dynamic = name in DYNAMIC_REGRESSIONS
    statements = (REGRESSIONS | DYNAMIC_REGRESSIONS)[name]
    assert check(Program(0, statements, trained=True, dynamic=is_dynamic, data_dependent=is_dynamic))


def test_fuse_needs_no_inputs_inside_a_backend() -> None:
    """In a custom Dynamo backend, the graph itself has examples and their fake mode."""

    def backend(gm: GraphModule, _: Any) -> Callable[..., Any]:
        return mglu_ops.fuse(gm).forward

    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(F.linear, backend=backend, fullgraph=True)(x, weight), F.linear(x, weight))
