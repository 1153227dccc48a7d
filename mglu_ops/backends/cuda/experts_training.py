"""A training step of experts in 16 bits on a GPU, for rows sorted by expert (csrc/cuda/training.md).

The rows of each expert follow the equations in `training.py` and `backends.gradients`, which define the symbols.

- Forward on compute capability 9.0 is one kernel, `tile_wgmma`, if sizes and addresses suit it.
- Otherwise `torch.nn.functional.grouped_mm` multiplies. It reads `offs`, where the rows of each expert end, on the
  device. Elementwise kernels before and after it pass once over memory, and treat the weights of all experts as one
  matrix. W and all flipped weights F_i * W of an expert are stacked: the n_masks + 1 products of forward are columns of
  one GEMM, and dx is one GEMM with a float32 sum.
- In float16, and on GPUs for which torch has no kernel, Triton kernels replace `grouped_mm`
  (`mglu_ops.backends.triton.grouped`).

`grouped_mm` rounds its results to 16 bits. If t and all f_i were rounded, y would have up to 2.5 times the error of the
naive layer, mostly because the error of t enters every gate and value. Therefore a Triton kernel computes t in float32.
In two cases t is not used, and the gate and the value of each mask are products of their own:

- with one mask, where there are two products in either case;
- with relu, whose derivative jumps at 0, so that a gate near 0 needs the right sign. This takes 2 n_masks products.

Nothing waits for the GPU, and no shape depends on the values of `offs`. The same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

from ...call import Call, Layout
from ...given import BackwardGiven, Given
from ...masks import packed_width
from ...sizes import round_up
from .. import gradients
from ..gradients import Part
from ..triton.experts import ascending, product
from .device import gpu_of
from .kernels import training_steps as steps
from .kernels.tile_wgmma_training import training_items
from .launch import load
from .training import LayerSteps, aligned

_MULTIPLE = 8
"""out_features and in_features are padded to multiples of 8, since `grouped_mm` needs 16-byte aligned rows, and
unaligned rows are slow in Triton."""


class ForwardTrain:
    """A prepared `mglu::grouped_forward_train`, which runs on the current device. Thread-safe."""

    def __init__(self, call: Call) -> None:
        self._entries = call.n_partials
        device: int = call.device.index
        call, gpu = as_read(call), gpu_of(device)
        launch = training_items(call, gpu)
        self._sequence = None if launch is None else load(launch.plan(call, gpu), device)

    def __call__(self, given: Given) -> tuple[Tensor, Tensor]:
        sequence = self._sequence
        if sequence is None:
            return library_forward(given)
        x, weight, packed_masks, *_ = given
        given = given._replace(x=aligned(x), weight=aligned(weight), packed_masks=_padded_rows(packed_masks))
        rows, d = x.shape[0], given.out_features
        y, partials = x.new_empty(rows, d), x.new_empty(rows, self._entries, d)
        workspace = x.new_empty(sequence.workspace_bytes, dtype=torch.uint8)
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        sequence(stream, given.addresses(y) | {"partials": partials.data_ptr()}, workspace.data_ptr())
        steps.clear_rows(partials, ascending(_offs(given), rows))  # the kernel itself clears the rows of y
        return y, partials


def as_read(call: Call) -> Call:
    """Return the call that the kernel sees, after `ForwardTrain` has copied x, weight and masks to fixed layouts.

    Because of the copies, neither the choice of the launch nor the bits of the result depend on the arguments' layouts.
    """
    one = call.one
    octets = round_up(packed_width(one.in_features), _octets_together(one.n_masks))
    layer = Call.contiguous(
        one.device, one.dtype, one.n_masks, 1, one.out_features, one.in_features, one.activation, one.mask_weights_dtype
    )
    layer = replace(layer, mask_weights=one.mask_weights, masks=Layout((octets * one.n_masks, one.n_masks, 1)))
    return layer.over_experts(call.routed.experts, call.tokens, None)


def _padded_rows(packed_masks: Tensor) -> Tensor:
    """Return the packed masks with padding at the end of each row, so that rows start at multiples of 16 bytes."""
    octets, n_masks = packed_masks.shape[2:]
    more = -octets % _octets_together(n_masks)
    return F.pad(packed_masks, (0, 0, 0, more))[:, :, :octets] if more else aligned(packed_masks)


def _octets_together(n_masks: int) -> int:
    """The fewest octets (8 columns) whose packed masks take a multiple of 16 bytes."""
    return 16 // gcd(16, n_masks)


def library_forward(given: Given) -> tuple[Tensor, Tensor]:
    """Run `mglu::grouped_forward_train` with `grouped_mm` or Triton GEMMs, for arguments in any strides."""
    x, weight, packed_masks, activation, mask_weights, *_ = given
    offs = _offs(given)
    (rows, h), d, n_masks = x.shape, weight.shape[1], packed_masks.shape[3]
    entries = 1 + (1 if mask_weights is None else 2) * n_masks
    if 0 in (rows, d, h, weight.shape[0]):
        return x.new_zeros(rows, d), x.new_zeros(rows, entries, d)
    x, weight, packed_masks = _padded(x, weight, packed_masks)
    padded, offs, total = weight.shape[1], ascending(offs, rows), None
    y, partials = x.new_empty(rows, padded), x.new_empty(rows, entries, padded)
    parts = n_masks == 1 or activation == "relu"
    if not parts:
        total = _wide_product(x, weight, offs)
    operands = steps.flip_signs(weight, packed_masks, with_weight=False, parts=parts)
    products = product(x, operands.flatten(1, 2).transpose(1, 2), offs).view(rows, operands.shape[1], padded)
    del operands
    steps.partials(products, activation, mask_weights, partials, y, total=total, parts=parts)
    steps.clear_rows(y, offs)
    steps.clear_rows(partials, offs)
    return (y, partials) if padded == d else (y[:, :d].contiguous(), partials[:, :, :d].contiguous())


def backward(given: BackwardGiven) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `mglu::grouped_backward` on the current device, for arguments in any strides."""
    grad_output, x, weight, packed_masks, partials, *_, offs = given
    (experts, d, h), rows = weight.shape, x.shape[0]
    assert offs is not None
    if 0 in (rows, d, h, experts):
        grads = given.empty_gradients()
        return grads[0].zero_(), grads[1].zero_(), grads[2].zero_(), grads[3].zero_()
    x, weight, packed_masks = _padded(x, weight, packed_masks)
    padded = given._replace(
        grad_output=_padded_last(grad_output),
        x=x,
        weight=weight,
        packed_masks=packed_masks,
        partials=_padded_last(partials),
    )
    found = gradients.backward(_Steps(packed_masks.shape[3], ascending(offs, rows)), padded)
    if weight.shape[1:] == (d, h):
        return found
    grad_x, grad_weight, grad_logits, grad_mask_weights = found
    return (
        _cropped(grad_x, rows, h),
        _cropped(grad_weight, d, h),
        _cropped(grad_logits, d, h),
        grad_mask_weights,
    )


