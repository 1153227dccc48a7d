"""The description of one call of an operator: shapes, dtypes, memory layouts and device, but no values.

A call of one layer and a call of several experts are both a `Call`; `Call.routing` is None without experts. The
description does not hold the number of rows of each expert, which only the values of ids or offs tell. `mglu_ops.ops`
defines the sizes E, T, K and S of experts.

The `Call` alone decides which backend runs a call, with which kernel, launch configuration and constants. Calls with
the same `metadata_key` have the same `Call`, so only the first of them is described and prepared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from . import batch_invariance
from .formats import FORMATS, WeightFormat
from .given import DownGiven, Given, as_rows
from .masks import packed_width
from .sizes import ceil_div
from .words import counted

Key = tuple[object, ...]

_MOST_ALIGNED = 16
"""The largest alignment in bytes that matters, because no load of a kernel is wider."""


@dataclass(frozen=True)
class Layout:
    """The memory layout of a tensor.

    Attributes:
        strides: strides in elements.
        alignment: the largest power of two, up to 16, that divides the address in bytes.
    """

    strides: tuple[int, ...]
    alignment: int = _MOST_ALIGNED

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        address = tensor.data_ptr()
        return Layout(tensor.stride(), min(address & -address, _MOST_ALIGNED) if address else _MOST_ALIGNED)

    @staticmethod
    def of_every_expert(tensor: Tensor) -> Layout:
        """Return the layout of an expert's slice of a tensor, with an alignment that the slices of all experts have."""
        first = Layout.of(tensor[0])
        step = tensor.stride(0) * tensor.itemsize
        if tensor.shape[0] == 1 or not step:
            return first
        return replace(first, alignment=min(first.alignment, step & -step))


@dataclass(frozen=True)
class StoredWeight:
    """The format and the memory layout of a call's weight.

    Attributes:
        format: the format of the weight.
        dtype: the dtype of the weight's tensor.
        layout: the layout of the weight's tensor.
    """

    format: WeightFormat
    dtype: torch.dtype
    layout: Layout

    @property
    def bits(self) -> int:
        """The bits of one weight, without its scale."""
        return 8 * self.dtype.itemsize // self.format.packed


@dataclass(frozen=True)
class Routing:
    """The assignment of rows to experts in a call, without its values.

    Attributes:
        experts: E, the number of experts.
        top_k: K, the number of experts of a token; None if the rows are sorted by expert, with `offs`.
        index_dtype: the dtype of the ids or offs.
        weight_stride: the distance, in elements, from one expert's stored weight to the next one's.
        masks_stride: the distance in elements from one expert's packed masks to the next one's.
        scale_stride: the distance in elements from one expert's scales to the next one's; 0 without scales.
        expert_weights_dtype: the dtype of the expert weights of `experts_down`.
    """

    experts: int
    top_k: int | None
    index_dtype: torch.dtype
    weight_stride: int
    masks_stride: int
    scale_stride: int
    expert_weights_dtype: torch.dtype | None = None

    @property
    def is_sorted(self) -> bool:
        """True if the rows are sorted by expert and `offs` holds the end of each expert's rows."""
        return self.top_k is None


