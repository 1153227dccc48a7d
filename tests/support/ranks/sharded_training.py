"""Checks for `ranks.run_on_ranks`: FSDP2 and distributed checkpoints with MGLU layers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import mglu_ops
from mglu_ops.nn import MaskStatistics
from mglu_ops.parallel import shard_placement_fn
from tests.support.ranks.tensor_parallel import (
    STEPS,
    Setting,
    assert_same_gradients,
    assert_same_parameters,
    gradients,
    optimizer_of,
    train,
    whole,
)


def shard_fully(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    placement = shard_placement_fn(model)
    for layer in model:
        fully_shard(layer, mesh=mesh, shard_placement_fn=placement)
    return fully_shard(model, mesh=mesh, shard_placement_fn=placement)


# --- FSDP2 ----------------------------------------------------------------------------------------------------------


def check_spread(setting: Setting) -> None:
    """Each rank holds its share of the weight's rows and of every mask's rows."""
    layer, rows = shard_fully(setting.model(), setting.mesh)[0].mglu, setting.intermediate // setting.mesh.size()
    assert layer.mask_logits.to_local().shape == (3, rows, setting.width)
    assert layer.weight.to_local().shape == (rows, setting.width)


def check_fully_sharded_training(setting: Setting) -> None:
    """AdamW steps give the same parameters as in one process with the whole batch. The gathered model can be frozen.

    The sharded layers recompute their activations in the backward pass.
    """
    expected, sharded = setting.model(top_k=2), setting.model(top_k=2, save_activations=False)
    shard_fully(sharded, setting.mesh)
    statistics = [MaskStatistics(model) for model in (expected, sharded)]
    train(setting, expected, optimizer_of(expected), range(STEPS))
    train(setting, sharded, optimizer_of(sharded), range(STEPS), setting.mesh)
    assert_same_parameters(sharded, expected, "fully_shard")
    want, found = (each.update() for each in statistics)
    assert found == want
    assert found["0.mglu/flips/0"] > 0
    with pytest.raises(ValueError, match=r"model: 0.mglu is sharded by FSDP, .*; call freeze before fully_shard, or"):
        mglu_ops.freeze(sharded)
    # The error's second advice works: gather the state dict, load it into an unsharded model, and freeze that model.
    state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    gathered = setting.model(top_k=2)
    gathered.load_state_dict(state)
    with torch.no_grad():
        setting.assert_same(mglu_ops.freeze(gathered)(setting.x()), expected(setting.x()), "frozen", factor=100)


def check_frozen_first(setting: Setting) -> None:
    """A model that is frozen before `fully_shard` keeps its masks and trains its weights as in one process."""
    expected, sharded = (mglu_ops.freeze(setting.model()) for _ in range(2))
    train(setting, expected, optimizer_of(expected), range(STEPS))
    shard_fully(sharded, setting.mesh)
    train(setting, sharded, optimizer_of(sharded), range(STEPS), setting.mesh)
    assert_same_parameters(sharded, expected, "frozen")
    assert torch.equal(sharded[0].mglu.packed_masks, expected[0].mglu.packed_masks)


def check_quantized_first(setting: Setting) -> None:
    """Quantized weights and their scales are sharded like other parameters, and gathered without a conversion."""
    # FSDP of torch 2.11 first sets requires_grad on every parameter, which fails for integers.
    for name in ("fp8_row", *(["int4_group"] if torch.__version__ >= (2, 13) else [])):
        alone = mglu_ops.quantize(mglu_ops.freeze(setting.model()), name)
        sharded = shard_fully(copy.deepcopy(alone), setting.mesh)
        assert sharded[0].mglu.weight.to_local().shape[0] == setting.intermediate // setting.mesh.size()
        want = gradients(alone, alone, setting.x())
        assert_same_gradients(setting, gradients(sharded, sharded, setting.x()), want, name)
        with pytest.raises(ValueError, match=r"model: 0.mglu is sharded by FSDP, .*; call quantize before fully_shard"):
            mglu_ops.quantize(sharded, name)


def check_both(setting: Setting) -> None:
    """Tensor parallelism inside two groups of ranks, with FSDP between the groups, trains as one process does."""
    mesh = init_device_mesh(setting.device, (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
    inner = Setting(mesh["tensor"], setting.device, setting.dtype)
    expected, sharded = setting.model(top_k=2), inner.parallel(inner.model(top_k=2))
    shard_fully(sharded, mesh["data"])
    train(setting, expected, optimizer_of(expected), range(STEPS))
    train(setting, sharded, optimizer_of(sharded), range(STEPS), mesh["data"])
    assert_same_parameters(sharded, expected, "fully_shard of tensor-parallel layers")


def run_checks(rank: int, device: str, dtype: torch.dtype) -> None:
    """Run the checks on this rank; with four ranks or more, also `check_both`."""
    setting = Setting.of(device, dtype)
    for check in (check_spread, check_fully_sharded_training, check_frozen_first, check_quantized_first):
        check(setting)
    if dist.get_world_size() >= 4:
        check_both(setting)


# --- Checkpoints ----------------------------------------------------------------------------------------------------

SAVED_AT = 2
"""The step at which a run is saved."""


def model_of(setting: Setting, way: str, seed: int = 0) -> nn.Sequential:
    """A model whose initial parameters depend on `seed`. It is frozen if `way` is "frozen"."""
    model = setting.model()
    if seed:
        torch.manual_seed(seed)
        for layer in model:
            layer.reset_parameters()
    return mglu_ops.freeze(model) if way == "frozen" else model


def run_of(setting: Setting, way: str, seed: int) -> tuple[nn.Sequential, DeviceMesh | None]:
    """The result of `model_of`, sharded in one of three ways, and its mesh of data-parallel ranks if it has one."""
    model = model_of(setting, way, seed)
    if way == "fully_shard":
        return shard_fully(model, setting.mesh), setting.mesh
    return setting.parallel(model), None


WAYS = ("fully_shard", "tensor parallel", "frozen")


def save(rank: int, device: str, folder: str) -> None:
    """For each way to shard: train a model for some steps, and save model and optimizer."""
    setting = Setting.of(device, torch.float64)
    for way in WAYS:
        model, parts = run_of(setting, way, seed=0)
        optimizer = optimizer_of(model)
        train(setting, model, optimizer, range(SAVED_AT), parts)
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{way}")
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, f"{folder}/{way}.pt")


def load(rank: int, device: str, folder: str) -> None:
    """Load each checkpoint and compare its bits. Further training must equal an uninterrupted run in one process."""
    setting = Setting.of(device, torch.float64)
    for way in WAYS:
        model, parts = run_of(setting, way, seed=1)
        optimizer = optimizer_of(model)
        state, optimizer_state = get_state_dict(model, optimizer)
        stored = {"model": state, "optimizer": optimizer_state}
        dcp.load(stored, checkpoint_id=f"{folder}/{way}")
        set_state_dict(model, optimizer, model_state_dict=stored["model"], optim_state_dict=stored["optimizer"])
        assert_same_bits(model, torch.load(f"{folder}/{way}.pt"), way)
        train(setting, model, optimizer, range(SAVED_AT, STEPS), parts)
        expected = model_of(setting, way)
        train(setting, expected, optimizer_of(expected), range(STEPS))
        assert_same_parameters(model, expected, way)


def load_in_another_way(rank: int, device: str, folder: str) -> None:
    """Load an FSDP checkpoint into tensor-parallel layers and freeze them. The masks must match the saved logits."""
    setting = Setting.of(device, torch.float64)
    model, _ = run_of(setting, "tensor parallel", seed=1)
    want = load_model(model, folder, "fully_shard")
    for i, layer in enumerate(mglu_ops.freeze(model)):
        packed = torch.ops.mglu.pack_logits(want[f"{i}.mglu.mask_logits"])
        assert torch.equal(layer.mglu.packed_masks.full_tensor().cpu(), packed)


def load_whole(folder: str) -> None:
    """Load each checkpoint in one process without a process group, and compare the bits."""
    for way in WAYS:
        load_model(model_of(Setting(None, "cpu", torch.float64), way, seed=1), folder, way)


def load_model(model: nn.Module, folder: str, way: str) -> dict[str, Tensor]:
    """Load a checkpoint into a model that may be divided in another way, and compare the bits with the saved ones."""
    stored = {"model": get_model_state_dict(model)}
    dcp.load(stored, checkpoint_id=f"{folder}/{way}")
    set_model_state_dict(model, stored["model"])
    want = torch.load(f"{folder}/{way}.pt")
    assert_same_bits(model, want, way)
    return want


def assert_same_bits(model: nn.Module, want: dict[str, Tensor], what: str) -> None:
    found = {name: whole(tensor).cpu() for name, tensor in model.state_dict().items()}
    assert found.keys() == want.keys(), what
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor), f"{what}: {name}"
