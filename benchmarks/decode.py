"""Times MGLU's kernels, lower bounds (`ceiling`), the naive layer and SwiGLU in one run.

python -m benchmarks.decode --out DIR [--tokens 1 2 4 ... 8192] [--n-masks 1 2 4 8 16]

This command takes any problem; `python -m mglu_ops bench` measures the problems of the committed tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import records
from benchmarks.baselines import NAIVE, SWIGLU, in_modes, swiglu_stacked
from benchmarks.ceiling import (
    GEMM,
    GEMM_LAYERS,
    GEMM_TOKENS,
    MAX_SEPARATE_GEMM_TOKENS,
    MIN_GEMM_TOKENS,
    floor,
    gemm,
    reader,
)
from benchmarks.harness import PROTOCOL, SETTLED_PROTOCOL, Timing, Variant, measure
from benchmarks.layers import Layers, all_masks
from benchmarks.quantized import quantized_swiglu_variants
from benchmarks.records import Row, parser_of
from benchmarks.timing import ROUNDS, SETTLE_SECONDS
from mglu_ops import dispatch
from mglu_ops.timer import layers_for

SHAPES = ((14336, 4096), (8192, 2048))
BACKENDS = ("cuda", "triton", "composite")
BASELINES = ("naive", "swiglu", "triton", "composite")
MAX_AUTOTUNED_MASKS = 4
"""max-autotune is measured for one token and up to this number of masks. With more masks it compiles for minutes. With
many tokens it chooses torch's GEMMs, as the default mode does."""


def our_variants(layers: Layers, backends: Collection[str]) -> list[Variant]:
    """The backend that the dispatch chooses, then the others in `backends` that support the problem."""
    chosen = dispatch.explain_dispatch(*layers.arguments(0)[:8]).backend

    def run(backend: str | None, i: int) -> Tensor:
        return dispatch.forward(layers.arguments(i), backend=backend)

    variants = [Variant(f"mglu {chosen}", partial(run, None), layers.count, layers.oracle)]
    for backend in (one for one in BACKENDS if one in backends and one != chosen):
        try:
            run(backend, 0)
        except ValueError as refusal:
            print(refusal, flush=True)
        else:
            variants.append(Variant(f"mglu {backend}", partial(run, backend), layers.count, layers.oracle))
    return variants


def naive_variants(layers: Layers, tuned: bool) -> list[Variant]:
    """The naive layer. `tuned` adds the modes of torch.compile that take long to compile.

    Unpacked masks are larger than packed ones, so fewer layers are measured: just enough to exceed a gigabyte.
    """

    def run(form: Callable[..., Tensor], masks: list[Tensor], i: int) -> Tensor:
        return form(layers.x, layers.weights[i], masks[i])

    variants = []
    autotuned = layers.x.shape[0] == 1 and layers.n_masks <= MAX_AUTOTUNED_MASKS
    masks_by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for baseline in in_modes(NAIVE, tuned, autotuned):
        dtype = torch.bool if baseline.has_bool_masks else layers.x.dtype
        count = layers_for(layers.weights[0].numel() * (2 + dtype.itemsize * layers.n_masks))
        if dtype not in masks_by_dtype:
            masks_by_dtype[dtype] = [all_masks(packed, dtype) for packed in layers.packed[:count]]
        masks = masks_by_dtype[dtype]
        variants.append(Variant(baseline.name, partial(run, baseline.build(), masks), len(masks), layers.oracle))
    return variants


def swiglu_variants(layers: Layers, tuned: bool) -> list[Variant]:
    """SwiGLU. `tuned` adds the modes of torch.compile that take long to compile.

    A SwiGLU layer takes the weights of two MGLU layers.
    """
    gates, ups = layers.weights[0::2], layers.weights[1::2]
    pairs: list[tuple[Tensor, ...]] = list(zip(gates, ups, strict=False))
    stacks: list[tuple[Tensor, ...]] = [(torch.cat(pair),) for pair in pairs]

    def run(form: Callable[..., Tensor], weights: list[tuple[Tensor, ...]], i: int) -> Tensor:
        return form(layers.x, *weights[i])

    return [
        Variant(
            baseline.name,
            partial(run, baseline.build(), stacks if baseline.function is swiglu_stacked else pairs),
            len(stacks),
            layers.swiglu_oracle,
        )
        for baseline in in_modes(SWIGLU, tuned, autotuned=layers.x.shape[0] == 1)
    ]


@dataclass(frozen=True)
class Problem:
    """A layer, and the variants to measure.

    Attributes:
        case: the problem's name in the rows.
        shape: `(out_features, in_features)`.
        tokens: number of tokens.
        n_masks: number of masks.
        dtype: dtype of x and of dense weights.
        weight_format: the format of the weights of MGLU and SwiGLU.
        baselines: members of `BASELINES` to measure besides the read ceiling, the chosen backend and `cuda`.
        tuned: also measure the naive layer and SwiGLU in the modes of torch.compile that take long to compile.
        settle_seconds: passed to `harness.measure`. With more than `MAX_SEPARATE_GEMM_TOKENS` tokens, it is at least
            `SETTLE_SECONDS`.
    """

    case: str
    shape: tuple[int, int]
    tokens: int
    n_masks: int
    dtype: torch.dtype
    weight_format: str
    baselines: tuple[str, ...]
    tuned: bool
    settle_seconds: float


