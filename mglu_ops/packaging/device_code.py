"""Compiles CUDA kernels into `libmglu_ops.so`, for the layers of packages and for chosen GPU architectures.

`backends.cuda.plans` makes the plans of a layer. This module compiles their kernels, and writes the plans as tables in
C++.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ..activations import ACTIVATIONS
from ..backends.cuda.compiler import compile_cubin
from ..backends.cuda.device import Gpu, gpu_of_architecture
from ..backends.cuda.kernels.base import ELEMENTS
from ..backends.cuda.launch import Plan, Source, Step, parameters
from ..backends.cuda.plans import (
    MOST_EXPERT_ROWS,
    MOST_EXPERTS,
    AnyLayerPlan,
    any_layer_plans,
    layer_plans,
    plans_for_any_shape,
)
from ..backends.cuda.tensor_map import Matrix
from ..call import Call
from ..sizes import Size, text
from .package import LayerInfo, read_info
from .seal import PackageError

TABLE = "mglu_plans.inc"
"""The file that `csrc/library/cuda/plan.cpp` includes."""


def write(folder: Path, archs: Sequence[str], packages: Sequence[str | Path]) -> None:
    """Compile the kernels of the layers of `packages` for `archs`, and write them and their plans to `folder`.

    Raises:
        ValueError: an architecture is not of the form sm_90, or unknown, or one of the two lists is empty.
        PackageError: a package is damaged or for a CPU, or no kernel takes one of its calls of `mglu::experts_down`.
        CompileError: neither NVRTC nor nvcc was found, or a kernel does not compile.
    """
    if not (archs and packages):
        raise ValueError("kernels are compiled for an architecture and for a package's layers: give both")
    gpus = [gpu_of_architecture(capability(arch)) for arch in archs]
    layers = list(dict.fromkeys(layer for package in packages for layer in _layers(package)))
    table = _Table(folder)
    rows = [row for gpu in gpus for layer in layers for row in _rows(layer, gpu, table)]
    kinds = {replace(layer, out_features=0, in_features=0) for layer in layers if not layer.experts}
    rows += [row for gpu in gpus for kind in kinds for row in _rows_of_any_shape(kind, gpu, table)]
    (folder / TABLE).write_text(table.text("of_packages", rows))


def plans_of_any_layer() -> str:
    """The text of `csrc/library/cuda/any_layer.inc`, the plans for layers that a library was not built for."""
    table = _Table(None)
    rows = [_row_of_any_shape(found, _row(rounds_x=found.rounds_x), table) for found in any_layer_plans()]
    limits = f"constexpr std::int64_t kMostExperts = {MOST_EXPERTS}, kMostRows = {MOST_EXPERT_ROWS};"
    return table.text("of_any_layer", rows, limits)


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


# --- Rows of the table -----------------------------------------------------------------------------------------------


def _rows(layer: LayerInfo, gpu: Gpu, table: _Table) -> Iterator[str]:
    """Yield the row of the table for each plan of a layer."""
    # The plans need contiguous tensors. C++ copies an x with other strides.
    call_of = partial(layer.call, torch.device("cuda"))
    try:
        for found in layer_plans(call_of, gpu):
            yield _row(
                variant=_variant(call_of(1), gpu),
                out_features=layer.out_features,
                in_features=layer.in_features,
                experts=layer.experts,
                top_k=layer.top_k,
                first_rows=found.first_rows,
                last_rows=found.last_rows,
                steps=table.steps(found.plan),
            )
    except ValueError as error:
        shape = [layer.experts, layer.out_features, layer.in_features]
        raise PackageError(f"mglu::experts_down of a weight {shape} has no kernel for the library: {error}") from error


def _rows_of_any_shape(kind: LayerInfo, gpu: Gpu, table: _Table) -> Iterator[str]:
    """Yield the rows of the table for layers that differ only in shape from a layer of a package."""
    call = replace(kind, out_features=64, in_features=64).call(torch.device("cuda"), 1)
    for found in plans_for_any_shape(call, gpu, has_experts=False, is_sorted=False):
        yield _row_of_any_shape(found, _variant(call, gpu), table)


def _row_of_any_shape(found: AnyLayerPlan, variant: str, table: _Table) -> str:
    return _row(
        variant=variant,
        experts=-1 if found.has_experts else 0,
        top_k=-1 if found.has_experts and not found.is_sorted else 0,
        first_rows=found.first_rows,
        last_rows=found.last_rows,
        steps=table.steps(found.plan),
    )


def _variant(call: Call, gpu: Gpu) -> str:
    weights = call.mask_weights_dtype or (call.routing.expert_weights_dtype if call.routing else None)
    return _row(
        arch=10 * gpu.arch[0] + gpu.arch[1],
        element=ELEMENTS[call.dtype],
        weight_format=call.weight.format.code,
        rounds_x=call.activation_format != "dense",
        n_masks=call.n_masks,
        activation=ACTIVATIONS[call.activation].code,
        mask_weights=-1 if weights is None else ELEMENTS[weights],
    )


def _row(**fields: object) -> str:
    """Return a C++ initializer with these fields, which must be in the order of their declarations in plan.h.

    Omitted fields get their default values.
    """
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in fields.items()}
    return f"{{{', '.join(f'.{name} = {value}' for name, value in texts.items())}}}"


# --- C++ declarations ------------------------------------------------------------------------------------------------


class _Table:
    """The C++ declarations of plans: cubins, functions that evaluate sizes, and arrays. Equal ones are written once."""

    def __init__(self, folder: Path | None) -> None:
        """Cubins are written to `folder`, which is None if the C++ library compiles the kernels of all steps."""
        self._folder = folder
        self._embedded: list[str] = []
        self._declared: dict[str, str] = {}
        self._cubins: dict[tuple[object, ...], str] = {}

    def text(self, name: str, rows: Sequence[str], *more: str) -> str:
        """Return the file's text: a table of plans in the namespace `name`, which ends with an empty row."""
        declarations = [template.replace("@", symbol) for template, symbol in self._declared.items()]
        lines = [*self._embedded, f"namespace mglu::cuda::{name} {{", *more, *declarations]
        lines += ["constexpr Plan kPlans[] = {", *(f"    {row}," for row in rows), "    {}};"]
        return "\n".join([*lines, f"}}  // namespace mglu::cuda::{name}", ""])

    def steps(self, plan: Plan) -> str:
        return self._array("Step", map(self._step, plan))

    def _step(self, step: Step) -> str:
        fields = parameters("params.cuh", step.struct)
        items = {} if step.items is None else {"items": self._struct("ItemParams", step.items)}
        macros = [] if step.target else [(name, self._size(value)) for name, value in sorted(step.macros.items())]
        maps = [self._map(name, matrix) for entry in step.maps for name, matrix in entry.items()]
        return _row(
            kernel=_quoted(f"mglu_{step.kernel}"),
            source=_quoted(f"{step.kernel}.cu"),
            code=self._cubin(step.source) if step.target else "nullptr",
            macros=self._array("Macro", (f"{{{_quoted(name)}, {value}}}" for name, value in macros)),
            grid_x=self._size(step.grid[0]),
            grid_y=self._size(step.grid[1]),
            threads=int(step.threads),
            shared_bytes=self._size(step.shared),
            overlap=step.overlap,
            parameters=self._struct(step.struct, step.integers),
            **items,
            unused_maps=len(fields.maps) - len(maps),
            maps=self._array("Map", maps),
            writes=_quoted(step.writes or ""),
            bytes=self._size(step.nbytes),
        )

    def _struct(self, name: str, integers: Mapping[str, int]) -> str:
        fields = parameters("params.cuh", name)
        return _row(
            pointers=self._array("std::string_view", map(_quoted, fields.pointers)),
            longs=self._array("Size", (self._size(integers[field]) for field in fields.longs)),
            ints=self._array("Size", (self._size(integers[field]) for field in fields.ints)),
        )

    def _map(self, name: str, matrix: Matrix | None) -> str:
        if matrix is None:
            return "{}"
        sizes = ("width", "height", "pitch", "box_width", "box_height")
        return _row(
            pointer=_quoted(name),
            item_bytes=matrix.item,
            **{size: self._size(getattr(matrix, size)) for size in sizes},
            swizzle=matrix.swizzle,
        )

    def _size(self, value: int) -> str:
        """The initializer of a `Size`: a constant, or a function of the values of a call."""
        if not isinstance(value, Size):
            return f"{{{int(value)}}}"
        expression = re.sub(r"\b[a-z]\w*\b(?!\()", r"v.\g<0>", text(value))
        return f"{{0, {self._declare('size', f'inline std::int64_t @(const Values& v) {{ return {expression}; }}')}}}"

    def _array(self, element: str, values: Iterable[str]) -> str:
        joined = ", ".join(values)
        return self._declare("array", f"constexpr {element} @[] = {{{joined}}};") if joined else "{}"

    def _declare(self, prefix: str, template: str) -> str:
        """Return the symbol of a declaration, in whose template @ stands for the symbol."""
        return self._declared.setdefault(template, f"{prefix}_{len(self._declared)}")

    def _cubin(self, source: Source) -> str:
        kernel, target, macros = source
        key = (kernel, target, *sorted(macros.items()))
        if key not in self._cubins:
            assert self._folder is not None
            number = len(self._cubins)
            symbol = self._cubins[key] = f"mglu_cubin_{number}"
            (self._folder / f"{number}.cubin").write_bytes(compile_cubin(kernel, target, macros))
            self._embedded.append(f'MGLU_EMBED({symbol}, "{number}.cubin");')
        return self._cubins[key]


def _quoted(name: str) -> str:
    return f'"{name}"'
