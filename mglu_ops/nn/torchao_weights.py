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
    stored, block = getattr(tensor, "qdata", None), list(getattr(tensor, "block_size", None) or ())
    is_known = name in ("Float8Tensor", "Int8Tensor") and stored is not None and stored.shape == tensor.shape
    if (
        is_known
        and getattr(tensor, "act_quant_kwargs", None) is None
        and getattr(tensor, "act_pre_scale", None) is None
    ):
        for chosen in FORMATS.values():
            fits = chosen.dtype is stored.dtype and block == [chosen.rows, chosen.columns or in_features]
            if fits and not _has_zero_points(tensor):
                scale = tensor.scale.to(chosen.scale_dtype).reshape(chosen.scale_shape(out_features, in_features))
                return chosen, stored, scale
    raise ValueError(
        f"weight: got torchao's {name} with blocks of {block}, must have one scale a row and leave the activations as "
        "they are, as Float8WeightOnlyConfig() and Int8WeightOnlyConfig() make it; for other formats, call "
        "mglu_ops.quantize(model, weight_format)"
    )


def _has_zero_points(tensor: Any) -> bool:
    zero_point = getattr(tensor, "zero_point", None)
    return zero_point is not None and bool(zero_point.any())
