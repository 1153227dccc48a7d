"""Times feed-forward layers and layers of experts on several GPUs and on one: inference, and a training step.

torchrun --standalone --nproc-per-node 2 -m benchmarks.tensor_parallel --out DIR [--shapes 8192x2048] [--n-masks 1 4]
    [--mixtures 128x768x2048x8]

A dense layer is `down_proj(mglu(x))`: column parallel, then row parallel with a sum over the ranks. A layer of experts
includes its router, and is divided by experts, by rows, or by experts with separate tokens on each rank. Every rank
also holds the whole layer and runs it alone. Without GPUs the ranks are CPU processes, which only shows that everything
works.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import mglu_ops
from benchmarks.layers import MODELS, Model
from benchmarks.records import Row, parser_of, write
from benchmarks.timing import Variant, capture, clock_of, relative_error, under_load
from mglu_ops.accuracy import ERROR_BUDGET
from mglu_ops.nn import MGLUExpertsFeedForward, MGLUFeedForward
from mglu_ops.parallel import ColwiseMGLU, ParallelExperts
from mglu_ops.tuning.command import shape as shape_of

Call = Callable[[], object]

SHAPES = ((14336, 4096), (28672, 8192), (8192, 2048))
MIXTURES = (MODELS["Qwen3-30B-A3B"],)
MASKS = (1, 4)
FORMATS = ("dense", "fp8_row")
TOKENS = (1, 8, 8192)
TRAINED = (8192,)
TOKENS_OF_EXPERTS = (1, 32, 256, 8192)
ROUNDS = 9
ROTATED_BYTES, ROTATED_BYTES_OF_EXPERTS = 1e9, 3e8
"""A rank rotates through layers (or experts in use) of this many bytes, so that weights do not come from L2."""
SECONDS = 0.02
"""A call is repeated for this time before its clock starts, and is then timed for this time."""
CHECKED = 64
"""The results of this number of tokens are compared with float64."""
INFERENCE, TRAIN = "inference", "training step"
PROTOCOL = (
    "down_proj(mglu(x)), or a layer of experts with its router, in bfloat16; inference: frozen masks, rotating layers "
    "> 1 GB a rank or experts in use > 0.3 GB, CUDA graphs (all-to-all: eager); training step: learned masks, forward "
    "and backward, eager; variants in turns whose order changes, all ranks at once; each turn repeats its call for "
    "20 ms and is then timed for 20 ms or one call; median over rounds of the slowest rank, us per layer; the tokens "
    "are those of all ranks together, and gradients of routers are not averaged"
)


@dataclass(frozen=True)
class Problem:
    """A layer, and the number of tokens of all ranks together.

    Attributes:
        work: INFERENCE or TRAIN.
        shape: `(out_features, in_features)` of the gated projection. Each expert has a projection of this shape.
        weight_format: format of the gated projection's weight.
        experts: number of experts, or 0 for a dense layer.
        top_k: number of experts per token.
    """

    work: str
    shape: tuple[int, int]
    n_masks: int
    tokens: int
    weight_format: str = "dense"
    experts: int = 0
    top_k: int = 0

    @property
    def case(self) -> str:
        stored = "" if self.weight_format == "dense" else f", {self.weight_format}"
        return f"{self.work}{stored}" + (f", {self.experts} experts" if self.experts else "")

    def divisions(self, ranks: int) -> dict[str, Any]:
        """Name of a way to divide the layer -> its plan for `parallelize_module`."""
        if not self.experts:
            return {f"{ranks} ranks": {"mglu": ColwiseMGLU(), "down_proj": RowwiseParallel()}}
        return {
            f"{ranks} ranks, experts": ParallelExperts("experts"),
            f"{ranks} ranks, rows": ParallelExperts("rows"),
            f"{ranks} ranks, experts, all-to-all": ParallelExperts("experts", tokens="sharded"),
        }

    def layers_to_rotate(self, layer: nn.Module, ranks: int) -> int:
        """The number of layers, each divided between the ranks, through which a rank rotates (see `ROTATED_BYTES`)."""
        own = sum(t.nbytes for t in layer.state_dict().values()) / ranks
        if not self.experts:
            return int(ROTATED_BYTES // own) + 1
        in_use = min(1.0, self.tokens * self.top_k / self.experts)
        return int(ROTATED_BYTES_OF_EXPERTS // (own * in_use)) + 1


@dataclass(frozen=True)
class Ranks:
    """The processes that measure together, seen from one of them."""

    mesh: DeviceMesh
    device: torch.device

    @staticmethod
    def start() -> Ranks:
        """Join the ranks that torchrun started. If there are GPUs, rank i uses GPU i."""
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
        return Ranks(init_device_mesh(device.type, (dist.get_world_size(),)), device)

    def slowest(self, number: float) -> float:
        """The largest of the ranks' numbers. Every rank gets it."""
        largest = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()

    def clock(self, call: Call, calls: int = 1) -> float:
        """Microseconds of a call on the slowest rank, averaged over `calls`. All ranks get the same number."""
        dist.barrier()
        return self.slowest(clock_of(self.device.type)(call, calls))

    def end(self, failed: bool) -> NoReturn:
        """Leave the group and end the process, with status 1 if the measurement failed."""
        dist.barrier()
        dist.destroy_process_group()
        # The process must end before Python tears down its interpreter: a thread of gloo that drops the last reference
        # to a tensor meanwhile aborts the process (pytorch issue 190489).
        os._exit(failed)


