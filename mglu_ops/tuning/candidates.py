"""Which launches are tried: the model's choices, and from the best so far one step further in one setting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..backends.cuda.choice import choose
from ..backends.cuda.config import LaunchConfig, fill_shared
from ..backends.cuda.limits import Case, violation

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
        "turned": (False, True),
        "cluster": (1, 2),
    },
}
"""Of each kernel, the settings that are moved, and the values they take, in order."""


def starts(case: Case) -> list[LaunchConfig]:
    """Where the search begins: the model's choice, then what it has for other numbers of tokens, layers and GPUs.

    And pairs of blocks that share 128 rows and have half of the tokens each, with products of both kinds.
    """
    rest = case.out_features, case.in_features, True, case.multiprocessors
    small, large = ((scaled, *rest[1:]) for scaled in (max(64, case.out_features // 4), 8 * case.out_features))
    found = [
        choose(case.arch, case.dtype, case.n_masks, case.tokens, *rest),
        choose(case.arch, case.dtype, case.n_masks, 16, *rest),
        choose(case.arch, case.dtype, case.n_masks, case.tokens, *small),
        choose(case.arch, case.dtype, case.n_masks, case.tokens, *large),
        choose((8, 0), case.dtype, case.n_masks, case.tokens, *rest),
        choose(case.arch, case.dtype, case.n_masks, case.tokens, *rest, batch_invariant=True),
    ]
    pair = LaunchConfig("tile_wgmma", rows=128, block_tokens=_half_of(case.tokens), sub=2, cluster=2)
    if (case.n_masks + 1) * pair.block_tokens <= 336:  # twice the sums that a thread has registers for
        found += [_with_whole_ring(replace(pair, sparse=sparse), case) for sparse in (False, True)]
    return [config for config in dict.fromkeys(found) if violation(config, case) is None]


def _half_of(tokens: int) -> int:
    """The narrowest tile of which two have all tokens."""
    widths = _LADDERS["tile_wgmma"]["block_tokens"]
    return next((width for width in widths if 2 * width >= tokens), widths[-1])


def neighbours(config: LaunchConfig, case: Case) -> list[LaunchConfig]:
    """What differs from a configuration by one step of one setting, or by warps that go from tiles to parts of k."""
    found = (_with_whole_ring(other, case) for other in _steps(config))
    return [other for other in dict.fromkeys(found) if other != config and violation(other, case) is None]


def _steps(config: LaunchConfig) -> Iterator[LaunchConfig]:
    for name, ladder in _LADDERS[config.kernel].items():
        value = getattr(config, name)
        below = [step for step in ladder if step < value]
        above = [step for step in ladder if step > value]
        for step in (*below[-1:], *above[:1]):
            change: dict[str, Any] = {name: step}
            yield replace(config, **change)
    if config.kernel == "decode_mma":
        if config.tiles % 2 == 0:
            yield replace(config, tiles=config.tiles // 2, split_k=config.split_k * 2)
        if config.split_k % 2 == 0:
            yield replace(config, tiles=config.tiles * 2, split_k=config.split_k // 2)


def _with_whole_ring(config: LaunchConfig, case: Case) -> LaunchConfig:
    """`tile_wgmma` takes all the stages that there is room for: they are no setting to move by itself."""
    return fill_shared(config, case.n_masks) if config.kernel == "tile_wgmma" else config
