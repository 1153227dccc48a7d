"""The cost model of `tile_wgmma`: the time of a launch from the call, the GPU and some twenty fitted constants.

The model adds the time of all waves of tiles, in which an SM multiplies while it reads the next stages, and the time to
read W, once per pass, from memory or L2. csrc/cuda/tile_wgmma_costs.md explains it.

The constants of a GPU are a JSON file in the folder `cost_models` beside this package's tables, or the file that
`MGLU_COST_MODEL` names. `python -m mglu_ops tune --fit` measures launches and writes such a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from math import ceil, erfc, expm1, sqrt
from pathlib import Path
from typing import Any

from ....expert_calls import ExpertCall
from ....layer_call import LayerCall
from ....sizes import ceil_div, round_up
from ..device import Gpu
from .tile_wgmma import TileWgmma

FORMAT = 2
VARIABLE = "MGLU_COST_MODEL"
FOLDER = Path(__file__).parents[1] / "cost_models"


class CostModelError(ValueError):
    """A file of constants that cannot be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class ProductCosts:
    """The costs of a product in one kind of launch. The unit is the time of a product of one column of tokens.

    Attributes:
        gap: time between two products of a warpgroup, for sign flips and waiting.
        fragments: time to load and prepare a fragment of W, once per pass.
    """

    gap: float
    fragments: float


