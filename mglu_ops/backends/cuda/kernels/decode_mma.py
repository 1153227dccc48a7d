"""The kernel for up to 16 tokens: warps stream W and its masks through shared memory into `mma` instructions.

csrc/cuda/decode_mma.md describes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ....call import Call
from ....sizes import ceil_div, greatest, least, round_up
from ..device import RESERVED_SHARED_BYTES_PER_BLOCK, Gpu
from .base import LaunchConfig, aligned_violations, common_macros, has_aligned_rows, mask_alignment

ROWS = 16
"""The rows of W in a tile, the height of one `mma`."""


def _scales_columns(call: Call) -> bool:
    """True if each scale belongs to 128 columns. Then a stage holds whole groups of 128 columns."""
    return call.weight.format.columns is not None


def _scales_rows(call: Call) -> bool:
    """True if each scale belongs to a row. All such formats have 8 bits."""
    return not (call.weight.format.is_dense or _scales_columns(call))


@dataclass(frozen=True)
class DecodeMma(LaunchConfig):
    """The launch configuration of `decode_mma`.

    A block has `tiles * split_k` warps: `split_k` warps share a tile of 16 rows, and each sums a part of k. Each warp
    has a ring of `stages` stages in shared memory. A stage holds `64 * sub` columns of W and of its masks.
    """

    kernel = "decode_mma"

    tiles: int = 1
    """Tiles of 16 rows of W per block."""
    split_k: int = 1
    stages: int = 2
    sub: int = 1
    mask_group: int = 1
    """Masks whose bits a warp holds in registers at once; divides n_masks."""
    block_tokens: int = 1
    """Tokens per block, which share a read of W. The `mma` always computes multiples of 8 tokens."""
    blocks_per_sm: int = 1
    cluster: int = 1
    """Blocks of a cluster, which load x by multicast: 1, or 2 on compute capability 9.0."""

    @property
    def threads(self) -> int:
        return 32 * self.tiles * self.split_k

    def resident_threads(self) -> int:
        return self.threads * self.blocks_per_sm

    @property
    def token_tiles(self) -> int:
        """Column tiles of the `mma`, of 8 tokens each."""
        return ceil_div(self.block_tokens, 8)

    @property
    def stage_columns(self) -> int:
        return 64 * self.sub

    def token_columns(self, tokens: int) -> int:
        """The columns of a block's `mma` results that the kernel keeps."""
        return 1 if tokens == 1 else 8 * self.token_tiles

    def shared_bytes(self, call: Call) -> int:
        """Bytes for row scales, rings, x and barriers. At the end of a block, sums overwrite the rings and x."""
        warps = self.tiles * self.split_k
        ring = self.stages * ROWS * call.bytes_of_columns(self.stage_columns)
        columns = round_up(call.in_features, self.stage_columns)
        sums = round_up(4 * (call.n_masks + 1) * ROWS * self.token_columns(call.tokens), 128)
        rows_of_x = (columns * 2 + 16) * least(call.tokens, self.block_tokens)
        if call.tokens == 1 and call.weight.bits == 4:  # a zero follows each element of x
            rows_of_x = columns * 4
        scales = round_up(4 * ROWS * self.tiles, 128) if _scales_rows(call) else 0
        return scales + greatest(warps * ring + rows_of_x, warps * sums) + 32

    def requested_shared_bytes(self, call: Call, gpu: Gpu) -> int:
        """Request so much that an SM holds at most `blocks_per_sm` blocks, which spreads blocks over all SMs."""
        share = gpu.shared_bytes_per_sm // (self.blocks_per_sm + 1)
        return greatest(self.shared_bytes(call), share - RESERVED_SHARED_BYTES_PER_BLOCK + 128)

    def grid(self, call: Call, gpu: Gpu) -> tuple[int, int]:
        blocks = ceil_div(call.out_features, ROWS * self.tiles) * ceil_div(call.tokens, self.block_tokens)
        return round_up(blocks, self.cluster), 1

    def macros(self, call: Call) -> dict[str, int]:
        widest = 16 if self.stage_columns // 8 * call.n_masks % 16 == 0 else 8  # divides the masks of a row in a stage
        return common_macros(call) | {
            "MGLU_TILES": self.tiles,
            "MGLU_SPLIT_K": self.split_k,
            "MGLU_STAGES": self.stages,
            "MGLU_MASK_VECTOR": min(widest, mask_alignment(call)),
            "MGLU_BLOCKS_PER_SM": self.blocks_per_sm,
            "MGLU_SUB": self.sub,
            "MGLU_MASK_GROUP": self.mask_group,
            "MGLU_TOKEN_TILES": self.token_tiles,
            "MGLU_BLOCK_TOKENS": self.block_tokens,
            "MGLU_TOKEN_COLUMNS": self.token_columns(call.tokens),
            "MGLU_READ_ONCE": int(call.tokens <= self.block_tokens),
            "MGLU_CLUSTER": self.cluster,
        }

    def _violations(self, call: Call, gpu: Gpu) -> Iterator[str]:
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


