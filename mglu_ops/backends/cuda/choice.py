"""The pure function that chooses how a problem is launched.

No timing happens at run time: every choice below carries the measurement it comes from (benchmarks/NOTES.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import ceil
from typing import NamedTuple

import torch

from .config import RESERVED_PER_BLOCK, LaunchConfig, fill_shared, round_up, shared_limit


def choose(
    arch: tuple[int, int],
    dtype: torch.dtype,
    n_masks: int,
    tokens: int,
    out_features: int,
    in_features: int,
    aligned: bool,
    multiprocessors: int = 132,
    batch_invariant: bool = False,
    x_in_rows: bool = True,
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
        batch_invariant: whether a row must have the same bits in every batch. The number of tokens then decides
            nothing that the order of a sum depends on: `tile_wgmma` goes up k in one accumulator however it is cut, and
            never by sparse products; `decode_mma` is the one for 8 tokens, `plain` the one for 4.
        x_in_rows: whether x is in rows of whole vectors that do not overlap. Else `tile_wgmma` has it turned.
    """
    if aligned and dtype != torch.float32 and out_features >= 16 and arch >= (8, 0):
        few = 0 if batch_invariant else _most_few(n_masks, out_features, in_features, multiprocessors)
        if arch == (9, 0) and out_features >= 64 and tokens > few:
            alone = out_features <= 64 * multiprocessors  # one warpgroup an SM, which flips signs or multiplies
            must_turn = batch_invariant or not x_in_rows
            if n_masks > 2 and tokens <= _most_sparse(n_masks, alone) and not must_turn:
                return _sparse_tile(n_masks, tokens, out_features, multiprocessors)
            return _tile(n_masks, tokens, out_features, in_features, multiprocessors, must_turn)
        asked = 8 if batch_invariant else tokens
        preferred = _few_tokens(n_masks, asked, out_features, in_features, multiprocessors)
        fitted = _fit(preferred, shared_limit(arch), n_masks, asked, in_features)
        if fitted is not None and batch_invariant:
            # With 8 warps a tile and more, a single token's masks would be added up by more lanes (finish.cuh).
            return replace(fitted, split_k=min(fitted.split_k, 4))
        if fitted is not None:
            # Clusters of four take 1.6 times as long: it seems that not all fit at once.
            pairs = arch == (9, 0) and 1 < tokens <= fitted.block_tokens
            return replace(fitted, cluster=2) if pairs else fitted
    return LaunchConfig("plain", block_tokens=1 if tokens == 1 and not batch_invariant else 4)


