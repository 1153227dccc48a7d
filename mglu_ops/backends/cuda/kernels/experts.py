"""The launches for experts with few rows each: `decode_mma` or `plain`, whose blocks compute items.

An item is up to `item_rows` rows of one expert (csrc/cuda/work.cuh). Launches depend on the numbers of rows and
experts, never on the expert ids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....call import Call
from ....sizes import ceil_div
from ..device import Gpu
from ..launch import Plan, Step
from . import decode_mma, group_tokens, quantize_x
from .base import integers
from .decode_mma import DecodeMma
from .plain import Plain

MOST_ROWS_TO_FIND = 64
"""The most rows for which each block finds its item itself. For more rows, `group_tokens` finds all items first, which
takes less time (csrc/cuda/decode_mma.md)."""

MOST_TILES_OF_ONE_WAVE = 8
"""With up to this many tiles of 16 rows of W per SM, every SM gets one block."""

_ROWS_BYTES = 128
"""Shared memory for an item's row indices, with padding."""


@dataclass(frozen=True)
class DecodeItems(DecodeMma):
    """The launch configuration of `decode_mma` for items."""

    def shared_bytes(self, call: Call) -> int:
        return super().shared_bytes(call) + _ROWS_BYTES


@dataclass(frozen=True)
class ExpertLaunch:
    """The launch for all items of a call.

    Attributes:
        config: the launch configuration for one item. Its `block_tokens` is the most rows of an item.
        grouped: True if `group_tokens` writes a table of items first. Otherwise the grid has blocks for each row of the
            result. They find the item of their row, and exit at once unless the row is the first of the item.
    """

    config: DecodeItems | Plain
    grouped: bool

    @property
    def item_rows(self) -> int:
        """The most rows of an item."""
        return self.config.block_tokens

    def __str__(self) -> str:
        return f"{self.config} for items {'of a table' if self.grouped else 'that blocks find'}"

    def of_item(self, call: Call) -> Call:
        """Return the call for one item: the layer of one expert with `item_rows` rows."""
        return quantize_x.as_read(self.config, call.of_rows(self.item_rows))

    def macros(self, call: Call) -> dict[str, int]:
        """The macros with which the kernel's source is compiled."""
        return self.config.macros(self.of_item(call)) | {"MGLU_ITEMS": 1 if self.grouped else 2}

    def grid(self, call: Call, gpu: Gpu) -> tuple[int, int]:
        """The blocks of the grid in x and in y."""
        items = group_tokens.max_items(call, self.item_rows) if self.grouped else call.tokens
        return items * self.config.grid(self.of_item(call), gpu)[0], 1

    def plan(self, call: Call, gpu: Gpu) -> Plan:
        """The launches of a call."""
        tokens = call.of_rows(call.rows_of_x)
        kernel = Step(
            self.config.kernel,
            self.config.target(gpu),
            self.macros(call),
            self.grid(call, gpu),
            self.config.threads,
            self.config.requested_shared_bytes(self.of_item(call), gpu),
            self.config.overlaps and gpu.overlaps,
            integers(quantize_x.as_read(self.config, tokens)),
            items=self._item_integers(call),
        )
        return (*self._copies(call, gpu), kernel)

    def _copies(self, call: Call, gpu: Gpu) -> Plan:
        """The steps before the kernel, if the launch needs them: one rounds x, and one writes the table of items."""
        target = self.config.target(gpu)
        rounds_x_before = call.activation_format != "dense" and not self.config.rounds_x
        rounds = [quantize_x.step(call.of_rows(call.rows_of_x), gpu, target, 0)] if rounds_x_before else []
        return (*rounds, *([group_tokens.step(call, gpu, target, self.item_rows)] if self.grouped else []))

    def violation(self, call: Call, gpu: Gpu) -> str | None:
        """The reason why this launch cannot run a call; None if it can."""
        if not self.grouped and call.routed.is_sorted:
            return "grouped: blocks find items only in ids"
        if self.grid(call, gpu)[0] >= 2**31:
            return f"{call} has more blocks than a grid holds"
        return self.config.violation(self.of_item(call), gpu)

    def _item_integers(self, call: Call) -> dict[str, int]:
        """The values of the integers of `ItemParams` (csrc/cuda/params.cuh)."""
        scale_dtype = call.weight.format.scale_dtype
        return {
            "weight_stride": call.routed.weight_stride * call.weight.dtype.itemsize,
            "mask_stride": call.routed.masks_stride,
            "scale_stride": 0 if scale_dtype is None else call.routed.scale_stride * scale_dtype.itemsize,
            "id_bytes": call.routed.index_dtype.itemsize,
            "experts": call.routed.experts,
            "rows": call.tokens,
            "top_k": call.routed.top_k or 1,
            "is_sorted": int(call.routed.is_sorted),
            "max_items": group_tokens.max_items(call, self.item_rows),
        }


def choose(call: Call, gpu: Gpu) -> ExpertLaunch:
    """Choose the launch of a call."""
    rows = 1 if call.rows_of_x == 1 and not call.batch_invariant else 4
    return _decode(call, gpu) or ExpertLaunch(Plain(block_tokens=rows), not _finds_items(call))


def _decode(call: Call, gpu: Gpu) -> ExpertLaunch | None:
    """Choose a launch of `decode_mma`, or return None if it cannot run an expert's layer.

    An item has up to 8 or 16 rows, which are one or two column tiles of the `mma`. With fewer than 8 tokens, the limit
    is the number of tokens, rounded up to a power of two, because an expert has no more rows unless a token chose it
    twice. In the batch-invariant mode the launch and the order of sums depend only on the layer.
    """
    layer = call.one
    if not decode_mma.can_run(layer, gpu):
        return None
    rows = 8
    if not layer.batch_invariant:
        rows = 16 if layer.tokens > 8 else min(8, 1 << (call.rows_of_x - 1).bit_length())
    item, tiles = replace(layer, leading=(rows,)), tiles_of_sm(call, gpu)
    if tiles <= MOST_TILES_OF_ONE_WAVE and not layer.batch_invariant:
        preferred = [decode_mma.in_one_wave(item, tiles)]
    else:
        preferred = decode_mma.in_several_waves(item, rows if layer.batch_invariant else layer.tokens)
    for config in preferred:
        fitted = _fit(config, item, gpu)
        if fitted is not None and fitted.blocks_per_sm == config.blocks_per_sm:
            break
    return None if fitted is None else ExpertLaunch(fitted, not _finds_items(call))


def tiles_of_sm(call: Call, gpu: Gpu) -> int:
    """The tiles of 16 rows of W that an SM computes, of all experts that can have rows."""
    tiles = ceil_div(call.out_features, decode_mma.ROWS) * min(call.tokens, call.routed.experts)
    return ceil_div(tiles, gpu.multiprocessors)


def _fit(config: DecodeMma, item: Call, gpu: Gpu) -> DecodeItems | None:
    """Return the `DecodeItems` nearest to `config` that fits into shared memory, or None."""
    settings = vars(config) | {"block_tokens": min(item.tokens, config.block_tokens)}
    fitted = decode_mma.fit(DecodeItems(**settings), item, gpu)
    assert fitted is None or isinstance(fitted, DecodeItems)
    return fitted


def _finds_items(call: Call) -> bool:
    return not call.routed.is_sorted and call.tokens <= MOST_ROWS_TO_FIND