def bench(problem: Problem, rounds: int = ROUNDS) -> list[Row]:
    """Measure one problem in at most `rounds` rounds, and return its rows."""
    torch._dynamo.reset()
    (d, h), tokens, n_masks, dtype = problem.shape, problem.tokens, problem.n_masks, problem.dtype
    layers = Layers(d, h, n_masks, tokens, dtype, weight_format=problem.weight_format)
    ours = our_variants(layers, {"cuda", *problem.baselines})
    variants = [Variant("read ceiling", reader(layers.weights, layers.packed), layers.count), *ours]
    if "naive" in problem.baselines:
        variants += naive_variants(layers, problem.tuned)
    if "swiglu" in problem.baselines:
        dense_format = problem.weight_format == "dense"
        variants += swiglu_variants(layers, problem.tuned) if dense_format else quantized_swiglu_variants(layers)
    many, settle_seconds = tokens > MAX_SEPARATE_GEMM_TOKENS, problem.settle_seconds
    dense = [layers.weight(i, dtype) for i in range(GEMM_LAYERS)]
    if many:
        variants.append(gemm(dense))
    timings = measure(variants, dtype, rounds, max(settle_seconds, SETTLE_SECONDS) if many else settle_seconds)
    if MIN_GEMM_TOKENS <= tokens <= MAX_SEPARATE_GEMM_TOKENS:
        timings |= measure([gemm(dense)], dtype, rounds)
    ceiling, gemm_timing = timings["read ceiling"].microseconds, timings.get(GEMM)
    timings["floor"] = Timing(floor(ceiling, gemm_timing and gemm_timing.microseconds, tokens, n_masks), 0.0)

    def row(name: str, timing: Timing) -> Row:
        share = float("nan") if name == GEMM else ceiling / timing.microseconds
        extra: dict[str, object] = {}
        if name == ours[0].name:
            extra["chosen"] = True
        if name == GEMM and not math.isnan(timing.microseconds):
            extra |= {"of_tokens": GEMM_TOKENS, "tflops": round(2e-6 * GEMM_TOKENS * d * h / timing.microseconds, 1)}
        dtype_name = str(dtype).removeprefix("torch.")
        return Row(problem.case, name, tokens, d, h, n_masks, dtype_name, *timing[:2], share, timing.error, extra)

    return [row(name, timing) for name, timing in timings.items()]


@dataclass(frozen=True)
class Sweep:
    """The problems of one table: all combinations of shapes, numbers of tokens and numbers of masks."""

    tokens: tuple[int, ...] = (1,)
    masks: tuple[int, ...] = (1, 2, 4, 8, 16)
    dtype: torch.dtype = torch.bfloat16
    baselines: tuple[str, ...] = ()
    shapes: dict[tuple[int, int], str] = field(default_factory=lambda: dict.fromkeys(SHAPES, "decode"))
    """`(out_features, in_features)` -> name of the problem in the rows."""
    tuned_at: tuple[int, ...] = (1,)
    """Numbers of tokens for which `Problem.tuned` is set."""
    settle_seconds: float = 0.0
    weight_formats: tuple[str, ...] = ("dense",)
    """Weight formats. In the rows, problems in another format than "dense" are named after their format."""

    def quick(self) -> Sweep:
        """A sweep of one problem of the smallest shape, for a quick check."""
        (d, h), case = min(self.shapes.items())
        return replace(self, shapes={(d, h): case}, tokens=self.tokens[:1], masks=self.masks[:1], settle_seconds=0.0)

    def problems(self) -> list[Problem]:
        found = []
        every = product(self.shapes.items(), self.weight_formats, self.tokens, self.masks)
        for (shape, case), weight_format, tokens, n_masks in every:
            # SwiGLU has no masks, so one measurement per shape and number of tokens is enough.
            baselines = tuple(one for one in self.baselines if one != "swiglu" or n_masks == self.masks[0])
            name = case if weight_format == "dense" else weight_format
            layer = name, shape, tokens, n_masks, self.dtype, weight_format
            found.append(Problem(*layer, baselines, tokens in self.tuned_at, self.settle_seconds))
        return found


def run(sweep: Sweep, out: Path, name: str, rounds: int = ROUNDS) -> list[Row]:
    """Measure a table, and print and write the rows after each problem."""

    def rows_of(problem: Problem) -> list[Row]:
        rows = bench(problem, rounds)
        torch.cuda.empty_cache()
        return rows

    torch.manual_seed(0)
    seconds = 2 * sweep.settle_seconds
    protocol = SETTLED_PROTOCOL.format(seconds=seconds) if seconds else PROTOCOL
    return records.measure(sweep.problems(), rows_of, out, name, protocol)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--n-masks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--shapes", type=int, nargs="+", choices=[0, 1], default=[0, 1], help="14336x4096, 8192x2048")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--baselines", nargs="*", choices=BASELINES, default=["naive", "swiglu"])
    arguments = parser.parse_args()
    sweep = Sweep(
        tokens=tuple(arguments.tokens),
        masks=tuple(arguments.n_masks),
        dtype=getattr(torch, arguments.dtype),
        baselines=tuple(arguments.baselines),
        shapes={SHAPES[i]: "decode" for i in arguments.shapes},
        tuned_at=tuple(arguments.tokens),
    )
    run(sweep, arguments.out, "decode", arguments.rounds)


if __name__ == "__main__":
    main()
