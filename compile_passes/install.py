"""Turns the pass on and off for plain `torch.compile(model)`.

Inductor has one slot for passes on the graph before autograd, and other libraries use it too: a pass that is there runs
first, and is restored when fusion is turned off.
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
    """The pass that `enable_fusion` installs.

    Torch's settings belong to a thread or to the process, depending on its version. The settings that the pass replaced
    are stored in the pass itself, so they have the same scope.
    """

    replaced: dict[str, Any]


def _slot() -> list[Any]:
    """The content of Inductor's slot as a list: it holds a callable or None, and since torch 2.13 also a list."""
    slot: Any = inductor_config.pre_grad_custom_pass
    return list(slot) if isinstance(slot, (list, tuple)) else [slot]


def current_report() -> FusionReport:
    """The report of the active `fusion()` block or `enable_fusion()`, or else the report of the process."""
    return next((p.report for p in _slot() if isinstance(p, FusionPass)), _global_report)


def passes_in_slot() -> list[GraphPass]:
    """The passes of other libraries in Inductor's slot, in order."""
    found: list[GraphPass] = []
    for graph_pass in _slot():
        if isinstance(graph_pass, FusionPass):
            found.extend(graph_pass.before)
        elif graph_pass is not None:
            found.append(graph_pass)
    return found


def config_of(fusion_pass: FusionPass) -> dict[str, Any]:
    """The Inductor settings that install a pass.

    If torch can run a pass before or after the look-up in the compile cache, this pass runs before it: then a warm
    start has the same report as a cold one, and the fused graph is the key of the cache.
    """
    settings: dict[str, Any] = {"pre_grad_custom_pass": fusion_pass}
    if hasattr(inductor_config, "pre_grad_pass_timing"):
        settings["pre_grad_pass_timing"] = "early"
    return settings


def fusion_report() -> FusionReport:
    """The report of all compilations under `enable_fusion` and `backend="mglu"` in this process."""
    return _global_report


def enable_fusion(*, strict: bool = False, assume_binary: bool = False) -> FusionReport:
    """Fuse MGLU layers in every `torch.compile` with the Inductor backend from now on.

    Args:
        strict: raise `FusionError` while compiling if a layer is recognised but cannot be fused.
        assume_binary: also fuse masks that are real tensors, trusting them to hold 0 and 1 only; `mglu::pack_masks`
            then checks their values at run time.

    Returns:
        The report of `fusion_report()`, which grows with each compilation.

    Code that was compiled before is dropped by `torch._dynamo.reset()` and compiled again at its next call: Dynamo
    keeps code by class and shapes, and would silently run a new model on the unfused code of an older one. A second
    call replaces the options of the first. Since torch 2.13 Inductor's settings belong to a thread: call this function
    in the thread that compiles, or use `backend="mglu"`, which works in any thread.
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
    """Undo `enable_fusion` and restore Inductor's slot; without effect if fusion is not enabled.

    Compiled code stays fused until `torch._dynamo.reset()`. Passes that other libraries have installed since then stay,
    also if they replaced this one.
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
    """Fuse the compilations inside a `with` block, with a report of their own.

    `torch.compile` compiles at the first call, so that call must be inside the block.

        with mglu_ops.fusion(strict=True) as report:
            torch.compile(model)(x)
        print(report)

    Dynamo reuses code that it compiled before for another model of the same class and shapes. If nothing was compiled
    in the block for that reason, a warning says so; call `torch._dynamo.reset()` before the block.

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
        "no graph was compiled in the block; either no compiled model was called in it, or Dynamo reused code that it "
        "had compiled before; call torch._dynamo.reset() before the block"
    )
