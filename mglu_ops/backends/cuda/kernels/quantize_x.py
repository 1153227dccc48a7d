"""Rounds x to the activation format `fp8_token`, into a copy (csrc/cuda/quantize_x.cu).

For `tile_wgmma` the copy is in float8_e4m3fn with scales. For other kernels it is in x's dtype, with the same values.
"""

from __future__ import annotations

from dataclasses import replace

from ....layer_call import LayerCall
from ....sizes import round_up
from ..device import Gpu
from ..driver import Launch
from ..launch import CopyLaunch, LaunchSequence, load_kernel, parameters
from .base import ELEMENTS, LaunchConfig, integers

NAME = "quantize_x"

_THREADS = 256
"""The threads of a block. A block rounds one token."""


def macros(call: LayerCall, block_tokens: int) -> dict[str, int]:
    """The macros of the source. `block_tokens` are the tokens of a tile of `tile_wgmma`; 0 for a copy in x's dtype."""
    return {"MGLU_ELEMENT": ELEMENTS[call.dtype], "MGLU_TOKEN_COLUMNS": block_tokens}


def copy(call: LayerCall, gpu: Gpu, device: int, target: str, block_tokens: int) -> CopyLaunch:
    """Compile and load the kernel, and prepare its launch, which comes before the launch of the main kernel."""
    rows = round_up(call.tokens, block_tokens) if block_tokens else call.tokens
    row_bytes = round_up(call.in_features, 128) + 4 if block_tokens else call.in_features * call.dtype.itemsize
    launch = Launch(
        load_kernel(device, NAME, target, macros(call, block_tokens)),
        (rows, 1),
        _THREADS,
        0,
        overlap=gpu.arch >= (9, 0),
        parameters=parameters("params.cuh"),
        integers=integers(call),
    )
    return CopyLaunch(launch, rows * row_bytes, "x")


def as_read(config: LaunchConfig, call: LayerCall) -> LayerCall:
    """The call that the main kernel of a launch sees. Its x is already rounded, unless the kernel rounds x itself."""
    return call if call.activation_format == "dense" or config.rounds_x else call.with_rounded_x()


def sources(config: LaunchConfig, call: LayerCall, gpu: Gpu) -> list[tuple[str, str, dict[str, int]]]:
    """The sources that are compiled for a call with this launch, as `(kernel, target, macros)`."""
    read = as_read(config, call)
    found = config.sources(read, gpu)
    if read is not call:
        found.append((NAME, config.target(gpu), macros(call, 0)))
    return found


def sequence(config: LaunchConfig, call: LayerCall, gpu: Gpu, device: int) -> LaunchSequence:
    """Compile and load the kernels of a call on `device`, the current device, with a rounding of x first if needed."""
    read = as_read(config, call)
    found = config.sequence(read, gpu, device)
    if read is call:
        return found
    rounded = copy(call, gpu, device, config.target(gpu), 0)
    return replace(found, copies=(rounded, *found.copies))
