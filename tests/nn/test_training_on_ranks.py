"""DistributedDataParallel and FSDP of experts on two ranks, compared with one process.

tests/distributed has more tests of FSDP.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mglu_ops.nn import MaskStatistics, MGLUExpertsFeedForward, parameter_groups
from mglu_ops.parallel import shard_placement_fn
from tests.support.families import sample
from tests.support.modules import WIDTH, batches
from tests.support.ranks import RANKS, run_on_ranks
from tests.support.ranks.data_parallel import SAME, check_data_parallel, check_mixed_precision, new_model

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")

HOW = [  # dtype, save_activations and the backend of torch.compile
    (torch.float64, True, None),
    (torch.float64, False, None),
    (torch.float64, True, "aot_eager"),
    (torch.float64, False, "aot_eager"),
    (torch.bfloat16, True, None),
]


@pytest.mark.parametrize("how", sample(HOW, len(HOW)))
def test_data_parallel_training_equals_training_with_the_whole_batch(how, tmp_path):
    dtype, save_activations, backend = how
    run_on_ranks(check_data_parallel, tmp_path, "cpu", dtype, WIDTH, save_activations, backend)


def check_accumulation(rank: int) -> None:
    """Accumulate gradients: two parts of a batch run under `no_sync`, and the third one communicates."""
    alone, model = (new_model("cpu", torch.float64, WIDTH) for _ in range(2))
    parallel = DistributedDataParallel(model)
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


def experts() -> nn.Sequential:
    torch.manual_seed(0)
    block = MGLUExpertsFeedForward(4, WIDTH, 16, 2, n_masks=2, mask_top_k=1, dtype=torch.float64)
    return nn.Sequential(block, nn.Linear(WIDTH, 8, dtype=torch.float64))


def check_experts_in_fsdp(rank: int) -> None:
    """Each rank holds whole experts. AdamW steps give the parameters of one process with the whole batch."""
    alone, sharded = experts(), experts()
    fully_shard(sharded, shard_placement_fn=shard_placement_fn(sharded))
    layer = sharded[0].experts
    assert layer.mask_logits.to_local().shape == (2, 2, 16, WIDTH)
    assert layer.weight.to_local().shape == (2, 16, WIDTH)
    statistics = [MaskStatistics(model) for model in (alone, sharded)]
    optimizers = [
        torch.optim.AdamW(parameter_groups(model, lr=1e-2, weight_decay=0.1), foreach=False)
        for model in (alone, sharded)
    ]
    for x, target in batches(3, tokens=48):
        F.mse_loss(alone(x.double()), target.double()).backward()
        x, target = (tensor.double().chunk(RANKS)[rank] for tensor in (x, target))
        F.mse_loss(sharded(x), target).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, got), want in zip(sharded.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), want, **SAME, msg=name)
    found, want = (each.update() for each in statistics)
    assert found == want
    assert found["0.experts/flips/0"] > 0


@pytest.mark.long
def test_experts_train_in_fsdp_as_in_one_process(tmp_path: Path) -> None:
    run_on_ranks(check_experts_in_fsdp, tmp_path)


WRAPPERS = ["FSDP2, materialized", "FSDP2, offloaded", "FSDP2, assigned", "FSDP2"]


@pytest.mark.parametrize("wrapper", sample(WRAPPERS, 2))
def test_mixed_precision_does_not_cast_stored_weights(wrapper: str, tmp_path: Path) -> None:
    """FSDP2 keeps the dtype. DistributedDataParallel casts on a GPU only: tests/gpu/test_parallel_gpu.py tests that."""
    run_on_ranks(check_mixed_precision, tmp_path, "cpu", wrapper)
