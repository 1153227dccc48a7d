"""Training on two ranks: DistributedDataParallel and `fully_shard`, against one process with the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from data_parallel import SAME, STEPS, TOKENS, check_data_parallel, new_model, whole_batch
from ranks import RANKS, run_on_ranks
from torch.nn.parallel import DistributedDataParallel
from training import WIDTH, batches, optimizer_of

from mglu_ops.nn import MaskStatistics

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")

HOW = ("cpu", torch.float64, WIDTH)


@pytest.mark.parametrize(
    ("save_activations", "backend"),
    [
        (True, None),
        pytest.param(False, None, marks=pytest.mark.long),
        pytest.param(True, "aot_eager", marks=pytest.mark.long),
        pytest.param(False, "aot_eager", marks=pytest.mark.long),
    ],
)
def test_data_parallel_training_equals_training_with_the_whole_batch(
    save_activations: bool, backend: str | None, tmp_path: Path
) -> None:
    run_on_ranks(check_data_parallel, tmp_path, *HOW, save_activations, backend)


@pytest.mark.long
def test_data_parallel_training_in_bfloat16(tmp_path: Path) -> None:
    run_on_ranks(check_data_parallel, tmp_path, "cpu", torch.bfloat16, WIDTH, True, None)


def check_accumulation(rank: int) -> None:
    """Run two parts of a batch under `no_sync`, without communication, and a third with it."""
    alone, parallel = new_model(*HOW), DistributedDataParallel(new_model(*HOW))
    x, target = (tensor.double() for tensor in next(iter(batches(1, tokens=48))))
    F.mse_loss(alone(x), target).backward()
    parts = list(zip(x.chunk(RANKS)[rank].chunk(3), target.chunk(RANKS)[rank].chunk(3), strict=True))
    with parallel.no_sync():
        for part, wanted in parts[:-1]:
            (F.mse_loss(parallel(part), wanted) / 3).backward()
    (F.mse_loss(parallel(parts[-1][0]), parts[-1][1]) / 3).backward()
    for (name, got), want in zip(parallel.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, **SAME, msg=name)


@pytest.mark.long
def test_accumulated_gradients_of_two_ranks_equal_the_whole_batch(tmp_path: Path) -> None:
    run_on_ranks(check_accumulation, tmp_path)


def check_fully_sharded(rank: int, save_activations: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    alone, _, numbers = whole_batch(*HOW)
    mesh, sharded = init_device_mesh("cpu", (RANKS,)), new_model(*HOW, save_activations)
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizer, statistics = optimizer_of(sharded), MaskStatistics(sharded)
    for i, (x, target) in enumerate(batches(STEPS, TOKENS)):
        optimizer.zero_grad()
        F.mse_loss(sharded(x.double().chunk(RANKS)[rank]), target.double().chunk(RANKS)[rank]).backward()
        optimizer.step()
        assert statistics.update() == numbers[i], f"step {i}"
    for (name, got), want in zip(sharded.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), want.detach(), **SAME, msg=name)


@pytest.mark.long
@pytest.mark.parametrize("save_activations", [True, False])
def test_fully_sharded_training_equals_training_with_the_whole_batch(save_activations: bool, tmp_path: Path) -> None:
    run_on_ranks(check_fully_sharded, tmp_path, save_activations)
