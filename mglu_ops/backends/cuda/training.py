"""A training step in 16 bits on a GPU (csrc/cuda/training.md).

Forward computes `t = x W^T` and `f_i = x (F_i * W)^T`, and from them the result y and its partial derivatives
P = dy/dt, Q_i = dy/df_i and, with mask weights r_i, R_i = dy/dr_i. `backends.gradients` defines F_i, and what backward
computes.

On compute capability 9.0, forward is the kernel `tile_wgmma`, and the kernel `backward_gemm` computes dx and all D_i
from G, P and Q_i, without dt and b_i in memory. GEMMs of cuBLAS, with elementwise kernels before and after, are used

- on other GPUs,
- for sizes or addresses that these kernels do not support,
- in the backward pass of very large problems.

The GEMMs of cuBLAS take the output features in chunks, to limit the memory for t and f_i in float32, for dt, b_i, D_i
and for the flipped weights F_i * W. Only dx is a sum over chunks, so no other result is rounded more than once.

Everything runs on the current device and stream, and the same inputs give the same bits. Launches and offsets are
prepared once for all calls with the same description. Otherwise a step of a small layer would take the host longer than
the GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...call import Call
from ...given import BackwardGiven, Given
from ...masks import n_masks_of
from ...sizes import ceil_div, round_up
from .. import gradients
from ..gradients import MOST_MASKS_OF_NARROW_TOTALS, Part, Steps, with_contiguous_columns
from ..parameters import addresses
from .current import current_stream
from .device import gpu_of
from .kernels import backward_gemm
from .kernels import training_steps as steps
from .kernels.base import ELEMENTS
from .kernels.tile_wgmma_training import training_choice
from .launch import LaunchSequence, load

FORWARD_CHUNKS = 16
"""The most chunks in forward. With this many, t and all f_i take an eighth of the memory of P and all Q_i."""

BACKWARD_CHUNKS = 5
"""The most chunks in backward. With this many, dt and all b_i take a fifth of the memory of P and all Q_i. With four, a
step with two masks would need more than 70% of the naive layer's memory. More chunks would round dx more often."""

_SMALLEST_CHUNK = 1 << 24
"""The least elements of a chunk's largest tensor (32 MiB in 16 bits). Smaller chunks would save little memory."""

_SCRATCH_PRODUCTS = 1 << 25
"""The most elements of D_0 and all D_i in a chunk of `backward_gemm`, if it writes the D_i to scratch memory (64 MiB in
16 bits). Such a chunk still has several tiles for each SM."""

_CHUNK_MULTIPLE = 128
"""Chunks have a multiple of this many output features, so that rows stay aligned and a GEMM has whole tiles."""


