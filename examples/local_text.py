"""Text for examples that train language models: Python's own source files, with one token per byte.

`save` writes a model with a byte tokenizer, so that `evaluate.py`, vLLM and pipelines can use the model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

OUTPUT = "build/examples"  # the examples write into this folder, which git ignores
LIBRARY = Path(os.__file__).parent
MANUAL = LIBRARY / "pydoc_data" / "topics.py"  # the parts of Python's manual that help() shows, mostly English

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1},
    "small": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4},
}
"""Sizes for the configurations of models. Heads have 32 features, the fewest that vLLM supports on a CPU."""

COMMON: dict[str, Any] = {"vocab_size": 256, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None}
LENGTH = 128
"""The number of tokens in a training example."""


def encode(text: str) -> Tensor:
    """The tokens `[length]` of a text: its bytes in UTF-8."""
    return torch.tensor(list(text.encode()), dtype=torch.long)


def decode(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode(errors="replace")


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that gives the same tokens as `encode`. Token 0 ends a text, because texts have no zero bytes."""
    # As in GPT-2's vocabulary, characters with code points above 255 stand for bytes that cannot be printed.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    characters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    vocabulary = {character: token for token, character in enumerate(["<eos>", *characters[1:]])}
    bytewise = Tokenizer(models.BPE(vocabulary, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    length = COMMON["max_position_embeddings"]
    return PreTrainedTokenizerFast(
        tokenizer_object=bytewise, eos_token="<eos>", pad_token="<eos>", model_max_length=length
    )


def save(model: Any, folder: str) -> None:
    """Save a model and its tokenizer."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def read(number: int, *files: Path) -> Tensor:
    """The first `number` bytes of `files`, by default of the standard library's modules, as tokens."""
    paths = files or sorted(LIBRARY.glob("*.py"))
    text = b""
    for path in paths:
        text += path.read_bytes()
        if len(text) >= number:
            break
    return torch.frombuffer(bytearray(text[:number]), dtype=torch.uint8).long()


def split(tokens: Tensor, length: int = LENGTH) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Cut tokens into examples for `transformers.Trainer`. Every tenth is for evaluation, all others for training."""
    rows = [{"input_ids": row, "labels": row} for row in tokens[: len(tokens) // length * length].view(-1, length)]
    return [row for i, row in enumerate(rows) if i % 10], rows[::10]
