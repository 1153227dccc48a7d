"""Checks that layers of experts that are divided between ranks compute and learn what one process does."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import mglu_ops
from mglu_ops.nn import MaskStatistics, MGLUExpertsFeedForward
from mglu_ops.parallel import ParallelExperts
from tests.support.ranks.sharded_training import load_model, shard_fully
from tests.support.ranks.tensor_parallel import (
    STEPS,
    WIDTH,
    Setting,
    assert_same_gradients,
    assert_same_parameters,
    gradients,
    optimizer_of,
    train,
    whole,
)

WAYS = ("experts", "rows")
KINDS: dict[str, dict[str, Any]] = {
    "learned": {},
    "fixed": {"learnable_masks": False},
    "weighted": {"mask_top_k": 2},
    "recomputed": {"save_activations": False},
}


@dataclass(frozen=True)
class ExpertSetting(Setting):
    """Two layers of 8 experts with `top_k` 3.

    In 16 bits there is only one layer, because rounding its result could change the experts of a second layer.
    """

    @staticmethod
    def of(device: str = "cpu", dtype: torch.dtype = torch.float64, width: int = WIDTH) -> ExpertSetting:
        return ExpertSetting(init_device_mesh(device, (dist.get_world_size(),)), device, dtype, width)

    def model(self, intermediate: int | None = None, **options: Any) -> nn.Sequential:  # type: ignore[override] # experts
        torch.manual_seed(0)
        count, usual = (2, 16) if self.dtype.itemsize > 2 else (1, self.width)
        sizes = 8, self.width, intermediate or usual, 3
        layers = (MGLUExpertsFeedForward(*sizes, n_masks=3, **options) for _ in range(count))
        return nn.Sequential(*layers).to(self.device, self.dtype)

    def divided(self, way: str, model: nn.Sequential, src_data_rank: int | None = 0, **layouts: Any) -> nn.Sequential:
        plan = {"*": ParallelExperts(way, **layouts)}
        return parallelize_module(model, self.mesh, plan, src_data_rank=src_data_rank)


def check_placements(setting: ExpertSetting) -> None:
    """Each rank holds its share of the experts, or of every expert's rows, and a copy of the routers."""
    ranks = setting.mesh.size()
    for way in WAYS:
        by_experts = way == "experts"
        for learnable_masks in (True, False):
            options = {"mask_top_k": 2, "learnable_masks": learnable_masks}
            whole, divided = setting.model(**options), setting.divided(way, setting.model(**options))
            masks = "experts.mask_logits" if learnable_masks else "experts.packed_masks"
            placements = {
                "gate.weight": Replicate(),
                "down_proj.weight": Shard(0 if by_experts else 2),
                "experts.weight": Shard(0 if by_experts else 1),
                masks: Shard(0 if by_experts else 1 + learnable_masks),
                "experts.router.weight": Replicate(),
            }
            wanted = whole[0].state_dict()
            found = divided[0].state_dict()
            assert found.keys() == wanted.keys() == placements.keys()
            for name, placement in placements.items():
                assert found[name].placements == (placement,), f"{way}: {name}"
                assert torch.equal(found[name].full_tensor(), wanted[name]), f"{way}: {name}"
                if isinstance(placement, Shard):
                    held = found[name].to_local().shape[placement.dim]
                    assert held == wanted[name].shape[placement.dim] // ranks, f"{way}: {name}"


def check_results(setting: ExpertSetting) -> None:
    """Results and gradients match a single process for all kinds of masks, and for a sequence and one decoded token."""
    for name, options in KINDS.items():
        alone = setting.model(**options)
        want, token = gradients(alone, alone, setting.x()), setting.x()[:1, :1]
        for way in WAYS:
            divided = setting.divided(way, setting.model(**options))
            with torch.no_grad():
                for x in (setting.x(), token):
                    setting.assert_same(divided(x), alone(x), f"{way}, {name}, no gradients", factor=2)
            assert_same_gradients(setting, gradients(divided, divided, setting.x()), want, f"{way}, {name}")


