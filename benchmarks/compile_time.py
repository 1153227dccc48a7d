"""Times the compilation of models with and without the fusion pass, and the pass alone.

One model is a stack of MGLU layers. The other models have no MGLU layers, and the pass must hardly slow down their
compilation: chains of elementwise operators, a Llama, a UNet, a ResNet, and layers with masked activations.

python -m benchmarks.compile_time --out benchmarks/results
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.fx import Graph

from benchmarks.decoder import Sizes
from benchmarks.language_model import LanguageModel
from benchmarks.records import Row, measure, parser_of
from benchmarks.timing import summarise, wall_microseconds
from compile_passes.fusion import fuse_graph
from compile_passes.report import FusionReport
from mglu_ops.nn import GLU, NaiveMGLU

ROUNDS = 3
WIDTH, HIDDEN = 64, 128
FEATURES = 64
TOKENS = FEATURES
"""Number of tokens of models with masked activations: equal to FEATURES, so that activations have a weight's shape."""
NODES_PER_STEP = 3
MOST_NODES_TO_COMPILE = {"relu": 10}
"""Step -> number of nodes of the longest chain that Inductor compiles here. It takes 11 minutes for 100 nodes of relu.

Longer chains are only traced, by Dynamo and AOTAutograd. Since tracing is faster than compilation, the time of the pass
divided by the time of tracing is an upper bound of the pass's share of a compilation."""
MOST_LAYERS_TO_COMPILE = {"padded MLP": 200, "MLP with dropout": 40, "split attention": 100, "masked tanh": 400}
"""Kind of model -> number of layers that Inductor compiles within a minute. Deeper models are only traced."""
PROTOCOL = (
    "a first call of torch.compile under no_grad (Dynamo, AOTAutograd and Inductor of the whole graph, whatever its "
    "size), Inductor's caches empty; of MGLU layers variants in turn, median over rounds, of other models once; "
    "traced: without Inductor, for models that it takes too long to compile; "
    "the pass: fuse_graph on a copy of the graph that Dynamo captures, CPU time without garbage collection, "
    "median over rounds; us per model"
)


# --- Models -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual MLP with an MGLU layer. The other models are common architectures without one."""

    def __init__(self, n_masks: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(WIDTH), NaiveMGLU(WIDTH, HIDDEN, n_masks=n_masks)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.mlp(self.norm(x)))


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


def resnet() -> nn.Module:
    """A ResNet-50 with an eighth of its channels, for images `[batch, 3, height, width]`."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    previous = 8
    for stage, count in enumerate((3, 4, 6, 3)):
        inner = 8 * 2**stage
        for i in range(count):
            layers.append(Bottleneck(previous, inner, 4 * inner, stride=2 if stage and not i else 1))
            previous = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(previous, 10))


def double_conv(channels: int, out: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU()),
        *(nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU()),
    )


class UNet(nn.Module):
    """Convolutions down to a coarse grid and up again, with a skip connection at each size.

    Takes images `[batch, 3, height, width]` whose sizes are multiples of 16.
    """

    def __init__(self) -> None:
        super().__init__()
        widths = [8, 16, 32, 64, 128]
        self.first = double_conv(3, 8)
        self.down = nn.ModuleList(double_conv(a, b) for a, b in pairwise(widths))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.joined = nn.ModuleList(double_conv(2 * b, b) for _, b in pairs)
        self.last = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [self.first(x)]
        for down in self.down:
            sizes.append(down(F.max_pool2d(sizes[-1], 2)))
        y = sizes.pop()
        for up, joined in zip(self.up, self.joined, strict=True):
            y = joined(torch.cat([sizes.pop(), up(y)], dim=1))
        return self.last(y)


class MLP(nn.Module):
    """The weights of a residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)


