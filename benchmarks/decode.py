"""MGLU's kernels against the read ceiling, the floor, the naive layer and SwiGLU, in one run.

python -m benchmarks.decode --out benchmarks/results [--tokens 1 2 4 ... 8192] [--masks 1 2 4 8 16]

The floor is the larger of the read ceiling and n_masks + 1 products at the library's rate for many tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ceiling import reader
from benchmarks.harness import Row, Variant, layers_for, measure, write

SHAPES = ((14336, 4096), (8192, 2048))
GEMM_FLOPS = 727e12  # of a bfloat16 product of 8192 tokens on an H200


def masks_of(packed: Tensor, i: int) -> Tensor:
    """Mask i of a packed tensor as bool `[d, h]`."""
    d, octets, _ = packed.shape
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, i, None] >> bits) & 1).reshape(d, octets * 8).bool()


class Layers:
    """Distinct layers of one shape, and their float64 oracle."""

    def __init__(self, d: int, h: int, n_masks: int, tokens: int, dtype: torch.dtype) -> None:
        self.n_masks = n_masks
        self.count = layers_for(d * h * 2 + d * h // 8 * n_masks)
        self.x = torch.randn(tokens, h, device="cuda").to(dtype)
        self.weights = [(torch.randn(d, h, device="cuda") / h**0.5).to(dtype) for _ in range(self.count)]
        self.packed = [
            torch.randint(0, 256, (d, h // 8, n_masks), dtype=torch.uint8, device="cuda") for _ in range(self.count)
        ]

    def oracle(self, i: int) -> Tensor:
        x, weight = self.x.double(), self.weights[i].double()
        total = x @ weight.T
        result = torch.zeros_like(total)
        for m in range(self.n_masks):
            gate = x @ (weight * masks_of(self.packed[i], m)).T
            result += F.silu(gate) * (total - gate)
        return result


def naive(x: Tensor, weight: Tensor, masks: Tensor) -> Tensor:
    """The layer as a user spells it, masks in the dtype of the weight."""
    terms = [F.silu(F.linear(x, weight * mask)) * F.linear(x, weight * (1 - mask)) for mask in masks]
    return torch.stack(terms).sum(0)


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def swiglu_stacked(x: Tensor, both: Tensor) -> Tensor:
    gate, up = F.linear(x, both).chunk(2, dim=-1)
    return F.silu(gate) * up


def compiled(function: Callable[..., Tensor], tune: bool) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, options={"coordinate_descent_tuning": True} if tune else None)


def naive_variants(layers: Layers) -> list[Variant]:
    """On as few layers as are beyond L2, because every mask costs as much memory as W."""
    count = min(layers.count, max(2, -(-400_000_000 // (layers.weights[0].numel() * 2 * (1 + layers.n_masks)))))
    masks = [
        torch.stack([masks_of(layers.packed[i], m) for m in range(layers.n_masks)]).to(layers.x.dtype)
        for i in range(count)
    ]
    functions = {
        "naive eager": naive,
        "naive compiled": compiled(naive, False),
        "naive compiled, coordinate descent": compiled(naive, True),
    }
    return [
        Variant(name, lambda i, f=function: f(layers.x, layers.weights[i], masks[i]), count)
        for name, function in functions.items()
    ]


def swiglu_variants(layers: Layers) -> list[Variant]:
    """Two weights a layer: pairs of our layers' weights, so no more memory is needed."""
    x, weights, count = layers.x, layers.weights, layers.count // 2
    functions = {
        "SwiGLU eager": swiglu,
        "SwiGLU compiled": compiled(swiglu, False),
        "SwiGLU compiled, coordinate descent": compiled(swiglu, True),
    }
    variants = [
        Variant(name, lambda i, f=function: f(x, weights[2 * i], weights[2 * i + 1]), count, checked=False)
        for name, function in functions.items()
    ]
    both = [torch.cat((weights[2 * i], weights[2 * i + 1])) for i in range(count)]
    stacked = compiled(swiglu_stacked, False)
    variants.append(Variant("SwiGLU stacked, compiled", lambda i: stacked(x, both[i]), count, checked=False))
    return variants


def bench(
    d: int, h: int, n_masks: int, tokens: int, dtype: torch.dtype, baselines: Collection[str], rounds: int = 25
) -> list[Row]:
    """All rows of one problem; the ceiling's time divides the others'."""
    from mglu_ops.backends import composite, cuda, triton

    layers = Layers(d, h, n_masks, tokens, dtype)
    variants = [
        Variant("read ceiling", reader(layers.weights, layers.packed), layers.count, checked=False),
        Variant(
            "mglu cuda",
            lambda i: cuda.forward(layers.x, layers.weights[i], layers.packed[i], "silu", None),
            layers.count,
        ),
    ]
    if "composite" in baselines:
        run = lambda i: composite.forward(layers.x, layers.weights[i], layers.packed[i], "silu", None)  # noqa: E731
        variants.append(Variant("mglu composite", run, layers.count))
    if "triton" in baselines and tokens <= triton.MAX_TOKENS:
        run = lambda i: triton.forward(layers.x, layers.weights[i], layers.packed[i], "silu", None)  # noqa: E731
        variants.append(Variant("mglu triton", run, layers.count))
    if "naive" in baselines:
        variants += naive_variants(layers)
    if "swiglu" in baselines:
        variants += swiglu_variants(layers)
    times = measure(variants, layers.oracle, dtype, rounds)
    ceiling = times["read ceiling"][0]
    times["floor"] = (max(ceiling, (n_masks + 1) * 2e6 * tokens * d * h / GEMM_FLOPS), 0.0, float("nan"))
    return [
        Row("decode", name, tokens, d, h, n_masks, str(dtype)[6:], time, spread, ceiling / time, error)
        for name, (time, spread, error) in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--name", default="decode")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--masks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--shapes", type=int, nargs="+", choices=[0, 1], default=[0, 1], help="14336x4096, 8192x2048")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument(
        "--baselines", nargs="*", choices=["naive", "swiglu", "composite", "triton"], default=["naive", "swiglu"]
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Row] = []
    for d, h in (SHAPES[i] for i in arguments.shapes):
        for tokens in arguments.tokens:
            for n_masks in arguments.masks:
                dtype = getattr(torch, arguments.dtype)
                # SwiGLU has no masks: once a shape and token count is enough.
                once = [name for name in arguments.baselines if name != "swiglu" or n_masks == arguments.masks[0]]
                found = bench(d, h, n_masks, tokens, dtype, once, arguments.rounds)
                for row in found:
                    print(
                        f"{d}x{h} n_m={n_masks} T={tokens} {row.variant:38} {row.microseconds:9.2f} us"
                        f" +-{row.spread:5.2f} {row.fraction_of_ceiling:6.3f} error {row.error:.1e}"
                    )
                rows += found
                torch.cuda.empty_cache()
    write(rows, arguments.out, arguments.name)


if __name__ == "__main__":
    main()
