"""Tensor maps: descriptions of matrices for the Tensor Memory Accelerator (TMA), encoded by the driver."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import ClassVar
from weakref import WeakSet

from ..parameters import MAP_BYTES
from .driver import encode_tensor_map

_ENTRIES_KEPT = 1 << 14
"""The most entries that the caches of all `TensorMaps` hold together, about 8 MB. Then all caches are emptied."""
_ALIGNMENT = 64  # required alignment of an encoded map, in bytes

_UINT8, _UINT16 = 0, 1
_NO_SWIZZLE = 0
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # the driver's swizzle modes, by the bytes of a row of a box
_PROMOTE_64B = 1


@dataclass(frozen=True)
class Matrix:
    """A row-major matrix or a stack of matrices, and the boxes in which TMA copies it.

    Attributes:
        item: the bytes of an element, 1 or 2.
        width: the number of columns.
        height: the number of rows.
        pitch: the bytes from one row to the next, a multiple of 16.
        box_width: the columns of a box.
        box_height: the rows of a box.
        swizzle: True if the 16-byte vectors of a row are permuted in shared memory. Then vector v of row r of a box is
            at v ^ (r % 8) in rows of 128 bytes, v ^ (r / 2 % 4) in rows of 64, and v ^ (r / 4 % 2) in rows of 32.
        depth: the number of matrices of a stack; 0 for a single matrix, whose boxes have two dimensions.
        depth_pitch: the bytes from one matrix of a stack to the next, a multiple of 16.
        box_depth: the matrices of a box.
    """

    item: int
    width: int
    height: int
    pitch: int
    box_width: int
    box_height: int
    swizzle: bool
    depth: int = 0
    depth_pitch: int = 0
    box_depth: int = 1

    def encode(self, pointer: int) -> bytes:
        """Return the encoded map of the matrix at the address `pointer`, a multiple of 16.

        Raises:
            LaunchError: the driver refused the map.
        """
        memory = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
        address = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
        rank = 3 if self.depth else 2
        sizes, boxes = (self.width, self.height, self.depth), (self.box_width, self.box_height, self.box_depth)
        encode_tensor_map(
            ctypes.c_void_p(address),
            _UINT8 if self.item == 1 else _UINT16,
            rank,
            ctypes.c_void_p(pointer),
            (ctypes.c_uint64 * rank)(*sizes[:rank]),
            (ctypes.c_uint64 * (rank - 1))(*(self.pitch, self.depth_pitch)[: rank - 1]),
            (ctypes.c_uint32 * rank)(*boxes[:rank]),
            (ctypes.c_uint32 * rank)(*(1,) * rank),
            0,  # not interleaved
            _SWIZZLES[self.item * self.box_width] if self.swizzle else _NO_SWIZZLE,
            _PROMOTE_64B,
            0,  # elements outside the matrix read as zeros
        )
        return ctypes.string_at(address, MAP_BYTES)


class TensorMaps:
    """The concatenated tensor maps of some matrices, cached by the addresses of the matrices. Thread-safe."""

    _all: ClassVar[WeakSet[TensorMaps]] = WeakSet()
    _entries: ClassVar[int] = 0
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, **matrices: Matrix | None) -> None:
        """Take each matrix under the name of its pointer. None stands for an unused map, which is filled with zeros."""
        self._matrices = matrices
        self._addresses = itemgetter(*(name for name, matrix in matrices.items() if matrix is not None))
        self._known: dict[object, bytes] = {}
        with TensorMaps._lock:
            TensorMaps._all.add(self)

    def __call__(self, pointers: Mapping[str, int]) -> bytes:
        addresses = self._addresses(pointers)
        found = self._known.get(addresses)
        if found is None:
            found = b"".join(
                bytes(MAP_BYTES) if matrix is None else matrix.encode(pointers[name])
                for name, matrix in self._matrices.items()
            )
            with TensorMaps._lock:
                if TensorMaps._entries >= _ENTRIES_KEPT:
                    for maps in TensorMaps._all:
                        maps._known.clear()
                    TensorMaps._entries = 0
                self._known[addresses] = found
                TensorMaps._entries += 1
        return found
