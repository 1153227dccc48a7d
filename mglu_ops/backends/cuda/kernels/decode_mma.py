"""The kernel for up to 16 tokens: warps stream W and its masks through shared memory into `mma`.

Its page is csrc/cuda/decode_mma.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ....layer_call import LayerCall
from ....sizes import ceil_div, round_up
from ..device import RESERVED_SHARED_BYTES_PER_BLOCK, Gpu
from .base import LaunchConfig, aligned_violations, common_macros, has_aligned_rows, mask_alignment

ROWS = 16
"""Rows of W in a tile, which is one `mma` high."""


def _scales_columns(call: LayerCall) -> bool:
    """True if scales belong to groups of 128 columns; a stage then holds whole groups."""
    return call.weight.format.columns is not None


def _scales_rows(call: LayerCall) -> bool:
    """True if scales belong to rows, whose weights then have 8 bits."""
    return not (call.weight.format.is_dense or _scales_columns(call))


@dataclass(frozen=True)
class DecodeMma(LaunchConfig):
    """A block has `tiles * split_k` warps. The `split_k` warps of a tile share its sum over k.

    Each warp keeps `stages` stages of `sub` times 64 columns in flight in shared memory.
    """

    kernel = "decode_mma"

    tiles: int = 1
    """Tiles of 16 rows of W that a block computes."""
    split_k: int = 1
    stages: int = 2
    sub: int = 1
    mask_group: int = 1
    """Masks whose bits a warp holds in registers at once; divides n_masks."""
    block_tokens: int = 1
    """Tokens that share a read of W. The kernel always computes 8 columns at a time."""
    blocks_per_sm: int = 1
    cluster: int = 1
    """Neighbouring blocks that load x together (multicast): 1, or 2 on compute capability 9.0."""

    @property
    def threads(self) -> int:
        return 32 * self.tiles * self.split_k

    def resident_threads(self) -> int:
        return self.threads * self.blocks_per_sm

    @property
    def token_tiles(self) -> int:
        """Columns of the `mma`, divided by 8."""
        return ceil_div(self.block_tokens, 8)

    @property
    def stage_columns(self) -> int:
        return 64 * self.sub

    def token_columns(self, tokens: int) -> int:
        """Columns of the `mma`'s result that are kept."""
        return 1 if tokens == 1 else 8 * self.token_tiles

    def mask_vector(self, n_masks: int) -> int:
        """Bytes of the widest copy that divides a stage's row of masks."""
        return 16 if self.stage_columns // 8 * n_masks % 16 == 0 else 8

    def shared_bytes(self, call: LayerCall) -> int:
        """Bytes of the rows' scales, of all rings and x, which the sums overwrite at the end, and of the barriers."""
        warps = self.tiles * self.split_k
        ring = self.stages * ROWS * call.bytes_of_columns(self.stage_columns)
        columns = round_up(call.in_features, self.stage_columns)
        sums = round_up(4 * (call.n_masks + 1) * ROWS * self.token_columns(call.tokens), 128)
        rows_of_x = (columns * 2 + 16) * min(call.tokens, self.block_tokens)
        if call.tokens == 1 and call.weight.bits == 4:  # each element with a zero after it
            rows_of_x = columns * 4
        scales = round_up(4 * ROWS * self.tiles, 128) if _scales_rows(call) else 0
        return scales + max(warps * ring + rows_of_x, warps * sums) + 32

    def requested_shared_bytes(self, call: LayerCall, gpu: Gpu) -> int:
        """Enough that no SM takes more than `blocks_per_sm` blocks while another has none."""
        share = gpu.shared_bytes_per_sm // (self.blocks_per_sm + 1)
        return max(self.shared_bytes(call), share - RESERVED_SHARED_BYTES_PER_BLOCK + 128)

    def grid(self, call: LayerCall, gpu: Gpu) -> tuple[int, int]:
        blocks = ceil_div(call.out_features, ROWS * self.tiles) * ceil_div(call.tokens, self.block_tokens)
        return round_up(blocks, self.cluster), 1

    def macros(self, call: LayerCall) -> dict[str, int]:
        return common_macros(call) | {
            "MGLU_TILES": self.tiles,
            "MGLU_SPLIT_K": self.split_k,
            "MGLU_STAGES": self.stages,
            "MGLU_MASK_VECTOR": min(self.mask_vector(call.n_masks), mask_alignment(call)),
            "MGLU_BLOCKS_PER_SM": self.blocks_per_sm,
            "MGLU_SUB": self.sub,
            "MGLU_MASK_GROUP": self.mask_group,
            "MGLU_TOKEN_TILES": self.token_tiles,
            "MGLU_BLOCK_TOKENS": self.block_tokens,
            "MGLU_TOKEN_COLUMNS": self.token_columns(call.tokens),
            "MGLU_READ_ONCE": int(call.tokens <= self.block_tokens),
            "MGLU_CLUSTER": self.cluster,
        }

    def _violations(self, call: LayerCall, gpu: Gpu) -> Iterator[str]:
        yield from aligned_violations(self.kernel, call, ROWS)
        if _scales_columns(call) and self.sub == 1:
            yield f"sub: got 1, must be 2 or 4 for {call.weight.format.name}"
        if self.block_tokens > 16:
            yield f"block_tokens: got {self.block_tokens}, must be 1 to 16"
        if self.cluster > 1 and (self.cluster > 2 or gpu.arch != (9, 0) or call.tokens > self.block_tokens):
            yield f"cluster: got {self.cluster}, must be 1, or 2 on compute capability 9.0 where a block has all tokens"
        if self.sub not in (1, 2, 4):
            yield f"sub: got {self.sub}, must be 1, 2 or 4"
        swizzled = self.sub * call.n_masks % 16 == 0
        whole_words = self.mask_group in (4, 8, 16) or (self.mask_group == call.n_masks and not swizzled)
        if call.n_masks % self.mask_group or not whole_words:
            yield f"mask_group: got {self.mask_group}, must divide n_masks {call.n_masks} into whole words"


