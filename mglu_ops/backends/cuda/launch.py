"""Loads kernels, and runs the sequence of launches of a call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from ...sizes import round_up
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
    """The fields of the struct `name`, which a file of csrc/cuda declares."""
    return read_parameters(source_directory() / source, name)


@dataclass(frozen=True)
class CopyLaunch:
    """A launch that writes a converted copy of a tensor, which later kernels read in its place.

    Attributes:
        launch: the launch. Its parameter `out` is the address of the copy, a multiple of 16.
        nbytes: the size of the copy in bytes.
        tensor: the parameter of the later kernels that points to the copy.
    """

    launch: Launch
    nbytes: int
    tensor: str


@dataclass(frozen=True)
class LaunchSequence:
    """The launch of a kernel, preceded by launches that copy x or W for it.

    Attributes:
        kernel: the launch that computes the result.
        copies: the launches before it, in order. A launch may start only after all earlier ones have ended.
        maps: the last tensor maps of the kernel's struct, in order. Matrices whose addresses change together share an
            entry.
    """

    kernel: Launch
    copies: tuple[CopyLaunch, ...] = ()
    maps: tuple[TensorMaps, ...] = ()

    @cached_property
    def workspace_bytes(self) -> int:
        """The size of the memory for all copies. The caller provides it, at an address that is a multiple of 16."""
        return sum(round_up(copy.nbytes, 16) for copy in self.copies)

    def __call__(self, stream: int, pointers: dict[str, int], workspace: int = 0) -> None:
        """Launch on a stream. `pointers` has all addresses by name; `workspace` is the address for the copies.

        Raises:
            LaunchError: the driver refused a launch; the context stays usable.
        """
        read = pointers
        for copy in self.copies:
            copy.launch(stream, {**read, "out": workspace})
            read = {**read, copy.tensor: workspace}
            workspace += round_up(copy.nbytes, 16)
        self.kernel(stream, read, b"".join([maps(read) for maps in self.maps]) if self.maps else None)
