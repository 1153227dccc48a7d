"""Times MGLU's kernels, lower bounds (`ceiling`), the naive layer and SwiGLU in one run, for layers and for experts.

python -m benchmarks.decode --out DIR [--tokens 1 2 4 ... 8192] [--n-masks 1 2 4 8 16]

This command takes any layer without experts. `python -m mglu_ops bench` measures the problems of the committed tables.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import vllm_kernels
from benchmarks.baselines import (
    TRITON,
    expert_swiglu_variants,
    naive_variants,
    quantized_swiglu_variants,
    swiglu_variants,
)
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
from benchmarks.layers import MODELS, ROUTINGS, ExpertLayers, Layers, Model, with_rounded_x
from benchmarks.records import Result, Row, parser_of
from benchmarks.timing import PROTOCOL, ROUNDS, SETTLE_SECONDS, SETTLED_PROTOCOL, Timing, Variant, first_call, measure
from benchmarks.vllm_kernels import VLLM
from mglu_ops import dispatch
from mglu_ops.formats import ACTIVATION_FORMATS, FORMATS

SHAPES = ((14336, 4096), (8192, 2048))
SMALL = Model(16, 512, 1024, 2)
"""Experts for a quick check."""
BACKENDS = ("cuda", "triton", "composite")
BASELINES = ("naive", "swiglu", "vllm", "triton", "composite")
MASKLESS = ("swiglu", "vllm")
"""Baselines without masks, which are measured once for all numbers of masks."""
CEILING = "read ceiling"
EXPERTS_PROTOCOL = (
    "CUDA graph replay, distinct layers whose experts in use are > 0.3 GB with one mask, each layer with a routing of "
    "its own, variants interleaved (with more than 64 tokens an expert in turns of 0.1 s whose second half is timed), "
    "median over rounds, us per layer"
)


@dataclass(frozen=True)
class Problem:
    """A layer, and the variants to measure.

    Attributes:
        case: the problem's name in the rows.
        shape: `(out_features, in_features)` of the layer, or of each expert.
        tokens: number of tokens.
        masks: numbers of masks. Only experts have several, which are measured together.
        dtype: dtype of x and of dense weights.
        weight_format: the format of the weights of MGLU and SwiGLU.
        baselines: members of `BASELINES` to measure besides the read ceiling, the chosen backend and `cuda`. Experts
            are only compared with SwiGLU, of torch and of vLLM.
        tuned: also measure the naive layer and SwiGLU in the modes of torch.compile that take long to compile.
        settle_seconds: passed to `timing.measure`. It is at least `SETTLE_SECONDS` if more than
            `MAX_SEPARATE_GEMM_TOKENS` tokens multiply a weight.
        routing: how tokens choose experts, one of `layers.ROUTINGS`; None for a layer without experts.
        model: the sizes of the experts; None without `routing`.
        whole: also measure the experts' down projections and the sum over a token's experts.
        is_first: discard the code that was compiled for earlier problems.
    """

    case: str
    shape: tuple[int, int]
    tokens: int
    masks: tuple[int, ...]
    dtype: torch.dtype
    weight_format: str
    baselines: tuple[str, ...]
    tuned: bool
    settle_seconds: float
    routing: str | None = None
    model: Model | None = None
    whole: bool = False
    is_first: bool = True

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def is_in(self, rows: Sequence[Row]) -> bool:
        problem = self.case, self.shape, self.tokens, self.masks[0], self.dtype_name
        return problem in {(row.case, row.shape, row.tokens, row.n_masks, row.dtype) for row in rows}


class Plan(NamedTuple):
    """The variants of a problem.

    Attributes:
        ours: number of masks -> the read ceiling, and then our variants.
        theirs: variants to compare with.
        tokens_of_weight: the mean number of tokens that multiply the weight of a layer, or of an expert in use.
        alone: variants to measure after all others.
        refused: names of variants that cannot run here, and why.
    """

    ours: dict[int, list[Variant]]
    theirs: list[Variant]
    tokens_of_weight: float
    alone: Sequence[Variant] = ()
    refused: Mapping[str, str] = MappingProxyType({})


class Refusal(NamedTuple):
    """The name of variants that cannot run here, and why."""

    name: str
    reason: str


def our_variants(layers: Layers, backends: Collection[str]) -> list[Variant]:
    """The backend that the dispatch chooses, then the others in `backends` that support the problem."""
    chosen = dispatch.explain_dispatch(*layers.arguments(0)[:8]).backend

    def run(backend: str | None, i: int) -> Tensor:
        return dispatch.forward(layers.arguments(i), backend=backend)

    variants = [Variant(f"mglu {chosen}", partial(run, None), layers.count, layers.oracle, {"chosen": True})]
    for backend in (one for one in BACKENDS if one in backends and one != chosen):
        try:
            run(backend, 0)
        except ValueError as refusal:
            print(refusal, flush=True)
        else:
            variants.append(Variant(f"mglu {backend}", partial(run, backend), layers.count, layers.oracle))
    return variants


def dense_plan(problem: Problem) -> Plan:
    """The variants of a layer without experts."""
    (n_masks,), tokens, dtype = problem.masks, problem.tokens, problem.dtype
    layers = Layers(*problem.shape, n_masks, tokens, dtype, weight_format=problem.weight_format)
    reading = Variant(CEILING, reader(layers.weights, layers.packed), layers.count)
    ours = {n_masks: [reading, *our_variants(layers, {"cuda", *problem.baselines})]}
    theirs = naive_variants(layers, problem.tuned) if "naive" in problem.baselines else []
    if "swiglu" in problem.baselines:
        is_dense = layers.format.is_dense
        theirs += swiglu_variants(layers, problem.tuned) if is_dense else quantized_swiglu_variants(layers)
    refused: dict[str, str] = {}
    if "vllm" in problem.baselines:
        of_vllm, refused = those_that_run(vllm_variants(layers))
        theirs += of_vllm
    gemms = []
    if tokens >= MIN_GEMM_TOKENS:
        gemms = [gemm([layers.weight(i, dtype) for i in range(GEMM_LAYERS)])]
    if tokens > MAX_SEPARATE_GEMM_TOKENS:
        return Plan(ours, theirs + gemms, tokens, refused=refused)
    return Plan(ours, theirs, tokens, alone=gemms, refused=refused)


def our_expert_variant(layers: ExpertLayers, n_masks: int, activation_format: str = "dense") -> Variant:
    """Our operators on layers of experts. `activation_format` is the format to which the first half rounds x."""

    def run(i: int) -> Tensor:
        stored, down = (layers.scales[i], layers.format.name), layers.down[i]
        operands = layers.x, layers.weights[i], layers.packed[n_masks][i], layers.ids[i]
        y: Tensor = torch.ops.mglu.experts_forward(*operands, "silu", None, *stored, activation_format)
        if down is None:
            return y.flatten(0, 1)
        stored = layers.down_scales[i], layers.format.name
        result: Tensor = torch.ops.mglu.experts_down(y, down, layers.ids[i], layers.expert_weights[i], *stored)
        return result

    in_use = round(sum(layers.used) / layers.count, 1)
    name, known = ("mglu", layers) if activation_format == "dense" else ("mglu, x in fp8", with_rounded_x(layers))
    return Variant(name, run, layers.count, partial(known.oracle, n_masks=n_masks), {"experts_in_use": in_use})


def our_expert_variants(layers: ExpertLayers, n_masks: int) -> Iterator[Variant]:
    """Our operators for each format to which they round x, where the weights' format allows it."""
    for activation_format, weight_formats in ACTIVATION_FORMATS.items():
        if layers.format.name in weight_formats:
            yield our_expert_variant(layers, n_masks, activation_format)


