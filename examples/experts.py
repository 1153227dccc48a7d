"""Train a small mixture of experts on Python's source files, freeze it, quantize its experts, and let both write on.

    python examples/experts.py --weight-format int8_row

A token is a byte. Each layer has 8 experts, of which a token uses 2. Takes about a minute on 2 CPU cores.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor, nn

import mglu_ops
from mglu_ops.nn import MGLUExpertsFeedForward, parameter_groups

WIDTH, HEADS, LENGTH, BATCH = 64, 4, 64, 16


class Block(nn.Module):
    """A block of a transformer whose feed-forward layer is a mixture of experts."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed_forward = MGLUExpertsFeedForward(
            options.experts, WIDTH, 2 * WIDTH, options.top_k, n_masks=options.n_masks, weight_init="leveled"
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map x `[batch, length, width]` to the same shape, and return the router's logits too."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y, router_logits = self.feed_forward(self.norms[1](x), output_router_logits=True)
        return x + y, router_logits


class Model(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(options) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The logits `[batch, length, 256]` of the next bytes, and the router's logits of each block."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        routers = []
        for block in self.blocks:
            x, router_logits = block(x)
            routers.append(router_logits)
        return self.head(self.norm(x)), routers


def balance_loss(router_logits: Tensor, top_k: int) -> Tensor:
    """The load-balancing loss of the Switch Transformer (arXiv 2101.03961): 1 if all experts have as many tokens."""
    experts = router_logits.shape[-1]
    probabilities = router_logits.flatten(0, -2).softmax(-1)
    chosen = F.one_hot(probabilities.topk(top_k).indices, experts).sum(1).float() / top_k
    return experts * (chosen.mean(0) * probabilities.mean(0)).sum()


def batch(text: Tensor) -> Tensor:
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), device=text.device)
    return text[starts + torch.arange(LENGTH + 1, device=text.device)]


def train(model: Model, text: Tensor, options: argparse.Namespace) -> None:
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-2, weight_decay=0.1))
    for _ in range(options.steps):
        tokens = batch(text)
        logits, routers = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss = loss + 0.01 * sum(balance_loss(router_logits, options.top_k) for router_logits in routers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: Model, held_out: Tensor) -> tuple[float, Tensor]:
    """The loss in nats a byte, and the logits that it is computed from."""
    logits = model(held_out[:, :-1])[0]
    return F.cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten()).item(), logits


@torch.no_grad()
def write_on(model: Model, prompt: str, count: int = 32) -> str:
    tokens = torch.tensor([list(prompt.encode())], device=model.head.weight.device)
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens[:, -LENGTH:])[0][:, -1:].argmax(-1)), 1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)), device=options.device)
    model = Model(options).to(options.device)
    held_out = batch(text[-len(text) // 10 :])
    text = text[: -len(text) // 10]
    before = evaluate(model, held_out)[0]
    train(model, text, options)
    trained, logits = evaluate(model, held_out)
    print(f"{options.steps} steps: {before:.3f} -> {trained:.3f} nats a byte")

    experts = model.blocks[0].feed_forward.experts
    frozen, same = evaluate(mglu_ops.freeze(model), held_out)
    error = ((same - logits).norm() / logits.norm()).item()
    size = size_of(experts)
    print(
        f"frozen: {frozen:.3f} nats a byte, logits differ by {error:.1e}; writes {write_on(model, 'def __init__(')!r}"
    )
    quantized, _ = evaluate(mglu_ops.quantize(model, options.weight_format), held_out)
    print(f"{options.weight_format}: {quantized:.3f} nats a byte; writes {write_on(model, 'def __init__(')!r}")
    print(f"the experts of a layer: {size} -> {size_of(experts)} bytes, with their masks")


def size_of(module: nn.Module) -> int:
    """The bytes of a module's weights, scales and masks."""
    return sum(tensor.nbytes for tensor in module.state_dict().values())


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--experts", type=int, default=8, help="experts of a layer (default: 8)")
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token (default: 2)")
    parser.add_argument("--n-masks", type=int, default=2, help="masks of an expert (default: 2)")
    parser.add_argument("--weight-format", default="int8_row", help="fp8_row, fp8_block, int8_row or int4_group")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
