"""Fits the cost model of `tile_wgmma` to a GPU: measures a sample of launches, and finds the constants behind them.

The sample is drawn with a fixed seed: for each number of masks some of the launches that the model compares, each at a
few shapes and numbers of tokens. The timings are a CSV file, from which the same constants follow again.
"""

from __future__ import annotations

import csv
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ..backends.cuda import TileWgmma
from ..backends.cuda.device import Gpu
from ..backends.cuda.kernels.tile_wgmma_choice import launches
from ..backends.cuda.kernels.tile_wgmma_costs import CostModel, ProductCosts
from ..layer_call import LayerCall

SHAPES = ((4096, 1024), (4096, 4096), (8192, 2048), (9728, 2560), (11008, 4096), (14336, 4096))
TOKENS = (16, 24, 32, 48, 64, 96, 128, 200, 256, 384, 512, 1024)
MASKS = (1, 2, 3, 4, 6, 8, 12, 16)
LAUNCHES_OF_MASKS = 36
CALLS_OF_LAUNCH = 6
ROUNDS = 5
SEED = 0


@dataclass(frozen=True)
class Timing:
    """The measured time of a launch for a call of contiguous bfloat16 tensors."""

    n_masks: int
    tokens: int
    out_features: int
    in_features: int
    config: TileWgmma
    microseconds: float

    def call(self) -> LayerCall:
        shape = self.n_masks, self.tokens, self.out_features, self.in_features
        return LayerCall.contiguous(torch.device("cuda"), torch.bfloat16, *shape)


# --- Measuring -------------------------------------------------------------------------------------------------------


def sample(gpu: Gpu) -> Iterator[tuple[int, tuple[int, int], list[tuple[int, TileWgmma]]]]:
    """`(n_masks, shape, [(tokens, launch), ...])`, the launches to measure."""
    draw = random.Random(SEED)
    for n_masks in MASKS:
        known = launches(n_masks, False, gpu.shared_bytes_per_sm)
        chosen = draw.sample(known, min(LAUNCHES_OF_MASKS, len(known)))
        wanted: dict[tuple[int, int], list[tuple[int, TileWgmma]]] = {shape: [] for shape in SHAPES}
        for config in chosen:
            # As for the model's own choice, a tile is not much wider than the call has tokens.
            fitting = [tokens for tokens in TOKENS if config.block_tokens < tokens + 16]
            if config.cluster > 1:
                fitting = [tokens for tokens in fitting if tokens > config.block_tokens]
            for _ in range(CALLS_OF_LAUNCH):
                wanted[draw.choice(SHAPES)].append((draw.choice(fitting), config))
        for shape, calls in wanted.items():
            yield n_masks, shape, sorted(set(calls), key=lambda pair: (pair[0], str(pair[1])))


def measure(gpu: Gpu, note: Callable[[str], None]) -> list[Timing]:
    """Time the sample on the current device."""
    from ..timer import times
    from .search import Layers, compile_all

    found = []
    for n_masks, shape, wanted in sample(gpu):
        one = LayerCall.contiguous(torch.device("cuda"), torch.bfloat16, n_masks, 1, *shape)
        refused = compile_all(one, gpu, {config for _, config in wanted})
        layers = Layers(one)
        for tokens in sorted({tokens for tokens, _ in wanted}):
            layers.set_tokens(tokens)
            configs = [config for count, config in wanted if count == tokens and config not in refused]
            replays = [layers.replay(config) for config in configs]
            for config, one_launch in zip(configs, times(replays, ROUNDS), strict=True):
                found.append(Timing(n_masks, tokens, *shape, config, statistics.median(one_launch)))
            del replays
        note(f"{n_masks} masks, {shape[0]} x {shape[1]}: {len(found)} timings so far")
        del layers
        torch.cuda.empty_cache()
    return found


def write_timings(path: Path, timings: Iterable[Timing], header: str) -> None:
    """Write a CSV file; `header` is a comment at its head."""
    with path.open("w", newline="") as file:
        file.write(f"# {header}\n")
        writer = csv.writer(file)
        names = [field.name for field in fields(TileWgmma)]
        writer.writerow(["n_masks", "tokens", "out_features", "in_features", *names, "microseconds"])
        for one in timings:
            settings = [int(value) for value in astuple(one.config)]
            shape = one.n_masks, one.tokens, one.out_features, one.in_features
            writer.writerow([*shape, *settings, f"{one.microseconds:.3f}"])


