"""The backward pass in bfloat16 on CPUs that multiply bfloat16: torch's GEMMs, and elementwise steps in C++.

F_i is -1 where M_i = 1 and +1 elsewhere, G is grad_output, and P, Q_i and R_i are the partial derivatives of forward
(`mglu_ops.ops`):

    dt = G * P,   b_i = G * Q_i,   dx = [dt b_1 ..] [W; F_1 * W; ..],   [D_0; D_1; ..] = [dt b_1 ..]^T x,
    dW = D_0 + sum_i F_i * D_i,   dlogits_i = -2 W * D_i,   dr_i = sum over out_features of G * R_i

torch's GEMMs compute the products. They sum products of bfloat16 in float32 and round once. With AVX512-BF16 they take
a third of the time of the float32 GEMMs of the backend `composite`. `backward_steps` has the elementwise steps.

dx is computed in chunks of tokens, and all D_i in chunks of output features, so that dt and the b_i of a large layer
are never in memory as a whole. Each element of dx and of D_i is the result of one GEMM, and is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...call import Call
from ...given import BackwardGiven
from ..base import Reason
from . import backward_steps as steps
from .library import Library, load

_CHUNK_ELEMENTS = 1 << 24
"""The most elements of a chunk (32 MB), which holds either dt and all b_i, or D_0 and all D_i. In smaller chunks, GEMMs
repack their operands too often (csrc/cpu/README.md)."""

_CHUNK_MULTIPLE = 64
"""Chunks have a multiple of this many tokens or output features, so that rows fill whole cache lines."""

_MOST_MASKS_OF_NARROW_TOTALS = 4
"""With up to this many masks, D_0 is rounded to bfloat16 before the D_i are added to it. With more masks and this
rounding, the error of dW would exceed 1.5 times that of the compiled naive layer, which sums over masks in float32."""


def reason(call: Call) -> Reason | None:
    """Return the reason why `Backward` does not run a call; None if it does.

    It runs a call if torch's GEMMs are faster in bfloat16 than in float32.
    """
    is_for_bfloat16 = call.dtype is torch.bfloat16 and torch.backends.mkldnn.is_available()
    # `load` is called last, because it may build the kernels.
    if is_for_bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        library = load()
        if isinstance(library, str):
            return Reason(library, is_loss=False, is_passing=True)
        if library.supports("avx512_bf16", torch.bfloat16):
            return None
    return Reason("no kernel for this backward pass", is_loss=False)


class Backward:
    """A prepared `mglu::backward`. Thread-safe; the same inputs give the same bits."""

    def __init__(self, call: Call, library: Library) -> None:
        self._n_masks = call.n_masks
        self._library = library

    def __call__(self, arguments: BackwardGiven) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grad_output, x, weight, packed_masks, partials, needs, logits_dtype, mask_weights_dtype, _ = arguments
        needs_x, needs_weight = needs
        grad_output, weight = _with_contiguous_columns(grad_output), _with_contiguous_columns(weight)
        x, packed_masks, n_masks = x.contiguous(), packed_masks.contiguous(), self._n_masks
        first = 0 if needs_x or needs_weight else 1  # dlogits alone does not need dt, which is made from entry 0
        scaled = _Scaled(self._library, grad_output, partials[:, first : n_masks + 1])
        grad_x, grad_weight, grad_logits, grad_mask_weights = (x.new_empty(0) for _ in range(4))
        if needs_x:
            grad_x = self._grad_x(scaled, weight, packed_masks)
        if needs_weight or logits_dtype is not None:
            if needs_weight:
                grad_weight = weight.new_empty(weight.shape)
            if logits_dtype is not None:
                written = torch.bfloat16 if logits_dtype is torch.bfloat16 else torch.float32
                grad_logits = weight.new_empty((n_masks, *weight.shape), dtype=written)
            self._weight_gradients(
                scaled,
                x,
                weight,
                packed_masks,
                grad_weight if needs_weight else None,
                None if logits_dtype is None else grad_logits,
            )
            grad_logits = grad_logits.to(logits_dtype or x.dtype)
        if mask_weights_dtype is not None:
            terms = partials[:, n_masks + 1 :]
            grad_mask_weights = steps.mask_weight_gradients(self._library, grad_output, terms).to(mask_weights_dtype)
        return grad_x, grad_weight, grad_logits, grad_mask_weights

    def _grad_x(self, scaled: _Scaled, weight: Tensor, packed_masks: Tensor) -> Tensor:
        """Compute dx `[tokens, in_features]` in chunks of tokens."""
        tokens, entries, d = scaled.shape
        flipped = steps.flip_signs(self._library, weight, packed_masks).flatten(0, 1)
        grad_x = weight.new_empty(tokens, weight.shape[1])
        for rows in _chunks(tokens, entries * d):
            torch.mm(scaled.part(rows, slice(0, d)).flatten(1), flipped, out=grad_x[rows])
        return grad_x

    def _weight_gradients(
        self,
        scaled: _Scaled,
        x: Tensor,
        weight: Tensor,
        packed_masks: Tensor,
        grad_weight: Tensor | None,
        grad_logits: Tensor | None,
    ) -> None:
        """Write dW and dlogits in chunks of output features. A gradient that is not needed is None."""
        tokens, entries, d = scaled.shape
        narrow_total = grad_weight is not None and self._n_masks <= _MOST_MASKS_OF_NARROW_TOTALS
        wide_total = grad_weight is not None and not narrow_total
        wide_x = x.float() if wide_total else x
        for rows in _chunks(d, entries * max(x.shape)):
            factors = scaled.part(slice(0, tokens), rows)
            stacked = factors if narrow_total else factors[:, -self._n_masks :]
            products = torch.mm(stacked.flatten(1).t(), x).view(*stacked.shape[1:], x.shape[1])
            total = products[0] if narrow_total else None
            if wide_total:
                total = torch.mm(factors[:, 0].float().t(), wide_x)
            steps.weight_gradients(
                self._library,
                total,
                products[-self._n_masks :],
                weight[rows],
                packed_masks[rows],
                None if grad_weight is None else grad_weight[rows],
                None if grad_logits is None else grad_logits[:, rows],
            )


class _Scaled:
    """dt and all b_i: the products of G and the partial derivatives. One chunk of them is in memory at a time.

    Attributes:
        shape: `(tokens, entries, out_features)` of all products.
    """

    def __init__(self, library: Library, grad_output: Tensor, partials: Tensor) -> None:
        self.shape = partials.shape
        self._library, self._grad_output, self._partials = library, grad_output, partials
        self._memory = partials.new_empty(0)
        self._last: tuple[slice, slice] | None = None
        self._part = self._memory

    def part(self, tokens: slice, features: slice) -> Tensor:
        """Return the products for a chunk of tokens and output features, valid until another chunk is asked for.

        The last chunk is kept, so a small layer, which is a single chunk, passes over the partial derivatives once.
        """
        if self._last != (tokens, features):
            partials = self._partials[tokens, :, features]
            if self._memory.numel() < partials.numel():
                self._memory = partials.new_empty(partials.numel())
            self._part = self._memory[: partials.numel()].view(partials.shape)
            steps.scale(self._library, self._grad_output[tokens, features], partials, self._part)
            self._last = tokens, features
        return self._part


def _with_contiguous_columns(matrix: Tensor) -> Tensor:
    """Return the matrix, or a copy if the elements of a row are not contiguous. Rows may have any stride."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def _chunks(size: int, elements_each: int) -> list[slice]:
    """Divide `size` tokens or output features into chunks. Each token or feature takes `elements_each` elements."""
    fit = _CHUNK_ELEMENTS // max(elements_each, 1) // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE
    step = max(fit, _CHUNK_MULTIPLE)
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]