def layer_of(problem: Problem, ranks: Ranks) -> nn.Module:
    """The layer of a problem, with the same random parameters on every rank."""
    d, h = problem.shape
    kind: dict[str, Any] = {"n_masks": problem.n_masks, "device": ranks.device, "dtype": torch.bfloat16}
    layer: nn.Module
    if problem.experts:
        layer = MGLUExpertsFeedForward(problem.experts, h, d, problem.top_k, **kind)
        nn.init.eye_(layer.gate.weight)  # routes by the first features of x; see `inputs_of`
    else:
        layer = MGLUFeedForward(h, d, **kind)
    for tensor in layer.state_dict().values():
        dist.broadcast(tensor, 0)
    if problem.work == TRAIN:
        return layer
    mglu_ops.freeze(layer).requires_grad_(False)
    return layer if problem.weight_format == "dense" else mglu_ops.quantize(layer, problem.weight_format)


def inputs_of(problem: Problem, ranks: Ranks) -> Tensor:
    """Random x `[tokens, in_features]`, the same on every rank.

    The router copies the first features of x. They are distinct multiples of 1/64 in random order, so all dtypes and
    divisions choose the same experts, and each expert has the same probability.
    """
    x = torch.randn(problem.tokens, problem.shape[1], device=ranks.device)
    order = torch.rand(problem.tokens, problem.experts, device=ranks.device).argsort(1)
    x[:, : problem.experts] = order / 64 - 1
    x = x.bfloat16()
    dist.broadcast(x, 0)
    return x


def divided(layer: nn.Module, plan: Any, ranks: Ranks) -> nn.Module:
    """A copy of a layer, divided between the ranks by a plan. Without a plan, the whole layer."""
    layer = copy.deepcopy(layer)
    return layer if plan is None else parallelize_module(layer, ranks.mesh, plan, src_data_rank=None)


def inference(layers: list[nn.Module], x: Tensor, in_graph: bool) -> Call:
    """A function that runs all layers, or with `in_graph` replays them as a CUDA graph."""

    @torch.no_grad()
    def run(i: int) -> Tensor:
        return finished(layers[i](x))

    if in_graph:
        return capture(Variant(INFERENCE, run, len(layers))).replay
    return lambda: [run(i) for i in range(len(layers))]


def training(x: Tensor, layer: nn.Module) -> Call:
    """A function that drops earlier gradients, and runs a layer forward and backward."""
    x = x.clone().requires_grad_()
    leaves = [x, *layer.parameters()]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        y = layer(x)
        y.backward(torch.ones_like(finished(y)))
        assert x.grad is not None
        finished(x.grad)

    return step


