"""Weights that torchao has quantized, in the formats of this package. torchao itself is not imported."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..formats import FORMATS, WeightFormat


def is_of_torchao(tensor: object) -> bool:
    """Whether a tensor is of one of torchao's classes, which hold quantized values under a floating dtype."""
    return type(tensor).__module__.partition(".")[0] == "torchao"


def unpacked(tensor: Any) -> tuple[WeightFormat, Tensor, Tensor]:
    """The format, the stored weight and the scales of a weight `[out_features, in_features]`; copies no weight.

    Raises:
        ValueError: no format has such values and scales, or torchao would quantize the activations too.
    """
    name, (out_features, in_features) = type(tensor).__name__, tensor.shape
    block = list(getattr(tensor, "block_size", ()))
    if name in ("Float8Tensor", "Int8Tensor") and not _has_more_than_scales(tensor):
        for chosen in FORMATS.values():
            if chosen.dtype is tensor.qdata.dtype and block == [chosen.rows, chosen.columns or in_features]:
                scale = tensor.scale.to(chosen.scale_dtype).reshape(chosen.scale_shape(out_features, in_features))
                return chosen, tensor.qdata, scale
    raise ValueError(
        f"weight: got torchao's {name} with blocks of {block}, must have one scale a row and leave the activations as "
        "they are, as Float8WeightOnlyConfig() and Int8WeightOnlyConfig() make it; for other formats, call "
        "mglu_ops.quantize(model, weight_format)"
    )


def _has_more_than_scales(tensor: Any) -> bool:
    """Whether the activations are quantized or scaled too, or the weight has zero points."""
    zero_point = getattr(tensor, "zero_point", None)
    of_activations = (getattr(tensor, name, None) for name in ("act_quant_kwargs", "act_quant_scale", "act_pre_scale"))
    return any(one is not None for one in of_activations) or (zero_point is not None and bool(zero_point.any()))
