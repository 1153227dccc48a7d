"""The device kernels of the CUDA backend: a module for each, which knows all about its launches.

To add a kernel, write its module and enter it in the two tables below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ....layer_call import LayerCall
from ..device import Gpu
from . import decode_mma, plain, tile_wgmma_choice
from .base import LaunchConfig
from .decode_mma import DecodeMma
from .plain import Plain
from .tile_wgmma import TileWgmma

__all__ = ["CHOICES", "CONFIGS", "DecodeMma", "LaunchConfig", "Plain", "TileWgmma"]

CHOICES: tuple[Callable[[LayerCall, Gpu], LaunchConfig | None], ...] = (
    tile_wgmma_choice.choose,
    decode_mma.choose,
    plain.choose,
)
"""Each kernel's choice of a launch for a call, None where it does not want it, in the order in which they are asked."""

CONFIGS: Mapping[str, type[LaunchConfig]] = {config.kernel: config for config in (TileWgmma, DecodeMma, Plain)}
"""The launch configurations by the names of the kernels, for tables of launches."""