class ForwardTrain:
    """A prepared `mglu::forward_train`. Thread-safe."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._entries = call.n_partials
        device: int = call.device.index
        gpu = gpu_of(device)
        tile = training_choice(call, gpu)
        self._sequence = None if tile is None else load(tile.plan(call, gpu), device)

    def __call__(self, given: Given) -> tuple[Tensor, Tensor]:
        call, sequence = self._call, self._sequence
        x, weight, packed_masks, _, mask_weights, *_ = given
        tokens, out_features = x.shape[0], call.out_features
        result, partials = x.new_empty(tokens, out_features), x.new_empty(tokens, self._entries, out_features)
        if sequence is not None:
            permuted_x = x.new_empty(sequence.workspace_bytes, dtype=torch.uint8) if sequence.workspace_bytes else None
            workspace = 0 if permuted_x is None else permuted_x.data_ptr()
            pointers = given.addresses(result) | {"partials": partials.data_ptr()}
            sequence(current_stream(x.device.index), pointers, workspace)
            return result, partials

        x, weight, packed_masks = x.contiguous(), with_contiguous_columns(weight), aligned(packed_masks)
        for rows in feature_chunks(tokens, call.n_masks, out_features, call.in_features, FORWARD_CHUNKS):
            # t and all f_i are in float32. If they were rounded to 16 bits, y would have up to 2.5 times the error of
            # the naive layer: if a mask has few ones, the gate is the small difference of a large t and a large f_i.
            flipped = steps.flip_signs(weight[rows], packed_masks[rows])
            products = torch.mm(x, flipped.flatten(0, 1).t(), out_dtype=torch.float32).view(tokens, *flipped.shape[:2])
            steps.partials(products, call.activation, mask_weights, partials[:, :, rows], result[:, rows])
            del flipped, products  # frees memory for the next chunk
        return result, partials


class Backward:
    """A prepared `mglu::backward`. Its first call prepares the launches for all later calls. Thread-safe."""

    def __init__(self, call: Call) -> None:
        self._steps = LayerSteps(call.n_masks)
        self._prepared: tuple[_GradX | None, _WeightGradients | None] | None = None

    def __call__(self, given: BackwardGiven) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # Tensors in other layouts are copied to the layouts that the kernels read.
        given = given._replace(
            grad_output=with_contiguous_columns(given.grad_output),
            x=given.x.contiguous(),
            weight=with_contiguous_columns(given.weight),
            packed_masks=aligned(given.packed_masks),
            partials=given.partials.contiguous(),
        )
        first_terms = self._steps.n_masks + 1
        written = None if given.logits_dtype is None else _written_as(given.logits_dtype)
        found = self._gradients(given._replace(partials=given.partials[:, :first_terms], logits_dtype=written))
        return gradients.as_outputs(given, *found, gradients.mask_weight_gradients(self._steps, given))

    def _gradients(self, given: BackwardGiven) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compute the gradients of x, weight and mask logits; those that are needed."""
        x, weight, (needs_x, needs_weight), logits_dtype = given.x, given.weight, *given[5:7]
        if self._prepared is None:
            has_products = needs_weight or logits_dtype is not None
            self._prepared = (
                _GradX.of(given) if needs_x else None,
                _WeightGradients.of(given) if has_products else None,
            )
        grad_x_launches, weight_launches = self._prepared
        pointers = addresses(**given.tensors())
        grad_x = grad_weight = grad_logits = None
        if grad_x_launches is not None:
            grad_x = x.new_empty(x.shape)
            grad_x_launches(weight, pointers, grad_x)
        if weight_launches is not None:
            # They are allocated after dx, so that they can reuse the memory of the flipped weights.
            grad_weight = weight.new_empty(weight.shape) if needs_weight else None
            if logits_dtype is not None:
                grad_logits = weight.new_empty((self._steps.n_masks, *weight.shape), dtype=logits_dtype)
            weight_launches(x, pointers, grad_weight, grad_logits)
            needs_weight, logits_dtype = False, None
        by_library = gradients.gradients(self._steps, given, needs_x and grad_x is None, needs_weight, logits_dtype)
        return (
            by_library[0] if grad_x is None else grad_x,
            by_library[1] if grad_weight is None else grad_weight,
            by_library[2] if grad_logits is None else grad_logits,
        )


class LayerSteps(Steps):
    """The steps of a layer, around GEMMs of cuBLAS."""

    logits_dtypes: ClassVar[Collection[torch.dtype]] = ELEMENTS

    scale = staticmethod(steps.scale)
    flip_signs = staticmethod(steps.flip_signs)
    weight_gradients = staticmethod(steps.weight_gradients)

    def __init__(self, n_masks: int) -> None:
        self.n_masks = n_masks

    def parts(self, entries: int, tokens: int, out_features: int, in_features: int) -> Sequence[Part]:
        chunks = feature_chunks(tokens, self.n_masks, out_features, in_features, BACKWARD_CHUNKS)
        return [Part(slice(0, tokens), rows) for rows in chunks]

    def mask_weight_gradients(self, grad_output: Tensor, terms: Tensor, dtype: torch.dtype) -> Tensor:
        return steps.mask_weight_gradients(grad_output, terms, _written_as(dtype))


