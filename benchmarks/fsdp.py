"""Times a training step of whole language models that FSDP2 divides over several GPUs, with SwiGLU and with SwiMGLU.

torchrun --standalone --nproc-per-node 2 -m benchmarks.fsdp --out DIR [--n-masks 0 1 4] [--sizes 24x1024x2816x16x16]

Parameters and the state of AdamW are float32 and divided; blocks gather them in bfloat16 and sum gradients in float32.
Every rank also runs the whole model without communication, so that a row says how much of the communication the step
hides behind its products. Without GPUs the ranks are CPU processes, which only shows that everything works.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.decoder import Projection, Sizes
from benchmarks.language_model import LanguageModel, count
from benchmarks.records import Row, parser_of, write
from benchmarks.tensor_parallel import Ranks
from benchmarks.timing import LOAD_SECONDS, SETTLED_ROUNDS, allocated, peak, release, under_load
from benchmarks.train_model import LEARNING_RATE, LENGTH, MODELS, Model, Training, build, distance
from mglu_ops.nn import GLU, MGLU
from mglu_ops.parallel import shard_placement_fn

MASKS = (0, 1, 4)
"""Numbers of masks; 0 is SwiGLU."""
PRECISION = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
MAX_DISTANCE = 0.02
"""Allowed distance between the gradients of the divided and of the whole model, relative to the norm of the latter. The
whole model rounds each rank's gradients to bfloat16."""
PROTOCOL = (
    "forward, backward and AdamW(fused=True) on random tokens, sequences of 2048, in the column sequences the number "
    "on each rank; fully_shard of each block and of the model; float32 parameters, gathered in bfloat16; gradients "
    "summed in float32; blocks and loss compiled; between two events, variants in turns whose order changes, each "
    "after at least one step and 60 ms of load; median over 5 to 9 rounds of the slowest rank, us a step; "
    "backward_us: without AdamW; alone_us: the same of the whole model in bfloat16 on each rank, without "
    "communication; communication_us: the sum of the communication's kernels in one profiled step, with the time in "
    "which a kernel waits for the other rank; peak_mb: of the rank with the most; error: distance of all gradients to "
    "the whole model's, before the first step"
)


def projection_of(n_masks: int) -> Projection:
    """The gated projection with this number of masks."""
    return partial(MGLU, n_masks=n_masks, weight_init="leveled") if n_masks else GLU


def divided(model: LanguageModel, ranks: Ranks) -> LanguageModel:
    """Divide the blocks of a model, and then the rest of it, over all ranks."""
    placement = shard_placement_fn(model)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=ranks.mesh, mp_policy=PRECISION, shard_placement_fn=placement)
    return model


def gradients(model: nn.Module, whole: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each gradient of the divided model, and of the whole model averaged over the ranks."""
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        assert theirs.grad is not None
        mean = theirs.grad.float()
        dist.all_reduce(mean)
        yield ours.grad.full_tensor(), mean / dist.get_world_size()


def communication(step: Callable[[], object], device: str) -> float:
    """The time of all kernels of NCCL in a step, in microseconds; NaN on a CPU."""
    if device != "cuda":
        return math.nan
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages() if "ncclDevKernel" in event.key)


def bench(name: str, model: Model, numbers: list[int], ranks: Ranks, rounds: int, seconds: float) -> list[Row]:
    """Measure a model with each number of masks on all ranks, and return a row for each."""
    (sizes, batch), device = model, ranks.device.type
    length = batch * sizes.context
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(0, sizes.vocabulary, (batch, sizes.context + 1), device=ranks.device)
    calls: dict[str, Callable[[], None]] = {}
    extra: dict[int, dict[str, float]] = {}
    errors: dict[int, float] = {}
    for n_masks in numbers:
        torch._dynamo.reset()
        torch.manual_seed(0)  # the same parameters on every rank
        held = allocated(device)
        parallel = build(sizes, projection_of(n_masks), device, "autocast")
        whole = copy.deepcopy(parallel)
        for parameter in whole.parameters():
            parameter.data = parameter.data.bfloat16()
        divided(parallel, ranks)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE, fused=True)
        ours = Training(parallel, optimizer, tokens, autocast=False)
        alone = Training(whole, torch.optim.AdamW(whole.parameters()), tokens, autocast=False)
        for one in (ours, alone):
            one.backward()
        errors[n_masks] = ranks.slowest(distance(gradients(parallel, whole)))
        del one
        ours.step()
        backward(ours)
        backward(alone)
        own = sum(tensor.nbytes for tensor in whole.parameters()) / 1e6
        release()
        extra[n_masks] = {
            "parameters_m": round(count(whole) / 1e6, 1),
            "sequences": batch,
            "peak_mb": round(ranks.slowest(peak(ours.step, device) - held - own), 1),
            "communication_us": ranks.slowest(communication(ours.step, device)),
        }
        calls |= {
            f"{n_masks} step": ours.step,
            f"{n_masks} backward": partial(backward, ours),
            f"{n_masks} alone": partial(backward, alone),
        }
    times = under_load(calls, ranks.clock, rounds, seconds, most_seconds=math.inf)
    rows = []
    for n_masks in numbers:
        step, both, alone_times = (times[f"{n_masks} {what}"] for what in ("step", "backward", "alone"))
        columns = extra[n_masks] | {
            "backward_us": round(median(both), 1),
            "alone_us": round(median(alone_times), 1),
            "tokens_per_second": round(ranks.mesh.size() * length / median(step) * 1e6),
        }
        variant = "SwiMGLU" if n_masks else "SwiGLU"
        size = ranks.mesh.size() * length, (sizes.intermediate, sizes.hidden), n_masks
        line = name, variant, *size, step
        rows.append(Row.of_times(*line, error=errors[n_masks], budget=MAX_DISTANCE, extra=dict(columns)))
    return rows


def backward(training: Training) -> None:
    """Forward and backward passes; gradients are dropped."""
    training.backward()
    training.optimizer.zero_grad(set_to_none=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS)[:1])
    about = "another model: layers, hidden and intermediate size, query heads and key heads, with 4 sequences a rank"
    parser.add_argument("--sizes", metavar="LxHxIxQxK", help=about)
    parser.add_argument("--vocabulary", type=int, default=32000, help="of the model of --sizes")
    parser.add_argument("--length", type=int, default=LENGTH, help="of the sequences of that model")
    parser.add_argument("--n-masks", type=int, nargs="+", default=MASKS, help="0 is SwiGLU")
    parser.add_argument("--rounds", type=int, default=SETTLED_ROUNDS)
    parser.add_argument("--seconds", type=float, default=LOAD_SECONDS, help="how long a turn repeats its call")
    options = parser.parse_args()
    models = {name: MODELS[name] for name in options.models}
    if options.sizes is not None:
        widths = (int(width) for width in options.sizes.split("x"))
        sizes = replace(Sizes(*widths), vocabulary=options.vocabulary, context=options.length)
        models = {options.sizes: Model(sizes, batch=4)}
    ranks, rows = Ranks.start(), []
    for name, model in models.items():
        begin = time.perf_counter()
        rows += bench(name, model, options.n_masks, ranks, options.rounds, options.seconds)
        if dist.get_rank() == 0:
            print(*rows, sep="\n", flush=True)
            print(f"{name}: measured in {time.perf_counter() - begin:.0f} s", flush=True)
            write(rows, options.out, "fsdp", f"{dist.get_backend()}, {ranks.mesh.size()} ranks; {PROTOCOL}")
    ranks.end(any(row.is_wrong for row in rows))


if __name__ == "__main__":
    main()
