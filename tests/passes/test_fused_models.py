"""Graphs with several layers, and what remains of a graph after the pass."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from budgets import BUDGET
from graphs import Capture, assert_same, compare, masked_products, model_results
from lookalikes import layer_tensors
from spellings import gated, straight_through
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.fx import Graph
from torch.nn.attention.flex_attention import flex_attention

from compile_passes.fusion import fuse_graph
from compile_passes.report import FusionReport
from mglu_ops.nn import NaiveMGLU

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


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_experts_whose_weights_are_one_tensor(shared: bool, trained: bool) -> None:
    """Each expert is one slice of the weights, with its own slice of the masks or with the mask of all experts."""

    def experts(x: Tensor, weight: Tensor, masks: Tensor) -> Tensor:
        weights = torch.stack([weight, weight.flip(0), 2 * weight])
        m = straight_through(masks) if trained else masks
        y = torch.zeros_like(x)
        for i in range(3):
            one = m[0] if shared else m[i]
            y = y + x[:, i, None] * gated(x, weights[i], one, 1 - one if trained else ~one)
        return y

    def make() -> dict[str, Tensor]:
        named = layer_tensors()
        logits = named.pop("logits")
        return named | {"masks": logits if trained else logits.detach() > 0}

    assert len(compare(experts, make, SAME, strict=True).report.fused) == 3


def test_layers_whose_inputs_are_results() -> None:
    """Each layer reads the result of the one before; the last also makes its mask from it."""

    def layers(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        y = gated(x, weight, straight_through(logits[0]))
        y = gated(y, weight, straight_through(logits[1]))
        m = (y.t() @ y) > 0
        return F.silu(F.linear(y, weight * m)) * F.linear(y, weight * ~m)

    capture = compare(layers, layer_tensors, SAME, strict=True)
    assert [site.operator for site in capture.report.fused] == ["forward_ste", "forward_ste", "forward"]


def test_shared_weight() -> None:
    """Two layers share one weight, which is also used outside of them."""

    def layers(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        first = gated(x, weight, straight_through(logits[0]))
        second = F.relu(F.linear(x, weight * straight_through(logits[1]))) * F.linear(
            x, weight * (1 - straight_through(logits[1]).detach())
        )
        return first + gated(x + 1, weight, straight_through(logits[2])) + F.linear(x, weight) + 0 * second.detach()

    capture = compare(layers, layer_tensors, SAME)
    assert [site.operator for site in capture.report.fused] == ["forward_ste", "forward_ste"]
    assert len(capture.report.missed) == 1


# --- The report, and what is left of the graph -----------------------------------------------------------------------


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
            assert "y = y + (term" in source.readlines()[int(line) - 1]
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


def _checkpointed(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(_layer, x, weight, logits, use_reentrant=True)


def _scanned(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    def body(total: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        y = _layer(token, weight, logits)
        return total + y, y.clone()

    return scan(body, torch.zeros_like(weight[0]), x)[1]


def _attended(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    y = _layer(x, weight, logits)[None, None]
    return flex_attention(y, y, y)


@pytest.mark.parametrize("function", [_checkpointed, _scanned, _attended])
def test_layer_in_or_beside_the_body_of_an_operator(function: Callable[..., Tensor]) -> None:
    capture = compare(function, lambda: {name: t.detach() for name, t in layer_tensors().items()}, SAME)
    assert [len(capture.report.fused), capture.reasons] == [1, []]


def test_source_line_is_the_users_under_a_default_device() -> None:
    """The mode of `set_default_device` puts frames of torch between the user's line and the node."""
    capture = Capture()
    with torch.device("cpu"):
        capture.compile(_layer)(*layer_tensors().values())
    (site,) = capture.report.fused
    assert (site.module_path, Path(site.source.split(":")[0]).name) == ("", "spellings.py")


def test_long_sum_causes_no_error() -> None:
    """The pass reads a residual stream that is longer than Python's stack is deep."""
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
