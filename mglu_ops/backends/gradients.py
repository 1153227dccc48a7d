"""The backward pass in 16 bits, as matrix products and elementwise steps in one order for every device.

F_i is -1 where M_i = 1 and +1 elsewhere, G is grad_output, and P, Q_i and R_i are the partial derivatives of forward
(`mglu_ops.ops`). Backward is linear in G:

    dt = G * P,   b_i = G * Q_i,   dx = [dt b_1 ..] [W; F_1 * W; ..],   [D_0; D_1; ..] = [dt b_1 ..]^T x,
    dW = D_0 + sum_i F_i * D_i,   dlogits_i = -2 W * D_i,   dr_i = sum over out_features of G * R_i

The products sum in float32 and round once. dt and the b_i of a large layer are never in memory as a whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..given import BackwardGiven

MOST_MASKS_OF_NARROW_TOTALS = 4
"""With up to this many masks, D_0 is rounded to 16 bits before the D_i are added to it. With more masks, this rounding
would make the error of dW more than 1.5 times the naive layer's, in which each mask has its own rounding error."""


class Part(NamedTuple):
    """Tokens and output features whose dt and b_i are in memory at once, and the gradients that they contribute to."""

    tokens: slice
    features: slice
    of_x: bool = True
    of_weight: bool = True


