"""The check that data-parallel training on two ranks equals training with the whole batch, for `ranks.run_on_ranks`."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from budgets import BUDGET, relative_error
from ranks import RANKS
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import batches, optimizer_of, student

from mglu_ops.nn import MGLU, MaskStatistics

STEPS = 20
SAME = {"rtol": 1e-9, "atol": 1e-11}  # float64, summed in another order, over 20 steps of AdamW
TOKENS = 64


def new_model(device: str, dtype: torch.dtype, width: int, save_activations: bool = True) -> nn.Sequential:
    return student(MGLU, 3, width, save_activations=save_activations).to(device, dtype)


def whole_batch(
    device: str, dtype: torch.dtype, width: int
) -> tuple[nn.Sequential, list[Tensor | None], list[dict[str, float]]]:
    """The model that one process trains with the whole batch, its first gradients, and the numbers of its masks."""
    model = new_model(device, dtype, width)
    optimizer, statistics = optimizer_of(model), MaskStatistics(model)
    first: list[Tensor | None] = []
    numbers = []
    for x, target in batches(STEPS, TOKENS, width):
        optimizer.zero_grad()
        F.mse_loss(model(x.to(device, dtype)), target.to(device, dtype)).backward()
        first = first or [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        numbers.append(statistics.update())
    assert sum(step["0.gated/flips/0"] for step in numbers) > 0
    return model, first, numbers


def check_data_parallel(
    rank: int, device: str, dtype: torch.dtype, width: int, save_activations: bool, backend: str | None
) -> None:
    """In float64, all parameters and masks equal one process's; in 16 bits, the first gradients do.

    Afterwards the two ranks have the same bits.
    """
    alone, first, numbers = whole_batch(device, dtype, width)
    model = new_model(device, dtype, width, save_activations)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 2**14
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.02)  # several buckets
    forward = parallel if backend is None else torch.compile(parallel, backend=backend)
    optimizer, statistics = optimizer_of(parallel), MaskStatistics(parallel)
    for i, (x, target) in enumerate(batches(STEPS, TOKENS, width)):
        optimizer.zero_grad()
        x, target = (tensor.chunk(RANKS)[rank].to(device, dtype) for tensor in (x, target))
        F.mse_loss(forward(x), target).backward()
        if i == 0:
            for (name, parameter), want in zip(model.named_parameters(), first, strict=True):
                assert relative_error(parameter.grad, want) <= 2 * BUDGET[dtype], name
        optimizer.step()
        found = statistics.update()
        if dtype is torch.float64:
            assert found == {f"module.{key}": value for key, value in numbers[i].items()}, f"step {i}"
    for (name, got), want in zip(model.named_parameters(), alone.parameters(), strict=True):
        if dtype is torch.float64:
            torch.testing.assert_close(got, want, **SAME, msg=name)
        others = [torch.empty_like(got) for _ in range(RANKS)]
        dist.all_gather(others, got.detach())
        assert all(torch.equal(other, got) for other in others), f"{name} differs between the ranks"
