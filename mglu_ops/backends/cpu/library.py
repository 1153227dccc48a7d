"""Loads the library of CPU kernels, and packs the structs that its functions take (csrc/cpu/mglu_cpu.h)."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ...files import source_directory
from ...formats import WeightFormat
from ..parameters import read_parameters
from .build import BuildError, load_library, settings

ISAS = {"best": 0, "portable": 1, "avx2": 2, "avx512": 3, "avx512_bf16": 4, "amx": 5}
_ISA_NAMES = {code: name for name, code in ISAS.items()}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_STEPS = ("flip_signs", "scale", "weight_gradients", "mask_weight_gradients")
"""The names of the steps of a backward pass (csrc/cpu/backward.h)."""

_STRUCTS = {**dict.fromkeys(("forward", "pack_masks", *_STEPS), 1), "forward_experts": 2}
"""Maps the name of a function, without `mglu_cpu_`, to the number of structs that it takes."""


def packer(
    struct: str, integers: Mapping[str, int], header: str = "mglu_cpu.h"
) -> Callable[[Mapping[str, int]], bytes]:
    """Return a function that takes addresses by name, and packs them and `integers` as a struct of csrc/cpu."""
    fields = read_parameters(source_directory("cpu") / header, struct)
    pack, in_order = fields.pointer_struct.pack, fields.in_order
    packed_integers = fields.with_integers(integers)[fields.pointer_struct.size :]
    return lambda pointers: pack(*in_order(pointers)) + packed_integers


class Library:
    """The functions of a loaded library. They run on torch's thread pool."""

    def __init__(self, path: Path) -> None:
        """Load a library.

        Raises:
            OSError: the file is not a library for this machine.
        """
        self.parallel_for = _torch_parallel_for()
        functions = ctypes.CDLL(str(path))
        try:
            self._functions = {name: getattr(functions, f"mglu_cpu_{name}") for name in _STRUCTS}
            self._isa, self._supports = functions.mglu_cpu_isa, functions.mglu_cpu_supports
            self._message = functions.mglu_cpu_status_message
        except AttributeError as error:
            raise OSError(str(error)) from error
        for name, function in self._functions.items():
            function.argtypes = (*(ctypes.c_char_p,) * _STRUCTS[name], ctypes.c_void_p)
            function.restype = ctypes.c_int32
        self._isa.restype, self._message.restype = ctypes.c_int64, ctypes.c_char_p
        self._isa.argtypes = (ctypes.c_int64,) * 4
        self._supports.argtypes = (ctypes.c_int64,) * 2
        self._message.argtypes = (ctypes.c_int32,)

    def isa(self, dtype: torch.dtype, tokens: int, n_masks: int, weight_format: WeightFormat) -> str:
        """Return the instruction set of `ISAS` that a call runs with; `dtype` is x's dtype."""
        return _ISA_NAMES[self._isa(DTYPES[dtype], tokens, n_masks, weight_format.code)]

    def supports(self, isa: str, dtype: torch.dtype) -> bool:
        """True if this machine and this library support an instruction set for a dtype."""
        return bool(self._supports(ISAS[isa], DTYPES[dtype]))

    def run(self, name: str, *structs: bytes) -> None:
        """Run the function `name` of `_STRUCTS` on its packed structs, without holding the GIL.

        Raises:
            RuntimeError: the kernel refused the call; the message has the reason.
        """
        status = self._functions[name](*structs, self.parallel_for)
        if status != 0:
            raise RuntimeError(f"the CPU kernel {name} failed: {self._message(status).decode()}")


def _torch_parallel_for() -> int:
    """Return the address of torch's parallel loop, so that kernels use its threads and obey torch.set_num_threads.

    Raises:
        BuildError: torch does not export the loop.
    """
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    try:
        address = ctypes.cast(torch_cpu.torch_parallel_for, ctypes.c_void_p).value
    except AttributeError as error:
        raise BuildError(f"this torch cannot run the CPU kernels: {error}") from error
    assert address is not None
    return address


_lock = threading.Lock()
_loaded: Library | str | None = None
_tried_with: tuple[str | None, ...] = ()
"""The `settings` with which loading the library failed; `_loaded` holds the reason."""


def load() -> Library | str:
    """Return the library, or the reason why it cannot be built and loaded.

    The first call builds and loads it. After a failure, a call tries again only if `settings` have changed.
    """
    global _loaded, _tried_with
    if not _is_settled():
        with _lock:
            if not _is_settled():
                tried_with = settings()
                try:
                    _loaded = load_library(Library)
                except (BuildError, OSError) as error:
                    _loaded = str(error)
                    _tried_with = tried_with
    assert _loaded is not None
    return _loaded


def _is_settled() -> bool:
    return _loaded is not None and (not isinstance(_loaded, str) or _tried_with == settings())


def is_loaded() -> bool:
    """True if this process has loaded the library."""
    return isinstance(_loaded, Library)


def is_missing() -> bool:
    """True if the last attempt to load the library failed."""
    return isinstance(_loaded, str)


def _renew_lock() -> None:
    """Replace the lock in a forked process, because a thread that exists only in the parent may hold it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
