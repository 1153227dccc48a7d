"""Checks for `ranks.run_on_ranks`: data-parallel training on two ranks equals training in one process."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import mglu_ops
from mglu_ops.formats import FORMATS
from mglu_ops.nn import MGLU, MaskStatistics, MGLUExpertsFeedForward, SwiMGLU
from tests.support.budgets import BUDGET, relative_error
from tests.support.modules import WIDTH, batches, optimizer_of, student
from tests.support.ranks import RANKS

STEPS = 20
SAME = {"rtol": 1e-9, "atol": 1e-11}  # for float64 parameters after 20 steps of AdamW, with sums in another order
TOKENS = 64


def new_model(device: str, dtype: torch.dtype, width: int, save_activations: bool = True) -> nn.Sequential:
    return student(MGLU, 3, width, save_activations=save_activations).to(device, dtype)


def whole_batch(
    device: str, dtype: torch.dtype, width: int
) -> tuple[nn.Sequential, list[Tensor | None], list[dict[str, float]]]:
    """Train a model in one process with the whole batch.

    Returns the model, the gradients of its first step, and its mask statistics at each step.
    """
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
    """DDP in float64 gives the parameters and masks of one process. In 16 bits, only the first gradients are compared.

    At the end, both ranks hold the same bits.
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


def check_mixed_precision(rank: int, device: str, wrapper: str) -> None:
    """Mixed precision casts a linear layer, but not quantized weights, even one with an odd number of rows."""
    low = torch.bfloat16
    # FSDP of torch 2.11 first sets requires_grad on every parameter, which fails for integers.
    takes_integers = wrapper == "DDP" or torch.__version__ >= (2, 13)
    for name in [one for one, of in FORMATS.items() if of.dtype and (takes_integers or of.dtype.is_floating_point)]:
        torch.manual_seed(0)
        block = MGLUExpertsFeedForward(3, 128, 128, 2, n_masks=1)
        layers = nn.Sequential(nn.Linear(WIDTH, 128), SwiMGLU(128, 131, n_masks=2), block)
        alone, x = mglu_ops.quantize(mglu_ops.freeze(layers.to(device)), name), torch.randn(6, WIDTH, device=device)
        model = copy.deepcopy(alone)
        if wrapper == "DDP":
            options = {"mixed_precision": _MixedPrecision(param_dtype=low, reduce_dtype=low)}
            model = DistributedDataParallel(model, init_sync=False, **options)  # the ranks have the same weights
        else:
            offloads = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if wrapper == "FSDP2, offloaded" else {}
            model.to("meta" if wrapper == "FSDP2, materialized" else device)
            fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=low), **offloads)
            if wrapper in ("FSDP2, materialized", "FSDP2, assigned"):
                model.to_empty(device=device)
                state = fully_shard(copy.deepcopy(alone)).state_dict()
                model.load_state_dict(state, assign=wrapper == "FSDP2, assigned")
        found, wanted = model(x), alone.to(low)(x.to(low))
        assert torch.equal(found, wanted), name
        saved = {type(getattr(one, "_local_tensor", one)) for one in model.state_dict().values()}
        assert saved == {Tensor}, "a saved tensor is of torch's own class"
        found.float().sum().backward()
        assert next(model.parameters()).grad is not None, name
