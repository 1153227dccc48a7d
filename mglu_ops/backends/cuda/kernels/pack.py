"""Packs masks to bits on a GPU, in one pass over the masks (csrc/cuda/pack.md)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ....masks import packed_shape, packed_width
from ..driver import Launch
from ..launch import load_kernel, parameters
from .base import ELEMENTS

KINDS = {**ELEMENTS, torch.bool: 3}
"""The codes of the dtypes that can be packed: logits, which are compared with 0, and bool masks."""

_THREADS = 256


def source(arch: tuple[int, int], dtype: torch.dtype, n_masks: int) -> tuple[str, str, dict[str, int]]:
    """The source to compile, as `(kernel, target, macros)`."""
    return "pack", f"sm_{arch[0]}{arch[1]}", {"MGLU_ELEMENT": KINDS[dtype], "MGLU_N_MASKS": n_masks}


def pack(masks: Tensor, arch: tuple[int, int], stream: int) -> Tensor:
    """Pack bool masks or logits (`M = logits > 0`) `[n_masks, out_features, in_features]`.

    `masks` is float16, bfloat16, float32 or bool, in any strides, on the current device. It may have a leading
    dimension of up to 65,535 experts; then the result has this dimension too.

    Raises:
        CompileError: NVRTC refused the kernel.
        LaunchError: the driver refused the launch; the context stays usable.
    """
    experts = masks if masks.dim() == 4 else masks[None]
    shape = (len(masks), *packed_shape(*masks.shape[1:])) if masks.dim() == 4 else packed_shape(*masks.shape)
    packed = torch.empty(shape, dtype=torch.uint8, device=masks.device)
    if packed.numel():
        address = masks.data_ptr()
        alignment = 8 * min(masks.element_size(), 2)
        vector = address % alignment == 0 and masks.stride(-1) == 1
        vector = vector and all(stride * masks.element_size() % alignment == 0 for stride in experts.stride()[:3])
        launch = _launch(masks.device.index, arch, masks.dtype, experts.shape, experts.stride(), vector)
        launch(stream, {"source": address, "packed": packed.data_ptr()})
    return packed


@lru_cache(maxsize=1024)
def _launch(
    device: int,
    arch: tuple[int, int],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    vector: bool,
) -> Launch:
    """Compile and load the kernel on `device`, the current device, and prepare its launch."""
    experts, n_masks, out_features, in_features = shape
    octets = out_features * packed_width(in_features)
    return Launch(
        load_kernel(device, *source(arch, dtype, n_masks)),
        (-(-octets // _THREADS), experts),
        _THREADS,
        0,
        overlap=False,
        parameters=parameters("pack.cu"),
        integers={
            "expert_stride": strides[0],
            "mask_stride": strides[1],
            "row_stride": strides[2],
            "column_stride": strides[3],
            "out_features": out_features,
            "in_features": in_features,
            "vector": int(vector),
        },
    )