def check_sequence_parts(setting: ExpertSetting) -> None:
    """Sequence parallelism: inputs and results of layers may be divided between the ranks along the sequence."""
    alone = setting.model()
    want = gradients(alone, alone, setting.x())
    expected = {key: setting.part_of_sequence(t) if key in ("x", "y") else t for key, t in want.items()}
    layouts = {"input_layouts": Shard(1), "output_layouts": Shard(1)}
    for way in WAYS:
        divided = setting.divided(way, setting.model(), **layouts)
        got = gradients(divided, divided, setting.part_of_sequence(setting.x()))
        assert_same_gradients(setting, got, expected, way)


def check_router_logits(setting: ExpertSetting) -> None:
    """The gradient of a load-balancing loss is counted once, and not once per rank."""

    def with_loss(layer: nn.Module, x: Tensor) -> Tensor:
        y, logits = layer(x, True)
        return y + logits.softmax(-1).square().sum()

    alone = setting.model()[0]
    want = gradients(alone, lambda x: with_loss(alone, x), setting.x())
    for way in WAYS:
        divided = setting.divided(way, setting.model())[0]
        got = gradients(divided, lambda x, layer=divided: with_loss(layer, x), setting.x())
        assert_same_gradients(setting, got, want, way)


def check_compiled(setting: ExpertSetting) -> None:
    """Compiled layers, in one graph without breaks, equal eager layers in one process."""
    for way in WAYS:
        torch._dynamo.reset()
        alone, divided = setting.model(mask_top_k=2), setting.divided(way, setting.model(mask_top_k=2))
        compiled = torch.compile(divided, backend="aot_eager", fullgraph=True)
        want = gradients(alone, alone, setting.x())
        assert_same_gradients(setting, gradients(divided, compiled, setting.x()), want, way)


def check_training(setting: ExpertSetting) -> None:
    """Some AdamW steps change masks and give the parameters of a single process. Freezing keeps the results."""
    for way in WAYS:
        alone, divided = (setting.model(mask_top_k=2) for _ in range(2))
        before = alone[0].experts.mask_logits.detach() > 0
        for model in (alone, setting.divided(way, divided)):
            train(setting, model, optimizer_of(model), range(STEPS))
        assert_same_parameters(divided, alone, way)
        assert not torch.equal(alone[0].experts.mask_logits > 0, before)
        with torch.no_grad():
            learned = divided(setting.x())
            mglu_ops.freeze(divided)
            setting.assert_same(divided(setting.x()), learned, f"{way}, frozen")
        packed = mglu_ops.freeze(alone)[0].experts.packed_masks
        assert torch.equal(divided[0].experts.packed_masks.full_tensor(), packed)


def check_quantized(setting: ExpertSetting) -> None:
    """Layers can be quantized before or after they are divided. Scales are divided with their weights."""
    ranks, rank = setting.mesh.size(), setting.mesh.get_local_rank()
    intermediate = 128 * ranks  # a whole block or group of columns for each rank
    for name, scales_columns in (("fp8_row", False), ("fp8_block", True), ("int8_row", False), ("int4_group", True)):
        alone = mglu_ops.quantize(mglu_ops.freeze(setting.model(intermediate)), name)
        want = gradients(alone, alone, setting.x())
        for way in WAYS:
            # gloo cannot scatter fp8, so every rank takes its part of its own copy.
            before = setting.divided(way, copy.deepcopy(alone), src_data_rank=None if name.startswith("fp8") else 0)
            after = mglu_ops.quantize(setting.divided(way, mglu_ops.freeze(setting.model(intermediate))), name)
            scale_placement = Shard(0) if way == "experts" else Shard(2) if scales_columns else Replicate()
            for divided in (before, after):
                assert divided[0].experts.weight_scale.placements == (Shard(WAYS.index(way)),)
                assert divided[0].down_proj.weight_scale.placements == (scale_placement,)
                own = alone[0].down_proj.weight.chunk(ranks, 0 if way == "experts" else 2)[rank]
                assert torch.equal(divided[0].down_proj.weight.to_local(), own)
                assert_same_gradients(setting, gradients(divided, divided, setting.x()), want, f"{way}, {name}")


