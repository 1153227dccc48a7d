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
"""The codes of the dtypes that can be packed: logits, by `> 0`, and bool masks."""

_THREADS = 256


def source(arch: tuple[int, int], dtype: torch.dtype, n_masks: int) -> tuple[str, str, dict[str, int]]:
    """The source to compile, as `(kernel, target, macros)`."""
    return "pack", f"sm_{arch[0]}{arch[1]}", {"MGLU_ELEMENT": KINDS[dtype], "MGLU_N_MASKS": n_masks}


def pack(masks: Tensor, arch: tuple[int, int], stream: int) -> Tensor:
    """Pack bool masks or logits (`M = logits > 0`) `[n_masks, out_features, in_features]`.

    They are float16, bfloat16, float32 or bool, in any strides, on the current device.

    Raises:
        CompileError: NVRTC refused the kernel.
        LaunchError: the driver refused the launch; the context stays usable.
    """
    shape: tuple[int, int, int] = tuple(masks.shape)  # type: ignore[assignment] # torch.Size has no length
    packed = torch.empty(packed_shape(*shape), dtype=torch.uint8, device=masks.device)
    if packed.numel():
        address = masks.data_ptr()
        alignment = 8 * min(masks.element_size(), 2)
        vector = address % alignment == 0 and masks.stride(2) == 1
        vector = vector and all(stride * masks.element_size() % alignment == 0 for stride in masks.stride()[:2])
        launch = _launch(masks.device.index, arch, masks.dtype, shape, masks.stride(), vector)
        launch(stream, {"source": address, "packed": packed.data_ptr()})
    return packed


@lru_cache(maxsize=1024)
def _launch(
    device: int,
    arch: tuple[int, int],
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    strides: tuple[int, int, int],
    vector: bool,
) -> Launch:
    """Prepare the launch, and load its kernel into the context of `device`, the current device."""
    n_masks, out_features, in_features = shape
    octets = out_features * packed_width(in_features)
    return Launch(
        load_kernel(device, *source(arch, dtype, n_masks)),
        (-(-octets // _THREADS), 1),
        _THREADS,
        0,
        overlap=False,
        parameters=parameters("pack.cu"),
        integers={
            "mask_stride": strides[0],
            "row_stride": strides[1],
            "column_stride": strides[2],
            "out_features": out_features,
            "in_features": in_features,
            "vector": int(vector),
        },
    )
