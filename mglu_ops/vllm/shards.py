"""Selects the rows of a checkpoint that one rank of a tensor-parallel group holds. This module does not import vLLM.

MGLU is divided over `out_features`: a rank holds consecutive rows of the weight and of every mask, and computes the
columns of the result that belong to these rows. The row-parallel output projection then sums over the ranks. The first
dimension of packed masks is out_features, so a rank's rows need no repacking. The scales of a quantized weight are
divided with its rows.

A mixture is divided in the same way, over the rows of every expert, or with expert parallelism over its experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import FLOATING
from ..formats import WeightFormat, get_format
from ..masks import check_layout, check_packed_masks, n_masks_of
from ..nn.arguments import check_columns_of_ranks, check_rows_of_ranks
from ..sizes import ceil_div


class Part(NamedTuple):
    """The part of a layer, or of the experts of a mixture, that this rank holds.

    Attributes:
        rank: index of this rank among the ranks that divide the rows of a layer.
        ranks: number of ranks that divide the rows of a layer.
        num_experts: number of experts of all ranks; None for a layer without experts.
        experts: the experts of which this rank holds rows.
    """

    rank: int
    ranks: int
    num_experts: int | None = None
    experts: slice = slice(0)

    @classmethod
    def of_experts(cls, num_experts: int, rank: int, ranks: int, is_expert_parallel: bool) -> Part:
        """Make the part of a rank: with expert parallelism, all rows of some experts; otherwise some rows of each.

        Raises:
            ValueError: with expert parallelism, `num_experts` is not a multiple of the number of ranks.
        """
        if is_expert_parallel:
            return cls(0, 1, num_experts, rows_of_rank(num_experts, rank, ranks, name="num_experts"))
        return cls(rank, ranks, num_experts, slice(0, num_experts))

    @property
    def leading(self) -> tuple[int, ...]:
        """The leading sizes of a parameter: `(number of this rank's experts,)`, or `()` for a layer without experts."""
        return () if self.num_experts is None else (self.experts.stop - self.experts.start,)

    def layers(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Views of a checkpoint's tensor, one for each expert of this rank, or the tensor of a layer without experts.

        Raises:
            ValueError: there are experts, and the first size is not num_experts.
        """
        if self.num_experts is None:
            return [tensor]
        if tensor.shape[:1] != (self.num_experts,):
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, must be [num_experts={self.num_experts}, ...]")
        return list(tensor[self.experts])


def copy_shards(param: Tensor, shards: Sequence[Tensor]) -> None:
    """Copy the shard of each expert, or the only one of a layer without experts, into a parameter.

    It is the parameter's `weight_loader`. When vLLM loads weights into a running engine (`reload_weights`), it calls
    the loader twice: with a parameter on the meta device, to count what was loaded, and later with the parameter.
    """
    rows = param.data if param.dim() > shards[0].dim() else param.data[None]
    for own, shard in zip(rows, shards, strict=True):
        own.copy_(shard)


