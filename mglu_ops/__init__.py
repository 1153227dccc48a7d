"""Masked Gated Linear Units (arXiv 2506.23225) for PyTorch: operators, modules and a fusion pass for `torch.compile`.

Importing it registers `torch.ops.mglu.*`; all that needs Inductor is imported when it is used.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from . import nn, ops
from .dispatch import choose as explain
from .masks import check_packed_masks
from .nn import freeze

if TYPE_CHECKING:
    from compile_passes.report import FusionReport

__version__ = "0.1.0"

__all__ = [
    "check_packed_masks",
    "disable_fusion",
    "enable_fusion",
    "explain",
    "freeze",
    "fusion",
    "fusion_report",
    "nn",
    "ops",
]


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
