"""Turns the pass on and off for `torch.compile`: in the whole process, or in a block of one thread.

Inductor has one slot for passes on the graph before autograd: the setting `pre_grad_custom_pass`. Since torch 2.13
settings belong to a thread. Another library can replace the settings at any time, for one thread or for one compilation
(vLLM sets its own pass in `config_patches`). So a pass in the slot would silently be missing from some compilations.
Therefore this module wraps a function of Inductor that each compilation calls after its settings are final. During that
call, the wrapper appends the fusion pass to the passes in the slot.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch._dynamo
import torch._inductor.compile_fx as inductor
import torch._inductor.config as inductor_config
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo import compiled_autograd, convert_frame
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from mglu_ops import notices
from mglu_ops.words import counted

from .fusion import FusionError, FusionPass
from .memory import Surroundings
from .report import FusionReport

_SLOT = "pre_grad_custom_pass"

_process_pass: FusionPass | None = None  # the pass of `enable_fusion`, for the compilations of all threads

_thread_pass: ContextVar[FusionPass | None] = ContextVar("fusion_pass", default=None)
"""The pass that overrides `_process_pass` in a thread or an asyncio task."""

_global_report = FusionReport()

_unfused_compilations = 0  # the number of compilations for which neither the thread nor the process had a pass


def fusion_report() -> FusionReport:
    """The report of all compilations under `enable_fusion` and `backend="mglu"` in this process."""
    return _global_report


def enable_fusion(*, strict: bool = False, assume_binary: bool = False) -> FusionReport:
    """Fuse MGLU layers in every `torch.compile` with the Inductor backend from now on, in all threads.

    Args:
        strict: raise `FusionError` while compiling, in the thread that compiles, if a layer is recognised but cannot be
            fused, or if Inductor does not run the pass.
        assume_binary: also fuse float and integer masks that nothing proves to be binary, trusting them to hold only 0
            and 1. `mglu::pack_masks` then checks their values at run time.

    Returns:
        The report of `fusion_report()`, which grows with each compilation of any thread.

    This function drops compiled code in all threads, even while a thread runs it, and the next call of a model compiles
    again. Otherwise Dynamo, which looks up code by class and shapes, would silently run a new model on the unfused code
    of an older model. If another thread is compiling, this function waits until the thread has finished. A call that
    does not change the options neither drops code nor waits.

    The options belong to the process. Any thread may call this function or `disable_fusion`, and the last call holds
    for every compilation that begins after it. A `fusion()` block overrides these options in the thread that enters it.
    A forked process inherits the options; a spawned process must call this function itself.

    Passes of other libraries in Inductor's slot `pre_grad_custom_pass` run first. To exclude one model from fusion,
    compile it with `options={"pre_grad_custom_pass": compile_passes.entry.NoFusion()}`.

    Raises:
        TypeError: an option is neither True nor False.
    """
    global _process_pass
    fusion_pass = FusionPass(_global_report, strict=strict, assume_binary=assume_binary)
    before, _process_pass = _process_pass, fusion_pass
    if before is None or before.uuid() != fusion_pass.uuid():
        _drop_compiled_code()
    return _global_report


def disable_fusion() -> None:
    """Undo `enable_fusion` in all threads. Does nothing if fusion is not enabled.

    Compiled code stays fused until `torch._dynamo.reset()`.
    """
    global _process_pass
    _process_pass = None


@contextmanager
def fusion(*, strict: bool = False, assume_binary: bool = False) -> Iterator[FusionReport]:
    """Fuse MGLU layers in the compilations inside a `with` block, with the same options as `enable_fusion`.

    The block has its own report. `torch.compile` compiles at the first call of the model, so call the model inside the
    block:

        with mglu_ops.fusion(strict=True) as report:
            torch.compile(model)(x)
        print(report)

    If Dynamo reuses the code of another model of the same class and shapes, it compiles nothing in the block, and a
    warning says so. To prevent the reuse, call `torch._dynamo.reset()` before the block.

    A block holds for the thread that enters it and for asyncio tasks created in the block, as context variables do.
    Blocks of several threads do not mix their options or reports. Other threads follow `enable_fusion`. If fusion is
    not enabled and another thread compiles during the block, a warning at the end of the block says so.

    Raises:
        FusionError: under `strict`, if a layer is recognised but not fused (while compiling, as the cause of torch's
            error), or if nothing was fused by the end of the block.
    """
    report = FusionReport()
    before = _unfused_compilations
    fusion_pass = FusionPass(report, strict=strict, assume_binary=assume_binary)
    with used_in_thread(fusion_pass):
        yield report
    seen = _seen(report, _unfused_compilations - before)
    if strict and not report.fused and not report.present:
        raise FusionError(f"strict fusion: nothing was fused ({seen})")
    if not report.graphs:
        notices.warn(f"mglu_ops.fusion: nothing was fused: {seen}", stacklevel=3)
    elif _unfused_compilations > before:
        notices.warn(f"mglu_ops.fusion: {seen}", stacklevel=3)


def _seen(report: FusionReport, elsewhere: int) -> str:
    """A sentence about the graphs compiled in a block. Other threads compiled `elsewhere` graphs in the meantime."""
    if not report.graphs and not elsewhere:
        return (
            "no graph was compiled in the block; either no compiled model was called in it, or Dynamo reused code that "
            "it had compiled before (call torch._dynamo.reset() before the block), or it left the function to Python "
            "because of a graph break in a loop (TORCH_LOGS=graph_breaks shows it; with torch.where or x[indices], as "
            "in loops over experts, torch._dynamo.config.capture_dynamic_output_shape_ops = True keeps the graph whole)"
        )
    seen = f"{counted(report.graphs, 'graph')} compiled in the block"
    if elsewhere:
        seen += (
            f", and {counted(elsewhere, 'graph')} without fusion in other threads, for which the block does not hold; "
            "mglu_ops.enable_fusion() holds for all threads"
        )
    return seen


def _drop_compiled_code() -> None:
    """Make Dynamo compile every function again at its next call. Waits for a compilation in another thread.

    `torch._dynamo.reset` would free compiled code while another thread is running it, which crashes the process (seen
    in torch 2.13). So this function only invalidates the code, as Dynamo does when a guarded object is
    garbage-collected. That is safe while other threads run the code.
    """
    with convert_frame.compile_lock:
        torch._dynamo.reset_code_state()
        for reference in list(convert_frame.input_codes.seen):
            code = reference()
            if code is None:
                continue
            for entry in _debug_get_cache_entry_list(code):
                if entry.guard_manager.extra_state is not None:
                    guards = DeletedGuardManagerWrapper("mglu_ops.enable_fusion was called")
                    # Make the entry look guarded by a local variable that no frame has. Dynamo does not count such an
                    # entry against its limit of compilations per function.
                    guards.id_matched_objs = {"": weakref.ref(_drop_compiled_code)}
                    entry.guard_manager.extra_state.invalidate(entry, guards)
            # If Dynamo has compiled a function too many times, it runs the function eagerly. Let it compile again.
            set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))


# --- The pass in the compilations of Inductor ------------------------------------------------------------------------


@contextmanager
def used_in_thread(fusion_pass: FusionPass) -> Iterator[None]:
    """Add a pass to this thread's compilations inside the block, instead of the pass of the process."""
    token = _thread_pass.set(fusion_pass)
    try:
        yield
    finally:
        _thread_pass.reset(token)


