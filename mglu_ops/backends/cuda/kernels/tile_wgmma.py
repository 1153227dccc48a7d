"""The kernel for many tokens on compute capability 9.0, by `wgmma` instructions.

Mask bits flip the signs of W, or are the metadata of sparse products. csrc/cuda/tile_wgmma.md describes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ....call import Call
from ....sizes import ceil_div, least, round_up
from ..device import RESERVED_SHARED_BYTES_PER_BLOCK, Gpu
from ..launch import Plan, Step
from ..tensor_map import Matrix
from . import decode_weight, permute_x, quantize_x
from .base import (
    LaunchConfig,
    aligned_violations,
    common_macros,
    has_aligned_rows,
    has_x_in_rows,
    integers,
    mask_alignment,
)

ARCH = (9, 0)
"""The only compute capability with `wgmma`."""

MOST_STAGES = 12


@dataclass(frozen=True)
class TileWgmma(LaunchConfig):
    """The launch configuration of `tile_wgmma`.

    A block computes tiles of `rows` rows of W by `block_tokens` tokens. A stage holds `sub` chunks of 64 columns. A
    block has one producer warpgroup and, for every 64 rows, `mask_groups` consumer warpgroups.
    """

    kernel = "tile_wgmma"

    rows: int = 64
    """Rows of W in a tile. If this is not a multiple of 64, the last two groups of 64 rows overlap."""
    block_tokens: int = 8
    stages: int = 2
    sub: int = 1
    mask_groups: int = 1
    """Consumer warpgroups that compute the same 64 rows, each for a share of the masks."""
    passes: int = 1
    """Passes of a tile over k, each for an equal share of the masks. With several, a pass has a multiple of 4 masks."""
    steps: int = 4
    """`wgmma` instructions, of 16 columns each, that are issued as one group."""
    sparse: bool = False
    """Use sparse `wgmma` with mask bits as metadata. No signs are flipped, but x takes twice as many bytes."""
    permuted: bool = False
    """Read the copy of x that `permute_x` makes, with columns in the order in which mask bits are read. Otherwise the
    kernel reads x itself, which must have 16-byte aligned rows."""
    cluster: int = 1
    """Blocks of a cluster, which load W and its masks by multicast: 1 or 2."""
    decoded: bool = False
    """Read the copy of W in x's dtype that `decode_weight` makes. For many tokens this saves time."""
    fp8: bool = False
    """Multiply in fp8, with an x that `quantize_x` has rounded. Then a chunk has 128 columns."""

    @property
    def rounds_x(self) -> bool:
        return self.fp8

    @property
    def threads(self) -> int:
        return 128 * (self.row_groups * self.mask_groups + 1)

    @property
    def row_groups(self) -> int:
        """The groups of 64 rows in a tile."""
        return ceil_div(self.rows, 64)

    def target(self, gpu: Gpu) -> str:
        """The architecture-specific target `sm_90a`, which has `wgmma`."""
        return super().target(gpu) + "a"

    def as_read(self, call: Call) -> Call:
        """Return the call that the kernel sees: with a weight in x's dtype if `decode_weight` runs first."""
        return call.with_dense_weight if self.decoded else call

    def shared_bytes(self, call: Call) -> int:
        call = self.as_read(call)
        return self.stages * self._stage_bytes(call.n_masks, call.weight.bits) + self._fixed_bytes(call.n_masks)

    @property
    def chunk_columns(self) -> int:
        """The columns of a chunk, which is 128 bytes of x per token."""
        return 128 if self.fp8 else 64

    def _fixed_bytes(self, n_masks: int) -> int:
        """The bytes for sums that warpgroups with the same rows exchange, or that one pass leaves for the next."""
        exchanges = self.mask_groups == 2 or self.passes > 1
        return self.row_groups * self.block_tokens * 512 if exchanges else 0

    def _stage_bytes(self, n_masks: int, weight_bits: int) -> int:
        """The bytes of one stage of the ring, with its barriers."""
        x = self.block_tokens * (256 if self.sparse else 128)
        barriers = 24 if self.sparse else 16
        chunk = x + self.rows * self.chunk_columns // 8 * (weight_bits + n_masks)
        return round_up(self.sub * chunk, 1024) + barriers

    def with_full_ring(self, n_masks: int, weight_bits: int, shared_bytes_per_sm: int) -> TileWgmma:
        """Return this launch with as many stages as fit into the shared memory of an SM, at most `MOST_STAGES`."""
        limit = shared_bytes_per_sm - RESERVED_SHARED_BYTES_PER_BLOCK - self._fixed_bytes(n_masks)
        return replace(self, stages=min(MOST_STAGES, limit // self._stage_bytes(n_masks, weight_bits)))

    def grid(self, call: Call, gpu: Gpu) -> tuple[int, int]:
        token_tiles = ceil_div(ceil_div(call.tokens, self.block_tokens), self.cluster)
        tiles = ceil_div(call.out_features, self.rows) * token_tiles
        return self.cluster * least(tiles, gpu.multiprocessors // self.cluster), 1

    def macros(self, call: Call) -> dict[str, int]:
        return common_macros(self.as_read(call)) | {
            "MGLU_TOKEN_COLUMNS": self.block_tokens,
            "MGLU_BLOCK_ROWS": self.rows,
            "MGLU_MASK_GROUPS": self.mask_groups,
            "MGLU_PASSES": self.passes,
            "MGLU_STAGES": self.stages,
            "MGLU_SUB": self.sub,
            "MGLU_STEPS": self.steps,
            "MGLU_BULK_MASKS": int(self.loads_masks(call)),
            "MGLU_SPARSE": int(self.sparse),
            "MGLU_PERMUTED": int(self.permuted or self.fp8),
            "MGLU_FP8": int(self.fp8),
            "MGLU_CLUSTER": self.cluster,
        }

    def matrices(self, call: Call) -> tuple[Matrix | None, Matrix, Matrix | None]:
        """Return x, W and the masks for TMA: None for x if the kernel reads a copy of it, and for unaligned masks."""
        call = self.as_read(call)
        x = None
        if not (self.permuted or self.fp8):
            pitch = 2 * (call.x.strides[0] if call.tokens > 1 else call.in_features)
            x = Matrix(2, call.in_features, call.tokens, pitch, 64, least(self.block_tokens, call.tokens), swizzle=True)
        rows = self.rows // self.cluster
        item, packed = call.weight.dtype.itemsize, call.weight.format.packed
        pitch = call.weight.layout.strides[0] * item
        columns = self.chunk_columns // packed
        weight = Matrix(item, call.in_features // packed, call.out_features, pitch, columns, rows, swizzle=True)
        if not self.loads_masks(call):
            return x, weight, None
        width = call.in_features // 8 * call.n_masks
        # The width of a box must be a multiple of 16 bytes, so odd numbers of masks take two chunks of 64 columns.
        box = 8 * call.n_masks * (2 if self.fp8 or call.n_masks % 2 else 1)
        pitch, swizzle = call.masks.strides[0], call.n_masks == 16 and not self.fp8
        return x, weight, Matrix(1, width, call.out_features, pitch, box, rows, swizzle=swizzle)

    def loads_masks(self, call: Call) -> bool:
        """True if TMA loads the masks, which requires 16-byte aligned rows. Otherwise threads load them."""
        return mask_alignment(call) == 16

    def results(self, call: Call) -> dict[str, Matrix]:
        """The matrices that TMA writes: none in inference, where threads store the result."""
        return {}

    def plan(self, call: Call, gpu: Gpu) -> Plan:
        copies, target = [], self.target(gpu)
        if self.decoded:
            copies.append(decode_weight.step(call, gpu, target))
        if self.permuted:
            # The main kernel reads W before it waits for `permute_x`. W is decoded by then, because `permute_x` itself
            # waits for `decode_weight`.
            copies.append(permute_x.step(call, gpu, target, self.block_tokens, self.sub))
        if self.fp8:
            copies.append(quantize_x.step(call, gpu, target, self.block_tokens))
        x, weight, masks = self.matrices(call)
        # x is apart from W and the masks, because a group is encoded again if an address in it changes, as x's does.
        maps: list[dict[str, Matrix | None]] = [] if x is None else [{"x": x}]
        maps.append({"weight": weight, "packed_masks": masks})
        results = self.results(call)
        if results:
            maps.append({**results})
        kernel = Step(
            self.kernel,
            target,
            self.macros(call),
            self.grid(call, gpu),
            self.threads,
            self.requested_shared_bytes(call, gpu),
            True,
            integers(call),
            struct="TrainingTileParams" if results else "TileParams",
            maps=tuple(maps),
        )
        return (*copies, kernel)

    def _violations(self, call: Call, gpu: Gpu) -> Iterator[str]:
        yield from aligned_violations(self.kernel, call, self.rows)
        if not (self.permuted or self.fp8) and not has_x_in_rows(call):
            yield f"{self} needs rows of x that are aligned and do not overlap"
        if gpu.arch != ARCH:
            yield f"tile_wgmma is for compute capability 9.0, got {gpu.arch[0]}.{gpu.arch[1]}"
        if self.rows % 16 or self.rows < 64:
            yield f"rows: got {self.rows}, must be a multiple of 16, at least 64"
        if self.block_tokens % 8:
            yield f"block_tokens: got {self.block_tokens}, must be a multiple of 8"
        if self.decoded and call.weight.format.is_dense:
            yield "decoded: the weight has x's dtype"
        if self.cluster > 2:
            yield f"cluster: got {self.cluster}, must be 1 or 2"
        if self.permuted and self.sparse:
            yield "permuted: not with sparse products, which spread x as it is"
        if self.steps not in (1, 2, 4):
            yield f"steps: got {self.steps}, must be 1, 2 or 4"
        if self.mask_groups not in (1, 2):
            yield f"mask_groups: got {self.mask_groups}, must be 1 or 2"
        if self.row_groups * self.mask_groups > 4:
            yield f"{self.row_groups * self.mask_groups} consumer warpgroups, more than 4"
        if self.passes > 1 and call.n_masks % (4 * self.passes):
            yield f"passes: got {self.passes}, must divide n_masks {call.n_masks} into multiples of 4"
        masks = call.n_masks // self.passes
        if self.mask_groups > masks:
            yield f"mask_groups: got {self.mask_groups}, more than the masks of a pass"
        elif not (self.sparse or self.fp8) and self.sub * (4 // self.steps) * ((masks + 1) // self.mask_groups) < 2:
            yield f"steps: got {self.steps}, must be less where a stage is one group of wgmmas"
        if self.fp8 and call.activation_format != "fp8_token":
            yield f"fp8: activation_format is {call.activation_format}"
        if self.fp8 and (self.sparse or self.permuted or self.decoded or self.passes > 1 or self.sub > 1):
            yield "fp8: not with other forms of products"
        if call.n_masks % 2 and self.sub % 2 and not self.fp8:
            yield f"sub: got {self.sub}, must be even for an odd number of masks"


def can_run(call: Call, gpu: Gpu) -> bool:
    """True if some launch of the kernel can run a call."""
    return has_aligned_rows(call) and call.dtype != torch.float32 and call.out_features >= 64 and gpu.arch == ARCH
