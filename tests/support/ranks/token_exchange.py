"""Checks of experts with `tokens="sharded"`: each rank sends its tokens to the ranks that hold the tokens' experts.

The ranks together must compute and learn what one process does with all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import mglu_ops
from mglu_ops.parallel import ParallelExperts
from tests.support.ranks.expert_parallel import KINDS, ExpertSetting, assert_same_step
from tests.support.ranks.tensor_parallel import (
    STEPS,
    WIDTH,
    assert_same_gradients,
    assert_same_parameters,
    gradients,
    optimizer_of,
    train,
)

TOKENS_OF_RANKS = ((1, 0, 3), (0, 2, 0))
"""Numbers of tokens on all ranks but the last. The last rank has all remaining tokens."""


def exchanging(setting: ExpertSetting, model: nn.Sequential, src_data_rank: int | None = 0) -> nn.Sequential:
    return setting.divided("experts", model, src_data_rank, tokens="sharded")


def gradients_of_all(setting: ExpertSetting, model: nn.Sequential, x: Tensor) -> dict[str, Tensor]:
    """The gradients of the sum of all ranks' losses.

    The layer averages the gradients of experts over the ranks, so they are multiplied by the number of ranks. It leaves
    the gradients of routers to the user, so they are summed here.
    """
    found, ranks = gradients(model, model, x), setting.mesh.size()
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            found[name] = None if found[name] is None else found[name].full_tensor() * ranks
        else:
            dist.all_reduce(found[name])
    return found


def compare(setting: ExpertSetting, model: nn.Sequential, alone: nn.Sequential, x: Tensor, what: str) -> None:
    """Compare results and gradients for the tokens of x, divided between the ranks in several ways."""
    rank, ranks = setting.mesh.get_local_rank(), setting.mesh.size()
    for sizes in TOKENS_OF_RANKS:
        counts = [*sizes[: ranks - 1], len(x) - sum(sizes[: ranks - 1])]
        own = x.split(counts)[rank]
        want = gradients(alone, alone, x)
        want |= {key: want[key].split(counts)[rank] for key in ("x", "y")}
        with torch.no_grad():
            setting.assert_same(model(own), want["y"], f"{what}, {len(own)} tokens, no gradients", factor=2)
        got = gradients_of_all(setting, model, own)
        assert_same_gradients(setting, got, want, f"{what}, {len(own)} tokens")
        again = gradients_of_all(setting, model, own)
        assert all(found is None or torch.equal(found, again[key]) for key, found in got.items()), what


def check_results(setting: ExpertSetting) -> None:
    """For all kinds of masks and uneven loads, results and gradients match a single process, and bits repeat."""
    x = setting.x().flatten(0, 1)
    for name, options in KINDS.items():
        alone, model = setting.model(**options), exchanging(setting, setting.model(**options))
        for tensor in model[0].down_proj.weight, model[0].experts.weight:
            assert tensor.placements == (Shard(0),)
        compare(setting, model, alone, x, name)


def check_idle_rank(setting: ExpertSetting) -> None:
    """If no token selects an expert of the last rank, that rank's gradients are zeros."""
    alone, model = (setting.model()[:1] for _ in range(2))
    own, x = len(alone[0].gate.weight) // setting.mesh.size(), setting.x().flatten(0, 1).abs()
    nn.init.uniform_(alone[0].gate.weight[:-own].detach(), 0.1, 0.2)
    nn.init.constant_(alone[0].gate.weight[-own:].detach(), -1)
    model.load_state_dict(alone.state_dict())
    exchanging(setting, model)
    compare(setting, model, alone, x, "idle rank")
    assert not alone[0].experts.weight.grad[-own:].any()


def check_inference(setting: ExpertSetting) -> None:
    """Frozen and quantized layers match a single process, for a batch of tokens and for one token on one rank."""
    for name in (None, "fp8_row", "int4_group"):
        alone = mglu_ops.freeze(setting.model(mask_top_k=2))
        after = mglu_ops.freeze(exchanging(setting, setting.model(mask_top_k=2)))
        if name is not None:
            alone, after = mglu_ops.quantize(alone, name), mglu_ops.quantize(after, name)
        for x in (setting.x().flatten(0, 1), setting.x()[0, :1]):
            rank, ranks = setting.mesh.get_local_rank(), setting.mesh.size()
            counts = [len(x) // 2, len(x) - len(x) // 2, *[0] * (ranks - 2)]
            with torch.no_grad():
                want = alone(x).split(counts)[rank]
                setting.assert_same(after(x.split(counts)[rank]), want, f"{name}, {len(x)} tokens", factor=2)


def check_training(setting: ExpertSetting) -> None:
    """With FSDP2 for the routers, AdamW steps give the parameters of one process with the whole batch."""
    expected, model = setting.model(mask_top_k=2), exchanging(setting, setting.model(mask_top_k=2))
    expert_parameters = {parameter for parameter in model.parameters() if isinstance(parameter, DTensor)}
    fully_shard(model, mesh=setting.mesh, ignored_params=expert_parameters)
    before = expected[0].experts.mask_logits.detach() > 0
    train(setting, expected, optimizer_of(expected), range(STEPS))
    train(setting, model, optimizer_of(model), range(STEPS), setting.mesh)
    assert_same_parameters(model, expected, "exchanged tokens")
    assert not torch.equal(expected[0].experts.mask_logits > 0, before)


def check_trained_step(setting: ExpertSetting) -> None:
    """One SGD step matches a single process, also in 16 bits, where several steps may diverge."""
    model = exchanging(setting, setting.model())
    expert_parameters = {parameter for parameter in model.parameters() if isinstance(parameter, DTensor)}
    fully_shard(model, mesh=setting.mesh, ignored_params=expert_parameters)
    assert_same_step(setting, model, setting.mesh, "exchanged tokens")


def check_bad_input(setting: ExpertSetting) -> None:
    with pytest.raises(ValueError, match="tokens: got 'own', must be 'replicated' or 'sharded'"):
        ParallelExperts("experts", tokens="own")
    with pytest.raises(ValueError, match="divide: got 'rows' with tokens='sharded', must be 'experts'"):
        ParallelExperts("rows", tokens="sharded")
    with pytest.raises(ValueError, match=r"output_layouts: got None, Shard\(dim=1\) with tokens='sharded', must be"):
        ParallelExperts("experts", output_layouts=Shard(1), tokens="sharded")


CHECKS = {
    "results": check_results,
    "idle_rank": check_idle_rank,
    "inference": check_inference,
    "training": check_training,
    "trained_step": check_trained_step,
    "bad_input": check_bad_input,
}
WITHOUT_FLOAT64 = ["results", "idle_rank", "inference", "trained_step"]


def run_checks(rank: int, device: str, dtype: torch.dtype, names: Sequence[str], width: int = WIDTH) -> None:
    setting = ExpertSetting.of(device, dtype, width)
    for name in names:
        CHECKS[name](setting)
