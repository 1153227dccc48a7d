"""Models of Hugging Face Transformers with MGLU feed-forward layers (`architectures.py` lists them).

Importing this package registers the models with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`. It needs
transformers 5.17 or later: `pip install ".[transformers]"` in a clone. README.md beside this file has examples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed

from . import requirements  # noqa: F401 (checks what is installed, before the imports below need it)
from .architectures import *  # noqa: F403 (the configurations and models)
from .architectures import __all__ as _classes
from .conversion import convert, from_swiglu
from .modeling import freeze
from .quantization import MGLUQuantizationConfig
from .routing import load_balancing_loss

if TYPE_CHECKING:
    from .training import MGLUTrainer, MGLUTrainerMixin

__all__ = [
    "MGLUQuantizationConfig",
    "MGLUTrainer",
    "MGLUTrainerMixin",
    "convert",
    "freeze",
    "from_swiglu",
    "load_balancing_loss",
    *_classes,
]

if torch.distributed.is_available():
    from ..parallel import register_transformers_style

    register_transformers_style()  # the tensor-parallel plans of the configurations name styles such as "mglu_colwise"


def __getattr__(name: str) -> Any:
    """Import the Trainer classes when they are used: importing them takes longer than all other imports together."""
    if name not in ("MGLUTrainer", "MGLUTrainerMixin"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import training

    return getattr(training, name)
