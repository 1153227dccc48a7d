"""The cost model of `tile_wgmma`: estimates the time of a launch from the call, the GPU and about 20 fitted constants.

An SM multiplies a stage while it reads the next ones. The model estimates the time to multiply all waves of tiles and
the time to read W in every pass, from memory or L2, and combines them. csrc/cuda/tile_wgmma_costs.md explains it.

The constants of a GPU are a JSON file in the folder `cost_models`, or the file that `MGLU_COST_MODEL` names.
`python -m mglu_ops tune --fit` measures launches and writes such a file.
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

from ....call import Call
from ....sizes import ceil_div, round_up
from ..device import Gpu
from .tile_wgmma import TileWgmma

FORMAT = 2
VARIABLE = "MGLU_COST_MODEL"
FOLDER = Path(__file__).parents[1] / "cost_models"


class CostModelError(ValueError):
    """A file of constants cannot be used. The message names the file and the problem."""


@dataclass(frozen=True)
class ProductCosts:
    """The costs of a product of one kind. The unit is the time of a product with one column (one token).

    Attributes:
        gap: the time between two products of a warpgroup, for sign flips and waiting.
        fragments: the time to load and prepare a fragment of W, once per pass.
    """

    gap: float
    fragments: float


@dataclass(frozen=True)
class CostModel:
    """The constants of the model for one GPU. A time in columns is a multiple of `column_us`.

    Attributes:
        launch_us: the fixed time of every launch, in microseconds.
        column_us: the time to multiply 64 rows by one token, for each column of in_features, in microseconds.
        dram_bytes_per_us: the bandwidth of the memory.
        l2_bytes_per_us: the bandwidth of L2 for all SMs together.
        permute_us: the time of `permute_x` in microseconds.
        exchange_us: the time for which two warpgroups of the same rows wait for each other at the end of a tile.
        cluster: a factor on the time of multiplying in clusters of two blocks, which wait for each other.
        serial: multiplying and reading overlap, except for this fraction of the shorter of the two.
        serial_alone: `serial` for a warpgroup that is alone on its SM, and waits for its own stages.
        last_wave: the cost of the last wave, in waves, if there are more than four waves.
        mask_columns: the time in columns to read a mask's bits for an x that is not permuted, in three cases: 1 to 7
            masks except 4, 4 masks, and 8 or more masks.
        alone, of_rows, of_masks: the costs of products with one consumer warpgroup, with two for different rows, and
            with two for different masks of the same 64 rows.
        sparse_alone, sparse_of_rows, sparse_of_masks: these costs for sparse products.
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

    def microseconds(self, config: TileWgmma, call: Call, gpu: Gpu) -> float:
        """Estimate the time of a launch in microseconds."""
        token_tiles = round_up(ceil_div(call.tokens, config.block_tokens), config.cluster)
        computing = self._microseconds_of_tiles(config, config.as_read(call), gpu, token_tiles, 1)
        if not config.decoded:
            return computing
        copied = call.out_features * call.in_features * (call.weight.bits / 8 + call.dtype.itemsize)
        return _DECODE_LAUNCH_US + copied / self.dram_bytes_per_us + computing

    def microseconds_of_experts(self, config: TileWgmma, call: Call, gpu: Gpu) -> float:
        """Estimate the time of a launch for experts in microseconds.

        The load of an expert, its number of rows, is unknown. The estimate is three quarters of the time for equally
        probable experts, plus a quarter of the time for exponentially distributed loads. In an exponential
        distribution, an expert has more than n rows with probability exp(-n / mean), and therefore
        1 / (1 - exp(-item_rows / mean)) items on average.
        """
        used = min(call.routed.experts, call.tokens)
        mean, item_rows = call.tokens / used, config.block_tokens * config.cluster
        gathers = config.permuted or config.sparse or config.fp8
        gathered = 4 * call.tokens * call.in_features / self.l2_bytes_per_us if gathers else 0
        slower = replace(self, l2_bytes_per_us=self.l2_bytes_per_us * _L2_OF_EXPERTS)
        balanced, exponential = (
            slower._microseconds_of_tiles(config, call.one, gpu, config.cluster * used * items, used)
            for items in (_items_of_random_loads(mean, item_rows), 1 / -expm1(-item_rows / mean))
        )
        return _GROUP_US + gathered + 0.75 * balanced + 0.25 * exponential

    def _microseconds_of_tiles(
        self, config: TileWgmma, call: Call, gpu: Gpu, token_tiles: float, experts: int
    ) -> float:
        """The time to compute `token_tiles` tiles of tokens with all tiles of rows, reading W of `experts` experts."""
        shared_rows = config.mask_groups == 2
        waves = waves_of(token_tiles * ceil_div(call.out_features, config.rows), gpu.multiprocessors, self.last_wave)
        decoding = 0 if config.fp8 else config.passes * _DECODE_COLUMNS[call.weight.format.name]
        columns = config.row_groups * (self._columns(config, call.n_masks) + decoding)
        column_us = self.column_us * (_FP8_COLUMN if config.fp8 else 1)
        multiplying = waves * (columns * call.in_features * column_us + (self.exchange_us if shared_rows else 0))
        bytes_of_column = call.bytes_of_columns(8) / 8  # one weight and its mask bits
        from_memory = experts * call.out_features * bytes_of_column / self.dram_bytes_per_us
        bytes_of_tile = config.rows * bytes_of_column / config.cluster + 2 * min(config.block_tokens, call.tokens)
        from_l2 = waves * gpu.multiprocessors * bytes_of_tile / self.l2_bytes_per_us
        reading = config.passes * call.in_features * max(from_memory, from_l2)
        serial = self.serial_alone if config.rows == 64 and not shared_rows else self.serial
        total = max(multiplying, reading) + serial * min(multiplying, reading)
        return self.launch_us + total + (self.permute_us if config.permuted or config.fp8 else 0)

    def _columns(self, config: TileWgmma, n_masks: int) -> float:
        """The time to multiply 64 rows of a tile by one column of in_features, in the unit of `ProductCosts`."""
        shared_rows = config.mask_groups == 2
        if config.fp8:
            by_kind = _FP8
        elif config.sparse:
            by_kind = self.sparse_alone, self.sparse_of_rows, self.sparse_of_masks
        else:
            by_kind = self.alone, self.of_rows, self.of_masks
        costs = by_kind[2 if shared_rows else 0 if config.rows == 64 else 1]
        products = n_masks + (config.passes if shared_rows else 1)
        # If x is not permuted, a warp reads four times the mask bytes. It reads the bytes of four masks as one word.
        mask_columns = self.mask_columns[1 if n_masks == 4 and not shared_rows else 0 if n_masks < 8 else 2]
        bits = 0 if config.permuted or config.sparse or config.fp8 else config.mask_groups * n_masks * mask_columns
        columns = products * (costs.gap + config.block_tokens) + config.passes * costs.fragments + bits
        return columns * self.cluster if config.cluster > 1 else columns