def check_bad_input(setting: ExpertSetting) -> None:
    ranks = setting.mesh.size()
    with pytest.raises(ValueError, match="divide: got 'tokens', must be 'experts' or 'rows'"):
        ParallelExperts("tokens")
    with pytest.raises(TypeError, match="module: got Linear, must be an MGLUExpertsFeedForward for ParallelExperts"):
        parallelize_module(nn.Linear(4, 4), setting.mesh, ParallelExperts("rows"))
    odd = MGLUExpertsFeedForward(7, 8, 9, 2)
    with pytest.raises(ValueError, match=f"num_experts: got 7, must be a multiple of the number of ranks, {ranks}"):
        parallelize_module(odd, setting.mesh, ParallelExperts("experts"))
    with pytest.raises(ValueError, match=f"intermediate_size: got 9, must be a multiple of the .*, {ranks}"):
        parallelize_module(odd, setting.mesh, ParallelExperts("rows"))
    group = f"got 16, must be a multiple of {128 * ranks} with {ranks} ranks and a weight in int4_group"
    packed = setting.model(learnable_masks=False)
    with pytest.raises(ValueError, match=f"intermediate_size: {group}"):
        setting.divided("rows", mglu_ops.quantize(copy.deepcopy(packed), "int4_group"))
    with pytest.raises(ValueError, match=f"model: 0.down_proj: in_features: {group}"):
        mglu_ops.quantize(setting.divided("rows", packed), "int4_group")
    ids = torch.zeros(8, 2, dtype=torch.int32, device=setting.device)
    for way in WAYS:
        divided = setting.divided(way, setting.model(learnable_masks=False))
        if setting.mesh.get_local_rank() == 1:
            divided[0].experts.packed_masks.to_local()[0, 0, -1, 0] |= 0x80
        with pytest.raises(ValueError, match="packed_masks: padding bits past in_features=36 are set"):
            divided(setting.x())  # on all ranks
        learned = setting.divided(way, setting.model())[0].experts
        with pytest.raises(TypeError, match="MGLUExperts: got a Tensor in a layer that ParallelExperts has divided"):
            learned(setting.x()[0], ids)


def check_materialized(setting: ExpertSetting) -> None:
    """A model on the meta device can be divided first, and get memory and initial values afterwards."""
    for way in WAYS:
        model = setting.divided(way, setting.model().to("meta"))
        model.to_empty(device=setting.device)
        for layer in model:
            nn.init.constant_(layer.down_proj.weight, 9)
            nn.init.constant_(layer.experts.weight, 9)
            layer.reset_parameters()
            for tensor, inputs in ((layer.down_proj.weight, 16), (layer.experts.weight, setting.width)):
                bound = inputs**-0.5
                assert 0.98 * bound < tensor.full_tensor().abs().max() <= bound, way
        with torch.no_grad():
            assert model(setting.x()).isfinite().all()


def check_trained_step(setting: ExpertSetting) -> None:
    """One SGD step updates divided and fully sharded layers as in a single process."""
    for way in WAYS:
        assert_same_step(setting, setting.divided(way, setting.model()), None, way)
    assert_same_step(setting, shard_fully(setting.model(), setting.mesh), setting.mesh, "fully_shard")


def assert_same_step(setting: ExpertSetting, model: nn.Module, parts: DeviceMesh | None, what: str) -> None:
    """Train one step, with this rank's share of the batch if `parts` is given, and compare the parameter updates.

    Each parameter has a learning rate that makes its update as large as itself, so that no update vanishes in 16 bits.
    """
    initial, alone = setting.model(), setting.model()
    F.mse_loss(alone(setting.x(0)), setting.x(STEPS)).backward()  # as in `train`
    rates = [(one.norm() / one.grad.norm()).item() for one in alone.parameters()]
    for one, mesh in ((alone, None), (model, parts)):
        groups = [{"params": [p], "lr": rate} for p, rate in zip(one.parameters(), rates, strict=True)]
        train(setting, one, torch.optim.SGD(groups), range(1), mesh)
    for (name, before), after, found in zip(
        initial.named_parameters(), alone.parameters(), model.parameters(), strict=True
    ):
        setting.assert_same(whole(found.detach()) - before, after.detach() - before, f"{what}: {name}", factor=3)


