"""Copies a stored weight to x's dtype, for `tile_wgmma` or `grouped_mm` of many rows (csrc/cuda/decode_weight.cu)."""

from __future__ import annotations

from ....call import Call
from ....sizes import ceil_div
from ..device import Gpu
from ..launch import Step
from .base import ELEMENTS, copy_step

NAME = "decode_weight"

_BLOCK_BYTES = 256 * 16
"""The bytes of the weight per block: 16 for each of its 256 threads."""


def macros(call: Call) -> dict[str, int]:
    """The macros of the source."""
    return {"MGLU_ELEMENT": ELEMENTS[call.dtype], "MGLU_WEIGHT_FORMAT": call.weight.format.code}


def step(call: Call, gpu: Gpu, target: str) -> Step:
    """Return the step that writes the decoded copy, which later kernels read as the weight."""
    elements = call.out_features * call.in_features
    blocks, nbytes = ceil_div(elements * call.weight.bits // 8, _BLOCK_BYTES), elements * call.dtype.itemsize
    return copy_step(NAME, target, macros(call), blocks, call, gpu, "weight", nbytes)
