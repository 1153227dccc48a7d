"""MGLU's kernels against the read ceiling, the floor, the naive layer and SwiGLU, in one run.

python -m benchmarks.decode --out benchmarks/results [--tokens 1 2 4 ... 8192] [--masks 1 2 4 8 16]

This is for any problems; `python -m mglu_ops bench` measures those of the tables.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.baselines import compiled, naive, swiglu, swiglu_stacked
from benchmarks.ceiling import GEMM, GEMM_APART_UP_TO, GEMM_FROM, GEMM_TOKENS, floor, gemm, reader
from benchmarks.harness import PROTOCOL, ROUNDS, SETTLED_PROTOCOL, SETTLING, Row, Timing, Variant, measure, write
from benchmarks.layers import Layers, masks_of
from mglu_ops import dispatch
from mglu_ops.tuning.replay import layers_for

SHAPES = ((14336, 4096), (8192, 2048))
BACKENDS = ("cuda", "triton", "composite")
BASELINES = ("naive", "swiglu", "triton", "composite")
AUTOTUNED_MASKS = 4
"""With more masks, max-autotune takes minutes for the naive layer. For many tokens it comes out at the library's
products as they were.
"""


def our_variants(layers: Layers, backends: Collection[str]) -> list[Variant]:
    """The backend that the dispatch chooses, and those of `backends` that can take the problem, by their names."""
    x, weights, packed = layers.x, layers.weights, layers.packed
    chosen = dispatch.explain(x, weights[0], packed[0]).backend

    def run(backend: str | None, i: int) -> Tensor:
        return dispatch.forward(x, weights[i], packed[i], "silu", None, backend=backend)

    variants = [Variant(f"mglu {chosen}", partial(run, None), layers.count, layers.oracle)]
    for backend in BACKENDS:
        if backend not in backends or backend == chosen:
            continue
        try:
            run(backend, 0)
        except ValueError as refusal:
            print(refusal, flush=True)
        else:
            variants.append(Variant(f"mglu {backend}", partial(run, backend), layers.count, layers.oracle))
    return variants


def naive_variants(layers: Layers, tuned: bool) -> list[Variant]:
    """Eager, and compiled with bool masks; `tuned` adds what compiles longer, also with masks in the weight's dtype."""
    in_dtype: dict[str, Callable[..., Tensor]] = {"naive eager": naive}
    in_bool = {"naive compiled, bool masks": compiled(naive)}
    if tuned:
        in_dtype["naive compiled, coordinate descent"] = compiled(naive, tune=True)
        in_bool["naive compiled, coordinate descent, bool masks"] = compiled(naive, tune=True)
    if tuned and layers.x.shape[0] == 1 and layers.n_masks <= AUTOTUNED_MASKS:
        in_bool["naive compiled, max-autotune, bool masks"] = compiled(naive, autotune=True)
    return [*_masked(layers, layers.x.dtype, in_dtype), *_masked(layers, torch.bool, in_bool)]


def _masked(layers: Layers, dtype: torch.dtype, forms: dict[str, Callable[..., Tensor]]) -> list[Variant]:
    """Forms of the naive layer with masks of a dtype, which as few layers have as are more than a gigabyte."""
    weights = layers.weights[: layers_for(layers.weights[0].numel() * (2 + dtype.itemsize * layers.n_masks))]
    masks = [
        torch.stack([masks_of(packed, m) for m in range(layers.n_masks)]).to(dtype)
        for packed in layers.packed[: len(weights)]
    ]

    def run(form: Callable[..., Tensor], i: int) -> Tensor:
        return form(layers.x, weights[i], masks[i])

    return [Variant(name, partial(run, form), len(weights), layers.oracle) for name, form in forms.items()]


def swiglu_variants(layers: Layers, tuned: bool) -> list[Variant]:
    """Eager, compiled, and compiled with gate and up stacked; `tuned` adds what compiles longer.

    Two weights a layer: pairs of our layers' weights.
    """
    gates, ups = layers.weights[0::2], layers.weights[1::2]
    stacks = [torch.cat(pair) for pair in zip(gates, ups, strict=False)]

    def pair(form: Callable[..., Tensor], i: int) -> Tensor:
        return form(layers.x, gates[i], ups[i])

    def stack(form: Callable[..., Tensor], i: int) -> Tensor:
        return form(layers.x, stacks[i])

    runs = {
        "SwiGLU eager": partial(pair, swiglu),
        "SwiGLU compiled": partial(pair, compiled(swiglu)),
        "SwiGLU stacked, compiled": partial(stack, compiled(swiglu_stacked)),
    }
    if tuned:
        runs["SwiGLU compiled, coordinate descent"] = partial(pair, compiled(swiglu, tune=True))
        runs["SwiGLU stacked, coordinate descent"] = partial(stack, compiled(swiglu_stacked, tune=True))
    if tuned and layers.x.shape[0] == 1:
        runs["SwiGLU compiled, max-autotune"] = partial(pair, compiled(swiglu, autotune=True))
    return [Variant(name, run, len(stacks), layers.swiglu_oracle) for name, run in runs.items()]


