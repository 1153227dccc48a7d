"""The copy of x in float8_e4m3fn that `tile_wgmma` multiplies in fp8 (csrc/cuda/quantize_x.cu)."""

from __future__ import annotations

from ....layer_call import LayerCall
from ....sizes import round_up
from ..device import Gpu
from ..driver import Launch
from ..launch import load_kernel, parameters
from .base import ELEMENTS, integers

NAME = "quantize_x"


def macros(call: LayerCall, block_tokens: int, sub: int) -> dict[str, int]:
    """The macros of the source, which writes whole tiles of tokens and whole stages of columns."""
    return {"MGLU_ELEMENT": ELEMENTS[call.dtype], "MGLU_TOKEN_COLUMNS": block_tokens, "MGLU_SUB": sub}


def copy_bytes(call: LayerCall, block_tokens: int, sub: int) -> int:
    """The size of the copy in bytes, with a scale for each token."""
    return round_up(call.tokens, block_tokens) * (round_up(call.in_features, 128 * sub) + 4)


def launch(call: LayerCall, gpu: Gpu, device: int, target: str, block_tokens: int, sub: int) -> Launch:
    """Compile, load and describe the launch that precedes a `tile_wgmma` with these settings."""
    return Launch(
        load_kernel(device, NAME, target, macros(call, block_tokens, sub)),
        (round_up(call.tokens, block_tokens), 1),
        128,
        0,
        overlap=gpu.arch >= (9, 0),
        parameters=parameters("params.cuh"),
        integers=integers(call),
    )
