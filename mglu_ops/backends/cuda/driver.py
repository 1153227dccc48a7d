"""Launches kernels by calling the CUDA driver through ctypes, in every eager call. A wrapper would take longer.

A whole eager call takes 11 to 20 us of host time on an H200 (`benchmarks/results/overheads.csv`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from ..parameters import Parameters


class LaunchError(RuntimeError):
    """The CUDA driver refused a module or a launch."""


class _Attribute(ctypes.Structure):
    """The driver's struct `CUlaunchAttribute`, with a value of type int."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _LaunchStruct(ctypes.Structure):
    """The driver's struct `CUlaunchConfig`."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    )


_Fill = Callable[[Mapping[str, int]], None]

_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED_SIZE = 8
_NO_CONTEXT = 201


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def encode_tensor_map(*arguments: object) -> None:
    """Call `cuTensorMapEncodeTiled`. Raises LaunchError if it returns an error."""
    _check(_library().cuTensorMapEncodeTiled(*arguments), "encoding a tensor map")


def _check(result: int, what: str) -> None:
    if result:
        name = ctypes.c_char_p()
        _library().cuGetErrorString(result, ctypes.byref(name))
        reason = name.value.decode() if name.value else "unknown error"
        raise LaunchError(f"{what}: CUDA error {result} ({reason})")


def bind_context(device: int) -> None:
    """Make torch's context of a device current if this thread has no context yet (no torch operation has run in it)."""
    library, context, handle = _library(), ctypes.c_void_p(), ctypes.c_int()
    _check(library.cuCtxGetCurrent(ctypes.byref(context)), "asking for the context")
    if not context.value:
        _check(library.cuDeviceGet(ctypes.byref(handle), device), f"device {device}")
        _check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"the context of device {device}")
        _check(library.cuCtxSetCurrent(context), f"the context of device {device}")


class Kernel:
    """A kernel whose module is loaded into the context of `device`, the current device, and never unloaded."""

    def __init__(self, cubin: bytes, name: str, device: int) -> None:
        library = _library()
        bind_context(device)
        self.name = name
        self.device = device
        self.handle = ctypes.c_void_p()
        self._module = ctypes.c_void_p()
        self._shared = 48 * 1024  # the most bytes that a launch may use; `allow_shared` raises it
        self._lock = threading.Lock()
        _check(library.cuModuleLoadData(ctypes.byref(self._module), cubin), f"loading {name}")
        _check(library.cuModuleGetFunction(ctypes.byref(self.handle), self._module, name.encode()), name)

    def allow_shared(self, size: int) -> None:
        """Let launches request `size` bytes of dynamic shared memory per block."""
        with self._lock:
            if size > self._shared:
                result = _library().cuFuncSetAttribute(self.handle, _MAX_DYNAMIC_SHARED_SIZE, size)
                _check(result, f"{self.name}: {size} bytes of shared memory")
                self._shared = size


@dataclass(frozen=True)
class KernelStruct:
    """A struct of a kernel's parameters, with the values of its integers. Only the pointers differ between calls."""

    parameters: Parameters
    integers: Mapping[str, int]


class Launch:
    """A kernel with its grid and parameters. Only the pointers and tensor maps differ between calls. Thread-safe."""

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int],
        threads: int,
        shared: int,
        *,
        overlap: bool,
        parameters: Parameters,
        integers: Mapping[str, int],
        second: KernelStruct | None = None,
    ) -> None:
        """Prepare a launch. `launch.Step` describes most arguments.

        `parameters` are the fields of the kernel's struct, and `integers` the values of all its integers by name.
        `second` is the kernel's second struct, which has no tensor maps, or None.
        """
        kernel.allow_shared(shared)
        self._kernel = kernel
        self._launch = _library().cuLaunchKernelEx
        self._geometry = (*grid, 1, threads, 1, 1, shared)
        # With this attribute, blocks may start while the previous kernel still runs. Kernels wait for the end of the
        # previous kernel before they touch its results.
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        self._overlap = overlap
        self._struct = parameters.with_integers(integers)
        self._in_order, self._pack = parameters.in_order, parameters.pointer_struct.pack_into
        self._second = second
        self._local = threading.local()

    def __call__(self, stream: int, pointers: Mapping[str, int], maps: bytes | None = None) -> None:
        """Launch on a stream of the current context.

        `pointers` has an address for the name of each pointer of the struct. `maps` fills the end of the struct with
        its last tensor maps. Tensor maps before them stay zero.

        Raises:
            KeyError: a pointer of the struct is missing.
            LaunchError: the driver refused the launch; the context stays usable.
        """
        try:
            struct, config, function, buffer, arguments, second = self._local.state
        except AttributeError:
            struct, config, function, buffer, arguments, second = self._local.state = self._new_state()
        struct.stream = stream
        self._pack(buffer, 0, *self._in_order(pointers))
        if second is not None:
            second(pointers)
        if maps is not None:
            buffer[-len(maps) :] = maps  # one copy, since `buffer` is a memoryview; ctypes copies byte by byte
        result = self._launch(config, function, arguments, None)
        if result == _NO_CONTEXT:
            bind_context(self._kernel.device)
            result = self._launch(config, function, arguments, None)
        if result:
            _check(result, f"launching {self._kernel.name}")

    def _new_state(self) -> tuple[_LaunchStruct, object, ctypes.c_void_p, memoryview, object, _Fill | None]:
        """Make the buffers that the driver reads in a launch.

        Each thread has its own buffers: ctypes releases the GIL, so another thread may launch at the same time.
        """
        attributes = ctypes.pointer(self._attribute)
        struct = _LaunchStruct(*self._geometry, None, attributes, 1 if self._overlap else 0)
        buffer = ctypes.create_string_buffer(self._struct, len(self._struct))
        view = memoryview(buffer).cast("B")
        if self._second is None:
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
            return struct, ctypes.byref(struct), self._kernel.handle, view, arguments, None
        fields = self._second.parameters
        packed = fields.with_integers(self._second.integers)
        second = ctypes.create_string_buffer(packed, len(packed))
        pack, in_order = fields.pointer_struct.pack_into, fields.in_order

        def fill(pointers: Mapping[str, int]) -> None:
            pack(second, 0, *in_order(pointers))

        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), ctypes.addressof(second))
        return struct, ctypes.byref(struct), self._kernel.handle, view, arguments, fill
