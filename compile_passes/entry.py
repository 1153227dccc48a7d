"""Turns the pass on and off for `torch.compile`: in the whole process, or in a block of one thread.

Inductor has one slot for passes on the graph before autograd, and that slot is a setting. Since torch 2.13 a setting
belongs to a thread, and another library can replace it at any time, for its thread or for one compilation (vLLM gives
its own in `config_patches`). A pass that is left in the slot would silently be absent from some compilations. This
module instead wraps the function of Inductor that each compilation reaches once its settings are final. There the pass
runs after those in the slot, and afterwards the slot is restored.
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
from torch._dynamo import convert_frame
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

_of_process: FusionPass | None = None  # the pass of `enable_fusion`, for the compilations of all threads

_of_thread: ContextVar[FusionPass | None] = ContextVar("fusion_pass", default=None)
"""The pass that overrides `_of_process` in a thread or an asyncio task."""

_global_report = FusionReport()

_unfused_compilations = 0  # how many compilations found no pass, neither for their thread nor for the process


def fusion_report() -> FusionReport:
    """The report of all compilations under `enable_fusion` and `backend="mglu"` in this process."""
    return _global_report


def enable_fusion(*, strict: bool = False, assume_binary: bool = False) -> FusionReport:
    """Fuse MGLU layers in every `torch.compile` with the Inductor backend from now on, in all threads.

    Args:
        strict: raise `FusionError` while compiling, in the thread that compiles, if a layer is recognised but cannot be
            fused, or if Inductor does not run the pass.
        assume_binary: also fuse masks that are real tensors, trusting them to hold 0 and 1 only; `mglu::pack_masks`
            then checks their values at run time.

    Returns:
        The report of `fusion_report()`, which grows with each compilation of any thread.

    Code that was compiled before is dropped in all threads, and compiled again at its next call: Dynamo keeps code by
    class and shapes, and would silently run a new model on the unfused code of an older one. Other threads may run that
    code meanwhile; if another thread is compiling, the call waits. A call that does not change the options neither
    drops code nor waits.

    The options belong to the process. Any thread may call this function or `disable_fusion`, and the last call holds
    for every compilation that begins after it. In its thread, a `fusion()` block overrides these options. A forked
    process inherits them; a spawned one does not, and has to call this function itself.

    The passes of other libraries in Inductor's slot `pre_grad_custom_pass` run first, whenever they were put there. A
    model that is compiled with `options={"pre_grad_custom_pass": compile_passes.entry.NoFusion()}` is not fused.

    Raises:
        TypeError: an option is neither True nor False.
    """
    global _of_process
    fusion_pass = FusionPass(_global_report, strict=strict, assume_binary=assume_binary)
    before, _of_process = _of_process, fusion_pass
    if before is None or before.uuid() != fusion_pass.uuid():
        _drop_compiled_code()
    return _global_report


def disable_fusion() -> None:
    """Undo `enable_fusion` in all threads, whichever of them called it; does nothing if fusion is not enabled.

    Compiled code stays fused until `torch._dynamo.reset()`.
    """
    global _of_process
    _of_process = None


@contextmanager
def fusion(*, strict: bool = False, assume_binary: bool = False) -> Iterator[FusionReport]:
    """Fuse the compilations inside a `with` block, which has its own report; the options are as in `enable_fusion`.

    `torch.compile` compiles at the first call, so that call must be inside the block.

        with mglu_ops.fusion(strict=True) as report:
            torch.compile(model)(x)
        print(report)

    Dynamo reuses code that it compiled before for another model of the same class and shapes. If nothing was compiled
    in the block for that reason, a warning says so; call `torch._dynamo.reset()` before the block.

    A block holds for the thread that enters it (and, as a `contextvars.Context`, for the asyncio tasks that are made in
    it). Blocks of several threads do not mix their options or reports. In other threads the options of `enable_fusion`
    hold; if there are none and such a thread compiles meanwhile, a warning at the end of the block says so.

    Raises:
        FusionError: under `strict`, when a layer was recognised but not fused (while compiling, as the cause of
            torch's error), or when the block ends with nothing fused.
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
    """Say how many graphs were compiled in a block, and how many other threads compiled meanwhile without fusion."""
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
    """Let every compiled function be compiled again at its next call. Waits for a compilation in another thread.

    `torch._dynamo.reset` frees what belongs to compiled code even while another thread is inside of it, and the process
    then ends with a segmentation fault (seen in torch 2.13). So the code is only marked as invalid here, as Dynamo does
    when a guarded object is garbage-collected. At that moment, too, other threads may be inside the code.
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
                    # As if guarded by a local variable that none has: Dynamo does not count such an entry against its
                    # limit of compilations per function.
                    guards.id_matched_objs = {"": weakref.ref(_drop_compiled_code)}
                    entry.guard_manager.extra_state.invalidate(entry, guards)
            # Dynamo no longer compiles a function that was compiled too often; let it begin again.
            set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))


# --- The pass in the compilations of Inductor ------------------------------------------------------------------------


@contextmanager
def used_in_thread(fusion_pass: FusionPass) -> Iterator[None]:
    """Add a pass to the compilations of this thread inside the block; it overrides the pass of the process."""
    token = _of_thread.set(fusion_pass)
    try:
        yield
    finally:
        _of_thread.reset(token)


def current_pass() -> FusionPass | None:
    """The pass for compilations of this thread, from the innermost block or else from `enable_fusion`."""
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
        with convert_frame.compile_lock:
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

    If torch lets a pass choose, it runs before the lookup in the compile cache: then a warm start has the same report
    as a cold one, and the fused graph is the key of the cache.
    """
    early = {"pre_grad_pass_timing": "early"} if hasattr(inductor_config, "pre_grad_pass_timing") else {}
    return {_SLOT: fusion_pass, **early}


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