def bench(
    d: int,
    h: int,
    n_masks: int,
    tokens: int,
    dtype: torch.dtype,
    baselines: Collection[str],
    rounds: int = ROUNDS,
    *,
    tuned: bool = True,
    settling: float = 0.0,
    case: str = "decode",
) -> list[Row]:
    """All rows of one problem.

    Args:
        d: out_features.
        h: in_features.
        n_masks: number of masks.
        tokens: number of tokens.
        dtype: of x and the weights.
        baselines: of `BASELINES`, what to measure besides the read ceiling and the backend that the dispatch chooses.
        rounds: as of `harness.measure`.
        tuned: whether the naive layer and SwiGLU are also compiled with what takes longer to compile.
        settling: as of `harness.measure`; above `GEMM_APART_UP_TO` tokens at least `SETTLING`.
        case: of the rows.
    """
    torch._dynamo.reset()
    layers = Layers(d, h, n_masks, tokens, dtype)
    ours = our_variants(layers, {"cuda", *baselines})
    variants = [Variant("read ceiling", reader(layers.weights, layers.packed), layers.count), *ours]
    if "naive" in baselines:
        variants += naive_variants(layers, tuned)
    if "swiglu" in baselines:
        variants += swiglu_variants(layers, tuned)
    many = tokens > GEMM_APART_UP_TO
    if many:
        variants.append(gemm(layers.weights))
    timings = measure(variants, dtype, rounds, max(settling, SETTLING) if many else settling)
    if GEMM_FROM <= tokens <= GEMM_APART_UP_TO:
        timings |= measure([gemm(layers.weights)], dtype, rounds)
    ceiling, product = timings["read ceiling"].microseconds, timings.get(GEMM)
    timings["floor"] = Timing(floor(ceiling, product and product.microseconds, tokens, n_masks), 0.0)

    def row(name: str, timing: Timing) -> Row:
        share = float("nan") if name == GEMM else ceiling / timing.microseconds
        extra: dict[str, object] = {}
        if name == ours[0].name:
            extra["chosen"] = True
        if name == GEMM and not math.isnan(timing.microseconds):
            extra |= {"of_tokens": GEMM_TOKENS, "tflops": round(2e-6 * GEMM_TOKENS * d * h / timing.microseconds, 1)}
        dtype_name = str(dtype).removeprefix("torch.")
        return Row(case, name, tokens, d, h, n_masks, dtype_name, *timing[:2], share, timing.error, extra)

    return [row(name, timing) for name, timing in timings.items()]


@dataclass(frozen=True)
class Sweep:
    """The problems of one table: each shape with each number of tokens and masks."""

    tokens: tuple[int, ...] = (1,)
    masks: tuple[int, ...] = (1, 2, 4, 8, 16)
    dtype: torch.dtype = torch.bfloat16
    baselines: tuple[str, ...] = ()
    shapes: dict[tuple[int, int], str] = field(default_factory=lambda: dict.fromkeys(SHAPES, "decode"))
    """`(out_features, in_features)` and the case that a row names."""
    tuned_at: tuple[int, ...] = (1,)
    """Numbers of tokens at which baselines are also compiled with what takes longer to compile."""
    settling: float = 0.0
    """As of `bench`."""

    def quick(self) -> Sweep:
        """One problem, to see that all works."""
        (d, h), case = min(self.shapes.items())
        return replace(self, shapes={(d, h): case}, tokens=self.tokens[:1], masks=self.masks[:1], settling=0.0)

    def rows(self, rounds: int = ROUNDS) -> Iterator[list[Row]]:
        """The rows of each problem, as they are measured."""
        torch.manual_seed(0)
        for (d, h), case in self.shapes.items():
            for tokens in self.tokens:
                for n_masks in self.masks:
                    # SwiGLU has no masks: once a shape and number of tokens is enough.
                    once = [name for name in self.baselines if name != "swiglu" or n_masks == self.masks[0]]
                    problem = d, h, n_masks, tokens, self.dtype, once
                    tuned = tokens in self.tuned_at
                    yield bench(*problem, rounds, tuned=tuned, settling=self.settling, case=case)
                    torch.cuda.empty_cache()


def run(sweep: Sweep, out: Path, name: str, rounds: int = ROUNDS) -> list[Row]:
    """Measure a table, and write and print it as it grows."""
    rows: list[Row] = []
    protocol = PROTOCOL
    if sweep.settling:
        protocol = SETTLED_PROTOCOL.format(seconds=2 * sweep.settling)
    for found in sweep.rows(rounds):
        print(*found, sep="\n", flush=True)
        rows += found
        write(rows, out, name, protocol)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--name", default="decode")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--masks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--shapes", type=int, nargs="+", choices=[0, 1], default=[0, 1], help="14336x4096, 8192x2048")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--baselines", nargs="*", choices=BASELINES, default=["naive", "swiglu"])
    arguments = parser.parse_args()
    sweep = Sweep(
        tokens=tuple(arguments.tokens),
        masks=tuple(arguments.masks),
        dtype=getattr(torch, arguments.dtype),
        baselines=tuple(arguments.baselines),
        shapes={SHAPES[i]: "decode" for i in arguments.shapes},
        tuned_at=tuple(arguments.tokens),
    )
    run(sweep, arguments.out, arguments.name, arguments.rounds)


if __name__ == "__main__":
    main()
