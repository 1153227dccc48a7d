"""The only module of `mglu_ops` that imports `compile_passes`, which itself depends on `mglu_ops`.

The names in this module are imported on first use, since importing some of them imports Inductor.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    from compile_passes.entry import current_pass, disable_fusion, enable_fusion, fusion, fusion_report
    from compile_passes.explain import add_parser
    from compile_passes.exported import fuse_exported, layers_of
    from compile_passes.fusion import FusionError, fuse
    from compile_passes.report import FusionReport

_NAMES_OF = {
    "entry": ("current_pass", "disable_fusion", "enable_fusion", "fusion", "fusion_report"),
    "explain": ("add_parser",),
    "exported": ("fuse_exported", "layers_of"),
    "fusion": ("FusionError", "fuse"),
    "report": ("FusionReport",),
}
_DEFINED_IN = {name: module for module, names in _NAMES_OF.items() for name in names}

__all__ = [
    "FusionError",
    "FusionReport",
    "add_parser",
    "current_pass",
    "disable_fusion",
    "enable_fusion",
    "fuse",
    "fuse_exported",
    "fusion",
    "fusion_report",
    "is_imported",
    "layers_of",
]


class HiddenPackageError(UserError, ImportError):
    """Python imports another package called `compile_passes` than the one installed with `mglu_ops`."""


def is_imported() -> bool:
    """True if the pass has been imported. If not, it is not enabled, and asking for it would import Inductor."""
    return "compile_passes.entry" in sys.modules


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"compile_passes.{_DEFINED_IN[name]}")
    except ImportError as error:
        found = _path_of("compile_passes")
        if found is None or found.parent == Path(__file__).resolve().parents[1]:
            raise
        raise HiddenPackageError(
            f"mglu_ops comes with a package compile_passes, but Python finds {found} in its place: rename that one, or "
            "put its folder later in sys.path"
        ) from error
    return getattr(module, name)


def _path_of(package: str) -> Path | None:
    """The folder of a package or the file of a module; None if Python finds neither."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    paths = spec.submodule_search_locations or [spec.origin or ""]
    return Path(next(iter(paths))).resolve()
