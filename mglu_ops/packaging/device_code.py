"""Compiles CUDA kernels into `libmglu_ops.so`, for the layers of packages and for chosen GPU architectures.

`backends.cuda.choice` chooses the launch for every number of tokens. This module writes the choices to a table in which
C++ looks them up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ..activations import ACTIVATIONS
from ..backends.cuda import DecodeMma, Plain, TileWgmma
from ..backends.cuda.choice import choose, choose_experts
from ..backends.cuda.compiler import compile_cubin
from ..backends.cuda.device import Gpu, gpu_of_architecture
from ..backends.cuda.kernels import decode_weight, experts_down, group_tokens, permute_x, quantize_x
from ..backends.cuda.kernels.base import ELEMENTS, LaunchConfig
from ..backends.cuda.kernels.tile_experts import TileItems
from ..call import Call
from ..sizes import ceil_div
from .package import LayerInfo, read_info
from .seal import PackageError

TABLE = "mglu_kernels.inc"
"""The file that `csrc/library/cuda/kernels.cpp` includes."""

MAX_TOKENS = 512
"""The most tokens of one launch without experts (kMaxTokens in csrc/library/cuda/launch.cpp)."""

_MANY_SMS = 1 << 30
"""A number of SMs that limits no grid. C++ limits the grid of a persistent kernel to the SMs of its GPU instead."""


def write(folder: Path, archs: Sequence[str], packages: Sequence[str | Path]) -> None:
    """Compile the kernels of the layers of `packages` for `archs`, and write them and their table to `folder`.

    Raises:
        ValueError: an architecture is not of the form sm_90, or unknown, or one of the two lists is empty.
        PackageError: a package is damaged or for a CPU, or no kernel takes one of its calls of `mglu::experts_down`.
        CompileError: neither NVRTC nor nvcc was found, or a kernel does not compile.
    """
    if not (archs and packages):
        raise ValueError("kernels are compiled for an architecture and for a package's layers: give both")
    gpus = [gpu_of_architecture(capability(arch)) for arch in archs]
    layers = list(dict.fromkeys(layer for package in packages for layer in _layers(package)))
    cubins = _Cubins(folder)
    tuned = [line for gpu in gpus for layer in layers for line in _tuned(layer, gpu, cubins)]
    kinds = {replace(layer, out_features=0, in_features=0) for layer in layers if not layer.experts}
    plain = [line for gpu in gpus for kind in kinds for line in _plain(kind, gpu, cubins)]
    tables = {"Cubin kCubins": cubins.lines, "TunedLaunch kTuned": tuned, "PlainKernel kPlain": plain}
    text = [*cubins.embedded, "namespace mglu::cuda {"]
    for name, lines in tables.items():
        text += [f"constexpr {name}[] = {{", *(f"    {line}," for line in lines), "    {}};"]
    (folder / TABLE).write_text("\n".join([*text, "}  // namespace mglu::cuda", ""]))


def capability(arch: str) -> tuple[int, int]:
    """The compute capability of an architecture such as `sm_90`. Raises ValueError if it has another form."""
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
    """Compiles kernels into a folder, each once, and numbers them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.embedded: list[str] = []
        self.lines: list[str] = []
        self._found: dict[tuple[Any, ...], int] = {}

    def index(self, kernel: str, target: str, defines: dict[str, int]) -> int:
        key = (kernel, target, *sorted(defines.items()))
        if key not in self._found:
            number = self._found[key] = len(self._found)
            (self.folder / f"{number}.cubin").write_bytes(compile_cubin(kernel, target, defines))
            self.embedded.append(f'MGLU_EMBED(mglu_cubin_{number}, "{number}.cubin");')
            self.lines.append(_row(kernel=f'"mglu_{kernel}"', code=f"mglu_cubin_{number}"))
        return self._found[key]

    def indices(self, sources: Sequence[tuple[str, str, dict[str, int]]]) -> dict[str, int]:
        """Map the names of kernels, given as `(kernel, target, macros)`, to their numbers."""
        return {kernel: self.index(kernel, target, macros) for kernel, target, macros in sources}


# --- Tables ---------------------------------------------------------------------------------------------------------


def _call(layer: LayerInfo, tokens: int) -> Call:
    """A call with contiguous tensors, as the tuned launches need them. The library copies an x with other strides."""
    return layer.call(torch.device("cuda"), tokens)


