"""Programs without an MGLU layer: the pass changes nothing, adds no guard, gives no warning and raises no error.

By default there are 300 random programs, of which 10 are quick tests. `MGLU_ORDINARY_PROGRAMS=20000` runs 20000, and
`MGLU_ORDINARY_START=300` skips the first 300.
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
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Tracer

import mglu_ops
from benchmarks.compile_time import MASKED_LAYERS, masked, time_of_pass
from compile_passes.prepare import record_examples
from compile_passes.shapes import example
from tests.support.families import quick_only_for, sample
from tests.support.programs.graphs import known_of_shapes
from tests.support.programs.ordinary import Program, draw
from tests.support.programs.source_programs import Both, judged, outcomes

PROGRAMS = int(os.environ.get("MGLU_ORDINARY_PROGRAMS", "300"))
START = int(os.environ.get("MGLU_ORDINARY_START", "0"))
ATTEMPTS = 100
"""The most programs drawn for one test, which uses the first one that eager torch and Dynamo can run."""
MOST_SECONDS = 2.0
"""The most seconds that the pass may take for a graph of about 30 nodes. It takes about 2 ms."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` inside a `with` block that uses more than this much CPU time."""

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
    """A backend that fails if the pass changes anything."""

    def run_pass(self, gm: GraphModule, example_inputs: Any) -> None:
        assert not self.before, "one graph is captured"
        mode = detect_fake_mode([example(node) for node in gm.graph.find_nodes(op="placeholder")])
        known = known_of_shapes(mode)
        with limited(MOST_SECONDS):
            super().run_pass(gm, example_inputs)
        assert known_of_shapes(mode) == known, "the pass added a guard"


def check(program: Program) -> str:
    """The outcome of a program: refused, silent or skipped (if it cannot be compared with eager). Fusing it fails."""
    try:
        wanted = outcomes(program, program.function())
    except Exception:
        return "skipped: eager raises an error"
    outcome = judged(program, wanted, Watched(assume_binary=program.assume_binary))
    assert outcome != "fused", "fused, with no MGLU in it"
    return outcome


@pytest.mark.parametrize("number", sample(range(START, START + PROGRAMS), every=30))
def test_random_program_is_not_changed(number: int) -> None:
    for attempt in range(ATTEMPTS):
        program = draw(number * ATTEMPTS + attempt)
        try:
            if not check(program).startswith("skipped"):
                return
        except Exception as error:
            raise AssertionError(f"{error!r}\n{program}") from error
    pytest.fail(f"none of {ATTEMPTS} programs could be compared")


# Common layers. All sizes are equal, so that no shape reveals a transpose.
COMMON: dict[str, tuple[str, ...]] = {
    "SwiGLU": ("v0 = F.silu(F.linear(x, W, b)) * F.linear(x, V)",),
    "gating": ("v0 = torch.sigmoid(F.linear(x, W, b))", "v1 = (1 - v0) * x + v0 * torch.tanh(F.linear(x, V, b))"),
    "LoRA": (
        "v0 = F.silu(F.linear(x, W + V[:, :2] @ L[:2]))",
        "v1 = v0 * (F.linear(x, W) + F.linear(F.linear(x, L[:2]), V[:, :2]))",
    ),
    "scaled by row": ("v0 = F.silu(F.linear(x, W * b[:, None])) * F.linear(x, V * L[:, :1])",),
    "scaled by element": ("v0 = F.silu(F.linear(x, W * L)) * F.linear(x, V * S[0])",),
    "pruned": ("v0 = F.silu(F.linear(x, W * m)) * F.linear(x, V * M[0])",),
    **{
        f"one mask, {kind}": (f"v0 = {mask}", "v1 = F.silu(F.linear(x, W * v0)) * F.linear(x, V * v0)")
        for kind, mask in {
            "bool": "m.tril()",
            "float": "torch.tril(f)",
            "DropConnect": "torch.rand_like(W) < 2",  # always True, so that eager and compiled results agree
            "dropout": "F.dropout(torch.ones_like(W), 0.0)",
        }.items()
    },
    "one mask, sigmoid": ("v0 = F.silu(F.linear(x, W * f)) * torch.sigmoid(F.linear(x, V * f))",),
    "experts": (
        "v0 = F.linear(x, L).softmax(-1)",
        "v1 = sum(v0[..., i : i + 1] * (F.silu(F.linear(x, S[i])) * F.linear(x, S[i - 1])) for i in range(3))",
    ),
    "attention": (
        "v0, v1, v2 = F.linear(x, S.flatten(0, 1)).chunk(3, -1)",
        "v3 = (v0 @ v1.t()).masked_fill(~m, float('-inf')) + torch.where(m, 0.0, float('-inf'))",
        "v4 = ((v3 + (1.0 - m.float()) * -1e4).softmax(-1) * (1 - 0 * m.float())) @ v2",
    ),
    "batch norm": ("v0 = F.dropout(F.relu(F.batch_norm(F.linear(x, W), None, None, b, b, True), inplace=True), 0.0)",),
    "LSTM": ("v0, v1 = torch.lstm_cell(x, (x, x), torch.cat([W, V, L, W]), torch.cat([V, L, W, V]))",),
    "GRU": ("v0 = torch.gru_cell(x, x, S.flatten(0, 1), torch.cat([W, V, L]))",),
}


