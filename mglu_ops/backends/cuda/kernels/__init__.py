"""The kernels of the CUDA backend. The module of each kernel holds everything about its launches.

To add a kernel, write its module and enter it in the two tables below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ....call import Call
from ..device import Gpu
from . import decode_mma, plain, tile_wgmma_choice
from .base import LaunchConfig
from .decode_mma import DecodeMma
from .plain import Plain
from .tile_wgmma import TileWgmma

__all__ = ["CHOICES", "CONFIGS", "DecodeMma", "LaunchConfig", "Plain", "TileWgmma"]

CHOICES: tuple[Callable[[Call, Gpu], LaunchConfig | None], ...] = (
    tile_wgmma_choice.choose,
    decode_mma.choose,
    plain.choose,
)
"""Functions that return a kernel's launch for a call, or None if the kernel cannot or should not run the call. The
first launch that a function returns is used."""

CONFIGS: Mapping[str, type[LaunchConfig]] = {config.kernel: config for config in (TileWgmma, DecodeMma, Plain)}
"""The launch configurations by kernel name, for tables of launches."""
