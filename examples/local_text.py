"""Text for the examples that train language models: Python's own source files, one token a byte. No download."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIBRARY = Path(os.__file__).parent
MANUAL = LIBRARY / "pydoc_data" / "topics.py"  # the chapters of Python's manual that help() shows: mostly English

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    "small": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4},
}
"""Sizes of models, for their configurations."""

COMMON: dict[str, Any] = {"vocab_size": 256, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None}
LENGTH = 128
"""Tokens of an example in training."""


def encode(text: str) -> Tensor:
    """The tokens `[length]` of a text: its bytes in UTF-8."""
    return torch.tensor(list(text.encode()), dtype=torch.long)


def decode(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode(errors="replace")


def read(number: int, *files: Path) -> Tensor:
    """The first `number` tokens of some files; without files, of the modules of the standard library."""
    paths = files or sorted(LIBRARY.glob("*.py"))
    text = b""
    for path in paths:
        text += path.read_bytes()
        if len(text) >= number:
            break
    return torch.frombuffer(bytearray(text[:number]), dtype=torch.uint8).long()


def split(tokens: Tensor, length: int = LENGTH) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Cut tokens into examples for `transformers.Trainer`; every tenth is kept back for evaluation."""
    rows = [{"input_ids": row, "labels": row} for row in tokens[: len(tokens) // length * length].view(-1, length)]
    return [row for i, row in enumerate(rows) if i % 10], rows[::10]
