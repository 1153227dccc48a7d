"""Freeze a model, quantize its MGLU weights to 8 or 4 bits, save it, and load the file into a new model.

    python examples/quantize.py --weight-format fp8_row

The weights are random here. The example takes a few seconds on 2 CPU cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mglu_ops
from mglu_ops.nn import SwiMGLU


class Block(nn.Module):
    """A feed-forward layer with a norm before it and a residual connection around it."""

    def __init__(self, hidden: int, intermediate: int, **options: Any) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, device=options.get("device"), dtype=options.get("dtype"))
        self.feed_forward = SwiMGLU(hidden, intermediate, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(self.norm(x))


def build(options: argparse.Namespace, **more: Any) -> nn.Sequential:
    sizes = options.hidden, options.intermediate
    return nn.Sequential(*(Block(*sizes, n_masks=options.n_masks, dtype=torch.bfloat16, **more) for _ in range(2)))


@torch.no_grad()
def main() -> None:
    options = parse_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = build(options, device=device)
    x = torch.randn(4, options.hidden, device=device, dtype=torch.bfloat16)

    frozen = mglu_ops.freeze(model)(x)
    before = size_of(model[0].feed_forward.mglu)
    mglu_ops.quantize(model, options.weight_format)
    quantized = model(x)
    error = ((quantized - frozen).norm() / frozen.norm()).item()
    after = size_of(model[0].feed_forward.mglu)
    print(f"{options.weight_format}: {before} -> {after} bytes a layer, results differ by {error:.2%}")

    file = Path(options.output)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), file)
    fresh = build(options, learnable_masks=False, weight_format=options.weight_format, device="meta")
    fresh.load_state_dict(torch.load(file, weights_only=True), assign=True)
    print(f"loaded {file}: the same results, {torch.equal(fresh(x), quantized)}")
    layer = fresh[0].feed_forward.mglu
    stored = {"weight_scale": layer.weight_scale, "weight_format": layer.weight_format}
    print(mglu_ops.explain_dispatch(x, layer.weight, layer.packed_masks, **stored))


def size_of(module: nn.Module) -> int:
    """The bytes of a module's weight, scales and masks."""
    return sum(tensor.nbytes for tensor in module.state_dict().values())


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weight-format", default="fp8_row", help="fp8_row, fp8_block, int8_row or int4_group")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--n-masks", type=int, default=4)
    parser.add_argument("--output", default="build/examples/quantized.pt", help="the file to write")
    return parser.parse_args()


if __name__ == "__main__":
    main()
