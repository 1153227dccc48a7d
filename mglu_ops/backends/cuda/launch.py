"""Loaded kernels, and the sequence of launches that runs a call on a stream with given addresses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ..parameters import Parameters, read_parameters
from .compiler import compile_cubin, source_directory
from .driver import Kernel, Launch
from .tensor_map import TensorMaps


def load_kernel(device: int, name: str, target: str, macros: dict[str, int]) -> Kernel:
    """Return the kernel of `csrc/cuda/<name>.cu`, loaded once per process on `device`, the current device.

    Raises:
        CompileError: NVRTC refused the kernel.
        LaunchError: the driver refused the kernel.
    """
    return _load_kernel(device, name, target, tuple(sorted(macros.items())))


@cache
def _load_kernel(device: int, name: str, target: str, macros: tuple[tuple[str, int], ...]) -> Kernel:
    return Kernel(compile_cubin(name, target, dict(macros)), f"mglu_{name}", device)


def parameters(source: str, name: str = "Params") -> Parameters:
    """The struct `name` of parameters that a file of csrc/cuda declares."""
    return read_parameters(source_directory() / source, name)


@dataclass(frozen=True)
class LaunchSequence:
    """One kernel, possibly after another that permutes x for it.

    Attributes:
        kernel: computes the result.
        permute: writes the permuted copy of x that `kernel` reads in place of x.
        workspace_bytes: the size of the copy, whose memory the caller provides at a multiple of 16 bytes.
        maps: the tensor maps of W and the masks, if the kernel copies them in boxes.
        x_maps: the tensor map of x, if the kernel copies x itself in boxes. It is separate from `maps`, since several
            layers may read the same x, and a layer reads a new x at each call.
        result_maps: the tensor maps of the result and of its partial derivatives, in training.
    """

    kernel: Launch
    permute: Launch | None = None
    workspace_bytes: int = 0
    maps: TensorMaps | None = None
    x_maps: TensorMaps | None = None
    result_maps: TensorMaps | None = None

    def __call__(self, stream: int, pointers: dict[str, int], *, workspace: int = 0, partials: int = 0) -> None:
        """Launch on a stream with the addresses of `Params` by name, and those of other memory."""
        maps = None
        if self.maps is not None:
            maps = self.maps(pointers["weight"], pointers["packed_masks"])
            if self.x_maps is not None:
                maps = self.x_maps(pointers["x"]) + maps
            if self.result_maps is not None:
                maps += self.result_maps(pointers["out"], partials)
        if self.permute is not None:
            self.permute(stream, {**pointers, "out": workspace})
            pointers = {**pointers, "x": workspace}
        self.kernel(stream, pointers, maps)
