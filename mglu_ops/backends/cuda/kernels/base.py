"""The base class of launch configurations, and properties of a call on which several kernels depend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from ....activations import ACTIVATIONS
from ....call import Call
from ..device import MOST_THREADS_PER_BLOCK, RESERVED_SHARED_BYTES_PER_BLOCK, Gpu
from ..launch import Plan, Step

ELEMENTS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
"""The codes of the dtypes in `csrc/cuda/element.cuh`."""


@dataclass(frozen=True)
class LaunchConfig(ABC):
    """The launch configuration of a kernel: the compile-time constants of its source, and the settings of its grid.

    Each kernel has a subclass in the module with its name. The fields are the settings.
    """

    kernel: ClassVar[str]
    """The name of the kernel and of its source file."""
    overlaps: ClassVar[bool] = True
    """True if the kernel supports programmatic dependent launch, on compute capability 9.0 and later."""

    def settings(self) -> dict[str, int]:
        """Return the fields that differ from their defaults."""
        found = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in found.items() if value != default}

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(f'{name}={value}' for name, value in self.settings().items())})"

    @property
    @abstractmethod
    def threads(self) -> int:
        """The threads of a block."""

    @abstractmethod
    def shared_bytes(self, call: Call) -> int:
        """The dynamic shared memory that a block uses, in bytes."""

    @abstractmethod
    def grid(self, call: Call, gpu: Gpu) -> tuple[int, int]:
        """The blocks of the grid in x and in y."""

    @abstractmethod
    def macros(self, call: Call) -> dict[str, int]:
        """The macros with which the kernel's source is compiled."""

    @abstractmethod
    def _violations(self, call: Call, gpu: Gpu) -> Iterator[str]:
        """Yield the rules that this configuration breaks: the source's static assertions and required layouts."""

    @property
    def rounds_x(self) -> bool:
        """True if the kernel multiplies in the call's activation format, such as fp8, and not in x's dtype."""
        return False

    def target(self, gpu: Gpu) -> str:
        """The architecture for which the kernel is compiled."""
        return gpu.target

    def plan(self, call: Call, gpu: Gpu) -> Plan:
        """Return the launches of a call, whose activation format is "dense" unless `rounds_x` is true."""
        macros, grid, shared = self.macros(call), self.grid(call, gpu), self.requested_shared_bytes(call, gpu)
        overlap = self.overlaps and gpu.overlaps
        return (Step(self.kernel, self.target(gpu), macros, grid, self.threads, shared, overlap, integers(call)),)

    def requested_shared_bytes(self, call: Call, gpu: Gpu) -> int:
        """The dynamic shared memory that a launch requests per block, in bytes."""
        return self.shared_bytes(call)

    def resident_threads(self) -> int:
        """The threads that must fit on an SM at the same time."""
        return self.threads

    def violation(self, call: Call, gpu: Gpu) -> str | None:
        """The reason why this configuration cannot run a call; None if it can."""
        return next(self._all_violations(call, gpu), None)

    def _all_violations(self, call: Call, gpu: Gpu) -> Iterator[str]:
        for name, value in self.settings().items():
            if not isinstance(value, bool) and value < 1:
                yield f"{name}: got {value}, must be at least 1"
                return
        yield from self._violations(call, gpu)
        if self.threads > MOST_THREADS_PER_BLOCK:
            yield f"{self.threads} threads a block, more than {MOST_THREADS_PER_BLOCK}"
        if self.resident_threads() > gpu.threads_per_sm:
            yield f"{self.resident_threads()} threads an SM, more than {gpu.threads_per_sm}"
        need = self.shared_bytes(call) + RESERVED_SHARED_BYTES_PER_BLOCK
        if need > gpu.shared_bytes_per_sm:
            yield f"{need} bytes of shared memory a block, more than {gpu.shared_bytes_per_sm}"


