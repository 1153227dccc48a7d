"""Chooses the launch of a call in the CUDA backend, from the call, the GPU and the tables of measured launches.

If a table has an entry for the call, that entry decides. Otherwise the first kernel in `CHOICES` that accepts the call
runs it. Nothing is timed at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...call import Call
from . import launch_tables
from .device import Gpu
from .kernels import CHOICES, experts, tile_experts, tile_wgmma_choice
from .kernels.base import LaunchConfig, has_aligned_rows, has_x_in_rows, mask_alignment, weight_is_vectorizable


@dataclass(frozen=True)
class LaunchChoice:
    """The launch of a call, and why it was chosen.

    Attributes:
        config: the kernel and its launch configuration.
        origin: the source of `config`, such as "the cost model".
        slow_reason: the reason why the slow kernel `plain` runs a 16-bit call. None if another kernel runs the call,
            and for float32, which only `plain` supports.
    """

    config: LaunchConfig
    origin: str
    slow_reason: str | None = None


def choose(call: Call, gpu: Gpu) -> LaunchChoice:
    """Choose the launch of a call.

    Raises:
        TableError: a table of launches cannot be read.
    """
    if call.activation_format != "dense":
        in_fp8 = tile_wgmma_choice.choose_fp8(call, gpu)
        if in_fp8 is not None:
            return LaunchChoice(in_fp8, "the cost model")
        call = call.with_rounded_x()
    if has_aligned_rows(call) and has_x_in_rows(call) and not call.batch_invariant:
        measured = launch_tables.find(call, gpu)
        if measured is not None:
            return LaunchChoice(measured.config, measured.origin)
    config = without_tables(call, gpu)
    origin = "the batch-invariant order" if call.batch_invariant else "the cost model"
    return LaunchChoice(config, origin, _slow_reason(call) if config.kernel == "plain" else None)


def without_tables(call: Call, gpu: Gpu) -> LaunchConfig:
    """Return the launch that is chosen without tables: the first one that a function in `CHOICES` returns."""
    return next(config for config in (choose(call, gpu) for choose in CHOICES) if config is not None)


def choose_experts(call: Call, gpu: Gpu) -> experts.ExpertLaunch:
    """Choose the launch of a call of experts by the number of rows that each expert gets if routing is balanced."""
    few = experts.choose(call, gpu)
    has_many = call.balanced_rows >= tile_experts.least_rows(call, few, gpu)
    tiles = tile_experts.choose(call, gpu) if has_many else None
    return tiles or few


def _slow_reason(call: Call) -> str | None:
    if call.dtype is torch.float32:
        return None
    if call.in_features % 8 or call.in_features == 0:
        return f"in_features {call.in_features} is not a multiple of 8"
    if not weight_is_vectorizable(call):
        return "the rows of weight are not contiguous, or do not start at multiples of 16 bytes"
    if mask_alignment(call) < 4:
        return "the rows of packed_masks are not contiguous, or do not start at multiples of 4 bytes"
    if call.out_features < 16:
        return f"out_features {call.out_features} is below 16"
    return "no fast kernel fits into the shared memory"
