"""Copies x with its columns in the order in which `tile_wgmma` reads mask bits (csrc/cuda/permute_x.cu)."""

from __future__ import annotations

from ....call import Call
from ....sizes import ceil_div, round_up
from ..device import Gpu
from ..driver import Launch
from ..launch import load_kernel
from .base import launch_of

NAME = "permute_x"

BLOCK_ELEMENTS = 8 * 8 * 64
"""The elements per block: 8 tokens by 64 columns for each of its 8 warps."""


def macros(block_tokens: int, sub: int) -> dict[str, int]:
    """The macros of the source. It writes whole tiles of `block_tokens` tokens and whole stages of `sub` chunks."""
    return {"MGLU_TOKEN_COLUMNS": block_tokens, "MGLU_SUB": sub}


def copy_bytes(call: Call, block_tokens: int, sub: int) -> int:
    """The size of the copy in bytes."""
    return 2 * _elements(call, block_tokens, sub)


def blocks(call: Call, block_tokens: int, sub: int) -> int:
    """The blocks of the grid."""
    return ceil_div(_elements(call, block_tokens, sub), BLOCK_ELEMENTS)


def launch(call: Call, gpu: Gpu, device: int, target: str, block_tokens: int, sub: int) -> Launch:
    """Compile and load the kernel, and prepare its launch before a `tile_wgmma` with these settings."""
    kernel = load_kernel(device, NAME, target, macros(block_tokens, sub))
    return launch_of(kernel, call, (blocks(call, block_tokens, sub), 1), 256, overlap=gpu.arch >= (9, 0))


def _elements(call: Call, block_tokens: int, sub: int) -> int:
    return round_up(call.tokens, block_tokens) * round_up(call.in_features, 64 * sub)
