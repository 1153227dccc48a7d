"""The table of items of a call of experts, which the kernels of experts read (csrc/cuda/group_tokens.cu, work.cuh)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....expert_calls import ExpertCall
from ....sizes import ceil_div, round_up
from ..device import Gpu
from ..driver import Launch
from ..launch import CopyLaunch, load_kernel, parameters

NAME = "group_tokens"

MOST_EXPERTS = 1024
MOST_ROWS = 1 << 20

_WARPS = 16
"""Warps of the only block, each of which counts the experts of a part of the rows."""
_ENTRY_BYTES = 16


def macros(call: ExpertCall) -> dict[str, int]:
    """The macros of the source."""
    return {"MGLU_SORTED": int(call.is_sorted)}


def order_macros() -> dict[str, int]:
    """The macros of the source that writes the order of rows instead of items."""
    return {"MGLU_SORTED": 0, "MGLU_ORDER": 1}


def max_items(call: ExpertCall, item_rows: int) -> int:
    """The most items of `item_rows` rows that a call can have, for any ids."""
    return min(call.rows, call.rows // item_rows + call.experts + 1)


def table_bytes(call: ExpertCall, item_rows: int) -> int:
    """The size of the table in bytes: its entries, and unless they are sorted the rows in the order of their places."""
    return _ENTRY_BYTES * max_items(call, item_rows) + (0 if call.is_sorted else 4 * call.rows)


def integers(call: ExpertCall, item_rows: int) -> dict[str, int]:
    """The sizes in `GroupParams`."""
    return {
        "id_bytes": call.index_dtype.itemsize,
        "experts": call.experts,
        "rows": call.rows,
        "item_rows": item_rows,
        "max_items": max_items(call, item_rows),
    }


def copy(call: ExpertCall, gpu: Gpu, device: int, target: str, item_rows: int) -> CopyLaunch:
    """Compile, load and describe the launch that precedes a kernel, and writes its `items`."""
    launch = _launch(call, gpu, device, target, macros(call), item_rows)
    return CopyLaunch(launch, table_bytes(call, item_rows), "items")


def order(call: ExpertCall, gpu: Gpu, device: int, target: str) -> Launch:
    """Compile, load and describe the launch that writes an `Order`."""
    return _launch(call, gpu, device, target, order_macros(), 1)


def _launch(call: ExpertCall, gpu: Gpu, device: int, target: str, macros: dict[str, int], item_rows: int) -> Launch:
    groups = call.experts + 1
    return Launch(
        load_kernel(device, NAME, target, macros),
        (1, 1),
        32 * _WARPS,
        round_up(4 * groups * (2 if call.is_sorted else 2 + _WARPS), 16),
        overlap=gpu.arch >= (9, 0),
        parameters=parameters("params.cuh", "GroupParams"),
        integers=integers(call, item_rows),
    )


class Order(NamedTuple):
    """The order of rows by expert, in which rows without an expert come last."""

    rows: Tensor
    """int64 `[rows]`: the row at each place."""
    places: Tensor
    """int64 `[rows]`: the place of each row."""
    offs: Tensor
    """int32 `[experts]`: the end of each expert's places."""

    @staticmethod
    def of(memory: Tensor, rows: int, experts: int) -> Order:
        """The parts of the memory that the launch of `order` writes, int64 `[order_words]`."""
        return Order(memory[:rows], memory[rows : 2 * rows], memory[2 * rows :].view(torch.int32)[:experts])


def order_words(rows: int, experts: int) -> int:
    """The size of what the launch of `order` writes, in words of 64 bits."""
    return 2 * rows + ceil_div(experts, 2)
