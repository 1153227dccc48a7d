"""Masked Gated Linear Units (arXiv 2506.23225) for PyTorch: operators, modules and a fusion pass for `torch.compile`.

Importing it registers `torch.ops.mglu.*`; all that needs Inductor is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from . import nn, ops
from .batch_invariance import is_batch_invariant_mode_enabled, set_batch_invariant_mode
from .dispatch import explain
from .masks import check_packed_masks
from .nn import freeze

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compile_passes.report import FusionReport

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

_PACKAGING = {
    "build_runtime": "library",
    "export": "export",
    "load": "load",
    "load_library": "library",
    "load_weights": "load",
}
"""What is imported when it is first asked for, and from which module of `packaging`."""


def __getattr__(name: str) -> Any:
    if name not in _PACKAGING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.packaging.{_PACKAGING[name]}"), name)


def fuse(
    gm: GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    report: FusionReport | None = None,
    strict: bool = False,
    assume_binary: bool = False,
) -> GraphModule:
    """A copy of a graph module with its MGLU layers fused; see `compile_passes.fusion.fuse`."""
    from compile_passes import fusion as fusion_pass

    return fusion_pass.fuse(gm, example_inputs, report=report, strict=strict, assume_binary=assume_binary)


def enable_fusion(*, strict: bool = False, assume_binary: bool = False) -> FusionReport:
    """Fuse MGLU layers in every `torch.compile` from now on; see `compile_passes.install.enable_fusion`."""
    from compile_passes import install

    return install.enable_fusion(strict=strict, assume_binary=assume_binary)


def disable_fusion() -> None:
    """Undo `enable_fusion`, and put back the pass that stood in Inductor's slot before."""
    from compile_passes import install

    install.disable_fusion()


def fusion(*, strict: bool = False, assume_binary: bool = False) -> AbstractContextManager[FusionReport]:
    """Fuse the compilations inside a `with` block; see `compile_passes.install.fusion`."""
    from compile_passes import install

    return install.fusion(strict=strict, assume_binary=assume_binary)


def fusion_report() -> FusionReport:
    """What was fused in this process under `enable_fusion` and `backend="mglu"`, and what was missed and why."""
    from compile_passes import install

    return install.fusion_report()
