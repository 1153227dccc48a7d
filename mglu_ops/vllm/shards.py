"""The rows of a checkpoint that one rank of a tensor-parallel group holds. Plain functions of tensors, without vLLM.

MGLU is parallel over `out_features`: a rank holds a run of rows of the weight and of every mask, computes those columns
of the result, and the row-parallel output projection adds up what the ranks computed. Rows of packed masks are rows of
the tensor, so that a rank's part needs no repacking. The scales of a quantized weight are spread with its rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FLOATING
from ..formats import get_format
from ..masks import check_layout, check_packed_masks, n_masks_of
from ..nn.arguments import check_rows_of_ranks
from ..sizes import ceil_div


def rows_of_rank(rows: int, rank: int, ranks: int, weight_format: str = "dense") -> slice:
    """The rows that a rank holds, of `rows` that are spread evenly over `ranks`.

    Raises:
        ValueError: `rows` is not a multiple of `ranks`, there is no such rank, or a rank's rows are not whole blocks
            of rows that share scales.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: got {rank}, must be from 0 to {ranks - 1} with {ranks} ranks")
    check_rows_of_ranks("intermediate_size", rows, ranks, weight_format)
    each = rows // ranks
    return slice(rank * each, (rank + 1) * each)


def weight_shard(
    weight: Tensor, out_features: int, in_features: int, rank: int, ranks: int, weight_format: str = "dense"
) -> Tensor:
    """A rank's rows of a weight `[out_features, in_features]`, a view; half the columns in `int4_group`.

    Raises:
        TypeError: the dtype is not that of the format, or not floating if it is dense; vLLM would cast it.
        ValueError: the weight has another shape, or `rows_of_rank` raises.
    """
    stored = get_format(weight_format)
    allowed = FLOATING if stored.dtype is None else (stored.dtype,)
    if weight.dtype not in allowed:
        raise TypeError(
            f"weight: got dtype {weight.dtype}, must be one of {', '.join(map(str, allowed))} for the weight_format "
            f"{weight_format} in the config"
        )
    if weight.shape != (shape := (out_features, in_features // stored.packed)):
        raise ValueError(f"weight: got shape {list(weight.shape)}, must be {list(shape)}")
    return weight[rows_of_rank(out_features, rank, ranks, weight_format)]


def scale_shard(
    scale: Tensor, out_features: int, in_features: int, rank: int, ranks: int, weight_format: str
) -> Tensor:
    """The scales of a rank's rows of a weight, a view: those of its rows, or of its blocks of rows.

    Raises:
        TypeError: the dtype is not that of the format.
        ValueError: the config says `dense`, the scales have another shape, or `rows_of_rank` raises.
    """
    stored = get_format(weight_format)
    if stored.is_dense:
        raise ValueError("weight_scale: got the scales of a quantized weight, but the config says that it is dense")
    if scale.dtype is not stored.scale_dtype:
        raise TypeError(f"weight_scale: got dtype {scale.dtype}, must be {stored.scale_dtype} for {weight_format}")
    if scale.shape != (shape := stored.scale_shape(out_features, in_features)):
        raise ValueError(f"weight_scale: got shape {list(scale.shape)}, must be {list(shape)} for {weight_format}")
    rows = rows_of_rank(out_features, rank, ranks, weight_format)
    return scale[rows.start // stored.rows : ceil_div(rows.stop, stored.rows)]


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
