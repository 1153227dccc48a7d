"""Fits the cost model of `tile_wgmma` to a GPU: measures launches, and finds the constants that explain their times.

The model ranks launches, so it must be accurate for the fastest launches. Calls are drawn with a fixed seed. First,
the launches that are fastest by the starting constants, and one random launch, are measured for each call. The
constants are fitted to these times, and the launches that are fastest by the fitted constants are measured too. The
timings can be kept in a CSV file, and fitted again.
"""

from __future__ import annotations

import csv
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..backends.cuda import TileWgmma
from ..backends.cuda.device import Gpu
from ..backends.cuda.kernels.tile_wgmma_choice import candidates
from ..backends.cuda.kernels.tile_wgmma_costs import CostModel, ProductCosts
from ..call import Call
from ..words import counted

SHAPES = ((4096, 1024), (4096, 4096), (8192, 2048), (9728, 2560), (11008, 4096), (14336, 4096))
TOKENS = (16, 24, 32, 48, 64, 96, 128, 200, 256, 384, 512, 1024)
MASKS = (1, 2, 3, 4, 6, 8, 12, 16)
CALLS_OF_MASKS = 36  # combinations of a shape and a number of tokens, for each number of masks
FASTEST_BY_START = 5
FASTEST_BY_FIT = 2
RANDOM_LAUNCHES = 1
ROUNDS = 5
SEED = 0


@dataclass(frozen=True)
class Timing:
    """The measured time of a launch for a call of contiguous bfloat16 tensors."""

    call: Call
    config: TileWgmma
    microseconds: float


def _call(n_masks: int, tokens: int, out_features: int, in_features: int) -> Call:
    device = torch.device("cuda")
    return Call.contiguous(device, torch.bfloat16, n_masks, tokens, out_features, in_features)


# --- Measuring -------------------------------------------------------------------------------------------------------


def sampled_calls() -> list[Call]:
    """The calls to measure, drawn with `SEED`."""
    draw = random.Random(SEED)
    every = [(*shape, tokens) for shape in SHAPES for tokens in TOKENS]
    return [
        _call(n_masks, tokens, *shape)
        for n_masks in MASKS
        for *shape, tokens in sorted(draw.sample(every, CALLS_OF_MASKS))
    ]


def launches_to_measure(call: Call, gpu: Gpu, costs: CostModel, fastest: int, others: int) -> list[TileWgmma]:
    """The launches of a call that the model ranks first, `fastest` in number, and `others` random launches."""
    ranked = sorted(candidates(call, gpu, False), key=lambda config: costs.microseconds(config, call, gpu))
    rest = ranked[fastest:]
    return ranked[:fastest] + random.Random(str(call)).sample(rest, min(others, len(rest)))


def measure(gpu: Gpu, note: Callable[[str], None]) -> list[Timing]:
    """Time the launches of all sampled calls on the current device. `note` is called with lines about the progress."""
    calls = sampled_calls()
    first = {call: launches_to_measure(call, gpu, START, FASTEST_BY_START, RANDOM_LAUNCHES) for call in calls}
    timings = _times(first, gpu, note)
    fitted = fit(timings, gpu, START)
    second = {
        call: [one for one in launches_to_measure(call, gpu, fitted, FASTEST_BY_FIT, 0) if one not in first[call]]
        for call in calls
    }
    return timings + _times(second, gpu, note)


def _times(wanted: Mapping[Call, list[TileWgmma]], gpu: Gpu, note: Callable[[str], None]) -> list[Timing]:
    from ..timer import times
    from .search import Layers, compile_all

    found = []
    calls_of_layer: dict[Call, list[Call]] = {}
    for call in wanted:
        calls_of_layer.setdefault(replace(call, leading=(1,)), []).append(call)
    for layer, calls in calls_of_layer.items():
        refused = compile_all(layer, gpu, {config for call in calls for config in wanted[call]})
        layers = Layers(layer)
        for call in calls:
            layers.set_tokens(call.tokens)
            configs = [config for config in wanted[call] if config not in refused]
            replays = [layers.replay(config) for config in configs]
            for config, one_launch in zip(configs, times(replays, ROUNDS) if replays else [], strict=True):
                found.append(Timing(call, config, round(statistics.median(one_launch), 3)))
            del replays
        timings = counted(len(found), "timing")
        note(f"{counted(layer.n_masks, 'mask')}, {layer.out_features} x {layer.in_features}: {timings} so far")
        del layers
        torch.cuda.empty_cache()
    return found