class _GradX:
    """The launches that compute dx by `backward_gemm`."""

    def __init__(self, arguments: BackwardGiven) -> None:
        n_masks = n_masks_of(arguments.packed_masks)
        self._flipped_shape = n_masks, *arguments.weight.shape
        self._flip_signs = steps.prepare_flip_signs(arguments.weight, n_masks, with_weight=False)
        self._gemm = backward_gemm.prepare_grad_x(arguments.grad_output, arguments.partials, arguments.weight)

    @staticmethod
    def of(arguments: BackwardGiven) -> _GradX | None:
        """Prepare the launches, or return None if the kernel cannot run or cuBLAS is faster."""
        grad_output, x, weight, _, partials, *_ = arguments
        gpu, (tokens, h), depth = gpu_of(x.device.index), x.shape, partials.shape[1] * partials.shape[2]
        can_run = h % 8 == 0 and backward_gemm.can_run(gpu, grad_output, partials, weight)
        return _GradX(arguments) if can_run and backward_gemm.is_faster(gpu, tokens, h, depth) else None

    def __call__(self, weight: Tensor, pointers: dict[str, int], grad_x: Tensor) -> None:
        flipped = weight.new_empty(self._flipped_shape)
        stream, address = current_stream(grad_x.device.index), flipped.data_ptr()
        self._flip_signs(stream, pointers | {"out": address})
        self._gemm(stream, pointers | {"flipped": address, "others": 0, "out": grad_x.data_ptr()})


@dataclass(frozen=True)
class _WeightChunk:
    """The launches for the gradients of a chunk of output features, and the offsets of the chunk in its tensors.

    Attributes:
        total: the launch that writes D_0 in float32; None if D_0 is one of the products or not needed.
        products: the launch that writes the D_i, starting with D_0 or with D_1.
        gradients: the launch that turns D_0 and the D_i into gradients.
        offsets: bytes from the address of each whole tensor to its chunk. In `partials`, the chunk begins at P or,
            without D_0, at Q_1.
        later_partials: bytes from the address of `partials` to the first partial derivative for `products`.
        second: bytes from D_1 to D_2; 0 for one mask.
    """

    total: LaunchSequence | None
    products: LaunchSequence
    gradients: steps.Prepared
    offsets: dict[str, int]
    later_partials: int
    second: int


