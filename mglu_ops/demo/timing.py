"""What a training step and a token cost, for the same model in its variants."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

import mglu_ops

from .measure import milliseconds
from .settings import Settings
from .train import Forward, Step

NAIVE, COMPILED, FUSED, SWIGLU = "naive", "naive compiled", "fused", "SwiGLU"
PACKAGE = "package"
COLUMNS = (NAIVE, COMPILED, FUSED, SWIGLU)

STEP_ROUNDS, TOKEN_ROUNDS, TOKEN_CALLS = 5, 9, 8


def compiled(model: nn.Module) -> Forward:
    """`torch.compile` for the shapes at hand (sizes marked dynamic by an earlier shape would cost other variants)."""
    return torch.compile(model, dynamic=False)


def compiled_without_fusion(model: nn.Module) -> Forward:
    """The same, never fused: the option also keeps dynamo from reusing the fused code, which it would for an equal
    backend and a model of the same classes.
    """
    options: dict[str, Any] = {"pre_grad_custom_pass": None}
    return torch.compile(model, dynamic=False, options=options)


def time_steps(
    naive: nn.Module, swiglu: nn.Module, batch: tuple[Tensor, Tensor], settings: Settings
) -> dict[str, float]:
    """Milliseconds a training step: forward, backward, clipping and AdamW, each variant on a model of its own."""
    variants: dict[str, Callable[[], object]] = {}

    def add(name: str, model: nn.Module, compiler: Callable[[nn.Module], Forward] | None) -> None:
        model = deepcopy(model)
        step = Step(model, compiler(model) if compiler else model, settings)
        variants[name] = lambda: step(*batch)

    add(NAIVE, naive, None)
    add(COMPILED, naive, compiled_without_fusion)
    add(FUSED, naive, compiled)
    add(SWIGLU, swiglu, compiled)
    with warnings.catch_warnings(), mglu_ops.fusion():
        # The fused step may run the code that training compiled, of which a block without a graph would warn.
        warnings.filterwarnings("ignore", message="mglu_ops.fusion: nothing was fused")
        for variant in variants.values():
            variant()
    return milliseconds(variants, settings.device, STEP_ROUNDS, 1)


@torch.no_grad()
def time_token(
    models: Mapping[str, nn.Module], package: Forward | None, token: Tensor, settings: Settings
) -> dict[str, float]:
    """Milliseconds of a forward pass of one token (`[1, 1]`, no cache), by variant, and of the package if there is one.

    `models` has the trained model as "naive", frozen as "fused", and "SwiGLU", in the format they are deployed in.
    """
    forwards: dict[str, Forward] = {
        NAIVE: models[NAIVE],
        COMPILED: compiled_without_fusion(models[NAIVE]),
        FUSED: compiled(models[FUSED]),
        SWIGLU: compiled(models[SWIGLU]),
    }
    if package is not None:
        forwards[PACKAGE] = package
    calls = {name: _call(forward, token) for name, forward in forwards.items()}
    return milliseconds(calls, settings.device, TOKEN_ROUNDS, TOKEN_CALLS)


def _call(forward: Forward, token: Tensor) -> Callable[[], object]:
    return lambda: forward(token)
