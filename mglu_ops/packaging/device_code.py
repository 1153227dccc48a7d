"""The CUDA kernels that are put into `libmglu_ops.so`: compiled for the layers of packages, for chosen GPUs.

A launch is chosen by `backends.cuda.choice`, which is the one place for that: the table written here is what it says
for each number of tokens, and C++ looks it up.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..backends.cuda import plan
from ..backends.cuda.compiler import CompileError, compile_cubin, source_directory
from ..backends.cuda.config import LaunchConfig
from .package import LayerInfo, PackageError, read_info

TABLE = "mglu_kernels.inc"
"""What `csrc/library/cuda/kernels.cpp` includes."""

MOST_TOKENS = 512
"""Of a launch (csrc/library/cuda/launch.cpp, kMostTokens): more go in several."""

_DEVICE, _MULTIPROCESSORS = "NVIDIA H200", 132
"""The GPU that launches are chosen for. Blocks walk over what others leave, so others are served too."""


def write(folder: Path, archs: Sequence[str], packages: Sequence[str | Path]) -> None:
    """Compile the kernels of the layers of `packages` for `archs`, and write them and their table to `folder`.

    Raises:
        ValueError: an architecture is not of the form sm_90, or one of the two lists is empty and the other is not.
        PackageError: a package is damaged, or for a CPU.
        CompileError: neither NVRTC nor nvcc is here, or a kernel was refused.
    """
    if bool(archs) != bool(packages):
        raise ValueError("kernels are compiled for an architecture and for a package's layers: give both")
    if not archs:
        return
    capabilities = [_capability(arch) for arch in archs]
    layers = list(dict.fromkeys(layer for package in packages for layer in _layers(package)))
    cubins = _Cubins(folder)
    tuned = [line for arch in capabilities for layer in layers for line in _tuned(layer, arch, cubins)]
    kinds = {replace(layer, out_features=0, in_features=0) for layer in layers}
    plain = [line for arch in capabilities for kind in kinds for line in _plain(kind, arch, cubins)]
    tables = {"Cubin kCubins": cubins.lines, "TunedLaunch kTuned": tuned, "PlainKernel kPlain": plain}
    text = [*cubins.embedded, "namespace mglu::cuda {"]
    for name, lines in tables.items():
        text += [f"constexpr {name}[] = {{", *(f"    {line}," for line in lines), "    {}};"]
    (folder / TABLE).write_text("\n".join([*text, "}  // namespace mglu::cuda", ""]))


def _capability(arch: str) -> tuple[int, int]:
    match = re.fullmatch(r"sm_(\d+)(\d)", arch)
    if match is None:
        raise ValueError(f"arch: got {arch!r}, must be of the form sm_90")
    return int(match[1]), int(match[2])


def _layers(package: str | Path) -> list[LayerInfo]:
    info = read_info(package)
    if info.device != "cuda" or info.backend != "cuda":
        raise PackageError(f"{package} does not call the library on a GPU (backend {info.backend})")
    return info.layers


class _Cubins:
    """Compiled kernels in a folder, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.embedded: list[str] = []
        self.lines: list[str] = []
        self._found: dict[tuple[Any, ...], int] = {}

    def index(self, kernel: str, target: str, defines: dict[str, int]) -> int:
        key = (kernel, target, *sorted(defines.items()))
        if key not in self._found:
            number = self._found[key] = len(self._found)
            (self.folder / f"{number}.cubin").write_bytes(_compile(kernel, target, defines))
            self.embedded.append(f'MGLU_EMBED(mglu_cubin_{number}, "{number}.cubin");')
            self.lines.append(f'{{"mglu_{kernel}", mglu_cubin_{number}}}')
        return self._found[key]