class Steps(ABC):
    """The products and the elementwise steps of one call on one kind of device. This class has those of one layer.

    In the shapes below, the dimension E of experts exists only with experts. `entries` of dt and the b_i are stacked in
    `scaled` `[tokens, entries, out_features]`.
    """

    logits_dtypes: ClassVar[Collection[torch.dtype]]
    """The dtypes in which `weight_gradients` writes dlogits. For others it writes float32, which torch converts."""

    @abstractmethod
    def parts(self, entries: int, tokens: int, out_features: int, in_features: int) -> Sequence[Part]:
        """Divide a call, so that `scaled` and the products of a part fit into memory."""

    @abstractmethod
    def scale(self, grad_output: Tensor, partials: Tensor) -> Tensor:
        """Return `scaled`, grad_output times each entry of the partials `[tokens, entries, out_features]`."""

    @abstractmethod
    def flip_signs(self, weight: Tensor, packed_masks: Tensor) -> Tensor:
        """Return W followed by F_i * W for every mask, `[(E,) n_masks + 1, out_features, in_features]`."""

    @abstractmethod
    def weight_gradients(
        self,
        total: Tensor | None,
        products: Tensor,
        weight: Tensor,
        packed_masks: Tensor,
        grad_weight: Tensor | None,
        grad_logits: Tensor | None,
    ) -> None:
        """Write dW from D_0 and the D_i, and dlogits; those that are not None."""

    @abstractmethod
    def mask_weight_gradients(self, grad_output: Tensor, terms: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum grad_output times the R_i over out_features. Return `[tokens, n_masks]`, in `dtype` or in float32."""

    def back(self, scaled: Tensor, flipped: Tensor, grad_x: Tensor | None, part: Part, x: Tensor) -> Tensor:
        """Add the products of a part to dx, which the first part allocates. Return dx."""
        grad_x = x.new_empty(x.shape) if grad_x is None else grad_x
        rows, adds = grad_x[part.tokens], part.features.start > 0
        torch.addmm(rows, scaled.flatten(1), flipped.flatten(0, 1), beta=1 if adds else 0, out=rows)
        return grad_x

    def weight_products(
        self, scaled: Tensor, x: Tensor, n_masks: int, with_total: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Return D_0, or None without `with_total`, and all D_i `[(E,) n_masks, out_features, in_features]`."""
        is_wide = with_total and n_masks > MOST_MASKS_OF_NARROW_TOTALS
        stacked = scaled if with_total and not is_wide else scaled[:, -n_masks:]
        products = torch.mm(stacked.flatten(1).t(), x).view(*stacked.shape[1:], x.shape[1])
        if is_wide:
            return self.wide_product(scaled[:, 0].t(), x), products
        return products[0] if with_total else None, products[-n_masks:]

    def wide_product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `a @ b` in float32."""
        return torch.mm(a, b, out_dtype=torch.float32)

    def outputs(
        self,
        total: Tensor | None,
        products: Tensor,
        weight: Tensor,
        needs_weight: bool,
        logits_dtype: torch.dtype | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Allocate dW and dlogits; those that are needed."""
        grad_weight = weight.new_empty(weight.shape) if needs_weight else None
        if logits_dtype is None:
            return grad_weight, None
        return grad_weight, weight.new_empty((len(products), *weight.shape), dtype=logits_dtype)


def backward(steps: Steps, given: BackwardGiven) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight, mask logits and mask weights; a gradient that is not needed is empty."""
    (needs_x, needs_weight), logits_dtype = given.needs, given.logits_dtype
    found = gradients(steps, given, needs_x, needs_weight, logits_dtype)
    return as_outputs(given, *found, mask_weight_gradients(steps, given))


def gradients(
    steps: Steps, given: BackwardGiven, needs_x: bool, needs_weight: bool, logits_dtype: torch.dtype | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx, dW and dlogits; those that are needed. dlogits may be in float32."""
    grad_output, x, weight, packed_masks, partials = given[:5]
    n_masks, needs_products = packed_masks.shape[-1], needs_weight or logits_dtype is not None
    grad_x = grad_weight = grad_logits = flipped = None
    if not (needs_x or needs_products):
        return None, None, None
    first = 0 if needs_x or needs_weight else 1  # dlogits alone does not need dt, which is made from entry 0
    written = logits_dtype if logits_dtype is None or logits_dtype in steps.logits_dtypes else torch.float32
    for part in steps.parts(n_masks + 1 - first, x.shape[0], *weight.shape[-2:]):
        of_x, of_weight = needs_x and part.of_x, needs_products and part.of_weight
        if not (of_x or of_weight):
            continue
        tokens, features = part.tokens, part.features
        rows, masks = weight[..., features, :], packed_masks[..., features, :, :]
        scaled = steps.scale(grad_output[tokens, features], partials[tokens, first : n_masks + 1, features])
        if of_x:
            flipped = steps.flip_signs(rows, masks) if flipped is None else flipped
            grad_x = steps.back(scaled, flipped, grad_x, part, x)
        if part.of_weight:
            flipped = None  # the next part has other output features; this frees memory for the products
        if not of_weight:
            del scaled
            continue
        total, products = steps.weight_products(scaled, x, n_masks, needs_weight)
        del scaled  # frees memory, as below
        if grad_weight is grad_logits is None:
            grad_weight, grad_logits = steps.outputs(total, products, weight, needs_weight, written)
        weight_rows = None if grad_weight is None else grad_weight[..., features, :]
        logits_rows = None if grad_logits is None else grad_logits[..., features, :]
        steps.weight_gradients(total, products, rows, masks, weight_rows, logits_rows)
        del total, products
    return grad_x, grad_weight, grad_logits


def mask_weight_gradients(steps: Steps, given: BackwardGiven) -> Tensor | None:
    """Return dr; None if it is not needed."""
    dtype, first = given.mask_weights_dtype, given.packed_masks.shape[-1] + 1
    return None if dtype is None else steps.mask_weight_gradients(given.grad_output, given.partials[:, first:], dtype)


def as_outputs(
    given: BackwardGiven,
    grad_x: Tensor | None,
    grad_weight: Tensor | None,
    grad_logits: Tensor | None,
    grad_mask_weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the outputs of `mglu::backward`: gradients in the dtypes that were asked for, and empty ones for None."""
    empty = given.x.new_empty
    return (
        empty(0) if grad_x is None else grad_x,
        empty(0) if grad_weight is None else grad_weight,
        empty(0) if grad_logits is None else grad_logits.to(given.logits_dtype),
        empty(0) if grad_mask_weights is None else grad_mask_weights.to(given.mask_weights_dtype),
    )


def with_contiguous_columns(matrix: Tensor) -> Tensor:
    """Return the matrix, or a copy if the elements of a row are not contiguous. Rows may have any stride."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()
