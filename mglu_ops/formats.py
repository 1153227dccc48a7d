"""The formats in which the weight of a layer is stored; `csrc/cuda/weight_formats.cuh` lists the same for C++.

A mask selects whole elements of W, so it is the same in every format. The kernels decode W once for all masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightFormat:
    """A format.

    Attributes:
        name: as the operators take it.
        code: its number in `csrc/cuda/weight_formats.cuh`.
        quantize: the stored weight and its scales (None without scales) of a floating weight
            `[out_features, in_features]`.
        dequantize: the weight in a dtype that a stored weight and its scales stand for.
    """

    name: str
    code: int
    quantize: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    dequantize: Callable[[Tensor, Tensor | None, torch.dtype], Tensor]

    @property
    def is_dense(self) -> bool:
        """Whether the weight is stored as it is, in x's dtype."""
        return self.code == 0


_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max


def _quantize_fp8_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to float8_e4m3fn, with a scale that maps its largest value to the largest of that type."""
    wide = weight.float()
    scale = wide.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / _E4M3_MAX
    return (wide / scale[:, None]).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), scale


def _dequantize_fp8_row(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    assert scale is not None
    return (weight.to(torch.float64) * scale[:, None]).to(dtype)


FORMATS = {
    one.name: one
    for one in (
        WeightFormat("dense", 0, lambda weight: (weight, None), lambda weight, _, dtype: weight.to(dtype)),
        WeightFormat("fp8_row", 1, _quantize_fp8_row, _dequantize_fp8_row),
    )
}
"""The formats by their names. The operators take `dense` alone so far."""
