"""Train and freeze feed-forward layers that are divided between several GPUs, or between CPU processes.

    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py

Each rank has some rows of W and of the masks (`ColwiseMGLU`), and the matching columns of the down projection's weight
(`RowwiseParallel`). The ranks' partial results are summed. Rank 0 prints the progress. The example takes about 10 s
on 2 CPU cores.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import mglu_ops
from mglu_ops.nn import SwiMGLU, parameter_groups
from mglu_ops.parallel import ColwiseMGLU


class Block(nn.Module):
    """A feed-forward layer with a norm before it and a residual connection around it."""

    def __init__(self, hidden: int, intermediate: int, n_masks: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.feed_forward = SwiMGLU(hidden, intermediate, n_masks=n_masks)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(self.norm(x))


def start() -> DeviceMesh:
    """Join the processes that torchrun started, with NCCL if there are GPUs and otherwise with gloo."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
        return init_device_mesh("cuda", (dist.get_world_size(),))
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),))


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(model: nn.Module, x: Tensor, target: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=3e-3, weight_decay=0.1))
    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        if step in (0, steps - 1):
            say(f"step {step + 1}: loss {loss.item():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--n-masks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    mesh, begin = start(), time.perf_counter()

    torch.manual_seed(0)  # the same model and the same data on every rank
    sizes = arguments.hidden, arguments.intermediate, arguments.n_masks
    model = nn.Sequential(Block(*sizes), Block(*sizes)).to(mesh.device_type)
    x, target = torch.randn(2, 4, 32, arguments.hidden, device=mesh.device_type)

    plan = {"*.feed_forward.mglu": ColwiseMGLU(), "*.feed_forward.down_proj": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    layer = model[0].feed_forward.mglu
    rows = layer.weight.to_local().shape[0]
    say(
        f"{mesh.size()} ranks ({mesh.device_type}); each has {rows} of the {layer.out_features} rows of W and its masks"
    )

    train(model, x, target, arguments.steps)
    with torch.no_grad():
        learned = model.eval()(x)
        mglu_ops.freeze(model)  # every rank packs its rows
        frozen = model(x)
    error = ((frozen - learned).norm() / learned.norm()).item()
    say(f"frozen: {layer.packed_masks.to_local().nbytes} bytes of masks on each rank, results differ by {error:.1e}")
    say(f"done in {time.perf_counter() - begin:.1f} s")
    dist.barrier()
    dist.destroy_process_group()
    if mesh.device_type == "cpu":
        # The process must end before Python tears down its interpreter: a thread of gloo that drops the last reference
        # to a tensor meanwhile aborts the process (pytorch issue 190489).
        os._exit(0)


if __name__ == "__main__":
    main()
