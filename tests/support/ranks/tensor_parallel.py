"""Checks for `ranks.run_on_ranks`: tensor-parallel layers compute, learn and freeze as one process does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import mglu_ops
from mglu_ops.nn import MGLU, MaskStatistics, MGLUFeedForward, NaiveMGLU, check_masks, parameter_groups
from mglu_ops.parallel import ColwiseMGLU
from tests.support.budgets import BUDGET, relative_error

TOKENS, STEPS = (4, 8), 5
WIDTH, WIDE = 36, 256
"""Widths of x: WIDTH needs padding in packed masks, and WIDE fits the GPU's 16-bit kernels."""
SAME = 1e-11
"""Allowed relative difference of float64 parameters after several steps, since ranks add in another order."""


def whole(array: Tensor) -> Tensor:
    """The full tensor if the array is sharded, otherwise the array itself."""
    return array.full_tensor() if isinstance(array, DTensor) else array


@dataclass(frozen=True)
class Setting:
    """The mesh of ranks, and the device, dtype and width of a check."""

    mesh: DeviceMesh
    device: str
    dtype: torch.dtype
    width: int = WIDTH

    @staticmethod
    def of(device: str, dtype: torch.dtype, width: int = WIDTH) -> Setting:
        return Setting(init_device_mesh(device, (dist.get_world_size(),)), device, dtype, width)

    @property
    def intermediate(self) -> int:
        return 48 if self.width == WIDTH else 2 * self.width

    def assert_same(self, got: Tensor, want: Tensor, what: str, factor: float = 1) -> None:
        error = relative_error(whole(got), whole(want))
        assert error <= factor * BUDGET[self.dtype], f"{what}: relative error {error:.3g}"

    def model(self, kind: type[MGLU | NaiveMGLU] = MGLU, **options: Any) -> nn.Sequential:
        """Two feed-forward layers, the same at every call and on every rank."""
        torch.manual_seed(0)
        layers = []
        for _ in range(2):
            layer = MGLUFeedForward(self.width, self.intermediate, n_masks=3, **options)
            if kind is NaiveMGLU:
                naive = NaiveMGLU(self.width, self.intermediate, n_masks=3, **options)
                naive.load_state_dict(layer.mglu.state_dict())
                layer.mglu = naive
            layers.append(layer)
        return nn.Sequential(*layers).to(self.device, self.dtype)

    def parallel(self, model: nn.Sequential, sequence: bool = False) -> nn.Sequential:
        """Shard both layers. With `sequence`, x and results are divided between ranks along the sequence."""
        between = {"input_layouts": Shard(1)} if sequence else {}
        after = {"output_layouts": Shard(1)} if sequence else {}
        plan = {"*.mglu": ColwiseMGLU(**between), "*.down_proj": RowwiseParallel(**after)}
        return parallelize_module(model, self.mesh, plan)

    def part_of_sequence(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor `[batch, sequence, features]`."""
        return tensor.chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()]

    def x(self, seed: int = 1) -> Tensor:
        x = torch.randn(*TOKENS, self.width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return x.to(self.device, self.dtype)


def gradients(model: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    """The result `y` for x, and the gradients of x and all parameters. The loss is the sum of the result's squares."""
    x = x.clone().requires_grad_()
    for parameter in model.parameters():
        parameter.grad = None
    y = forward(x)
    y.square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **found}


def assert_same_gradients(setting: Setting, got: dict[str, Tensor], want: dict[str, Tensor], what: str) -> None:
    assert set(got) == set(want), what
    for name in want:
        assert (got[name] is None) == (want[name] is None), f"{what}: {name}"
        if want[name] is not None:
            setting.assert_same(got[name], want[name], f"{what}: {name}", factor=3)


KINDS: dict[str, dict[str, Any]] = {
    "learned": {},
    "fixed": {"learnable_masks": False},
    "weighted": {"top_k": 2},
    "recomputed": {"save_activations": False},
    "naive": {"kind": NaiveMGLU},
}


def check_placements(setting: Setting) -> None:
    """Each rank holds its rows of the weight and of the masks, and a copy of the router."""
    for learnable_masks in (True, False):
        layer, expected = (setting.model(learnable_masks=learnable_masks, top_k=2) for _ in range(2))
        tensors, wanted = setting.parallel(layer)[0].mglu.state_dict(), expected[0].mglu.state_dict()
        masks = ("mask_logits", Shard(1)) if learnable_masks else ("packed_masks", Shard(0))
        for name, placement in (("weight", Shard(0)), masks, ("router.weight", Replicate())):
            tensor, want = tensors[name], wanted[name]
            assert tensor.placements == (placement,), name
            assert torch.equal(tensor.full_tensor(), want), name
            if isinstance(placement, Shard):
                parts = dist.get_world_size()
                assert tensor.to_local().shape[placement.dim] == want.shape[placement.dim] // parts, name


