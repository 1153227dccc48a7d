"""The errors of layers for an x that does not fit, and `torch.fx.symbolic_trace`, in which x has no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from budgets import assert_matches
from torch import nn
from torch.nn.utils import parametrize

from mglu_ops.nn import GLU, LU, MGLU, MGLUExpertsFeedForward, NaiveMGLU, SwiMGLU, freeze

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "learned": lambda **options: MGLU(16, 8, n_masks=2, **options),
    "routed": lambda **options: MGLU(16, 8, n_masks=2, top_k=1, **options),
    "fixed": lambda **options: MGLU(16, 8, learnable_masks=False, **options),
    "recomputing": lambda **options: MGLU(16, 8, save_activations=False, **options),
    "naive": lambda **options: NaiveMGLU(16, 8, top_k=1, **options),
    "block": lambda **options: SwiMGLU(16, 8, **options),
    "block of experts": lambda **options: MGLUExpertsFeedForward(3, 16, 8, 2, **options),
    "GLU": lambda **options: GLU(16, 8, **options),
    "LU": lambda **options: LU(16, 8, **options),
}
EACH = pytest.mark.parametrize("name", LAYERS)


@EACH
def test_x_of_another_dtype_or_device_is_blamed_and_not_the_weight(name: str) -> None:
    layer, x = LAYERS[name](), torch.randn(3, 16)
    if name == "recomputing":
        layer.train()
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        words = rf"^x: got dtype {dtype}, must be the module's dtype torch\.float32, or use au"
        with pytest.raises(TypeError, match=words):
            layer(x.to(dtype))
    with pytest.raises(ValueError, match=r"^x: got device meta, must be the module's device cpu$"):
        layer(x.to("meta"))
    with pytest.raises(TypeError, match=r"^x: got dtype torch\.float32, must be the module's dtype torch\.float16"):
        LAYERS[name](dtype=torch.float16)(x)


@EACH
def test_wrong_input_is_named(name: str) -> None:
    layer = LAYERS[name]()
    for wrong, kind in ((None, "None"), ([[1.0] * 16], "list")):
        with pytest.raises(TypeError, match=f"^x: got {kind}, must be a tensor$"):
            layer(wrong)
    with pytest.raises(ValueError, match=r"x: got last size 9|x: got shape \[2, 9\], must be .* = \[\.\.\., 16\]"):
        layer(torch.randn(2, 9))
    with pytest.raises(ValueError, match=r"^x: got shape \[\], must be \[\.\.\., \w+\] = \[\.\.\., 16\]$"):
        layer(torch.tensor(1.0))


@pytest.mark.parametrize("kind", [MGLU, NaiveMGLU, SwiMGLU])
def test_an_unknown_option_is_named_with_the_class_that_was_called(kind: type[nn.Module]) -> None:
    words = rf"^{kind.__name__}: got an unknown argument n_mask=4, must be one of .*\bn_masks\b"
    with pytest.raises(TypeError, match=words):
        kind(16, 8, n_mask=4)
    with pytest.raises(TypeError, match=r"^MGLUExpertsFeedForward: got an unknown argument n_mask=4"):
        MGLUExpertsFeedForward(3, 16, 8, 2, n_mask=4)


@EACH
def test_autocast_takes_x_of_another_dtype(name: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert LAYERS[name]()(torch.randn(3, 16).bfloat16()).dtype == torch.bfloat16


def test_a_parametrized_weight_is_computed_once() -> None:
    """The checks of x do not compute it."""
    computed = []

    class Counted(nn.Module):
        def forward(self, weight: Any) -> Any:
            computed.append(weight)
            return weight

    layer = MGLU(16, 8)
    parametrize.register_parametrization(layer, "weight", Counted())
    computed.clear()
    layer(torch.randn(3, 16))
    assert len(computed) == 1


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("GLU", "LU", "block of experts")])
@pytest.mark.parametrize("frozen", [False, True])
def test_symbolic_trace_records_the_operator(name: str, frozen: bool) -> None:
    layer, x = LAYERS[name](), torch.randn(3, 16)
    before = layer(x)
    traced = torch.fx.symbolic_trace(freeze(layer) if frozen else layer)
    assert_matches(traced(x), before)
    called = {str(node.target) for node in traced.graph.nodes}
    if name != "naive" or frozen:
        learned = name != "fixed" and not frozen
        assert ("mglu.forward_ste.default" if learned else "mglu.forward.default") in called
