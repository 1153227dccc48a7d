"""How a CUDA kernel is cut: compile-time constants of its source, and the geometry of its launch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

KernelName = Literal["decode_mma", "plain", "tile_wgmma"]

MAX_TOKENS = 512
"""Of the kernels that read W again, from L2 or from memory, for every 8 or 16 tokens: all but `tile_wgmma`."""

_SHARED_PER_SM = {(8, 0): 164, (8, 7): 164, (9, 0): 228, (10, 0): 228, (10, 3): 228, (11, 0): 228}
_SHARED_PER_SM_OTHER = 100  # sm_86, 89, 120
RESERVED_PER_BLOCK = 1024  # what the driver keeps of shared memory for itself


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel is cut: compile-time constants of its source plus the launch.

    A block of `decode_mma` has `tiles * split_k` warps. A tile is 16 rows of W, whose sum over k `split_k` warps share.
    Each warp keeps `stages` stages of `sub` times 64 columns in flight in shared memory.

    `tile_wgmma` is cut differently: a block computes tiles of `rows` rows by `block_tokens` tokens, from stages of
    `sub` times 64 columns, with one warpgroup that copies and `mask_groups` for every 64 rows.
    """

    kernel: KernelName
    rows: int = 16
    tiles: int = 1
    split_k: int = 1
    stages: int = 2
    sub: int = 1
    mask_group: int = 1
    """`decode_mma`: masks whose bits are in registers at a time."""
    block_tokens: int = 1
    """Tokens that share a read of W. `decode_mma` computes 8 columns at a time whatever their number."""
    blocks_per_sm: int = 1
    mask_groups: int = 1
    """`tile_wgmma`: warpgroups that share 64 rows, each with its part of the masks."""
    passes: int = 1
    """`tile_wgmma`: how often k is gone through, each time for as many of the masks: 4, or a multiple of it."""
    steps: int = 4
    """`tile_wgmma`: wgmmas of 16 columns that are issued together."""
    sparse: bool = False
    """`tile_wgmma`: mask bits are places of sparse products: no signs are flipped, and x is twice as many bytes."""
    turned: bool = False
    """`tile_wgmma`: x is copied first by `permute_x`, whatever its strides, with its columns in an order that suits
    masks best; else it is read as it is, in rows of 16-byte vectors."""
    cluster: int = 1
    """Neighbouring blocks that bring each other (multicast) x, of `decode_mma`, or W and its masks, of `tile_wgmma`: 1
    or, on compute capability 9.0, 2."""

    def __str__(self) -> str:
        """The kernel, and what differs from the defaults."""
        return f"{self.kernel}({', '.join(f'{name}={value}' for name, value in self.settings().items())})"

    def settings(self) -> dict[str, int]:
        """The fields that differ from their defaults, but for the kernel."""
        found = {field.name: (getattr(self, field.name), field.default) for field in fields(self)[1:]}
        return {name: value for name, (value, default) in found.items() if value != default}

    @property
    def threads(self) -> int:
        if self.kernel == "plain":
            return 256
        if self.kernel == "tile_wgmma":
            return 128 * (self.row_groups * self.mask_groups + 1)
        return 32 * self.tiles * self.split_k

    @property
    def row_groups(self) -> int:
        """`tile_wgmma`: pieces of 64 rows, the last of which may overlap the one before."""
        return -(-self.rows // 64)

    def mask_row_bytes(self, n_masks: int) -> int:
        """`tile_wgmma`: of a row of a box of masks: a multiple of 16, so that an odd number goes by two chunks."""
        return 8 * n_masks * (1 + n_masks % 2)

    @property
    def token_tiles(self) -> int:
        """MMA columns of `decode_mma`, over 8."""
        return -(-self.block_tokens // 8)

    @property
    def stage_columns(self) -> int:
        return 64 * self.sub

    def token_columns(self, tokens: int) -> int:
        """Columns of the MMA result that are kept."""
        return 1 if tokens == 1 else 8 * self.token_tiles

    def mask_vector(self, n_masks: int) -> int:
        """The widest copy of mask bytes that divides a stage's row of masks."""
        return 16 if self.stage_columns // 8 * n_masks % 16 == 0 else 8

    def shared_bytes(self, n_masks: int, tokens: int, in_features: int) -> int:
        """Dynamic shared memory of a block: of `decode_mma` every warp's ring, then x; the sums take their place."""
        if self.kernel == "plain":
            return 0
        if self.kernel == "tile_wgmma":
            hands_on = self.mask_groups == 2 or self.passes > 1
            exchange = self.row_groups * self.block_tokens * 512 if hands_on else 0
            barriers = 24 if self.sparse else 16
            return self.stages * (self._tile_stage_bytes(n_masks) + barriers) + exchange
        warps = self.tiles * self.split_k
        ring = self.stages * self.rows * self.stage_columns // 8 * (16 + n_masks)
        columns = -(-in_features // self.stage_columns) * self.stage_columns
        sums = round_up(4 * (n_masks + 1) * self.rows * self.token_columns(tokens), 128)
        rows_of_x = (columns * 2 + 16) * min(tokens, self.block_tokens)
        return max(warps * ring + rows_of_x + 32, warps * sums)

    def reserved_bytes(self, arch: tuple[int, int], n_masks: int, tokens: int, in_features: int) -> int:
        """Dynamic shared memory that a launch asks for.

        Of `decode_mma` it is so much that no SM takes more than `blocks_per_sm` blocks while another has none (8 masks,
        2 tokens, 8192 x 2048: 22.7 us without, 15.2 with).
        """
        need = self.shared_bytes(n_masks, tokens, in_features)
        if self.kernel != "decode_mma":
            return need
        return max(need, shared_limit(arch) // (self.blocks_per_sm + 1) - RESERVED_PER_BLOCK + 128)

    def _tile_stage_bytes(self, n_masks: int) -> int:
        """Of `tile_wgmma`: x, W and masks."""
        x = self.block_tokens * (256 if self.sparse else 128)
        return round_up(self.sub * (x + self.rows * (128 + 8 * n_masks)), 1024)

    def turned_bytes(self, tokens: int, in_features: int) -> int:
        """Of the copy of x that `permute_x` makes: whole tiles of tokens and whole stages of columns."""
        return round_up(tokens, self.block_tokens) * round_up(in_features, 64 * self.sub) * 2

    def turn_blocks(self, tokens: int, in_features: int) -> int:
        """Blocks of `permute_x`: each of its 8 warps takes 8 tokens by 64 columns."""
        return -(-round_up(tokens, self.block_tokens) * round_up(in_features, 64 * self.sub) // (8 * 8 * 64))

    def grid(self, tokens: int, out_features: int, multiprocessors: int) -> tuple[int, int]:
        groups = -(-tokens // self.block_tokens)
        if self.kernel == "plain":
            return -(-out_features // (self.threads // 32)), groups
        blocks = -(-out_features // (self.rows * self.tiles))
        if self.kernel == "tile_wgmma":
            tiles = blocks * -(-groups // self.cluster)
            return self.cluster * min(tiles, multiprocessors // self.cluster), 1
        return round_up(blocks * groups, self.cluster), 1


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def shared_limit(arch: tuple[int, int]) -> int:
    """Shared memory of one SM in bytes."""
    return 1024 * _SHARED_PER_SM.get(arch, _SHARED_PER_SM_OTHER)


def fill_shared(config: LaunchConfig, n_masks: int) -> LaunchConfig:
    """`config` of `tile_wgmma` with as many stages as an SM of compute capability 9.0 holds, up to 12."""
    limit = shared_limit((9, 0)) - RESERVED_PER_BLOCK
    fixed = replace(config, stages=0).shared_bytes(n_masks, 0, 0)
    of_stage = replace(config, stages=1).shared_bytes(n_masks, 0, 0) - fixed
    return replace(config, stages=min(12, (limit - fixed) // of_stage))