def _cropped(padded: Tensor, d: int, h: int) -> Tensor:
    """Copy the first d rows and h columns of each matrix, unless they are all, or the tensor is empty."""
    is_whole = padded.shape[-2:] == (d, h) or not padded.numel()
    return padded if is_whole else padded[..., :d, :h].clone(memory_format=torch.contiguous_format)


class _Steps(LayerSteps):
    """The steps of experts, around grouped products. Their gradients take the memory of D_0 and the D_i."""

    def __init__(self, n_masks: int, offs: Tensor) -> None:
        super().__init__(n_masks)
        self._offs = offs

    def parts(self, entries: int, tokens: int, out_features: int, in_features: int) -> Sequence[Part]:
        return [Part(slice(0, tokens), slice(0, out_features))]

    def back(self, scaled: Tensor, flipped: Tensor, grad_x: Tensor | None, part: Part, x: Tensor) -> Tensor:
        grad_x = product(scaled.flatten(1), flipped.flatten(1, 2), self._offs)
        steps.clear_rows(grad_x, self._offs)
        return grad_x

    def weight_products(
        self, scaled: Tensor, x: Tensor, n_masks: int, with_total: bool
    ) -> tuple[Tensor | None, Tensor]:
        products = product(scaled[:, -n_masks:].flatten(1).t(), x, self._offs)
        total = product(scaled[:, 0].t(), x, self._offs) if with_total else None
        return total, products.view(len(products), n_masks, -1, x.shape[1])

    def outputs(
        self,
        total: Tensor | None,
        products: Tensor,
        weight: Tensor,
        needs_weight: bool,
        logits_dtype: torch.dtype | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        if logits_dtype in (None, products.dtype):
            return total, None if logits_dtype is None else products
        return total, torch.empty_like(products, dtype=logits_dtype)

    def mask_weight_gradients(self, grad_output: Tensor, terms: Tensor, dtype: torch.dtype) -> Tensor:
        found = steps.mask_weight_gradients(grad_output, terms, torch.float32)
        steps.clear_rows(found, self._offs)
        return found


def _wide_product(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Return t = x W^T of each row in float32."""
    from ..triton.grouped import grouped_products  # imported here, because the module imports Triton

    return grouped_products(x, weight.mT, offs, x.new_empty(x.shape[0], weight.shape[1], dtype=torch.float32))


def _padded(x: Tensor, weight: Tensor, packed_masks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous, 16-byte aligned operands, padded with zeros to multiples of `_MULTIPLE` features."""
    d, h = weight.shape[1:]
    more_rows, more_columns = round_up(d, _MULTIPLE) - d, round_up(h, _MULTIPLE) - h
    if more_rows or more_columns:
        x, weight = F.pad(x, (0, more_columns)), F.pad(weight, (0, more_columns, 0, more_rows))
        packed_masks = F.pad(packed_masks, (0, 0, 0, 0, 0, more_rows))
    return aligned(x), aligned(weight), aligned(packed_masks)


def _padded_last(tensor: Tensor) -> Tensor:
    """Return a contiguous, 16-byte aligned tensor, its last dimension padded with zeros to a multiple of 8."""
    d = tensor.shape[-1]
    return aligned(F.pad(tensor, (0, round_up(d, _MULTIPLE) - d)) if d % _MULTIPLE else tensor)


def _offs(given: Given) -> Tensor:
    assert given.offs is not None
    return given.offs