def _compile(kernel: str, arch: str, defines: dict[str, int]) -> bytes:
    """With NVRTC where cuda-core is installed, else with nvcc."""
    try:
        return compile_cubin(kernel, arch, defines)
    except ImportError:
        nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise CompileError("kernels need NVRTC (pip install mglu-ops[cuda]) or nvcc, and neither is here")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        macros = [f"-D{name}={value}" for name, value in defines.items()]
        source = source_directory() / f"{kernel}.cu"
        command = [nvcc, "-cubin", "-std=c++17", f"-arch={arch}", *macros, str(source), "-o", str(cubin)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode != 0:
            raise CompileError(f"nvcc could not compile {kernel}.cu for {arch} with {defines}:\n{process.stderr}")
        return cubin.read_bytes()


# --- Tables ---------------------------------------------------------------------------------------------------------


def _problem(layer: LayerInfo, arch: tuple[int, int], tokens: int) -> plan.Problem:
    """Of contiguous, aligned tensors, which the library's tuned launches are for. An x that is not, it copies."""
    length = layer.in_features // 8 * layer.n_masks
    return plan.Problem(
        arch=arch,
        dtype=getattr(torch, layer.dtype),
        n_masks=layer.n_masks,
        tokens=tokens,
        out_features=layer.out_features,
        in_features=layer.in_features,
        activation=layer.activation,
        route_dtype=None if layer.route_dtype is None else getattr(torch, layer.route_dtype),
        weight_aligned=layer.in_features % 8 == 0,
        mask_alignment=next(size for size in (16, 8, 4, 1) if length % size == 0),
        x_vectorizable=True,
        strides=(layer.in_features, 1, *(0,) * 7),
        multiprocessors=_MULTIPROCESSORS,
        device=_DEVICE,
    )


def _variant(problem: plan.Problem) -> str:
    route = -1 if problem.route_dtype is None else plan.ELEMENTS[problem.route_dtype]
    numbers = (
        10 * problem.arch[0] + problem.arch[1],
        plan.ELEMENTS[problem.dtype],
        problem.n_masks,
        plan.ACTIVATIONS[problem.activation],
        route,
    )
    return f"{{{', '.join(map(str, numbers))}}}"


def _tuned(layer: LayerInfo, arch: tuple[int, int], cubins: _Cubins) -> Iterator[str]:
    """A line for each run of numbers of tokens that are launched alike."""
    for (first, last), entry in _runs(range(1, MOST_TOKENS + 1), lambda tokens: _launch(layer, arch, tokens, cubins)):
        if entry is not None:
            shape = f"{layer.out_features}, {layer.in_features}, {first}, {last}"
            yield f"{{{_variant(_problem(layer, arch, first))}, {shape}, {entry}}}"


def _runs(numbers: Iterable[int], value: Any) -> Iterator[tuple[tuple[int, int], Any]]:
    """`((first, last), value)` for each run of neighbours of one value."""
    run: tuple[int, int] | None = None
    held: Any = None
    for number in numbers:
        current = value(number)
        if run is not None and current == held:
            run = (run[0], number)
            continue
        if run is not None:
            yield run, held
        run, held = (number, number), current
    if run is not None:
        yield run, held


def _launch(layer: LayerInfo, arch: tuple[int, int], tokens: int, cubins: _Cubins) -> str | None:
    """The kernel, the geometry and the turn of a launch; None where the plain kernel is the choice."""
    problem = _problem(layer, arch, tokens)
    config = plan.choice(problem)
    if config.kernel == "plain":
        return None
    target = plan.target(arch, config)
    kernel = cubins.index(config.kernel, target, plan.defines(problem, config))
    grid = config.grid(tokens, layer.out_features, _MULTIPROCESSORS)
    shared = config.reserved_bytes(arch, layer.n_masks, tokens, layer.in_features)
    overlap = "true" if arch >= (9, 0) else "false"
    geometry = f"{{{grid[0]}, {grid[1]}, {config.threads}, {shared}, {overlap}}}"
    turn, boxes = "{-1, 0, 0}", "{0, 0, 0, false}"
    if config.turned:
        cubin = cubins.index("permute_x", target, plan.turn_defines(config))
        size = tokens, layer.in_features
        turn = f"{{{cubin}, {config.turn_blocks(*size)}, {config.turned_bytes(*size)}}}"
    if config.kernel == "tile_wgmma":
        _, weight, masks = plan.matrices(problem, config)
        mask_box = "0, false" if masks is None else f"{masks.box_width}, {str(masks.swizzle).lower()}"
        boxes = f"{{{config.block_tokens}, {weight.box_height}, {mask_box}}}"
    return f"{kernel}, {geometry}, {turn}, {boxes}"


def _plain(kind: LayerInfo, arch: tuple[int, int], cubins: _Cubins) -> Iterator[str]:
    for tokens in (1, 4):
        problem = _problem(kind, arch, tokens)
        config = LaunchConfig("plain", block_tokens=tokens)
        index = cubins.index("plain", plan.target(arch, config), plan.defines(problem, config))
        yield f"{{{_variant(problem)}, {tokens}, {index}}}"
