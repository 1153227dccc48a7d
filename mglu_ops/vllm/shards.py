"""The rows of a checkpoint that one rank of a tensor-parallel group holds. Plain functions of tensors, without vLLM.

MGLU is parallel over `out_features`: a rank holds a run of rows of the weight and of every mask, computes those columns
of the result, and the row-parallel output projection adds up what the ranks computed. Rows of packed masks are rows of
the tensor, so that a rank's part needs no repacking. The scales of a quantized weight are spread with its rows.

A mixture is spread over the rows of every expert in the same way, or over its experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import FLOATING
from ..formats import WeightFormat, get_format
from ..masks import check_layout, check_packed_masks, n_masks_of
from ..nn.arguments import check_columns_of_ranks, check_rows_of_ranks
from ..sizes import ceil_div


class Part(NamedTuple):
    """What this rank holds of a layer, or of the experts of a mixture, each of which is a layer.

    Attributes:
        rank: which of the parts into which the rows of a layer are divided.
        ranks: number of those parts.
        num_experts: number of experts of all ranks; None for a layer without experts.
        experts: the experts of which it holds rows.
    """

    rank: int
    ranks: int
    num_experts: int | None = None
    experts: slice = slice(0)

    @classmethod
    def of_experts(cls, num_experts: int, rank: int, ranks: int, is_expert_parallel: bool) -> Part:
        """All rows of some experts, if experts are spread over the ranks, or some rows of every expert.

        Raises:
            ValueError: experts are spread over the ranks, and `num_experts` is not a multiple of their number.
        """
        if is_expert_parallel:
            return cls(0, 1, num_experts, rows_of_rank(num_experts, rank, ranks, name="num_experts"))
        return cls(rank, ranks, num_experts, slice(0, num_experts))

    @property
    def leading(self) -> tuple[int, ...]:
        """The sizes of a parameter before those that one layer's has: the number of experts, if there are any."""
        return () if self.num_experts is None else (self.experts.stop - self.experts.start,)

    def layers(self, name: str, tensor: Tensor) -> list[Tensor]:
        """The tensors of the layers of which this rank holds rows, views of a tensor of all layers.

        Raises:
            ValueError: there are experts, and the first size is not their number.
        """
        if self.num_experts is None:
            return [tensor]
        if tensor.shape[:1] != (self.num_experts,):
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, must be [num_experts={self.num_experts}, ...]")
        return list(tensor[self.experts])


def rows_of_rank(
    rows: int, rank: int, ranks: int, weight_format: str = "dense", name: str = "intermediate_size"
) -> slice:
    """The rows that a rank holds, of `rows` that are spread evenly over `ranks`; a config calls `rows` by `name`.

    Raises:
        ValueError: `rows` is not a multiple of `ranks`, there is no such rank, or a rank's rows are not whole blocks
            of rows that share scales.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: got {rank}, must be from 0 to {ranks - 1} with {ranks} ranks")
    check_rows_of_ranks(name, rows, ranks, weight_format)
    return _slice_of_rank(rows, rank, ranks)


def columns_of_rank(columns: int, rank: int, ranks: int, weight_format: str, name: str = "intermediate_size") -> slice:
    """The columns of a down projection that a rank holds, likewise.

    Raises:
        ValueError: as in `rows_of_rank`, for groups of columns that share scales.
    """
    check_columns_of_ranks(name, columns, ranks, weight_format)
    return _slice_of_rank(columns, rank, ranks)


def _slice_of_rank(size: int, rank: int, ranks: int) -> slice:
    each = size // ranks
    return slice(rank * each, (rank + 1) * each)


def weight_shard(
    weight: Tensor, out_features: int, in_features: int, rank: int, ranks: int, weight_format: str = "dense"
) -> Tensor:
    """A rank's rows of a weight `[out_features, in_features]`, a view; half the columns in `int4_group`.

    Raises:
        TypeError: the format has another dtype, or is dense and the dtype is not floating; vLLM would cast it.
        ValueError: the weight has another shape, or `rows_of_rank` raises.
    """
    _check_weight(weight, out_features, in_features, weight_format)
    return weight[rows_of_rank(out_features, rank, ranks, weight_format)]


def scale_shard(
    scale: Tensor, out_features: int, in_features: int, rank: int, ranks: int, weight_format: str
) -> Tensor:
    """The scales of a rank's rows of a weight, a view: those of its rows, or of its blocks of rows.

    Raises:
        TypeError: the dtype is not that of the format.
        ValueError: the config says `dense`, the scales have another shape, or `rows_of_rank` raises.
    """
    stored = _check_scale(scale, out_features, in_features, weight_format)
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


def down_shard(
    weight: Tensor, out_features: int, in_features: int, rank: int, ranks: int, weight_format: str = "dense"
) -> Tensor:
    """A rank's columns of a down projection `[out_features, in_features]`, a view; half as many in `int4_group`.

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
    """The scales of a rank's columns of a down projection, a view: all of them if they are of whole rows.

    Raises:
        TypeError, ValueError: as in `scale_shard`, for columns.
    """
    stored = _check_scale(scale, out_features, in_features, weight_format)
    columns = columns_of_rank(in_features, rank, ranks, weight_format)
    if stored.columns is None:
        return scale
    return scale[:, columns.start // stored.columns : ceil_div(columns.stop, stored.columns)]


def _check_weight(weight: Tensor, out_features: int, in_features: int, weight_format: str) -> None:
    """Check the dtype and the shape of the whole weight of one layer."""
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
    """Check the dtype and the shape of the scales of the whole weight of one layer, and return its format."""
    stored = get_format(weight_format)
    if stored.is_dense:
        raise ValueError("weight_scale: got the scales of a quantized weight, but the config says that it is dense")
    if scale.dtype is not stored.scale_dtype:
        raise TypeError(f"weight_scale: got dtype {scale.dtype}, must be {stored.scale_dtype} for {weight_format}")
    if scale.shape != (shape := stored.scale_shape(out_features, in_features)):
        raise ValueError(f"weight_scale: got shape {list(scale.shape)}, must be {list(shape)} for {weight_format}")
    return stored
