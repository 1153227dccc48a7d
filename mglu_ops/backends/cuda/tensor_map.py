"""Tensor maps: descriptions of x, W and the packed masks for the tensor memory accelerator, encoded by the driver."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

from .driver import call_driver

MAP_BYTES = 128
_MAPS_KEPT = 1024
_ALIGNMENT = 64  # of a map that the driver writes

_UINT8, _UINT16 = 0, 1
_NO_SWIZZLE, _SWIZZLE_128B = 0, 3
_PROMOTE_64B = 1


@dataclass(frozen=True)
class Matrix:
    """A row-major matrix, and the boxes in which it is copied. All sizes but `pitch` are in elements."""

    item: int
    """Bytes of an element: 1 or 2."""
    width: int
    height: int
    pitch: int
    """Bytes from a row to the next, a multiple of 16."""
    box_width: int
    box_height: int
    swizzle: bool
    """Whether 16-byte vector v of row r of a box is stored at v ^ (r % 8) in shared memory, in rows of 128 bytes."""

    def encode(self, pointer: int) -> bytes:
        """The map of the matrix at an address (a multiple of 16).

        Raises:
            LaunchError: the driver refused it.
        """
        memory = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
        address = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
        call_driver(
            "cuTensorMapEncodeTiled",
            "encoding a tensor map",
            ctypes.c_void_p(address),
            _UINT8 if self.item == 1 else _UINT16,
            2,
            ctypes.c_void_p(pointer),
            (ctypes.c_uint64 * 2)(self.width, self.height),
            (ctypes.c_uint64 * 1)(self.pitch),
            (ctypes.c_uint32 * 2)(self.box_width, self.box_height),
            (ctypes.c_uint32 * 2)(1, 1),
            0,  # not interleaved
            _SWIZZLE_128B if self.swizzle else _NO_SWIZZLE,
            _PROMOTE_64B,
            0,  # what lies outside reads as zeros
        )
        return ctypes.string_at(address, MAP_BYTES)


class TensorMaps:
    """The concatenated maps of some matrices, encoded once for each set of addresses. Thread-safe.

    A matrix that is not copied in boxes is None, and its map is zeros.
    """

    def __init__(self, *matrices: Matrix | None) -> None:
        self._matrices = matrices
        self._known: dict[tuple[int, ...], bytes] = {}
        self._lock = threading.Lock()

    def __call__(self, *addresses: int) -> bytes:
        found = self._known.get(addresses)
        if found is None:
            pairs = zip(self._matrices, addresses, strict=True)
            found = b"".join(bytes(MAP_BYTES) if one is None else one.encode(address) for one, address in pairs)
            with self._lock:
                if len(self._known) >= _MAPS_KEPT:
                    self._known.clear()
                self._known[addresses] = found
        return found