class PaddedMLP(MLP):
    """A residual MLP. A mask sets the activations of padding to 0 before and after the MLP."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = F.relu(self.up(x.masked_fill(mask, 0)))
        return x + self.down(h).masked_fill(mask, 0)


class DropoutMLP(MLP):
    """A residual MLP with handwritten dropout of 10%: a bool mask before the MLP, and a float mask after it."""

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        h = x * (torch.rand_like(x) > 0.1) / 0.9
        h = self.down(F.relu(self.up(h)))
        return x + h * (torch.rand_like(h) > 0.1).to(h.dtype) / 0.9


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


# --- Measuring --------------------------------------------------------------------------------------------------------


def captured(function: Callable[..., Any], x: Tensor) -> Graph:
    """The graph that Dynamo captures from a model."""
    graphs: list[Graph] = []

    def backend(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(x)
    return graphs[0]


def time_of_pass(graph: Graph, layers: int, may_report: bool = False) -> float:
    """Seconds of this thread's CPU time to fuse a copy of a graph. Other load does not affect CPU time.

    The garbage collector is off while the pass runs, because it would visit all objects of the process. The pass must
    fuse `layers` layers, and with `may_report` its report may mention products that were not fused.
    """
    copy, report = Graph(graph.owning_module), FusionReport()
    copy.output(copy.graph_copy(graph, {}))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="mglu_ops")  # otherwise, a failure of the pass only warns
        gc.disable()
        try:
            start = time.thread_time()
            fuse_graph(copy, report, strict=not may_report)
            elapsed = time.thread_time() - start
        finally:
            gc.enable()
    assert len(report.fused) == layers, f"{len(report.fused)} of {layers} layers fused"
    return elapsed


def time_of_compilation(function: Callable[..., Any], x: Tensor, backend: str) -> float:
    """Seconds of a first call, with empty caches."""
    torch._dynamo.reset()
    with fresh_cache(), inductor_config.patch(fx_graph_cache=False):
        return wall_microseconds(lambda: torch.compile(function, backend=backend)(x)) / 1e6


def no_autograd_cache() -> AbstractContextManager[None]:
    """Turn off the cache of AOTAutograd, which `fresh_cache` leaves on."""
    return torch._functorch.config.patch(enable_autograd_cache=False)


@dataclass(frozen=True)
class Case:
    """A model to compile.

    Attributes:
        name: the case's name in the results.
        build: returns the model, a module or a function, and its input.
        backend: `inductor` to compile the model, or `aot_eager` to trace it only.
        may_report: allow the report to mention products that look like parts of an MGLU layer.
        layers: number of MGLU layers, all of which the pass must fuse. A model without any is compiled only without
            fusion.
        n_masks: number of masks of each MGLU layer.
    """

    name: str
    build: Callable[[], tuple[Callable[[Tensor], Tensor], Tensor]]
    backend: str = "inductor"
    may_report: bool = False
    layers: int = 0
    n_masks: int = 0


def mglu_layers(n_masks: int) -> Case:
    """A stack of 32 MGLU layers."""

    def build() -> tuple[nn.Module, Tensor]:
        return nn.Sequential(*(Block(n_masks) for _ in range(32))), torch.randn(3, WIDTH)

    return Case("compile 32 layers", build, layers=32, n_masks=n_masks)


def chain(step: str, nodes: int) -> Case:
    """A chain of elementwise operators. `step` is one of `STEPS`."""
    backend = "inductor" if nodes <= MOST_NODES_TO_COMPILE.get(step, nodes) else "aot_eager"
    return Case(f"chain of {step}, {nodes} nodes", lambda: (Chain(step, nodes), torch.randn(3, FEATURES)), backend)


def llama(layers: int) -> Case:
    """A decoder with SwiGLU that predicts the tokens of two sequences."""
    sizes = Sizes(layers, FEATURES, 2 * FEATURES, heads=4, kv_heads=4, vocabulary=256, context=64, rope_base=10_000.0)
    return Case(f"Llama, {layers} layers", lambda: (LanguageModel(sizes, GLU), torch.arange(18).view(2, 9)))


def masked(kind: str, layers: int) -> Case:
    """Layers with masked activations. `kind` is one of `MASKED_LAYERS`."""
    return Case(
        f"{kind}, {layers} layers",
        lambda: (Masked(kind, layers), torch.randn(TOKENS, FEATURES)),
        "inductor" if layers <= MOST_LAYERS_TO_COMPILE.get(kind, layers) else "aot_eager",
        may_report=kind == "split attention",  # it looks like MGLU: scores under a mask and its complement
    )


def unknown_calls(calls: int) -> Case:
    """A chain of calls of `unknown`."""

    def model(x: Tensor) -> Tensor:
        for _ in range(calls):
            x = unknown(x)
        return x

    return Case(f"{calls} unknown calls", lambda: (model, torch.randn(3, FEATURES)), "aot_eager")


def writes(count: int) -> Case:
    """A tensor whose rows are written one after the other."""

    def model(x: Tensor) -> Tensor:
        y = torch.zeros(count, FEATURES)
        for i in range(count):
            y[i] = x[0]
        return y

    return Case(f"{count} writes y[i] = x", lambda: (model, torch.randn(3, FEATURES)), "aot_eager")


UNET = Case("UNet", lambda: (UNet(), torch.randn(1, 3, 64, 64)))
RESNET = Case("ResNet", lambda: (resnet().eval(), torch.randn(1, 3, 64, 64)))
CASES = (
    mglu_layers(4),
    *(chain(step, nodes) for nodes in (10, 100, 1000, 5000) for step in STEPS),
    *(UNET, RESNET, llama(200)),
    *(make(count) for make in (unknown_calls, writes) for count in (200, 600)),
    *(masked(kind, layers) for kind in MASKED_LAYERS for layers in (100, 200, 400, 800)),
)


def bench(case: Case) -> list[Row]:
    """Measure the pass and the whole compilation of a model."""
    function, x = case.build()
    variants = {"compiled" if case.backend == "inductor" else "traced": case.backend}
    if case.layers:
        variants = {"naive compiled": "inductor", "fused": "mglu"}
    times: dict[str, list[float]] = {name: [] for name in ("pass", *variants)}
    with torch.no_grad(), no_autograd_cache():
        assert function(x).isfinite().all(), f"{case.name}: infinities would change the time of arithmetic"
        graph = captured(function, x)
        if case.layers:
            time_of_compilation(function, x, "mglu")  # imports modules before the first timed call
        for i in range(ROUNDS):
            times["pass"].append(time_of_pass(graph, case.layers, case.may_report))
            for name, backend in variants.items():
                if case.layers or i == 0:
                    times[name].append(time_of_compilation(function, x, backend))
    tokens, shape = (3, (HIDDEN, WIDTH)) if case.layers else (0, (0, 0))
    nodes, rows = len(graph.nodes), []
    for name, seconds in times.items():
        microseconds = [1e6 * one for one in seconds]
        extra: dict[str, object] = {"nodes": nodes, "us_a_node": round(summarise(microseconds).median / nodes, 2)}
        size = tokens, shape, case.n_masks
        rows.append(Row.of_times(case.name, name, *size, microseconds, dtype=torch.float32, extra=extra))
    return rows


if __name__ == "__main__":
    measure(CASES, bench, parser_of(__doc__).parse_args().out, "compile_time", PROTOCOL)
