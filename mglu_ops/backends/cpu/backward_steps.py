"""The elementwise steps of a backward pass in bfloat16 (csrc/cpu/backward.h). Each is one pass over memory.

The elements of a row are contiguous, and rows may have any stride. Packed masks and results are contiguous.
`backends.gradients` defines the symbols F_i, D_0, D_i and G.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...masks import n_masks_of
from ..parameters import addresses
from .library import DTYPES, Library, packer


def _run(library: Library, name: str, tensors: Mapping[str, Tensor | None], **integers: int) -> None:
    """Run a step. Its struct in csrc/cpu/backward.h has the step's name in camel case."""
    pack = packer(name.title().replace("_", ""), integers, "backward.h")
    library.run_step(name, pack(addresses(**tensors)))


def flip_signs(library: Library, weight: Tensor, packed_masks: Tensor) -> Tensor:
    """Return W followed by F_i * W for every mask: `[n_masks + 1, out_features, in_features]`."""
    n_masks, (d, h) = n_masks_of(packed_masks), weight.shape
    flipped = weight.new_empty(n_masks + 1, d, h)
    tensors = {"weight": weight, "packed_masks": packed_masks, "out": flipped}
    sizes = {"n_masks": n_masks, "out_features": d, "in_features": h}
    _run(library, "flip_signs", tensors, **sizes, weight_stride=weight.stride(0))
    return flipped


def scale(library: Library, grad_output: Tensor, partials: Tensor, out: Tensor) -> None:
    """Write the products of `grad_output` `[tokens, columns]` and `partials` `[tokens, entries, columns]` to `out`."""
    _run(
        library,
        "scale",
        {"grad_output": grad_output, "partials": partials, "out": out},
        **dict(zip(("tokens", "entries", "columns"), partials.shape, strict=True)),
        grad_stride=grad_output.stride(0),
        partials_stride=partials.stride(0),
        entry_stride=partials.stride(1),
    )


def weight_gradients(
    library: Library,
    total: Tensor | None,
    products: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    grad_weight: Tensor | None,
    grad_logits: Tensor | None,
) -> None:
    """Write `dW = D_0 + sum_i F_i * D_i` and `dlogits_i = -2 W * D_i`.

    Args:
        library: the library.
        total: D_0 `[out_features, in_features]` in bfloat16 or float32; only dW needs it.
        products: every D_i, `[n_masks, out_features, in_features]`, contiguous.
        weight: `[out_features, in_features]`.
        packed_masks: all masks.
        grad_weight: receives dW; None if it is not needed.
        grad_logits: receives dlogits `[n_masks, out_features, in_features]` in bfloat16 or float32, where the matrix of
            each mask is contiguous; None if they are not needed.
    """
    n_masks, d, h = products.shape
    _run(
        library,
        "weight_gradients",
        {
            "total": total,
            "products": products,
            "weight": weight,
            "packed_masks": packed_masks,
            "grad_weight": grad_weight,
            "grad_logits": grad_logits,
        },
        n_masks=n_masks,
        out_features=d,
        in_features=h,
        weight_stride=weight.stride(0),
        logits_stride=0 if grad_logits is None else grad_logits.stride(0),
        total_dtype=DTYPES[torch.float32 if total is None else total.dtype],
        logits_dtype=DTYPES[torch.float32 if grad_logits is None else grad_logits.dtype],
    )


def mask_weight_gradients(library: Library, grad_output: Tensor, terms: Tensor) -> Tensor:
    """Sum `grad_output` `[tokens, columns]` times `terms` `[tokens, n_masks, columns]` over columns, in float32.

    `terms` are the partial derivatives R_i of `mglu_ops.ops`.
    """
    sums = terms.new_empty(terms.shape[:2], dtype=torch.float32)
    _run(
        library,
        "mask_weight_gradients",
        {"grad_output": grad_output, "terms": terms, "out": sums},
        **dict(zip(("tokens", "n_masks", "columns"), terms.shape, strict=True)),
        grad_stride=grad_output.stride(0),
        terms_stride=terms.stride(0),
        mask_stride=terms.stride(1),
    )
    return sums
