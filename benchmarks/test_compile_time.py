"""The time of the fusion pass under pytest-benchmark; `extra_info` holds its share of a compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.compile_time import WIDTH, captured, model, time_of_compilation, time_of_pass


@pytest.mark.parametrize("n_masks", [1, 4, 16])
def test_pass(benchmark: Any, n_masks: int) -> None:
    layers, x = 32, torch.randn(3, WIDTH)
    stack = model(layers, n_masks)
    with torch.no_grad():
        graph = captured(stack, x)
        seconds = benchmark(time_of_pass, graph, layers) or time_of_pass(graph, layers)
        share = seconds / time_of_compilation(stack, x, "inductor")
    benchmark.extra_info.update(share_of_naive_compilation=share)
    assert share < 0.05
