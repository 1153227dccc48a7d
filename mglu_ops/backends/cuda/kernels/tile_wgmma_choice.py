"""Chooses the launch of `tile_wgmma` with the least time by the cost model (csrc/cuda/tile_wgmma.md).

For few tokens and many masks the model is not asked: the launch has sparse products and a single tile of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from ....call import Call
from ....sizes import ceil_div, round_up
from ..device import Gpu
from . import decode_mma
from .base import has_x_in_rows
from .tile_wgmma import TileWgmma, can_run
from .tile_wgmma_costs import CostModel, costs_of, waves_of

_TOKEN_COLUMNS = (16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192)  # values of block_tokens
_TILE_ROWS = (64, 80, 96, 112, 128)
_LEAST_FP8_TOKENS = 9  # for fewer tokens, decode_mma is bound by the memory bandwidth


def choose(call: Call, gpu: Gpu) -> TileWgmma | None:
    """Choose the launch of a call, or return None if the kernel cannot run it or `decode_mma` is faster.

    In the batch-invariant mode the kernel takes any number of tokens, with dense products of a permuted x. Then one
    accumulator sums in ascending order of k, whichever tiles are chosen.
    """
    if not can_run(call, gpu):
        return None
    if not call.batch_invariant and call.tokens <= decode_mma.most_tokens_on_hopper(call, gpu):
        return None
    must_permute = call.batch_invariant or not has_x_in_rows(call)
    one_warpgroup = call.out_features <= 64 * gpu.multiprocessors
    if call.n_masks > 2 and call.tokens <= _most_sparse_tokens(call.n_masks, one_warpgroup) and not must_permute:
        return _sparse_tile(call, gpu)
    return fastest(call, gpu, must_permute, costs_of(gpu))


# --- Sparse products of few tokens -----------------------------------------------------------------------------------


def _most_sparse_tokens(n_masks: int, one_warpgroup: bool) -> int:
    """The most tokens for which sparse products of two or more masks are worth their wider x.

    Sparse products save the sign flips, whose number grows with the number of masks. `one_warpgroup` is True if an SM
    has 64 rows of W or fewer. Then the SM has one consumer warpgroup, and nothing hides the time of sign flips.
    """
    if n_masks <= 4:
        return 32 if one_warpgroup or n_masks == 4 else 24
    return 40 if n_masks <= 6 or 9 <= n_masks <= 13 or (one_warpgroup and n_masks <= 8) else 32


def _sparse_tile(call: Call, gpu: Gpu) -> TileWgmma:
    """The launch with a single tile of tokens, and as few waves of rows as possible.

    Compared with tiles of two warpgroups, a wave of tiles with one warpgroup does half the work in three quarters of
    the time, because a single warpgroup waits for its own products.
    """
    n_masks = call.n_masks
    columns = max(16, round_up(call.tokens, 8))
    config = TileWgmma(block_tokens=columns, sub=_sub_of_sparse(n_masks, columns), sparse=True)
    if not _fits_sparse(n_masks, 1, columns):
        config = replace(config, rows=64, mask_groups=2)
    else:
        fitting = [rows for rows in _TILE_ROWS if rows <= call.out_features]
        last_wave = costs_of(gpu).last_wave
        waves = {rows: waves_of(ceil_div(call.out_features, rows), gpu.multiprocessors, last_wave) for rows in fitting}
        config = replace(config, rows=min(fitting, key=lambda rows: waves[rows] * (3 if rows == 64 else 4)))
    return filled(config, n_masks, call.weight.bits, gpu.shared_bytes_per_sm, least_stages=4)


def _fits_sparse(n_masks: int, groups: int, columns: int) -> bool:
    """True if a thread has enough registers for the sums, the bits and the metadata of its masks.

    Otherwise ptxas spills, or serializes `wgmma` instructions (as for 11 masks and 24 tokens).
    """
    share = ceil_div(n_masks + 1, groups)
    return share * (columns // 2 + 1) <= 153 and (n_masks < 16 or groups == 2)


def _sub_of_sparse(n_masks: int, columns: int) -> int:
    """The 64-column chunks of a stage: two, or one for 16 masks and 32 tokens, where registers are short."""
    return 1 if n_masks == 16 and columns == 32 else 2


# --- The launches that the model compares ----------------------------------------------------------------------------


def fastest(call: Call, gpu: Gpu, must_permute: bool, costs: CostModel) -> TileWgmma:
    """Return the fastest launch by the model; on ties the first one, which has the fewest rows per block."""
    return min(candidates(call, gpu, must_permute), key=lambda config: costs.microseconds(config, call, gpu))


def candidates(call: Call, gpu: Gpu, must_permute: bool) -> Iterator[TileWgmma]:
    """The launches to compare for a call."""
    found = launches(call.n_masks, call.weight.bits, must_permute, gpu.shared_bytes_per_sm)
    if not (call.weight.format.is_dense or call.batch_invariant):  # decoding rounds W, which changes bits
        dense = launches(call.n_masks, 16, must_permute, gpu.shared_bytes_per_sm)
        found += tuple(replace(config, decoded=True) for config in dense)
    return (config for config in found if suits(config, call))


def choose_fp8(call: Call, gpu: Gpu) -> TileWgmma | None:
    """Choose the launch in fp8, or return None if the kernel cannot run the call or another launch is faster.

    In the batch-invariant mode the kernel takes any number of tokens, since every tile sums in ascending order of k.
    """
    if not can_run(call, gpu) or (call.tokens < _LEAST_FP8_TOKENS and not call.batch_invariant):
        return None
    found = fp8_launches(call.n_masks, call.weight.format.name, gpu.shared_bytes_per_sm)
    costs = costs_of(gpu)
    return min((one for one in found if suits(one, call)), key=lambda one: costs.microseconds(one, call, gpu))


@cache
def fp8_launches(n_masks: int, weight_format: str, shared_bytes_per_sm: int) -> tuple[TileWgmma, ...]:
    """All launches in fp8 for which a thread has enough registers."""
    found = []
    for groups, rows in ((1, 128), (1, 64), (2, 64)):
        products = ceil_div(n_masks + 1, groups)
        # The registers that ptxas leaves for sums, products and masks, estimated from compiled kernels.
        most = 215 if weight_format == "fp8_row" else 211 if groups == 1 else 205
        for columns in _TOKEN_COLUMNS:
            sums = (products + 1) * columns // 2
            if groups <= n_masks and sums <= 192 and sums + 3 * products + n_masks <= most:
                tile = TileWgmma(rows=rows, block_tokens=columns, mask_groups=groups, fp8=True)
                found += [replace(tile, cluster=cluster) for cluster in range(1, 4 - groups)]
    return tuple(one.with_full_ring(n_masks, 8, shared_bytes_per_sm) for one in found)


def suits(config: TileWgmma, call: Call) -> bool:
    """True if tiles are not much wider than the number of tokens, and not higher than the number of rows."""
    width = config.block_tokens
    narrow = width < call.tokens + 16 or width == _TOKEN_COLUMNS[0]
    return narrow and config.rows <= call.out_features and (config.cluster == 1 or call.tokens > width)


@cache
def launches(n_masks: int, weight_bits: int, must_permute: bool, shared_bytes_per_sm: int) -> tuple[TileWgmma, ...]:
    """All launches for which a thread has enough registers, and shared memory holds at least three stages."""
    found = (
        filled(shape, n_masks, weight_bits, shared_bytes_per_sm, least_stages=3)
        for shape in shapes(n_masks, must_permute)
    )
    return tuple(config for config in found if config.stages >= 3)


def filled(config: TileWgmma, n_masks: int, weight_bits: int, shared_bytes_per_sm: int, least_stages: int) -> TileWgmma:
    """Return the launch with as many stages as fit. Stages become short if fewer than `least_stages` would fit."""
    full = config.with_full_ring(n_masks, weight_bits, shared_bytes_per_sm)
    shorter = full.stages < least_stages and n_masks % 2 == 0
    return replace(config, sub=1).with_full_ring(n_masks, weight_bits, shared_bytes_per_sm) if shorter else full


def shapes(n_masks: int, must_permute: bool) -> Iterator[TileWgmma]:
    """Yield all launches, still without a number of stages, for which a thread has enough registers."""
    for groups, passes in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3), (1, 4), (2, 4)):
        masks = n_masks // passes
        if groups > masks or (passes > 1 and (n_masks % passes or masks % 4)):
            continue
        for columns in _TOKEN_COLUMNS:
            accumulators = ceil_div(masks + 1, groups) * columns // 2  # registers of a thread
            if accumulators > (192 if n_masks <= 2 else 168):
                continue
            for rows in _TILE_ROWS if groups == 1 else (64,):
                tile = TileWgmma(rows=rows, block_tokens=columns, mask_groups=groups, passes=passes)
                variants = list(_variants(tile, n_masks, accumulators, must_permute))
                # With several passes, the blocks of a cluster delay each other.
                clusters = (1, 2) if passes == 1 else (1,)
                yield from (replace(variant, cluster=cluster) for cluster in clusters for variant in variants)


def _variants(tile: TileWgmma, n_masks: int, accumulators: int, must_permute: bool) -> Iterator[TileWgmma]:
    """Yield the ways in which a tile can multiply: with x as it is, with a permuted x, and by sparse products.

    Stages are as long as registers allow, since long stages take fewer instructions.
    """
    one_group, columns = tile.mask_groups == 1, tile.block_tokens
    as_it_is = not must_permute and tile.passes == 1
    may_permute = not as_it_is or n_masks > 4 or (n_masks == 4 and one_group)
    for permuted in (False, True):
        if may_permute if permuted else as_it_is:
            # With more accumulators, there are registers for the fragments of only two steps.
            most = 66 if not one_group else 128 if n_masks == 1 else 168 if permuted and n_masks == 4 else 100
            yield replace(tile, sub=2, steps=4 if accumulators <= most else 2, permuted=permuted)
    pays = n_masks >= 2 and columns <= _most_sparse_tokens(n_masks, tile.rows == 64)
    if pays and as_it_is and _fits_sparse(n_masks, tile.mask_groups, columns):
        yield replace(tile, sub=_sub_of_sparse(n_masks, columns), sparse=True)
