"""Measures launches of a call, and finds the fastest one that gives correct results."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from .. import dispatch
from ..accuracy import relative_error
from ..backends import formula
from ..backends.cuda import LaunchConfig
from ..backends.cuda.choice import without_tables
from ..backends.cuda.compiler import CompileError, compile_cubin
from ..backends.cuda.device import Gpu
from ..backends.cuda.driver import LaunchError
from ..backends.cuda.launch_tables import Entry
from ..call import Call
from ..given import Given
from ..masks import packed_shape
from ..timer import Replay, capture, layers_for, times
from .candidates import neighbours, starts

SCREENING_ROUNDS = 4
FINALISTS = 4
_ROUNDINGS = 3  # the largest relative error of a correct result, in epsilons of the dtype


class Layers:
    """Layers with distinct weights, and the float64 result of the first layer."""

    def __init__(self, call: Call) -> None:
        shape = call.out_features, call.in_features
        masks_shape = packed_shape(call.n_masks, *shape)
        count = layers_for(math.prod(shape) * call.dtype.itemsize + math.prod(masks_shape))
        self.x = torch.randn(call.tokens, call.in_features, device="cuda").to(call.dtype)
        scale = call.in_features**-0.5
        self.weights = [torch.randn(shape, device="cuda").mul_(scale).to(call.dtype) for _ in range(count)]
        self.packed = [torch.randint(256, masks_shape, dtype=torch.uint8, device="cuda") for _ in range(count)]
        self.exact = formula.forward(Given(self.x.double(), self.weights[0].double(), self.packed[0]))

    def set_tokens(self, tokens: int) -> None:
        """Replace x, for another number of tokens.

        `exact` still belongs to the old x, so `is_right` is unusable afterwards.
        """
        self.x = torch.randn(tokens, self.x.shape[1], device="cuda").to(self.x.dtype)

    def replay(self, config: LaunchConfig) -> Replay:
        def run(i: int) -> Tensor:
            given = Given(self.x, self.weights[i], self.packed[i])
            return dispatch.forward(given, backend="cuda", launch=config)

        return capture(run, len(self.weights))

    def is_right(self, replay: Replay) -> bool:
        """True if a replay writes finite outputs, the first of which agrees with float64."""
        for output in replay.outputs:
            output.fill_(float("nan"))
        replay.graph.replay()
        written = all(bool(output.isfinite().all()) for output in replay.outputs)
        return written and relative_error(replay.outputs[0], self.exact) <= _ROUNDINGS * torch.finfo(self.x.dtype).eps


def search(call: Call, gpu: Gpu, steps: int, rounds: int, note: Callable[[str], None]) -> Entry:
    """Find the fastest launch of a call, which may be the one chosen without tables, and return a table entry.

    Args:
        call: a call of contiguous tensors.
        gpu: the current device.
        steps: the number of times that the neighbours of the fastest launch are tried.
        rounds: measurements of each finalist.
        note: called with a line about each launch that cannot run or gives a wrong result.

    Raises:
        RuntimeError: the launch that is chosen without tables cannot run or gives a wrong result.
    """
    model = without_tables(call, gpu)
    layers = Layers(call)
    screened: dict[LaunchConfig, float] = {}
    wanted = [model, *starts(call, gpu)]
    for _ in range(1 + steps):
        wanted = [config for config in dict.fromkeys(wanted) if config not in screened]
        if not wanted:
            break
        screened |= _screen(layers, call, gpu, wanted, note)
        wanted = neighbours(min(screened, key=screened.__getitem__), call, gpu)
    if screened[model] == math.inf:
        raise RuntimeError(f"{call}: {model}, the model's choice, is wrong")
    finalists = list(dict.fromkeys((*sorted(screened, key=screened.__getitem__)[:FINALISTS], model)))
    medians = [statistics.median(found) for found in times([layers.replay(one) for one in finalists], rounds)]
    measured = dict(zip(finalists, medians, strict=True))
    best = min(measured, key=measured.__getitem__)
    return Entry(gpu, call, best, measured[best], model, measured[model])


def _screen(
    layers: Layers, call: Call, gpu: Gpu, configs: list[LaunchConfig], note: Callable[[str], None]
) -> dict[LaunchConfig, float]:
    """Measure microseconds per layer in a few rounds. A launch that cannot run or gives wrong results gets infinity."""
    found = dict.fromkeys(configs, math.inf)
    replays: dict[LaunchConfig, Replay] = {}
    refused = compile_all(call, gpu, configs)
    for config in configs:
        try:
            replay = None if config in refused else layers.replay(config)
        except (LaunchError, ValueError) as error:
            refused[config], replay = error, None
        if replay is None:
            note(f"{config} does not run: {str(refused[config]).splitlines()[0]}")
        elif layers.is_right(replay):
            replays[config] = replay
        else:
            note(f"{config} gives a wrong result")
    for config, one in zip(replays, times(list(replays.values()), SCREENING_ROUNDS), strict=True):
        found[config] = statistics.median(one)
    return found


def compile_all(call: Call, gpu: Gpu, configs: Iterable[LaunchConfig]) -> dict[LaunchConfig, Exception]:
    """Compile the launches' kernels into the cache, in one thread per CPU. Return the errors of refused launches."""
    refused: dict[LaunchConfig, Exception] = {}

    def compile_one(config: LaunchConfig) -> None:
        try:
            for step in config.plan(call, gpu):
                compile_cubin(*step.source)
        except CompileError as error:
            refused[config] = error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, configs))
    return refused