def _items_of_random_loads(mean: float, item_rows: int) -> float:
    """The mean number of items of an expert whose number of rows is Poisson-distributed, by a normal approximation."""
    most = ceil((mean + 6 * sqrt(mean)) / item_rows)
    return 1 + sum(erfc((i * item_rows + 0.5 - mean) / sqrt(2 * mean)) / 2 for i in range(1, most))


_GROUP_US = 3.0
"""The time of `group_tokens` in microseconds."""

_L2_OF_EXPERTS = 0.8
"""The bandwidth of L2 for experts, as a fraction of the bandwidth for one layer. This fraction, and the shares of three
quarters and one quarter in `microseconds_of_experts`, were fitted to 24 calls with balanced and skewed loads on an H100
(csrc/cuda/tile_wgmma.md)."""

_DECODE_LAUNCH_US = 2.0
"""The fixed time of `decode_weight` in microseconds."""

_FP8 = ProductCosts(100, 60), ProductCosts(13, 32), ProductCosts(10, 135)
"""`alone`, `of_rows` and `of_masks` for products in fp8; measured with 1 to 8 masks (tile_wgmma.md)."""

_FP8_COLUMN = 0.85
"""The factor on `column_us` for products in fp8."""

_DECODE_COLUMNS = {"dense": 0, "fp8_row": 20, "fp8_block": 40, "int8_row": 20, "int4_group": 28}
"""The time to decode 64 rows of W in a pass, in columns; measured with 1 to 8 masks (tile_wgmma.md)."""


def waves_of(blocks: float, multiprocessors: int, last_wave: float) -> float:
    """Return the number of waves of blocks, with one block per SM. Above four it is a fraction, since waves overlap."""
    waves = blocks / multiprocessors
    return ceil(waves) if waves <= 4 else waves + last_wave


# --- Files of constants ----------------------------------------------------------------------------------------------


def costs_of(gpu: Gpu) -> CostModel:
    """Return the constants that were fitted on a GPU of the same name or, if there are none, of the same architecture.

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
    """Read the environment of the measurements and the constants from a file.

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
