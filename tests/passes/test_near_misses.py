"""Near misses: the programs with two masked forms of a weight that are reported, and the words of the report."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from tests.support.programs.graphs import Capture, assert_same, results
from tests.support.programs.lookalikes import SAME, tensors
from tests.support.programs.spellings import from_source


def captured(source: str) -> Capture:
    """Run the pass on a program of x, a weight w and a mask m; g and v stand for the products with w * m and w * ~m."""
    capture = Capture()
    for name, product in (("v", "linear(x, w * ~m)"), ("g", "linear(x, w * m)")):
        if re.search(rf"\b{name}\b", source) and f"{name} = " not in source:
            source = f"{name} = {product}; {source}"
    function = from_source("x, w, m", source, {})
    torch._dynamo.reset()
    torch.compile(function, backend=capture)(torch.randn(5, 8), torch.randn(8, 8), torch.rand(8, 8) > 0.5)
    assert capture.report.fused == []
    return capture


FAR = "; ".join(["a, b = w * m, w * ~m", *["a, b = a.sin(), b.sin()"] * 8])
"""Statements that take the sine of both masked weights eight times."""
FUNCTIONS = ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh")


def stacked_functions(count: int) -> str:
    return f"g = linear(x, w * m); stack([f(g) for f in ({', '.join(f'torch.{f}' for f in FUNCTIONS[:count])})]) * v"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("linear(x, (w * m).sin()) * linear(x, w * ~m)", "`sin` (float32) reads a masked weight by `sin`, `linear`"),
        *(
            (source, "`sin` (float32) reads a product with a masked weight by")
            for source in ("torch.sin(g) * v", "torch.sin(silu(g)) * v", "torch.sin(g) * linear(x, w)")
        ),
        (
            "torch.relu(g) * torch.tanh(v)",
            "reads relu(g) and tanh(g) of the products g, one of which must be g itself (the value), by `mul`",
        ),
        ("checkpoint(F.linear, x, w * m) * v", "another graph reads one or both of them"),
        ("y = linear(x, w * m); y * checkpoint(F.linear, x, w * ~m)", "another graph reads one or both of them"),
        # Products are searched up to eight nodes after a masked weight, and the reason names at most four nodes.
        (f"{FAR}; linear(x, a) * linear(x, b)", "reads a masked weight by `sin`"),
        (stacked_functions(4), "by `asin` in a way"),
        (stacked_functions(8), "by `asin`, and 4 more in a way"),
        # Weights that are masked before a graph break
        ("a, b = w * m, w * ~m; torch._dynamo.graph_break(); of_weights(x, a, b)", "another graph reads"),
        (
            "a, b = (einsum('bh,dh,dh,h->bd', x, w, f.float(), w[0]) for f in (m, ~m)); term(a, b)",
            "weight by `einsum`",
        ),
    ],
)
def test_words(source: str, words: str) -> None:
    capture = captured(source)
    assert [words in reason for reason in capture.reasons] == [True]
    if "graph_break" in source:
        assert ["invert" in line for site in capture.report.missed for line in site.before] == [True], "the last"


@pytest.mark.parametrize(
    "source",
    [
        "torch.sin(g) * linear(x + 1, w * ~m)",
        "torch.sin(g) * linear(x, w * m)",
        "(checkpoint(F.linear, x, w * m), checkpoint(F.linear, x, w * m))",
        "linear(x, w * m).sum() * 0 + x.sum()",
        "checkpoint(lambda x, w, m: linear(x, w * m), x, w, m) * v",
        f"{FAR}; linear(x, a.sin()) * linear(x, b.sin())",
        "einsum('bh,dh,dh,h->bd', x, w, m.float(), w[0]) * (x @ torch.eye(8))",
        # Products masked per element, per token, by one bit, or by a stack of rows, instead of masked weights
        *(
            f"y, f = linear(x, w), {mask}; silu(y * f) * (y * ~f)"
            for mask in ("m[:5]", "m[:5, :1]", "m[0, 0]", "m[:2].unsqueeze(1)")
        ),
    ],
)
def test_no_near_miss(source: str) -> None:
    assert captured(source).reasons == []


def test_a_symbolic_number_of_masks_is_reported() -> None:
    """Fusing would need a guard on the number of masks."""
    layer = from_source(
        "x, weight, masks",
        "g, v = (einsum('bh,ndh->nbd', x, weight * m) for m in (masks, ~masks)); term(g, v).sum(0)",
        {},
    )
    named, capture = tensors(), Capture()
    given = {"x": named["x"], "weight": named["weight"], "masks": named["bits"]}
    assert_same(results(capture.compile(layer, dynamic=True), given), results(layer, given), SAME)
    assert capture.report.fused == []
    assert ["reads a masked weight by `einsum`" in reason for reason in capture.reasons] == [True]


@pytest.mark.parametrize(
    "source",
    [
        "F.gelu(linear(x, w * m)) * linear(x, w * ~m) + gated(x, w, m.flip(0), ~m.flip(0))",
        "gated(x, w, m, ~m) + gated(x + 1, w, m.flip(0), ~m.flip(0))",
        "y = gated(x, w, m, ~m); (y + gated(x, w, m.flip(0), ~m.flip(0)), y)",
    ],
)
def test_a_sum_that_becomes_several_operators_says_so(source: str) -> None:
    """Each operator reads the whole weight, which a user may not expect."""
    function = from_source("x, w, m", source, {})
    named, capture = tensors(), Capture()
    given: dict[str, Tensor] = {"x": named["x"], "w": named["weight"], "m": named["bits"][0]}
    assert_same(results(capture.compile(function), given), results(function, given), SAME)
    assert len(capture.report.fused) == 2
    assert "2 operators" in str(capture.report)
