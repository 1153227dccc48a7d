"""A training step in 16 bits on a GPU (csrc/cuda/training.md).

With F_i = -1 where M_i = 1, else +1, forward computes `t = x W^T` and `f_i = x (F_i * W)^T`. From them it
computes the result y and its partial derivatives P = dy/dt, Q_i = dy/df_i and, with route weights r_i, R_i = dy/dr_i.
Backward is linear in the gradient G of y: with `dt = G * P` and `b_i = G * Q_i`,

    dx = dt W + sum_i b_i (F_i * W),   D_0 = dt^T x,   D_i = b_i^T x,
    dW = D_0 + sum_i F_i * D_i,   dlogits_i = -2 W * D_i,   dr_i = sum over out_features of G * R_i

On compute capability 9.0 the kernel `tile_wgmma` is all of forward, and the kernel `backward_gemm` computes dx, D_0 and
D_i from G, P and Q_i: no dt or b_i is in memory. Elsewhere, and where sizes or addresses do not suit these kernels,
library GEMMs multiply, with kernels before and after that pass once over memory. They take the output features in
chunks, and have all that only the equations name in memory for one chunk at a time: t and f_i in float32, dt, b_i, D_0,
D_i and the flipped weights. Only dx is a sum over chunks, so that no other result is rounded more than once.

Everything runs on the current device and stream, and the same inputs give the same bits.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...layer_call import LayerCall
from ..base import BackwardArguments
from .device import gpu_of
from .kernels import backward_gemm
from .kernels import training_steps as steps
from .kernels.base import ELEMENTS, ceil_div, round_up
from .kernels.tile_wgmma_training import training_choice
from .launch import LaunchSequence

FORWARD_CHUNKS = 16
"""The chunks of a large layer in forward: t and every f_i then take an eighth of the memory of P and every Q_i."""

BACKWARD_CHUNKS = 4
"""The chunks of a large layer in backward: dt and every b_i then take a quarter of the memory of P and every Q_i. dx is
rounded after each of them."""

_SMALLEST_CHUNK = 1 << 24
"""Elements of a chunk's largest tensor (32 MiB in 16 bits) below which smaller chunks would save little."""

_SCRATCH_PRODUCTS = 1 << 25
"""Elements of D_0 and every D_i (64 MiB) beyond which `backward_gemm` takes the output features in chunks, where it
cannot write them to the gradients. A chunk still has several tiles for each SM."""

_MOST_MASKS_OF_NARROW_TOTALS = 4
"""The most masks for which D_0 is rounded to 16 bits before the D_i are added to it. With more masks the naive layer,
whose rounding errors are independent for each mask, would have less than two thirds of the error in dW."""

_CHUNK_MULTIPLE = 128
"""Output features, a multiple of which keeps rows aligned and the tiles of a GEMM whole."""


