"""Loaded kernels, and the sequence of launches that runs one call once it is given a stream and addresses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .compiler import compile_cubin
from .driver import Kernel, Launch
from .tensor_map import TensorMaps


def load_kernel(device: int, name: str, target: str, macros: dict[str, int]) -> Kernel:
    """The kernel of `csrc/cuda/<name>.cu` in the context of `device`, which is the current one: loaded once a process.

    Raises:
        CompileError: NVRTC refused it.
        LaunchError: the driver refused it.
    """
    return _load_kernel(device, name, target, tuple(sorted(macros.items())))


@cache
def _load_kernel(device: int, name: str, target: str, macros: tuple[tuple[str, int], ...]) -> Kernel:
    return Kernel(compile_cubin(name, target, dict(macros)), f"mglu_{name}", device)


@dataclass(frozen=True)
class LaunchSequence:
    """One kernel, or two of which the first permutes x for the second.

    Attributes:
        kernel: computes the result.
        permute: writes the permuted copy of x that `kernel` reads in place of x.
        workspace_bytes: the size of that copy, memory that the caller provides at a multiple of 16 bytes.
        maps: the tensor maps of W and the masks, where the kernel copies boxes of them.
        x_maps: the tensor map of x, where the kernel copies boxes of x itself. It is kept apart from `maps`, since
            layers with weights of their own read the same x, and one layer reads many.
        result_maps: the tensor maps of the result and of its partial derivatives, which are written in training.
    """

    kernel: Launch
    permute: Launch | None = None
    workspace_bytes: int = 0
    maps: TensorMaps | None = None
    x_maps: TensorMaps | None = None
    result_maps: TensorMaps | None = None

    def __call__(
        self, stream: int, workspace: int, x: int, weight: int, masks: int, routes: int, out: int, partials: int = 0
    ) -> None:
        """Launch on a stream; all but the stream are addresses, `partials` that of the partial derivatives."""
        maps = None
        if self.maps is not None:
            maps = self.maps(weight, masks)
            if self.x_maps is not None:
                maps = self.x_maps(x) + maps
            if self.result_maps is not None:
                maps += self.result_maps(out, partials)
        if self.permute is not None:
            self.permute(stream, x, 0, 0, 0, workspace)
            x = workspace
        self.kernel(stream, x, weight, masks, routes, out, maps=maps)
