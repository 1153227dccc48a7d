"""torchao's `quantize_` reaches MGLU layers, which take its weights in their own formats, or refuses clearly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from budgets import assert_matches
from torch import nn

from mglu_ops.nn import MGLU, SwiMGLU, freeze, quantize

torchao = pytest.importorskip("torchao.quantization", reason="the tests do not depend on torchao")


def frozen() -> SwiMGLU:
    return freeze(SwiMGLU(256, 384, n_masks=2))


def is_layer(module: nn.Module, name: str) -> bool:
    return isinstance(module, (nn.Linear, MGLU))


CONFIGS = {"fp8_row": torchao.Float8WeightOnlyConfig(), "int8_row": torchao.Int8WeightOnlyConfig()}


@pytest.mark.parametrize("by_name", [False, True], ids=["filter_fn", "FqnToConfig"])
@pytest.mark.parametrize("weight_format", CONFIGS)
def test_a_layer_takes_the_weight_of_torchao_in_its_own_format(weight_format: str, by_name: bool) -> None:
    model, config, x = frozen(), CONFIGS[weight_format], torch.randn(3, 256)
    expected = of_dequantized_weight(model, config)(x)
    if by_name:
        torchao.quantize_(model, torchao.FqnToConfig({"mglu": config}), filter_fn=None)
    else:
        torchao.quantize_(model, config, filter_fn=is_layer)
    layer = model.mglu
    assert layer.weight_format == weight_format
    assert set(layer.state_dict()) == {"weight", "weight_scale", "packed_masks"}
    assert_matches(layer(x), expected, torch.float32)
    fresh = SwiMGLU(256, 384, n_masks=2, learnable_masks=False, weight_format=weight_format).mglu
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), layer(x))
    assert quantize(layer, weight_format) is layer


def of_dequantized_weight(model: SwiMGLU, config: Any) -> MGLU:
    """A dense layer with the weight as torchao quantizes and dequantizes that of a linear layer."""
    linear = nn.Linear(256, 384, bias=False)
    linear.weight = nn.Parameter(model.mglu.weight.detach().clone())
    torchao.quantize_(linear, config)
    masks = torch.ops.mglu.unpack_masks(model.mglu.packed_masks, 256)
    return MGLU.from_parameters(linear.weight.dequantize(), masks)


@pytest.mark.parametrize(
    "config",
    [
        torchao.Float8WeightOnlyConfig(granularity=torchao.PerTensor()),
        torchao.Int8WeightOnlyConfig(granularity=torchao.PerGroup(128)),
        torchao.Int8DynamicActivationInt8WeightConfig(),
        torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(128)),
    ],
    ids=lambda config: type(config).__name__,
)
def test_what_no_format_holds_is_refused(config: Any) -> None:
    model = frozen()
    with pytest.raises(ValueError, match=r"weight: got torchao's .*Tensor.*, must have one scale a row"):
        torchao.quantize_(model.mglu, config, filter_fn=is_layer)
    assert model.mglu.weight_format == "dense"


def test_learned_masks_are_frozen_before() -> None:
    with pytest.raises(
        ValueError, match=r"weight: got a quantized weight of torchao, .* mglu_ops\.freeze\(model\) first"
    ):
        torchao.quantize_(SwiMGLU(256, 384), CONFIGS["fp8_row"], filter_fn=is_layer)
