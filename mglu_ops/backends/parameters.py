"""The struct of a kernel's parameters, whose fields are read from the C++ or CUDA source that declares it."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from operator import itemgetter
from pathlib import Path

from torch import Tensor

MAP_BYTES = 128
_MAP_ALIGNMENT = 64
_POINTER = re.compile(r"(?:const )?[\w:]+\* (\w+);")
_OTHER = re.compile(r"([\w:]+) (\w+)(?: = [\w:]+)?;")


def addresses(**tensors: Tensor | None) -> dict[str, int]:
    """Map the names of tensors to their addresses; 0 for None."""
    return {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Parameters:
    """The fields of a struct: pointers first, then 64-bit integers, 32-bit integers and tensor maps.

    Attributes:
        pointers: the names of the pointers.
        longs: the names of the 64-bit sizes, strides and enumerations.
        ints: the names of the 32-bit integers.
        maps: the names of the tensor maps.
    """

    pointers: tuple[str, ...] = ()
    longs: tuple[str, ...] = ()
    ints: tuple[str, ...] = ()
    maps: tuple[str, ...] = ()

    @property
    def map_offset(self) -> int:
        """The offset of the first map in bytes."""
        alignment = _MAP_ALIGNMENT if self.maps else 8
        size = 8 * len(self.pointers + self.longs) + 4 * len(self.ints)
        return -(-size // alignment) * alignment

    @property
    def size(self) -> int:
        """The size of the struct in bytes."""
        return self.map_offset + MAP_BYTES * len(self.maps)

    @cached_property
    def pointer_struct(self) -> struct.Struct:
        """The `struct.Struct` that packs all addresses, in the order of the fields."""
        return struct.Struct(f"{len(self.pointers)}Q")

    @cached_property
    def in_order(self) -> Callable[[Mapping[str, int]], tuple[int, ...]]:
        """A function that maps addresses by name to a tuple in the order of the fields."""
        if len(self.pointers) == 1:
            return lambda values: (values[self.pointers[0]],)
        return itemgetter(*self.pointers)

    def with_integers(self, values: Mapping[str, int]) -> bytes:
        """Pack the struct with the values of all its integers; pointers and maps are zeros.

        Raises:
            TypeError: `values` does not have exactly the names of the struct's integers.
        """
        names = self.longs + self.ints
        if values.keys() != set(names):
            raise TypeError(f"parameters: got {', '.join(values)}, must be {', '.join(names)}")
        numbers = struct.pack(f"={len(self.longs)}q{len(self.ints)}i", *(values[name] for name in names))
        return (bytes(8 * len(self.pointers)) + numbers).ljust(self.size, b"\0")


@cache
def read_parameters(source: Path, name: str) -> Parameters:
    """Read the declaration of struct `name`, which has one field per line. Fields of its base come first.

    A field that is not a pointer, an `int` or a `TensorMap` must be a 64-bit integer or enumeration.

    Raises:
        ValueError: the source does not declare the struct, or its fields are not in the order of `Parameters`.
    """
    found = re.search(rf"^struct {name}(?: : (\w+))? {{\n(.*?)^}};", source.read_text(), flags=re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{source.name} declares no struct {name}")
    base = read_parameters(source, found[1]) if found[1] else Parameters()
    kinds = [list(base.pointers), list(base.longs), list(base.ints), list(base.maps)]
    for line in filter(None, (line.partition("//")[0].strip() for line in found[2].splitlines())):
        pointer, other = _POINTER.fullmatch(line), _OTHER.fullmatch(line)
        kind = 0 if pointer else {"int": 2, "TensorMap": 3}.get(other[1], 1) if other else -1
        if kind < 0 or any(kinds[kind + 1 :]):
            raise ValueError(
                f"{source.name}: {name}: {line!r} is no field, or comes too late: first come pointers, then "
                "64-bit integers, ints and tensor maps"
            )
        kinds[kind].append(pointer[1] if pointer else other[2])  # type: ignore[index] # one of them matches
    return Parameters(*map(tuple, kinds))