WEIGHTS_ARE_TRAINED = 17
"""A seed with which all weights require a gradient."""


@pytest.mark.parametrize("name", COMMON)
def test_common_layers_are_not_reported(name: str) -> None:
    program = Program(WEIGHTS_ARE_TRAINED, COMMON[name], dtype=torch.float64, square=True, trained=True)
    assert check(program) == "silent"


# Programs on which the pass once failed.
REGRESSIONS: dict[str, tuple[str, ...]] = {
    "permutation by keyword": ("v0 = x.permute(dims=(1, 0))",),
    "permutation by keywords of the function": ("v0 = torch.permute(input=x, dims=(1, 0)) @ x",),
    "infinite power": ("v0 = F.linear(x, W) ** math.inf",),
    "negative infinite power": ("v0 = F.linear(x, W).pow(exponent=-math.inf)",),
    "power that is no number": ("v0 = F.linear(x, W) ** math.nan",),
    "formula multiplied too many times": ("v0 = F.linear(x, W) ** 2**40",),
    "infinite levels as integers": ("v0 = (torch.sign(x) * math.inf).long()",),
    "write to a copy, and nothing is fused": ("v0 = x.clone()", "v1 = v0.sigmoid_()", "v2 = v0 + 1"),
    "keywords and numbers that are not finite": (
        "v0 = torch.clone(input=x) + torch.neg(input=x) + torch.detach(input=x)",
        "v1 = torch.transpose(input=W, dim0=0, dim1=1).mT + torch.unbind(input=S)[0]",
        "v2 = torch.where(L > 0, 0.0, -torch.inf) + (1 - (L > 0).float()) * -torch.inf",
    ),
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
    outcome = check(Program(0, statements, trained=True, dynamic=is_dynamic, data_dependent=is_dynamic))
    assert not outcome.startswith("skipped")


def test_fuse_needs_no_inputs_inside_a_backend() -> None:
    """In a custom Dynamo backend, the graph itself has example values and their fake mode."""

    def backend(gm: GraphModule, _: Any) -> Callable[..., Any]:
        return mglu_ops.fuse(gm).forward

    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(F.linear, backend=backend, fullgraph=True)(x, weight), F.linear(x, weight))


SHALLOW, DEEP = 50, 200
MOST_GROWTH = 2.0
"""The largest allowed ratio of the deep model's time per node to the shallow model's."""
ROUNDS = 3


class _InlineTracer(Tracer):
    """Traces into modules of torch.nn and gives each buffer a node, so the graph has the same calls as Dynamo's."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, *_: Any) -> bool:
        return False


def traced(model: nn.Module, x: Tensor) -> Graph:
    """The graph of a model, by symbolic tracing, which is much faster than Dynamo."""
    module = GraphModule(model, _InlineTracer().trace(model))
    record_examples(module, [x])
    return module.graph


@pytest.mark.parametrize("kind", quick_only_for(["masked tanh"], MASKED_LAYERS))
def test_time_per_node_does_not_grow_with_the_depth(kind: str) -> None:
    """Both depths are timed in turn, and the least CPU times are compared, so that other load cannot fail the test."""
    cases = [masked(kind, layers) for layers in (SHALLOW, DEEP)]
    with torch.no_grad():
        graphs = [traced(*case.build()) for case in cases]
        rounds = [
            [
                time_of_pass(graph, 0, case.may_report) / len(graph.nodes)
                for graph, case in zip(graphs, cases, strict=True)
            ]
            for _ in range(ROUNDS)
        ]
    shallow, deep = (1e6 * min(times) for times in zip(*rounds, strict=True))
    assert deep <= MOST_GROWTH * shallow, f"{shallow:.0f} us per node of {SHALLOW} layers, {deep:.0f} us of {DEEP}"
