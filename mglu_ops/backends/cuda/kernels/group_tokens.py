"""Writes the table of items that the kernels of experts read, or sorts rows by expert (csrc/cuda/group_tokens.cu).

An item is up to `item_rows` rows of one expert (csrc/cuda/work.cuh).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....call import Call
from ....sizes import ceil_div, least, round_up
from ..device import Gpu
from ..launch import Step

NAME = "group_tokens"

MOST_EXPERTS = 1024
MOST_ROWS = 1 << 20

_WARPS = 16
"""The warps of the only block. Each counts how many rows of its share belong to each expert."""
_ENTRY_BYTES = 16


def max_items(call: Call, item_rows: int) -> int:
    """The most items that a call can have, for any ids."""
    return least(call.tokens, call.tokens // item_rows + call.routed.experts + 1)


def table_bytes(call: Call, item_rows: int) -> int:
    """The size of the table in bytes: its entries and, if the rows are unsorted, the row numbers in sorted order."""
    return _ENTRY_BYTES * max_items(call, item_rows) + (0 if call.routed.is_sorted else 4 * call.tokens)


def step(call: Call, gpu: Gpu, target: str, item_rows: int) -> Step:
    """Return the step that writes the table of items, which the next kernel reads as `items`."""
    sorts = {"MGLU_SORTED": int(call.routed.is_sorted)}
    return _step(call, gpu, target, sorts, item_rows, "items", table_bytes(call, item_rows))


def order_step(call: Call, gpu: Gpu, target: str) -> Step:
    """Return the step that sorts the rows by expert. It writes the memory of an `Order` and no table of items."""
    nbytes = 8 * order_words(call.tokens, call.routed.experts)
    return _step(call, gpu, target, {"MGLU_SORTED": 0, "MGLU_ORDER": 1}, 1, "order", nbytes)


def _step(call: Call, gpu: Gpu, target: str, macros: dict[str, int], item_rows: int, writes: str, nbytes: int) -> Step:
    experts = call.routed.experts
    return Step(
        NAME,
        target,
        macros,
        (1, 1),
        32 * _WARPS,
        round_up(4 * (experts + 1) * (2 if call.routed.is_sorted else 2 + _WARPS), 16),
        gpu.overlaps,
        {
            "id_bytes": call.routed.index_dtype.itemsize,
            "experts": experts,
            "rows": call.tokens,
            "item_rows": item_rows,
            "max_items": max_items(call, item_rows),
        },
        struct="GroupParams",
        writes=writes,
        nbytes=nbytes,
    )


class Order(NamedTuple):
    """The permutation that sorts rows by expert. Rows without an expert come last."""

    rows: Tensor
    """int64 `[rows]`: the row at each position of the sorted order."""
    places: Tensor
    """int64 `[rows]`: the position of each row, the inverse of `rows`."""
    offs: Tensor
    """int32 `[experts]`: the end of each expert's positions."""

    @staticmethod
    def of(memory: Tensor, rows: int, experts: int) -> Order:
        """Return views of the memory that `order_step` has written, int64 `[order_words]`."""
        return Order(memory[:rows], memory[rows : 2 * rows], memory[2 * rows :].view(torch.int32)[:experts])


def order_words(rows: int, experts: int) -> int:
    """Return the size of the memory that `order_step` writes, in 64-bit words."""
    return 2 * rows + ceil_div(experts, 2)