@dataclass(frozen=True)
class CostModel:
    """The constants of the model for one GPU.

    Attributes:
        launch_us: fixed time of every launch.
        column_us: microseconds for the product of 64 rows and one column of tokens, for each column of in_features.
        dram_bytes_per_us: bandwidth of the memory.
        l2_bytes_per_us: bandwidth of L2 for all SMs together.
        permute_us: time of `permute_x`.
        exchange_us: time at the end of a tile in which one of two warpgroups of the same rows waits for the other.
        cluster: factor on the multiplying time of pairs of blocks, which wait for each other.
        serial: fraction of the shorter of multiplying and reading that the longer does not hide.
        serial_alone: as `serial`, for a warpgroup that is alone on its SM and waits for its own stages.
        last_wave: cost of the last of many waves, in waves.
        mask_columns: time, in columns, to read a mask's bits if x is not permuted: with fewer than 8 masks, with 4,
            with 8 or more.
        alone, of_rows, of_masks: products of one consumer warpgroup, of two with different rows, of two that share 64
            rows.
        sparse_alone, sparse_of_rows, sparse_of_masks: as above, for sparse products.
    """

    launch_us: float
    column_us: float
    dram_bytes_per_us: float
    l2_bytes_per_us: float
    permute_us: float
    exchange_us: float
    cluster: float
    serial: float
    serial_alone: float
    last_wave: float
    mask_columns: tuple[float, float, float]
    alone: ProductCosts
    of_rows: ProductCosts
    of_masks: ProductCosts
    sparse_alone: ProductCosts
    sparse_of_rows: ProductCosts
    sparse_of_masks: ProductCosts

    def microseconds(self, config: TileWgmma, call: LayerCall, gpu: Gpu) -> float:
        """Estimate the time of a launch."""
        if config.decoded:
            copied = call.out_features * call.in_features * (call.weight.bits / 8 + call.dtype.itemsize)
            copying = _DECODE_LAUNCH_US + copied / self.dram_bytes_per_us
            return copying + self.microseconds(replace(config, decoded=False), config.as_read(call), gpu)
        token_tiles = round_up(ceil_div(call.tokens, config.block_tokens), config.cluster)
        return self._microseconds_of_tiles(config, call, gpu, token_tiles, 1)

    def microseconds_of_experts(self, config: TileWgmma, call: ExpertCall, gpu: Gpu) -> float:
        """Estimate the time of a launch for experts, whose loads nobody knows.

        A quarter of the estimate is for exponentially distributed loads, and the rest for a random choice of equally
        probable experts. With the former, an expert has more than n rows with the probability exp(-n / mean), so that
        it has 1 / (1 - exp(-rows of an item / mean)) items.
        """
        used = min(call.experts, call.rows)
        mean, of_item = call.rows / used, config.block_tokens * config.cluster
        gathers = config.permuted or config.sparse or config.fp8
        gathered = 4 * call.rows * call.layer.in_features / self.l2_bytes_per_us if gathers else 0
        slower = replace(self, l2_bytes_per_us=self.l2_bytes_per_us * _L2_OF_EXPERTS)
        balanced, exponential = (
            slower._microseconds_of_tiles(config, call.layer, gpu, config.cluster * used * items, used)
            for items in (_items_of_random_loads(mean, of_item), 1 / -expm1(-of_item / mean))
        )
        return _GROUP_US + gathered + 0.75 * balanced + 0.25 * exponential

    def _microseconds_of_tiles(
        self, config: TileWgmma, call: LayerCall, gpu: Gpu, token_tiles: float, experts: int
    ) -> float:
        """The time of tiles, with W of a number of experts in memory."""
        shared_rows = config.mask_groups == 2
        waves = waves_of(token_tiles * ceil_div(call.out_features, config.rows), gpu.multiprocessors, self.last_wave)
        decoding = 0 if config.fp8 else config.passes * _DECODE_COLUMNS[call.weight.format.name]
        columns = config.row_groups * (self._columns(config, call.n_masks) + decoding)
        column_us = self.column_us * (_FP8_COLUMN if config.fp8 else 1)
        multiplying = waves * (columns * call.in_features * column_us + (self.exchange_us if shared_rows else 0))
        bytes_of_column = call.bytes_of_columns(8) / 8  # of one row of W and its masks
        from_memory = experts * call.out_features * bytes_of_column / self.dram_bytes_per_us
        bytes_of_tile = config.rows * bytes_of_column / config.cluster + 2 * min(config.block_tokens, call.tokens)
        from_l2 = waves * gpu.multiprocessors * bytes_of_tile / self.l2_bytes_per_us
        reading = config.passes * call.in_features * max(from_memory, from_l2)
        serial = self.serial_alone if config.rows == 64 and not shared_rows else self.serial
        total = max(multiplying, reading) + serial * min(multiplying, reading)
        return self.launch_us + total + (self.permute_us if config.permuted or config.fp8 else 0)

    def _columns(self, config: TileWgmma, n_masks: int) -> float:
        """The cost of 64 rows of a tile for one column of in_features, in columns of tokens."""
        shared_rows = config.mask_groups == 2
        if config.fp8:
            by_kind = _FP8
        elif config.sparse:
            by_kind = self.sparse_alone, self.sparse_of_rows, self.sparse_of_masks
        else:
            by_kind = self.alone, self.of_rows, self.of_masks
        costs = by_kind[2 if shared_rows else 0 if config.rows == 64 else 1]
        products = n_masks + (config.passes if shared_rows else 1)
        # If x is not permuted, a warp reads four times the mask bytes, and four masks as one word.
        of_mask = self.mask_columns[1 if n_masks == 4 and not shared_rows else 0 if n_masks < 8 else 2]
        bits = 0 if config.permuted or config.sparse or config.fp8 else config.mask_groups * n_masks * of_mask
        columns = products * (costs.gap + config.block_tokens) + config.passes * costs.fragments + bits
        return columns * self.cluster if config.cluster > 1 else columns


def _items_of_random_loads(mean: float, of_item: int) -> float:
    """The mean number of items of an expert in use whose rows are Poisson-distributed, by the normal distribution."""
    most = ceil((mean + 6 * sqrt(mean)) / of_item)
    return 1 + sum(erfc((i * of_item + 0.5 - mean) / sqrt(2 * mean)) / 2 for i in range(1, most))


_GROUP_US = 3.0
"""Time of `group_tokens`."""

