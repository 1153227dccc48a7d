"""The arguments and the description of one call of the operators over experts (`mglu_ops.expert_ops`).

An expert is a layer like any other, so the description of a call holds the `LayerCall` of one expert, which answers all
questions about bytes, and what is the same for all experts: how many there are, the rows that they share, and the
distances between neighbouring experts in memory. How many rows each expert has is a value, and no description knows it.
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
    """The arguments of `experts_forward`, whose rows have `expert_ids`, or of `grouped_forward`, which has `offs`."""

    x: Tensor
    """`[T, in_features]`, or `[S, in_features]` sorted by expert with `offs`."""
    weight: Tensor
    """`[E, out_features, in_features]` in x's dtype, or as `weight_format` stores it."""
    packed_masks: Tensor
    """uint8 `[E, out_features, ceil(in_features / 8), n_masks]`."""
    activation: str = "silu"
    mask_weights: Tensor | None = None
    """`[T, K, n_masks]`, or `[S, n_masks]` with `offs`."""
    weight_scale: Tensor | None = None
    """The scales of a layer with a leading dimension of experts."""
    weight_format: str = "dense"
    activation_format: str = "dense"
    expert_ids: Tensor | None = None
    """int32 or int64 `[T, K]`; None with `offs`."""
    offs: Tensor | None = None
    """int32 `[E]`: the end of each expert's rows."""

    @staticmethod
    def of_ids(x: Tensor, weight: Tensor, packed_masks: Tensor, expert_ids: Tensor, *rest: Any) -> ExpertArguments:
        """The arguments of `mglu::experts_forward`, in the order of its schema. Refuses expert_ids of None."""
        if expert_ids is None:  # torch lets it through, and here it would mean offs
            check_dense("expert_ids", expert_ids)
        return ExpertArguments(x, weight, packed_masks, *rest, expert_ids=expert_ids)  # type: ignore[misc] # rest ends before it

    @staticmethod
    def of_offs(x: Tensor, weight: Tensor, packed_masks: Tensor, offs: Tensor, *rest: Any) -> ExpertArguments:
        """The arguments of `mglu::grouped_forward`, in the order of its schema. Refuses offs of None."""
        if offs is None:  # torch lets it through, and here it would mean expert ids
            check_dense("offs", offs)
        return ExpertArguments(x, weight, packed_masks, *rest, offs=offs)  # type: ignore[misc] # rest ends before it

    @property
    def out_features(self) -> int:
        return self.packed_masks.shape[1]

    @property
    def n_masks(self) -> int:
        return self.packed_masks.shape[1 + N_MASKS_DIM]

    @property
    def routing(self) -> Tensor:
        """What assigns rows to experts: `expert_ids` or `offs`."""
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
        """The same with mask weights `[S, n_masks]`, and contiguous ids, offs and scales. Copies what must be."""
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
        """All that the checks of a call and its `ExpertCall` depend on. Raises what `metadata_key` raises."""
        return (*metadata_key(LayerArguments(*self[:8])), self.offs is None, tensor_key(self.routing))


class DownArguments(NamedTuple):
    """The arguments of `mglu::experts_down`, in the order of its schema."""

    y: Tensor
    """`[T, K, in_features]`; its in_features are the layer's out_features."""
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
        """The same with contiguous y, ids, expert weights and scales. Copies what must be."""
        y, weight, ids, expert_weights, scale, weight_format = self
        scale = None if scale is None else scale.contiguous()
        return DownArguments(
            y.contiguous(), weight, ids.contiguous(), expert_weights.contiguous(), scale, weight_format
        )


def sort_pairs(expert_ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sort the pairs of a token and one of its experts by expert, stably, without reading a value on the host.

    Args:
        expert_ids: int32 or int64 `[T, K]`; pair `t K + k` is `[t, k]`.
        experts: E.

    Returns:
        The pairs, int64 `[T K]`, those without an expert last, and offs, int32 `[E]`: the end of each expert's pairs.
    """
    ids = expert_ids.flatten()
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    ids, pairs = ids.to(_sorted_dtype(experts, ids.dtype)).sort(stable=True)
    each = torch.arange(experts, dtype=ids.dtype, device=ids.device)
    return pairs, torch.searchsorted(ids, each, right=True, out_int32=True)


def _sorted_dtype(experts: int, dtype: torch.dtype) -> torch.dtype:
    """The narrowest dtype of ids, since a radix sort passes over memory once for each of their bytes."""
    return torch.int16 if experts <= torch.iinfo(torch.int16).max else dtype


def inverse_of(pairs: Tensor) -> Tensor:
    """The place of each pair in `pairs`, a permutation."""
    return torch.empty_like(pairs).scatter(0, pairs, torch.arange(pairs.shape[0], device=pairs.device))


@dataclass(frozen=True)
class ExpertCall:
    """A call of `experts_forward` or `grouped_forward`, or with `layer.n_masks` 0 of `experts_down`.

    The tensors of a prepared call are `in_rows`: ids, offs, expert weights and scales are contiguous.

    Attributes:
        layer: one expert's call with the number of rows that an expert has if all have as many. Its alignments hold for
            every expert. For `experts_down` it has no masks, x is y, and out_features is the last size of the result.
        experts: E.
        rows: S, the rows of all experts together, with those that belong to none.
        top_k: K, the rows of a token. None if the rows are sorted, and `offs` tells where each expert's end.
        index_dtype: the dtype of the ids or offs.
        weight_stride: elements of the stored weight from one expert to the next.
        masks_stride: likewise for the packed masks.
        scale_stride: likewise for the scales; 0 without scales.
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
        """Describe a call whose arguments have been checked. Reads no value."""
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
        """Describe a call of `experts_down` whose arguments have been checked. Reads no value."""
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
        """Describe a call of contiguous tensors; `layer` is a contiguous call of one expert with any tokens.

        `tokens` are T, or S if `top_k` is None.
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
        """Whether the rows are sorted by expert, and `offs` tells where each expert's end."""
        return self.top_k is None

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the result of `experts_forward` or `grouped_forward`."""
        leading: Sequence[int] = (self.rows,) if self.top_k is None else (self.rows // self.top_k, self.top_k)
        return (*leading, self.layer.out_features)

    def __str__(self) -> str:
        return f"{counted(self.experts, 'expert')}, {counted(self.rows, 'row')}, each {self.layer}"


def _rows_of_one(rows: int, experts: int) -> int:
    """The rows of an expert if they are balanced: no expert is without rows before each has one."""
    return ceil_div(rows, max(1, min(rows, experts)))


def _of_every_expert(tensor: Tensor) -> Layout:
    """The layout of one expert's part of a tensor, with the alignment of all of them."""
    first = Layout.of(tensor[0])
    if tensor.shape[0] == 1:
        return first
    step = tensor.stride(0) * tensor.itemsize
    return replace(first, alignment=min(first.alignment, step & -step) if step else first.alignment)
