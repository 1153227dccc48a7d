"""The GEMMs of backward, whose left operand is grad_output times partials (csrc/cuda/backward_gemm.cu).

`mglu_ops/backends/gradients.py` defines F_i and D_i.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ....sizes import ceil_div
from ..device import Gpu, gpu_of
from ..driver import Launch
from ..launch import LaunchSequence, load_kernel, parameters
from ..tensor_map import Matrix, TensorMaps
from .base import ELEMENTS

NAME = "backward_gemm"
ARCH = (9, 0)

_ROWS, _COLUMNS, _DEPTH = 128, 256, 32
_CLUSTER, _STAGES, _THREADS = 2, 7, 384
_STAGE_BYTES = 2 * (2 * _ROWS * _DEPTH + _DEPTH * _COLUMNS)
_BARRIER_BYTES = 16 * _STAGES

_LEAST_FULL = 0.75
"""The least number of tiles, as a fraction of the SMs. With fewer tiles cuBLAS is faster, because it splits k."""

_MOST_MULTIPLICATIONS = 0.61e12
"""From this number of multiplications on, elementwise kernels and a GEMM of cuBLAS are faster, for a result of
`_MEASURED_COLUMNS` columns (training.md)."""

_MEASURED_COLUMNS = 4096
"""The columns for which `_MOST_MULTIPLICATIONS` was measured. With half as many columns, the elementwise kernels take
twice the share of a step, so the limit is about eight times as high."""


def macros(dtype: torch.dtype, n_products: int, *, is_grad_x: bool, wide: bool) -> dict[str, int]:
    """Return the macros of the source. `wide` is True for a single weight product in float32."""
    return {
        "MGLU_ELEMENT": ELEMENTS[dtype],
        "MGLU_PRODUCTS": n_products,
        "MGLU_GRAD_X": int(is_grad_x),
        "MGLU_WIDE": int(wide),
        "MGLU_CLUSTER": _CLUSTER,
        "MGLU_STAGES": _STAGES,
        "MGLU_DEPTH": _DEPTH,
    }


def shared_bytes() -> int:
    """The dynamic shared memory of a block in bytes."""
    return _STAGES * _STAGE_BYTES + _BARRIER_BYTES


def can_run(gpu: Gpu, *matrices: Tensor) -> bool:
    """True if the GPU has the kernel, no matrix is empty, and all have 16-bit elements and 16-byte aligned rows."""
    if gpu.arch != ARCH:
        return False
    for matrix in matrices:
        *strides, column_stride = matrix.stride()
        if matrix.dtype not in (torch.float16, torch.bfloat16) or matrix.numel() == 0 or column_stride != 1:
            return False
        if matrix.data_ptr() % 16 or any(stride % 8 or stride <= 0 for stride in strides):
            return False
    return True


def is_faster(gpu: Gpu, rows: int, columns: int, depth: int) -> bool:
    """True if the kernel beats cuBLAS for a GEMM with a result `[rows, columns]` and an inner size of `depth`."""
    tiles = ceil_div(rows, _ROWS) * ceil_div(columns, _COLUMNS)
    comparable = rows * columns * depth * (columns / _MEASURED_COLUMNS) ** 3
    return tiles >= _LEAST_FULL * gpu.multiprocessors and comparable < _MOST_MULTIPLICATIONS


def prepare_grad_x(grad_output: Tensor, partials: Tensor, weight: Tensor) -> LaunchSequence:
    """Prepare the GEMM that writes `dx = sum over i of (grad_output * partials[:, i]) @ (F_i * W)`, with F_0 = 1.

    All tensors have one 16-bit dtype, are on the current device, and pass `can_run`. The launch takes the addresses of

    - grad_output `[tokens, out_features]`;
    - partials `[tokens, n_masks + 1, out_features]`;
    - weight `[out_features, in_features]`;
    - flipped: all F_i * W, contiguous `[n_masks, out_features, in_features]`;
    - out: dx, contiguous `[tokens, in_features]`;
    - others: 0.

    Raises:
        CompileError: NVRTC refused the kernel.
    """
    strides = (grad_output.stride(0), *partials.stride()[:2], weight.stride(0))
    return _prepare(grad_output.device.index, grad_output.dtype, partials.shape, weight.shape[1], strides, True, False)


def prepare_weight_products(grad_output: Tensor, partials: Tensor, x: Tensor, *, wide: bool = False) -> LaunchSequence:
    """Prepare the GEMM that writes `D_i = (grad_output * partials[:, i])^T x`.

    All tensors have one 16-bit dtype, are on the current device, and pass `can_run`. The launch takes the addresses of

    - grad_output `[tokens, out_features]`;
    - partials `[tokens, entries, out_features]`;
    - x `[tokens, in_features]`;
    - out: D_0, contiguous `[out_features, in_features]`; in float32 with `wide`, which requires a single entry;
    - others: the other D_i, contiguous `[entries - 1, out_features, in_features]`.

    Raises:
        CompileError: NVRTC refused the kernel.
    """
    strides = (grad_output.stride(0), *partials.stride()[:2], x.stride(0))
    return _prepare(grad_output.device.index, grad_output.dtype, partials.shape, x.shape[1], strides, False, wide)


@lru_cache(maxsize=256)
def _prepare(
    device: int,
    dtype: torch.dtype,
    partials_shape: tuple[int, int, int],
    in_features: int,
    strides: tuple[int, int, int, int],
    is_grad_x: bool,
    wide: bool,
) -> LaunchSequence:
    """Prepare the launch on `device`, the current device.

    B, the right operand, is W or x. `strides` are four strides in elements: the rows of grad_output, the tokens and the
    entries of partials, and the rows of B.
    """
    tokens, products, out_features = partials_shape
    grad_pitch, token_pitch, entry_pitch, b_pitch = (2 * stride for stride in strides)
    parts = ceil_div(tokens, 64) if is_grad_x else ceil_div(out_features, 64) * products
    clusters = ceil_div(parts, _CLUSTER * _ROWS // 64) * ceil_div(in_features, _COLUMNS)
    defines = macros(dtype, products, is_grad_x=is_grad_x, wide=wide)
    launch = Launch(
        load_kernel(device, NAME, "sm_90a", defines),
        (_CLUSTER * min(clusters, gpu_of(device).multiprocessors // _CLUSTER), 1),
        _THREADS,
        shared_bytes(),
        overlap=True,
        parameters=parameters("backward_gemm.cu"),
        integers={"tokens": tokens, "out_features": out_features, "in_features": in_features},
    )
    box_features, box_tokens = (_DEPTH, _ROWS) if is_grad_x else (64, _DEPTH)
    matrices = {
        "grad_output": Matrix(2, out_features, tokens, grad_pitch, box_features, box_tokens, swizzle=True),
        "partials": Matrix(
            2, out_features, products, entry_pitch, box_features, 1, swizzle=True,
            depth=tokens, depth_pitch=token_pitch, box_depth=box_tokens,
        ),
    }  # fmt: skip
    if not is_grad_x:
        x = Matrix(2, in_features, tokens, b_pitch, 64, _DEPTH, swizzle=True)
        return LaunchSequence(launch, maps=(TensorMaps(**matrices, x=x, flipped=None),))
    weight = Matrix(2, in_features, out_features, b_pitch, 64, _DEPTH, swizzle=True)
    flipped = Matrix(
        2, in_features, out_features, 2 * in_features, 64, _DEPTH, swizzle=True,
        depth=products - 1, depth_pitch=2 * out_features * in_features,
    )  # fmt: skip
    return LaunchSequence(launch, maps=(TensorMaps(**matrices, weight=weight, flipped=flipped),))