def can_run(call: Call, gpu: Gpu) -> bool:
    """True if the kernel takes a call, provided that a block fits into shared memory."""
    return has_aligned_rows(call) and call.dtype != torch.float32 and call.out_features >= ROWS and gpu.arch >= (8, 0)


def choose(call: Call, gpu: Gpu) -> DecodeMma | None:
    """Choose the launch of a call, or return None if the kernel cannot run it.

    In the batch-invariant mode the order of sums must not depend on the number of tokens. So every call gets the launch
    of a call of 8 tokens, with at most 4 warps per tile. With 8 or more warps, the masks of a single token would be
    summed in another order (csrc/cuda/decode_mma.md).
    """
    if not can_run(call, gpu):
        return None
    asked = replace(call, leading=(8,)) if call.batch_invariant else call
    fitted = fit(_preferred(asked, gpu), asked, gpu)
    if fitted is None:
        return None
    if call.batch_invariant:
        return replace(fitted, split_k=min(fitted.split_k, 4))
    # Clusters of four blocks would take 1.6 times as long as clusters of two.
    pairs = gpu.arch == (9, 0) and 1 < call.tokens <= fitted.block_tokens
    return replace(fitted, cluster=2) if pairs else fitted


def most_tokens_on_hopper(call: Call, gpu: Gpu) -> int:
    """The most tokens for which this kernel is faster than `tile_wgmma`: 8 or 16 (measured; csrc/cuda/decode_mma.md).

    The number is 16 if the preferred launch for 16 tokens fits into shared memory and a block has few tiles. Then a
    second column tile takes less time than `tile_wgmma` takes to start and to decode W.
    """
    sixteen = replace(call, leading=(16,))
    preferred = _preferred(sixteen, gpu)
    fits = fit(preferred, sixteen, gpu) == preferred
    most_tiles = 2 if call.n_masks > 8 else 8 if call.n_masks <= 2 and call.weight.bits == 8 else 6
    return 16 if fits and preferred.tiles <= most_tiles else 8


def _tiles_of_block(out_features: int, multiprocessors: int) -> int:
    """Tiles of 16 rows per block. All SMs get equal shares of the rows, in one block each if possible.

    With one block per SM, x is stored once per SM, and no SM waits for another.
    """
    tiles_of_sm = ceil_div(out_features, ROWS * multiprocessors)
    waves = ceil_div(tiles_of_sm, 8)
    return ceil_div(tiles_of_sm, waves)


def _preferred(call: Call, gpu: Gpu) -> DecodeMma:
    """The best launch for 1 to 16 tokens, ignoring the limit of shared memory."""
    return in_one_wave(call, _tiles_of_block(call.out_features, gpu.multiprocessors))


