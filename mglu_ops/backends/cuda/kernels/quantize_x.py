"""Rounds x to the activation format `fp8_token`, into a copy (csrc/cuda/quantize_x.cu).

For `tile_wgmma` the copy is in float8_e4m3fn with scales. For other kernels it is in x's dtype, with the same values.
"""

from __future__ import annotations

from ....call import Call
from ....sizes import round_up
from ..device import Gpu
from ..launch import Plan, Step
from .base import ELEMENTS, LaunchConfig, copy_step

NAME = "quantize_x"


def macros(call: Call, block_tokens: int) -> dict[str, int]:
    """The macros of the source. `block_tokens` are the tokens of a tile of `tile_wgmma`; 0 for a copy in x's dtype."""
    return {"MGLU_ELEMENT": ELEMENTS[call.dtype], "MGLU_TOKEN_COLUMNS": block_tokens}


def step(call: Call, gpu: Gpu, target: str, block_tokens: int) -> Step:
    """The step that writes the copy, which later kernels read as x. A block rounds one token."""
    rows = round_up(call.tokens, block_tokens) if block_tokens else call.tokens
    row_bytes = round_up(call.in_features, 128) + 4 if block_tokens else call.in_features * call.dtype.itemsize
    return copy_step(NAME, target, macros(call, block_tokens), rows, call, gpu, "x", rows * row_bytes)


def as_read(config: LaunchConfig, call: Call) -> Call:
    """Return the call that the kernel of `config` sees: with a rounded x in x's dtype, unless the kernel uses fp8."""
    return call if call.activation_format == "dense" or config.rounds_x else call.with_rounded_x()


def plan(config: LaunchConfig, call: Call, gpu: Gpu) -> Plan:
    """Return the launches of a call. If the kernel of `config` reads a rounded x in x's dtype, the first rounds x."""
    read = as_read(config, call)
    steps = config.plan(read, gpu)
    return steps if read is call else (step(call, gpu, config.target(gpu), 0), *steps)