def can_run(call: LayerCall, gpu: Gpu) -> bool:
    """True if the kernel takes a call, if its blocks fit."""
    return has_aligned_rows(call) and call.dtype != torch.float32 and call.out_features >= ROWS and gpu.arch >= (8, 0)


def choose(call: LayerCall, gpu: Gpu) -> DecodeMma | None:
    """The launch of a call, or None where the kernel cannot run it.

    In the batch-invariant mode the order of sums must not depend on the number of tokens. So every call runs like a
    call of 8 tokens, and with at most 4 warps per tile, since 8 or more would add up a single token's masks in another
    order (csrc/cuda/decode_mma.md).
    """
    if not can_run(call, gpu):
        return None
    asked = replace(call, leading=(8,)) if call.batch_invariant else call
    fitted = fit(_preferred(asked, gpu), asked, gpu)
    if fitted is None:
        return None
    if call.batch_invariant:
        return replace(fitted, split_k=min(fitted.split_k, 4))
    # Clusters of four take 1.6 times as long as pairs: not all of them seem to be resident at once.
    pairs = gpu.arch == (9, 0) and 1 < call.tokens <= fitted.block_tokens
    return replace(fitted, cluster=2) if pairs else fitted


def most_tokens_on_hopper(call: LayerCall, gpu: Gpu) -> int:
    """The most tokens of a layer for which this kernel is faster than `tile_wgmma`.

    16 where x of 16 tokens fits into shared memory beside the rings and a block has few tiles, else 8. With 16 tokens
    this kernel needs two column tiles, but `tile_wgmma` takes longer to start, and longer to decode W (measurements:
    csrc/cuda/decode_mma.md).
    """
    sixteen = replace(call, leading=(16,))
    preferred = _preferred(sixteen, gpu)
    fits = fit(preferred, sixteen, gpu) == preferred
    most_tiles = 2 if call.n_masks > 8 else 8 if call.n_masks <= 2 and call.weight.bits == 8 else 6
    return 16 if fits and preferred.tiles <= most_tiles else 8


def _tiles_of_block(out_features: int, multiprocessors: int) -> int:
    """Tiles of 16 rows per block, so that all SMs get equal shares of the rows, in one block each if possible.

    With one block per SM, x is stored once per SM, and no SM waits for another.
    """
    tiles_of_sm = ceil_div(out_features, ROWS * multiprocessors)
    waves = ceil_div(tiles_of_sm, 8)
    return ceil_div(tiles_of_sm, waves)


def _preferred(call: LayerCall, gpu: Gpu) -> DecodeMma:
    """The best launch for 1 to 16 tokens if shared memory were unlimited."""
    return in_one_wave(call, _tiles_of_block(call.out_features, gpu.multiprocessors))


