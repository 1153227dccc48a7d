"""DistributedDataParallel and mixed precision on two ranks, compared with one process.

tests/distributed has more tests of FSDP.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

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


WRAPPERS = ["FSDP2, materialized", "FSDP2, offloaded", "FSDP2, assigned", "FSDP2"]


@pytest.mark.parametrize("wrapper", sample(WRAPPERS, 2))
def test_mixed_precision_does_not_cast_stored_weights(wrapper: str, tmp_path: Path) -> None:
    """FSDP2 keeps the dtype. DistributedDataParallel casts on a GPU only: tests/gpu/test_parallel_gpu.py tests that."""
    run_on_ranks(check_mixed_precision, tmp_path, "cpu", wrapper)
