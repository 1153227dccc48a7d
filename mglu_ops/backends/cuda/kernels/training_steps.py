"""The elementwise kernels of a training step, before and after its GEMMs (csrc/cuda/training.md).

`mglu_ops/backends/gradients.py` defines the symbols F_i, P, Q_i, R_i and D_i, and `../training.py` t and f_i. Tensors
are on the current device, in float16 or bfloat16 unless a docstring says otherwise. Kernels run on the current stream.
A function with the name of a kernel runs the kernel. The function `prepare_<kernel>` returns a launch, which can run
with all tensors that have the metadata of the function's arguments.

Every function raises:
    CompileError: NVRTC refused the kernel.
    LaunchError: the driver refused the launch; the context stays usable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from ....activations import ACTIVATIONS
from ....sizes import ceil_div
from ...parameters import addresses
from ..current import current_stream
from ..device import gpu_of
from ..driver import Launch
from ..launch import load_kernel, parameters
from .base import ELEMENTS

_THREADS = 256
_OCTET = 8
_CLEARING_BLOCKS = 512
_NO_DTYPE = -1

Prepared = Callable[..., None]
"""A `Launch`, or for empty results a function that does nothing."""


def flip_signs(weight: Tensor, packed_masks: Tensor, *, with_weight: bool = True, parts: bool = False) -> Tensor:
    """Return `[n_masks + 1, out_features, in_features]`: the weight, then `F_i * weight` for each mask.

    Args:
        weight: `[out_features, in_features]` with contiguous rows. It may have a leading dimension of experts; then all
            of it is contiguous, and the masks and the result have this dimension too.
        packed_masks: `[out_features, ceil(in_features / 8), n_masks]`, contiguous, 4-byte aligned.
        with_weight: True to return the weight itself first; otherwise the first size is n_masks.
        parts: True to return `2 n_masks` matrices: `M_i * weight` and `(1 - M_i) * weight` for each mask.
    """
    n_masks = packed_masks.shape[-1]
    matrices = 2 * n_masks if parts else n_masks + with_weight
    out = weight.new_empty(*weight.shape[:-2], matrices, *weight.shape[-2:])
    launch = prepare_flip_signs(weight, n_masks, with_weight=with_weight, parts=parts)
    _run(launch, out, weight=weight, packed_masks=packed_masks, out=out)
    return out


def prepare_flip_signs(weight: Tensor, n_masks: int, *, with_weight: bool, parts: bool = False) -> Prepared:
    """Prepare a launch, which takes the addresses of `weight`, `packed_masks` and `out`; `out` is 16-byte aligned."""
    rows, integers = _rows_of_experts(weight)
    defines = macros(
        MGLU_N_MASKS=n_masks, MGLU_WITH_WEIGHT=with_weight, MGLU_VECTOR=_is_vector(weight), MGLU_PARTS=parts
    )
    return _prepare("flip_signs", weight, defines, _warps(rows, weight.shape[-1]), integers)


def _rows_of_experts(weight: Tensor) -> tuple[int, dict[str, int]]:
    """Return the number of rows of a weight and the integers that describe it in a kernel's struct.

    The rows of all experts are counted together.
    """
    expert_rows, columns = weight.shape[-2:]
    rows = weight.shape[:-1].numel()
    integers = {"weight_row_stride": weight.stride(-2), "rows": rows, "expert_rows": expert_rows, "columns": columns}
    return rows, integers


def partials(
    products: Tensor,
    activation: str,
    mask_weights: Tensor | None,
    partials: Tensor,
    result: Tensor,
    *,
    total: Tensor | None = None,
    parts: bool = False,
) -> None:
    """Compute the result and its partial derivatives from the products t and f_i.

    Args:
        products: t and all f_i `[tokens, n_masks + 1, columns]` with contiguous rows; with `total` only the f_i
            `[tokens, n_masks, columns]`. The dtype is float32, or the dtype of `partials`; then `products` and
            `partials` may share memory.
        activation: a name of `mglu_ops.activations.ACTIVATIONS`.
        mask_weights: `[tokens, n_masks]` in any strides, float16, bfloat16 or float32; or None.
        partials: receives P, all Q_i and, with mask weights, all R_i: `[tokens, n_masks + 1, columns]`, or
            `[tokens, 2 n_masks + 1, columns]` with mask weights. Rows are contiguous.
        result: receives y, `[tokens, columns]` with contiguous rows, in the dtype of `partials`.
        total: t, contiguous `[tokens, columns]` in float32; None if t is the first of the products.
        parts: True if the products `[tokens, 2 n_masks, columns]` are the gate and the value of each mask.
    """
    tokens, n_products, columns = products.shape
    n_masks = n_products // 2 if parts else n_products - (total is None)
    defines = macros(
        MGLU_ELEMENT=partials.dtype,
        MGLU_PRODUCTS=products.dtype,
        MGLU_TOTAL=_dtype(total),
        MGLU_PARTS=parts,
        MGLU_N_MASKS=n_masks,
        MGLU_ACTIVATION=ACTIVATIONS[activation].code,
        MGLU_MASK_WEIGHTS=_dtype(mask_weights),
        MGLU_VECTOR=_is_vector(products, partials, result, total),
    )
    mask_weight_strides = (0, 0) if mask_weights is None else mask_weights.stride()
    integers = {
        "products_row_stride": products.stride(0),
        "products_entry_stride": products.stride(1),
        "partials_row_stride": partials.stride(0),
        "partials_entry_stride": partials.stride(1),
        "result_row_stride": result.stride(0),
        "mask_weight_row_stride": mask_weight_strides[0],
        "mask_weight_column_stride": mask_weight_strides[1],
        "tokens": tokens,
        "columns": columns,
    }
    launch = _prepare("partials", result, defines, _warps(tokens, columns, per_thread=4), integers)
    pointers = {"total": total, "products": products, "partials": partials, "mask_weights": mask_weights}
    _run(launch, result, **pointers, result=result)


def scale(grad_output: Tensor, partials: Tensor) -> Tensor:
    """Return the gradients of t and all f_i: `grad_output * partials` for every entry, contiguous.

    Args:
        grad_output: `[tokens, columns]` with contiguous rows.
        partials: `[tokens, entries, columns]` with contiguous rows.
    """
    tokens, entries, columns = partials.shape
    out = partials.new_empty(tokens, entries, columns)
    defines = macros(
        MGLU_ELEMENT=partials.dtype, MGLU_ENTRIES=entries, MGLU_VECTOR=_is_vector(grad_output, partials, out)
    )
    integers = {
        "grad_output_row_stride": grad_output.stride(0),
        "partials_row_stride": partials.stride(0),
        "partials_entry_stride": partials.stride(1),
        "tokens": tokens,
        "columns": columns,
    }
    launch = _prepare("scale", out, defines, _warps(tokens, columns), integers)
    _run(launch, out, grad_output=grad_output, partials=partials, out=out)
    return out


def weight_gradients(
    total: Tensor | None,
    products: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    grad_weight: Tensor | None,
    grad_logits: Tensor | None,
) -> None:
    """Write `grad_weight = total + sum_i F_i * products_i` and `grad_logits_i = -2 weight * products_i`.

    One of the two gradients may be None. They may overwrite their inputs: `grad_weight` may be `total`, and
    `grad_logits` may be `products`.

    Args:
        total: D_0, contiguous `[out_features, in_features]`, in the dtype of `products` or in float32; None without
            `grad_weight`.
        products: all D_i, `[n_masks, out_features, in_features]`, each matrix contiguous.
        weight: `[out_features, in_features]` with contiguous rows. It may have a leading dimension of experts; then all
            tensors have it, and all are contiguous.
        packed_masks: as for `flip_signs`.
        grad_weight: contiguous `[out_features, in_features]` in float16, bfloat16 or float32.
        grad_logits: `[n_masks, out_features, in_features]`, each matrix contiguous, in float16, bfloat16 or float32.
    """
    launch = prepare_weight_gradients(total, products, weight, grad_weight, grad_logits)
    _run(
        launch,
        products,
        total=total,
        weight=weight,
        packed_masks=packed_masks,
        products=products,
        grad_weight=grad_weight,
        grad_logits=grad_logits,
    )


def prepare_weight_gradients(
    total: Tensor | None, products: Tensor, weight: Tensor, grad_weight: Tensor | None, grad_logits: Tensor | None
) -> Prepared:
    """Prepare a launch, which takes the addresses of the tensors of `weight_gradients`; 0 for None.

    Meta tensors stand for aligned tensors. The weight must not be a meta tensor.
    """
    n_masks, columns = products.shape[-3], products.shape[-1]
    defines = macros(
        MGLU_ELEMENT=products.dtype,
        MGLU_TOTAL=products.dtype if total is None else total.dtype,
        MGLU_N_MASKS=n_masks,
        MGLU_GRAD_WEIGHT=_dtype(grad_weight),
        MGLU_GRAD_LOGITS=_dtype(grad_logits),
        MGLU_VECTOR=_is_vector(total, products, weight, grad_weight, grad_logits),
    )
    rows, integers = _rows_of_experts(weight)
    integers["products_stride"] = products.stride(-3)
    integers["logits_stride"] = 0 if grad_logits is None else grad_logits.stride(-3)
    return _prepare("weight_gradients", weight, defines, _warps(rows, columns), integers)


def mask_weight_gradients(grad_output: Tensor, terms: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum `grad_output * terms_i` over columns: `[tokens, n_masks]`.

    Args:
        grad_output: `[tokens, columns]` with contiguous rows.
        terms: all R_i, `[tokens, n_masks, columns]` with contiguous rows.
        dtype: the dtype of the result: float16, bfloat16 or float32. Sums are in float32.
    """
    tokens, n_masks, columns = terms.shape
    out = terms.new_empty(tokens, n_masks, dtype=dtype)
    vector = _is_vector(grad_output, terms)
    defines = macros(MGLU_ELEMENT=terms.dtype, MGLU_N_MASKS=n_masks, MGLU_MASK_WEIGHTS=dtype, MGLU_VECTOR=vector)
    integers = {
        "grad_output_row_stride": grad_output.stride(0),
        "terms_row_stride": terms.stride(0),
        "terms_mask_stride": terms.stride(1),
        "tokens": tokens,
        "columns": columns,
    }
    launch = _prepare("mask_weight_gradients", out, defines, tokens * n_masks, integers)
    _run(launch, out, grad_output=grad_output, terms=terms, out=out)
    return out


