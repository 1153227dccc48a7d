"""The launches of `tile_wgmma` for experts with many rows each. A tile of tokens is an item: rows of one expert.

The kernel treats the weights of all experts as one matrix, and their masks as another (csrc/cuda/tile_wgmma.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ....call import Call, Layout
from ....sizes import ceil_div, least, round_up
from ..device import Gpu
from ..launch import Plan, Step
from ..tensor_map import Matrix
from . import group_tokens, permute_x, quantize_x, tile_wgmma
from .base import copy_step, integers, mask_alignment
from .decode_mma import DecodeMma
from .experts import MOST_TILES_OF_ONE_WAVE, ExpertLaunch, tiles_of_sm
from .tile_wgmma import TileWgmma
from .tile_wgmma_choice import fp8_launches, launches
from .tile_wgmma_costs import costs_of

_GATHERED_TOGETHER = 8
"""The rows of x that a warp of `permute_x` gathers."""


@dataclass(frozen=True)
class TileItems(ExpertLaunch):
    """The launch of `tile_wgmma` for items. Its blocks loop over tiles, each of some rows of W and one item.

    Up to two launches precede it:

    - `group_tokens` writes the items.
    - `permute_x`, or `quantize_x` for products in fp8, gathers the rows of x in the order of experts, into a copy
      `[rows, columns of whole stages]`. Dense products without permuted columns need no copy, but require an x that is
      sorted by expert.

    The blocks of a cluster share an item.
    """

    config: TileWgmma  # type: ignore[assignment]

    @property
    def item_rows(self) -> int:
        return self.config.block_tokens * self.config.cluster

    def macros(self, call: Call) -> dict[str, int]:
        return self.config.macros(self._layer(call)) | _ITEMS

    def grid(self, call: Call, gpu: Gpu) -> tuple[int, int]:
        tiles = group_tokens.max_items(call, self.item_rows) * ceil_div(call.out_features, self.config.rows)
        cluster = self.config.cluster
        return cluster * least(tiles, gpu.multiprocessors // cluster), 1

    def plan(self, call: Call, gpu: Gpu) -> Plan:
        config, layer = self.config, self._layer(call)
        stacked = replace(layer, out_features=call.routed.experts * call.out_features)
        x, weight, masks = config.matrices(stacked)
        if self._gathers:
            item, columns, width = (1, 128, self.columns(call)) if config.fp8 else (2, 64, self.columns(call))
            height = least(config.block_tokens, call.tokens)
            x = Matrix(item, width, call.tokens, item * width, columns, height, swizzle=True)
        maps: list[dict[str, Matrix | None]] = [{"x": x}, {"weight": weight, "packed_masks": masks}]
        if results := config.results(layer):
            rows = {name: replace(matrix, box_height=1) for name, matrix in results.items()}
            maps += [{**results}, {**rows}]
        kernel = Step(
            config.kernel,
            config.target(gpu),
            self.macros(call),
            self.grid(call, gpu),
            config.threads,
            config.shared_bytes(layer),
            True,
            integers(layer),
            struct="TrainingItemParams" if results else "TileParams",
            items=self._item_integers(call),
            maps=tuple(maps),
        )
        return (*self._copies(call, gpu), *([self._gather(call, gpu)] if self._gathers else []), kernel)

    def violation(self, call: Call, gpu: Gpu) -> str | None:
        return next(self._all(call, gpu), None)

    def _all(self, call: Call, gpu: Gpu) -> Iterator[str]:
        config = self.config
        if not self.grouped:
            yield "grouped: must be True"
        if config.decoded:
            yield f"config: got {config}, must not be decoded"
        if not (self._gathers or call.routed.is_sorted):
            yield f"config: got {config}, must be permuted, sparse or fp8, since x is not sorted"
        yield from unstacked(call)
        problem = config.violation(self._layer(call), gpu)
        if problem is not None:
            yield problem
        if call.tokens >= 2**28:
            yield f"{call.tokens} rows, more than the kernel's indices hold"

    def _layer(self, call: Call) -> Call:
        """The layer of one expert, but with the rows of all experts, as the kernel reads them."""
        layer = replace(quantize_x.as_read(self.config, call.one), leading=(call.tokens,))
        return replace(layer, x=Layout((self.columns(call), 1))) if self._gathers else layer

    @property
    def _gathers(self) -> bool:
        return self.config.permuted or self.config.sparse or self.config.fp8

    def columns(self, call: Call) -> int:
        """The columns of the gathered x."""
        return round_up(call.in_features, self.config.chunk_columns * self.config.sub)

    def _gather(self, call: Call, gpu: Gpu) -> Step:
        columns, rows = self.columns(call), call.tokens
        if self.config.fp8:  # each row has a scale of 4 bytes
            kernel, macros = quantize_x.NAME, quantize_x.macros(call.one, 1)
            blocks, nbytes = rows, rows * (columns + 4)
        else:
            kernel, macros = permute_x.NAME, permute_x.macros(_GATHERED_TOGETHER, self.config.sub)
            macros |= {"MGLU_PERMUTED": int(self.config.permuted)}
            gathered = round_up(rows, _GATHERED_TOGETHER) * columns
            blocks, nbytes = ceil_div(gathered, permute_x.BLOCK_ELEMENTS), 2 * rows * columns
        read = replace(quantize_x.as_read(self.config, call.one), leading=(call.rows_of_x,))
        step = copy_step(kernel, self.config.target(gpu), macros | _ITEMS, blocks, read, gpu, "x", nbytes)
        return replace(step, integers={**step.integers, "tokens": rows}, items=self._item_integers(call))


_ITEMS = {"MGLU_ITEMS": 1}

MOST_SUMS = 128
"""The most registers of a thread for sums, so that the thread has enough left for its item."""


def unstacked(call: Call) -> Iterator[str]:
    """Yield the reasons why the weights or the masks of all experts do not form one matrix."""
    layer = call.one
    rows = call.routed.experts * layer.out_features
    for name, stride, layout in (
        ("weight", call.routed.weight_stride, layer.weight.layout),
        ("packed_masks", call.routed.masks_stride, layer.masks),
    ):
        if call.routed.experts > 1 and stride != layer.out_features * layout.strides[0]:
            yield f"{name}: got {stride} elements from one expert to the next, must be {layer.out_features} rows"
    if rows >= 2**31:
        yield f"{rows} rows of W, more than the kernel's indices hold"


def least_rows(call: Call, few: ExpertLaunch, gpu: Gpu) -> int:
    """The least rows per expert for which the kernel is faster than `few`, the launch for few rows per expert.

    Measured (csrc/cuda/tile_wgmma.md): `decode_mma` loses its lead at 8 rows where its blocks take several waves, and x
    leaves an SM no room for two of them, and wherever x is in fp8, in which only the tiles multiply. It keeps its lead
    longer if TMA cannot load the masks. In the batch-invariant mode the tiles take any number of rows.
    """
    if call.batch_invariant:
        return 1
    in_fp8 = call.activation_format != "dense"
    if mask_alignment(call.one) < 16:
        return 16 if in_fp8 else 24
    if in_fp8:
        return 8
    is_alone = isinstance(few.config, DecodeMma) and few.config.blocks_per_sm == 1
    return 8 if is_alone and tiles_of_sm(call, gpu) > MOST_TILES_OF_ONE_WAVE else 12


def choose(call: Call, gpu: Gpu) -> TileItems | None:
    """Choose the fastest launch by the cost model, or return None if the kernel cannot run the call.

    In the batch-invariant mode products are dense, so that one accumulator sums in ascending order of k.
    """
    if call.n_masks == 0 or not tile_wgmma.can_run(call.one, gpu) or any(unstacked(call)):
        return None
    costs = costs_of(gpu)
    config = min(candidates(call, gpu), key=lambda one: costs.microseconds_of_experts(one, call, gpu), default=None)
    return None if config is None else TileItems(config, True)


def candidates(call: Call, gpu: Gpu) -> Iterator[TileWgmma]:
    """Return the launches to compare for a call. Dense products permute x, since a launch copies x in any case."""
    layer, shared = call.one, gpu.shared_bytes_per_sm
    if layer.activation_format != "dense":
        found = fp8_launches(layer.n_masks, layer.weight.format.name, shared)
    else:
        found = launches(layer.n_masks, layer.weight.bits, True, shared)
        if not layer.batch_invariant:
            as_it_is = launches(layer.n_masks, layer.weight.bits, False, shared)
            found += tuple(config for config in as_it_is if config.sparse)
    rows = layer.out_features
    fitting = (config for config in found if config.sparse or sums_of(config, layer) <= MOST_SUMS)
    return (config for config in fitting if config.rows <= rows)


def sums_of(config: TileWgmma, layer: Call) -> int:
    """The registers of a thread for the sums of dense products."""
    products = ceil_div(layer.n_masks // config.passes + 1, config.mask_groups) + config.fp8
    return products * config.block_tokens // 2