def current_pass() -> FusionPass | None:
    """The pass for compilations of this thread; None if there is none.

    It is the pass of the innermost `used_in_thread` block. Outside of such blocks it is that of `enable_fusion`.
    """
    return _thread_pass.get() or _process_pass


class NoFusion(CustomGraphPass):
    """Keeps the pass out of a compilation: `torch.compile(model, options={"pre_grad_custom_pass": NoFusion()})`."""

    def __call__(self, graph: Graph) -> None:
        """Leave the graph unchanged."""

    def uuid(self) -> str:
        return "mglu_ops.NoFusion"


def adding_the_pass(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that compiles a graph under Inductor's settings, so that it also runs the current fusion pass.

    The wrapper holds Dynamo's compile lock, because threads share Inductor's settings before torch 2.13.
    """

    @functools.wraps(compile_graph)
    def compile_with_fusion(*args: Any, **kwargs: Any) -> Any:
        with convert_frame.compile_lock:
            fusion_pass = _pass_to_add()
            if fusion_pass is None:
                return compile_graph(*args, **kwargs)
            if args and isinstance(args[0], GraphModule):
                fusion_pass.surroundings = Surroundings(args[0])
            with inductor_config.patch(_settings_of(fusion_pass)):
                compiled = compile_graph(*args, **kwargs)
            # Inductor runs no such passes on the backward graphs of compiled autograd, which have no layers.
            if not (fusion_pass.has_run or compiled_autograd.in_compiled_autograd_region):
                _complain(fusion_pass)
            return compiled

    return compile_with_fusion


def _pass_to_add() -> FusionPass | None:
    """A copy of the current pass that first runs the passes in the slot.

    None if there is no current pass, or if the slot already has a pass of mglu_ops.
    """
    global _unfused_compilations
    slot: Any = getattr(inductor_config, _SLOT)  # a callable or None, and since torch 2.13 also a list
    others = [other for other in (slot if isinstance(slot, (list, tuple)) else [slot]) if other is not None]
    if any(isinstance(other, (FusionPass, NoFusion)) for other in others):
        return None
    current = current_pass()
    if current is None:
        _unfused_compilations += 1
        return None
    return current.after(others)


def _settings_of(fusion_pass: FusionPass) -> dict[str, Any]:
    """The settings under which Inductor runs a pass.

    If this version of torch allows it, the pass runs before the lookup in the compile cache. So a warm start reports
    the same layers as a cold start, and the cache looks up the fused graph.
    """
    early = {"pre_grad_pass_timing": "early"} if hasattr(inductor_config, "pre_grad_pass_timing") else {}
    return {_SLOT: fusion_pass, **early}


def _complain(fusion_pass: FusionPass) -> None:
    reason = "torch._inductor.config.use_pre_grad_passes is False"
    if inductor_config.use_pre_grad_passes:
        reason = "another library keeps it from doing so, such as vLLM with VLLM_ENABLE_PREGRAD_PASSES=0"
    message = (
        f"mglu_ops: nothing was fused in this compilation, because Inductor did not run the passes before autograd "
        f"({reason})"
    )
    if fusion_pass.strict:
        raise FusionError(message)
    notices.warn(message, stacklevel=3)


inductor._compile_fx_main = adding_the_pass(inductor._compile_fx_main)
