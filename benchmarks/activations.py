"""Times layers whose x is rounded to fp8, the same layers with 16-bit x, and fp8 GEMMs by torch._scaled_mm."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.baselines import quantized_swiglu_variants
from benchmarks.decode import SHAPES
from benchmarks.layers import Layers, with_rounded_x
from benchmarks.records import Result, Row
from benchmarks.timing import PROTOCOL, ROUNDS, SETTLE_SECONDS, Variant, measure
from mglu_ops import dispatch
from mglu_ops.formats import quantize_activation

MANY_TOKENS = 256
"""From this number of tokens on, variants run under sustained load."""


class Problem(NamedTuple):
    """A layer in bfloat16 with a quantized weight."""

    shape: tuple[int, int]
    tokens: int
    n_masks: int
    weight_format: str


PROBLEMS = [
    *(Problem(*one, "fp8_row") for one in product(SHAPES, (1, 8, 16, 64, 256, 1024, 8192), (1, 2, 4, 8))),
    *(Problem(*one, "fp8_block") for one in product(SHAPES, (1024, 8192), (1, 4))),
]


def bench(problem: Problem, rounds: int = ROUNDS) -> list[Row]:
    """Measure one problem in at most `rounds` rounds, and return its rows."""
    torch._dynamo.reset()
    (d, h), tokens, n_masks, name = problem
    layers = Layers(d, h, n_masks, tokens, torch.bfloat16, weight_format=name)
    variants = [
        Variant(f"mglu, {form}", partial(_run, layers, form), layers.count, oracle)
        for form, oracle in (("fp8_token", with_rounded_x(layers).oracle), ("dense", layers.oracle))
    ]
    if name == "fp8_row":
        variants += [_gemm(layers, fast) for fast in (False, True)]
        if n_masks == 1 and tokens > 1:
            variants += [one for one in quantized_swiglu_variants(layers) if "_scaled_mm" in one.name]
    timings = measure(variants, torch.bfloat16, rounds, SETTLE_SECONDS if tokens >= MANY_TOKENS else 0.0)
    return [
        Row(name, one.name, tokens, d, h, n_masks, "bfloat16", *timing[:2], float("nan"), timing.error)
        for one, timing in timings.items()
    ]


def _run(layers: Layers, activation_format: str, i: int) -> Tensor:
    return dispatch.forward(layers.arguments(i)._replace(activation_format=activation_format))


def _gemm(layers: Layers, fast: bool) -> Variant:
    """A variant in which torch._scaled_mm multiplies one weight by x, rounded to fp8. Both have scales."""
    (stored, scale), scales = quantize_activation(layers.x), layers.scales

    def run(i: int) -> Tensor:
        weight, rows = layers.weights[i].t(), scales[i][None]
        return torch._scaled_mm(stored, weight, scale, rows, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def oracle(i: int) -> Tensor:
        return (stored.double() * scale.double()) @ layers.weight(i, torch.float64).t()

    return Variant("fp8 GEMM" + (", fast accumulation" if fast else ""), run, layers.count, oracle)


RESULT = Result("activations", PROBLEMS, PROBLEMS[:1], bench, PROTOCOL)
