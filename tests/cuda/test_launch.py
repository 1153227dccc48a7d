"""The arguments that a launch passes to the CUDA driver, recorded by a fake driver."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from mglu_ops.backends.cuda import driver
from mglu_ops.backends.cuda.launch import parameters
from mglu_ops.backends.parameters import MAP_BYTES


class Driver:
    """A fake driver that loads any kernel, and keeps the bytes of the parameter struct of each launch."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.structs: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: None) -> int:  # noqa: N802
        self.structs.append(ctypes.string_at(arguments[0], self.size))
        return 0


def test_pointers_and_maps_are_at_the_offsets_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = parameters("params.cuh", "TileParams")
    recorder = Driver(fields.size)
    monkeypatch.setattr(driver, "_library", lambda: recorder)
    integers = {name: 1000 + i for i, name in enumerate(fields.longs + fields.ints)}
    kernel = driver.Kernel(b"", "mglu_tile_wgmma", 0)
    launch = driver.Launch(kernel, (1, 1), 128, 0, overlap=True, parameters=fields, integers=integers)
    addresses = {name: 1 + i for i, name in enumerate(reversed(fields.pointers))}
    two_maps = bytes([2]) * MAP_BYTES + bytes([3]) * MAP_BYTES
    launch(0, addresses)
    launch(0, addresses, two_maps)
    launch(0, addresses, bytes([1]) * MAP_BYTES + two_maps)
    for found, maps in zip(recorder.structs, (b"", two_maps, bytes([1]) * MAP_BYTES + two_maps), strict=True):
        head = bytearray(fields.with_integers(integers))
        fields.pointer_struct.pack_into(head, 0, *(addresses[name] for name in fields.pointers))
        assert found == bytes(head[: fields.size - len(maps)]) + maps
    with pytest.raises(KeyError, match="out"):
        launch(0, {name: 0 for name in fields.pointers if name != "out"})
