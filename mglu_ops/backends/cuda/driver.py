"""The three driver calls of a launch, through ctypes: a call costs a microsecond where a general wrapper costs four."""

from __future__ import annotations

import ctypes
import struct as binary
import sys
import threading
from functools import cache


class LaunchError(RuntimeError):
    """The CUDA driver refused a module or a launch."""


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute` whose value is an int."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _LaunchStruct(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    )


POINTERS = binary.Struct("5Q")
"""The head of every kernel's parameters: x, weight, masks, route weights, out."""

_pack_pointers = POINTERS.pack_into
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED_SIZE = 8


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _check(result: int, what: str) -> None:
    if result:
        name = ctypes.c_char_p()
        _library().cuGetErrorString(result, ctypes.byref(name))
        reason = name.value.decode() if name.value else "unknown error"
        raise LaunchError(f"{what}: CUDA error {result} ({reason})")


class Function:
    """A kernel loaded into the current context, with one geometry and all its parameters but the pointers.

    Thread-safe. The parameters are one struct whose pointers come first.
    """

    def __init__(
        self,
        cubin: bytes,
        name: str,
        grid: tuple[int, int],
        threads: int,
        shared: int,
        overlap: bool,
        constants: bytes,
    ) -> None:
        library = _library()
        self._module = ctypes.c_void_p()
        _check(library.cuModuleLoadData(ctypes.byref(self._module), cubin), f"loading {name}")
        self._function = ctypes.c_void_p()
        _check(library.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), name)
        if shared > 48 * 1024:
            result = library.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED_SIZE, shared)
            _check(result, f"{name}: {shared} bytes of shared memory")
        self._name = name
        self._launch = library.cuLaunchKernelEx
        self._geometry = (*grid, 1, threads, 1, 1, shared)
        # With this attribute the next launch's blocks may be set up while the last kernel still runs; the kernels
        # wait for it before they touch memory.
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        self._overlap = overlap
        self._constants = constants
        self._local = threading.local()

    def __call__(self, stream: int, *pointers: int) -> None:
        try:
            struct, config, function, buffer, arguments = self._local.state
        except AttributeError:
            struct, config, function, buffer, arguments = self._local.state = self._new_state()
        struct.stream = stream
        _pack_pointers(buffer, 0, *pointers)
        result = self._launch(config, function, arguments, None)
        if result:
            _check(result, f"launching {self._name}")

    def _new_state(self) -> tuple[_LaunchStruct, object, ctypes.c_void_p, ctypes.Array[ctypes.c_char], object]:
        """Buffers that the driver reads during a launch: one set a thread, because ctypes releases the GIL."""
        attributes = ctypes.pointer(self._attribute)
        struct = _LaunchStruct(*self._geometry, None, attributes, 1 if self._overlap else 0)
        size = POINTERS.size + len(self._constants)
        buffer = ctypes.create_string_buffer(bytes(POINTERS.size) + self._constants, size)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        return struct, ctypes.byref(struct), self._function, buffer, arguments
