"""The shards of all tensor-parallel ranks together are the checkpoint; wrong tensors are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mglu_ops.nn import MGLUFeedForward
from mglu_ops.vllm.shards import packed_shard, packed_shard_of_logits, rows_of_rank, weight_shard

N_MASKS, ROWS, COLUMNS = 3, 12, 20


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """A weight, logits, and the packed masks of the logits."""
    torch.manual_seed(0)
    logits = torch.randn(N_MASKS, ROWS, COLUMNS)
    return torch.randn(ROWS, COLUMNS), logits, torch.ops.mglu.pack_logits(logits)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_shards_of_all_ranks_are_the_checkpoint(ranks: int) -> None:
    weight, logits, packed = tensors()
    masks = (N_MASKS, ROWS, COLUMNS)
    each = range(ranks)
    assert torch.equal(torch.cat([weight_shard(weight, ROWS, COLUMNS, rank, ranks) for rank in each]), weight)
    assert torch.equal(torch.cat([packed_shard(packed, *masks, rank, ranks) for rank in each]), packed)
    assert torch.equal(torch.cat([packed_shard_of_logits(logits, *masks, rank, ranks) for rank in each]), packed)


def test_ranks_add_up_to_the_whole_layer() -> None:
    """As in vLLM, each rank computes columns of MGLU from its rows; the row-parallel projection sums over the ranks."""
    torch.manual_seed(0)
    layer, x, ranks = MGLUFeedForward(COLUMNS, ROWS, n_masks=N_MASKS).double(), torch.randn(5, COLUMNS).double(), 2
    weight, logits = layer.mglu.weight.detach(), layer.mglu.mask_logits.detach()
    total = torch.zeros(5, COLUMNS, dtype=torch.float64)
    for rank in range(ranks):
        packed = packed_shard_of_logits(logits, N_MASKS, ROWS, COLUMNS, rank, ranks)
        columns = torch.ops.mglu.forward(x, weight_shard(weight, ROWS, COLUMNS, rank, ranks), packed, "silu")
        total += columns @ layer.down_proj.weight.detach()[:, rows_of_rank(ROWS, rank, ranks)].T
    torch.testing.assert_close(total, layer(x).detach())


def corrupt(packed: Tensor) -> Tensor:
    damaged = packed.clone()
    damaged[ROWS - 1, -1, 0] |= 0x80
    return damaged


SHAPE = (ROWS, COLUMNS)
RANK = (0, 2)
WRONG: list[tuple[Callable[[Tensor, Tensor, Tensor], object], type[Exception], str]] = [
    (lambda w, l, p: weight_shard(w.T, *SHAPE, *RANK), ValueError, r"weight: got shape \[20, 12\], must be \[12, 20\]"),
    (
        lambda w, l, p: weight_shard(w, *SHAPE, 0, 5),
        ValueError,
        "intermediate_size: got 12, must be a multiple of .* 5",
    ),
    (lambda w, l, p: weight_shard(w.long(), *SHAPE, *RANK), TypeError, r"weight: got dtype torch\.int64, must be one"),
    (lambda w, l, p: weight_shard(w, *SHAPE, 2, 2), ValueError, "rank: got 2, must be from 0 to 1"),
    (lambda w, l, p: packed_shard(p, 4, *SHAPE, *RANK), ValueError, "packed_masks: got n_masks=3, must be 4"),
    (lambda w, l, p: packed_shard(p.float(), 3, *SHAPE, *RANK), TypeError, "packed_masks: got dtype torch.float32"),
    (lambda w, l, p: packed_shard(p[:6], 3, *SHAPE, *RANK), ValueError, r"packed_masks: got shape \[6, 3, 3\]"),
    (lambda w, l, p: packed_shard(corrupt(p), 3, *SHAPE, 1, 2), ValueError, "packed_masks: .*padding"),
    (
        lambda w, l, p: packed_shard_of_logits(l[:2], 3, *SHAPE, *RANK),
        ValueError,
        r"mask_logits: got shape \[2, 12, 20\]",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[message[:30] for *_, message in WRONG])
def test_wrong_tensors_are_refused(
    call: Callable[[Tensor, Tensor, Tensor], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(*tensors())
