"""The text to learn: its training part, its held-out part, and the batches of both."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError

VOCABULARY = 256
HELD_OUT_FRACTION = 0.1


@dataclass(frozen=True)
class Corpus:
    """A text in two parts; `train` and `held_out` are int64 `[bytes]` with values 0 to 255."""

    name: str
    train: Tensor
    held_out: Tensor

    def train_batches(self, batch: int, context: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `steps` batches of random windows, chosen by `seed`: inputs and next bytes, each `[batch, context]`."""
        generator = torch.Generator().manual_seed(seed)
        offsets = torch.arange(context + 1)
        for _ in range(steps):
            starts = torch.randint(len(self.train) - context, (batch, 1), generator=generator)
            windows = self.train[starts + offsets]
            yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def held_out_batches(self, batch: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the held-out text in adjacent windows, so that each byte is predicted once; a last part is left out."""
        count = (len(self.held_out) - 1) // context
        inputs = self.held_out[: count * context].view(count, context)
        targets = self.held_out[1 : count * context + 1].view(count, context)
        yield from zip(inputs.split(batch), targets.split(batch), strict=True)

    def unigram_perplexity(self) -> float:
        """Perplexity of the held-out text under the byte frequencies of the training text, with add-one smoothing."""
        counts = torch.bincount(self.train, minlength=VOCABULARY).double() + 1
        log_probability = (counts / counts.sum()).log()
        return float((-log_probability[self.held_out].mean()).exp())


def load(path: Path | None, context: int) -> Corpus:
    """Read a file, or Python's language reference if `path` is None.

    Raises:
        UserError: the file cannot be read, is empty, or its held-out part is shorter than one context.
    """
    name, content = ("Python's language reference", _reference()) if path is None else (str(path), _read(path))
    needed = int((context + 1) / HELD_OUT_FRACTION) + 1
    if len(content) < needed:
        words = "is empty" if not content else f"has {len(content)} bytes"
        raise UserError(f"--text: {name} {words}; at least {needed} are needed for a context of {context} bytes")
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    held_out = int(len(data) * HELD_OUT_FRACTION)
    return Corpus(name, data[:-held_out], data[-held_out:])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"--text: cannot read {path}: {error.strerror}") from None


def _reference() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError("--text: this Python has no pydoc_data, which holds the default text; name a file") from None
    return "\n\n".join(f"{name}\n{text}" for name, text in sorted(topics.items())).encode()


def printable(content: bytes) -> str:
    """Return bytes as text for the terminal, with control characters and what its encoding lacks escaped."""
    text = content.decode("utf-8", errors="backslashreplace")
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    encoding = sys.stdout.encoding or "ascii"
    return shown.encode(encoding, errors="backslashreplace").decode(encoding)
