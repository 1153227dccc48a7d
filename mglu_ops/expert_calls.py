"""The arguments and the description of one call of the operators over experts (`mglu_ops.expert_ops`).

The description of a call, `ExpertCall`, holds the `LayerCall` of one expert, the number of experts, the number of rows
of all experts together, and the strides between experts. It does not hold the number of rows of each expert, which only
the values of ids or offs tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import batch_invariance
from .formats import FORMATS
from .layer_call import Key, LayerArguments, LayerCall, Layout, StoredWeight, as_rows, metadata_key, tensor_key
from .masks import N_MASKS_DIM
from .sizes import ceil_div
from .tensors import check_dense
from .words import counted


class ExpertArguments(NamedTuple):
    """The arguments of `experts_forward`, with `expert_ids`, or of `grouped_forward`, with `offs`."""

    x: Tensor
    """`[T, in_features]`, or with `offs` `[S, in_features]`, whose rows are sorted by expert."""
    weight: Tensor
    """`[E, out_features, in_features]` in x's dtype, or as `weight_format` stores it."""
    packed_masks: Tensor
    """uint8 `[E, out_features, ceil(in_features / 8), n_masks]`."""
    activation: str = "silu"
    mask_weights: Tensor | None = None
    """`[T, K, n_masks]`, or `[S, n_masks]` with `offs`."""
    weight_scale: Tensor | None = None
    """`[E, ...]`: the scales of each expert's weight."""
    weight_format: str = "dense"
    activation_format: str = "dense"
    expert_ids: Tensor | None = None
    """int32 or int64 `[T, K]`; None with `offs`."""
    offs: Tensor | None = None
    """int32 `[E]`: the end of each expert's rows."""

    @staticmethod
    def of_ids(x: Tensor, weight: Tensor, packed_masks: Tensor, expert_ids: Tensor, *rest: Any) -> ExpertArguments:
        """The arguments of `mglu::experts_forward`, in its schema's order. Raises TypeError if expert_ids is None."""
        if expert_ids is None:  # torch accepts None for a tensor, and here None would mean `grouped_forward`
            check_dense("expert_ids", expert_ids)
        return ExpertArguments(x, weight, packed_masks, *rest, expert_ids=expert_ids)  # type: ignore[misc] # `rest` is shorter

    @staticmethod
    def of_offs(x: Tensor, weight: Tensor, packed_masks: Tensor, offs: Tensor, *rest: Any) -> ExpertArguments:
        """The arguments of `mglu::grouped_forward`, in its schema's order. Raises TypeError if offs is None."""
        if offs is None:  # torch accepts None for a tensor, and here None would mean `experts_forward`
            check_dense("offs", offs)
        return ExpertArguments(x, weight, packed_masks, *rest, offs=offs)  # type: ignore[misc] # `rest` is shorter

    @property
    def out_features(self) -> int:
        return self.packed_masks.shape[1]

    @property
    def n_masks(self) -> int:
        return self.packed_masks.shape[1 + N_MASKS_DIM]

    @property
    def routing(self) -> Tensor:
        """The tensor that assigns rows to experts: `expert_ids` or `offs`."""
        index = self.offs if self.expert_ids is None else self.expert_ids
        assert index is not None
        return index

    @property
    def leading(self) -> tuple[int, ...]:
        """The sizes of the result before out_features: `T, K`, or `S` with `offs`."""
        return tuple(self.x.shape[:-1] if self.expert_ids is None else self.expert_ids.shape)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, without those that are None."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}

    def in_rows(self) -> ExpertArguments:
        """Return the arguments with mask weights `[S, n_masks]` and contiguous ids, offs and scales; copy if needed."""
        ids, offs, scale, weights = self.expert_ids, self.offs, self.weight_scale, self.mask_weights
        return self._replace(
            mask_weights=None if weights is None else as_rows(weights),
            weight_scale=None if scale is None else scale.contiguous(),
            expert_ids=None if ids is None else ids.contiguous(),
            offs=None if offs is None else offs.contiguous(),
        )

    def of_expert(self, expert: int, x: Tensor, mask_weights: Tensor | None) -> LayerArguments:
        """The arguments of one expert's layer, for rows of x and their mask weights."""
        return LayerArguments(
            x,
            self.weight[expert],
            self.packed_masks[expert],
            self.activation,
            mask_weights,
            None if self.weight_scale is None else self.weight_scale[expert],
            self.weight_format,
            self.activation_format,
        )

    def key(self) -> Key:
        """The metadata on which the checks and the `ExpertCall` depend. Raises what `metadata_key` raises."""
        return (*metadata_key(LayerArguments(*self[:8])), self.offs is None, tensor_key(self.routing))


