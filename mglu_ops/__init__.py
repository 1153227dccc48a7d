"""Masked Gated Linear Units (arXiv 2506.23225) for PyTorch: operators, modules and a fusion pass for `torch.compile`.

Importing this package registers `torch.ops.mglu.*`. The other public names are imported when they are first used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from .errors import importing_passes

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compile_passes.report import FusionReport

    from . import nn, ops
    from .batch_invariance import is_batch_invariant_mode_enabled, set_batch_invariant_mode
    from .dispatch import explain
    from .dispatch import explain as explain_dispatch
    from .masks import check_packed_masks
    from .nn import freeze
    from .packaging.export import export
    from .packaging.library import build_runtime, load_library
    from .packaging.load import load, load_weights

__version__ = "0.1.0"

__all__ = [
    "build_runtime",
    "check_packed_masks",
    "disable_fusion",
    "enable_fusion",
    "explain",
    "explain_dispatch",
    "export",
    "freeze",
    "fuse",
    "fusion",
    "fusion_report",
    "is_batch_invariant_mode_enabled",
    "load",
    "load_library",
    "load_weights",
    "nn",
    "ops",
    "set_batch_invariant_mode",
]

_DEFINED_IN = {
    "build_runtime": "packaging.library",
    "check_packed_masks": "masks",
    "explain": "dispatch",  # the older name of explain_dispatch
    "explain_dispatch": "dispatch:explain",
    "export": "packaging.export",
    "freeze": "nn",
    "is_batch_invariant_mode_enabled": "batch_invariance",
    "load": "packaging.load",
    "load_library": "packaging.library",
    "load_weights": "packaging.load",
    "set_batch_invariant_mode": "batch_invariance",
}
"""The module that defines a public name, and after a colon the name it has there, if that differs."""


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module, _, attribute = _DEFINED_IN[name].partition(":")
    value = getattr(importlib.import_module(f".{module}", __name__), attribute or name)
    globals()[name] = value  # later uses do not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _runs_as_a_command() -> bool:
    """Whether `python -m mglu_ops` is importing this package.

    `__main__` imports `nn` and `ops` once it has parsed the options, so that `--help` does not wait for torch.
    """
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == __name__


def fuse(
    gm: GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    report: FusionReport | None = None,
    strict: bool = False,
    assume_binary: bool = False,
) -> GraphModule:
    """Return a copy of a graph module with its MGLU layers fused; see `compile_passes.fusion.fuse`."""
    with importing_passes():
        from compile_passes import fusion as fusion_pass

    return fusion_pass.fuse(gm, example_inputs, report=report, strict=strict, assume_binary=assume_binary)


def enable_fusion(*, strict: bool = False, assume_binary: bool = False, dependent_launch: bool = True) -> FusionReport:
    """Fuse MGLU layers in every `torch.compile` of all threads; see `compile_passes.install.enable_fusion`."""
    with importing_passes():
        from compile_passes import install

    return install.enable_fusion(strict=strict, assume_binary=assume_binary, dependent_launch=dependent_launch)


def disable_fusion() -> None:
    """Undo `enable_fusion`, in all threads."""
    with importing_passes():
        from compile_passes import install

    install.disable_fusion()


def fusion(
    *, strict: bool = False, assume_binary: bool = False, dependent_launch: bool = True
) -> AbstractContextManager[FusionReport]:
    """Fuse the compilations of this thread inside a `with` block; see `compile_passes.install.fusion`."""
    with importing_passes():
        from compile_passes import install

    return install.fusion(strict=strict, assume_binary=assume_binary, dependent_launch=dependent_launch)


def fusion_report() -> FusionReport:
    """Report what `enable_fusion` and `backend="mglu"` fused in this process, what they missed, and why."""
    with importing_passes():
        from compile_passes import install

    return install.fusion_report()


if not _runs_as_a_command():
    from . import nn, ops
