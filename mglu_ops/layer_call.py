"""The description of one call of `mglu::forward`: shapes, dtypes, memory layouts and device, but no values.

The `LayerCall` alone decides which backend runs a call, with which kernel, launch configuration and constants. Calls
with the same `metadata_key` have the same `LayerCall`, so only the first of them is described and prepared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import batch_invariance
from .formats import FORMATS, WeightFormat
from .masks import n_masks_of, packed_width
from .words import counted

Key = tuple[object, ...]

_MOST_ALIGNED = 16
"""The largest alignment in bytes that makes a difference: no load of a kernel is wider."""


class LayerArguments(NamedTuple):
    """The arguments of `mglu::forward`, in the order of its schema."""

    x: Tensor
    """`[..., in_features]`."""
    weight: Tensor
    """`[out_features, in_features]` in x's dtype, or as `weight_format` stores it (`mglu_ops.formats`)."""
    packed_masks: Tensor
    """uint8 `[out_features, ceil(in_features / 8), n_masks]`."""
    activation: str = "silu"
    """A name of `mglu_ops.activations.ACTIVATIONS`."""
    mask_weights: Tensor | None = None
    """`[..., n_masks]`."""
    weight_scale: Tensor | None = None
    """The scales of the weight (`WeightFormat.scale_shape`)."""
    weight_format: str = "dense"
    """A name of `mglu_ops.formats.FORMATS`."""
    activation_format: str = "dense"
    """The format to which x is rounded, a name of `mglu_ops.formats.ACTIVATION_FORMATS`."""

    @property
    def out_features(self) -> int:
        return self.packed_masks.shape[0]

    @property
    def in_features(self) -> int:
        return self.x.shape[-1]

    @property
    def n_masks(self) -> int:
        return n_masks_of(self.packed_masks)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, without those that are None."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}

    def addresses(self, out: Tensor) -> dict[str, int]:
        """The addresses of the tensors and of the result, by the names of the kernels' parameters; 0 for None.

        This runs in every call. A dict display is faster than a loop over the fields.
        """
        mask_weights, scale = self.mask_weights, self.weight_scale
        return {
            "x": self.x.data_ptr(),
            "weight": self.weight.data_ptr(),
            "packed_masks": self.packed_masks.data_ptr(),
            "mask_weights": 0 if mask_weights is None else mask_weights.data_ptr(),
            "weight_scale": 0 if scale is None else scale.data_ptr(),
            "out": out.data_ptr(),
        }

    def in_rows(self) -> LayerArguments:
        """Return the arguments with x `[tokens, in_features]`, mask weights `[tokens, n_masks]` and contiguous scales.

        Copies tensors that cannot be viewed like that.
        """
        scale = self.weight_scale
        if self.x.dim() == 2 and (scale is None or scale.is_contiguous()):  # mask weights have the rank of x
            return self
        weights = None if self.mask_weights is None else as_rows(self.mask_weights)
        return self._replace(
            x=as_rows(self.x), mask_weights=weights, weight_scale=None if scale is None else scale.contiguous()
        )


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
        return Layout(tensor.stride(), _alignment(tensor.data_ptr()))


@dataclass(frozen=True)
class StoredWeight:
    """The format and the memory layout of a call's weight.

    Attributes:
        format: the format.
        dtype: the dtype of the tensor.
        layout: the layout of the tensor.
    """

    format: WeightFormat
    dtype: torch.dtype
    layout: Layout

    @property
    def bits(self) -> int:
        """The bits of one weight, without its scale."""
        return 8 * self.dtype.itemsize // self.format.packed