def read_timings(path: Path) -> list[Timing]:
    """Read such a file.

    Raises:
        ValueError: the file is none.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    defaults = asdict(TileWgmma())
    try:
        return [
            Timing(
                int(row["n_masks"]),
                int(row["tokens"]),
                int(row["out_features"]),
                int(row["in_features"]),
                TileWgmma(**{name: type(default)(int(row[name])) for name, default in defaults.items()}),
                float(row["microseconds"]),
            )
            for row in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a file of timings: {error!r}") from error


# --- Fitting ---------------------------------------------------------------------------------------------------------

START = CostModel(
    launch_us=3,
    column_us=2e-5,
    dram_bytes_per_us=4.2e6,
    l2_bytes_per_us=7e6,
    permute_us=2.2,
    exchange_us=1,
    overlapped_flips=0.65,
    cluster=0.98,
    serial=0.05,
    serial_alone=0.2,
    last_wave=0.4,
    mask_columns=(2, 1.5, 5),
    alone=ProductCosts(37, 28, 49),
    of_rows=ProductCosts(24, 0, 40),
    of_masks=ProductCosts(31, 0, 118),
    sparse_alone=ProductCosts(0, 9, 105),
    sparse_of_rows=ProductCosts(0, 11, 57),
    sparse_of_masks=ProductCosts(0, 10, 140),
)
"""The constants with which every fit begins: rates from data sheets, costs counted from the kernel's instructions."""


def fit(timings: Sequence[Timing], gpu: Gpu, start: CostModel) -> CostModel:
    """The constants with the least error, in the logarithm of the time, of which a few outliers count less.

    Every constant is fitted as a factor of that of `start`; those that are 0 there stay 0.
    """
    from scipy.optimize import least_squares

    described = [(one.config, one.call(), one.microseconds) for one in timings]

    def residuals(factors: Any) -> Any:
        import numpy as np

        costs = _scaled(start, iter(factors))
        return np.log([costs.microseconds(config, call, gpu) / found for config, call, found in described])

    count = sum(1 for value in _flat(asdict(start)) if value)
    found = least_squares(
        residuals, [1.0] * count, bounds=(0.2, 5), loss="soft_l1", f_scale=0.1, diff_step=0.02, max_nfev=60
    )
    return _rounded(_scaled(start, iter(found.x)))


def error_of(timings: Sequence[Timing], gpu: Gpu, costs: CostModel) -> float:
    """The geometric mean of the factors by which the model is off."""
    logarithms = [abs(_log_ratio(costs.microseconds(one.config, one.call(), gpu), one.microseconds)) for one in timings]
    return float(torch.tensor(logarithms).mean().exp())


def regret_of(timings: Sequence[Timing], gpu: Gpu, costs: CostModel) -> float:
    """The factor by which the model's choices are slower than the fastest launches, in the geometric mean over calls.

    Only calls of which several launches were measured count, and only those launches.
    """
    calls: dict[tuple[int, ...], list[Timing]] = {}
    for one in timings:
        calls.setdefault((one.n_masks, one.tokens, one.out_features, one.in_features), []).append(one)
    logarithms = []
    for known in calls.values():
        if len(known) > 1:
            chosen = min(known, key=lambda one: costs.microseconds(one.config, one.call(), gpu))
            logarithms.append(_log_ratio(chosen.microseconds, min(one.microseconds for one in known)))
    return float(torch.tensor(logarithms).mean().exp())


def _log_ratio(a: float, b: float) -> float:
    return float(torch.tensor(a / b, dtype=torch.float64).log())


def _flat(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _scaled(costs: Any, factors: Iterator[float]) -> Any:
    """The constants, each that is not 0 times the next factor."""
    if isinstance(costs, tuple):
        return tuple(_scaled(value, factors) for value in costs)
    if isinstance(costs, (int, float)):
        return costs * next(factors) if costs else costs
    return replace(costs, **{field.name: _scaled(getattr(costs, field.name), factors) for field in fields(costs)})


def _rounded(costs: Any) -> Any:
    """The constants with three digits, which is more than the timings are worth."""
    if isinstance(costs, tuple):
        return tuple(map(_rounded, costs))
    if isinstance(costs, (int, float)):
        return float(f"{costs:.3g}")
    return replace(costs, **{field.name: _rounded(getattr(costs, field.name)) for field in fields(costs)})
