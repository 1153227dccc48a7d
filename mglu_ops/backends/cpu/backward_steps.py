"""The elementwise steps of a backward pass in bfloat16 (csrc/cpu/backward.h). Each is one pass over memory.

Columns of matrices are contiguous, and rows may have any distance; packed masks and results are contiguous.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from ...masks import n_masks_of
from .library import DTYPES, Library

# The structs of csrc/cpu/backward.h: pointers, then sizes, strides and dtypes, all of 8 bytes.
_pack_flip_signs = struct.Struct("@3P4q").pack
_pack_scale = struct.Struct("@3P6q").pack
_pack_weight_gradients = struct.Struct("@6P7q").pack
_pack_mask_weight_gradients = struct.Struct("@3P6q").pack


def flip_signs(library: Library, weight: Tensor, packed_masks: Tensor) -> Tensor:
    """Return W, then F_i * W for every mask: `[n_masks + 1, out_features, in_features]`."""
    n_masks, (d, h) = n_masks_of(packed_masks), weight.shape
    flipped = weight.new_empty(n_masks + 1, d, h)
    addresses = weight.data_ptr(), packed_masks.data_ptr(), flipped.data_ptr()
    library.run_step("flip_signs", _pack_flip_signs(*addresses, n_masks, d, h, weight.stride(0)))
    return flipped


def scale(library: Library, grad_output: Tensor, partials: Tensor, out: Tensor) -> None:
    """Write the products of G `[tokens, columns]` and partials `[tokens, entries, columns]`, shaped as the partials."""
    addresses = grad_output.data_ptr(), partials.data_ptr(), out.data_ptr()
    strides = grad_output.stride(0), *partials.stride()[:2]
    library.run_step("scale", _pack_scale(*addresses, *partials.shape, *strides))


def weight_gradients(
    library: Library,
    total: Tensor | None,
    products: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    grad_weight: Tensor | None,
    grad_logits: Tensor | None,
) -> None:
    """Write `dW = D_0 + sum_i F_i * D_i` and `dlogits_i = -2 W * D_i`; either may be None.

    Args:
        library: the library.
        total: D_0 `[out_features, in_features]` in bfloat16 or float32; only dW needs it.
        products: every D_i, `[n_masks, out_features, in_features]`, contiguous.
        weight: `[out_features, in_features]`.
        packed_masks: all masks.
        grad_weight: receives dW.
        grad_logits: receives dlogits, in bfloat16 or float32, `[n_masks, out_features, in_features]`; each mask is
            contiguous.
    """
    n_masks, d, h = products.shape
    tensors = total, products, weight, packed_masks, grad_weight, grad_logits
    total_dtype, logits_dtype = (torch.float32 if tensor is None else tensor.dtype for tensor in (total, grad_logits))
    library.run_step(
        "weight_gradients",
        _pack_weight_gradients(
            *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
            *(n_masks, d, h, weight.stride(0), 0 if grad_logits is None else grad_logits.stride(0)),
            *(DTYPES[total_dtype], DTYPES[logits_dtype]),
        ),
    )


def mask_weight_gradients(library: Library, grad_output: Tensor, terms: Tensor) -> Tensor:
    """Sum G `[tokens, columns]` times R `[tokens, n_masks, columns]` over columns, in float32."""
    sums = terms.new_empty(terms.shape[:2], dtype=torch.float32)
    addresses = grad_output.data_ptr(), terms.data_ptr(), sums.data_ptr()
    strides = grad_output.stride(0), *terms.stride()[:2]
    library.run_step("mask_weight_gradients", _pack_mask_weight_gradients(*addresses, *terms.shape, *strides))
    return sums
