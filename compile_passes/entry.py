"""Adds the pass to each compilation of Inductor, in any thread and together with the passes of other libraries.

Inductor has one slot for passes on the graph before autograd, and that slot is a setting. Since torch 2.13 a setting
belongs to a thread, and another library can replace it at any time, for its thread or for one compilation (vLLM gives
its own in `config_patches`). A pass that is left in the slot would silently be absent from some compilations. This
module instead wraps the function of Inductor that each compilation reaches once its settings are final. There the pass
runs after those in the slot, and afterwards the slot is restored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch._inductor.compile_fx as inductor
import torch._inductor.config as inductor_config
from torch._dynamo.convert_frame import compile_lock
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from mglu_ops import notices

from .fusion import FusionError, FusionPass
from .memory import Surroundings

_SLOT = "pre_grad_custom_pass"

_of_process: FusionPass | None = None
"""The pass of `enable_fusion`, for the compilations of all threads."""

_of_thread: ContextVar[FusionPass | None] = ContextVar("fusion_pass", default=None)
"""The pass that overrides `_of_process` in a thread or an asyncio task."""

unfused_compilations = 0
"""How many compilations found no pass, neither for their thread nor for the process."""


def set_for_process(fusion_pass: FusionPass | None) -> FusionPass | None:
    """Add a pass, or none, to the compilations that begin from now on, in every thread that has no pass of its own.

    Returns:
        The pass that it replaces.
    """
    global _of_process
    replaced, _of_process = _of_process, fusion_pass
    return replaced


@contextmanager
def used_in_thread(fusion_pass: FusionPass) -> Iterator[None]:
    """Add a pass to the compilations of this thread inside the block; it overrides the pass of the process."""
    token = _of_thread.set(fusion_pass)
    try:
        yield
    finally:
        _of_thread.reset(token)


def current_pass() -> FusionPass | None:
    """The pass for compilations of this thread, from the innermost block or else from `set_for_process`."""
    return _of_thread.get() or _of_process


class NoFusion(CustomGraphPass):
    """Keeps the pass out of a compilation: `torch.compile(model, options={"pre_grad_custom_pass": NoFusion()})`."""

    def __call__(self, graph: Graph) -> None:
        """Leave the graph unchanged."""

    def uuid(self) -> str:
        return "mglu_ops.NoFusion"


def adding_the_pass(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that compiles a graph under Inductor's settings, so that it runs the current pass as well.

    The wrapper holds Dynamo's lock, as Dynamo itself does, because threads share their settings before torch 2.13.
    """

    @functools.wraps(compile_graph)
    def compile_with_fusion(*args: Any, **kwargs: Any) -> Any:
        with compile_lock:
            fusion_pass = _pass_to_add()
            if fusion_pass is None:
                return compile_graph(*args, **kwargs)
            if args and isinstance(args[0], GraphModule):
                fusion_pass.surroundings = Surroundings(args[0])
            with inductor_config.patch(_settings_of(fusion_pass)):
                compiled = compile_graph(*args, **kwargs)
            if not fusion_pass.has_run:
                _complain(fusion_pass)
            return compiled

    return compile_with_fusion


def _pass_to_add() -> FusionPass | None:
    """The current pass, after those in the slot; None if there is none, or if the slot has a pass of mglu_ops."""
    global unfused_compilations
    slot: Any = getattr(inductor_config, _SLOT)  # a callable or None, and since torch 2.13 also a list
    others = [other for other in (slot if isinstance(slot, (list, tuple)) else [slot]) if other is not None]
    if any(isinstance(other, (FusionPass, NoFusion)) for other in others):
        return None
    current = current_pass()
    if current is None:
        unfused_compilations += 1
        return None
    return current.after(others)


def _settings_of(fusion_pass: FusionPass) -> dict[str, Any]:
    """The settings under which Inductor runs a pass.

    If torch lets a pass choose, it runs before the lookup in the compile cache: then a warm start has the same report
    as a cold one, and the fused graph is the key of the cache.
    """
    settings: dict[str, Any] = {_SLOT: fusion_pass}
    if hasattr(inductor_config, "pre_grad_pass_timing"):
        settings["pre_grad_pass_timing"] = "early"
    return settings


def _complain(fusion_pass: FusionPass) -> None:
    reason = "torch._inductor.config.use_pre_grad_passes is False"
    if inductor_config.use_pre_grad_passes:
        reason = "another library keeps it from doing so; vLLM, before torch 2.12, unless VLLM_ENABLE_PREGRAD_PASSES=1"
    message = (
        f"mglu_ops: nothing was fused in this compilation, because Inductor did not run the passes before autograd "
        f"({reason})"
    )
    if fusion_pass.strict:
        raise FusionError(message)
    notices.warn(message, stacklevel=3)


inductor._compile_fx_main = adding_the_pass(inductor._compile_fx_main)