def in_one_wave(call: LayerCall, tiles: int) -> DecodeMma:
    """The best launch for 1 to 16 tokens if an SM gets one block, of `tiles`, and shared memory is unlimited.

    An SM has two or three warps for each of its four schedulers, a power of two of them along k. Up to 8 masks, stages
    are twice as long if warps are few and each has at least four long stages; beyond 8 masks, if a warp has all of k.
    In 8 and 4 bits, up to 8 masks, they are four times as long if each warp has at least eight of them. From 9 tokens
    on, one mask of rows with scales has up to four warps for a scheduler, and the shortest stages; so have one and two
    masks of blocks with scales for one token.
    Mask bits are held for four masks at a time, which needs the fewest registers, or for all 8 where stages are
    swizzled, which is faster. The measurements are in csrc/cuda/decode_mma.md.
    """
    n_masks = call.n_masks
    # Sums of groups of columns take as many registers as all others, which 8 warps have.
    many_warps = call.weight.bits == 8 and (
        call.tokens > 8 and n_masks == 1 if _scales_rows(call) else call.tokens == 1 and n_masks <= 2
    )
    most_warps = 16 if many_warps else 8 if _scales_columns(call) and n_masks >= 8 else 12
    split_k = next(split for split in (8, 4, 2, 1) if split * tiles <= most_warps)
    if n_masks <= 8:
        few_warps = tiles * split_k <= (10 if n_masks <= 2 else 8)
        long_stages = few_warps and call.in_features >= split_k * 4 * 128
    else:  # 16 tokens in fewer bits would need more registers than there are
        long_stages = split_k == 1 and (call.weight.bits == 16 or call.tokens <= 8)
    long_stages = long_stages or _scales_columns(call)
    shortest = 2 if _scales_columns(call) else 1
    longest = call.weight.bits <= 8 and n_masks <= 8 and call.in_features >= split_k * 8 * 256
    return DecodeMma(
        tiles=tiles,
        split_k=split_k,
        sub=shortest if many_warps or not long_stages else 4 if longest else 2,
        mask_group=_mask_group(n_masks, long_stages),
        block_tokens=_block_tokens(call),
    )


def in_several_waves(call: LayerCall, rows: int) -> list[DecodeMma]:
    """The best launches if every SM gets many blocks, one after the other, with about `rows` tokens each.

    The first one whose blocks all fit into the shared memory is the best. Small blocks, several on an SM, fill the gaps
    in which another one starts or ends. But each block reads its x, so that many tokens need larger blocks
    (csrc/cuda/decode_mma.md, "Experts").
    """
    n_masks, in_16_bits = call.n_masks, call.weight.bits == 16
    if n_masks > (4 if call.tokens > 8 or _scales_columns(call) else 8):  # more registers than two blocks have
        shapes = [(2, 4, 1)]
    elif rows > 4:
        shapes = [(3, 4, 1)] if in_16_bits else [(4, 2, 1)]
        if not _scales_columns(call) or n_masks <= 2:  # two blocks have enough registers
            small = [(2, 4, 2)] if call.tokens <= 8 else []
            shapes = [*small, *shapes] if in_16_bits else [(4, 2, 2), *small, *shapes]
    else:
        shapes = [(2, 4, 2), (3, 4, 1)]
        if rows == 1 and in_16_bits:
            shapes = [(1, 4, 4), (1, 4, 3), *shapes]
        elif rows == 1:
            shapes = [(2, 4, 3) if n_masks <= 2 and _scales_rows(call) else (1, 4, 4), *shapes]
    return [_of_shape(call, *shape) for shape in shapes]


def _of_shape(call: LayerCall, tiles: int, split_k: int, blocks_per_sm: int) -> DecodeMma:
    """One of the launches of `in_several_waves`. Stages are long if a warp has four of them."""
    long_stages = call.n_masks <= 8 and call.in_features >= split_k * 4 * 128
    longest = long_stages and split_k == 2 and call.in_features >= split_k * 4 * 256
    long_stages = long_stages or _scales_columns(call)
    return DecodeMma(
        tiles=tiles,
        split_k=split_k,
        sub=4 if longest else 2 if long_stages else 1,
        mask_group=_mask_group(call.n_masks, long_stages),
        block_tokens=_block_tokens(call),
        blocks_per_sm=blocks_per_sm,
    )


def _mask_group(n_masks: int, long_stages: bool) -> int:
    return 4 if n_masks % 4 == 0 and not (n_masks == 8 and long_stages) else n_masks


def _block_tokens(call: LayerCall) -> int:
    """A column tile of the product, or two where registers allow it."""
    return 16 if call.tokens > 8 and not (call.n_masks > 8 and _scales_columns(call)) else 8


def fit(config: DecodeMma, call: LayerCall, gpu: Gpu) -> DecodeMma | None:
    """Return the nearest configuration whose blocks fit into an SM's shared memory, or None."""
    while True:
        need = config.shared_bytes(call) + RESERVED_SHARED_BYTES_PER_BLOCK
        blocks = min(config.blocks_per_sm, gpu.shared_bytes_per_sm // need)
        if blocks > 0:
            return replace(config, blocks_per_sm=blocks)
        if config.stages > 2:
            config = replace(config, stages=config.stages - 1)
        elif config.sub > (2 if _scales_columns(call) else 1):
            config = replace(config, sub=config.sub // 2)
        elif config.block_tokens > 2:  # x needs less space; W is read again, mostly from L2
            config = replace(config, block_tokens=config.block_tokens // 2)
        elif config.tiles > 1:
            config = replace(config, tiles=config.tiles // 2)
        elif config.split_k > 1:
            config = replace(config, split_k=config.split_k // 2)
        else:
            return None
