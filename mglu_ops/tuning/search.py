"""The fastest launch of a case that is also right, found by measuring."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

from ..backends import cuda
from ..backends.cuda import plan
from ..backends.cuda.compiler import CompileError, compile_cubin
from ..backends.cuda.config import LaunchConfig
from ..backends.cuda.driver import LaunchError
from ..backends.cuda.launch_tables import Entry
from ..backends.cuda.limits import Case
from ..masks import packed_width, unpack_one
from .candidates import neighbours, starts
from .replay import Replay, layers_for, times

SCREENING_ROUNDS = 4
FINALISTS = 4
_ROUNDINGS = 3  # the largest error, in epsilons of the dtype: gate, value, activation, product and sum round once each


@dataclass(frozen=True)
class Effort:
    """How hard to look: `steps` away from where the search begins, and `rounds` of replays for the finalists."""

    steps: int = 3
    rounds: int = 25


class _Layers:
    """Layers of distinct weights, and the float64 result of the first."""

    def __init__(self, case: Case) -> None:
        shape = case.out_features, case.in_features
        packed_shape = case.out_features, packed_width(case.in_features), case.n_masks
        item = torch.empty((), dtype=case.dtype).element_size()
        count = layers_for(shape[0] * (shape[1] * item + packed_shape[1] * case.n_masks))
        self.x = torch.randn(case.tokens, case.in_features, device="cuda").to(case.dtype)
        scale = case.in_features**-0.5
        self.weights = [torch.randn(shape, device="cuda").mul_(scale).to(case.dtype) for _ in range(count)]
        self.packed = [torch.randint(256, packed_shape, dtype=torch.uint8, device="cuda") for _ in range(count)]
        self.exact = self._exact()

    def _exact(self) -> Tensor:
        x, weight = self.x.double(), self.weights[0].double()
        total = F.linear(x, weight)
        result = torch.zeros_like(total)
        for i in range(self.packed[0].shape[2]):
            gate = F.linear(x, weight * unpack_one(self.packed[0], i, weight.shape[1]))
            result += F.silu(gate) * (total - gate)
        return result

    def replay(self, config: LaunchConfig) -> Replay:
        def run(i: int) -> Tensor:
            return cuda.forward(self.x, self.weights[i], self.packed[i], "silu", None, config=config)

        return Replay(run, len(self.weights))

    def is_right(self, replay: Replay) -> bool:
        """Whether a replay writes all outputs, and the first agrees with float64."""
        for output in replay.outputs:
            output.fill_(float("nan"))
        replay.graph.replay()
        error = float((replay.outputs[0].double() - self.exact).norm() / self.exact.norm())
        written = all(bool(output.isfinite().all()) for output in replay.outputs)
        return written and error <= _ROUNDINGS * torch.finfo(self.x.dtype).eps


def problem_of(case: Case) -> plan.Problem:
    """The problem of a case: contiguous tensors, silu, no route weights."""
    width = packed_width(case.in_features) * case.n_masks
    return plan.Problem(
        arch=case.arch,
        dtype=case.dtype,
        n_masks=case.n_masks,
        tokens=case.tokens,
        out_features=case.out_features,
        in_features=case.in_features,
        activation="silu",
        route_dtype=None,
        weight_aligned=True,
        mask_alignment=next(size for size in (16, 8, 4, 1) if width % size == 0),
        x_vectorizable=True,
        strides=(case.in_features, 1, case.in_features, 1, width, case.n_masks, 1, 0, 0),
        multiprocessors=case.multiprocessors,
        device=case.device,
    )


def search(case: Case, effort: Effort, note: Callable[[str], None]) -> Entry:
    """The entry of a case, which may be the model's own choice. `note` is told what cannot run, or runs wrong.

    Raises:
        RuntimeError: the model's choice itself is wrong.
    """
    problem = problem_of(case)
    model = plan.model_choice(problem)
    layers = _Layers(case)
    screened: dict[LaunchConfig, float] = {}
    wanted = [model, *starts(case)]
    for _ in range(1 + effort.steps):
        wanted = [config for config in dict.fromkeys(wanted) if config not in screened]
        if not wanted:
            break
        screened |= _screen(layers, problem, wanted, note)
        wanted = neighbours(min(screened, key=lambda config: screened[config]), case)
    if screened[model] == float("inf"):
        raise RuntimeError(f"{case}: {model}, the model's choice, is wrong")
    finalists = sorted(screened, key=lambda config: screened[config])[:FINALISTS]
    finalists = list(dict.fromkeys((*finalists, model)))
    medians = [statistics.median(found) for found in times([layers.replay(one) for one in finalists], effort.rounds)]
    measured = dict(zip(finalists, medians, strict=True))
    best = min(measured, key=lambda config: measured[config])
    return Entry(case, best, measured[best], model, measured[model])


def _screen(
    layers: _Layers, problem: plan.Problem, configs: list[LaunchConfig], note: Callable[[str], None]
) -> dict[LaunchConfig, float]:
    """Microseconds a layer after a few rounds; infinitely many where a configuration does not run, or runs wrong."""
    found = dict.fromkeys(configs, float("inf"))
    replays: dict[LaunchConfig, Replay] = {}
    refused = _compile(problem, configs)
    for config in configs:
        try:
            replay = None if config in refused else layers.replay(config)
        except LaunchError as error:
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


def _compile(problem: plan.Problem, configs: Iterable[LaunchConfig]) -> dict[LaunchConfig, Exception]:
    """All kernels into the cache on disk, by NVRTC on as many threads as there are processors; and what it refused."""
    refused: dict[LaunchConfig, Exception] = {}

    def compile_one(config: LaunchConfig) -> None:
        target = plan.target(problem.arch, config)
        try:
            compile_cubin(config.kernel, target, plan.defines(problem, config))
            if config.turned:
                compile_cubin("permute_x", target, plan.turn_defines(config))
        except CompileError as error:
            refused[config] = error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, configs))
    return refused