class DownArguments(NamedTuple):
    """The arguments of `mglu::experts_down`, in the order of its schema."""

    y: Tensor
    """`[T, K, in_features]`: the result of `experts_forward`, whose out_features are the in_features here."""
    weight: Tensor
    """`[E, out_features, in_features]` in y's dtype, or as `weight_format` stores it."""
    expert_ids: Tensor
    """int32 or int64 `[T, K]`."""
    expert_weights: Tensor
    """Floating `[T, K]`."""
    weight_scale: Tensor | None = None
    weight_format: str = "dense"

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, without those that are None."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}

    def in_rows(self) -> DownArguments:
        """Return the arguments with contiguous y, ids, expert weights and scales; copy if needed."""
        y, weight, ids, expert_weights, scale, weight_format = self
        scale = None if scale is None else scale.contiguous()
        return DownArguments(
            y.contiguous(), weight, ids.contiguous(), expert_weights.contiguous(), scale, weight_format
        )


def sort_pairs(expert_ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sort the (token, expert) pairs by expert, stably, without reading a value on the host.

    Args:
        expert_ids: int32 or int64 `[T, K]`. The number of pair `[t, k]` is `t K + k`.
        experts: E.

    Returns:
        The sorted numbers of the pairs, int64 `[T K]`, and offs, int32 `[E]`: the end of each expert's pairs. Pairs
        whose id is not an expert come last.
    """
    ids = expert_ids.flatten()
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    ids, pairs = ids.to(_sorted_dtype(experts, ids.dtype)).sort(stable=True)
    each = torch.arange(experts, dtype=ids.dtype, device=ids.device)
    return pairs, torch.searchsorted(ids, each, right=True, out_int32=True)


def _sorted_dtype(experts: int, dtype: torch.dtype) -> torch.dtype:
    """The narrowest dtype for the ids. A radix sort passes over memory once for each byte of an id."""
    return torch.int16 if experts <= torch.iinfo(torch.int16).max else dtype


def inverse_of(pairs: Tensor) -> Tensor:
    """The inverse of the permutation `pairs`: the position of each pair in it."""
    return torch.empty_like(pairs).scatter(0, pairs, torch.arange(pairs.shape[0], device=pairs.device))


@dataclass(frozen=True)
class ExpertCall:
    """A call of `experts_forward`, `grouped_forward` or, if `layer.n_masks` is 0, `experts_down`.

    The tensors of a prepared call come from `in_rows`, so ids, offs, expert weights and scales are contiguous.

    Attributes:
        layer: the call of one expert with balanced routing, where all experts have the same number of rows. Its
            alignments hold for every expert. For `experts_down` it has no masks, and its x is y.
        experts: E.
        rows: S, the number of rows of all experts together, including rows without an expert.
        top_k: K, the rows of a token. None if the rows are sorted by expert, with `offs`.
        index_dtype: the dtype of the ids or offs.
        weight_stride: elements of the stored weight from one expert to the next.
        masks_stride: elements of the packed masks from one expert to the next.
        scale_stride: elements of the scales from one expert to the next; 0 without scales.
        expert_weights_dtype: the dtype of the expert weights of `experts_down`.
    """

    layer: LayerCall
    experts: int
    rows: int
    top_k: int | None
    index_dtype: torch.dtype
    weight_stride: int
    masks_stride: int
    scale_stride: int
    expert_weights_dtype: torch.dtype | None = None

    @staticmethod
    def of(given: ExpertArguments) -> ExpertCall:
        """Describe a call whose arguments have been checked. Reads no tensor values."""
        ids, weights = given.expert_ids, given.mask_weights
        rows, experts = math.prod(given.leading), given.weight.shape[0]
        first = given.of_expert(0, given.x, None)
        layer = replace(
            LayerCall.of(first),
            leading=(_rows_of_one(rows, experts),),
            mask_weights_dtype=None if weights is None else weights.dtype,
            mask_weights=Layout((0, 0)) if weights is None else Layout.of(as_rows(weights)),
        )
        return ExpertCall(
            layer=replace(
                layer,
                weight=replace(layer.weight, layout=_of_every_expert(given.weight)),
                masks=_of_every_expert(given.packed_masks),
            ),
            experts=experts,
            rows=rows,
            top_k=None if ids is None else ids.shape[1],
            index_dtype=given.routing.dtype,
            weight_stride=given.weight.stride(0),
            masks_stride=given.packed_masks.stride(0),
            scale_stride=0 if given.weight_scale is None else math.prod(given.weight_scale.shape[1:]),
        )

    @staticmethod
    def of_down(given: DownArguments) -> ExpertCall:
        """Describe a call of `experts_down` whose arguments have been checked. Reads no tensor values."""
        y, weight, ids, expert_weights, scale, weight_format = given
        rows, (experts, out_features, _) = ids.numel(), weight.shape
        stored = StoredWeight(FORMATS[weight_format], weight.dtype, _of_every_expert(weight))
        layer = LayerCall.contiguous(
            y.device, y.dtype, 0, _rows_of_one(rows, experts), out_features, y.shape[-1], "identity"
        )
        return ExpertCall(
            layer=replace(layer, weight=stored, batch_invariant=batch_invariance.enabled),
            experts=experts,
            rows=rows,
            top_k=ids.shape[1],
            index_dtype=ids.dtype,
            weight_stride=weight.stride(0),
            masks_stride=0,
            scale_stride=0 if scale is None else math.prod(scale.shape[1:]),
            expert_weights_dtype=expert_weights.dtype,
        )

    @staticmethod
    def contiguous(layer: LayerCall, experts: int, tokens: int, top_k: int | None) -> ExpertCall:
        """Describe a call of contiguous tensors.

        Args:
            layer: the contiguous call of one expert, for any number of tokens.
            experts: E.
            tokens: T, or S if `top_k` is None.
            top_k: K, or None for rows that are sorted by expert.
        """
        rows = tokens * (top_k or 1)
        stored, d, h = layer.weight.format, layer.out_features, layer.in_features
        return ExpertCall(
            layer=replace(layer, leading=(_rows_of_one(rows, experts),)),
            experts=experts,
            rows=rows,
            top_k=top_k,
            index_dtype=torch.int32,
            weight_stride=d * h // stored.packed,
            masks_stride=d * layer.masks.strides[0],
            scale_stride=0 if stored.is_dense else math.prod(stored.scale_shape(d, h)),
        )

    @property
    def is_sorted(self) -> bool:
        """True if the rows are sorted by expert and `offs` holds the end of each expert's rows."""
        return self.top_k is None

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the result of `experts_forward` or `grouped_forward`."""
        leading: Sequence[int] = (self.rows,) if self.top_k is None else (self.rows // self.top_k, self.top_k)
        return (*leading, self.layer.out_features)

    def __str__(self) -> str:
        return f"{counted(self.experts, 'expert')}, {counted(self.rows, 'row')}, each {self.layer}"


def _rows_of_one(rows: int, experts: int) -> int:
    """`ceil(rows / min(rows, experts))`: the rows of an expert with balanced routing."""
    return ceil_div(rows, max(1, min(rows, experts)))


def _of_every_expert(tensor: Tensor) -> Layout:
    """The layout of one expert's slice of a tensor, with an alignment that every expert's slice has."""
    first = Layout.of(tensor[0])
    if tensor.shape[0] == 1:
        return first
    step = tensor.stride(0) * tensor.itemsize
    return replace(first, alignment=min(first.alignment, step & -step) if step else first.alignment)
