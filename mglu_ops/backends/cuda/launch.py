"""Plans describe, as data, the launches that compute a call. This module also loads and runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from ...files import source_directory
from ...sizes import round_up
from ..parameters import Parameters, read_parameters
from .compiler import compile_cubin
from .driver import Kernel, KernelStruct, Launch
from .tensor_map import Matrix, TensorMaps

Source = tuple[str, str, dict[str, int]]
"""A kernel to compile: the name of the kernel and of its file in csrc/cuda, the target such as `sm_90a`, and macros."""


@dataclass(frozen=True)
class Step:
    """One launch of a plan: everything about it except addresses.

    Attributes:
        kernel: the name of the kernel and of its source file.
        target: the architecture for which the kernel is compiled.
        macros: the macros with which the source is compiled.
        grid: blocks in x and in y.
        threads: threads of a block.
        shared: dynamic shared memory of a block in bytes.
        overlap: True for programmatic dependent launch.
        integers: the values of the integers of the kernel's struct.
        struct: the struct of the kernel's parameters (csrc/cuda/params.cuh).
        items: the values of the integers of `ItemParams`, the second struct of kernels for experts; None for kernels
            with one struct.
        maps: the matrices of the struct's last tensor maps, in order, under the names of their pointers; None for an
            unused map. Each mapping is encoded and cached as a whole, so it has matrices whose addresses change
            together.
        writes: the name of the pointer by which later steps read what this step writes; None for the last step, which
            writes the result.
        nbytes: the size of what the step writes; 0 for the last step.
    """

    kernel: str
    target: str
    macros: dict[str, int]
    grid: tuple[int, int]
    threads: int
    shared: int
    overlap: bool
    integers: Mapping[str, int]
    struct: str = "Params"
    items: Mapping[str, int] | None = None
    maps: tuple[Mapping[str, Matrix | None], ...] = ()
    writes: str | None = None
    nbytes: int = 0

    @property
    def source(self) -> Source:
        """The kernel that is compiled for the step."""
        return self.kernel, self.target, self.macros

    def load(self, device: int) -> Launch:
        """Compile and load the kernel on `device`, the current device, and prepare its launch.

        Raises:
            CompileError: NVRTC refused the kernel.
            LaunchError: the driver refused the kernel.
        """
        second = None if self.items is None else KernelStruct(parameters("params.cuh", "ItemParams"), self.items)
        return Launch(
            load_kernel(device, *self.source),
            self.grid,
            self.threads,
            self.shared,
            overlap=self.overlap,
            parameters=parameters("params.cuh", self.struct),
            integers=self.integers,
            second=second,
        )


Plan = tuple[Step, ...]
"""The steps of a call, in order. Each step waits until the results of the earlier steps are in memory."""


def load(plan: Plan, device: int) -> LaunchSequence:
    """Compile and load the kernels of a plan on `device`, the current device. Raises the errors of `Step.load`."""
    *copies, last = plan
    return LaunchSequence(
        last.load(device),
        tuple(CopyLaunch(step.load(device), step.nbytes, step.writes) for step in copies if step.writes is not None),
        tuple(TensorMaps(**matrices) for matrices in last.maps),
    )


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
    """Return the fields of the struct `name`, which the file `source` of csrc/cuda declares."""
    return read_parameters(source_directory("cuda") / source, name)


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
    """A loaded plan.

    Attributes:
        kernel: the launch that computes the result.
        copies: the launches before `kernel`, in order.
        maps: the last tensor maps of the kernel's struct, in order, grouped as in `Step.maps`.
    """

    kernel: Launch
    copies: tuple[CopyLaunch, ...] = ()
    maps: tuple[TensorMaps, ...] = ()

    @cached_property
    def workspace_bytes(self) -> int:
        """The size of the memory for all copies. The caller provides it, at an address that is a multiple of 16."""
        return sum(round_up(copy.nbytes, 16) for copy in self.copies)

    def __call__(self, stream: int, pointers: dict[str, int], workspace: int = 0) -> None:
        """Launch on a stream. `pointers` has all addresses by name; the copies are written at `workspace`.

        Raises:
            LaunchError: the driver refused a launch; the context stays usable.
        """
        read = pointers
        for copy in self.copies:
            copy.launch(stream, {**read, "out": workspace})
            read = {**read, copy.tensor: workspace}
            workspace += round_up(copy.nbytes, 16)
        self.kernel(stream, read, b"".join([maps(read) for maps in self.maps]) if self.maps else None)
