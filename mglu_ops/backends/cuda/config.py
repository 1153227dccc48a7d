"""Launch configurations of the CUDA kernels and the pure function that chooses one.

No timing happens at run time: every choice below carries the measurement it comes from (benchmarks/NOTES.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

KernelName = Literal["decode_fma", "decode_mma", "plain"]

MAX_TOKENS = 512
"""More tokens belong to GEMMs: a group of 8 or 16 tokens reads W again, from L2 or from memory."""

_SHARED_PER_SM = {(8, 0): 164, (8, 7): 164, (9, 0): 228, (10, 0): 228, (10, 3): 228, (11, 0): 228}
_SHARED_PER_SM_OTHER = 100  # sm_86, 89, 120
_RESERVED_PER_BLOCK = 1024  # what the driver keeps of shared memory for itself


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel is cut: compile-time constants of its source plus the launch.

    A block has `tiles * split_k` warps. A tile is `rows` rows of W; `split_k` warps share its sum over k. Each warp
    keeps `stages` stages in flight in shared memory; a stage is `sub` times 64 columns (`decode_mma`) or `sub` times
    256 (`decode_fma`).
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
    early_weights: bool = False
    """Start reading W before the kernels ahead in the stream have finished (programmatic dependent launch). Only
    right when none of them writes W or the masks."""

    @property
    def threads(self) -> int:
        return 256 if self.kernel == "plain" else 32 * self.tiles * self.split_k

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
        warps = self.tiles * self.split_k
        ring = self.stages * self.rows * self.stage_columns // 8 * (16 + n_masks)
        columns = -(-in_features // self.stage_columns) * self.stage_columns
        if self.kernel == "decode_fma":
            sums = _round_up(4 * (n_masks + 1) * self.rows, 128)
            return warps * (ring + sums) + columns * 4
        sums = _round_up(4 * (n_masks + 1) * self.rows * self.token_columns(tokens), 128)
        return warps * max(ring, sums) + columns * 2 * min(tokens, self.block_tokens)

    def grid(self, tokens: int, out_features: int, multiprocessors: int) -> tuple[int, int]:
        groups = -(-tokens // self.block_tokens)
        if self.kernel == "plain":
            return -(-out_features // (self.threads // 32)), groups
        blocks = -(-out_features // (self.rows * self.tiles))
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
