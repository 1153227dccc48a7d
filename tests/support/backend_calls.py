"""Calls a backend by its name, without the dispatcher."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mglu_ops import dispatch
from mglu_ops.backends import BACKENDS
from mglu_ops.backends.cuda.choice import LaunchChoice, choose
from mglu_ops.backends.cuda.device import gpu_of
from mglu_ops.call import Call
from mglu_ops.given import Given


def run_on(backend: str, *operands: Any, launch: Any = None, **options: Any) -> Tensor:
    """The backend's result for the arguments of `mglu::forward`. Without `launch`, the backend chooses one."""
    return dispatch.forward(Given(*operands, **options), backend=backend, launch=launch)


def unsupported(backend: str, *operands: Any) -> str | None:
    """The backend's reason for refusing these arguments of `mglu::forward`, or None if it takes them."""
    reason = BACKENDS[backend].reason("forward", Call.of(Given(*operands)))
    return None if reason is None or reason.is_preference else str(reason)


def launch_of(*operands: Any) -> LaunchChoice:
    """The launch that the CUDA backend chooses for these arguments of `mglu::forward`."""
    call = Call.of(Given(*operands))
    return choose(call, gpu_of(call.device.index))
