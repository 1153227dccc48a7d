"""The items that `group_tokens` writes are compared with a stable sort. The device code runs emulated on a CPU.

An item is up to `item_rows` rows of one expert. tests/support/emulated_kernels.py says what emulation can show.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mglu_ops.backends.cuda.device import KNOWN_GPUS
from mglu_ops.backends.cuda.kernels import group_tokens
from mglu_ops.call import Call
from mglu_ops.routing import inverse_of, sort_pairs
from tests.support.emulated_kernels import needs_compiler, run

pytestmark = needs_compiler

LAYER = Call.contiguous(torch.device("cpu"), torch.bfloat16, 1, 1, 16, 64)


def table_of(call: Call, index: Tensor, item_rows: int) -> tuple[Tensor, Tensor]:
    """Return the entries `[max_items, 4]` and the sorted row numbers. Memory after the table must not change."""
    entries = group_tokens.max_items(call, item_rows)
    words = group_tokens.table_bytes(call, item_rows) // 4
    table = torch.full((words + 64,), -7, dtype=torch.int32)
    pointers = {"expert_ids": index.data_ptr(), "out": table.data_ptr()}
    step = group_tokens.step(call, KNOWN_GPUS[9, 0], "sm_90", item_rows)
    run(step.kernel, tuple(step.macros.items()), 1, pointers, step.integers, step.struct)
    assert (table[words:] == -7).all()
    return table[: 4 * entries].view(entries, 4), table[4 * entries : words]


def entries_of(offs: Tensor, rows: int, item_rows: int) -> Tensor:
    """Return the expected entries: first for experts, whose rows end at `offs`, then for rows without an expert."""
    found = []
    for expert, (first, end) in enumerate(pairwise((0, *offs.tolist(), rows))):
        count = -(-(end - first) // item_rows)
        for i in range(count):
            place = first + i * item_rows
            found.append((expert if expert < len(offs) else -1, place, min(item_rows, end - place), i << 16 | count))
    return torch.tensor(found, dtype=torch.int64).view(-1, 4)


@pytest.mark.parametrize(
    ("rows", "experts", "index_dtype"),
    [(1, 1, torch.int64), (40, 7, torch.int32), (600, 33, torch.int64), (2500, 1024, torch.int32)],
)
def test_items_are_a_stable_sort_in_pieces(rows: int, experts: int, index_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    ids = (torch.rand(rows, 1, generator=generator) ** 2 * (experts + 2)).to(index_dtype) - 1
    ids[rows // 2 :: 50] = torch.iinfo(index_dtype).max
    is_sorted = LAYER.over_experts(experts, rows, None)
    call = LAYER.over_experts(experts, rows, 1)
    call = replace(call, routing=replace(call.routed, index_dtype=index_dtype))
    pairs, offs = sort_pairs(ids, experts)
    for item_rows in (1, 100):
        expected = entries_of(offs, rows, item_rows)
        entries, places = table_of(call, ids, item_rows)
        assert torch.equal(places.long(), pairs)
        from_offs, _ = table_of(is_sorted, offs, item_rows)
        for found in (entries, from_offs):
            assert torch.equal(found[: len(expected)].long(), expected)
            assert not found[len(expected) :, 2].any()


@pytest.mark.parametrize(("rows", "experts"), [(1, 1), (600, 33)])
def test_the_order_of_rows(rows: int, experts: int) -> None:
    ids = torch.randint(-1, experts + 2, (rows, 1))
    call = LAYER.over_experts(experts, rows, 1)
    call = replace(call, routing=replace(call.routed, index_dtype=torch.int64))
    words = group_tokens.order_words(rows, experts)
    memory = torch.full((words + 8,), -7)
    pointers = {"expert_ids": ids.data_ptr(), "out": memory.data_ptr()}
    step = group_tokens.order_step(call, KNOWN_GPUS[9, 0], "sm_90")
    run(step.kernel, tuple(step.macros.items()), 1, pointers, step.integers, step.struct)
    order, (pairs, offs) = group_tokens.Order.of(memory[:words], rows, experts), sort_pairs(ids, experts)
    assert torch.equal(order.rows, pairs)
    assert torch.equal(order.places, inverse_of(pairs))
    assert torch.equal(order.offs, offs)
    assert bool((memory[words:] == -7).all())


@pytest.mark.parametrize("ends", [(5, 3, 40, 1), (-1, -9, 2**31 - 1, 0), (2**31 - 1,) * 4, (-(2**31),) * 4])
def test_every_row_is_in_one_item_whatever_offs_are(ends: tuple[int, ...]) -> None:
    call = LAYER.over_experts(4, 40, None)
    entries, _ = table_of(call, torch.tensor(ends, dtype=torch.int32), 8)
    rows = [first + i for _, first, count, _ in entries.tolist() for i in range(count)]
    assert rows == list(range(40))
