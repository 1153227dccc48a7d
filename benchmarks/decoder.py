"""A decoder-only language model like Llama that takes one token at a time. Its gated projection is an argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, by default Llama-3.2 1B's. `context` is the number of tokens that fit in the cache."""

    layers: int = 16
    hidden: int = 2048
    intermediate: int = 8192
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    context: int = 256
    rope_base: float = 500_000.0

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads


@contextmanager
def creating(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Create tensors on a device and in a dtype by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding of `heads` `[..., head_width]` by angles `[head_width / 2]`."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def angles(sizes: Sizes) -> Tensor:
    """The angles of the rotation at each position, float64 `[context, head_width / 2]`."""
    halves = torch.arange(0, sizes.head_width, 2, dtype=torch.float64) / sizes.head_width
    return torch.outer(torch.arange(sizes.context, dtype=torch.float64), sizes.rope_base**-halves)


class Attention(nn.Module):
    """Attention of each sequence's current token to itself and to the tokens in the cache."""

    keys: Tensor
    values: Tensor

    def __init__(self, sizes: Sizes, batch: int) -> None:
        super().__init__()
        self.kv_heads, self.head_width = sizes.kv_heads, sizes.head_width
        self.inputs = nn.Linear(sizes.hidden, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_width, bias=False)
        self.output = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        cache = torch.zeros(batch, sizes.kv_heads, sizes.context, sizes.head_width)
        self.register_buffer("keys", cache)
        self.register_buffer("values", cache.clone())

    def forward(self, x: Tensor, position: Tensor, rotation: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        """Map x `[batch, hidden]` to the same shape. `seen`, bool `[context]`, marks the positions to attend to."""
        batch = x.shape[0]
        heads = self.inputs(x).view(batch, -1, 1, self.head_width)
        query, key, value = heads.split([heads.shape[1] - 2 * self.kv_heads, self.kv_heads, self.kv_heads], dim=1)
        self.keys.index_copy_(2, position, rotate(key, *rotation))
        self.values.index_copy_(2, position, value)
        # Query heads that share a key head become rows of one product.
        grouped = rotate(query, *rotation).view(batch, self.kv_heads, -1, self.head_width)
        mask = seen.expand(grouped.shape[2], -1)
        mixed = F.scaled_dot_product_attention(grouped, self.keys, self.values, attn_mask=mask)
        return self.output(mixed.reshape(batch, -1))


Projection = Callable[[int, int], nn.Module]
"""A function of `(hidden, intermediate)` that makes the gated projection of a block."""


class Block(nn.Module):
    """A pre-norm decoder block. All arguments of `forward` except x go to the attention."""

    def __init__(self, sizes: Sizes, attention: nn.Module, projection: Projection) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.attention = attention
        self.projection_norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.projection = projection(sizes.hidden, sizes.intermediate)
        self.down = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x: Tensor, *context: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), *context)
        return x + self.down(self.projection(self.projection_norm(x)))


class Start(nn.Module):
    """The part before the blocks: the embedding, and the angles of the rotary position embedding."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        nn.init.normal_(self.embedding.weight, std=sizes.hidden**-0.5)
        self.register_buffer("cosine", angles(sizes).cos().to(self.embedding.weight))
        self.register_buffer("sine", angles(sizes).sin().to(self.embedding.weight))

    def forward(self, token: Tensor, position: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """x, the rotation and `seen` for the blocks, from token `[batch]` and position `[1]`."""
        seen = torch.arange(self.cosine.shape[0], device=position.device) <= position
        return self.embedding(token), (self.cosine[position], self.sine[position]), seen


class Head(nn.Module):
    """The part after the blocks. It shares `weight` `[vocabulary, hidden]` with the embedding."""

    def __init__(self, sizes: Sizes, weight: Tensor) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.weight = weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The logits `[batch, vocabulary]` and the most likely tokens `[batch]`."""
        logits = F.linear(self.norm(x), self.weight)
        return logits, logits.argmax(dim=-1)


class Decoder(nn.Module):
    """Decodes one token of each of `batch` sequences at a time, greedily. Embedding and head share a matrix."""

    def __init__(self, sizes: Sizes, projection: Projection, batch: int = 1) -> None:
        super().__init__()
        self.context, self.batch = sizes.context, batch
        self.start = Start(sizes)
        self.blocks = nn.ModuleList(Block(sizes, Attention(sizes, batch), projection) for _ in range(sizes.layers))
        self.head = Head(sizes, self.start.embedding.weight)

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """The logits `[batch, vocabulary]`. `token` `[batch]` and `position` `[1]` are updated for the next step."""
        x, rotation, seen = self.start(token, position)
        for block in self.blocks:
            x = block(x, position, rotation, seen)
        logits, following = self.head(x)
        token.copy_(following)
        position.add_(1).remainder_(self.context)
        return logits

    def compile_parts(self, compiler: Callable[[nn.Module], None]) -> None:
        """Compile the start, the blocks and the head separately. All blocks share one graph, which compiles once."""
        for part in (self.start, *self.blocks, self.head):
            compiler(part)

    def weight_bytes(self) -> int:
        """The bytes of parameters and packed masks that a step reads. The cache and the angles do not count."""
        tensors = {*self.parameters(), *(b for name, b in self.named_buffers() if name.endswith("packed_masks"))}
        return sum(tensor.nbytes for tensor in tensors)
