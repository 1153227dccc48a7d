"""Launch configurations of the CUDA kernels and the pure function that chooses one.

No timing happens at run time: every choice below carries the measurement it comes from (benchmarks/NOTES.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

KernelName = Literal["decode_fma", "decode_mma", "plain", "tile_wgmma"]

MAX_TOKENS = 512
"""Of the kernels that read W again, from L2 or from memory, for every 8 or 16 tokens: all but `tile_wgmma`."""

_SHARED_PER_SM = {(8, 0): 164, (8, 7): 164, (9, 0): 228, (10, 0): 228, (10, 3): 228, (11, 0): 228}
_SHARED_PER_SM_OTHER = 100  # sm_86, 89, 120
_RESERVED_PER_BLOCK = 1024  # what the driver keeps of shared memory for itself


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel is cut: compile-time constants of its source plus the launch.

    A block has `tiles * split_k` warps. A tile is `rows` rows of W; `split_k` warps share its sum over k. Each warp
    keeps `stages` stages in flight in shared memory; a stage is `sub` times 64 columns (`decode_mma`) or `sub` times
    256 (`decode_fma`).

    `tile_wgmma` is cut differently: a block computes tiles of `rows` rows by `block_tokens` tokens, with one warpgroup
    that copies stages of `sub` times 64 columns into a ring, and `mask_groups` warpgroups for every 64 rows.
    """

    kernel: KernelName
    rows: int = 16
    tiles: int = 1
    split_k: int = 1
    stages: int = 2
    sub: int = 1
    chains: int = 1
    """`decode_fma`: partial sums of one output, so that fewer FFMAs wait for the one before."""
    mask_group: int = 1
    """`decode_mma`: masks whose bits are in registers at a time."""
    block_tokens: int = 1
    """Tokens that share a read of W. `decode_mma` computes 8 columns at a time whatever their number."""
    blocks_per_sm: int = 1
    persistent: bool = False
    """`decode_fma`: only as many blocks as fit at once, each walking over several tiles."""
    mask_groups: int = 1
    """`tile_wgmma`: warpgroups that share 64 rows, each with its part of the masks."""
    steps: int = 4
    """`tile_wgmma`: wgmmas of 16 columns that are issued together."""
    early_weights: bool = False
    """Start reading W before the kernels ahead in the stream have finished (programmatic dependent launch). Only
    right when none of them writes W or the masks."""

    @property
    def threads(self) -> int:
        if self.kernel == "plain":
            return 256
        if self.kernel == "tile_wgmma":
            return 128 * (-(-self.rows // 64) * self.mask_groups + 1)
        return 32 * self.tiles * self.split_k

    @property
    def token_tiles(self) -> int:
        """MMA columns of `decode_mma`, over 8."""
        return -(-self.block_tokens // 8)

    @property
    def stage_columns(self) -> int:
        return self.sub * (256 if self.kernel == "decode_fma" else 64)

    def token_columns(self, tokens: int) -> int:
        """Columns of the MMA result that are kept."""
        return 1 if tokens == 1 else 8 * self.token_tiles

    def mask_vector(self, n_masks: int) -> int:
        """The widest copy of mask bytes that divides a stage's row of masks."""
        return 16 if self.stage_columns // 8 * n_masks % 16 == 0 else 8

    def shared_bytes(self, n_masks: int, tokens: int, in_features: int) -> int:
        """Dynamic shared memory of a block: every warp's ring and sums (which may share), then x."""
        if self.kernel == "plain":
            return 0
        if self.kernel == "tile_wgmma":
            exchange = 0 if self.mask_groups == 1 else -(-self.rows // 64) * self.block_tokens * 512
            return self.stages * (self._tile_stage_bytes(n_masks) + 16) + exchange  # two barriers a stage
        warps = self.tiles * self.split_k
        ring = self.stages * self.rows * self.stage_columns // 8 * (16 + n_masks)
        columns = -(-in_features // self.stage_columns) * self.stage_columns
        if self.kernel == "decode_fma":
            sums = _round_up(4 * (n_masks + 1) * self.rows, 128)
            return warps * (ring + sums) + columns * 4
        sums = _round_up(4 * (n_masks + 1) * self.rows * self.token_columns(tokens), 128)
        return warps * max(ring, sums) + columns * 2 * min(tokens, self.block_tokens)

    def _tile_stage_bytes(self, n_masks: int) -> int:
        """Of `tile_wgmma`: x, W and masks."""
        return _round_up(self.sub * ((self.block_tokens + self.rows) * 128 + self.rows * 8 * n_masks), 1024)

    def turned_bytes(self, tokens: int, in_features: int) -> int:
        """Of the copy of x that `turn_x` makes for `tile_wgmma`: whole tiles of tokens and whole stages of columns."""
        return _round_up(tokens, self.block_tokens) * _round_up(in_features, 64 * self.sub) * 2

    def turn_blocks(self, tokens: int, in_features: int) -> int:
        """Blocks of `turn_x`: each of its 8 warps takes 8 tokens by 64 columns."""
        return -(-self.turned_bytes(tokens, in_features) // (8 * 8 * 128))

    def grid(self, tokens: int, out_features: int, multiprocessors: int) -> tuple[int, int]:
        groups = -(-tokens // self.block_tokens)
        if self.kernel == "plain":
            return -(-out_features // (self.threads // 32)), groups
        blocks = -(-out_features // (self.rows * self.tiles))
        if self.kernel == "tile_wgmma":
            return min(blocks * groups, multiprocessors), 1
        if self.persistent:
            blocks = min(blocks, self.blocks_per_sm * multiprocessors)
        return blocks * groups, 1


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def shared_limit(arch: tuple[int, int]) -> int:
    """Shared memory of one SM in bytes."""
    return 1024 * _SHARED_PER_SM.get(arch, _SHARED_PER_SM_OTHER)


def choose(
    arch: tuple[int, int],
    dtype: torch.dtype,
    n_masks: int,
    tokens: int,
    out_features: int,
    in_features: int,
    aligned: bool,
    multiprocessors: int = 132,
) -> LaunchConfig:
    """The configuration for a problem, from measurements on an H200.

    Args:
        arch: compute capability.
        dtype: of x and weight.
        n_masks: 1 to 16.
        tokens: rows of x.
        out_features: rows of W.
        in_features: columns of W.
        aligned: whether rows of W and of the masks can be copied in whole vectors.
        multiprocessors: SMs of the device.
    """
    if aligned and dtype != torch.float32 and out_features >= 16 and arch >= (8, 0):
        # Up to 16 tokens, few masks and short rows, decode_mma starts sooner (one mask, 8192 x 2048: 13.1 against 13.9
        # us; 14336 x 4096: 36.1 against 33.8).
        few = 16 if n_masks <= 4 and in_features <= 2048 else 8
        if arch == (9, 0) and tokens > few and out_features >= 64:
            return _tile(n_masks, tokens, out_features, multiprocessors)
        if tokens == 1:
            preferred = _one_token(n_masks, in_features)
        else:
            preferred = _few_tokens(arch, n_masks, tokens, out_features, in_features, multiprocessors)
        fitted = _fit(preferred, shared_limit(arch), n_masks, tokens, in_features)
        if fitted is not None:
            return fitted
    return LaunchConfig("plain", block_tokens=1 if tokens == 1 else 4)


def _one_token(n_masks: int, in_features: int) -> LaunchConfig:
    fma = LaunchConfig("decode_fma")
    long = in_features > 2048
    if n_masks == 1:
        # Bound by the stream of W. Where rows are long, splitting k keeps more of a row's neighbourhood in flight at
        # once (14336 x 4096: 0.965 of the ceiling with 4 warps a tile, 0.93 with 2); where they are short, walking
        # over tiles saves the start of blocks (8192 x 2048: 0.964 against 0.944).
        if long:
            return replace(fma, rows=4, tiles=2, split_k=4, blocks_per_sm=3)
        return replace(fma, rows=2, tiles=4, split_k=2, blocks_per_sm=4, persistent=True)
    if n_masks == 2:
        # Three small stages; two warps a tile where rows are long (0.956; 8192 x 2048 with one warp: 0.969).
        split = 2 if long else 1
        return replace(fma, rows=2, tiles=8 // split, split_k=split, stages=3, blocks_per_sm=4)
    if n_masks <= 4:
        # 64 registers let 32 warps live on an SM, which hide the chains of FFMAs; walking over tiles saves filling x
        # and the rings anew (14336 x 4096: 0.943 against 0.904), but a warp of 8192 x 2048 has two tiles at most.
        return replace(fma, rows=2, tiles=16, blocks_per_sm=2, persistent=long)
    if n_masks <= 8:
        # Two chains halve the wait of an FFMA for the one before it; one block an SM, so x is stored there once
        # (14336 x 4096: 0.923; 8192 x 2048: 0.911, where four tiles a warp and SM come out even).
        return replace(fma, rows=2, tiles=20 if long else 16, chains=2, persistent=True)
    # 17 sums in two chains leave registers for one row where the end of a row is rare, two rows where it is not
    # (14336 x 4096: 0.765; 8192 x 2048: 0.757). Bound by instructions and, at 680 W, by power.
    if long:
        return replace(fma, rows=1, tiles=20, sub=2, chains=2, persistent=True)
    return replace(fma, rows=2, tiles=16, chains=2, persistent=True)


def _few_tokens(
    arch: tuple[int, int],
    n_masks: int,
    tokens: int,
    out_features: int,
    in_features: int,
    multiprocessors: int,
) -> LaunchConfig:
    # One wave: every SM gets one block with an equal share of the 16-row tiles, so x is stored once an SM and no SM
    # waits for another (14336 x 4096, 8 tokens: 7 tiles x 2 warps beat 4 x 4 by 5%; 8192 x 2048: 4 x 4).
    tiles_of_sm = -(-out_features // (16 * multiprocessors))
    waves = -(-tiles_of_sm // 8)
    tiles = -(-tiles_of_sm // waves)
    # A second column of 8 tokens doubles the sums: up to 128 registers for 4 masks, 160 for 8.
    two_columns = tokens > 8 and (n_masks <= 4 or (n_masks <= 8 and in_features <= 2048))
    # Mask counts that are not whole words need registers to put bytes together; ptxas for sm_100 spills 16 masks too.
    many_registers = (two_columns and n_masks > 4) or (n_masks > 10 and (n_masks % 4 != 0 or arch >= (10, 0)))
    warps = 12 if many_registers else 16
    return LaunchConfig(
        "decode_mma",
        tiles=tiles,
        split_k=max(1, warps // tiles),
        stages=3 if n_masks == 1 else 2,
        # Bits of more than 8 masks spill beside 4 * (n_m + 1) sums; groups must be equal and whole words.
        mask_group=8 if n_masks == 16 else n_masks,
        block_tokens=16 if two_columns else 8,
    )


_TOKEN_COLUMNS = (16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 160)
"""Widths of `tile_wgmma`'s tiles that its source has the instruction for."""


def _tile(n_masks: int, tokens: int, out_features: int, multiprocessors: int) -> LaunchConfig:
    """The cut of the least cost, where a wave costs (sums of a block) x (100 + columns), as measured.

    100 columns' worth is what a sum of 64 rows costs besides its products (fragments come from registers; 8192 x 2048,
    4096 tokens, one mask: 25.7, 30.5 and 34.8 us a wave with 96, 128 and 160 columns; six masks agree).
    """
    sums = n_masks + 1
    found: list[tuple[float, int, LaunchConfig]] = []
    for groups in (1, 2) if n_masks > 2 else (1,):
        share = -(-sums // groups)
        for columns in _TOKEN_COLUMNS:
            # 160 sums a thread leave registers for the fragments; two warpgroups' exchange takes 1 KB a column.
            if share * columns > 320 or columns > 128 * (3 - groups) or (columns >= tokens + 16 and columns > 16):
                continue
            token_tiles = -(-tokens // columns)
            for rows in (64, 80, 96, 112, 128) if groups == 1 else (64,):
                waves = -(-token_tiles * -(-out_features // rows) // multiprocessors)
                # Times 64 rows. One warpgroup alone waits for itself now and then (24%), two that share masks wait for
                # each other at the end of a tile, and both read W (20%).
                work = 1.2 if groups == 2 else 1.24 if rows == 64 else 2.0
                if rows <= out_features:
                    config = LaunchConfig(
                        "tile_wgmma",
                        rows=rows,
                        block_tokens=columns,
                        mask_groups=groups,
                        steps=4 if groups == 1 and share * columns <= 256 else 2,
                    )
                    found.append((waves * work * sums * (100 + columns), token_tiles, config))
    _, token_tiles, best = min(found, key=lambda one: one[0])  # of equals the first: fewer rows a block
    if token_tiles == 1:  # bound by memory, where longer stages cost fewer instructions
        longer = fill_shared(replace(best, sub=2), n_masks)
        if longer.stages >= 4:
            return longer
    return fill_shared(best, n_masks)


def fill_shared(config: LaunchConfig, n_masks: int) -> LaunchConfig:
    """`config` of `tile_wgmma` with as many stages as an SM of compute capability 9.0 holds, up to 12."""
    limit = shared_limit((9, 0)) - _RESERVED_PER_BLOCK
    stages = next(s for s in range(12, 0, -1) if replace(config, stages=s).shared_bytes(n_masks, 0, 0) <= limit)
    return replace(config, stages=stages)


def _fit(config: LaunchConfig, limit: int, n_masks: int, tokens: int, in_features: int) -> LaunchConfig | None:
    """The nearest configuration whose blocks fit into an SM's shared memory, or None."""
    while True:
        need = config.shared_bytes(n_masks, tokens, in_features) + _RESERVED_PER_BLOCK
        blocks = min(config.blocks_per_sm, limit // need)
        if blocks > 0:
            return replace(config, blocks_per_sm=blocks)
        if config.stages > 2:
            config = replace(config, stages=config.stages - 1)
        elif config.block_tokens > 2:  # a shorter x, and W read again (mostly from L2) for the other tokens
            config = replace(config, block_tokens=config.block_tokens // 2)
        elif config.tiles > 1:
            config = replace(config, tiles=config.tiles // 2)
        elif config.split_k > 1:
            config = replace(config, split_k=config.split_k // 2)
        else:
            return None