@dataclass(frozen=True)
class Call:
    """The description of a call of `forward`, `experts_forward`, `grouped_forward` or `experts_down`.

    Attributes:
        device: the device of all tensors.
        dtype: the dtype of x and the result.
        leading: the sizes of the result before `out_features`; for `experts_down`, the sizes of y before `in_features`.
        out_features: the rows of the weight.
        in_features: the columns of the weight.
        n_masks: the number of masks, 1 to 16; 0 for `experts_down`.
        activation: a name of `mglu_ops.activations.ACTIVATIONS`.
        mask_weights_dtype: the dtype of the mask weights; None without them.
        x: the layout of x, or of y in `experts_down`, as `[tokens, in_features]`.
        weight: the format and the layout of the weight; with experts, of each expert's weight.
        masks: the layout of the packed masks `[out_features, ceil(in_features / 8), n_masks]`; with experts, of each
            expert's masks.
        mask_weights: the layout of the mask weights as `[tokens, n_masks]`.
        batch_invariant: True if the bits of a row of the result must not depend on the number of tokens.
        activation_format: the format to which x is rounded, a name of `mglu_ops.formats.ACTIVATION_FORMATS`.
        routing: how the rows belong to experts; None for a layer without experts.
    """

    device: torch.device
    dtype: torch.dtype
    leading: tuple[int, ...]
    out_features: int
    in_features: int
    n_masks: int
    activation: str
    mask_weights_dtype: torch.dtype | None
    x: Layout
    weight: StoredWeight
    masks: Layout
    mask_weights: Layout
    batch_invariant: bool = False
    activation_format: str = "dense"
    routing: Routing | None = None

    @staticmethod
    def of(given: Given) -> Call:
        """Describe a call whose arguments have been checked. Reads no tensor values.

        The layouts are the ones that the tensors have in `given.in_rows()`.
        """
        weights, scale, index = given.mask_weights, given.weight_scale, given.routing
        weight, masks, routing = Layout.of(given.weight), Layout.of(given.packed_masks), None
        if index is not None:
            weight, masks = map(Layout.of_every_expert, (given.weight, given.packed_masks))
            routing = Routing(
                experts=given.weight.shape[0],
                top_k=None if given.expert_ids is None else given.expert_ids.shape[1],
                index_dtype=index.dtype,
                weight_stride=given.weight.stride(0),
                masks_stride=given.packed_masks.stride(0),
                scale_stride=0 if scale is None else math.prod(scale.shape[1:]),
            )
        return Call(
            device=given.x.device,
            dtype=given.x.dtype,
            leading=given.leading,
            out_features=given.out_features,
            in_features=given.in_features,
            n_masks=given.n_masks,
            activation=given.activation,
            mask_weights_dtype=None if weights is None else weights.dtype,
            x=Layout.of(as_rows(given.x)),
            weight=StoredWeight(FORMATS[given.weight_format], given.weight.dtype, weight),
            masks=masks,
            mask_weights=Layout((0, 0)) if weights is None else Layout.of(as_rows(weights)),
            batch_invariant=batch_invariance.enabled,
            activation_format=given.activation_format,
            routing=routing,
        )

    @staticmethod
    def of_down(given: DownGiven) -> Call:
        """Describe a call of `experts_down` whose arguments have been checked. Reads no tensor values."""
        y, weight, ids, expert_weights, scale, weight_format = given
        experts, out_features, _ = weight.shape
        call = Call.contiguous(y.device, y.dtype, 0, 1, out_features, y.shape[-1], "identity")
        return replace(
            call,
            leading=tuple(ids.shape),
            weight=StoredWeight(FORMATS[weight_format], weight.dtype, Layout.of_every_expert(weight)),
            batch_invariant=batch_invariance.enabled,
            routing=Routing(
                experts=experts,
                top_k=ids.shape[1],
                index_dtype=ids.dtype,
                weight_stride=weight.stride(0),
                masks_stride=0,
                scale_stride=0 if scale is None else math.prod(scale.shape[1:]),
                expert_weights_dtype=expert_weights.dtype,
            ),
        )

    @staticmethod
    def contiguous(
        device: torch.device,
        dtype: torch.dtype,
        n_masks: int,
        tokens: int,
        out_features: int,
        in_features: int,
        activation: str = "silu",
        mask_weights_dtype: torch.dtype | None = None,
        weight_format: str = "dense",
        activation_format: str = "dense",
    ) -> Call:
        """Describe a call of contiguous, aligned tensors, for measuring and compiling launches ahead of time."""
        width, stored = packed_width(in_features), FORMATS[weight_format]
        return Call(
            device=device,
            dtype=dtype,
            leading=(tokens,),
            out_features=out_features,
            in_features=in_features,
            n_masks=n_masks,
            activation=activation,
            mask_weights_dtype=mask_weights_dtype,
            x=Layout((in_features, 1)),
            weight=StoredWeight(stored, stored.dtype or dtype, Layout((in_features // stored.packed, 1))),
            masks=Layout((width * n_masks, n_masks, 1)),
            mask_weights=Layout((0, 0) if mask_weights_dtype is None else (n_masks, 1)),
            activation_format=activation_format,
        )

    def over_experts(
        self, experts: int, tokens: int, top_k: int | None, expert_weights_dtype: torch.dtype | None = None
    ) -> Call:
        """Return a call of contiguous tensors over experts, each of which is a layer of this call's shape and dtypes.

        Args:
            experts: E, the number of experts.
            tokens: T, the number of tokens; if `top_k` is None, S, the number of rows.
            top_k: K, the number of experts of a token; None for rows that are sorted by expert.
            expert_weights_dtype: the dtype of the expert weights of `experts_down`.
        """
        stored, d, h = self.weight.format, self.out_features, self.in_features
        routing = Routing(
            experts=experts,
            top_k=top_k,
            index_dtype=torch.int32,
            weight_stride=d * h // stored.packed,
            masks_stride=d * self.masks.strides[0],
            scale_stride=0 if stored.is_dense else math.prod(stored.scale_shape(d, h)),
            expert_weights_dtype=expert_weights_dtype,
        )
        return replace(self, leading=(tokens,) if top_k is None else (tokens, top_k), routing=routing)

    def of_rows(self, rows: int) -> Call:
        """Return the call of this layer, or of a single expert's layer, for a number of rows."""
        return replace(self, leading=(rows,), routing=None)

    @cached_property
    def one(self) -> Call:
        """The call of this layer; with experts, of one expert's layer for `balanced_rows` rows."""
        return self.of_rows(self.balanced_rows)

    @cached_property
    def with_dense_weight(self) -> Call:
        """The same call with a contiguous weight in x's dtype."""
        return replace(self, weight=StoredWeight(FORMATS["dense"], self.dtype, Layout((self.in_features, 1))))

    def with_rounded_x(self) -> Call:
        """Return the same call after x has been rounded to the activation format, into a contiguous tensor."""
        return replace(self, x=Layout((self.in_features, 1)), activation_format="dense")

    @property
    def tokens(self) -> int:
        """The number of rows of the result (of y, for `experts_down`). With experts this is S, the sum over experts."""
        return math.prod(self.leading)

    @property
    def routed(self) -> Routing:
        """The routing of a call that has experts."""
        assert self.routing is not None
        return self.routing

    @property
    def rows_of_x(self) -> int:
        """The number of rows of x. With expert_ids, a row of x has K rows in the result."""
        return self.tokens // ((self.routing and self.routing.top_k) or 1)

    @property
    def balanced_rows(self) -> int:
        """The number of rows that an expert has if routing is balanced; without experts, all rows."""
        if self.routing is None:
            return self.tokens
        return ceil_div(self.tokens, max(1, min(self.tokens, self.routing.experts)))

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the result, of all operators but `experts_down`, whose result has one row per token."""
        return (*self.leading, self.out_features)

    @property
    def n_partials(self) -> int:
        """The number of partial derivatives of an element of the result, which training keeps (`mglu_ops.ops`)."""
        return (1 if self.mask_weights_dtype is None else 2) * self.n_masks + 1

    def bytes_of_columns(self, columns: int) -> int:
        """The bytes of `columns` columns of one row of the weight and of all masks. `columns` is a multiple of 8."""
        return columns // 8 * (self.weight.bits + self.n_masks)

    def __str__(self) -> str:
        shape = f"{self.out_features} x {self.in_features}"
        words = f"{str(self.dtype)[6:]}, n_masks {self.n_masks}, {counted(self.balanced_rows, 'token')}, {shape}"
        if self.routing is None:
            return words
        return f"{counted(self.routing.experts, 'expert')}, {counted(self.tokens, 'row')}, each {words}"


def metadata_key(given: Given) -> Key:
    """Return the metadata on which the checks of a call and its `Call` depend, for tensors of any rank.

    Every eager call runs this function, which takes just under 1 us. To save three function calls, it does not call
    `tensor_key` for x, weight and packed_masks. For a contiguous x, the key does not hold the storage offset, but only
    whether the storage is large enough, so that calls with different slices of one large tensor share a key.

    Raises:
        RuntimeError: a tensor is not dense, and so has no strides or no address.
    """
    x, weight, masks, activation, mask_weights, scale, weight_format, activation_format, ids, offs = given
    offset, storage, is_contiguous = x.storage_offset(), len(x.untyped_storage()), x.is_contiguous()
    key = (
        batch_invariance.enabled, activation, None if mask_weights is None else tensor_key(mask_weights),
        weight_format, activation_format, None if scale is None else tensor_key(scale),
        x.dtype, x.device, x.shape, is_contiguous or x.stride(),
        offset * x.itemsize + x.nbytes <= storage if is_contiguous else (offset, storage), x.data_ptr() & 15,
        weight.dtype, weight.device, weight.shape, weight.is_contiguous() or weight.stride(),
        weight.storage_offset(), len(weight.untyped_storage()), weight.data_ptr() & 15,
        masks.dtype, masks.device, masks.shape, masks.is_contiguous() or masks.stride(),
        masks.storage_offset(), len(masks.untyped_storage()), masks.data_ptr() & 15,
    )  # fmt: skip
    if ids is not None:
        return (*key, tensor_key(ids))
    return key if offs is None else (*key, None, tensor_key(offs))


def arguments_key(*args: object) -> Key | None:
    """Return a key of a call of any operator: the metadata of the tensors, and the values of the other arguments.

    Returns None if a tensor is not dense, and so has no strides or no address.
    """
    try:
        return (
            batch_invariance.enabled,
            *(tensor_key(arg) if isinstance(arg, Tensor) else tuple(arg) if isinstance(arg, list) else arg
              for arg in args),
        )  # fmt: skip
    except RuntimeError:
        return None


def tensor_key(tensor: Tensor) -> Key:
    """Return the metadata of a tensor. Raises RuntimeError if it is not dense."""
    return (
        tensor.dtype, tensor.device, tensor.shape, tensor.is_contiguous() or tensor.stride(),
        # Storages can be resized under their tensors, so a check of their size holds only for this size.
        tensor.storage_offset(), tensor.untyped_storage().nbytes(), tensor.data_ptr() & 15,
    )  # fmt: skip
