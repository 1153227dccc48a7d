"""The rows of a checkpoint that one rank of a tensor-parallel group holds. Plain functions of tensors, without vLLM.

MGLU is parallel over `out_features`: a rank holds a run of rows of the weight and of every mask, computes those columns
of the result, and the row-parallel output projection adds up what the ranks computed. Rows of packed masks are rows of
the tensor, so that a rank's part needs no repacking.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FLOATING
from ..masks import check_layout, check_packed_masks, n_masks_of


def rows_of_rank(rows: int, rank: int, ranks: int) -> slice:
    """The rows that a rank holds, of `rows` that are spread evenly over `ranks`.

    Raises:
        ValueError: `rows` is not a multiple of `ranks`, or there is no such rank.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: got {rank}, must be from 0 to {ranks - 1} with {ranks} ranks")
    if rows % ranks:
        raise ValueError(f"intermediate_size: got {rows}, must be a multiple of the tensor-parallel size {ranks}")
    each = rows // ranks
    return slice(rank * each, (rank + 1) * each)


def weight_shard(weight: Tensor, out_features: int, in_features: int, rank: int, ranks: int) -> Tensor:
    """A rank's rows of a weight `[out_features, in_features]`: `[out_features / ranks, in_features]`, a view.

    Raises:
        TypeError: the dtype is not floating; vLLM would cast it.
        ValueError: the weight has another shape, or `rows_of_rank` raises.
    """
    if weight.dtype not in FLOATING:
        raise TypeError(f"weight: got dtype {weight.dtype}, must be one of {', '.join(map(str, FLOATING))}")
    if weight.shape != (out_features, in_features):
        raise ValueError(f"weight: got shape {list(weight.shape)}, must be {[out_features, in_features]}")
    return weight[rows_of_rank(out_features, rank, ranks)]


def packed_shard(
    packed_masks: Tensor, n_masks: int, out_features: int, in_features: int, rank: int, ranks: int
) -> Tensor:
    """A rank's rows of packed masks `uint8 [out_features, ceil(in_features / 8), n_masks]`, a view.

    Raises:
        TypeError: the dtype is not uint8.
        ValueError: the shape or the number of masks is wrong, the padding is not 0, or `rows_of_rank` raises.
    """
    check_layout(packed_masks, in_features, out_features)
    if n_masks_of(packed_masks) != n_masks:
        raise ValueError(f"packed_masks: got n_masks={n_masks_of(packed_masks)}, must be {n_masks} as in the config")
    shard = packed_masks[rows_of_rank(out_features, rank, ranks)]
    check_packed_masks(shard, in_features, shard.shape[0])
    return shard


def packed_shard_of_logits(
    mask_logits: Tensor, n_masks: int, out_features: int, in_features: int, rank: int, ranks: int
) -> Tensor:
    """A rank's rows of the masks `mask_logits > 0`, packed; `mask_logits` is `[n_masks, out_features, in_features]`.

    Only the rank's own rows are packed.

    Raises:
        ValueError: the logits have another shape, or `rows_of_rank` raises.
    """
    if mask_logits.shape != (n_masks, out_features, in_features):
        expected = [n_masks, out_features, in_features]
        raise ValueError(f"mask_logits: got shape {list(mask_logits.shape)}, must be {expected}")
    return torch.ops.mglu.pack_logits(mask_logits[:, rows_of_rank(out_features, rank, ranks)])
