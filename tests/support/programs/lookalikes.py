"""Inputs and the comparison for programs that look like MGLU and may differ from it in one detail.

Unless a test says otherwise, the pass may fuse such a program or refuse it with a reason. The inputs have rows in which
a wrong derivative shows: mask rows without gates or without values, and rows of zeros in x and in the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.budgets import BUDGET
from tests.support.programs.graphs import Capture, assert_says_why, compare
from tests.support.programs.spellings import from_source

SAME = 10 * BUDGET[torch.float64]
D = H = 8  # square, so that shapes do not reveal a transpose
ALL = ("x", "weight", "logits", "other")

Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]
"""A function `layer(x, weight, logits, bits, other)`."""


def tensors(trained: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors x `[5, 8]`, weight and other `[8, 8]`, logits and bits `[3, 8, 8]`.

    In each mask, row 0 has only values and row 1 only gates. One row of x and one row of the weight are 0.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, weight, logits, other = 3 * normal(5, H), normal(D, H), normal(3, D, H), normal(D, H)
    logits[:, 0], logits[:, 1] = -1, 1
    x[0], weight[2] = 0, 0
    named = {"x": x, "weight": weight, "logits": logits, "bits": logits > 0, "other": other}
    return {name: t.requires_grad_(name in trained) if name != "bits" else t for name, t in named.items()}


def layer_tensors(**more: Tensor) -> dict[str, Tensor]:
    """The tensors x, weight and logits, which require a gradient, and the tensors in `more`."""
    named = tensors(("x", "weight", "logits"))
    return {name: named[name] for name in ("x", "weight", "logits")} | more


def by_name(program: Layer) -> Layer:
    """The program as a function with the arguments x, weight, logits, bits and other."""

    def layer(x: Tensor, weight: Tensor, logits: Tensor, bits: Tensor, other: Tensor) -> Any:
        return program(x, weight, logits, bits, other)

    return layer


def layer_of(source: str, names: dict[str, Any]) -> Layer:
    """A layer from source. It may use x, w (weight), l (logits), b (bits) and o (other)."""
    return by_name(from_source("x, w, l, b, o", source, names))


def check(layer: Layer, trained: tuple[str, ...] = (), **options: Any) -> Capture:
    """Check that results and gradients equal eager's, and that the pass reports the layer as fused or refused."""
    capture = compare(layer, lambda: tensors(trained), SAME, **options)
    assert_says_why(capture)
    return capture
