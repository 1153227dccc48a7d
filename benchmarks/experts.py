"""Times expert layers with MGLU and with SwiGLU in its fastest forms, and a kernel that only reads their weights.

timeout 580 python -m benchmarks.experts experts_layer --out DIR [--resume]

`python -m mglu_ops bench experts experts_fp8 experts_layer` measures all three tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import records
from benchmarks.ceiling import MAX_SEPARATE_GEMM_TOKENS, reader
from benchmarks.expert_baselines import TRITON, first_half_variants, layer_variants
from benchmarks.expert_layers import ExpertLayers, Model
from benchmarks.harness import Timing, Variant, measure
from benchmarks.records import Row, parser_of
from benchmarks.timing import ROUNDS, SETTLE_SECONDS, first_call

MODELS = (
    Model("Qwen3-30B-A3B", 128, 768, 2048, 8),
    Model("Mixtral 8x7B", 8, 14336, 4096, 2),
    Model("gpt-oss-20b", 32, 2880, 2880, 4),
)
SMALL = Model("small", 16, 512, 1024, 2)
TOKENS = (1, 4, 8, 32, 128, 256, 1024)
MASKS = (1, 4)
ROUTINGS = {"balanced": False, "skewed": True}
PROTOCOL = (
    "CUDA graph replay, distinct layers whose experts in use are > 0.3 GB with one mask, each layer with a routing of "
    "its own, variants interleaved (with more than 64 tokens an expert in turns of 0.1 s whose second half is timed), "
    "median over rounds, us per layer"
)


@dataclass(frozen=True)
class Problem:
    """A layer of experts in bfloat16. SwiGLU and all numbers of masks are measured together.

    Attributes:
        model: the sizes.
        tokens: number of tokens.
        routing: a key of `ROUTINGS`.
        weight_format: format of the gated projection's weight.
        whole: also measure the down projection and the sum over a token's experts.
    """

    model: Model
    tokens: int
    routing: str
    weight_format: str = "dense"
    whole: bool = False

    @property
    def case(self) -> str:
        return f"{self.model.name}, {self.routing}"

    @property
    def is_first_of_shape(self) -> bool:
        """True for a model's first problem, for which `bench` discards the code compiled for other models."""
        return self.tokens == TOKENS[0] and self.routing == next(iter(ROUTINGS))

    def is_in(self, rows: Sequence[Row]) -> bool:
        return any((row.case, row.tokens) == (self.case, self.tokens) for row in rows)


def _problems(weight_format: str = "dense", whole: bool = False) -> list[Problem]:
    return [Problem(*one, weight_format, whole) for one in product(MODELS, TOKENS, ROUTINGS)]


PROBLEMS = {
    "experts": _problems(),
    "experts_fp8": _problems("fp8_row"),
    "experts_layer": _problems(whole=True),
}
"""Name of a table -> its problems."""


def quick(name: str) -> list[Problem]:
    """A small variant of a table's first problem, for a quick check."""
    return [replace(PROBLEMS[name][0], model=SMALL, tokens=16)]


def our_variants(layers: ExpertLayers, whole: bool) -> dict[int, Variant]:
    """Number of masks -> the variant that runs our operators."""

    def run(n_masks: int, i: int) -> Tensor:
        stored = layers.scales[i], layers.format.name
        operands = layers.x, layers.weights[i], layers.packed[n_masks][i], layers.ids[i]
        y: Tensor = torch.ops.mglu.experts_forward(*operands, "silu", None, *stored)
        if not whole:
            return y.flatten(0, 1)
        result: Tensor = torch.ops.mglu.experts_down(y, layers.down[i], layers.ids[i], layers.expert_weights[i])
        return result

    oracle = layers.layer if whole else layers.first_half
    return {
        n: Variant(f"mglu, n_m = {n}", partial(run, n), layers.count, partial(oracle, n_masks=n)) for n in layers.masks
    }


