"""The time of the fusion pass under pytest-benchmark; `extra_info` holds its share of a compilation."""

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
    model,
    no_autograd_cache,
    time_of_compilation,
    time_of_pass,
)
from benchmarks.ordinary_models import STEPS

LARGEST_SHARE = 0.02


@pytest.fixture(autouse=True, scope="module")
def _inductor_is_loaded() -> None:
    """A process loads Inductor at its first compilation, which would make the share of the first test too small."""
    function, x = chain("tanh", 10).build()
    time_of_compilation(function, x, "inductor")


@pytest.mark.parametrize("n_masks", [1, 4, 16])
def test_pass(benchmark: Any, n_masks: int) -> None:
    layers, x = 32, torch.randn(3, WIDTH)
    stack = model(layers, n_masks)
    with torch.no_grad(), no_autograd_cache():
        graph = captured(stack, x)
        seconds = benchmark(time_of_pass, graph, layers) or time_of_pass(graph, layers)
        share = seconds / time_of_compilation(stack, x, "inductor")
    benchmark.extra_info.update(share_of_naive_compilation=share)
    assert share <= LARGEST_SHARE


ORDINARY = [*(chain(step, 100) for step in STEPS), *(chain(step, 1000) for step in STEPS), UNET, RESNET, llama(20)]


@pytest.mark.parametrize("case", ORDINARY, ids=lambda case: case.name)
def test_models_without_mglu_compile_as_fast_as_before(benchmark: Any, case: Ordinary) -> None:
    function, x = case.build()
    with torch.no_grad(), no_autograd_cache():
        graph = captured(function, x)
        seconds = benchmark(time_of_pass, graph, 0) or time_of_pass(graph, 0)
        share = seconds / time_of_compilation(function, x, "inductor")
    benchmark.extra_info.update(share_of_compilation=share, nodes=len(graph.nodes))
    assert share <= LARGEST_SHARE


@pytest.mark.parametrize("step", STEPS)
def test_the_time_of_the_pass_grows_as_the_graph(step: str) -> None:
    """A node of 5000 costs at most twice what a node of 100 does, by the least of some times."""
    nodes, times = [], []
    for length, repeats in ((100, 20), (5000, 3)):
        function, x = chain(step, length).build()
        with torch.no_grad():
            graph = captured(function, x)
            times.append(min(time_of_pass(graph, 0) for _ in range(repeats)))
        nodes.append(len(graph.nodes))
    short, long = (seconds / count for seconds, count in zip(times, nodes, strict=True))
    assert long <= 2 * short, f"{long * 1e6:.0f} us a node of {nodes[1]}, {short * 1e6:.0f} of {nodes[0]}"