def expert_reader(layers: ExpertLayers, n_masks: int) -> Variant:
    """A kernel that reads as many bytes as the weights and masks of the experts in use.

    For a whole layer it reads SwiGLU's two weights, which are as large as W and the down projection together.
    """
    stored = layers.both if layers.whole else layers.weights
    weights = [weight[:used] for weight, used in zip(stored, layers.used, strict=True)]
    masks = [mask[:used] for mask, used in zip(layers.packed[n_masks], layers.used, strict=True)]
    return Variant(CEILING, reader(weights, masks), layers.count)


def expert_plan(problem: Problem) -> Plan:
    """The variants of layers of experts."""
    assert problem.model is not None
    assert problem.routing is not None
    options = problem.routing, problem.weight_format, problem.masks, problem.whole, problem.dtype
    layers = ExpertLayers(problem.model, problem.tokens, *options)
    ours = {n: [expert_reader(layers, n), *our_expert_variants(layers, n)] for n in problem.masks}
    swiglu = expert_swiglu_variants(layers) if "swiglu" in problem.baselines else ()
    of_vllm = vllm_variants(layers) if "vllm" in problem.baselines else ()
    theirs, refused = those_that_run(chain(swiglu, of_vllm))
    return Plan(ours, theirs, layers.pairs_of_expert, refused=refused)


def vllm_variants(layers: Layers | ExpertLayers) -> Iterator[Variant | Refusal]:
    """SwiGLU in vLLM's kernels, or the reason why there are none."""
    if reason := vllm_kernels.why_missing():
        print(f"{VLLM} is left out: {reason}", flush=True)
        yield Refusal(VLLM, reason)
    elif isinstance(layers, Layers):
        yield from vllm_kernels.swiglu_variants(layers)
    else:
        yield from vllm_kernels.expert_variants(layers)


