"""The settings of a run of the demo: text, sizes, device and dtype."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import UserError

HEAD_WIDTH = 32


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of its training; `context` is in bytes of text, `batch` in sequences."""

    layers: int
    width: int
    context: int
    batch: int
    steps: int

    @property
    def hidden(self) -> int:
        """Width inside a feed-forward layer."""
        return 4 * self.width


# With these sizes the whole command takes about 3 minutes, on two CPU cores or on a GPU.
DEFAULT_SIZES = {
    "cpu": Sizes(layers=2, width=128, context=128, batch=8, steps=300),
    "cuda": Sizes(layers=6, width=512, context=256, batch=64, steps=250),
}


@dataclass(frozen=True)
class Settings:
    """One run of the demo."""

    sizes: Sizes
    n_masks: int
    layer: tuple[int, int]
    """out_features and in_features of the layer that is timed last."""
    device: torch.device
    seed: int
    text: Path | None
    json: Path | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrix products: float32 on the CPU, bfloat16 (by autocast in training) on a GPU."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context that a forward pass of training runs in."""
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def choose(options: argparse.Namespace) -> Settings:
    """Return the settings that the options ask for, with the defaults of the device for the rest.

    Raises:
        UserError: the device does not exist, or a size is not possible.
    """
    device = _device(options.device)
    default = DEFAULT_SIZES[device.type]
    sizes = Sizes(**{name: getattr(options, name) or getattr(default, name) for name in default.__dataclass_fields__})
    if sizes.width % HEAD_WIDTH:
        raise UserError(f"--width: got {sizes.width}, must be a multiple of {HEAD_WIDTH}")
    return Settings(sizes, options.n_masks, options.layer, device, options.seed, options.text, options.json)


def _device(name: str | None) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name or ("cuda" if gpus else "cpu"))
    except RuntimeError:
        raise UserError(f"--device: got {name!r}, must be cpu, cuda or cuda:N") from None
    if device.type not in DEFAULT_SIZES:
        raise UserError(f"--device: got {name!r}, must be cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise UserError(f"--device: got {name!r}, but the number of CUDA GPUs that torch sees is {gpus}")
    return device
