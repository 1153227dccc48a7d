"""Graphs with several layers, and the graph that the pass leaves."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan  # noqa: F401 (a source calls it)
from torch.fx import Graph
from torch.nn.attention.flex_attention import flex_attention  # noqa: F401 (a source calls it)

from compile_passes.fusion import fuse_graph
from compile_passes.report import FusionReport
from mglu_ops.nn import NaiveMGLU
from tests.support.budgets import BUDGET
from tests.support.programs.graphs import Capture, assert_same, compare, masked_products, model_results
from tests.support.programs.lookalikes import layer_tensors
from tests.support.programs.spellings import from_source, gated, straight_through

SAME = 10 * BUDGET[torch.float64]


class Block(nn.Module):
    def __init__(self, features: int, n_masks: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features, dtype=torch.float64)
        self.mlp = NaiveMGLU(features, features, n_masks=n_masks, dtype=torch.float64)
        self.out = nn.Linear(features, features, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.mlp(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, depth: int = 3, *, checkpoint: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, i % 3 + 1) for i in range(depth))
        self.checkpoint = checkpoint

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
        return x


@pytest.mark.parametrize("checkpoint", [False, True])
def test_layers_of_one_graph(checkpoint: bool) -> None:
    torch.manual_seed(3)
    model, x = Stack(checkpoint=checkpoint), torch.randn(2, 4, 8, dtype=torch.float64)
    capture = Capture(strict=True)
    assert_same(model_results(model, x, capture.compile(model)), model_results(model, x), SAME)
    assert capture.calls["mglu.forward_ste"] == 3
    assert masked_products(capture.calls) == 3, "the output projections"
    assert [site.n_masks for site in capture.report.fused] == [1, 2, 3]


EXPERTS = "e = stack([w, w.flip(0), 2 * w]); sum(x[:, i, None] * {} for i in range(3))"

# Programs of x, w and logits l, by the operators that they become and the layers that are refused.
GRAPHS: dict[str, tuple[str, ...]] = {
    # Each expert is one slice of the weights, with its own slice of the masks or with a mask that all experts share.
    "forward_ste forward_ste forward_ste": (
        EXPERTS.format("gated(x, e[i], ste(l)[i])"),
        EXPERTS.format("gated(x, e[i], ste(l)[0])"),
    ),
    "forward forward forward": (EXPERTS.format("gated(x, e[i], (l > 0)[i], ~(l > 0)[i])"),),
    # Each layer reads the result of the layer before. The last layer also computes its mask from this result.
    "forward_ste forward_ste forward": (
        "y = gated(x, w, ste(l[0])); y = gated(y, w, ste(l[1])); m = (y.t() @ y) > 0; gated(y, w, m, ~m)",
    ),
    # Three layers share a weight, which is also used elsewhere.
    "forward_ste forward_ste refused": (
        "m = ste(l[1]); y = F.relu(linear(x, w * m)) * linear(x, w * (1 - m.detach())); "
        "gated(x, w, ste(l[0])) + gated(x + 1, w, ste(l[2])) + linear(x, w) + 0 * y.detach()",
    ),
    # Layers inside and outside of the body of a higher-order operator, in inference
    "forward": (
        "torch.utils.checkpoint.checkpoint(lambda x, w, l: gated(x, w, ste(l[0])), x, w, l, use_reentrant=True)",
        "y = gated(x, w, ste(l[0]))[None, None]; flex_attention(y, y, y)",
        "scan(lambda total, token: scanned(total, gated(token, w, ste(l[0]))), torch.zeros_like(w[0]), x)[1]",
    ),
}


def scanned(total: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return total + y, y.clone()


@pytest.mark.parametrize(("operators", "source"), [(key, s) for key, sources in GRAPHS.items() for s in sources])
def test_layers_of_one_graph_of_functions(operators: str, source: str) -> None:
    def make() -> dict[str, Tensor]:
        named = dict(zip("xwl", layer_tensors().values(), strict=True))
        return {name: t.detach() for name, t in named.items()} if operators == "forward" else named

    report = compare(from_source("x, w, l", source, globals()), make, SAME).report
    assert " ".join([*(site.operator for site in report.fused), *["refused"] * len(report.missed)]) == operators


# --- The report, and the graph after the pass ------------------------------------------------------------------------


def test_report_names_modules_and_lines() -> None:
    model = Stack(depth=2)
    capture = Capture(strict=True)
    capture.compile(model)(torch.randn(2, 8, dtype=torch.float64))
    paths = [site.module_path for site in capture.report.fused]
    assert paths == ["blocks.0.mlp", "blocks.1.mlp"]
    for site in capture.report.fused:
        file, line = site.source.rsplit(":", 1)
        assert file.endswith("naive.py")
        with open(file) as source:
            assert "term" in source.readlines()[int(line) - 1]
        assert (site.dtype, site.operator, site.reason) == ("float64", "forward_ste", None)
        assert "fused to mglu::forward_ste" in str(site)


def test_fusing_a_fused_graph_changes_nothing() -> None:
    capture = Capture(strict=True)
    compiled = capture.compile(NaiveMGLU(16, 12, n_masks=2))
    compiled(torch.randn(4, 16))
    before = str(capture.after[0])
    report = FusionReport()
    fuse_graph(capture.after[0], report)
    assert str(capture.after[0]) == before
    assert (report.fused, report.missed, report.graphs) == ([], [], 1)


def _layer(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    return gated(x, weight, straight_through(logits[0]))


def test_source_line_is_the_users_under_a_default_device() -> None:
    """A default device puts frames of torch between the user's line and the node."""
    capture = Capture()
    with torch.device("cpu"):
        capture.compile(_layer)(*layer_tensors().values())
    (site,) = capture.report.fused
    assert (site.module_path, Path(site.source.split(":")[0]).name) == ("", "spellings.py")


def test_long_sum_causes_no_error() -> None:
    """The pass reads a residual stream that is longer than Python's recursion limit."""
    graph = Graph()
    x = node = graph.placeholder("x")
    x.meta["example_value"] = torch.empty(2, 2)
    for _ in range(3000):
        node = graph.call_function(operator.add, (node, x))
        node.meta = x.meta
    graph.output(node)
    report = FusionReport()
    fuse_graph(graph, report)
    assert (report.fused, report.missed, report.graphs) == ([], [], 1)
