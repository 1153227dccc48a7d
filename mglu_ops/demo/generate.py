"""Sampling from a language model of bytes."""

from __future__ import annotations

import torch

from .train import Forward

PROMPT = b"The syntax for "
TEMPERATURE = 0.7


@torch.no_grad()
def generate(forward: Forward, count: int, context: int, device: torch.device, seed: int) -> bytes:
    """Sample `count` bytes after `PROMPT` at `TEMPERATURE`; each pass reads the last `context` bytes, with no cache."""
    generator = torch.Generator().manual_seed(seed)
    text = list(PROMPT)
    for _ in range(count):
        logits = forward(torch.tensor([text[-context:]], device=device))[0, -1]
        probability = (logits.float() / TEMPERATURE).softmax(0).cpu()
        text.append(int(torch.multinomial(probability, 1, generator=generator)))
    return bytes(text)
