"""The launches of `tile_wgmma` for experts with many rows each: its tiles of tokens are items of one expert's rows.

csrc/cuda/tile_wgmma.md says how. The weights of all experts are one matrix for the kernel, and their masks another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ....expert_calls import ExpertCall
from ....layer_call import LayerCall, Layout
from ....sizes import ceil_div, round_up
from ..device import Gpu
from ..driver import KernelStruct, Launch
from ..launch import CopyLaunch, LaunchSequence, load_kernel, parameters
from ..tensor_map import Matrix, TensorMaps
from . import group_tokens, permute_x, quantize_x, tile_wgmma
from .base import integers, mask_alignment
from .experts import ExpertLaunch
from .tile_wgmma import TileWgmma
from .tile_wgmma_choice import fp8_launches, launches
from .tile_wgmma_costs import costs_of

_GATHERED_TOGETHER = 8
"""Rows of x that a warp of `permute_x` gathers."""


@dataclass(frozen=True)
class TileItems(ExpertLaunch):
    """A launch of `tile_wgmma`, whose blocks loop over tiles of rows of W and items. A cluster shares an item.

    Two launches precede it. `group_tokens` writes the items, and `permute_x`, or for products in fp8 `quantize_x`,
    gathers x in the order of experts. Each x is `[rows, columns of whole stages]`. Dense products whose columns are not
    permuted read an x that is sorted by expert without a copy.
    """

    config: TileWgmma  # type: ignore[assignment]

    @property
    def item_rows(self) -> int:
        return self.config.block_tokens * self.config.cluster

    def macros(self, call: ExpertCall) -> dict[str, int]:
        return self.config.macros(self._layer(call)) | _ITEMS

    def grid(self, call: ExpertCall, gpu: Gpu) -> tuple[int, int]:
        tiles = group_tokens.max_items(call, self.item_rows) * ceil_div(call.layer.out_features, self.config.rows)
        cluster = self.config.cluster
        return cluster * min(tiles, gpu.multiprocessors // cluster), 1

    def sources(self, call: ExpertCall, gpu: Gpu) -> list[tuple[str, str, dict[str, int]]]:
        gather = [self._gather_source(call, gpu)] if self._gathers else []
        return [*super().sources(call, gpu), *gather]

    def sequence(self, call: ExpertCall, gpu: Gpu, device: int) -> LaunchSequence:
        target, copies, layer = self.config.target(gpu), [], self._layer(call)
        if self._rounds_x_before(call):
            tokens = replace(call.layer, leading=(_tokens(call),))
            copies.append(quantize_x.copy(tokens, gpu, device, target, 0))
        copies.append(group_tokens.copy(call, gpu, device, target, self.item_rows))
        if self._gathers:
            copies.append(self._gather(call, gpu, device))
        kernel = Launch(
            load_kernel(device, self.config.kernel, target, self.macros(call)),
            self.grid(call, gpu),
            self.config.threads,
            self.config.shared_bytes(layer),
            overlap=True,
            parameters=parameters("params.cuh", "TrainingItemParams" if self.config.results(layer) else "TileParams"),
            integers=integers(layer),
            second=self._item_struct(call),
        )
        stacked = replace(layer, out_features=call.experts * call.layer.out_features)
        x, weight, masks = self.config.matrices(stacked)
        if self._gathers:
            item, columns, width = (1, 128, self.columns(call)) if self.config.fp8 else (2, 64, self.columns(call))
            height = min(self.config.block_tokens, call.rows)
            x = Matrix(item, width, call.rows, item * width, columns, height, swizzle=True)
        maps = [TensorMaps(x=x), TensorMaps(weight=weight, packed_masks=masks)]
        if results := self.config.results(layer):
            tokens_of_results = {name: replace(matrix, box_height=1) for name, matrix in results.items()}
            maps += [TensorMaps(**results), TensorMaps(**tokens_of_results)]
        return LaunchSequence(kernel, tuple(copies), tuple(maps))

    def violation(self, call: ExpertCall, gpu: Gpu) -> str | None:
        return next(self._all(call, gpu), None)

    def _all(self, call: ExpertCall, gpu: Gpu) -> Iterator[str]:
        config = self.config
        if not self.grouped:
            yield "grouped: must be True"
        if config.decoded:
            yield f"config: got {config}, must not be decoded"
        if not (self._gathers or call.is_sorted):
            yield f"config: got {config}, must be permuted, sparse or fp8, since x is not sorted"
        yield from unstacked(call)
        problem = config.violation(self._layer(call), gpu)
        if problem is not None:
            yield problem
        if call.rows >= 2**28:
            yield f"{call.rows} rows, more than the kernel's indices hold"

    def _layer(self, call: ExpertCall) -> LayerCall:
        """One expert's layer with the rows of all, as the kernel reads them."""
        layer = replace(quantize_x.as_read(self.config, call.layer), leading=(call.rows,))
        return replace(layer, x=Layout((self.columns(call), 1))) if self._gathers else layer

    @property
    def _gathers(self) -> bool:
        return self.config.permuted or self.config.sparse or self.config.fp8

    def columns(self, call: ExpertCall) -> int:
        """Columns of the gathered x."""
        return round_up(call.layer.in_features, self.config.chunk_columns * self.config.sub)

    def _item_struct(self, call: ExpertCall) -> KernelStruct:
        return KernelStruct(parameters("params.cuh", "ItemParams"), self._item_integers(call))

    def _gather_source(self, call: ExpertCall, gpu: Gpu) -> tuple[str, str, dict[str, int]]:
        target = self.config.target(gpu)
        if self.config.fp8:
            return quantize_x.NAME, target, quantize_x.macros(call.layer, 1) | _ITEMS
        settings = permute_x.macros(_GATHERED_TOGETHER, self.config.sub)
        return permute_x.NAME, target, settings | _ITEMS | {"MGLU_PERMUTED": int(self.config.permuted)}

    def _gather(self, call: ExpertCall, gpu: Gpu, device: int) -> CopyLaunch:
        columns, rows = self.columns(call), call.rows
        if self.config.fp8:  # with a scale for each row
            blocks, nbytes = rows, rows * (columns + 4)
        else:
            gathered = round_up(rows, _GATHERED_TOGETHER) * columns
            blocks, nbytes = ceil_div(gathered, permute_x.BLOCK_ELEMENTS), 2 * rows * columns
        read = replace(quantize_x.as_read(self.config, call.layer), leading=(_tokens(call),))
        launch = Launch(
            load_kernel(device, *self._gather_source(call, gpu)),
            (blocks, 1),
            256,
            0,
            overlap=True,
            parameters=parameters("params.cuh"),
            integers=integers(read) | {"tokens": rows},
            second=self._item_struct(call),
        )
        return CopyLaunch(launch, nbytes, "x")


