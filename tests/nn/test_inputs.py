"""Errors of layers for an x that does not fit, and `torch.fx.symbolic_trace`, where x has no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from mglu_ops.nn import (
    GLU,
    LU,
    MGLU,
    ExpertsDown,
    MGLUExperts,
    MGLUExpertsFeedForward,
    NaiveMGLU,
    NaiveMGLUExperts,
    SwiMGLU,
    freeze,
    quantize,
)
from tests.support.budgets import assert_matches

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


@pytest.mark.parametrize("make", [lambda: MGLU(16, 8, n_masks=2, top_k=1), lambda: MGLUExpertsFeedForward(3, 16, 8, 2)])
def test_routers_of_quantized_layers_name_x_too(make: Callable[[], nn.Module]) -> None:
    layer = quantize(freeze(make()), "int8_row")
    for dtype in (torch.float64, torch.int64):
        with pytest.raises(TypeError, match=rf"^x.*: got dtype {dtype}, must be the module's dtype torch\.float32"):
            layer(torch.ones(3, 16, dtype=dtype))


def test_a_router_of_another_dtype_is_named() -> None:
    layer = MGLU(16, 8, n_masks=2, top_k=1, dtype=torch.bfloat16)
    layer.router.float()
    x = torch.ones(3, 16, dtype=torch.bfloat16)
    with pytest.raises(
        TypeError, match=r"x of the router: got dtype torch\.bfloat16, must be .* torch\.float32, or use"
    ):
        layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).isfinite().all()


def test_wrong_inputs_of_experts_and_of_down_projections_are_named() -> None:
    ids, y, weights = torch.zeros(3, 1, dtype=torch.int64), torch.randn(3, 1, 16), torch.ones(3, 1)
    for experts in (MGLUExperts(3, 16, 8), NaiveMGLUExperts(3, 16, 8)):
        for x in (torch.randn(3, 17), torch.tensor(1.0)):
            with pytest.raises(
                ValueError, match=r"^x: got shape .*, must be \[\.\.\., in_features\] = \[\.\.\., 16\]$"
            ):
                experts(x, ids)
    for given, words in (
        ((y.double(), ids, weights), r"y: got dtype torch\.float64, must be the module's dtype torch\.float32"),
        ((y.to("meta"), ids, weights), "y: got device meta, must be the module's device cpu"),
        (([1.0], ids, weights), "y: got list, must be a tensor"),
        ((y, [0], weights), "expert_ids: got list, must be a tensor"),
        ((y, ids, 1.0), "expert_weights: got float, must be a tensor"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{words}"):
            ExpertsDown(3, 16, 8)(*given)


def test_blocks_do_not_judge_x_by_weights_that_change_in_a_call() -> None:
    """Weights change, for example, when FSDP gathers them, accelerate loads them, or an adapter wraps them."""
    glu = GLU(16, 8)

    def prepare(linear: nn.Module, inputs: Any) -> None:
        linear.double()

    for projection in (glu.gate_proj, glu.up_proj):
        projection.register_forward_pre_hook(prepare)
    assert glu(torch.randn(3, 16).double()).dtype == torch.float64


@pytest.mark.parametrize("kind", [MGLU, NaiveMGLU, SwiMGLU])
def test_an_unknown_option_is_named_with_the_class_that_was_called(kind: type[nn.Module]) -> None:
    words = rf"^{kind.__name__}: got an unknown argument n_mask=4, must be one of .*\bn_masks\b"
    with pytest.raises(TypeError, match=words):
        kind(16, 8, n_mask=4)
    with pytest.raises(TypeError, match=r"^MGLUExpertsFeedForward: got an unknown argument n_mask=4"):
        MGLUExpertsFeedForward(3, 16, 8, 2, n_mask=4)


def test_a_missing_size_is_reported_for_a_public_class() -> None:
    with pytest.raises(TypeError, match=r"^MGLUFeedForward\.__init__\(\) missing .*'intermediate'"):
        SwiMGLU(16)


@EACH
def test_autocast_takes_x_of_another_dtype(name: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert LAYERS[name]()(torch.randn(3, 16).bfloat16()).dtype == torch.bfloat16


def test_a_parametrized_weight_is_computed_once() -> None:
    """Checks of x must not compute the weight a second time."""
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