def those_that_run(variants: Iterable[Variant | Refusal]) -> tuple[list[Variant], dict[str, str]]:
    """The variants that run here, and the names of the others with the reason."""
    found: list[Variant] = []
    refused: dict[str, str] = {}
    for one in variants:
        if isinstance(one, Refusal):
            refused[one.name] = one.reason
        elif runs(one):
            found.append(one)
        else:
            refused[one.name] = "refused"
    return found, refused


def runs(variant: Variant) -> bool:
    """Run a variant once. If torch or vLLM raises an error, print it and return False."""
    # vLLM checks sizes by assertions and exceptions of several kinds.
    errors = Exception if variant.name.startswith(VLLM) else RuntimeError
    try:
        first_call(variant.name, lambda: variant.run(0))
    except errors as refusal:
        print(f"{variant.name} is refused: {refusal!r}", flush=True)
        return False
    return True


def launches(variant: Variant) -> int:
    """The number of kernels, copies and memsets that one call of a variant launches."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        variant.run(0)
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiled.events())


def fastest_tile(variants: Sequence[Variant], timings: Mapping[Variant, Timing]) -> list[Variant]:
    """The variants without the slower tiles of the Triton kernel.

    Tiles with wrong results are kept, so that the result shows them.
    """
    tiles = [timings[one].microseconds for one in variants if one.name.startswith(TRITON)]
    least = min((time for time in tiles if not math.isnan(time)), default=0.0)
    return [one for one in variants if not (one.name.startswith(TRITON) and timings[one].microseconds > least)]


def bench(problem: Problem, rounds: int = ROUNDS) -> list[Row]:
    """Measure one problem in at most `rounds` rounds, and return its rows."""
    if problem.is_first:
        torch._dynamo.reset()
    plan = dense_plan(problem) if problem.routing is None else expert_plan(problem)
    settle_seconds = problem.settle_seconds
    if plan.tokens_of_weight > MAX_SEPARATE_GEMM_TOKENS:
        settle_seconds = max(settle_seconds, SETTLE_SECONDS)
    together = [*(one for ours in plan.ours.values() for one in ours), *plan.theirs]
    timings = measure(together, problem.dtype, rounds, settle_seconds)
    if plan.alone:
        timings |= measure(plan.alone, problem.dtype, rounds)
    return rows_of(problem, plan, timings)


def rows_of(problem: Problem, plan: Plan, timings: Mapping[Variant, Timing]) -> list[Row]:
    """The rows of a problem, in which the slower tiles of the Triton kernel are left out."""
    ceilings = {n_masks: timings[ours[0]].microseconds for n_masks, ours in plan.ours.items()}

    def row(name: str, n_masks: int, timing: Timing, extra: dict[str, object]) -> Row:
        ceiling = math.nan if name == GEMM else ceilings.get(n_masks, math.nan)
        size = problem.tokens, *problem.shape, n_masks, problem.dtype_name
        return Row(problem.case, name, *size, *timing[:2], ceiling / timing.microseconds, timing.error, extra)

    def measured(variant: Variant, n_masks: int) -> Row:
        extra, time = dict(variant.extra), timings[variant].microseconds
        if problem.whole and variant.name != CEILING:
            extra["launches"] = launches(variant)
        if variant.name == GEMM and not math.isnan(time):
            flop = 2 * GEMM_TOKENS * math.prod(problem.shape)
            extra |= {"of_tokens": GEMM_TOKENS, "tflops": round(1e-6 * flop / time, 1)}
        return row(variant.name, n_masks, timings[variant], extra)

    rows = [measured(one, n_masks) for n_masks, ours in plan.ours.items() for one in ours]
    others = fastest_tile([*plan.theirs, *plan.alone], timings)
    # SwiGLU's experts are measured once for all numbers of masks.
    n_masks = problem.masks[0] if problem.routing is None else 0
    rows += [measured(one, n_masks) for one in others]
    nothing = Timing(math.nan, math.nan)
    rows += [row(name, n_masks, nothing, {"left_out": reason}) for name, reason in plan.refused.items()]
    if problem.routing is not None:
        return rows
    gemm_time = next((timings[one].microseconds for one in others if one.name == GEMM), None)
    least = floor(ceilings[n_masks], gemm_time, problem.tokens, n_masks)
    return [*rows, row("floor", n_masks, Timing(least, 0.0), {})]


@dataclass(frozen=True)
class Sweep:
    """The problems of one table: all combinations of shapes, numbers of tokens, routings and numbers of masks."""

    tokens: tuple[int, ...] = (1,)
    masks: tuple[int, ...] = (1, 2, 4, 8, 16)
    dtype: torch.dtype = torch.bfloat16
    baselines: tuple[str, ...] = ()
    shapes: Mapping[Any, str] = field(default_factory=lambda: dict.fromkeys(SHAPES, "decode"))
    """`(out_features, in_features)` or, with routings, the sizes of experts -> name of the problem in the rows."""
    tuned_at: tuple[int, ...] = (1,)
    """Numbers of tokens for which `Problem.tuned` is set."""
    settle_seconds: float = 0.0
    weight_formats: tuple[str, ...] = ("dense",)
    """Weight formats. In the rows, problems in another format than "dense" are named after their format."""
    routings: tuple[str | None, ...] = (None,)
    whole: bool = False

    def result(self, name: str, rounds: int = ROUNDS) -> Result:
        """The result `<name>.csv`, which has these problems."""
        protocol, seconds = PROTOCOL, 2 * self.settle_seconds
        if self.routings[0] is not None:
            protocol = EXPERTS_PROTOCOL
        elif seconds:
            protocol = SETTLED_PROTOCOL.format(seconds=seconds)
        return Result(name, self.problems(), self.quick().problems(), partial(bench, rounds=rounds), protocol)

    def quick(self) -> Sweep:
        """A sweep of one small problem, for a quick check."""
        if self.routings[0] is not None:
            return replace(self, shapes={SMALL: "small"}, tokens=(16,), routings=self.routings[:1])
        shape, case = min(self.shapes.items())
        return replace(self, shapes={shape: case}, tokens=self.tokens[:1], masks=self.masks[:1], settle_seconds=0.0)

    def problems(self) -> list[Problem]:
        found = []
        groups = [(n_masks,) for n_masks in self.masks] if self.routings[0] is None else [self.masks]
        every = product(self.shapes.items(), self.weight_formats, self.tokens, self.routings, groups)
        for (size, name), weight_format, tokens, routing, masks in every:
            case = name if weight_format == "dense" else weight_format
            # One measurement per shape and number of tokens is enough for baselines without masks.
            baselines = tuple(one for one in self.baselines if one not in MASKLESS or masks[0] == self.masks[0])
            problem = Problem(
                case=case if routing is None else f"{name}, {routing}",
                shape=size if routing is None else size[1:3],
                tokens=tokens,
                masks=masks,
                dtype=self.dtype,
                weight_format=weight_format,
                baselines=baselines,
                tuned=tokens in self.tuned_at,
                settle_seconds=self.settle_seconds,
                routing=routing,
                model=None if routing is None else size,
                whole=self.whole,
                is_first=routing is None or (tokens, routing) == (self.tokens[0], self.routings[0]),
            )
            found.append(problem)
        return found


MODEL_LAYERS = {
    (8192, 2048): "Llama-3.2 1B",
    (8192, 3072): "Llama-3.2 3B",
    (14336, 4096): "Llama-3.1 8B, Mistral 7B",
    (28672, 8192): "Llama-3.1 70B",
    (9728, 2560): "Qwen3 4B",
    (25600, 5120): "Qwen3 32B",
}
"""`(intermediate, hidden)` of feed-forward layers, and the models that have them."""
ONE_TO_8192 = tuple(2**i for i in range(14))
EXPERTS = Sweep(
    tokens=(1, 4, 8, 32, 128, 256, 1024),
    masks=(1, 4),
    baselines=MASKLESS,
    shapes={model: name for name, model in MODELS.items()},
    routings=ROUTINGS,
)
SWEEPS = {
    "one_token": Sweep(dtype=torch.float16, baselines=BASELINES),
    "sustained": Sweep(masks=(1, 4, 8, 16), baselines=("swiglu",), shapes={SHAPES[0]: "decode"}, settle_seconds=0.8),
    "tokens": Sweep(ONE_TO_8192, (1, 4, 8, 16), baselines=("triton",)),
    "routes": Sweep(ONE_TO_8192, (1, 4), baselines=BASELINES, shapes={SHAPES[1]: "decode"}, tuned_at=(1, 8192)),
    "formats": Sweep((1, 8, 16), (1, 2, 4, 8), baselines=MASKLESS, weight_formats=tuple(FORMATS)[1:]),
    "models": Sweep(masks=(1, 4, 8), baselines=("swiglu",), shapes=MODEL_LAYERS),
    "experts": EXPERTS,
    "experts_fp8": replace(EXPERTS, weight_formats=("fp8_row",)),
    "experts_int4": replace(EXPERTS, weight_formats=("int4_group",)),
    "experts_layer": replace(EXPERTS, whole=True),
    "experts_layer_fp8": replace(EXPERTS, weight_formats=("fp8_row",), whole=True),
}
"""Name of a result -> its problems."""


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
    sweep.result("decode", arguments.rounds).run(arguments.out)


if __name__ == "__main__":
    main()