def _row(**fields: object) -> str:
    """A C++ initializer with named fields, in the order in which csrc/library/cuda/kernels.h declares them.

    Omitted fields get their default values.
    """
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in fields.items()}
    return f"{{{', '.join(f'.{name} = {text}' for name, text in texts.items())}}}"


def _variant(call: Call, gpu: Gpu) -> str:
    weights = call.mask_weights_dtype or (call.routing.expert_weights_dtype if call.routing else None)
    return _row(
        arch=10 * gpu.arch[0] + gpu.arch[1],
        element=ELEMENTS[call.dtype],
        weight_format=call.weight.format.code,
        rounds_x=call.activation_format != "dense",
        n_masks=call.n_masks,
        activation=ACTIVATIONS[call.activation].code,
        mask_weight=-1 if weights is None else ELEMENTS[weights],
    )


def _tuned(layer: LayerInfo, gpu: Gpu, cubins: _Cubins) -> Iterator[str]:
    """Yield a row for each range of numbers of tokens with the same launch.

    Launches are chosen for some numbers of tokens. Other numbers take the launch of the next larger one.
    """
    launch_of = _launch if not layer.experts else _expert_launch if layer.n_masks else _down_launch
    first = 1
    for launch, run in groupby(_chosen_tokens(layer), lambda tokens: launch_of(layer, gpu, tokens, cubins)):
        last = list(run)[-1]
        if launch is not None:
            yield _row(
                variant=_variant(_call(layer, 1), gpu),
                out_features=layer.out_features,
                in_features=layer.in_features,
                first_tokens=first,
                last_tokens=last,
                **launch,
            )
        first = last + 1


def _chosen_tokens(layer: LayerInfo) -> list[int]:
    """The numbers of tokens for which launches are chosen: each up to 512, and for experts powers of two above that."""
    if not layer.experts:
        return list(range(1, MAX_TOKENS + 1))
    most = (group_tokens.MOST_ROWS if layer.n_masks else experts_down.MOST_ROWS) // max(layer.top_k, 1)
    powers = (1 << bits for bits in range(10, 21))
    return sorted(tokens for tokens in {*range(1, MAX_TOKENS + 1), *powers, most} if tokens <= most)


def _launch(layer: LayerInfo, gpu: Gpu, tokens: int, cubins: _Cubins) -> dict[str, object] | None:
    """The launch-dependent fields of a `TunedLaunch`; None if the plain kernel is chosen.

    The fields are the same for every GPU of an architecture. C++ adapts them to the GPU's number of SMs and shared
    memory.
    """
    call = _call(layer, tokens)
    config = choose(call, gpu).config
    if isinstance(config, Plain):
        return None
    target = config.target(gpu)
    tile_tokens = config.block_tokens if isinstance(config, TileWgmma) and config.fp8 else 0
    kernel = cubins.index(config.kernel, target, config.macros(call))
    decode = permute = _row(cubin=-1, blocks=0, bytes=0)
    if isinstance(config, TileWgmma):
        if config.decoded:
            cubin = cubins.index(decode_weight.NAME, target, decode_weight.macros(call))
            decode = _row(cubin=cubin, blocks=decode_weight.blocks(call), bytes=decode_weight.copy_bytes(call))
        if config.permuted:
            tile = config.block_tokens, config.sub
            cubin = cubins.index(permute_x.NAME, target, permute_x.macros(*tile))
            permute = _row(cubin=cubin, blocks=permute_x.blocks(call, *tile), bytes=permute_x.copy_bytes(call, *tile))
    return {
        "cubin": kernel,
        "blocks": config.grid(call, replace(gpu, multiprocessors=_MANY_SMS))[0],
        **_settings(config, call, gpu),
        "quantize_x": _row(cubin=_quantize_x(call, target, tile_tokens, cubins), block_tokens=tile_tokens),
        "decode_weight": decode,
        "permute_x": permute,
        "boxes": _boxes(config, call),
    }


def _settings(config: LaunchConfig, call: Call, gpu: Gpu) -> dict[str, object]:
    """The fields of a `TunedLaunch` from `cluster` to `overlap`."""
    return {
        "cluster": config.cluster if isinstance(config, (DecodeMma, TileWgmma)) else 1,
        "persistent": isinstance(config, TileWgmma),
        "threads": config.threads,
        "shared_bytes": config.shared_bytes(call),
        "blocks_per_sm": config.blocks_per_sm if isinstance(config, DecodeMma) else 0,
        "overlap": config.overlaps and gpu.arch >= (9, 0),
    }


