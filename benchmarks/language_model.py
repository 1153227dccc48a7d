"""A decoder-only language model like Llama, for training on whole sequences. Its gated projection is an argument."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.decoder import Block, Projection, Sizes, angles, rotate


class Attention(nn.Module):
    """Causal attention over a sequence, in which groups of query heads share a key head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = sizes.heads, sizes.kv_heads, sizes.head_width
        self.inputs = nn.Linear(sizes.hidden, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_width, bias=False)
        self.output = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Map x `[batch, length, hidden]` to the same shape."""
        heads = self.inputs(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        query, key, value = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        query, key = (rotate(one, *rotation).type_as(value) for one in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Loss(nn.Module):
    """The last norm, the head and the cross entropy of the next token."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-5)

    def forward(self, x: Tensor, weight: Tensor, following: Tensor) -> Tensor:
        """The mean loss over all tokens, from x `[batch, length, hidden]` and weight `[vocabulary, hidden]`."""
        return F.cross_entropy(self.logits(x, weight).flatten(0, 1).float(), following.flatten())

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """The scores `[batch, length, vocabulary]` of each next token."""
        return F.linear(self.norm(x), weight)


class LanguageModel(nn.Module):
    """Predicts each next token of sequences of up to `sizes.context` tokens. Embedding and head share a matrix."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, sizes: Sizes, projection: Projection) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        nn.init.normal_(self.embedding.weight, std=sizes.hidden**-0.5)
        self.register_buffer("cosine", angles(sizes).cos().float())
        self.register_buffer("sine", angles(sizes).sin().float())
        self.blocks = nn.ModuleList(Block(sizes, Attention(sizes), projection) for _ in range(sizes.layers))
        self.loss: Loss = Loss(sizes)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of the sequences `tokens` `[batch, length + 1]`."""
        given, following = tokens[:, :-1], tokens[:, 1:]
        return self.loss(self._features(given), self.embedding.weight, following)

    def logits(self, given: Tensor) -> Tensor:
        """The scores `[batch, length, vocabulary]` of each next token, from tokens `[batch, length]`."""
        return self.loss.logits(self._features(given), self.embedding.weight)

    def _features(self, given: Tensor) -> Tensor:
        rotation = self.cosine[: given.shape[1]], self.sine[: given.shape[1]]
        x = self.embedding(given)
        for block in self.blocks:
            x = block(x, rotation)
        return x

    def compile_parts(self) -> None:
        """Compile the blocks and the loss separately. All blocks share one graph, which compiles once."""
        for part in (*self.blocks, self.loss):
            part.compile(fullgraph=True, dynamic=False)


def share_tensors(source: nn.Module, target: nn.Module) -> None:
    """Let `target` use the parameters and buffers of `source`, by name."""
    for path, tensor in (*source.named_parameters(), *source.named_buffers()):
        owner, _, name = path.rpartition(".")
        setattr(target.get_submodule(owner), name, tensor)


def count(model: nn.Module) -> int:
    """The number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
