"""The decode benchmark under pytest-benchmark: `python -m pytest benchmarks --benchmark-only`.

One round is one replay of a graph over more than 1 GB of layers; `extra_info` holds microseconds a layer and the
fraction of the read ceiling, measured by the harness in the same process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.decode import SHAPES, Layers, bench

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n_masks", [1, 4, 8, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_token(benchmark: Any, shape: tuple[int, int], n_masks: int) -> None:
    from mglu_ops.backends import cuda

    rows = bench(*shape, n_masks, 1, torch.float16, (), rounds=10)
    ours = next(row for row in rows if row.variant == "mglu cuda")
    assert ours.microseconds == ours.microseconds, f"wrong result, error {ours.error}"
    benchmark.extra_info.update(microseconds=ours.microseconds, fraction_of_ceiling=ours.fraction_of_ceiling)

    layers = Layers(*shape, n_masks, 1, torch.float16)
    cuda.forward(layers.x, layers.weights[0], layers.packed[0], "silu", None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight, packed in zip(layers.weights, layers.packed, strict=True):
            cuda.forward(layers.x, weight, packed, "silu", None)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    benchmark(replay)
