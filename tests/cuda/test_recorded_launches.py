"""For many calls, the CUDA backend's launches must equal the launches recorded in `recorded_launches.txt`.

A change of the code that describes, chooses or prepares calls must not change launches by accident. If launches should
change, `MGLU_RECORD_LAUNCHES=1 python -m pytest tests/cuda/test_recorded_launches.py` writes the file again.

Each line of the file has a digest of everything that reaches the driver for one layer on one GPU, for several numbers
of tokens: the size of the workspace, and the launches and new tensor maps in order. A launch has a kernel, a target,
macros, a grid, threads, shared memory, attributes and structs.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from mglu_ops.backends.cuda import driver
from mglu_ops.backends.cuda import launch as launches
from mglu_ops.backends.cuda.choice import choose, choose_experts
from mglu_ops.backends.cuda.device import KNOWN_GPUS, Gpu
from mglu_ops.backends.cuda.kernels import experts_down, quantize_x
from mglu_ops.backends.cuda.kernels.tile_wgmma_training import training_choice, training_items
from mglu_ops.backends.cuda.launch import Plan, load, parameters
from mglu_ops.backends.parameters import MAP_BYTES
from mglu_ops.call import Call
from mglu_ops.formats import FORMATS
from tests.support.families import quick_only_for

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


RECORD = Path(__file__).parent / "recorded_launches.txt"
GPUS = {f"sm_{arch[0]}{arch[1]}": KNOWN_GPUS[arch] for arch in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))}
GPUS["sm_90, 78 SMs"] = replace(KNOWN_GPUS[9, 0], multiprocessors=78)
TOKENS = (1, 2, 5, 8, 9, 16, 17, 64, 65, 256, 300, 513, 4096)
NAMES = (
    *("x", "weight", "packed_masks", "mask_weights", "weight_scale", "expert_ids", "items", "out", "partials"),
    *("y", "expert_weights", "products", "places"),
)
ADDRESSES = {name: 0x10000 * number for number, name in enumerate(NAMES, 1)}
WORKSPACE = 0x1000000


def layers() -> Iterator[tuple[str, Call]]:
    """Yield the name of each layer without experts, and its call with one token."""
    shapes = ((14336, 4096), (8192, 2048), (4096, 14336), (100, 72), (41, 45))
    kinds: list[dict[str, Any]] = [
        *({"n_masks": n_masks} for n_masks in (1, 2, 3, 4, 8, 16)),
        {"n_masks": 4, "dtype": torch.float32},
        {"n_masks": 4, "mask_weights_dtype": torch.float32, "activation": "relu"},
        *({"n_masks": n, "weight_format": name} for n in (1, 4, 8) for name in FORMATS if name != "dense"),
        *(
            {"n_masks": n, "weight_format": name, "activation_format": "fp8_token"}
            for n in (1, 4)
            for name in ("fp8_row", "fp8_block")
        ),
    ]
    for shape, kind in product(shapes, kinds):
        options = {"dtype": torch.bfloat16} | kind
        dtype, n_masks = options.pop("dtype"), options.pop("n_masks")
        call = Call.contiguous(torch.device("cuda"), dtype, n_masks, 1, *shape, **options)
        name = f"{shape[0]} x {shape[1]}, " + ", ".join(f"{key} {value}" for key, value in kind.items())
        yield name, call
        if shape == (8192, 2048) and options == {}:
            yield f"{name}, batch invariant", replace(call, batch_invariant=True)
            yield f"{name}, unaligned x", replace(call, x=replace(call.x, alignment=8))


def mixtures() -> Iterator[tuple[str, Call, int, int | None]]:
    """Yield the name of each layer of experts, the layer of one expert, the number of experts, and K.

    K, the number of experts per token, is None for rows that are sorted by expert.
    """
    shapes = ((768, 2048, 128, 8), (14336, 4096, 8, 2), (2880, 2880, 32, 4), (40, 72, 5, 2))
    kinds: list[dict[str, Any]] = [
        *({"n_masks": n_masks} for n_masks in (1, 4)),
        {"n_masks": 3, "dtype": torch.float16, "mask_weights_dtype": torch.float32},
        {"n_masks": 2, "dtype": torch.float32},
        *({"n_masks": 2, "weight_format": name} for name in FORMATS if name != "dense"),
        {"n_masks": 2, "weight_format": "fp8_block", "activation_format": "fp8_token"},
    ]
    for (d, h, experts, top_k), kind, is_sorted in product(shapes, kinds, (False, True)):
        options = {"dtype": torch.bfloat16} | kind
        dtype, n_masks = options.pop("dtype"), options.pop("n_masks")
        layer = Call.contiguous(torch.device("cuda"), dtype, n_masks, 1, d, h, **options)
        name = f"{experts} experts {d} x {h}, {'sorted' if is_sorted else f'K {top_k}'}, "
        name += ", ".join(f"{key} {value}" for key, value in kind.items())
        yield name, layer, experts, None if is_sorted else top_k
        if kind == {"n_masks": 4}:
            yield (
                f"{name}, batch invariant",
                replace(layer, batch_invariant=True),
                experts,
                None if is_sorted else top_k,
            )


def layer_record(recorder: RecordingDriver, call: Call, gpu: Gpu) -> str:
    """Return all that the driver sees for a call of `mglu::forward`."""
    return _plan_record(recorder, quantize_x.plan(choose(call, gpu).config, call, gpu))


def training_record(recorder: RecordingDriver, call: Call, gpu: Gpu) -> str:
    """Return all that the driver sees for `mglu::forward_train`; empty if `tile_wgmma` cannot run it."""
    config = training_choice(call, gpu)
    return "" if config is None else _plan_record(recorder, config.plan(call, gpu))


def experts_record(recorder: RecordingDriver, call: Call, gpu: Gpu) -> str:
    """Return all that the driver sees for `mglu::experts_forward` or `mglu::grouped_forward`."""
    launch = choose_experts(call, gpu)
    return launch.violation(call, gpu) or _plan_record(recorder, launch.plan(call, gpu))


def experts_training_record(recorder: RecordingDriver, call: Call, gpu: Gpu) -> str:
    """Return all that the driver sees for `mglu::grouped_forward_train`; empty if `tile_wgmma` cannot run it."""
    launch = training_items(call, gpu)
    return "" if launch is None else _plan_record(recorder, launch.plan(call, gpu))


def down_record(recorder: RecordingDriver, call: Call, gpu: Gpu) -> str:
    """Return all that the driver sees for `mglu::experts_down`."""
    if (problem := experts_down.unsupported_reason(call, gpu)) is not None:
        return problem
    config = experts_down.launch_for(call, gpu)
    steps = experts_down.library_steps(call, gpu) if config is None else experts_down.plan(config, call, gpu)
    recorder.begin(f"{config} {0 if config is None else config.pair_bytes(call)}")
    for step in steps:
        if step is not None:
            step.load(0)(0, ADDRESSES)
    return "\n".join(recorder.lines)


def _plan_record(recorder: RecordingDriver, plan: Plan) -> str:
    sequence = load(plan, 0)
    recorder.begin(f"workspace {sequence.workspace_bytes}")
    sequence(0, ADDRESSES, WORKSPACE)
    return "\n".join(recorder.lines)


def records(gpu_name: str) -> dict[str, str]:
    """Map the names of all layers to digests of their launches on a GPU."""
    gpu, texts = GPUS[gpu_name], {}
    with recording() as recorder:

        def digest(name: str, parts: Iterable[str]) -> None:
            texts[f"{gpu_name}: {name}"] = hashlib.sha256("\n\n".join(parts).encode()).hexdigest()[:16]

        for name, layer in layers():
            calls = [replace(layer, leading=(tokens,)) for tokens in TOKENS]
            digest(name, (layer_record(recorder, call, gpu) for call in calls))
            if gpu.arch == (9, 0) and layer.weight.format.is_dense and layer.dtype is not torch.float32:
                digest(f"{name}, training", (training_record(recorder, call, gpu) for call in calls))
        for name, layer, experts, top_k in mixtures():
            mixed = [layer.over_experts(experts, tokens, top_k) for tokens in TOKENS]
            digest(name, (experts_record(recorder, call, gpu) for call in mixed))
            is_dense = layer.weight.format.is_dense and layer.activation_format == "dense"
            if top_k is None and is_dense and layer.dtype is not torch.float32:
                digest(f"{name}, training", (experts_training_record(recorder, call, gpu) for call in mixed))
            elif top_k is not None and layer.activation_format == "dense":
                down = replace(layer, n_masks=0, activation="identity", mask_weights_dtype=None)
                downs = [down.over_experts(experts, tokens, top_k, torch.float32) for tokens in TOKENS]
                digest(f"{name}, down", (down_record(recorder, call, gpu) for call in downs))
    return texts


@pytest.mark.parametrize("gpu", quick_only_for(["sm_90"], list(GPUS)))
def test_launches_are_the_recorded_ones(gpu: str) -> None:
    found = records(gpu)
    lines = dict(line.rsplit("  ", 1) for line in RECORD.read_text().splitlines()) if RECORD.is_file() else {}
    if os.environ.get("MGLU_RECORD_LAUNCHES") == "1":
        lines |= found
        RECORD.write_text("".join(f"{name}  {digest}\n" for name, digest in sorted(lines.items())))
    expected = {name: digest for name, digest in lines.items() if name.startswith(f"{gpu}: ")}
    assert found == expected