def check_results(setting: Setting) -> None:
    """Results and gradients match a single process for all kinds of layers, with x replicated or divided."""
    for name, options in KINDS.items():
        if name == "weighted" and setting.dtype.itemsize < 4:
            continue  # rounding the first layer's result may select other masks in the second layer
        alone = setting.model(**options)
        want = gradients(alone, alone, setting.x())
        for sequence in (False, True):
            mine = setting.part_of_sequence if sequence else lambda tensor: tensor
            expected = {key: mine(t) if key in ("x", "y") else t for key, t in want.items()}
            sharded = setting.parallel(setting.model(**options), sequence)
            with torch.no_grad():
                setting.assert_same(sharded(mine(setting.x())), expected["y"], f"{name}, no gradients", factor=2)
            got = gradients(sharded, sharded, mine(setting.x()))
            assert_same_gradients(setting, got, expected, f"{name}, sequence={sequence}")


def check_compiled(setting: Setting, backend: str, kinds: Sequence[str]) -> None:
    """Compiled layers, in one graph without breaks, equal eager layers in one process."""
    for name in kinds:
        torch._dynamo.reset()
        alone = setting.model(**KINDS[name])
        sharded = setting.parallel(setting.model(**KINDS[name]))
        compiled = torch.compile(sharded, backend=backend, fullgraph=True)
        with torch.no_grad():
            setting.assert_same(compiled(setting.x()), alone(setting.x()), f"{name}, no gradients", factor=2)
        want = gradients(alone, alone, setting.x())
        assert_same_gradients(setting, gradients(sharded, compiled, setting.x()), want, name)


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameter_groups(model, lr=1e-2, weight_decay=0.1))


def train(
    setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, parts: DeviceMesh | None = None
) -> None:
    """Train for `steps`, with the whole batch or with this rank's share of it if `parts` is given."""
    count, rank = (1, 0) if parts is None else (parts.size(), parts.get_local_rank())
    for step in steps:
        optimizer.zero_grad()
        x, target = (setting.x(seed).chunk(count)[rank] for seed in (step, step + STEPS))
        F.mse_loss(model(x), target).backward()
        optimizer.step()


def assert_same_parameters(got: nn.Module, want: nn.Module, what: str) -> None:
    for (name, parameter), expected in zip(got.named_parameters(), want.parameters(), strict=True):
        error = relative_error(whole(parameter), expected)
        assert error <= SAME, f"{what}: {name}: relative error {error:.3g}"


def check_training(setting: Setting) -> None:
    """Some AdamW steps change masks, and give the parameters of a single process."""
    for name in ("learned", "weighted"):
        alone, sharded = (setting.model(**KINDS[name]) for _ in range(2))
        before = alone[0].mglu.mask_logits.detach() > 0
        for model in (alone, setting.parallel(sharded)):
            train(setting, model, optimizer_of(model), range(STEPS))
        assert_same_parameters(sharded, alone, name)
        assert not torch.equal(whole(sharded[0].mglu.mask_logits) > 0, before)


def check_freezing(setting: Setting) -> None:
    """A frozen sharded model has the masks of a single process and the same results. Freezing again changes nothing."""
    for name in ("learned", "weighted", "naive"):
        alone = mglu_ops.freeze(setting.model(**KINDS[name]))
        sharded = setting.parallel(setting.model(**KINDS[name]))
        with torch.no_grad():
            before = sharded(setting.x())
            mglu_ops.freeze(sharded)
            after = sharded(setting.x())
        if name == "naive":
            setting.assert_same(after, before, name)
        else:
            assert torch.equal(after, before), name
        for one, other in zip(sharded, alone, strict=True):
            assert type(one.mglu) is MGLU
            packed = one.mglu.packed_masks
            assert packed.placements == (Shard(0),), name
            assert torch.equal(packed.full_tensor(), other.mglu.packed_masks), name
            mglu_ops.freeze(sharded)
            assert one.mglu.packed_masks is packed


def check_quantized(setting: Setting) -> None:
    """Layers can be quantized before or after they are sharded. Results and gradients match a single process."""
    for name in ("fp8_row", "int8_row", "int4_group"):
        alone = mglu_ops.quantize(mglu_ops.freeze(setting.model()), name)
        want = gradients(alone, alone, setting.x())
        after = mglu_ops.quantize(setting.parallel(mglu_ops.freeze(setting.model())), name)
        # gloo cannot scatter fp8, so fp8 is only quantized after sharding.
        before = [] if name == "fp8_row" else [setting.parallel(copy.deepcopy(alone))]
        for sharded in (after, *before):
            assert sharded[0].mglu.weight_scale.placements == (Shard(0),), name
            with torch.no_grad():
                setting.assert_same(sharded(setting.x()), want["y"], f"{name}, no gradients", factor=2)
            assert_same_gradients(setting, gradients(sharded, sharded, setting.x()), want, name)
        if name == "fp8_row":
            alone, after = (mglu_ops.quantize(one, name, activation_format="fp8_token") for one in (alone, after))
            x = setting.x().float()
            with torch.no_grad():
                torch.testing.assert_close(whole(after[0].float()(x)), alone[0].float()(x))
    blocks = mglu_ops.freeze(MGLU(setting.width, 16 * setting.mesh.size())).to(setting.device, setting.dtype)
    mglu_ops.quantize(parallelize_module(blocks, setting.mesh, ColwiseMGLU()), "fp8_block")
    with pytest.raises(RuntimeError, match=r"rows of fp8_block in . shards, must be a multiple of 128 rows in each"):
        blocks(setting.x())