def common_macros(call: Call) -> dict[str, int]:
    """The macros shared by all kernels of `mglu::forward`."""
    return {
        "MGLU_ELEMENT": ELEMENTS[call.dtype],
        "MGLU_N_MASKS": call.n_masks,
        "MGLU_ACTIVATION": ACTIVATIONS[call.activation].code,
        "MGLU_WEIGHT_FORMAT": call.weight.format.code,
        "MGLU_MASK_WEIGHTS": -1 if call.mask_weights_dtype is None else ELEMENTS[call.mask_weights_dtype],
    }


def integers(call: Call) -> dict[str, int]:
    """The values of the integers of `Params` (csrc/cuda/params.cuh)."""
    layouts = {"x": call.x, "weight": call.weight.layout, "mask_weight": call.mask_weights}
    mask_strides = zip(("mask_row_stride", "mask_octet_stride", "mask_stride"), call.masks.strides, strict=True)
    return {
        **{f"{name}_row_stride": layout.strides[0] for name, layout in layouts.items()},
        **{f"{name}_column_stride": layout.strides[1] for name, layout in layouts.items()},
        **dict(mask_strides),
        "tokens": call.tokens,
        "out_features": call.out_features,
        "in_features": call.in_features,
        "x_is_vectorizable": int(x_is_vectorizable(call)),
    }


def copy_step(
    kernel: str, target: str, macros: dict[str, int], blocks: int, call: Call, gpu: Gpu, writes: str, nbytes: int
) -> Step:
    """Return the step that writes a converted copy of a tensor of `call`, in blocks of 256 threads."""
    overlap, values = gpu.overlaps, integers(call)
    return Step(kernel, target, macros, (blocks, 1), 256, 0, overlap, values, writes=writes, nbytes=nbytes)


def x_is_vectorizable(call: Call) -> bool:
    """True if x can be read in 16-byte vectors."""
    token, column = call.x.strides
    return column == 1 and call.x.alignment == 16 and (call.tokens == 1 or token * call.dtype.itemsize % 16 == 0)


def weight_is_vectorizable(call: Call) -> bool:
    """True if the weight can be read in 16-byte vectors, with row offsets that fit in 32 bits."""
    row, column = call.weight.layout.strides
    return (
        call.in_features % 8 == 0
        and call.in_features * call.weight.bits % 128 == 0
        and column == 1
        and call.weight.layout.alignment == 16
        and row * call.weight.dtype.itemsize % 16 == 0
        and row < 2**26
    )


def mask_alignment(call: Call) -> int:
    """Return the width of the vectors in which rows of masks can be read: 16, 8, 4 or 1 bytes.

    The width divides the address and the length of every row, so no vector reaches past the end of a row. The width is
    0 if the bytes of a row are not contiguous.
    """
    row, octet, mask = call.masks.strides
    if not ((mask == 1 or call.n_masks == 1) and octet == call.n_masks and row < 2**26):
        return 0
    length = call.in_features // 8 * call.n_masks
    return next(size for size in (16, 8, 4, 1) if call.masks.alignment % size == 0 and (row | length) % size == 0)


def has_aligned_rows(call: Call) -> bool:
    """True if rows of W can be copied in vectors of 16 bytes, and rows of masks in vectors of at least 4 bytes."""
    return weight_is_vectorizable(call) and mask_alignment(call) >= 4 and call.in_features > 0


def has_x_in_rows(call: Call) -> bool:
    """True if TMA can read x: its rows are 16-byte aligned and do not overlap."""
    return x_is_vectorizable(call) and (call.tokens == 1 or call.x.strides[0] >= call.in_features)


def aligned_violations(kernel: str, call: Call, rows: int) -> Iterator[str]:
    """Yield the requirements of a 16-bit kernel that a call does not meet. A block computes `rows` rows of W."""
    if call.dtype is torch.float32:
        yield f"{kernel} has no float32"
    if call.in_features % 8 or not call.in_features:
        yield f"{kernel} needs in_features that are a multiple of 8, got {call.in_features}"
    if not has_aligned_rows(call):
        yield f"{kernel} needs aligned rows of weight and packed_masks"
    if call.out_features < rows:
        yield f"rows: got {rows}, must be at most out_features {call.out_features}"
