"""The properties of a GPU on which launches depend, for a device of this machine or for a known architecture."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

RESERVED_SHARED_BYTES_PER_BLOCK = 1024
"""Shared memory that the driver reserves in every block."""

MOST_THREADS_PER_BLOCK = 1024


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU on which launches depend.

    Attributes:
        name: its name in the driver and in tables of launches.
        arch: the compute capability.
        multiprocessors: the number of SMs.
        shared_bytes_per_sm: the shared memory of an SM in bytes.
        threads_per_sm: the most threads that reside on an SM.
    """

    name: str
    arch: tuple[int, int]
    multiprocessors: int
    shared_bytes_per_sm: int
    threads_per_sm: int

    @property
    def target(self) -> str:
        """The architecture for which kernels are compiled, such as `sm_90`."""
        return f"sm_{self.arch[0]}{self.arch[1]}"

    @property
    def overlaps(self) -> bool:
        """True if the GPU supports programmatic dependent launch."""
        return self.arch >= (9, 0)


@cache
def gpu_of(device: int) -> Gpu:
    """Return the GPU of a CUDA device index."""
    found = torch.cuda.get_device_properties(device)
    return Gpu(
        name=found.name,
        arch=(found.major, found.minor),
        multiprocessors=found.multi_processor_count,
        shared_bytes_per_sm=found.shared_memory_per_multiprocessor,
        threads_per_sm=found.max_threads_per_multi_processor,
    )


_KIB = 1024
KNOWN_GPUS: dict[tuple[int, int], Gpu] = {
    gpu.arch: gpu
    for gpu in (
        Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 164 * _KIB, 2048),
        Gpu("NVIDIA A10", (8, 6), 72, 100 * _KIB, 1536),
        Gpu("NVIDIA Jetson AGX Orin", (8, 7), 16, 164 * _KIB, 1536),
        Gpu("NVIDIA L40S", (8, 9), 142, 100 * _KIB, 1536),
        Gpu("NVIDIA H200", (9, 0), 132, 228 * _KIB, 2048),
        Gpu("NVIDIA B200", (10, 0), 148, 228 * _KIB, 2048),
        Gpu("NVIDIA B300", (10, 3), 148, 228 * _KIB, 2048),
        Gpu("NVIDIA Jetson AGX Thor", (11, 0), 20, 228 * _KIB, 1536),
        Gpu("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188, 100 * _KIB, 1536),
    )
}
"""One GPU of each architecture, for compiling on machines without such a GPU (NVIDIA's data sheets)."""


def gpu_of_architecture(arch: tuple[int, int]) -> Gpu:
    """Return a GPU of an architecture, from this machine or from `KNOWN_GPUS`.

    Raises:
        ValueError: neither this machine nor `KNOWN_GPUS` has one.
    """
    for device in range(torch.cuda.device_count()):
        if gpu_of(device).arch == arch:
            return gpu_of(device)
    if arch not in KNOWN_GPUS:
        known = ", ".join(gpu.target for gpu in KNOWN_GPUS.values())
        raise ValueError(
            f"arch: got sm_{arch[0]}{arch[1]}, must be the architecture of a GPU of this machine, or one of {known}"
        )
    return KNOWN_GPUS[arch]