def ceilings(layers: ExpertLayers, whole: bool) -> dict[int, Variant]:
    """Number of masks -> a kernel that reads as many bytes as the weights and masks of the experts in use.

    For a whole layer it reads SwiGLU's two weights, which are as large as W and the down projection together.
    """
    stored = layers.both if whole else layers.weights
    weights = [weight[:used] for weight, used in zip(stored, layers.used, strict=True)]
    found = {}
    for n, packed in layers.packed.items():
        masks = [mask[:used] for mask, used in zip(packed, layers.used, strict=True)]
        found[n] = Variant(f"read ceiling, n_m = {n}", reader(weights, masks), layers.count)
    return found


def launches(variant: Variant) -> int:
    """The number of kernels, copies and memsets that one call of a variant launches."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        variant.run(0)
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiled.events())


def runs(variant: Variant) -> bool:
    """Run a variant once. If torch raises an error, print it and return False."""
    try:
        first_call(variant.name, lambda: variant.run(0))
    except RuntimeError as refusal:
        print(f"{variant.name} is refused: {refusal}", flush=True)
        return False
    return True


def bench(problem: Problem, rounds: int = ROUNDS) -> list[Row]:
    """Measure one problem in at most `rounds` rounds, and return its rows."""
    if problem.is_first_of_shape:
        torch._dynamo.reset()
    model, whole = problem.model, problem.whole
    skewed = ROUTINGS[problem.routing]
    layers = ExpertLayers(model, problem.tokens, skewed, problem.weight_format, MASKS, whole)
    ours, reading = our_variants(layers, whole), ceilings(layers, whole)
    every = list((layer_variants if whole else first_half_variants)(layers))
    theirs = [one for one in every if runs(one)]
    refused = [one for one in every if one not in theirs]
    pairs_of_expert = problem.tokens * model.top_k * layers.count / sum(layers.used)
    settle_seconds = SETTLE_SECONDS if pairs_of_expert > MAX_SEPARATE_GEMM_TOKENS else 0.0
    timings = measure([*reading.values(), *ours.values(), *theirs], torch.bfloat16, rounds, settle_seconds)

    def row(variant: str, n_masks: int, timing: Timing, extra: dict[str, object], ceiling: float = math.nan) -> Row:
        shape = problem.tokens, model.d, model.h, n_masks, "bfloat16"
        return Row(problem.case, variant, *shape, *timing[:2], ceiling / timing.microseconds, timing.error, extra)

    rows = []
    for n, variant in ours.items():
        ceiling, timing = timings[reading[n].name], timings[variant.name]
        extra: dict[str, object] = {"experts_in_use": round(sum(layers.used) / layers.count, 1)}
        if whole:
            extra["launches"] = launches(variant)
        least = ceiling.microseconds
        rows += [row("read ceiling", n, ceiling, {}, least), row("mglu", n, timing, extra, least)]
    for variant in fastest_tile(theirs, timings):
        extra = {"launches": launches(variant)} if whole else {}
        rows.append(row(variant.name, 0, timings[variant.name], extra))
    rows += [row(one.name, 0, Timing(math.nan, math.nan), {"left_out": "refused"}) for one in refused]
    return rows


def fastest_tile(variants: Sequence[Variant], timings: dict[str, Timing]) -> list[Variant]:
    """The variants without the slower tiles of the Triton kernel.

    Tiles with wrong results are kept, so that the result shows them.
    """
    tiles = [timings[one.name].microseconds for one in variants if one.name.startswith(TRITON)]
    least = min((time for time in tiles if not math.isnan(time)), default=0.0)
    return [one for one in variants if not (one.name.startswith(TRITON) and timings[one.name].microseconds > least)]


def run(problems: Sequence[Problem], out: Path, name: str, rounds: int = ROUNDS, resume: bool = False) -> list[Row]:
    """Measure a table, and print and write the rows after each problem."""

    def rows_of(problem: Problem) -> list[Row]:
        rows = bench(problem, rounds)
        torch.cuda.empty_cache()
        return rows

    torch.manual_seed(0)
    return records.measure(problems, rows_of, out, name, PROTOCOL, resume)


def main() -> None:
    parser = parser_of(__doc__, resume=True)
    parser.add_argument("table", choices=PROBLEMS, help="what to measure")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    run(PROBLEMS[options.table], options.out, options.table, options.rounds, options.resume)


if __name__ == "__main__":
    main()