def _tiles_of_block(out_features: int, multiprocessors: int) -> int:
    """Of 16 rows, so that every SM gets one block, or as many as every other, with an equal share of the rows.

    x is then stored once an SM, and no SM waits for another (14336 x 4096, 8 tokens: 7 tiles x 2 warps beat 4 x 4 by
    5%; 8192 x 2048: 4 x 4).
    """
    tiles_of_sm = -(-out_features // (16 * multiprocessors))
    waves = -(-tiles_of_sm // 8)
    return -(-tiles_of_sm // waves)


def _most_few(n_masks: int, out_features: int, in_features: int, multiprocessors: int) -> int:
    """Up to how many tokens `decode_mma` is the kernel for compute capability 9.0; `tile_wgmma` is for more.

    Of 16 tokens it takes two columns of products, and x of long rows the memory of its rings. But `tile_wgmma` starts
    later, and computes 128 rows where an SM has 65 (us of 4 masks at 8192 x 2048, 9728 x 2560, 11008 x 4096, 14336 x
    4096: 14.4, 21.2, 33.0, 42.4 against 16.7, 25.5, 36.6, 42.6; of 8: 20.4, 33.0, 50.1, 63.4 against 21.6, 38.5, 57.1,
    58.8; of 16 at 4096 x 1024, 6144 x 2048, 8192 x 2048: 12.4, 31.7, 33.1 against 17.8, 31.0, 31.5; of 4 at 5120 x
    5120, whose x just fits: 21.9 against 29.2).
    """
    preferred = _few_tokens(n_masks, 16, out_features, in_features, multiprocessors)
    fits = _fit(preferred, shared_limit((9, 0)), n_masks, 16, in_features) == preferred
    return 16 if fits and preferred.tiles <= (6 if n_masks <= 8 else 2) else 8


def _few_tokens(n_masks: int, tokens: int, out_features: int, in_features: int, multiprocessors: int) -> LaunchConfig:
    """`decode_mma` for 1 to 16 tokens.

    Two or three warps for each of an SM's four schedulers, in powers of two along k (us of one mask and token at 8192 x
    2048, 4 tiles: 2 warps a tile 9.7, 3 warps 9.9, 1 warp 9.9). Where they are few, the stages are twice as long, if a
    warp has four of those and more (4 masks at 4096 x 4096: 11.9 and 12.7; but 4.4 and 4.7 at 2048 x 2048). Many masks
    fill the ring as it is (12 masks at 8192 x 2048: 16.2 and 16.6), but for a warp that has all of k (12 masks at 14336
    x 4096: 52.0 and 59.5).
    """
    tiles = _tiles_of_block(out_features, multiprocessors)
    split_k = next(split for split in (8, 4, 2, 1) if split * tiles <= 12)
    if n_masks <= 8:
        long = tiles * split_k <= (10 if n_masks <= 2 else 8) and in_features >= split_k * 4 * 128
    else:
        long = split_k == 1
    # Four masks at a time need the fewest registers; stages of 8 masks that are swizzled are read faster whole.
    mask_group = 4 if n_masks % 4 == 0 and not (n_masks == 8 and long) else n_masks
    return LaunchConfig(
        "decode_mma",
        tiles=tiles,
        split_k=split_k,
        sub=2 if long else 1,
        mask_group=mask_group,
        block_tokens=16 if tokens > 8 else 8,
    )


def _most_sparse(n_masks: int, alone: bool) -> int:
    """Up to how many tokens `tile_wgmma` takes sparse products of 2 masks and more; alone: of one warpgroup an SM.

    The more masks, the more flips they save (dense / sparse, us at 8192 x 2048, 14336 x 4096, 9728 x 2560: 2 masks of
    32 tokens 15.8 / 15.1, 36.9 / 37.9, 21.9 / 22.7; 4 of 40 20.0 / 19.7, 53.4 / 53.7, 33.1 / 34.4; 6 26.9 / 23.4, 73.6
    / 67.1, 45.2 / 42.9; 12 43.1 / 35.8, 138 / 123, 89.3 / 80.3). Only two warpgroups of the same rows have registers
    for 8 masks of 40 tokens, and take more waves than dense products do (61.6 / 63.7 at 9728 x 2560).
    """
    if n_masks <= 4:
        return 32 if alone or n_masks == 4 else 24
    return 40 if n_masks <= 6 or 9 <= n_masks <= 13 or (alone and n_masks <= 8) else 32


_TOKEN_COLUMNS = (16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192)
"""Widths of `tile_wgmma`'s tiles that its source has the instruction for."""
_TILE_ROWS = (64, 80, 96, 112, 128)
_MICROSECONDS = 2e-5
"""Of `tile_wgmma` for a column of in_features, a product of 64 rows and a column of tokens: at the rate of the tensor
cores of an H200, which its power limits. Below, a column is this time."""
_BYTES_OF_MEMORY = 4.2e6
"""That memory gives in a microsecond."""
_BYTES_OF_L2 = 7e6
"""That L2 gives all SMs in a microsecond, each as much."""
_TURNING = 2.2
"""Microseconds that the launch of `permute_x` takes."""
_HANDING_ON = 1.0
"""Microseconds at the end of a tile for which the second of two warpgroups of the same rows waits for the first."""


class _Pace(NamedTuple):
    """What a product of N columns and 64 rows takes, in columns; and W's fragments once a pass.

    The more of `flips + 0.65 N`, where the flips of signs are waited for, and `gap + N`.
    """

    flips: float
    gap: float
    fragments: float

    def of_product(self, columns: int) -> float:
        return max(self.flips + 0.65 * columns, self.gap + columns)


# One warpgroup alone waits for itself; two of the same rows both read W, and wait for each other.
_ALONE, _TWO_OF_ROWS, _TWO_OF_MASKS = _Pace(37, 28, 49), _Pace(24, 0, 40), _Pace(31, 0, 118)
# Sparse products wait for no flips, but for x, of which shared memory gives them a column in a column's time.
_SPARSE_ALONE, _SPARSE_OF_ROWS, _SPARSE_OF_MASKS = _Pace(0, 9, 105), _Pace(0, 11, 57), _Pace(0, 10, 140)
_CLUSTER = 0.98
"""Of the time without one: two blocks have W of one read of L2, whose power is left for products."""


def _tile(
    n_masks: int, tokens: int, out_features: int, in_features: int, multiprocessors: int, must_turn: bool
) -> LaunchConfig:
    """The cut of the least time by a model fitted to 6,000 timings, by which it is 1% behind the best (NOTES.md).

    Of equal times the first is taken, with fewer rows a block.
    """

    def suits(cut: LaunchConfig) -> bool:
        narrow = cut.block_tokens < tokens + 16 or cut.block_tokens == _TOKEN_COLUMNS[0]
        return narrow and cut.rows <= out_features and (cut.cluster == 1 or tokens > cut.block_tokens)

    return min(
        filter(suits, _cuts(n_masks, must_turn)),
        key=lambda cut: _microseconds(cut, n_masks, tokens, out_features, in_features, multiprocessors),
    )


@cache
def _cuts(n_masks: int, must_turn: bool) -> tuple[LaunchConfig, ...]:
    """What problems can be cut into so that three stages and more fit into shared memory."""
    filled = (_filled(cut, n_masks, least_stages=3) for cut in _shapes(n_masks, must_turn))
    return tuple(cut for cut in filled if cut.stages >= 3)


def _filled(cut: LaunchConfig, n_masks: int, least_stages: int) -> LaunchConfig:
    """With as many stages as there is room for; with shorter ones where the long ones are too few."""
    filled = fill_shared(cut, n_masks)
    shorter = filled.stages < least_stages and n_masks % 2 == 0
    return fill_shared(replace(cut, sub=1), n_masks) if shorter else filled


def _shapes(n_masks: int, must_turn: bool) -> Iterator[LaunchConfig]:
    """All that threads have the registers for."""
    for groups, passes in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3), (1, 4), (2, 4)):
        masks = n_masks // passes
        if groups > masks or (passes > 1 and (n_masks % passes or masks % 4)):
            continue
        for columns in _TOKEN_COLUMNS:
            sums = -(-(masks + 1) // groups) * columns // 2  # registers of a thread
            if sums > (192 if n_masks <= 2 else 168):
                continue
            for rows in _TILE_ROWS if groups == 1 else (64,):
                tile = LaunchConfig("tile_wgmma", rows=rows, block_tokens=columns, mask_groups=groups, passes=passes)
                ways = list(_ways(tile, n_masks, sums, must_turn))
                # Of masks that take several passes, the blocks of a cluster hold each other up.
                yield from (replace(way, cluster=size) for size in ((1, 2) if passes == 1 else (1,)) for way in ways)


def _ways(tile: LaunchConfig, n_masks: int, sums: int, must_turn: bool) -> Iterator[LaunchConfig]:
    """How a cut may multiply: x as it is, x turned, and with sparse products. Long stages cost fewer instructions."""
    one_group, columns = tile.mask_groups == 1, tile.block_tokens
    as_it_is = not must_turn and tile.passes == 1
    may_turn = not as_it_is or n_masks > 4 or (n_masks == 4 and one_group)
    for turned in (False, True):
        if may_turn if turned else as_it_is:
            # Beside so many sums there are registers for the fragments of four steps, and not only of two.
            most = 66 if not one_group else 128 if n_masks == 1 else 168 if turned and n_masks == 4 else 100
            yield replace(tile, sub=2, steps=4 if sums <= most else 2, turned=turned)
    pays = n_masks >= 2 and columns <= _most_sparse(n_masks, tile.rows == 64)
    if pays and as_it_is and _fits_sparse(n_masks, tile.mask_groups, columns):
        yield replace(tile, sub=_sub_of_sparse(n_masks, columns), sparse=True)


def _microseconds(
    cut: LaunchConfig, n_masks: int, tokens: int, out_features: int, in_features: int, multiprocessors: int
) -> float:
    """The model of costs: waves of tiles, or reading, W once a pass from memory or what all tiles need from L2.

    But for 3 us, which every launch takes.
    """
    shared = cut.mask_groups == 2
    if cut.sparse:
        pace = _SPARSE_OF_MASKS if shared else _SPARSE_ALONE if cut.rows == 64 else _SPARSE_OF_ROWS
    else:
        pace = _TWO_OF_MASKS if shared else _ALONE if cut.rows == 64 else _TWO_OF_ROWS
    products = n_masks + (cut.passes if shared else 1)
    # For an x that is not turned a warp reads four times the bytes of masks: four as a word, eight and more slowly.
    of_mask = 1.5 if n_masks == 4 and not shared else 2 if n_masks < 8 else 5
    bits = 0 if cut.turned or cut.sparse else cut.mask_groups * n_masks * of_mask
    columns = products * pace.of_product(cut.block_tokens) + cut.passes * pace.fragments + bits
    if cut.cluster > 1:
        columns *= _CLUSTER
    token_tiles = round_up(-(-tokens // cut.block_tokens), cut.cluster)
    waves = _waves(token_tiles * -(-out_features // cut.rows), multiprocessors)
    arithmetic = waves * (cut.row_groups * columns * in_features * _MICROSECONDS + (_HANDING_ON if shared else 0))
    of_column = 2 + n_masks / 8  # bytes, of a row of W and of its masks
    from_memory = out_features * of_column / _BYTES_OF_MEMORY
    of_tile = cut.rows * of_column / cut.cluster + 2 * min(cut.block_tokens, tokens)
    from_l2 = waves * multiprocessors * of_tile / _BYTES_OF_L2
    reading = cut.passes * in_features * max(from_memory, from_l2)
    hidden = min(arithmetic, reading)
    rest = 0.2 if cut.rows == 64 and not shared else 0.05  # of it: a warpgroup alone waits for its stages too
    return max(arithmetic, reading) + rest * hidden + (_TURNING if cut.turned else 0)


def _sparse_tile(n_masks: int, tokens: int, out_features: int, multiprocessors: int) -> LaunchConfig:
    """`tile_wgmma` with sparse products, for as many tokens as `_most_sparse`: one tile of tokens, few waves of rows.

    A wave of two warpgroups is a third longer than one of a single warpgroup, which waits for itself.
    """
    columns = max(16, round_up(tokens, 8))
    config = LaunchConfig("tile_wgmma", block_tokens=columns, sub=_sub_of_sparse(n_masks, columns), sparse=True)
    if not _fits_sparse(n_masks, 1, columns):
        config = replace(config, rows=64, mask_groups=2)
    else:
        fitting = [rows for rows in _TILE_ROWS if rows <= out_features]
        waves = {rows: _waves(-(-out_features // rows), multiprocessors) for rows in fitting}
        config = replace(config, rows=min(fitting, key=lambda rows: waves[rows] * (3 if rows == 64 else 4)))
    return _filled(config, n_masks, least_stages=4)


def _fits_sparse(n_masks: int, groups: int, columns: int) -> bool:
    """Whether a thread has registers for its sums and for the bits and places of its masks.

    For more ptxas spills, or lets products wait for each other (11 masks of 24 columns).
    """
    share = -(-(n_masks + 1) // groups)
    return share * (columns // 2 + 1) <= 153 and (n_masks < 16 or groups == 2)


def _sub_of_sparse(n_masks: int, columns: int) -> int:
    """Chunks of a stage: of 32 columns of 16 masks there are no registers for long ones."""
    return 1 if n_masks == 16 and columns == 32 else 2


def _waves(blocks: int, multiprocessors: int) -> float:
    """Of blocks, one an SM: the last ones of many run beside each other."""
    waves = blocks / multiprocessors
    return ceil(waves) if waves <= 4 else waves + 0.4


def _fit(config: LaunchConfig, limit: int, n_masks: int, tokens: int, in_features: int) -> LaunchConfig | None:
    """The nearest configuration whose blocks fit into an SM's shared memory, or None."""
    while True:
        need = config.shared_bytes(n_masks, tokens, in_features) + RESERVED_PER_BLOCK
        blocks = min(config.blocks_per_sm, limit // need)
        if blocks > 0:
            return replace(config, blocks_per_sm=blocks)
        if config.stages > 2:
            config = replace(config, stages=config.stages - 1)
        elif config.sub > 1:
            config = replace(config, sub=config.sub // 2)
        elif config.block_tokens > 2:  # a shorter x, and W read again (mostly from L2) for the other tokens
            config = replace(config, block_tokens=config.block_tokens // 2)
        elif config.tiles > 1:
            config = replace(config, tiles=config.tiles // 2)
        elif config.split_k > 1:
            config = replace(config, split_k=config.split_k // 2)
        else:
            return None
