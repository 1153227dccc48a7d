"""Loaded kernels, and the sequence of launches that runs a call on a stream with given addresses."""

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
    """The struct `name` of parameters that a file of csrc/cuda declares."""
    return read_parameters(source_directory() / source, name)


@dataclass(frozen=True)
class CopyLaunch:
    """A launch that writes a copy of a tensor in another form, which a later kernel reads in its place.

    Attributes:
        launch: its `out` is the address of the copy, a multiple of 16 bytes.
        nbytes: the size of the copy.
        tensor: the name in `Params` of the tensor that it replaces.
    """

    launch: Launch
    nbytes: int
    tensor: str


@dataclass(frozen=True)
class LaunchSequence:
    """One kernel, possibly after others that copy x or W for it.

    Attributes:
        kernel: computes the result.
        copies: the launches before it, in order. A later one may start only when all earlier ones have ended.
        maps: the last tensor maps of its struct, in order. Matrices whose addresses change together share an entry.
    """

    kernel: Launch
    copies: tuple[CopyLaunch, ...] = ()
    maps: tuple[TensorMaps, ...] = ()

    @cached_property
    def workspace_bytes(self) -> int:
        """The size of all copies, whose memory the caller provides at a multiple of 16 bytes."""
        return sum(round_up(copy.nbytes, 16) for copy in self.copies)

    def __call__(self, stream: int, pointers: dict[str, int], workspace: int = 0) -> None:
        """Launch on a stream, with the addresses of all pointers and matrices by name, and of the workspace.

        Raises:
            LaunchError: the driver refused a launch; the context stays usable.
        """
        read = pointers
        for copy in self.copies:
            copy.launch(stream, {**read, "out": workspace})
            read = {**read, copy.tensor: workspace}
            workspace += round_up(copy.nbytes, 16)
        self.kernel(stream, read, b"".join([maps(read) for maps in self.maps]) if self.maps else None)
