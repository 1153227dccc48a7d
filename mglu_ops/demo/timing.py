"""The time of a training step and of a token, for each variant of the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

import mglu_ops

from ..timer import milliseconds
from .settings import Settings
from .train import Forward, Step

NAIVE, COMPILED, FUSED, SWIGLU = "naive", "naive compiled", "fused", "SwiGLU"
PACKAGE = "package"
COLUMNS = (NAIVE, COMPILED, FUSED, SWIGLU)

STEP_ROUNDS, TOKEN_ROUNDS, TOKEN_CALLS = 5, 9, 8


def compiled(model: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile for static shapes: a size that one variant made dynamic would slow down the others."""
    return torch.compile(model, dynamic=False)


def compiled_without_fusion(model: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile for static shapes and never fuse.

    The option also keeps Dynamo from reusing fused code, which it would do for an equal backend and equal classes.
    """
    from compile_passes.entry import NoFusion

    options: dict[str, Any] = {"pre_grad_custom_pass": NoFusion()}
    return torch.compile(model, dynamic=False, options=options)


def time_steps(
    naive: nn.Module, swiglu: nn.Module, batch: tuple[Tensor, Tensor], settings: Settings
) -> dict[str, float]:
    """Milliseconds per training step (forward, backward, clipping, AdamW), each variant on its own copy of a model."""
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
        # If the fused step reuses the code that training compiled, the block compiles nothing and would warn of it.
        warnings.filterwarnings("ignore", message="mglu_ops.fusion: nothing was fused")
        for variant in variants.values():
            variant()
    return milliseconds(variants, settings.device, STEP_ROUNDS, 1)


@torch.no_grad()
def time_token(
    models: Mapping[str, nn.Module], package: Forward | None, token: Tensor, settings: Settings
) -> dict[str, float]:
    """Milliseconds per forward pass of one token (`[1, 1]`, no cache), for each variant and for the package.

    Args:
        models: in their inference format: the trained model as "naive", the frozen one as "fused", and "SwiGLU".
        package: the exported model, or None if exporting failed.
        token: the input.
        settings: of the demo.
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
