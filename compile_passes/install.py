"""Turns the pass on and off for plain `torch.compile(model)`: in the whole process, or in a block of one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mglu_ops import notices
from mglu_ops.words import counted

from . import entry
from .compiled_code import drop_compiled_code
from .fusion import FusionError, FusionPass
from .report import FusionReport

_global_report = FusionReport()

_in_force: FusionPass | None = None
"""The pass that the last `enable_fusion` added."""


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
    global _in_force
    fusion_pass = FusionPass(_global_report, strict=strict, assume_binary=assume_binary)
    before = entry.set_for_process(fusion_pass)
    if before is None or before is not _in_force or before.uuid() != fusion_pass.uuid():
        drop_compiled_code()
    _in_force = fusion_pass
    return _global_report


def disable_fusion() -> None:
    """Undo `enable_fusion` in all threads, whichever of them called it; does nothing if fusion is not enabled.

    Compiled code stays fused until `torch._dynamo.reset()`.
    """
    entry.set_for_process(None)


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
    before = entry.unfused_compilations
    fusion_pass = FusionPass(report, strict=strict, assume_binary=assume_binary)
    with entry.used_in_thread(fusion_pass):
        yield report
    seen = _seen(report, entry.unfused_compilations - before)
    if strict and not report.fused and not report.present:
        raise FusionError(f"strict fusion: nothing was fused ({seen})")
    if not report.graphs:
        notices.warn(f"mglu_ops.fusion: nothing was fused: {seen}", stacklevel=3)
    elif entry.unfused_compilations > before:
        notices.warn(f"mglu_ops.fusion: {seen}", stacklevel=3)


def _seen(report: FusionReport, elsewhere: int) -> str:
    """Say how many graphs were compiled in a block, and how many other threads compiled meanwhile without fusion."""
    if not report.graphs and not elsewhere:
        return (
            "no graph was compiled in the block; either no compiled model was called in it, or Dynamo reused code that "
            "it had compiled before; call torch._dynamo.reset() before the block"
        )
    seen = f"{counted(report.graphs, 'graph')} compiled in the block"
    if elsewhere:
        seen += (
            f", and {counted(elsewhere, 'graph')} without fusion in other threads, for which the block does not hold; "
            "mglu_ops.enable_fusion() holds for all threads"
        )
    return seen
