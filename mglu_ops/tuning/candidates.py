"""The launches that a search tries: those chosen for the call and for similar calls, and neighbours of the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..backends.cuda import DecodeMma, LaunchConfig, TileWgmma
from ..backends.cuda.choice import without_tables
from ..backends.cuda.device import Gpu
from ..call import Call

_WARPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24)
_LADDERS: dict[str, dict[str, tuple[int, ...]]] = {
    "plain": {"block_tokens": (1, 2, 4, 8)},
    "decode_mma": {
        "tiles": _WARPS,
        "split_k": (1, 2, 3, 4, 8),
        "stages": (2, 3, 4),
        "sub": (1, 2, 4),
        "mask_group": (1, 2, 4, 8, 16),
        "block_tokens": (8, 16),
        "blocks_per_sm": (1, 2),
        "cluster": (1, 2),
    },
    "tile_wgmma": {
        "rows": (64, 80, 96, 112, 128),
        "block_tokens": (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192),
        "mask_groups": (1, 2),
        "passes": (1, 2, 3, 4),
        "steps": (1, 2, 4),
        "sub": (1, 2),
        "sparse": (False, True),
        "permuted": (False, True),
        "cluster": (1, 2),
    },
}
"""The settings that the search varies, for each kernel, with their values in ascending order."""


def starts(call: Call, gpu: Gpu) -> list[LaunchConfig]:
    """The first launches of a search: the choices for the call, and for calls that differ from it in one respect.

    Up to two more are launches of `tile_wgmma`, one dense and one sparse, with clusters of two blocks. The two blocks
    of a cluster share 128 rows, and each has half of the tokens.
    """
    found = [
        without_tables(call, gpu),
        without_tables(replace(call, leading=(16,)), gpu),
        without_tables(replace(call, out_features=max(64, call.out_features // 4)), gpu),
        without_tables(replace(call, out_features=8 * call.out_features), gpu),
        without_tables(call, replace(gpu, arch=(8, 0))),
        without_tables(replace(call, batch_invariant=True), gpu),
    ]
    widths = _LADDERS["tile_wgmma"]["block_tokens"]
    half = next((width for width in widths if 2 * width >= call.tokens), widths[-1])
    pair = TileWgmma(rows=128, block_tokens=half, sub=2, cluster=2)
    if (call.n_masks + 1) * pair.block_tokens <= 336:  # 128 threads share 64 rows, so each has at most 168 accumulators
        found += [_with_full_ring(replace(pair, sparse=sparse), call, gpu) for sparse in (False, True)]
    return [config for config in dict.fromkeys(found) if config.violation(call, gpu) is None]


def neighbours(config: LaunchConfig, call: Call, gpu: Gpu) -> list[LaunchConfig]:
    """Return launches one step of one setting from `config`, or with as many warps in other `tiles` and `split_k`."""
    found = (_with_full_ring(other, call, gpu) for other in _steps(config))
    return [other for other in dict.fromkeys(found) if other != config and other.violation(call, gpu) is None]


def _steps(config: LaunchConfig) -> Iterator[LaunchConfig]:
    for name, ladder in _LADDERS[config.kernel].items():
        value = getattr(config, name)
        below = [step for step in ladder if step < value]
        above = [step for step in ladder if step > value]
        for step in (*below[-1:], *above[:1]):
            change: dict[str, Any] = {name: step}
            yield replace(config, **change)
    if isinstance(config, DecodeMma):
        if config.tiles % 2 == 0:
            yield replace(config, tiles=config.tiles // 2, split_k=config.split_k * 2)
        if config.split_k % 2 == 0:
            yield replace(config, tiles=config.tiles * 2, split_k=config.split_k // 2)


def _with_full_ring(config: LaunchConfig, call: Call, gpu: Gpu) -> LaunchConfig:
    """Give a launch of `tile_wgmma` as many stages as fit. The search does not vary its number of stages."""
    if not isinstance(config, TileWgmma):
        return config
    return config.with_full_ring(call.n_masks, call.weight.bits, gpu.shared_bytes_per_sm)