class _WeightGradients:
    """The launches that compute dW and dlogits, or one of them, by `backward_gemm`.

    The D_i are written to the memory of dlogits if dlogits is needed in the dtype of W. Otherwise the D_i of a chunk of
    output features are in scratch memory. D_0 is written to the memory of dW or, in float32, to scratch memory.
    """

    def __init__(self, arguments: BackwardGiven) -> None:
        grad_output, x, weight, packed_masks, partials, (_, needs_weight), logits_dtype, *_ = arguments
        n_masks, (d, h) = n_masks_of(packed_masks), weight.shape
        # Meta tensors stand for gradients and products, which do not exist yet but will be contiguous and aligned.
        grad_weight = torch.empty(d, h, dtype=weight.dtype, device="meta") if needs_weight else None
        grad_logits = None
        if logits_dtype is not None:
            grad_logits = torch.empty(n_masks, d, h, dtype=logits_dtype, device="meta")
        self._is_in_place = logits_dtype is weight.dtype
        self._total_is_wide = needs_weight and n_masks > MOST_MASKS_OF_NARROW_TOTALS
        self._total_is_first = needs_weight and not self._total_is_wide
        first_entry = 0 if needs_weight else 1
        entries = n_masks + 1 - first_entry
        size = max(round_up(_SCRATCH_PRODUCTS // (entries * h), _CHUNK_MULTIPLE), _CHUNK_MULTIPLE)
        size = d if self._is_in_place else min(size, d)
        self._products_shape = n_masks, size, h
        self._total_shape = size, h
        chunks = []
        for start in range(0, d, size):
            rows = slice(start, min(start + size, d))
            grad, factors = grad_output[:, rows], partials[:, first_entry:, rows]
            later = factors[:, 1:] if self._total_is_wide else factors
            products = torch.empty(n_masks, rows.stop - start, h, dtype=x.dtype, device="meta")
            grad_weight_rows = None if grad_weight is None else grad_weight[rows]
            total = grad_weight_rows
            if self._total_is_wide:
                total = torch.empty(rows.stop - start, h, dtype=torch.float32, device="meta")
            grad_logits_rows = None if grad_logits is None else grad_logits[:, rows]
            chunks.append(
                _WeightChunk(
                    total=backward_gemm.prepare_weight_products(grad, factors[:, :1], x, wide=True)
                    if self._total_is_wide
                    else None,
                    products=backward_gemm.prepare_weight_products(grad, later, x),
                    gradients=steps.prepare_weight_gradients(
                        total, products, weight[rows], grad_weight_rows, grad_logits_rows
                    ),
                    offsets={
                        "grad_output": _bytes_between(grad_output, grad),
                        "partials": _bytes_between(partials, factors),
                        "weight": _bytes_between(weight, weight[rows]),
                        "packed_masks": _bytes_between(packed_masks, packed_masks[rows]),
                        "grad_weight": _bytes_between(grad_weight, grad_weight_rows),
                        "grad_logits": _bytes_between(grad_logits, grad_logits_rows),
                    },
                    later_partials=_bytes_between(partials, later),
                    second=_bytes_between(products, products[1:2]) if n_masks > 1 else 0,
                )
            )
        self._chunks = tuple(chunks)

    @staticmethod
    def of(arguments: BackwardGiven) -> _WeightGradients | None:
        """Prepare the launches, or return None if the kernel cannot run or cuBLAS is faster."""
        grad_output, x, weight, packed_masks, partials, (_, needs_weight), *_ = arguments
        gpu, (d, h) = gpu_of(x.device.index), weight.shape
        entries = n_masks_of(packed_masks) + needs_weight
        can_run = h % 8 == 0 and backward_gemm.can_run(gpu, grad_output, partials, x)
        if not (can_run and backward_gemm.is_faster(gpu, entries * d, h, x.shape[0])):
            return None
        return _WeightGradients(arguments)

    def __call__(
        self, x: Tensor, pointers: dict[str, int], grad_weight: Tensor | None, grad_logits: Tensor | None
    ) -> None:
        stream = current_stream(x.device.index)
        scratch = None if self._is_in_place else x.new_empty(self._products_shape)
        wide = x.new_empty(self._total_shape, dtype=torch.float32) if self._total_is_wide else None
        pointers = pointers | addresses(grad_weight=grad_weight, grad_logits=grad_logits)
        products = pointers["grad_logits"] if scratch is None else scratch.data_ptr()
        for chunk in self._chunks:
            at = pointers | {name: pointers[name] + offset for name, offset in chunk.offsets.items()}
            total = at["grad_weight"] if wide is None else wide.data_ptr()
            if chunk.total is not None:
                at.update(out=total, others=0)
                chunk.total(stream, at)
            first, others = (total, products) if self._total_is_first else (products, products + chunk.second)
            later = pointers["partials"] + chunk.later_partials
            at.update(partials=later, out=first, others=others, total=total, products=products)
            chunk.products(stream, at)
            chunk.gradients(stream, at)


def _bytes_between(whole: Tensor | None, part: Tensor | None) -> int:
    """Return the bytes from the address of a tensor to the address of a view of it; 0 if either is None."""
    if whole is None or part is None:
        return 0
    return int(part.storage_offset() - whole.storage_offset()) * whole.element_size()


def feature_chunks(tokens: int, n_masks: int, out_features: int, in_features: int, most: int) -> list[slice]:
    """Divide the output features into 1 to `most` chunks.

    The largest tensor of a chunk is either its products, `[tokens, n_masks + 1, chunk]`, or its flipped weights,
    `[n_masks + 1, chunk, in_features]`.
    """
    elements_per_feature = (n_masks + 1) * max(tokens, in_features, 1)
    size = max(ceil_div(out_features, most), ceil_div(_SMALLEST_CHUNK, elements_per_feature))
    size = round_up(size, _CHUNK_MULTIPLE)
    return [slice(first, min(first + size, out_features)) for first in range(0, max(out_features, 1), size)]


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, contiguous and 16-byte aligned; copied if necessary."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _written_as(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels write a gradient of `dtype`. For float64 it is float32, and torch converts it."""
    return dtype if dtype in ELEMENTS else torch.float32
