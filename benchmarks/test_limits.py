"""Tests of limits on the time of the fusion pass and, with pytest-benchmark, on the time of one token.

`python -m pytest benchmarks` runs them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.compile_time import (
    MASKED_LAYERS,
    RESNET,
    STEPS,
    UNET,
    Case,
    captured,
    chain,
    llama,
    masked,
    mglu_layers,
    no_autograd_cache,
    time_of_compilation,
    time_of_pass,
)
from benchmarks.decode import Problem, Sweep, bench, our_variants
from benchmarks.layers import Layers
from benchmarks.timing import capture

MAX_SHARE_OF_COMPILATION = 0.02
CASES = [
    *(mglu_layers(n_masks) for n_masks in (1, 4, 16)),
    *(chain(step, nodes) for nodes in (100, 1000) for step in STEPS),
    *(UNET, RESNET, llama(20)),
    *(masked(kind, 20) for kind in MASKED_LAYERS),
]


@pytest.fixture(autouse=True, scope="module")
def _inductor_is_loaded() -> None:
    """Load Inductor before the tests, so that the first test does not count loading as a part of the compilation."""
    function, x = chain("tanh", 10).build()
    time_of_compilation(function, x, "inductor")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.n_masks or ''}")
def test_pass_is_a_small_share_of_the_compilation_without_it(case: Case) -> None:
    function, x = case.build()
    with torch.no_grad(), no_autograd_cache():
        graph = captured(function, x)
        seconds = min(time_of_pass(graph, case.layers, case.may_report) for _ in range(5))
        assert seconds <= MAX_SHARE_OF_COMPILATION * time_of_compilation(function, x, "inductor")


@pytest.mark.parametrize("step", STEPS)
def test_time_of_the_pass_is_linear_in_the_graph(step: str) -> None:
    """Per node, the pass takes at most twice as long on 5000 nodes as on 100. The fastest runs count."""
    times = []
    for length, repeats in ((100, 20), (5000, 3)):
        function, x = chain(step, length).build()
        with torch.no_grad():
            graph = captured(function, x)
            times.append(min(time_of_pass(graph, 0) for _ in range(repeats)) / len(graph.nodes))
    short, long = times
    assert long <= 2 * short, f"{1e6 * short:.0f} us a node of the short chain, {1e6 * long:.0f} of the long one"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none")
@pytest.mark.parametrize("problem", Sweep(masks=(1, 4, 8, 16)).problems(), ids=str)
def test_one_token(benchmark: Any, problem: Problem) -> None:
    """The chosen kernel reaches 70% of the read ceiling. Each round replays one graph, whose layers exceed 1 GB.

    `extra_info` holds the microseconds per layer, and the fraction of the read ceiling in the same process.
    """
    (ours,) = (row for row in bench(problem, rounds=10) if row.extra.get("chosen"))
    assert not ours.is_wrong, ours
    assert ours.fraction_of_ceiling > 0.7, ours
    benchmark.extra_info.update(microseconds=ours.microseconds, fraction_of_ceiling=ours.fraction_of_ceiling)

    (variant,) = our_variants(Layers(*problem.shape, problem.masks[0], 1, problem.dtype), ())
    graph = capture(variant).graph

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    benchmark(replay)
