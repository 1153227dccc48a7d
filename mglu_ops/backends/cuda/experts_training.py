"""A training step of experts in 16 bits on a GPU, for rows sorted by expert (csrc/cuda/training.md).

The rows of each expert follow the equations in `training.py`, which define the symbols t, f_i, F_i, b_i, D_i and dt.

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

from dataclasses import replace
from math import gcd

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

from ...call import Call, Layout
from ...given import BackwardGiven, Given
from ...masks import packed_width
from ...sizes import round_up
from ..triton import device_reason
from ..triton.experts import ascending, product
from .compiler import has_cuda_core
from .device import gpu_of
from .kernels import training_steps as steps
from .kernels.tile_wgmma_training import partials_of, training_items
from .launch import load

_MULTIPLE = 8
"""out_features and in_features are padded to multiples of 8, since `grouped_mm` needs 16-byte aligned rows, and
unaligned rows are slow in Triton."""


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why this module cannot train experts in this dtype on this GPU; None if it can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"no kernels of a training step for {dtype}, only for torch.float16 and torch.bfloat16"
    if not has_cuda_core():
        return "cuda-core is not installed (pip install cuda-core)"
    return device_reason(device)


class ForwardTrain:
    """A prepared `mglu::grouped_forward_train`, which runs on the current device. Thread-safe."""

    def __init__(self, call: Call) -> None:
        self._entries = partials_of(call.one)
        device: int = call.device.index
        call, gpu = as_read(call), gpu_of(device)
        launch = training_items(call, gpu)
        self._sequence = None if launch is None else load(launch.plan(call, gpu), device)

    def __call__(self, given: Given) -> tuple[Tensor, Tensor]:
        sequence = self._sequence
        if sequence is None:
            return library_forward(given)
        x, weight, packed_masks, *_ = given
        given = given._replace(x=_aligned(x), weight=_aligned(weight), packed_masks=_padded_rows(packed_masks))
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
    return F.pad(packed_masks, (0, 0, 0, more))[:, :, :octets] if more else _aligned(packed_masks)


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


def backward(arguments: BackwardGiven) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `mglu::grouped_backward` on the current device, for arguments in any strides."""
    found = _gradients(arguments)
    return tuple(arguments.x.new_empty(0) if grad is None else grad for grad in found)  # type: ignore[return-value]


def _gradients(
    arguments: BackwardGiven,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight, mask logits and mask weights; None if not needed."""
    grad_output, x, weight, packed_masks, partials, needs, logits_dtype, mask_weights_dtype, offs = arguments
    assert offs is not None
    (rows, h), (experts, d, _), n_masks = x.shape, weight.shape, packed_masks.shape[3]
    (needs_x, needs_weight), needs_products = needs, needs[1] or logits_dtype is not None
    grad_x, grad_weight, grad_logits, grad_mask_weights = None, None, None, None
    if 0 in (rows, d, h, experts):
        return (
            x.new_zeros(x.shape) if needs_x else None,
            weight.new_zeros(weight.shape) if needs_weight else None,
            weight.new_zeros(experts, n_masks, d, h, dtype=logits_dtype) if logits_dtype else None,
            x.new_zeros(rows, n_masks, dtype=mask_weights_dtype) if mask_weights_dtype else None,
        )
    x, weight, packed_masks = _padded(x, weight, packed_masks)
    columns, depth = weight.shape[1:]
    offs, grad_output, partials = ascending(offs, rows), _padded_last(grad_output), _padded_last(partials)
    if mask_weights_dtype is not None:
        grad_mask_weights = steps.mask_weight_gradients(grad_output, partials[:, n_masks + 1 :], torch.float32)
        steps.clear_rows(grad_mask_weights, offs)
        grad_mask_weights = grad_mask_weights.to(mask_weights_dtype)
    if not (needs_x or needs_products):
        return None, None, None, grad_mask_weights

    scaled = steps.scale(grad_output, partials[:, : n_masks + 1])  # dt and all b_i
    if needs_x:
        flipped = steps.flip_signs(weight, packed_masks)
        grad_x = product(scaled.flatten(1), flipped.flatten(1, 2), offs)
        del flipped
        steps.clear_rows(grad_x, offs)
    if needs_products:
        # `products` holds D_1 to D_n, and `total` holds D_0. A gradient of the same dtype is written over them.
        products = product(scaled[:, 1:].flatten(1).t(), x, offs).view(experts, n_masks, columns, depth)
        total = product(scaled[:, 0].t(), x, offs) if needs_weight else None
        del scaled
        if logits_dtype is not None:
            same = logits_dtype is products.dtype
            written = logits_dtype if logits_dtype in steps.ELEMENTS else torch.float32
            grad_logits = products if same else torch.empty_like(products, dtype=written)
        steps.weight_gradients(total, products, weight, packed_masks, total, grad_logits)
        grad_weight = total
    if (columns, depth) != (d, h):
        grad_x = None if grad_x is None else grad_x[:, :h].contiguous()
        grad_weight = None if grad_weight is None else grad_weight[:, :d, :h].contiguous()
        grad_logits = None if grad_logits is None else grad_logits[:, :, :d, :h].contiguous()
    return grad_x, grad_weight, None if grad_logits is None else grad_logits.to(logits_dtype), grad_mask_weights


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
    return _aligned(x), _aligned(weight), _aligned(packed_masks)


def _padded_last(tensor: Tensor) -> Tensor:
    """Return a contiguous, 16-byte aligned tensor, its last dimension padded with zeros to a multiple of 8."""
    d = tensor.shape[-1]
    return _aligned(F.pad(tensor, (0, round_up(d, _MULTIPLE) - d)) if d % _MULTIPLE else tensor)


def _aligned(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _offs(given: Given) -> Tensor:
    assert given.offs is not None
    return given.offs