def check_fully_sharded(setting: ExpertSetting) -> None:
    """FSDP2 trains layers of experts as one process does, and each rank holds whole experts.

    With four or more ranks, it also trains divided layers.
    """
    expected, sharded = setting.model(), shard_fully(setting.model(), setting.mesh)
    layer, statistics = sharded[0].experts, [MaskStatistics(model) for model in (expected, sharded)]
    for tensor in (layer.weight, layer.mask_logits):
        assert tensor.to_local().shape == (8 // setting.mesh.size(), *tensor.shape[1:])
    train(setting, expected, optimizer_of(expected), range(STEPS))
    train(setting, sharded, optimizer_of(sharded), range(STEPS), setting.mesh)
    assert_same_parameters(sharded, expected, "fully_shard")
    want, found = (each.update() for each in statistics)
    assert found == want
    assert found["0.experts/flips/0"] > 0
    if setting.mesh.size() < 4:
        return
    mesh = init_device_mesh(setting.device, (2, setting.mesh.size() // 2), mesh_dim_names=("data", "expert"))
    inner = ExpertSetting(mesh["expert"], setting.device, setting.dtype)
    for way in WAYS:
        sharded = shard_fully(inner.divided(way, inner.model()), mesh["data"])
        train(setting, sharded, optimizer_of(sharded), range(STEPS), mesh["data"])
        assert_same_parameters(sharded, expected, f"fully_shard, {way}")


CHECKS = {"placements": check_placements, "results": check_results, "sequence_parts": check_sequence_parts}
CHECKS |= {"router_logits": check_router_logits, "training": check_training, "quantized": check_quantized}
CHECKS |= {"bad_input": check_bad_input, "materialized": check_materialized, "fully_sharded": check_fully_sharded}
CHECKS |= {"compiled": check_compiled}
CHECKS |= {"trained_step": check_trained_step}
WITHOUT_FLOAT64 = ["results", "sequence_parts", "router_logits", "quantized", "trained_step"]
WITHOUT_TRAINING = ["placements", "bad_input", "materialized"]
"""Checks that need no gradients: on a GPU, gradients of experts are not available in float64."""


def run_checks(rank: int, device: str, dtype: torch.dtype, names: Sequence[str], width: int = WIDTH) -> None:
    setting = ExpertSetting.of(device, dtype, width)
    for name in names:
        CHECKS[name](setting)


# --- Checkpoints ----------------------------------------------------------------------------------------------------


def save(rank: int, device: str, dtype: torch.dtype, folder: str) -> None:
    """Train a model divided in each way, and save its checkpoint."""
    setting = ExpertSetting.of(device, dtype)
    for way in WAYS:
        model = setting.divided(way, setting.model())
        train(setting, model, optimizer_of(model), range(2))
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/{way}")
        if rank == 0:
            torch.save(full, f"{folder}/{way}.pt")


def load(rank: int, device: str, dtype: torch.dtype, folder: str) -> None:
    """Load each checkpoint into a model that is divided in the other way, and compare the bits."""
    setting = ExpertSetting.of(device, dtype)
    for way, other in zip(WAYS, reversed(WAYS), strict=True):
        load_model(reset(setting.divided(other, setting.model())), folder, way)


def load_whole(device: str, dtype: torch.dtype, folder: str, to: str) -> None:
    """Load each checkpoint in one process without a process group, and save it again."""
    for way in WAYS:
        model = ExpertSetting(None, device, dtype).model()
        load_model(reset(model), folder, way)
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{to}/{way}")
        shutil.copy(f"{folder}/{way}.pt", to)


def reset(model: nn.Sequential) -> nn.Sequential:
    for layer in model:
        layer.reset_parameters()
    return model
