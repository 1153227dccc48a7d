"""Times a feed-forward layer on several GPUs against one: decoding with frozen masks, and a training step.

torchrun --standalone --nproc-per-node 2 -m benchmarks.tensor_parallel --out DIR [--shapes 8192x2048] [--n-masks 1 4]

Each layer is `down_proj(mglu(x))`, column parallel and then row parallel, with the sum over the ranks. Every rank also
holds the whole layer and runs it alone. Without GPUs the ranks are CPU processes, which shows that everything works.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import mglu_ops
from benchmarks.harness import Variant, capture, relative_error
from benchmarks.records import Row, parser_of, write
from benchmarks.timing import clock_of, under_load
from benchmarks.train import shape_of
from mglu_ops.accuracy import ERROR_BUDGET
from mglu_ops.nn import MGLUFeedForward
from mglu_ops.parallel import ColwiseMGLU

Call = Callable[[], object]

SHAPES = ((8192, 2048), (14336, 4096))
MASKS = (1, 4)
DECODED = (1, 2, 4, 8, 16, 32, 64)
TRAINED = (8192,)
ROUNDS = 15
ROTATED_BYTES = 1e9
"""Total bytes of the layers that a rank rotates through when it decodes, so that nothing comes from L2."""
SECONDS = 0.02
"""How long a call is repeated before its clock starts, and is then timed."""
DECODE, TRAIN = "decode", "training step"
PROTOCOL = (
    "down_proj(mglu(x)) in bfloat16; decode: frozen masks, rotating layers > 1 GB a rank, CUDA graphs; training step: "
    "learned masks, forward and backward, eager; variants in turns whose order changes, all ranks at once; each turn "
    "repeats its call for 20 ms and is then timed for 20 ms or one call; median over rounds of the slowest rank, us "
    "per layer"
)


@dataclass(frozen=True)
class Problem:
    """A layer's shape `(out_features, in_features)` and number of masks, the number of tokens, and what it does."""

    case: str
    shape: tuple[int, int]
    n_masks: int
    tokens: int


@dataclass(frozen=True)
class Ranks:
    """The processes that measure together."""

    mesh: DeviceMesh
    device: torch.device

    @staticmethod
    def start() -> Ranks:
        """Join the ranks that torchrun started, each with the GPU of its number if there are GPUs."""
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
        return Ranks(init_device_mesh(device.type, (dist.get_world_size(),)), device)

    def slowest(self, number: float) -> float:
        """The largest of the ranks' numbers; every rank gets it."""
        largest = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()

    def clock(self, call: Call, calls: int = 1) -> float:
        """Microseconds of a call on the slowest rank, averaged over `calls`, which is the same on all ranks."""
        dist.barrier()
        return self.slowest(clock_of(self.device.type)(call, calls))


def layer_of(problem: Problem, ranks: Ranks) -> nn.Module:
    """The layer of a problem, with the same random parameters on every rank."""
    d, h = problem.shape
    layer = MGLUFeedForward(h, d, n_masks=problem.n_masks, device=ranks.device, dtype=torch.bfloat16)
    for tensor in layer.state_dict().values():
        dist.broadcast(tensor, 0)
    return mglu_ops.freeze(layer).requires_grad_(False) if problem.case == DECODE else layer


def parallel(layer: nn.Module, ranks: Ranks) -> nn.Module:
    """A copy of a layer, divided over the ranks."""
    return parallelize_module(copy.deepcopy(layer), ranks.mesh, {"mglu": ColwiseMGLU(), "down_proj": RowwiseParallel()})


def decoding(problem: Problem, ranks: Ranks, x: Tensor, whole: nn.Module, is_parallel: bool) -> tuple[Call, int]:
    """A call that runs as many layers as ROTATED_BYTES needs, the first of them `whole`, and their number.

    On a GPU, the call replays a CUDA graph.
    """
    own = sum(t.nbytes for t in whole.state_dict().values()) // (ranks.mesh.size() if is_parallel else 1)
    count = int(ROTATED_BYTES // own) + 1 if ranks.device.type == "cuda" else 1
    every = chain([whole], (layer_of(problem, ranks) for _ in range(count - 1)))
    layers = [parallel(layer, ranks) if is_parallel else layer for layer in every]

    @torch.no_grad()
    def run(i: int) -> Tensor:
        return finished(layers[i](x))

    if ranks.device.type == "cuda":
        return capture(Variant("decode", run, count)).replay, count
    return lambda: [run(i) for i in range(count)], count


def training(x: Tensor, layer: nn.Module) -> Call:
    """A call that drops the gradients and then runs a layer forward and backward."""
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
    """Wait for the collective that writes the tensor, if there is one, and return the tensor."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def bench(problem: Problem, ranks: Ranks, rounds: int, seconds: float) -> list[Row]:
    """Measure a problem on all ranks together, and return one row for a single rank and one for all ranks."""
    whole = layer_of(problem, ranks)
    x = torch.randn(problem.tokens, problem.shape[1], device=ranks.device, dtype=torch.bfloat16)
    dist.broadcast(x, 0)
    divided = parallel(whole, ranks)
    errors, counts, calls = {}, {}, {}
    for name, layer in {"one rank": whole, f"{ranks.mesh.size()} ranks": divided}.items():
        with torch.no_grad():
            exact = copy.deepcopy(whole).double()(x.double())
            errors[name] = ranks.slowest(relative_error(finished(layer(x)), exact))
        if problem.case == DECODE:
            calls[name], counts[name] = decoding(problem, ranks, x, whole, layer is divided)
        else:
            calls[name], counts[name] = training(x, layer), 1
    # A time is the slowest rank's, the same on all ranks, so that they make the same calls in the same order.
    times = under_load(calls, ranks.clock, rounds, seconds, most_seconds=math.inf)
    size, budget = (problem.tokens, problem.shape, problem.n_masks), ERROR_BUDGET[torch.bfloat16]
    rows = []
    for name, of_call in times.items():
        of_layer = [time / counts[name] for time in of_call]
        rows.append(Row.of_times(problem.case, name, *size, of_layer, error=errors[name], budget=budget))
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=SHAPES, metavar="DxH")
    parser.add_argument("--n-masks", type=int, nargs="+", default=MASKS)
    parser.add_argument("--decoded", type=int, nargs="*", default=DECODED, help="numbers of tokens to decode")
    parser.add_argument("--trained", type=int, nargs="*", default=TRAINED, help="numbers of tokens of a training step")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long a turn repeats its call")
    options = parser.parse_args()
    work = [*product([DECODE], options.decoded), *product([TRAIN], options.trained)]
    ranks = Ranks.start()
    torch.manual_seed(0)
    rows: list[Row] = []
    for shape, n_masks, (case, tokens) in product(options.shapes, options.n_masks, work):
        found = bench(Problem(case, shape, n_masks, tokens), ranks, options.rounds, options.seconds)
        rows += found
        if dist.get_rank() == 0:
            print(*found, sep="\n", flush=True)
            write(rows, options.out, "tensor_parallel", f"{dist.get_backend()}, {ranks.mesh.size()} ranks; {PROTOCOL}")
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()  # so that gloo's threads drop their tensors before Python ends: see pytorch issue 190489
    dist.destroy_process_group()
    raise SystemExit(any(row.is_wrong for row in rows))


if __name__ == "__main__":
    main()
