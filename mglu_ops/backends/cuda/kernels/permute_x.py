"""The copy of x with its columns in the order in which `tile_wgmma` reads masks (csrc/cuda/permute_x.cu)."""

from __future__ import annotations

from ....layer_call import LayerCall
from ....sizes import ceil_div, round_up
from ..device import Gpu
from ..driver import Launch
from ..launch import load_kernel
from .base import launch_of

NAME = "permute_x"

BLOCK_ELEMENTS = 8 * 8 * 64
"""Each of a block's 8 warps takes 8 tokens by 64 columns."""


def macros(block_tokens: int, sub: int) -> dict[str, int]:
    """The macros of the source, which writes whole tiles of tokens and whole stages of columns."""
    return {"MGLU_TOKEN_COLUMNS": block_tokens, "MGLU_SUB": sub}


def copy_bytes(call: LayerCall, block_tokens: int, sub: int) -> int:
    """The size of the copy in bytes."""
    return 2 * _elements(call, block_tokens, sub)


def blocks(call: LayerCall, block_tokens: int, sub: int) -> int:
    """Blocks of the launch."""
    return ceil_div(_elements(call, block_tokens, sub), BLOCK_ELEMENTS)


def launch(call: LayerCall, gpu: Gpu, device: int, target: str, block_tokens: int, sub: int) -> Launch:
    """Compile, load and describe the launch that precedes a `tile_wgmma` with these settings."""
    kernel = load_kernel(device, NAME, target, macros(block_tokens, sub))
    return launch_of(kernel, call, (blocks(call, block_tokens, sub), 1), 256, overlap=gpu.arch >= (9, 0))


def _elements(call: LayerCall, block_tokens: int, sub: int) -> int:
    return round_up(call.tokens, block_tokens) * round_up(call.in_features, 64 * sub)