_L2_OF_EXPERTS = 0.8
"""Bandwidth of L2 for experts over that for a layer. This and the weights of balanced and exponential loads choose the
fastest launches of those timed for 24 calls with balanced and skewed loads on an H100 (csrc/cuda/tile_wgmma.md)."""

_DECODE_LAUNCH_US = 2.0
"""Fixed time of `decode_weight`."""


_FP8 = ProductCosts(100, 60), ProductCosts(13, 32), ProductCosts(10, 135)
"""The costs of products in fp8 as `alone`, `of_rows` and `of_masks`; measured with 1 to 8 masks (tile_wgmma.md)."""

_FP8_COLUMN = 0.85
"""The time of a product for a column of in_features, in fp8 over 16 bits."""

_DECODE_COLUMNS = {"dense": 0, "fp8_row": 20, "fp8_block": 40, "int8_row": 20, "int4_group": 28}
"""The time to decode 64 rows of W for a pass, in columns of tokens; measured with 1 to 8 masks (tile_wgmma.md)."""


def waves_of(blocks: float, multiprocessors: int, last_wave: float) -> float:
    """Waves of blocks, with one block per SM. The last blocks of many waves overlap."""
    waves = blocks / multiprocessors
    return ceil(waves) if waves <= 4 else waves + last_wave


# --- Files of constants ----------------------------------------------------------------------------------------------


def costs_of(gpu: Gpu) -> CostModel:
    """Return the constants for a GPU, measured on a GPU of its name, or else of its architecture.

    Raises:
        CostModelError: the file that `MGLU_COST_MODEL` names cannot be used.
    """
    return _costs_of(gpu.name, gpu.arch)


@cache
def _costs_of(name: str, arch: tuple[int, int]) -> CostModel:
    own = os.environ.get(VARIABLE)
    if own:
        return read(Path(own))[1]
    known = [read(path) for path in sorted(FOLDER.glob("*.json"))]
    of_the_name = [costs for environment, costs in known if environment.get("device") == name]
    of_the_arch = [costs for environment, costs in known if environment.get("compute_capability") == list(arch)]
    return (*of_the_name, *of_the_arch)[0]


def read(path: Path) -> tuple[Mapping[str, Any], CostModel]:
    """Return the environment of a file's measurements, and its constants.

    Raises:
        CostModelError: the file is not a cost model.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CostModelError(f"{path}: not a readable cost model: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CostModelError(f"{path}: format: got {found!r:.60}, must be an object with format {FORMAT}")
    environment, costs = found.get("environment"), found.get("costs")
    if not isinstance(environment, dict) or not isinstance(costs, dict):
        raise CostModelError(f"{path}: environment and costs: must be objects")
    return environment, CostModel(**{field.name: _constant(costs, field.name, path) for field in fields(CostModel)})


def _constant(costs: Mapping[str, Any], name: str, path: Path) -> Any:
    value = costs.get(name)
    where = f"{path}: costs: {name}: got {value!r:.60}, must be"
    if name == "mask_columns":
        if not (isinstance(value, list) and len(value) == 3 and all(map(_is_number, value))):
            raise CostModelError(f"{where} three numbers")
        return tuple(value)
    if name in _PRODUCTS:
        expected = [field.name for field in fields(ProductCosts)]
        if not isinstance(value, dict) or not all(_is_number(value.get(part)) for part in expected):
            raise CostModelError(f"{where} an object of {', '.join(expected)}")
        return ProductCosts(*(value[part] for part in expected))
    if not _is_number(value):
        raise CostModelError(f"{where} a number")
    return value


_PRODUCTS = ("alone", "of_rows", "of_masks", "sparse_alone", "sparse_of_rows", "sparse_of_masks")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def write(path: Path, environment: Mapping[str, object], costs: CostModel) -> None:
    """Write a file of constants."""
    path.write_text(json.dumps({"format": FORMAT, "environment": environment, "costs": asdict(costs)}, indent=1) + "\n")
