"""The packed mask format, version 1: one bit per weight and mask.

`packed_masks` is `uint8 [out_features, ceil(in_features / 8), n_masks]`. Bit `k % 8` (least significant first) of byte
`[r, k // 8, i]` is `M_i[r, k]`. The bits past `in_features` in the last byte of a row are padding and must be 0.
`n_masks` is the innermost dimension, so the masks of eight neighbouring weights are `n_masks` contiguous bytes. Kernels
and checkpoints use the same format.

Any uint8 tensor of the right shape whose padding is 0 is a valid set of masks. `check_packed_masks` can therefore find
wrong bits only in the padding.

Take the sizes of a packed tensor from this module (`n_masks_of`, `packed_shape`, `unpacked_shape`), not from its shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sizes import is_negative, same_sizes
from .tensors import check_dense, whole

MAX_MASKS = 16

N_MASKS_DIM = 2
"""The dimension of a packed tensor whose size is n_masks."""


def n_masks_of(packed_masks: Tensor) -> int:
    """The number of masks in a packed tensor."""
    return packed_masks.shape[N_MASKS_DIM]


def packed_width(in_features: int) -> int:
    """The number of bytes that hold `in_features` bits: the second size of a packed tensor."""
    return (in_features + 7) // 8


def packed_shape(n_masks: int, out_features: int, in_features: int) -> tuple[int, int, int]:
    """The shape of a packed tensor."""
    return out_features, packed_width(in_features), n_masks


def unpacked_shape(packed_masks: Tensor, in_features: int) -> tuple[int, int, int]:
    """The shape of the masks in a packed tensor: n_masks, out_features, in_features."""
    return n_masks_of(packed_masks), packed_masks.shape[0], in_features


def pack(masks: Tensor) -> Tensor:
    """Pack bool `[n_masks, out_features, in_features]` into `uint8 [out_features, ceil(in_features / 8), n_masks]`."""
    n_masks, out_features, in_features = masks.shape
    width = packed_width(in_features)
    packed = torch.zeros(n_masks, out_features, width, dtype=torch.uint8, device=masks.device)
    octets = masks.view(torch.uint8)
    for bit in range(min(8, in_features)):
        # A bool tensor that views a uint8 tensor may hold bytes above 1, which are True.
        column = octets[:, :, bit::8].clamp(max=1)
        packed[:, :, : column.shape[2]] |= column << bit
    return packed.permute(1, 2, 0).contiguous()


# Constants of `unpack_one`: an int64 as eight bytes, little endian.
_EACH_BYTE = 0x0101010101010101
_BIT_K_OF_BYTE_K = 0x8040201008040201 - (1 << 64)
_ALL_BUT_TOP_BITS = 0x7F7F7F7F7F7F7F7F


def unpack_one(packed_masks: Tensor, index: int, in_features: int) -> Tensor:
    """Unpack mask `index` of a packed tensor to bool `[out_features, in_features]`.

    Each packed byte becomes an int64, whose eight bytes are the bools. Multiplying by `0x0101...` copies the byte eight
    times, and an `and` keeps bit k in copy k only. Adding 127 to every copy sets its top bit if and only if the copy is
    not 0, and never carries into the next copy. The top bit, shifted down, is the bool. Code with a lookup table would
    be shorter, but each device would need a table, and traces and CUDA graph captures must not create it.
    """
    octets = packed_masks[:, :, index].to(torch.int64, memory_format=torch.contiguous_format)
    octets.mul_(_EACH_BYTE).bitwise_and_(_BIT_K_OF_BYTE_K).add_(_ALL_BUT_TOP_BITS)
    octets.bitwise_right_shift_(7).bitwise_and_(_EACH_BYTE)
    return octets.view(torch.bool)[:, :in_features]


def unpack(packed_masks: Tensor, in_features: int) -> Tensor:
    """Unpack all masks to bool `[n_masks, out_features, in_features]`: the inverse of `pack`."""
    return torch.stack([unpack_one(packed_masks, i, in_features) for i in range(n_masks_of(packed_masks))])


def clear_padding_(packed_masks: Tensor, in_features: int) -> None:
    """Set the padding bits of packed masks `[..., ceil(in_features / 8), n_masks]` to 0, in place."""
    if used := in_features % 8:
        packed_masks[..., -1, :] &= (1 << used) - 1


# Bytes of masks that are counted at once. On a CPU, intermediate tensors of 1 MiB stay in a core's cache, which makes
# the count several times faster. On a GPU, the number of launches matters more.
_COUNTED_AT_ONCE = {"cpu": 2**20}
_COUNTED_AT_ONCE_ELSEWHERE = 2**24


def count_ones(packed_masks: Tensor) -> Tensor:
    """Count the ones of each mask of a packed tensor: int64 `[n_masks]` on its device, without synchronising.

    The padding must be 0. Within every byte, neighbouring groups of 1, then 2, then 4 bits are added.
    """
    most = _COUNTED_AT_ONCE.get(packed_masks.device.type, _COUNTED_AT_ONCE_ELSEWHERE)
    total = packed_masks.new_zeros(n_masks_of(packed_masks), dtype=torch.int64)
    for octets in packed_masks.split(max(1, most // max(1, packed_masks.shape[1] * n_masks_of(packed_masks)))):
        pairs = octets - (octets >> 1 & 0x55)
        fours = (pairs & 0x33) + (pairs >> 2 & 0x33)
        total += (fours + (fours >> 4) & 0x0F).sum((0, 1), dtype=torch.int64)
    return total


def check_masks(masks: Tensor) -> None:
    """Check the dtype and the shape of an argument of `pack_masks`. Reads no values.

    Raises:
        TypeError: `masks` is not a dense tensor, or has a complex dtype.
        ValueError: `masks` has a wrong rank, or n_masks is 0 or above 16.
    """
    check_dense("masks", masks)
    if masks.dtype.is_complex:
        raise TypeError(f"masks: got dtype {masks.dtype}, must be bool, or integer or real with values 0 and 1")
    if masks.dim() == 1:
        raise ValueError(
            f"masks: got shape {list(masks.shape)}, one value per channel; MGLU needs one bit per weight, "
            "[n_masks, out_features, in_features] or [out_features, in_features] (with one mask per channel, "
            "gate * value is zero in every channel)"
        )
    if masks.dim() not in (2, 3):
        raise ValueError(
            f"masks: got shape {list(masks.shape)}, must be [n_masks, out_features, in_features] "
            "or [out_features, in_features]"
        )
    if masks.dim() == 3 and not 1 <= masks.shape[0] <= MAX_MASKS:
        raise ValueError(f"masks: got n_masks={masks.shape[0]}, must be 1 to {MAX_MASKS}")


def binary_masks(masks: Tensor) -> Tensor:
    """Convert an argument of `pack_masks` to bool `[n_masks, out_features, in_features]`. Synchronises with a GPU.

    Raises:
        TypeError: `masks` is not a dense tensor, or has a complex dtype.
        ValueError: `masks` has a wrong rank or a value other than 0 and 1, or n_masks is 0 or above 16.
    """
    check_masks(masks)
    if masks.dim() == 2:
        masks = masks.unsqueeze(0)
    if masks.dtype is torch.bool:
        return masks
    is_one = masks == 1
    wrong = ~(is_one | (masks == 0))
    if bool(wrong.any()):
        first = masks[wrong][0].item()
        raise ValueError(
            f"masks: {int(wrong.sum())} of {masks.numel()} values are neither 0 nor 1 (the first is {first}); "
            "masks must be binary. For real-valued logits use mglu::forward_ste, or mglu::pack_logits"
        )
    return is_one


def check_layout(packed_masks: Tensor, in_features: int, out_features: int | None = None) -> None:
    """Check that a tensor has the dtype and the shape of packed masks for `in_features` columns. Reads no values.

    Raises:
        TypeError: `packed_masks` is not a dense tensor, or its dtype is not uint8.
        ValueError: the rank, a size or the number of masks is wrong, or `in_features` is negative.
    """
    check_dense("packed_masks", packed_masks)
    if is_negative(in_features):
        raise ValueError(f"in_features: got {in_features}, must be at least 0")
    if packed_masks.dtype is not torch.uint8:
        raise TypeError(
            f"packed_masks: got dtype {packed_masks.dtype}, must be torch.uint8; pack masks with mglu::pack_masks"
        )
    shape = packed_masks.shape
    rows = shape[:1] if out_features is None else (out_features,)
    if len(shape) != 3 or not same_sizes(shape[:2], (*rows, packed_width(in_features))):
        out = "out_features" if out_features is None else out_features
        raise ValueError(
            f"packed_masks: got shape {list(shape)}, must be [out_features, ceil(in_features / 8), n_masks] = "
            f"[{out}, {packed_width(in_features)}, n_masks] for in_features={in_features}"
        )
    if not 1 <= shape[N_MASKS_DIM] <= MAX_MASKS:
        raise ValueError(f"packed_masks: got n_masks={shape[N_MASKS_DIM]}, must be 1 to {MAX_MASKS}")


def check_packed_masks(packed_masks: Tensor, in_features: int, out_features: int | None = None) -> None:
    """Check that a tensor can be packed masks for `in_features` columns: its dtype, its shape and its padding.

    Wrong bits outside the padding cannot be found. If `in_features` is a multiple of 8, there is no padding, so any
    bytes of the right shape pass, even masks that were packed for up to 7 columns fewer. Keep checksums of files that
    may get damaged.

    Reading the padding synchronises with a GPU. Call this where masks are made or loaded, not at each call.

    Args:
        packed_masks: the tensor to check; the padding of a meta tensor is not read.
        in_features: the number of columns of each mask.
        out_features: the number of rows of each mask; None for any.

    Raises:
        TypeError: `packed_masks` is not a dense tensor, or its dtype is not uint8.
        ValueError: the rank, a size or n_masks is wrong, `in_features` is negative, or a padding bit is set.
    """
    check_layout(packed_masks, in_features, out_features)
    check_padding(packed_masks, in_features)


def check_padding(packed_masks: Tensor, in_features: int) -> None:
    """Check that the padding of packed masks `[..., ceil(in_features / 8), n_masks]` is 0. Meta tensors pass.

    Raises:
        ValueError: a padding bit is set.
    """
    used = in_features % 8
    padding = 0xFF & ~((1 << used) - 1)  # no `>>`, which returns a DTensor unchanged in torch 2.13
    if used and not packed_masks.is_meta and bool(whole((packed_masks[..., -1, :] & padding).ne(0).sum())):
        raise ValueError(
            f"packed_masks: padding bits past in_features={in_features} are set, must be 0; the tensor is damaged or "
            "was packed for another in_features"
        )