def in_one_wave(call: Call, tiles: int) -> DecodeMma:
    """The best launch for 1 to 16 tokens if an SM has one block of `tiles` tiles, ignoring the limit of shared memory.

    The rules come from measurements (csrc/cuda/decode_mma.md):

    - split_k: the largest power of two for which the block has at most 12 warps, three for each scheduler of an SM.
      With scales of columns and 8 or more masks, the limit is 8 warps.
    - sub for up to 8 masks: 2 if warps are few and each has at least four stages of that length; 4 for 8- and 4-bit
      weights if each warp has at least eight stages of that length.
    - sub for more masks: 2 if one warp has all of k.
    - Weights in 8 bits get up to 16 warps and the shortest stages in two cases: with scales of rows, for one mask and
      more than 8 tokens; with scales of columns, for one or two masks and one token.
    - mask_group: 4 if it divides n_masks, since small groups need few registers. For 8 masks with long stages, 8 is
      faster.
    """
    n_masks = call.n_masks
    # Scales of columns double a thread's registers for sums. With many masks, only blocks of at most 8 warps fit.
    many_warps = call.weight.bits == 8 and (
        call.tokens > 8 and n_masks == 1 if _scales_rows(call) else call.tokens == 1 and n_masks <= 2
    )
    most_warps = 16 if many_warps else 8 if _scales_columns(call) and n_masks >= 8 else 12
    split_k = next(split for split in (8, 4, 2, 1) if split * tiles <= most_warps)
    if n_masks <= 8:
        few_warps = tiles * split_k <= (10 if n_masks <= 2 else 8)
        long_stages = few_warps and call.in_features >= split_k * 4 * 128
    else:  # long stages for 16 tokens with 8- or 4-bit weights would need too many registers
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


def in_several_waves(call: Call, rows: int) -> list[DecodeMma]:
    """Return launches, the best first, for SMs that run many blocks in turn, each for about `rows` tokens.

    The caller uses the first launch whose blocks fit into shared memory. Several small blocks on an SM hide each
    other's start and end. But every block reads its x. So with many tokens, or where x leaves no room for two blocks,
    an SM has one block of 16 warps (csrc/cuda/decode_mma.md, "Experts").
    """
    n_masks, in_16_bits, few_rows = call.n_masks, call.weight.bits == 16, [(2, 4, 2), (3, 4, 1)]
    if n_masks > (4 if call.tokens > 8 or _scales_columns(call) else 8):  # too few registers for 16 warps
        shapes = [(2, 4, 1)]
    elif rows == 1:
        most_blocks = (2, 4, 3) if n_masks <= 2 and _scales_rows(call) else (1, 4, 4)
        shapes = [most_blocks, *([(1, 4, 3)] if in_16_bits else []), *few_rows]
    elif _scales_columns(call) and n_masks > 2:  # for more rows, too few registers for 16 warps
        shapes = [(4, 2, 1)] if rows > 4 else few_rows
    elif call.tokens > 8:
        shapes = [(8, 2, 1)]
    elif in_16_bits:
        shapes = [(2, 4, 2), (8, 2, 1)] if rows > 4 else few_rows
    else:
        two_blocks = [(4, 2, 2), (3, 2, 2)] if n_masks <= 2 else [(3, 2, 2)]
        shapes = [*two_blocks, *([(2, 4, 2)] if rows <= 4 else []), (8, 2, 1)]
    return [_of_shape(call, *shape) for shape in shapes]


def _of_shape(call: Call, tiles: int, split_k: int, blocks_per_sm: int) -> DecodeMma:
    """A launch of `in_several_waves`. Stages are long if each warp has at least four of them."""
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


def _block_tokens(call: Call) -> int:
    """Return 16 (two column tiles) for more than 8 tokens if there are enough registers, and 8 otherwise."""
    return 16 if call.tokens > 8 and not (call.n_masks > 8 and _scales_columns(call)) else 8


def fit(config: DecodeMma, call: Call, gpu: Gpu) -> DecodeMma | None:
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