_SHAPE = ("n_masks", "tokens", "out_features", "in_features")
_SETTINGS = {name: default for name, default in asdict(TileWgmma()).items() if name not in ("decoded", "fp8")}
"""The settings of a launch, with their defaults. Only settings for weights in the dtype of x are included."""


def write_timings(path: Path, timings: Iterable[Timing], header: str) -> None:
    """Write timings to a CSV file, after a line with the comment `header`."""
    with path.open("w", newline="") as file:
        file.write(f"# {header}\n")
        writer = csv.writer(file)
        writer.writerow([*_SHAPE, *_SETTINGS, "microseconds"])
        for one in timings:
            settings = [int(getattr(one.config, name)) for name in _SETTINGS]
            shape = [getattr(one.call, name) for name in _SHAPE]
            writer.writerow([*shape, *settings, f"{one.microseconds:.3f}"])


def read_timings(path: Path) -> list[Timing]:
    """Read a file that `write_timings` wrote.

    Raises:
        ValueError: the file has another form.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    try:
        return [
            Timing(
                _call(*(int(row[name]) for name in _SHAPE)),
                TileWgmma(**{name: type(default)(int(row[name])) for name, default in _SETTINGS.items()}),
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
    cluster=1,
    serial=0.1,
    serial_alone=0.2,
    last_wave=0.5,
    mask_columns=(2, 2, 5),
    alone=ProductCosts(gap=30, fragments=40),
    of_rows=ProductCosts(gap=20, fragments=40),
    of_masks=ProductCosts(gap=30, fragments=80),
    sparse_alone=ProductCosts(gap=15, fragments=80),
    sparse_of_rows=ProductCosts(gap=15, fragments=40),
    sparse_of_masks=ProductCosts(gap=15, fragments=80),
)
"""The constants with which a fit begins: rates from data sheets, and costs estimated from the kernel's instructions."""


def fit(timings: Sequence[Timing], gpu: Gpu, start: CostModel) -> CostModel:
    """Minimize the errors of the logarithms of times, with a loss that limits the influence of outliers.

    A constant is fitted as a multiple of its value in `start`, so a constant that is 0 in `start` stays 0.
    """
    from scipy.optimize import least_squares

    def residuals(factors: Any) -> Any:
        import numpy as np

        costs = _scaled(start, iter(factors))
        return np.log([costs.microseconds(one.config, one.call, gpu) / one.microseconds for one in timings])

    count = sum(map(bool, tree_leaves(asdict(start))))
    found = least_squares(
        residuals, [1.0] * count, bounds=(0.2, 5), loss="soft_l1", f_scale=0.1, diff_step=0.02, max_nfev=60
    )
    return _changed(_scaled(start, iter(found.x)), lambda value: float(f"{value:.3g}"))  # timings are not more precise


def error_of(timings: Sequence[Timing], gpu: Gpu, costs: CostModel) -> float:
    """The factor, at least 1, between the model's and the measured time, as a geometric mean over all timings."""
    ratios = [costs.microseconds(one.config, one.call, gpu) / one.microseconds for one in timings]
    return statistics.geometric_mean(max(ratio, 1 / ratio) for ratio in ratios)


def regret_of(timings: Sequence[Timing], gpu: Gpu, costs: CostModel) -> float:
    """The factor by which the model's choice is slower than the fastest launch, as a geometric mean over calls.

    The model chooses among the measured launches. Calls with a single measured launch do not count.
    """
    calls: dict[Call, list[Timing]] = {}
    for one in timings:
        calls.setdefault(one.call, []).append(one)
    factors = []
    for known in calls.values():
        if len(known) > 1:
            chosen = min(known, key=lambda one: costs.microseconds(one.config, one.call, gpu))
            factors.append(chosen.microseconds / min(one.microseconds for one in known))
    return statistics.geometric_mean(factors)


def _scaled(costs: CostModel, factors: Iterator[float]) -> CostModel:
    """Multiply each constant that is not 0 by the next factor."""
    return _changed(costs, lambda value: value * next(factors) if value else value)


def _changed(costs: Any, change: Callable[[float], float]) -> Any:
    """Apply a function to every constant, in the order of the fields."""
    if isinstance(costs, tuple):
        return tuple(_changed(value, change) for value in costs)
    if isinstance(costs, (int, float)):
        return change(costs)
    return replace(costs, **{field.name: _changed(getattr(costs, field.name), change) for field in fields(costs)})
