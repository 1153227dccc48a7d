"""The CUDA kernels that are put into `libmglu_ops.so`: compiled for the layers of packages, for chosen GPUs.

`backends.cuda.choice` chooses the launch of every number of tokens. The table written here holds its choices, and C++
looks them up.
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

from ..activations import ACTIVATIONS
from ..backends.cuda import Plain, TileWgmma
from ..backends.cuda.choice import choose
from ..backends.cuda.compiler import CompileError, compile_cubin, source_directory
from ..backends.cuda.device import Gpu, gpu_of_architecture
from ..backends.cuda.kernels import permute_x
from ..backends.cuda.kernels.base import ELEMENTS
from ..layer_call import LayerCall
from .package import LayerInfo, PackageError, read_info

TABLE = "mglu_kernels.inc"
"""The file that `csrc/library/cuda/kernels.cpp` includes."""

MOST_TOKENS = 512
"""The most tokens of one launch (kMostTokens of csrc/library/cuda/launch.cpp). More tokens take several launches."""


def write(folder: Path, archs: Sequence[str], packages: Sequence[str | Path]) -> None:
    """Compile the kernels of the layers of `packages` for `archs`, and write them and their table to `folder`.

    Raises:
        ValueError: an architecture is not of the form sm_90, or unknown, or one of the two lists is empty and the other
            is not.
        PackageError: a package is damaged, or for a CPU.
        CompileError: neither NVRTC nor nvcc is here, or a kernel was refused.
    """
    if bool(archs) != bool(packages):
        raise ValueError("kernels are compiled for an architecture and for a package's layers: give both")
    if not archs:
        return
    gpus = [gpu_of_architecture(_capability(arch)) for arch in archs]
    layers = list(dict.fromkeys(layer for package in packages for layer in _layers(package)))
    cubins = _Cubins(folder)
    tuned = [line for gpu in gpus for layer in layers for line in _tuned(layer, gpu, cubins)]
    kinds = {replace(layer, out_features=0, in_features=0) for layer in layers}
    plain = [line for gpu in gpus for kind in kinds for line in _plain(kind, gpu, cubins)]
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


def _call(layer: LayerInfo, tokens: int) -> LayerCall:
    """A call of contiguous, aligned tensors, which the library's tuned launches are for. It copies an x that is not."""
    return LayerCall.contiguous(
        torch.device("cuda"),
        getattr(torch, layer.dtype),
        layer.n_masks,
        tokens,
        layer.out_features,
        layer.in_features,
        layer.activation,
        None if layer.route_dtype is None else getattr(torch, layer.route_dtype),
    )


def _variant(call: LayerCall, gpu: Gpu) -> str:
    route = -1 if call.route_dtype is None else ELEMENTS[call.route_dtype]
    arch = 10 * gpu.arch[0] + gpu.arch[1]
    numbers = arch, ELEMENTS[call.dtype], call.n_masks, ACTIVATIONS[call.activation].code, route
    return f"{{{', '.join(map(str, numbers))}}}"


def _tuned(layer: LayerInfo, gpu: Gpu, cubins: _Cubins) -> Iterator[str]:
    """A line for each run of numbers of tokens that are launched alike."""
    for (first, last), entry in _runs(range(1, MOST_TOKENS + 1), lambda tokens: _launch(layer, gpu, tokens, cubins)):
        if entry is not None:
            shape = f"{layer.out_features}, {layer.in_features}, {first}, {last}"
            yield f"{{{_variant(_call(layer, first), gpu)}, {shape}, {entry}}}"


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


def _launch(layer: LayerInfo, gpu: Gpu, tokens: int, cubins: _Cubins) -> str | None:
    """The kernel, the geometry and the permutation of a launch; None where the plain kernel is the choice."""
    call = _call(layer, tokens)
    config = choose(call, gpu).config
    if isinstance(config, Plain):
        return None
    target = config.target(gpu)
    kernel = cubins.index(config.kernel, target, config.macros(call))
    grid = config.grid(call, gpu)
    overlap = "true" if gpu.arch >= (9, 0) else "false"
    geometry = f"{{{grid[0]}, {grid[1]}, {config.threads}, {config.requested_shared_bytes(call, gpu)}, {overlap}}}"
    permute, boxes = "{-1, 0, 0}", "{0, 0, 0, false}"
    if isinstance(config, TileWgmma):
        if config.permuted:
            tile = config.block_tokens, config.sub
            cubin = cubins.index(permute_x.NAME, target, permute_x.macros(*tile))
            permute = f"{{{cubin}, {permute_x.blocks(call, *tile)}, {permute_x.copy_bytes(call, *tile)}}}"
        _, weight, masks = config.matrices(call)
        mask_box = "0, false" if masks is None else f"{masks.box_width}, {str(masks.swizzle).lower()}"
        boxes = f"{{{config.block_tokens}, {weight.box_height}, {mask_box}}}"
    return f"{kernel}, {geometry}, {permute}, {boxes}"


def _plain(kind: LayerInfo, gpu: Gpu, cubins: _Cubins) -> Iterator[str]:
    for tokens in (1, 4):
        call, config = _call(kind, tokens), Plain(block_tokens=tokens)
        index = cubins.index(config.kernel, config.target(gpu), config.macros(call))
        yield f"{{{_variant(call, gpu)}, {tokens}, {index}}}"
