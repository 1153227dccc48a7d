"""Small models of common architectures without an MGLU layer. The pass must not slow down their compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES = 64
TOKENS = FEATURES
"""Number of tokens of models with masked activations: equal to FEATURES, so that activations have a weight's shape."""
NODES_PER_STEP = 3

# Each step is `NODES_PER_STEP` elementwise nodes of a graph. Values stay finite in long chains of steps.
STEPS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "tanh": lambda h: h + 0.1 * torch.tanh(h),
    "silu": lambda h: h - 0.1 * F.silu(h),
    "exp": lambda h: h - 0.1 * torch.exp(h),
    "relu": lambda h: h - 0.1 * F.relu(h),
}


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator] # torch does not annotate it
def unknown(h: Tensor) -> Tensor:
    """A call whose effects the pass does not know. It might write to its argument and return it."""
    return h + 1


class UnknownCalls(nn.Module):
    """A chain of calls of `unknown`."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = unknown(x)
        return x


class Writes(nn.Module):
    """Writes to the rows of a tensor, one after the other."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros(self.writes, FEATURES)
        for i in range(self.writes):
            y[i] = x[0]
        return y


class Chain(nn.Module):
    """A projection, and a chain of about `nodes` elementwise operators."""

    def __init__(self, step: str, nodes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES) / FEATURES**0.5)
        self.step, self.steps = STEPS[step], max(1, (nodes - 1) // NODES_PER_STEP)

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.weight)
        for _ in range(self.steps):
            h = self.step(h)
        return h


class Bottleneck(nn.Module):
    """The residual block of ResNet-50: 1 x 1, 3 x 3 and 1 x 1 convolutions with batch norms."""

    def __init__(self, channels: int, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.norm2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.norm3 = nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out:
            self.shortcut.extend([nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)])

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), channels: int = 8) -> nn.Module:
    """A ResNet-50 with an eighth of its channels, for images `[batch, 3, height, width]`."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    previous = channels
    for stage, count in enumerate(blocks):
        inner = channels * 2**stage
        for i in range(count):
            layers.append(Bottleneck(previous, inner, 4 * inner, stride=2 if stage and not i else 1))
            previous = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(previous, 10))


class DoubleConv(nn.Sequential):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__(
            *(nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU()),
            *(nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU()),
        )


class UNet(nn.Module):
    """Convolutions down to a coarse grid and up again, with a skip connection at each size.

    Takes images `[batch, 3, height, width]` whose sizes are multiples of `2 ** depth`.
    """

    def __init__(self, depth: int = 4, channels: int = 8) -> None:
        super().__init__()
        widths = [channels * 2**i for i in range(depth + 1)]
        self.first = DoubleConv(3, channels)
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in pairwise(widths))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.joined = nn.ModuleList(DoubleConv(2 * b, b) for _, b in pairs)
        self.last = nn.Conv2d(channels, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [self.first(x)]
        for down in self.down:
            sizes.append(down(F.max_pool2d(sizes[-1], 2)))
        y = sizes.pop()
        for up, joined in zip(self.up, self.joined, strict=True):
            y = joined(torch.cat([sizes.pop(), up(y)], dim=1))
        return self.last(y)


class PaddedMLP(nn.Module):
    """A residual MLP. A mask sets the activations of padding to 0 before and after the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = F.relu(self.up(x.masked_fill(mask, 0)))
        return x + self.down(h).masked_fill(mask, 0)


class DropoutMLP(nn.Module):
    """A residual MLP with handwritten dropout: a bool mask before the MLP, and a float mask after it."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.p = p

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        h = x * (torch.rand_like(x) > self.p) / (1 - self.p)
        h = self.down(F.relu(self.up(h)))
        return x + h * (torch.rand_like(h) > self.p).to(h.dtype) / (1 - self.p)


class SplitAttention(nn.Module):
    """Single-head attention under a mask and under its complement, and a norm. The keys are x itself."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(2))
        self.norm = nn.RMSNorm(FEATURES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = (self.query(x) / FEATURES**0.5) @ x.T
        v = self.value(x)
        return self.norm(x + (scores * mask).softmax(-1) @ v + (scores * ~mask).softmax(-1) @ v)


class MaskedTanh(nn.Module):
    """A residual layer that applies tanh to masked activations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.linear(torch.tanh(x * mask))


class MaskedTanhStep(nn.Module):
    """Two elementwise operators without weights. A model of these layers has one matrix product, in its head."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(x * mask)


# Layers that take activations `[TOKENS, FEATURES]` and a bool mask of the same shape. To the pass, masked activations
# look like masked weights: both are masked matrices in a product.
MASKED_LAYERS: Mapping[str, type[nn.Module]] = {
    "padded MLP": PaddedMLP,
    "MLP with dropout": DropoutMLP,
    "split attention": SplitAttention,
    "masked tanh": MaskedTanh,
    "chain of masked tanh": MaskedTanhStep,
}


class Masked(nn.Module):
    """Layers of one kind of `MASKED_LAYERS` that share a mask, followed by a projection."""

    mask: Tensor

    def __init__(self, kind: str, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MASKED_LAYERS[kind]() for _ in range(layers))
        self.head = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("mask", torch.rand(TOKENS, FEATURES) > 0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.mask)
        return self.head(x)