def rows_of_rank(
    rows: int, rank: int, ranks: int, weight_format: str = "dense", name: str = "intermediate_size"
) -> slice:
    """The rows that a rank holds if `rows` are divided evenly over `ranks`. Messages call the number of rows `name`.

    Raises:
        ValueError: `rows` is not a multiple of `ranks`, there is no such rank, or a rank's rows would cut a block of
            rows that share a scale.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: got {rank}, must be from 0 to {ranks - 1} with {ranks} ranks")
    check_rows_of_ranks(name, rows, ranks, weight_format)
    return _slice_of_rank(rows, rank, ranks)


def columns_of_rank(columns: int, rank: int, ranks: int, weight_format: str, name: str = "intermediate_size") -> slice:
    """The columns of a down projection that a rank holds if `columns` are divided evenly over `ranks`.

    Raises:
        ValueError: as in `rows_of_rank`, for groups of columns that share a scale.
    """
    check_columns_of_ranks(name, columns, ranks, weight_format)
    return _slice_of_rank(columns, rank, ranks)


def _slice_of_rank(size: int, rank: int, ranks: int) -> slice:
    each = size // ranks
    return slice(rank * each, (rank + 1) * each)


def weight_shard(
    weight: Tensor, out_features: int, in_features: int, rank: int, ranks: int, weight_format: str = "dense"
) -> Tensor:
    """A view of a rank's rows of a weight `[out_features, in_features]`. In `int4_group` a byte holds two columns.

    Raises:
        TypeError: the dtype is not the format's, or is not floating if the format is `dense`. Without this check, vLLM
            would cast the weight.
        ValueError: the weight has another shape, or `rows_of_rank` raises.
    """
    _check_weight(weight, out_features, in_features, weight_format)
    return weight[rows_of_rank(out_features, rank, ranks, weight_format)]


def scale_shard(
    scale: Tensor, out_features: int, in_features: int, rank: int, ranks: int, weight_format: str
) -> Tensor:
    """A view of the scales of a rank's rows of a weight.

    Raises:
        TypeError: the dtype is not the format's.
        ValueError: the config says `dense`, the scales have another shape, or `rows_of_rank` raises.
    """
    stored = _check_scale(scale, out_features, in_features, weight_format)
    rows = rows_of_rank(out_features, rank, ranks, weight_format)
    return scale[rows.start // stored.rows : ceil_div(rows.stop, stored.rows)]


def packed_shard(
    packed_masks: Tensor, n_masks: int, out_features: int, in_features: int, rank: int, ranks: int
) -> Tensor:
    """A view of a rank's rows of packed masks `uint8 [out_features, ceil(in_features / 8), n_masks]`.

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
    """Pack a rank's rows of the masks `mask_logits > 0`. `mask_logits` is `[n_masks, out_features, in_features]`.

    Raises:
        ValueError: the logits have another shape, or `rows_of_rank` raises.
    """
    if mask_logits.shape != (n_masks, out_features, in_features):
        expected = [n_masks, out_features, in_features]
        raise ValueError(f"mask_logits: got shape {list(mask_logits.shape)}, must be {expected}")
    return torch.ops.mglu.pack_logits(mask_logits[:, rows_of_rank(out_features, rank, ranks)])


def down_shard(
    weight: Tensor, out_features: int, in_features: int, rank: int, ranks: int, weight_format: str = "dense"
) -> Tensor:
    """A view of a rank's columns of a down projection `[out_features, in_features]`.

    In `int4_group` a byte holds two columns.

    Raises:
        TypeError: as in `weight_shard`.
        ValueError: the weight has another shape, or `columns_of_rank` raises.
    """
    _check_weight(weight, out_features, in_features, weight_format)
    columns, packed = columns_of_rank(in_features, rank, ranks, weight_format), get_format(weight_format).packed
    return weight[:, columns.start // packed : columns.stop // packed]


def down_scale_shard(
    scale: Tensor, out_features: int, in_features: int, rank: int, ranks: int, weight_format: str
) -> Tensor:
    """A view of the scales of a rank's columns of a down projection: all scales if there is one scale per row.

    Raises:
        TypeError, ValueError: as in `scale_shard`, for columns.
    """
    stored = _check_scale(scale, out_features, in_features, weight_format)
    columns = columns_of_rank(in_features, rank, ranks, weight_format)
    if stored.columns is None:
        return scale
    return scale[:, columns.start // stored.columns : ceil_div(columns.stop, stored.columns)]


def _check_weight(weight: Tensor, out_features: int, in_features: int, weight_format: str) -> None:
    """Check the dtype and the shape of one layer's whole weight."""
    stored = get_format(weight_format)
    allowed = FLOATING if stored.dtype is None else (stored.dtype,)
    if weight.dtype not in allowed:
        raise TypeError(
            f"weight: got dtype {weight.dtype}, must be one of {', '.join(map(str, allowed))} for the weight_format "
            f"{weight_format} in the config"
        )
    if weight.shape != (shape := (out_features, in_features // stored.packed)):
        raise ValueError(f"weight: got shape {list(weight.shape)}, must be {list(shape)}")


def _check_scale(scale: Tensor, out_features: int, in_features: int, weight_format: str) -> WeightFormat:
    """Check the dtype and the shape of the scales of one layer's whole weight, and return its format."""
    stored = get_format(weight_format)
    if stored.is_dense:
        raise ValueError("weight_scale: got the scales of a quantized weight, but the config says that it is dense")
    if scale.dtype is not stored.scale_dtype:
        raise TypeError(f"weight_scale: got dtype {scale.dtype}, must be {stored.scale_dtype} for {weight_format}")
    if scale.shape != (shape := stored.scale_shape(out_features, in_features)):
        raise ValueError(f"weight_scale: got shape {list(scale.shape)}, must be {list(shape)} for {weight_format}")
    return stored
