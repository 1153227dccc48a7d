"""A small byte-level decoder-only language model, which takes its gated projection as an argument."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .settings import HEAD_WIDTH, Sizes
from .text import VOCABULARY

GatedProjection = Callable[[int, int], nn.Module]
"""Maps `(in_features, out_features)` to a module that computes act(gate) * value."""


class Attention(nn.Module):
    """Causal self-attention; input and output are `[batch, tokens, width]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.inputs = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(x).unflatten(-1, (3, self.heads, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """The gated projection and the output projection; input and output are `[..., width]`."""

    def __init__(self, width: int, hidden: int, gated: GatedProjection) -> None:
        super().__init__()
        self.gated = gated(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gated(x))


class Block(nn.Module):
    """A pre-norm decoder block."""

    def __init__(self, sizes: Sizes, gated: GatedProjection) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.width)
        self.attention = Attention(sizes.width)
        self.feed_forward_norm = nn.RMSNorm(sizes.width)
        self.feed_forward = FeedForward(sizes.width, sizes.hidden, gated)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class LanguageModel(nn.Module):
    """Maps bytes `[batch, tokens]` to logits `[batch, tokens, 256]` of the next byte; positions are learned and
    embeddings tied.
    """

    def __init__(self, sizes: Sizes, gated: GatedProjection) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, sizes.width)
        self.position = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, gated) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        for embedding in (self.embedding, self.position):
            nn.init.normal_(embedding.weight, std=sizes.width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.embedding.weight)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte, computed in float32 or float64."""
    logits = logits if logits.dtype is torch.float64 else logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gated_projections(model: nn.Module) -> list[nn.Module]:
    """Return the gated projection of every layer, in order."""
    return [module.gated for module in model.modules() if isinstance(module, FeedForward)]
