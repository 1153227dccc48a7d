"""A fake CUDA driver that launches nothing and records its calls."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mglu_ops.backends.cuda import driver
from mglu_ops.backends.cuda import launch as launches
from mglu_ops.backends.cuda.launch import parameters
from mglu_ops.backends.parameters import MAP_BYTES

_STRUCTS = {
    "group_tokens": "GroupParams",
    "experts_down": "DownParams",
    "combine_experts": "CombineParams",
}
"""The first parameter struct of some kernels. Other kernels take `Params`, `TileParams` or a struct for training."""


class RecordingDriver:
    """The driver's functions. In place of machine code, a module holds `(kernel, target, macros)` as JSON.

    `lines` has a line for each launch (code, grid, threads, shared memory, attributes, bytes of the structs), and a
    line for each new tensor map. In the bytes of a struct, the number of a tensor map's line takes the place of the
    map.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._codes: list[str] = []
        self._maps: dict[tuple[int, ...], int] = {}

    def begin(self, line: str) -> None:
        """Forget all lines and tensor maps, and record the first line of a call."""
        self.lines, self._maps = [line], {}

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:  # noqa: N802
        self._codes.append(code.decode())
        module._obj.value = len(self._codes)
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        function._obj.value = module.value
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: None) -> int:  # noqa: N802
        code, geometry = self._codes[function.value - 1], config._obj
        numbers = [geometry.grid_x, geometry.grid_y, geometry.grid_z, geometry.block_x, geometry.shared]
        attributes = [(one.id, one.value) for one in geometry.attributes[: geometry.n_attributes]]
        names = [self._struct(*json.loads(code)), "ItemParams"]
        sizes = (parameters("params.cuh", name).size for name in names)
        structs = [ctypes.string_at(address, size).hex() for address, size in zip(arguments, sizes, strict=False)]
        self.lines.append(f"{code} {numbers} {attributes} {' '.join(structs)}")
        return 0

    @staticmethod
    def _struct(kernel: str, target: str, macros: dict[str, int]) -> str:
        if kernel != "tile_wgmma":
            return _STRUCTS.get(kernel, "Params")
        if not macros.get("MGLU_TRAIN"):
            return "TileParams"
        return "TrainingItemParams" if macros.get("MGLU_ITEMS") else "TrainingTileParams"

    def cuTensorMapEncodeTiled(self, memory: Any, item: int, rank: int, pointer: Any, *rest: Any) -> int:  # noqa: N802
        arrays, numbers = rest[:4], rest[4:]
        fields = (item, rank, pointer.value or 0, *(value for array in arrays for value in array), *numbers)
        if fields not in self._maps:
            self._maps[fields] = len(self._maps) + 1
            self.lines.append(f"map {fields}")
        ctypes.memmove(memory.value, self._maps[fields].to_bytes(MAP_BYTES, "little"), MAP_BYTES)
        return 0


@contextmanager
def recording() -> Iterator[RecordingDriver]:
    """Replace the CUDA driver and compiler, so that kernels are loaded and launched without a GPU."""
    recorder = RecordingDriver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_library", lambda: recorder)
        patch.setattr(launches, "compile_cubin", lambda *source: json.dumps(source, sort_keys=True).encode())
        launches._load_kernel.cache_clear()
        try:
            yield recorder
        finally:
            launches._load_kernel.cache_clear()
