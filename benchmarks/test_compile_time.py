"""Tests with pytest-benchmark that limit the time of the fusion pass; `extra_info` has its share of a compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.compile_time import (
    RESNET,
    UNET,
    WIDTH,
    Ordinary,
    captured,
    chain,
    llama,
    masked,
    model,
    no_autograd_cache,
    time_of_compilation,
    time_of_pass,
)
from benchmarks.ordinary_models import MASKED_LAYERS, STEPS

MAX_SHARE_OF_COMPILATION = 0.02


@pytest.fixture(autouse=True, scope="module")
def _inductor_is_loaded() -> None:
    """Load Inductor first: it would lengthen the first test's compilation, and the pass's share would look smaller."""
    function, x = chain("tanh", 10).build()
    time_of_compilation(function, x, "inductor")


@pytest.mark.parametrize("n_masks", [1, 4, 16])
def test_pass_on_mglu_layers(benchmark: Any, n_masks: int) -> None:
    layers, x = 32, torch.randn(3, WIDTH)
    stack = model(layers, n_masks)
    with torch.no_grad(), no_autograd_cache():
        graph = captured(stack, x)
        seconds = benchmark(time_of_pass, graph, layers) or time_of_pass(graph, layers)
        share = seconds / time_of_compilation(stack, x, "inductor")
    benchmark.extra_info.update(share_of_naive_compilation=share)
    assert share <= MAX_SHARE_OF_COMPILATION


ORDINARY = [
    *(chain(step, 100) for step in STEPS),
    *(chain(step, 1000) for step in STEPS),
    *(UNET, RESNET, llama(20)),
    *(masked(kind, 20) for kind in MASKED_LAYERS),
]


@pytest.mark.parametrize("case", ORDINARY, ids=lambda case: case.name)
def test_pass_is_a_small_share_of_compiling_models_without_mglu(benchmark: Any, case: Ordinary) -> None:
    function, x = case.build()
    with torch.no_grad(), no_autograd_cache():
        graph = captured(function, x)
        seconds = benchmark(time_of_pass, graph, 0, case.may_report) or time_of_pass(graph, 0, case.may_report)
        share = seconds / time_of_compilation(function, x, "inductor")
    benchmark.extra_info.update(share_of_compilation=share, nodes=len(graph.nodes))
    assert share <= MAX_SHARE_OF_COMPILATION


@pytest.mark.parametrize("step", STEPS)
def test_time_of_the_pass_is_linear_in_the_graph(step: str) -> None:
    """A node in a chain of 5000 takes at most twice as long as a node in a chain of 100, by the fastest run of each."""
    nodes, times = [], []
    for length, repeats in ((100, 20), (5000, 3)):
        function, x = chain(step, length).build()
        with torch.no_grad():
            graph = captured(function, x)
            times.append(min(time_of_pass(graph, 0) for _ in range(repeats)))
        nodes.append(len(graph.nodes))
    short, long = (seconds / count for seconds, count in zip(times, nodes, strict=True))
    found = ", ".join(
        f"{time * 1e6:.0f} us per node of {count}" for time, count in ((short, nodes[0]), (long, nodes[1]))
    )
    assert long <= 2 * short, found
