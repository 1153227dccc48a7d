"""Converts weights that torchao has quantized to the formats of this package, without importing torchao."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..formats import FORMATS, WeightFormat


def is_of_torchao(tensor: object) -> bool:
    """True for tensors of torchao's classes, which have a floating dtype but hold quantized values."""
    return type(tensor).__module__.partition(".")[0] == "torchao"


def unpacked(tensor: Any) -> tuple[WeightFormat, Tensor, Tensor]:
    """Return the format, the stored weight and the scales of torchao's weight `[out_features, in_features]`.

    The values do not change. An 8-bit weight is not copied.

    Raises:
        ValueError: no format has such values and scales, torchao would also quantize activations, or the tensor is a
            stack of weights.
    """
    name, shape = type(tensor).__name__, list(tensor.shape)
    if len(shape) != 2:
        raise ValueError(
            f"weight: got torchao's {name} of shape {shape}, must be [out_features, in_features]; for experts, call "
            "mglu_ops.quantize(model, weight_format)"
        )
    out_features, in_features = shape
    block, more = list(getattr(tensor, "block_size", ())), _more_than_scales(tensor)
    for chosen in FORMATS.values() if name in _PLAIN and not more else ():
        if block != [chosen.rows, chosen.columns or in_features] or (stored := _stored(tensor, chosen)) is None:
            continue
        scale = tensor.scale.T.contiguous() if name == "Int4Tensor" else tensor.scale
        given = scale.to(chosen.scale_dtype)
        if torch.promote_types(given.dtype, scale.dtype) != given.dtype and not torch.equal(
            given.to(scale.dtype), scale
        ):
            more = f" and scales in {scale.dtype} that {given.dtype} cannot hold"
            break
        return chosen, stored, given.reshape(chosen.scale_shape(out_features, in_features))
    raise ValueError(
        f"weight: got torchao's {name} with blocks of {block}{more}, must be a symmetric weight without quantized "
        "activations, as Float8WeightOnlyConfig(), Int8WeightOnlyConfig() and IntxWeightOnlyConfig(torch.int4, "
        "PerGroup(128), scale_dtype=torch.bfloat16) make it; Int4WeightOnlyConfig() adds zero points or packs tiles. "
        "For other formats, call mglu_ops.quantize(model, weight_format)"
    )


_PLAIN = ("Float8Tensor", "Int8Tensor", "Int4Tensor", "IntxUnpackedToInt8Tensor")
"""Classes whose `qdata` has the rows and columns of the weight. A byte of `Int4Tensor` holds two columns."""


def _stored(tensor: Any, chosen: WeightFormat) -> Tensor | None:
    """The weight in the layout of a format, or None if the format cannot store it."""
    numbers, is_packed = tensor.qdata, type(tensor).__name__ == "Int4Tensor"
    if is_packed or str(getattr(tensor, "target_dtype", "")) == "torch.int4":
        if chosen.packed == 1:
            return None
        return numbers.view(chosen.dtype) ^ 0x88 if is_packed else chosen.pack(numbers)  # ^ adds 8 to both nibbles
    return numbers if numbers.dtype is chosen.dtype else None


def _more_than_scales(tensor: Any) -> str:
    """Describe zero points and quantized activations for the error message. The result is empty if there are none."""
    zero_point, activations = getattr(tensor, "zero_point", None), ["act_quant_kwargs", "act_quant_scale"]
    names = [*activations, "act_pre_scale", "activation_quantization"]
    has_activations = any(getattr(tensor, one, None) is not None for one in names)
    if has_activations or getattr(tensor, "activation_dtype", torch.bfloat16) is not torch.bfloat16:
        return " and quantized or scaled activations"
    return " and zero points" if zero_point is not None and bool(zero_point.any()) else ""
