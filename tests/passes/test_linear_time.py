"""The time of the pass is linear in the depth of a model, even if its masked activations look like masked weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import quick_only_for
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Tracer

from benchmarks.compile_time import masked, time_of_pass
from benchmarks.ordinary_models import MASKED_LAYERS
from compile_passes.prepare import record_examples

SHALLOW, DEEP = 50, 200
MOST_GROWTH = 2.0
"""The largest allowed ratio of the deep model's time per node to the shallow model's."""
ROUNDS = 3


class _InlineTracer(Tracer):
    """Traces into modules of torch.nn and makes buffers nodes, so that the graph has the same calls as Dynamo's."""

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
    """The depths are timed in turn, and the least CPU times compared, so that other load does not fail the test."""
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
