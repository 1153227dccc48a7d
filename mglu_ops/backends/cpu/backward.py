"""The backward pass in bfloat16 on CPUs that multiply bfloat16: stacked library GEMMs, and C++ steps around them.

F_i is -1 where M_i = 1 and +1 elsewhere; P, Q_i and R_i are the partial derivatives of forward (`mglu_ops.ops`):

    dt = G * P,   b_i = G * Q_i,   dx = [dt b_1 ..] [W; F_1 * W; ..],   [D_0; D_1; ..] = [dt b_1 ..]^T x,
    dW = D_0 + sum_i F_i * D_i,   dlogits_i = -2 W * D_i,   dr_i = sum over out_features of G * R_i

The GEMMs are torch's, which sum products of bfloat16 in float32 and round once. With AVX512-BF16 they take a third of
the time of the float32 GEMMs of `composite`. The functions of `backward_steps` do the rest.

dx is computed for some tokens at a time, and all D_i for some output features at a time, so that dt and every b_i of a
large layer are never in memory as a whole. Each element of dx and of D_i is the result of one GEMM, and is rounded
once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layer_call import LayerCall
from ..base import BackwardArguments
from . import backward_steps as steps
from .library import Library, load

_CHUNK_NUMBERS = 1 << 24
"""Elements of dt and every b_i, or of D_0 and every D_i, that are in memory at once: 32 MB. With fewer, GEMMs repack
their operands too often (csrc/cpu/README.md)."""

_CHUNK_MULTIPLE = 64
"""Chunks have a multiple of this many tokens or output features, so that rows are whole cache lines."""

_MOST_MASKS_OF_NARROW_TOTALS = 4
"""The most masks for which D_0 is rounded to bfloat16 before the D_i are added to it. With more masks the compiled
naive layer, which sums over masks in float32, would have less than two thirds of the error in dW."""


def can_run(call: LayerCall) -> bool:
    """Whether `Backward` runs a call. True only where library GEMMs are faster in bfloat16 than in float32."""
    if call.device.type != "cpu" or call.dtype is not torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # so that other CPUs do not build kernels to find out
        return False
    library = load()
    return isinstance(library, Library) and library.supports("avx512_bf16", torch.bfloat16)


class Backward:
    """A prepared `mglu::backward`. Thread-safe; the same inputs give the same bits."""

    def __init__(self, call: LayerCall, library: Library) -> None:
        self._n_masks = call.n_masks
        self._library = library

    def __call__(self, arguments: BackwardArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grad_output, x, weight, packed_masks, partials, (needs_x, needs_weight), logits_dtype, mask_weights_dtype = (
            arguments
        )
        grad_output, weight = _with_contiguous_columns(grad_output), _with_contiguous_columns(weight)
        x, packed_masks, n_masks = x.contiguous(), packed_masks.contiguous(), self._n_masks
        first = 0 if needs_x or needs_weight else 1  # dlogits alone needs no dt
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
        """Compute dx `[tokens, in_features]` for some tokens at a time."""
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
        """Write dW and dlogits for some output features at a time; either may be None."""
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
    """The products of G and the partial derivatives: dt and every b_i, one part in memory at a time.

    Attributes:
        shape: tokens, entries and output features of the whole.
    """

    def __init__(self, library: Library, grad_output: Tensor, partials: Tensor) -> None:
        self.shape = partials.shape
        self._library, self._grad_output, self._partials = library, grad_output, partials
        self._memory = partials.new_empty(0)
        self._last: tuple[slice, slice] | None = None
        self._part = self._memory

    def part(self, tokens: slice, features: slice) -> Tensor:
        """Return the products for some tokens and output features. The result is valid until the next part is computed.

        Asking for the same part again does not recompute it. So a small layer, which has only one part, passes once
        over the partial derivatives.
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
    """Return the matrix, or a copy if its columns are not contiguous; rows may have any distance."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def _chunks(size: int, numbers_of_one: int) -> list[slice]:
    """Divide `size` tokens or output features into slices; each of them takes `numbers_of_one` numbers."""
    fit = _CHUNK_NUMBERS // max(numbers_of_one, 1) // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE
    step = max(fit, _CHUNK_MULTIPLE)
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]
