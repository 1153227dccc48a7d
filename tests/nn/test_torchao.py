"""torchao's `quantize_` converts MGLU layers to this package's formats, or raises a clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mglu_ops.nn import MGLU, SwiMGLU, freeze, quantize
from tests.support.budgets import assert_matches

torchao = pytest.importorskip("torchao.quantization", reason="the tests do not depend on torchao")
workflows = pytest.importorskip("torchao.quantization.quantize_.workflows")


def frozen() -> SwiMGLU:
    return freeze(SwiMGLU(256, 384, n_masks=2))


def is_layer(module: nn.Module, name: str) -> bool:
    return isinstance(module, (nn.Linear, MGLU))


def intx(group: int = 128, **options: Any) -> Any:
    return torchao.IntxWeightOnlyConfig(torch.int4, torchao.PerGroup(group), **options)


CONFIGS = [
    ("fp8_row", torchao.Float8WeightOnlyConfig()),
    ("int8_row", torchao.Int8WeightOnlyConfig()),
    ("int8_row", torchao.IntxWeightOnlyConfig()),
    ("int4_group", intx(scale_dtype=torch.bfloat16)),
]


@pytest.mark.parametrize("by_name", [False, True], ids=["filter_fn", "FqnToConfig"])
@pytest.mark.parametrize(("weight_format", "config"), CONFIGS)
def test_a_layer_takes_the_weight_of_torchao_in_its_own_format(weight_format: str, config: Any, by_name: bool) -> None:
    model, x = frozen(), torch.randn(3, 256)
    expected = with_dequantized_weight(model, config)(x)
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


def with_dequantized_weight(model: SwiMGLU, config: Any) -> MGLU:
    """A dense layer with the weight that torchao gives a linear layer after quantizing and dequantizing."""
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
        intx(),  # scales in float32
        intx(64, scale_dtype=torch.bfloat16),
        intx(scale_dtype=torch.bfloat16, mapping_type=torchao.MappingType.ASYMMETRIC),
    ],
    ids=lambda config: type(config).__name__,
)
def test_what_no_format_holds_is_refused(config: Any) -> None:
    model = frozen()
    with pytest.raises(ValueError, match=r"weight: got torchao's .*Tensor.*, must be a symmetric weight"):
        torchao.quantize_(model.mglu, config, filter_fn=is_layer)
    assert model.mglu.weight_format == "dense"


def int4_weight_only(numbers: torch.Tensor, scale: torch.Tensor, zero_point: float) -> nn.Parameter:
    """A weight as `Int4WeightOnlyConfig()` stores it, in two's complement, made without torchao's dependency mslk."""
    qdata = (numbers[:, ::2] & 15) | (numbers[:, 1::2] << 4)
    group_scales = scale.T.contiguous()
    zeros = torch.full_like(group_scales, zero_point)
    stored = workflows.Int4Tensor(qdata, group_scales, zeros, [1, 128], numbers.shape)
    return nn.Parameter(stored, requires_grad=False)


def test_int4_weight_only_is_taken_without_zero_points() -> None:
    layer, x = frozen().mglu, torch.randn(3, 256)
    numbers, scale = torch.randint(-8, 8, (384, 256), dtype=torch.int8), torch.rand(384, 2).bfloat16()
    with pytest.raises(ValueError, match=r"Int4Tensor with blocks of \[1, 128\] and zero points, must be a symmetric"):
        layer.weight = int4_weight_only(numbers, scale, 0.5)
    layer.weight = int4_weight_only(numbers, scale, 0)
    masks = torch.ops.mglu.unpack_masks(layer.packed_masks, 256)
    dense = MGLU.from_parameters(numbers * scale.float().repeat_interleave(128, 1), masks)
    assert layer.weight_format == "int4_group"
    assert_matches(layer(x), dense(x), torch.float32)


def test_learned_masks_are_frozen_before() -> None:
    with pytest.raises(
        ValueError, match=r"weight: got a quantized weight of torchao, .* mglu_ops\.freeze\(model\) first"
    ):
        torchao.quantize_(SwiMGLU(256, 384), CONFIGS[0][1], filter_fn=is_layer)
