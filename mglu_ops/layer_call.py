"""The description of one call of `mglu::forward`: shapes, dtypes, memory layout and device, without any values.

A call is described once, when it is seen for the first time. Which backend runs it, which kernel, with which launch
configuration and which constants, all follow from the `LayerCall` alone. Calls with the same `metadata_key` have the
same description, so that later calls find what was prepared for the first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import batch_invariance
from .masks import n_masks_of, packed_width
from .words import counted

Key = tuple[object, ...]

_MOST_ALIGNED = 16
"""Bytes. No kernel loads more at once, so a larger alignment makes no difference."""


@dataclass(frozen=True)
class Layout:
    """The memory layout of a tensor.

    Attributes:
        strides: in elements.
        alignment: the largest power of two up to 16 that divides the address, in bytes.
    """

    strides: tuple[int, ...]
    alignment: int = _MOST_ALIGNED

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        return Layout(tensor.stride(), _alignment(tensor.data_ptr()))


@dataclass(frozen=True)
class LayerCall:
    """A call of the operator with fixed masks.

    Attributes:
        device: where all its tensors are.
        dtype: the dtype of x, the weight and the result.
        leading: the sizes of x before `in_features`.
        out_features: rows of the weight.
        in_features: columns of the weight.
        n_masks: 1 to 16.
        activation: a name of `mglu_ops.activations.ACTIVATIONS`.
        mask_weights_dtype: the dtype of the mask weights; None without them.
        x: the layout of x as `[tokens, in_features]`.
        weight: the layout of the weight, `[out_features, in_features]`.
        masks: the layout of the packed masks, `[out_features, ceil(in_features / 8), n_masks]`.
        mask_weights: the layout of the mask weights as `[tokens, n_masks]`.
        batch_invariant: whether a row of the result must not depend on the number of tokens.
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
    weight: Layout
    masks: Layout
    mask_weights: Layout
    batch_invariant: bool = False

    @staticmethod
    def of(
        x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str = "silu", mask_weights: Tensor | None = None
    ) -> LayerCall:
        """Describe a call whose arguments have been checked. Reads no value.

        x and the mask weights are taken as their rows (`as_rows`), which may be copies.
        """
        return LayerCall(
            device=x.device,
            dtype=x.dtype,
            leading=tuple(x.shape[:-1]),
            out_features=weight.shape[0],
            in_features=weight.shape[1],
            n_masks=n_masks_of(packed_masks),
            activation=activation,
            mask_weights_dtype=None if mask_weights is None else mask_weights.dtype,
            x=Layout.of(as_rows(x)),
            weight=Layout.of(weight),
            masks=Layout.of(packed_masks),
            mask_weights=Layout((0, 0)) if mask_weights is None else Layout.of(as_rows(mask_weights)),
            batch_invariant=batch_invariance.enabled,
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
    ) -> LayerCall:
        """Describe a call of contiguous tensors at aligned addresses, for which launches are measured and compiled."""
        width = packed_width(in_features)
        return LayerCall(
            device=device,
            dtype=dtype,
            leading=(tokens,),
            out_features=out_features,
            in_features=in_features,
            n_masks=n_masks,
            activation=activation,
            mask_weights_dtype=mask_weights_dtype,
            x=Layout((in_features, 1)),
            weight=Layout((in_features, 1)),
            masks=Layout((width * n_masks, n_masks, 1)),
            mask_weights=Layout((0, 0) if mask_weights_dtype is None else (n_masks, 1)),
        )

    @property
    def tokens(self) -> int:
        return math.prod(self.leading)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (*self.leading, self.out_features)

    def __str__(self) -> str:
        shape = f"{self.out_features} x {self.in_features}"
        return f"{str(self.dtype)[6:]}, n_masks {self.n_masks}, {counted(self.tokens, 'token')}, {shape}"


def as_rows(tensor: Tensor) -> Tensor:
    """View `[..., n]` as `[tokens, n]`, also if a size is 0. Copies if the strides allow no view."""
    return tensor if tensor.dim() == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _alignment(address: int) -> int:
    return min(address & -address, _MOST_ALIGNED) if address else _MOST_ALIGNED


def metadata_key(x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str, mask_weights: Tensor | None) -> Key:
    """All that the checks of a call and its `LayerCall` depend on, for tensors of any rank.

    This runs in every eager call and takes most of a microsecond, so it spells `arguments_key` out instead of calling a
    function for each tensor (mask weights are rare). A contiguous x may be another part of a large tensor in each
    call: its offset does not count, only whether its storage holds all of it.

    Raises:
        RuntimeError: a tensor is not dense, and so has no strides or no address.
    """
    masks, offset, storage = packed_masks, x.storage_offset(), len(x.untyped_storage())
    is_contiguous = x.is_contiguous()
    return (
        batch_invariance.enabled, activation, None if mask_weights is None else _tensor_key(mask_weights),
        x.dtype, x.device, x.shape, is_contiguous or x.stride(),
        offset * x.itemsize + x.nbytes <= storage if is_contiguous else (offset, storage), x.data_ptr() & 15,
        weight.dtype, weight.device, weight.shape, weight.is_contiguous() or weight.stride(),
        weight.storage_offset(), len(weight.untyped_storage()), weight.data_ptr() & 15,
        masks.dtype, masks.device, masks.shape, masks.is_contiguous() or masks.stride(),
        masks.storage_offset(), len(masks.untyped_storage()), masks.data_ptr() & 15,
    )  # fmt: skip


def arguments_key(*args: object) -> Key | None:
    """Like `metadata_key`, for the arguments of any operator: the metadata of tensors, and other values unchanged.

    None if a tensor is not dense, and so has no strides or no address.
    """
    try:
        return (
            batch_invariance.enabled,
            *(_tensor_key(arg) if isinstance(arg, Tensor) else tuple(arg) if isinstance(arg, list) else arg
              for arg in args),
        )  # fmt: skip
    except RuntimeError:
        return None


def _tensor_key(tensor: Tensor) -> Key:
    return (
        tensor.dtype, tensor.device, tensor.shape, tensor.is_contiguous() or tensor.stride(),
        # A storage may be resized under its tensors, so its size is part of what was checked.
        tensor.storage_offset(), tensor.untyped_storage().nbytes(), tensor.data_ptr() & 15,
    )  # fmt: skip
