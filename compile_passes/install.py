"""Turning the pass on and off for plain `torch.compile(model)`.

Inductor has one slot for passes at this level, which other libraries use too: what stands there is run first, and put
back afterwards.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch._dynamo
import torch._inductor.config as inductor_config

from . import lowering
from .fusion import FusionError, FusionPass, GraphPass
from .report import FusionReport

lowering.register()

_lock = threading.RLock()
_global_report = FusionReport()


class _EnabledPass(FusionPass):
    """The pass that `enable_fusion` installs. What it replaced stands on it, so that there is no state beside torch's,
    which is of a thread or of the process depending on torch's version.
    """

    replaced: dict[str, Any]


def _slot() -> list[Any]:
    """What stands in Inductor's slot: one callable or None, or since torch 2.13 a list."""
    slot: Any = inductor_config.pre_grad_custom_pass
    return list(slot) if isinstance(slot, (list, tuple)) else [slot]


def current_report() -> FusionReport:
    """The report of the block or the `enable_fusion` that is in force, or the one of the process."""
    return next((p.report for p in _slot() if isinstance(p, FusionPass)), _global_report)


def passes_in_slot() -> list[GraphPass]:
    """The passes of others in Inductor's slot, in order."""
    found: list[GraphPass] = []
    for graph_pass in _slot():
        if isinstance(graph_pass, FusionPass):
            found.extend(graph_pass.before)
        elif graph_pass is not None:
            found.append(graph_pass)
    return found


def config_of(fusion_pass: FusionPass) -> dict[str, Any]:
    """The Inductor settings that put a pass to work.

    Where torch lets a pass run before or after the look-up in the compile cache, ours runs before: a warm start then
    reports what it runs just as a cold one, and the cache is keyed by the fused graph.
    """
    settings: dict[str, Any] = {"pre_grad_custom_pass": fusion_pass}
    if hasattr(inductor_config, "pre_grad_pass_timing"):
        settings["pre_grad_pass_timing"] = "early"
    return settings


def fusion_report() -> FusionReport:
    """The sites met by all compilations under `enable_fusion` and `backend="mglu"` in this process."""
    return _global_report


def enable_fusion(*, strict: bool = False, assume_binary: bool = False) -> FusionReport:
    """Fuse MGLU layers in every `torch.compile` with the Inductor backend from now on.

    Args:
        strict: raise `FusionError` while compiling if a layer is recognised but cannot be fused.
        assume_binary: also fuse masks that are real tensors, trusting them to hold 0 and 1 only; `mglu::pack_masks`
            then checks their values at run time.

    Returns:
        The report that `fusion_report()` gives, which grows with each compilation.

    What was compiled before is dropped, by `torch._dynamo.reset()`, and compiled anew at its next call: Dynamo keeps
    code by class and shapes, and would run a new model on the unfused code of an older one without a word.
    A second call replaces the options of the first. Since torch 2.13 Inductor's settings are of a thread: call this
    in the thread that compiles, or use `backend="mglu"`, which works in any.
    """
    with _lock:
        disable_fusion()
        fusion_pass = _EnabledPass(_global_report, strict=strict, assume_binary=assume_binary, before=passes_in_slot())
        settings = config_of(fusion_pass)
        fusion_pass.replaced = {name: getattr(inductor_config, name) for name in settings}
        for name, value in settings.items():
            setattr(inductor_config, name, value)
        torch._dynamo.reset()
    return _global_report


def disable_fusion() -> None:
    """Undo `enable_fusion`: put back what stood in Inductor's slot. Without effect if fusion is not enabled.

    What was fused stays fused until `torch._dynamo.reset()`. Passes that other libraries put there since then stay,
    also those that took out ours.
    """
    with _lock:
        slot = _slot()
        enabled = next((p for p in slot if isinstance(p, _EnabledPass)), None)
        if enabled is None:
            return
        for name, value in enabled.replaced.items():
            setattr(inductor_config, name, value)
        if len(slot) > 1:
            kept = [list(p.before) if p is enabled else [p] for p in slot]
            inductor_config.pre_grad_custom_pass = [graph_pass for passes in kept for graph_pass in passes]


@contextmanager
def fusion(*, strict: bool = False, assume_binary: bool = False) -> Iterator[FusionReport]:
    """`enable_fusion` for the compilations inside a `with` block, with a report of their own.

    `torch.compile` compiles at the first call, so that call belongs inside the block.

        with mglu_ops.fusion(strict=True) as report:
            torch.compile(model)(x)
        print(report)

    Dynamo runs a model on code that it compiled before for another one of its class and shapes. If nothing was
    compiled in the block for that reason, a warning says so, and `torch._dynamo.reset()` before the block helps.

    Raises:
        FusionError: under `strict`, when a layer was recognised but not fused (while compiling, as the cause of
            torch's error), or when the block ends with nothing fused.
    """
    report = FusionReport()
    fusion_pass = FusionPass(report, strict=strict, assume_binary=assume_binary, before=passes_in_slot())
    with inductor_config.patch(config_of(fusion_pass)):
        yield report
    if strict and not report.fused:
        raise FusionError(f"strict fusion: nothing was fused ({_seen(report)})")
    if not report.graphs:
        warnings.warn(f"mglu_ops.fusion: nothing was fused: {_seen(report)}", UserWarning, stacklevel=3)


def _seen(report: FusionReport) -> str:
    if report.graphs:
        return f"{report.graphs} graphs compiled in the block"
    return (
        "no graph was compiled in the block; either no compiled model was called in it, or it ran code that Dynamo "
        "had compiled before, which torch._dynamo.reset() drops"
    )