def clear_rows(matrix: Tensor, ends: Tensor) -> None:
    """Write zeros to the rows of a matrix that belong to no expert, which come last.

    Args:
        matrix: contiguous `[rows, ...]` with an even number of bytes per row.
        ends: int32 `[experts]`, contiguous: the end of each expert's rows.
    """
    row_words = 0 if matrix.shape[0] == 0 else matrix.nbytes // matrix.shape[0] // 2
    vector = row_words % _OCTET == 0 and matrix.data_ptr() % 16 == 0
    blocks = min(matrix.shape[0] * row_words, _CLEARING_BLOCKS)
    integers = {"experts": ends.shape[0], "rows": matrix.shape[0], "row_words": row_words, "blocks": blocks}
    launch = _prepare("clear_rows", matrix, macros(MGLU_VECTOR=vector), blocks * _THREADS // 32, integers)
    _run(launch, matrix, ends=ends, out=matrix)


def macros(**values: torch.dtype | int | None) -> dict[str, int]:
    """Return the macros of a kernel from numbers, and from dtypes or None in place of their codes."""
    return {name: _code(value) for name, value in values.items()}


def _code(value: torch.dtype | int | None) -> int:
    if isinstance(value, torch.dtype):
        return ELEMENTS[value]
    return _NO_DTYPE if value is None else int(value)


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _run(launch: Prepared, on: Tensor, **tensors: Tensor | None) -> None:
    """Launch on the current stream of the device of `on`. `tensors` are the kernel's parameters; some may be None."""
    launch(current_stream(on.device.index), addresses(**tensors))


def _is_vector(*tensors: Tensor | None) -> bool:
    """True if all rows can be read in whole 16-byte vectors. None stands for no tensor."""
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.shape[-1] % _OCTET or tensor.data_ptr() % 16:
            return False
        if tensor.is_contiguous():
            continue
        per_vector = 16 // tensor.element_size()
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
            if size != 1 and stride % per_vector:
                return False
    return True


def _warps(rows: int, columns: int, per_thread: int = _OCTET) -> int:
    """The warps of a kernel whose threads each take `per_thread` columns of a row; 0 for an empty matrix."""
    return rows * ceil_div(columns, 32 * per_thread)


def _prepare(kernel: str, on: Tensor, macros: Mapping[str, int], warps: int, integers: Mapping[str, int]) -> Prepared:
    """Prepare a launch of `warps` warps on the device of `on`. `integers` fill the integers of the kernel's struct."""
    if warps == 0:
        return lambda stream, pointers: None
    return _launch(
        on.device.index, kernel, tuple(macros.items()), ceil_div(warps, _THREADS // 32), tuple(integers.items())
    )


@lru_cache(maxsize=4096)
def _launch(
    device: int,
    kernel: str,
    macros: tuple[tuple[str, int], ...],
    blocks: int,
    integers: tuple[tuple[str, int], ...],
) -> Launch:
    """Compile and load the kernel on `device`, the current device, and prepare its launch."""
    loaded = load_kernel(device, kernel, gpu_of(device).target, dict(macros))
    fields = parameters(f"{kernel}.cu")
    return Launch(loaded, (blocks, 1), _THREADS, 0, overlap=False, parameters=fields, integers=dict(integers))