def finished(tensor: Tensor) -> Tensor:
    """The tensor, after waiting for the collective that writes it, if there is one."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def bench(problem: Problem, ranks: Ranks, rounds: int, seconds: float) -> list[Row]:
    """Measure a problem on all ranks. Returns a row for a single rank, and a row for each division."""
    whole, x = layer_of(problem, ranks), inputs_of(problem, ranks)
    exact = copy.deepcopy(whole).double()
    errors, counts, calls = {}, {}, {}
    for name, plan in {"one rank": None, **problem.divisions(ranks.mesh.size())}.items():
        exchanges = isinstance(plan, ParallelExperts) and plan.tokens == "sharded"
        own = x.tensor_split(ranks.mesh.size())[dist.get_rank()] if exchanges else x
        layer = divided(whole, plan, ranks)
        with torch.no_grad():
            want = exact(own[:CHECKED].double())
            errors[name] = ranks.slowest(relative_error(finished(layer(own))[:CHECKED], want))
        if problem.work == TRAIN:
            calls[name], counts[name] = training(own, layer), 1
            continue
        on_gpu = ranks.device.type == "cuda"
        count = problem.layers_to_rotate(whole, 1 if plan is None else ranks.mesh.size()) if on_gpu else 1
        layers = [layer, *(divided(whole, plan, ranks) for _ in range(count - 1))]
        calls[name], counts[name] = inference(layers, own, on_gpu and not exchanges), count
    del exact
    # All ranks get the time of the slowest one, so they make the same calls in the same order.
    times = under_load(calls, ranks.clock, rounds, seconds, most_seconds=math.inf)
    size, budget = (problem.tokens, problem.shape, problem.n_masks), ERROR_BUDGET[torch.bfloat16]
    rows = []
    for name, call_times in times.items():
        layer_times = [time / counts[name] for time in call_times]
        rows.append(Row.of_times(problem.case, name, *size, layer_times, error=errors[name], budget=budget))
    return rows


def mixture_of(text: str) -> Model:
    """The sizes of a mixture of experts, from a text such as `128x768x2048x8`."""
    experts, d, h, top_k = map(int, text.split("x"))
    return Model(experts, d, h, top_k)


def problems(options: Any) -> list[Problem]:
    """The problems of the command line. Mixtures come first, so that a time limit skips dense layers."""
    found = []
    for (experts, d, h, top_k), n_masks, work in product(options.mixtures, options.n_masks, (INFERENCE, TRAIN)):
        all_tokens = options.tokens_of_experts
        found += [Problem(work, (d, h), n_masks, tokens, "dense", experts, top_k) for tokens in all_tokens]
    for shape, n_masks in product(options.shapes, options.n_masks):
        found += [Problem(INFERENCE, shape, n_masks, *rest) for rest in product(options.tokens, options.formats)]
        found += [Problem(TRAIN, shape, n_masks, tokens) for tokens in options.trained]
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=shape_of, nargs="*", default=SHAPES, metavar="DxH", help="of dense layers")
    parser.add_argument("--n-masks", type=int, nargs="+", default=MASKS)
    parser.add_argument("--formats", nargs="+", default=FORMATS, help="of the weights of dense layers at inference")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="of dense layers at inference")
    parser.add_argument("--trained", type=int, nargs="*", default=TRAINED, help="tokens of dense layers in training")
    about = "experts, their out_features and in_features, and the experts of a token"
    parser.add_argument("--mixtures", type=mixture_of, nargs="*", default=MIXTURES, metavar="ExDxHxK", help=about)
    parser.add_argument("--tokens-of-experts", type=int, nargs="*", default=TOKENS_OF_EXPERTS, help="in both works")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long a turn repeats its call")
    parser.add_argument("--most-seconds", type=float, default=math.inf, help="after which no further problem begins")
    options = parser.parse_args()
    ranks = Ranks.start()
    torch.manual_seed(0)
    rows: list[Row] = []
    start = time.perf_counter()
    for problem in problems(options):
        if (elapsed := ranks.slowest(time.perf_counter() - start)) > options.most_seconds:
            print(f"stopped after {elapsed:.0f} s, before {problem}", flush=True)
            break
        found = bench(problem, ranks, options.rounds, options.seconds)
        rows += found
        if dist.get_rank() == 0:
            print(*found, sep="\n", flush=True)
            write(rows, options.out, "tensor_parallel", f"{dist.get_backend()}, {ranks.mesh.size()} ranks; {PROTOCOL}")
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
    ranks.end(any(row.is_wrong for row in rows))


if __name__ == "__main__":
    main()
