"""What Top-K routing saves: masks that no token of a few routes to are not computed.

W and all masks are read whatever the routes are, since a byte of the packed masks lies between those of other masks.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.ceiling import reader
from benchmarks.harness import ROUNDS, Row, Variant, measure
from benchmarks.layers import Layers
from mglu_ops import dispatch

TOKENS, MASKS, KEPT = (1, 2, 4, 8), (4, 8, 16), (1, 2, 4)
"""The problems, and how many masks a token keeps."""
SHAPES = ((14336, 4096), (8192, 2048))


def routes(tokens: int, n_masks: int, top_k: int) -> torch.Tensor:
    """Route weights `[tokens, n_masks]`: of each token the softmax of `top_k` random masks, 0 for the others."""
    kept, index = torch.rand(tokens, n_masks, device="cuda").topk(top_k, dim=-1)
    return torch.zeros(tokens, n_masks, device="cuda").scatter(-1, index, kept.softmax(-1))


def bench(d: int, h: int, n_masks: int, tokens: int, rounds: int = ROUNDS) -> list[Row]:
    """Without routes, with routes to all masks, and with routes to a few, in one run."""
    layers = Layers(d, h, n_masks, tokens, torch.bfloat16)
    variants = [Variant("read ceiling", reader(layers.weights, layers.packed), layers.count)]
    for name, top_k in {"no routes": None, "all masks": n_masks, **{f"top {k}": k for k in KEPT}}.items():
        route = None if top_k is None else routes(tokens, n_masks, top_k)

        def run(i: int, route: torch.Tensor | None = route) -> torch.Tensor:
            return dispatch.forward(layers.x, layers.weights[i], layers.packed[i], "silu", route)

        variants.append(Variant(name, run, layers.count, partial(layers.oracle, route_weights=route)))
    timings = measure(variants, torch.bfloat16, rounds)
    ceiling = timings["read ceiling"].microseconds
    return [
        Row("top-k", name, tokens, d, h, n_masks, "bfloat16", *timing[:2], ceiling / timing.microseconds, timing.error)
        for name, timing in timings.items()
    ]
