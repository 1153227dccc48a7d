"""Times one token with pytest-benchmark: `python -m pytest benchmarks --benchmark-only`.

A round is one replay of a graph over more than 1 GB of layers. `extra_info` holds the microseconds per layer, and the
fraction of the read ceiling, which the harness measures in the same process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.decode import Problem, Sweep, bench, our_variants
from benchmarks.harness import capture
from benchmarks.layers import Layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]


@pytest.mark.parametrize("problem", Sweep(masks=(1, 4, 8, 16)).problems(), ids=str)
def test_one_token(benchmark: Any, problem: Problem) -> None:
    (ours,) = (row for row in bench(problem, rounds=10) if row.extra.get("chosen"))
    assert not ours.is_wrong, ours
    assert ours.fraction_of_ceiling > 0.7, ours
    benchmark.extra_info.update(microseconds=ours.microseconds, fraction_of_ceiling=ours.fraction_of_ceiling)

    (variant,) = our_variants(Layers(*problem.shape, problem.n_masks, 1, problem.dtype), ())
    graph = capture(variant).graph

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    benchmark(replay)