def _boxes(config: LaunchConfig, call: Call) -> str:
    """The `Boxes` of a launch."""
    if not isinstance(config, TileWgmma):
        return _row(tokens=0, rows=0, weight_item_bytes=0, weight_columns=0, mask_bytes=0, swizzle_masks=False)
    _, weight, masks = config.matrices(call)
    return _row(
        tokens=config.block_tokens,
        rows=weight.box_height,
        weight_item_bytes=weight.item,
        weight_columns=weight.box_width,
        mask_bytes=0 if masks is None else masks.box_width,
        swizzle_masks=masks is not None and masks.swizzle,
    )


def _expert_launch(layer: LayerInfo, gpu: Gpu, tokens: int, cubins: _Cubins) -> dict[str, object]:
    """The same fields for a layer of experts."""
    call = layer.call(torch.device("cuda"), tokens)
    launch = choose_experts(call, gpu)
    config, item = launch.config, launch.of_item(call)
    kernels = cubins.indices(launch.sources(call, gpu))
    gather, columns, fp8_tokens = -1, 0, 0
    if isinstance(launch, TileItems):
        fp8_tokens = launch.config.block_tokens if launch.config.fp8 else 0
        gather, columns = kernels.pop(quantize_x.NAME if fp8_tokens else permute_x.NAME), launch.columns(call)
    items = group_tokens.max_items(call, launch.item_rows) if launch.grouped else call.tokens
    return {
        "cubin": kernels[config.kernel],
        "blocks": launch.grid(call, replace(gpu, multiprocessors=_MANY_SMS))[0] // items,
        **_settings(config, item, gpu),
        "quantize_x": _row(cubin=kernels.get(quantize_x.NAME, -1), block_tokens=fp8_tokens),
        "boxes": _boxes(config, item),
        "items": _row(
            experts=layer.experts,
            top_k=layer.top_k,
            rows=launch.item_rows,
            group_tokens=kernels.get(group_tokens.NAME, -1),
            gather=gather,
            columns=columns,
        ),
    }


def _down_launch(layer: LayerInfo, gpu: Gpu, tokens: int, cubins: _Cubins) -> dict[str, object] | None:
    """The launch-dependent fields for `mglu::experts_down`; None if shared memory cannot hold the sorted rows.

    For many rows per expert, Python uses `grouped_mm` instead (`experts_down.uses_library`), but C++ does not.
    """
    call = layer.call(torch.device("cuda"), tokens)
    if tokens == 1 and (problem := experts_down.unsupported_reason(call, gpu)):
        shape = [layer.experts, layer.out_features, layer.in_features]
        raise PackageError(f"mglu::experts_down of a weight {shape} has no kernel for the library: {problem}")
    config = experts_down.choose(call, gpu)
    if config is None:
        return None
    kernels = cubins.indices(experts_down.sources(config, call, gpu))
    return {
        "cubin": kernels[experts_down.NAME],
        "blocks": ceil_div(layer.out_features, config.rows) * config.parts,
        "cluster": 1,
        "persistent": config.block_tokens > 1,
        "threads": config.threads,
        "shared_bytes": config.shared_bytes(call) - config.order_bytes(call),
        "blocks_per_sm": config.blocks_per_sm,
        "overlap": gpu.arch >= (9, 0),
        "items": _row(
            experts=layer.experts,
            top_k=layer.top_k,
            rows=config.block_tokens,
            combine=kernels.get(experts_down.COMBINE, -1),
            pair_bytes=config.pair_bytes(call),
        ),
    }


def _quantize_x(call: Call, target: str, block_tokens: int, cubins: _Cubins) -> int:
    """The number of the cubin that rounds x: to tiles of `block_tokens` tokens in fp8, or with 0 to x's dtype.

    The kernel writes tiles of `block_tokens` tokens in fp8. If `block_tokens` is 0, it writes rounded values in x's
    dtype.
    """
    if call.activation_format == "dense":
        return -1
    return cubins.index(quantize_x.NAME, target, quantize_x.macros(call, block_tokens))


def _plain(kind: LayerInfo, gpu: Gpu, cubins: _Cubins) -> Iterator[str]:
    for tokens in (1, 4):
        call, config = _call(kind, tokens), Plain(block_tokens=tokens)
        index = cubins.index(config.kernel, config.target(gpu), config.macros(call))
        quantize = _quantize_x(call, config.target(gpu), 0, cubins)
        yield _row(variant=_variant(call, gpu), tokens=tokens, cubin=index, quantize_x=quantize)
