"""Masked Gated Linear Units (arXiv 2506.23225) for PyTorch: operators, modules and a fusion pass for `torch.compile`.

Importing this package registers `torch.ops.mglu.*`. The other public names are imported when they are first used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import nn, ops
    from .batch_invariance import is_batch_invariant_mode_enabled, set_batch_invariant_mode
    from .dispatch import explain_dispatch
    from .masks import check_packed_masks
    from .nn import dequantize, freeze, quantize
    from .packaging.export import export
    from .packaging.library import build_runtime
    from .packaging.load import load, load_weights
    from .packaging.seal import PackageError
    from .passes import disable_fusion, enable_fusion, fuse, fusion, fusion_report

__version__ = "0.1.0"

__all__ = [
    "PackageError",
    "build_runtime",
    "check_packed_masks",
    "dequantize",
    "disable_fusion",
    "enable_fusion",
    "explain_dispatch",
    "export",
    "freeze",
    "fuse",
    "fusion",
    "fusion_report",
    "is_batch_invariant_mode_enabled",
    "load",
    "load_weights",
    "nn",
    "ops",
    "quantize",
    "set_batch_invariant_mode",
]

_NAMES_OF = {
    "batch_invariance": ("is_batch_invariant_mode_enabled", "set_batch_invariant_mode"),
    "dispatch": ("explain_dispatch",),
    "masks": ("check_packed_masks",),
    "nn": ("dequantize", "freeze", "quantize"),
    "packaging.export": ("export",),
    "packaging.library": ("build_runtime",),
    "packaging.load": ("load", "load_weights"),
    "packaging.seal": ("PackageError",),
    "passes": ("disable_fusion", "enable_fusion", "fuse", "fusion", "fusion_report"),
}
_DEFINED_IN = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f".{_DEFINED_IN[name]}", __name__), name)
    globals()[name] = value  # so later uses do not call this function
    return value


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def _runs_as_a_command() -> bool:
    """True if this import comes from `python -m mglu_ops`.

    `__main__` imports `nn` and `ops` after it has parsed the options, so `--help` does not wait for torch.
    """
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == __name__


if not _runs_as_a_command():
    from . import nn, ops