_ITEMS = {"MGLU_ITEMS": 1}

MOST_SUMS = 128
"""Registers of a thread for sums; others hold its item."""


def _tokens(call: ExpertCall) -> int:
    """The rows of x."""
    return call.rows // (call.top_k or 1)


def unstacked(call: ExpertCall) -> Iterator[str]:
    """Yield why the weights or the masks of all experts are not one matrix."""
    layer = call.layer
    rows = call.experts * layer.out_features
    for name, stride, layout in (
        ("weight", call.weight_stride, layer.weight.layout),
        ("packed_masks", call.masks_stride, layer.masks),
    ):
        if call.experts > 1 and stride != layer.out_features * layout.strides[0]:
            yield f"{name}: got {stride} elements from one expert to the next, must be {layer.out_features} rows"
    if rows >= 2**31:
        yield f"{rows} rows of W, more than the kernel's indices hold"


def least_rows(layer: LayerCall) -> int:
    """The rows of an expert from which on the kernel is faster than `decode_mma` over items (measured with 1 and 4
    masks; csrc/cuda/tile_wgmma.md).

    It is later where TMA cannot load the masks. In the batch-invariant mode the kernel takes any number of rows.
    """
    return 1 if layer.batch_invariant else 12 if mask_alignment(layer) == 16 else 24


def choose(call: ExpertCall, gpu: Gpu) -> TileItems | None:
    """The launch of a call with the least time by the cost model, or None where the kernel cannot run it.

    In the batch-invariant mode products are dense, so that each sum ascends k in one accumulator.
    """
    if call.layer.n_masks == 0 or not tile_wgmma.can_run(call.layer, gpu) or any(unstacked(call)):
        return None
    costs = costs_of(gpu)
    config = min(candidates(call, gpu), key=lambda one: costs.microseconds_of_experts(one, call, gpu), default=None)
    return None if config is None else TileItems(config, True)


def candidates(call: ExpertCall, gpu: Gpu) -> Iterator[TileWgmma]:
    """The launches that suit a call. x is permuted where products are dense, since it is gathered in any case."""
    layer, shared = call.layer, gpu.shared_bytes_per_sm
    if layer.activation_format != "dense":
        found = fp8_launches(layer.n_masks, layer.weight.format.name, shared)
    else:
        found = launches(layer.n_masks, layer.weight.bits, True, shared)
        if not layer.batch_invariant:
            as_it_is = launches(layer.n_masks, layer.weight.bits, False, shared)
            found += tuple(config for config in as_it_is if config.sparse)
    rows = layer.out_features
    return (config for config in found if config.rows <= rows and _has_registers(config, layer))


def _has_registers(config: TileWgmma, layer: LayerCall) -> bool:
    """True if the sums of a tile leave registers for the tile's item."""
    return config.sparse or sums_of(config, layer) <= MOST_SUMS


def sums_of(config: TileWgmma, layer: LayerCall) -> int:
    """Registers of a thread for the sums of dense products."""
    products = ceil_div(layer.n_masks // config.passes + 1, config.mask_groups) + config.fp8
    return products * config.block_tokens // 2
