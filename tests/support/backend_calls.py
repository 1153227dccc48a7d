"""Calls of a given backend, without the choice of a backend."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mglu_ops import dispatch
from mglu_ops.backends import BACKENDS
from mglu_ops.backends.cuda.choice import LaunchChoice, choose
from mglu_ops.backends.cuda.device import gpu_of
from mglu_ops.layer_call import LayerArguments, LayerCall


def run_on(backend: str, *operands: Any, launch: Any = None, **options: Any) -> Tensor:
    """The result of one backend for the arguments of `mglu::forward`, with the given launch or its own choice."""
    return dispatch.forward(LayerArguments(*operands, **options), backend=backend, launch=launch)


def unsupported(backend: str, *operands: Any) -> str | None:
    """Why a backend cannot take a call with the arguments of `mglu::forward`."""
    return BACKENDS[backend].unsupported_reason(LayerCall.of(LayerArguments(*operands)))


def launch_of(*operands: Any) -> LaunchChoice:
    """How the CUDA backend launches a call with the same arguments."""
    call = LayerCall.of(LayerArguments(*operands))
    return choose(call, gpu_of(call.device.index))