def check_uneven(setting: Setting) -> None:
    """For local results, the number of ranks must divide `out_features`. DTensor results allow any `out_features`."""
    ranks = setting.mesh.size()
    for out_features in (3 * ranks + 1, 1):  # shards of different sizes, and ranks without rows
        torch.manual_seed(0)
        alone, sharded = (MGLU(setting.width, out_features).to(setting.device, setting.dtype) for _ in range(2))
        sharded.load_state_dict(alone.state_dict())
        message = f"out_features: got {out_features}, must be a multiple of the .*, {ranks}"
        with pytest.raises(ValueError, match=message):
            parallelize_module(sharded, setting.mesh, ColwiseMGLU())
        parallelize_module(sharded, setting.mesh, ColwiseMGLU(use_local_output=False))
        want = gradients(alone, alone, setting.x())
        assert_same_gradients(setting, gradients(sharded, sharded, setting.x()), want, f"out_features={out_features}")
        whole_output = ColwiseMGLU(output_layouts=Replicate())
        gathered = parallelize_module(copy.deepcopy(alone), setting.mesh, whole_output)
        assert_same_gradients(setting, gradients(gathered, gathered, setting.x()), want, "gathered")
    with pytest.raises(TypeError, match="module: got Linear, must be an MGLU or a NaiveMGLU for ColwiseMGLU"):
        parallelize_module(nn.Linear(4, 4), setting.mesh, ColwiseMGLU())


def check_damaged_masks(setting: Setting) -> None:
    """All ranks refuse packed masks that have a padding bit set on one rank, when they are loaded or first used."""
    sharded = setting.parallel(setting.model(learnable_masks=False))
    state = {name: tensor.clone() for name, tensor in sharded.state_dict().items()}
    if setting.mesh.get_local_rank() == 1:
        state["1.mglu.packed_masks"].to_local()[0, -1, 0] |= 0x80
    with pytest.raises(RuntimeError, match=r"1\.mglu\.packed_masks: padding bits past in_features=36 are set"):
        sharded.load_state_dict(state)
    sharded[0].mglu.packed_masks = state["1.mglu.packed_masks"]
    with pytest.raises(ValueError, match="packed_masks: padding bits past in_features=36 are set"):
        sharded[0].mglu(setting.x())


def check_materialized(setting: Setting) -> None:
    """A model on the meta device can be sharded first, and get memory and initial values afterwards."""
    for learnable in (True, False):
        layer = MGLU(setting.width, setting.intermediate, n_masks=3, learnable_masks=learnable, device="meta")
        parallelize_module(layer.to(setting.dtype), setting.mesh, ColwiseMGLU())
        layer.to_empty(device=setting.device)
        layer.reset_parameters()
        check_masks(layer)
        statistics = MaskStatistics(layer).update()
        assert all(0.4 < statistics[f"gate_ratio/{i}"] < 0.6 for i in range(3)), statistics
        assert statistics["agreement"] < 0.6, statistics
        assert layer(setting.x()).isfinite().all()
    stored = MGLU(setting.width, setting.intermediate, learnable_masks=False, weight_format="int4_group", device="meta")
    parallelize_module(stored, setting.mesh, ColwiseMGLU())
    stored.to_empty(device=setting.device)
    stored.reset_parameters()
    assert len(stored.weight.full_tensor().unique()) > 100
    assert stored(setting.x()).isfinite().all()


CHECKS = {"placements": check_placements, "results": check_results, "training": check_training}
CHECKS |= {"freezing": check_freezing, "uneven": check_uneven, "damaged_masks": check_damaged_masks}
CHECKS |= {"materialized": check_materialized, "quantized": check_quantized}
WITHOUT_FLOAT64 = ["placements", "results", "freezing", "quantized"]
"""The checks that do not need float64."""


def run_checks(rank: int, device: str, dtype: torch.dtype, names: Sequence[str], width: int = WIDTH) -> None:
    """Run several checks in the same processes, because starting processes takes longer than a check."""
    setting = Setting.of(device, dtype, width)
    for name in names:
        CHECKS[name](setting)


def run_compiled(rank: int, device: str, dtype: torch.dtype, backend: str, kinds: Sequence[str]) -> None:
    check_compiled(Setting.of(device, dtype), backend, kinds)