def forward_train(
    call: LayerCall, x: Tensor, weight: Tensor, packed_masks: Tensor, route_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The result and the partial derivatives; see `Backend.forward_train`."""
    tokens, out_features, n_masks = call.tokens, call.out_features, call.n_masks
    n_entries = n_masks + 1 if route_weights is None else 2 * n_masks + 1
    result, partials = x.new_empty(tokens, out_features), x.new_empty(tokens, n_entries, out_features)
    sequence = _tile_sequence(call)
    if sequence is not None:
        workspace = x.new_empty(sequence.workspace_bytes, dtype=torch.uint8)
        tensors = workspace, x, weight, packed_masks, route_weights, result, partials
        sequence(_stream(x), *(0 if tensor is None else tensor.data_ptr() for tensor in tensors))
        return result, partials

    x, weight, packed_masks = x.contiguous(), _with_contiguous_columns(weight), _aligned(packed_masks)
    for rows in feature_chunks(tokens, n_masks, out_features, call.in_features, FORWARD_CHUNKS):
        outputs = result[:, rows], partials[:, :, rows]
        _products_and_partials(x, weight[rows], packed_masks[rows], call.activation, route_weights, *outputs)
    return result, partials


@lru_cache(maxsize=1024)
def _tile_sequence(call: LayerCall) -> LaunchSequence | None:
    """The launches of `tile_wgmma` in training; None where it cannot run a call."""
    device: int = call.device.index
    gpu = gpu_of(device)
    choice = training_choice(call, gpu)
    return None if choice is None else choice.sequence(call, gpu, device)


def backward(call: LayerCall, arguments: BackwardArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, mask logits and route weights; see `Backend.backward`."""
    grad_output, x, weight, packed_masks, partials, (needs_x, needs_weight), logits_dtype, route_dtype = arguments
    tokens, (out_features, in_features), n_masks = x.shape[0], weight.shape, call.n_masks
    grad_output, weight = _with_contiguous_columns(grad_output), _with_contiguous_columns(weight)
    x, packed_masks, partials = x.contiguous(), _aligned(packed_masks), partials.contiguous()

    operands = grad_output, x, weight, packed_masks, partials[:, : n_masks + 1]
    grad_x = x.new_empty(x.shape) if needs_x else None
    has_x = grad_x is None or _input_gradient(grad_x, *operands)
    grad_weight = weight.new_empty(out_features, in_features) if needs_weight else None
    grad_logits = None
    if logits_dtype is not None:
        grad_logits = x.new_empty(n_masks, out_features, in_features, dtype=_written_as(logits_dtype))
    has_weight = grad_weight is None and grad_logits is None
    has_weight = has_weight or _weight_gradients(grad_weight, grad_logits, *operands)
    if not (has_x and has_weight):
        left = None if has_x else grad_x, *((None, None) if has_weight else (grad_weight, grad_logits))
        for rows in feature_chunks(tokens, n_masks, out_features, in_features, BACKWARD_CHUNKS):
            _backward_chunk(rows, *operands, *left)

    grad_route = None
    if route_dtype is not None:
        terms = partials[:, n_masks + 1 :]
        grad_route = steps.route_gradients(grad_output, terms, _written_as(route_dtype)).to(route_dtype)
    return (
        x.new_empty(0) if grad_x is None else grad_x,
        weight.new_empty(0) if grad_weight is None else grad_weight,
        x.new_empty(0) if grad_logits is None else grad_logits.to(logits_dtype),
        x.new_empty(0) if grad_route is None else grad_route,
    )


def _input_gradient(
    grad_x: Tensor, grad_output: Tensor, x: Tensor, weight: Tensor, packed_masks: Tensor, partials: Tensor
) -> bool:
    """Write `grad_x` with `backward_gemm`; return False where it cannot, or has too few tiles."""
    gpu = gpu_of(x.device.index)
    if not (backward_gemm.can_run(gpu, grad_output, partials, weight, grad_x) and backward_gemm.fills(gpu, *x.shape)):
        return False
    flipped = steps.flip_signs(weight, packed_masks, with_weight=False)
    backward_gemm.input_gradient(grad_output, partials, weight, flipped, grad_x, _stream(x))
    return True


def _weight_gradients(
    grad_weight: Tensor | None,
    grad_logits: Tensor | None,
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    partials: Tensor,
) -> bool:
    """Write those gradients that are given with `backward_gemm`; return False where it cannot, or has too few tiles."""
    gpu, (d, h), n_masks = gpu_of(x.device.index), weight.shape, packed_masks.shape[2]
    partials = partials if grad_weight is not None else partials[:, 1:]
    entries = partials.shape[1]
    if h % 8 or not (backward_gemm.can_run(gpu, grad_output, partials, x) and backward_gemm.fills(gpu, entries * d, h)):
        return False
    # D_0 and D_i are written to the gradients that are made of them, where these have the same dtype.
    in_place = grad_logits is not None and grad_logits.dtype == x.dtype
    chunk = d if in_place else max(round_up(_SCRATCH_PRODUCTS // (entries * h), _CHUNK_MULTIPLE), _CHUNK_MULTIPLE)
    for start in range(0, d, chunk):
        rows = slice(start, min(start + chunk, d))
        result = total = None if grad_weight is None else grad_weight[rows]
        logits = None if grad_logits is None else grad_logits[:, rows]
        products = logits if in_place and logits is not None else x.new_empty(n_masks, rows.stop - start, h)
        gradient, factors = grad_output[:, rows], partials[:, :, rows]
        if result is not None and n_masks > _MOST_MASKS_OF_NARROW_TOTALS:
            total = result.new_empty(result.shape, dtype=torch.float32)
            backward_gemm.weight_products(gradient, factors[:, :1], x, total, products[:0], _stream(x))
            factors = factors[:, 1:]
        if total is not None and factors.shape[1] > n_masks:
            backward_gemm.weight_products(gradient, factors, x, total, products, _stream(x))
        else:
            backward_gemm.weight_products(gradient, factors, x, products[0], products[1:], _stream(x))
        steps.weight_gradients(total, products, weight[rows], packed_masks[rows], result, logits)
    return True


def feature_chunks(tokens: int, n_masks: int, out_features: int, in_features: int, most: int) -> list[slice]:
    """The output features in at most `most` chunks, and in at least one.

    The largest tensor of a chunk is all its products, `[tokens, n_masks + 1, chunk]`, or all its flipped weights,
    `[n_masks + 1, chunk, in_features]`.
    """
    elements_per_feature = (n_masks + 1) * max(tokens, in_features, 1)
    size = max(ceil_div(out_features, most), ceil_div(_SMALLEST_CHUNK, elements_per_feature))
    size = round_up(size, _CHUNK_MULTIPLE)
    return [slice(first, min(first + size, out_features)) for first in range(0, max(out_features, 1), size)]


def _products_and_partials(
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    activation: str,
    route_weights: Tensor | None,
    result: Tensor,
    partials: Tensor,
) -> None:
    """Write the result `[tokens, out_features]` and the partial derivatives `[tokens, entries, out_features]`.

    The products t and f_i are in float32. Rounded to 16 bits, they gave y up to 2.5 times the error of the naive layer:
    where a mask has few ones, the gate is the small difference of a large t and a large f_i.
    """
    flipped = steps.flip_signs(weight, packed_masks)
    products = torch.mm(x, flipped.flatten(0, 1).t(), out_dtype=torch.float32)
    steps.partials(products.view(x.shape[0], *flipped.shape[:2]), activation, route_weights, partials, result)


def _backward_chunk(
    rows: slice,
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    partials: Tensor,
    grad_x: Tensor | None,
    grad_weight: Tensor | None,
    grad_logits: Tensor | None,
) -> None:
    """Add some output features' part to `grad_x`, and write their rows of the other gradients, each if it is given."""
    grad_output, weight, packed_masks = grad_output[:, rows], weight[rows], packed_masks[rows]
    first = 0 if grad_x is not None or grad_weight is not None else 1  # the mask logits alone do without dt
    scaled = steps.scale(grad_output, partials[:, first:, rows])
    if grad_x is not None:
        flipped = steps.flip_signs(weight, packed_masks).flatten(0, 1)
        torch.addmm(grad_x, scaled.flatten(1), flipped, beta=0 if rows.start == 0 else 1, out=grad_x)
    if grad_weight is not None:
        if packed_masks.shape[2] > _MOST_MASKS_OF_NARROW_TOTALS:
            total = torch.mm(scaled[:, 0].t(), x, out_dtype=torch.float32)
            products = _weight_products(scaled[:, 1:], x)
        else:
            products = _weight_products(scaled, x)
            total, products = products[0], products[1:]
        logits = None if grad_logits is None else grad_logits[:, rows]
        steps.weight_gradients(total, products, weight, packed_masks, grad_weight[rows], logits)
    elif grad_logits is not None:
        products = _weight_products(scaled[:, 1 - first :], x)
        steps.weight_gradients(None, products, weight, packed_masks, None, grad_logits[:, rows])


def _weight_products(scaled: Tensor, x: Tensor) -> Tensor:
    """The products `b_i^T x` `[entries, out_features, in_features]` of `scaled`, `[tokens, entries, out_features]`."""
    _, entries, out_features = scaled.shape
    return torch.mm(scaled.flatten(1).t(), x).view(entries, out_features, x.shape[1])


def _stream(on: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(on.device.index)


def _with_contiguous_columns(matrix: Tensor) -> Tensor:
    """A matrix as the kernels read it, with any distance between its rows; a copy where its columns are apart."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def _aligned(packed_masks: Tensor) -> Tensor:
    """Packed masks as the kernels read them: contiguous, at a multiple of 16 bytes."""
    packed_masks = packed_masks.contiguous()
    return packed_masks.clone() if packed_masks.data_ptr() % 16 else packed_masks


def _written_as(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels write a gradient, which torch converts if it is another one (float64)."""
    return dtype if dtype in ELEMENTS else torch.float32
