"""Decodes a stored weight to x's dtype, for `tile_wgmma` with many tokens (csrc/cuda/decode_weight.cu)."""

from __future__ import annotations

from ....call import Call
from ....sizes import ceil_div
from ..device import Gpu
from ..driver import Launch
from ..launch import load_kernel
from .base import ELEMENTS, launch_of

NAME = "decode_weight"

_BLOCK_BYTES = 256 * 16
"""The bytes of the weight per block: 16 for each of its 256 threads."""


def macros(call: Call) -> dict[str, int]:
    """The macros of the source."""
    return {"MGLU_ELEMENT": ELEMENTS[call.dtype], "MGLU_WEIGHT_FORMAT": call.weight.format.code}


def copy_bytes(call: Call) -> int:
    """The size of the decoded weight in bytes."""
    return call.out_features * call.in_features * call.dtype.itemsize


def blocks(call: Call) -> int:
    """The blocks of the grid."""
    return ceil_div(call.out_features * call.in_features * call.weight.bits // 8, _BLOCK_BYTES)


def launch(call: Call, gpu: Gpu, device: int, target: str) -> Launch:
    """Compile and load the kernel, and prepare its launch before a `tile_wgmma`."""
    kernel = load_kernel(device, NAME, target, macros(call))
    return launch_of(kernel, call, (blocks(call), 1), 256, overlap=gpu.arch >= (9, 0))