@dataclass(frozen=True)
class LayerCall:
    """The description of a call of `mglu::forward`.

    Attributes:
        device: the device of all tensors.
        dtype: the dtype of x and the result.
        leading: the sizes of x before `in_features`.
        out_features: the rows of the weight.
        in_features: the columns of the weight.
        n_masks: the number of masks, 1 to 16.
        activation: a name of `mglu_ops.activations.ACTIVATIONS`.
        mask_weights_dtype: the dtype of the mask weights; None without them.
        x: the layout of x as `[tokens, in_features]`.
        weight: the format and the layout of the weight.
        masks: the layout of the packed masks, `[out_features, ceil(in_features / 8), n_masks]`.
        mask_weights: the layout of the mask weights as `[tokens, n_masks]`.
        batch_invariant: True if the bits of a row of the result must not depend on the number of tokens.
        activation_format: the format to which x is rounded, a name of `mglu_ops.formats.ACTIVATION_FORMATS`.
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

    @staticmethod
    def of(given: LayerArguments) -> LayerCall:
        """Describe a call whose arguments have been checked. Reads no tensor values.

        The layouts of x and the mask weights are those after `in_rows`.
        """
        weights = given.mask_weights
        return LayerCall(
            device=given.x.device,
            dtype=given.x.dtype,
            leading=tuple(given.x.shape[:-1]),
            out_features=given.out_features,
            in_features=given.in_features,
            n_masks=given.n_masks,
            activation=given.activation,
            mask_weights_dtype=None if weights is None else weights.dtype,
            x=Layout.of(as_rows(given.x)),
            weight=StoredWeight(FORMATS[given.weight_format], given.weight.dtype, Layout.of(given.weight)),
            masks=Layout.of(given.packed_masks),
            mask_weights=Layout((0, 0)) if weights is None else Layout.of(as_rows(weights)),
            batch_invariant=batch_invariance.enabled,
            activation_format=given.activation_format,
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
    ) -> LayerCall:
        """Describe a call of contiguous, aligned tensors, for measuring and compiling launches ahead of time."""
        width, stored = packed_width(in_features), FORMATS[weight_format]
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
            weight=StoredWeight(stored, stored.dtype or dtype, Layout((in_features // stored.packed, 1))),
            masks=Layout((width * n_masks, n_masks, 1)),
            mask_weights=Layout((0, 0) if mask_weights_dtype is None else (n_masks, 1)),
            activation_format=activation_format,
        )

    def with_dense_weight(self) -> LayerCall:
        """Return the same call with a contiguous weight in x's dtype."""
        return replace(self, weight=StoredWeight(FORMATS["dense"], self.dtype, Layout((self.in_features, 1))))

    def with_rounded_x(self) -> LayerCall:
        """Return the same call after x has been rounded to the activation format, into a contiguous tensor."""
        return replace(self, x=Layout((self.in_features, 1)), activation_format="dense")

    @property
    def tokens(self) -> int:
        return math.prod(self.leading)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (*self.leading, self.out_features)

    def bytes_of_columns(self, columns: int) -> int:
        """The bytes that one row of the weight and of all masks takes in `columns` columns, a multiple of 8."""
        return columns // 8 * (self.weight.bits + self.n_masks)

    def __str__(self) -> str:
        shape = f"{self.out_features} x {self.in_features}"
        return f"{str(self.dtype)[6:]}, n_masks {self.n_masks}, {counted(self.tokens, 'token')}, {shape}"


def as_rows(tensor: Tensor) -> Tensor:
    """View `[..., n]` as `[tokens, n]`, or copy if the strides allow no view. Sizes may be 0."""
    return tensor if tensor.dim() == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _alignment(address: int) -> int:
    return min(address & -address, _MOST_ALIGNED) if address else _MOST_ALIGNED


def metadata_key(given: LayerArguments) -> Key:
    """The metadata on which the checks of a call and its `LayerCall` depend, for tensors of any rank.

    This runs in every eager call, in just under 1 us. Unlike `arguments_key`, it calls no function for a tensor, except
    for mask weights and scales, which are rare. The key does not hold the storage offset of a contiguous x, only
    whether the storage of x is large enough. So calls with different slices of one large tensor share a key.

    Raises:
        RuntimeError: a tensor is not dense, and so has no strides or no address.
    """
    x, weight, masks, activation, mask_weights, scale, weight_format, activation_format = given
    offset, storage, is_contiguous = x.storage_offset(), len(x.untyped_storage()), x.is_contiguous()
    return (
        batch_invariance.enabled, activation, None if mask_weights is None else tensor_key(mask_weights),
        weight_format, activation_format, None if scale is None else tensor_key(scale),
        x.dtype, x.device, x.shape, is_contiguous or x.stride(),
        offset * x.itemsize + x.nbytes <= storage if is_contiguous else (offset, storage), x.data_ptr() & 15,
        weight.dtype, weight.device, weight.shape, weight.is_contiguous() or weight.stride(),
        weight.storage_offset(), len(weight.untyped_storage()), weight.data_ptr() & 15,
        masks.dtype, masks.device, masks.shape, masks.is_contiguous() or masks.stride(),
        masks.storage_offset(), len(masks.untyped_storage()), masks.data_ptr() & 15,
    )  # fmt: skip


def arguments_key(*args: object) -> Key | None:
    """`metadata_key` for any operator: the metadata of each tensor, and other arguments unchanged.

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
    """The metadata of a tensor. Raises RuntimeError if it is not dense."""
    return (
        tensor.dtype, tensor.device, tensor.shape, tensor.is_contiguous() or tensor.stride(),
        # Storages can be resized under their tensors, so a check of their size holds only for this size.
        tensor.storage_offset(), tensor.untyped_storage().nbytes(), tensor.data_ptr() & 15,
    )  # fmt: skip
