"""Copies x with its columns in the order in which `tile_wgmma` reads mask bits (csrc/cuda/permute_x.cu)."""

from __future__ import annotations

from ....call import Call
from ....sizes import ceil_div, round_up
from ..device import Gpu
from ..launch import Step
from .base import copy_step

NAME = "permute_x"

BLOCK_ELEMENTS = 8 * 8 * 64
"""The elements per block: 8 tokens by 64 columns for each of its 8 warps."""


def macros(block_tokens: int, sub: int) -> dict[str, int]:
    """Return the macros for a copy of whole tiles of `block_tokens` tokens and whole stages of `sub` chunks."""
    return {"MGLU_TOKEN_COLUMNS": block_tokens, "MGLU_SUB": sub}


def step(call: Call, gpu: Gpu, target: str, block_tokens: int, sub: int) -> Step:
    """Return the step that writes the copy of x that a `tile_wgmma` with these settings reads."""
    elements = round_up(call.tokens, block_tokens) * round_up(call.in_features, 64 * sub)
    blocks = ceil_div(elements, BLOCK_ELEMENTS)
    return copy_step(NAME, target, macros(block_tokens, sub), blocks, call, gpu, "x", 2 * elements)
