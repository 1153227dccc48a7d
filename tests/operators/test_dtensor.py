"""Operators and compiled modules with DTensors on two gloo ranks, compared with one process.

No check registers the sharding rules. An operator registers them at its first call with a DTensor.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding

import mglu_ops
from mglu_ops import ops
from mglu_ops.formats import ACTIVATION_FORMATS, FORMATS
from mglu_ops.nn import MGLU, NaiveMGLU
from tests.support.layers import forward, make_layer, stored_layer
from tests.support.ranks import RANKS, run_on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")


class Ranks:
    """The mesh of all ranks, and the differences from one process that were found so far."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (RANKS,))
        self.failures: list[str] = []

    def shard(self, tensor: Tensor, placement: Any) -> Tensor:
        return distribute_tensor(tensor.detach(), self.mesh, [placement]).requires_grad_(tensor.requires_grad)

    def shard_module(self, module: nn.Module, placements: dict[str, Any]) -> None:
        """Replace the named parameters and buffers by DTensors."""
        for name, placement in placements.items():
            tensor = getattr(module, name)
            sharded = self.shard(tensor, placement)
            setattr(module, name, nn.Parameter(sharded) if isinstance(tensor, nn.Parameter) else sharded)

    def compare(
        self, what: str, got: Tensor | None, want: Tensor, placement: object | None = None, rtol: float = 1e-9
    ) -> None:
        if not isinstance(got, DTensor):
            self.failures.append(f"{what}: not a DTensor")
            return
        if placement is not None and got.placements != (placement,):
            self.failures.append(f"{what}: placed {got.placements}, not {placement}")
        full = got.full_tensor()
        if full.shape != want.shape or not torch.allclose(full.to(want.dtype), want, rtol=rtol, atol=rtol / 100):
            self.failures.append(f"{what}: differs")


def _packing(ranks: Ranks) -> None:
    """Pack and unpack masks. DTensor must not reuse what it cached for a call with another `in_features`."""
    for in_features in (24, 21, 20):  # for all three, a row of packed masks has three bytes
        masks = make_layer(in_features=in_features).masks
        packed = torch.ops.mglu.pack_masks(masks)
        for packed_placement, masks_placement in ((Shard(0), Shard(1)), (Replicate(), Replicate())):
            what = f"in_features={in_features}, {masks_placement}"
            sharded = ranks.shard(packed, packed_placement)
            unpacked = torch.ops.mglu.unpack_masks(sharded, in_features)
            ranks.compare(f"unpack_masks, {what}", unpacked, masks, masks_placement)
            again = torch.ops.mglu.pack_masks(ranks.shard(masks, masks_placement))
            ranks.compare(f"pack_masks, {what}", again, packed, packed_placement)
            logits = ranks.shard(masks.float() - 0.5, masks_placement)
            ranks.compare(f"pack_logits, {what}", torch.ops.mglu.pack_logits(logits), packed, packed_placement)
    single = ranks.shard(masks[0], Shard(0))
    ranks.compare("pack_masks, one mask", torch.ops.mglu.pack_masks(single), torch.ops.mglu.pack_masks(masks[0]))


def _layers(ranks: Ranks) -> None:
    """`mglu::forward` and its gradients, for all ways to shard a layer."""
    replicate = Replicate()
    # The placements of x, of weight and masks, of mask_weights, and of the result.
    ways = {
        "column parallel": (replicate, Shard(0), replicate, lambda x: Shard(x.dim() - 1)),
        "token parallel": (Shard(0), replicate, Shard(0), lambda x: Shard(0)),
        "replicated": (replicate, replicate, replicate, lambda x: replicate),
    }
    gradients = {
        "column parallel": {"x": Partial(), "weight": Shard(0)},
        "token parallel": {"x": Shard(0), "weight": Partial()},
        "replicated": {"x": replicate, "weight": replicate},
    }

    def run(args: dict[str, Tensor], packed: Tensor) -> Tensor:
        return torch.ops.mglu.forward(args["x"], args["weight"], packed, "silu", args.get("mask_weights"))

    for way, leading, weighted in itertools.product(ways, ((6,), (4, 3)), (False, True)):
        x_placement, weight_placement, mask_weight_placement, result_placement = ways[way]
        layer = make_layer(leading, dtype=torch.float64, weighted=weighted)
        what = f"{way}, x {list(layer.x.shape)}, {weighted=}"
        plain = {"x": layer.x, "weight": layer.weight, "mask_weights": layer.mask_weights}
        plain = {k: t.clone().requires_grad_() for k, t in plain.items() if t is not None}
        placements = {"x": x_placement, "weight": weight_placement, "mask_weights": mask_weight_placement}
        shards = {k: ranks.shard(t, placements[k]) for k, t in plain.items()}
        expected = run(plain, layer.packed_masks)
        result = run(shards, ranks.shard(layer.packed_masks, weight_placement))
        ranks.compare(f"{what}: result", result, expected, result_placement(layer.x))
        expected.square().sum().backward()
        result.square().sum().backward()
        for name, tensor in shards.items():
            ranks.compare(f"{what}: gradient of {name}", tensor.grad, plain[name].grad, gradients[way].get(name))


def _learned_masks(ranks: Ranks) -> None:
    """`mglu::forward_ste` in inference, and in training with gradients for several subsets of the tensors."""
    replicate = Replicate()
    layer = make_layer((4, 3), dtype=torch.float64)
    tensors = (layer.x, layer.weight, layer.logits.double())
    # The placements of x, weight, logits, result, packed masks and gradients.
    ways = {
        "column parallel": (replicate, Shard(0), Shard(1), Shard(2), Shard(0), (Partial(), Shard(0), Shard(1))),
        "token parallel": (Shard(1), replicate, replicate, Shard(1), replicate, (Shard(1), Partial(), Partial())),
    }
    for way, (*operand_placements, result_placement, packed_placement, grad_placements) in ways.items():
        shards = [ranks.shard(tensor, placement) for tensor, placement in zip(tensors, operand_placements, strict=True)]
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                expected, results = torch.ops.mglu.forward_ste(*tensors), torch.ops.mglu.forward_ste(*shards)
                for name, got, want, placement in zip(
                    ("result", "packed masks"), results, expected, (result_placement, packed_placement), strict=True
                ):
                    ranks.compare(f"{way}, {mode.__name__}: {name}", got, want, placement)
        for needs in ((1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 1, 1), (0, 1, 1)):
            plain = [t.clone().requires_grad_(bool(need)) for t, need in zip(tensors, needs, strict=True)]
            shards = [ranks.shard(t, placement) for t, placement in zip(plain, operand_placements, strict=True)]
            torch.ops.mglu.forward_ste(*plain)[0].square().sum().backward()
            torch.ops.mglu.forward_ste(*shards)[0].square().sum().backward()
            for number, (tensor, sharded) in enumerate(zip(plain, shards, strict=True)):
                if tensor.requires_grad:
                    what = f"{way}, gradients wanted {needs}: gradient {number}"
                    ranks.compare(what, sharded.grad, tensor.grad, grad_placements[number])


def _compiled_modules(ranks: Ranks) -> None:
    """Compiled column-parallel layers: a naive layer, which the pass fuses, an `MGLU` and a frozen `MGLU`."""
    kinds: dict[str, Callable[[], nn.Module]] = {
        "naive": lambda: NaiveMGLU(16, 12, n_masks=2, dtype=torch.float64),
        "MGLU": lambda: MGLU(16, 12, n_masks=2, dtype=torch.float64),
        "frozen": lambda: mglu_ops.freeze(MGLU(16, 12, n_masks=2, dtype=torch.float64)),
    }
    x = torch.randn(6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for trains, (name, make) in itertools.product((False, True), kinds.items()):
        torch._dynamo.reset()
        torch.manual_seed(0)
        plain, sharded = make(), make()
        sharded.load_state_dict(plain.state_dict())
        masks_placement = {"mask_logits": Shard(1), "packed_masks": Shard(0)}
        held = {key: of for key, of in masks_placement.items() if getattr(sharded, key, None) is not None}
        ranks.shard_module(sharded, {"weight": Shard(0), **held})
        with mglu_ops.fusion() as report, torch.set_grad_enabled(trains):
            want, got = plain(x), torch.compile(sharded)(ranks.shard(x, Replicate()))
            ranks.compare(f"{name}, {trains=}: result", got, want, Shard(1))
            if trains:
                want.square().sum().backward()
                got.square().sum().backward()
        if trains:
            for (key, parameter), other in zip(plain.named_parameters(), sharded.parameters(), strict=True):
                if parameter.requires_grad:
                    ranks.compare(f"{name}: gradient of {key}", other.grad, parameter.grad)
        if name == "naive" and (len(report.fused), len(report.missed)) != (1, 0):
            ranks.failures.append(f"{name}, {trains=}: {report}")


def _rules_of_the_user(ranks: Ranks) -> None:
    """A user's rule replaces ours, even if it is registered first. Registering ours twice is allowed."""
    asked = []

    def rule(masks: Any) -> Any:
        asked.append(masks)
        return [([Replicate()], [Replicate()])]

    register_sharding(torch.ops.mglu.pack_masks.default)(rule)
    masks = make_layer().masks
    packed = torch.ops.mglu.pack_masks(masks)
    torch.ops.mglu.pack_logits(ranks.shard(masks.float(), Shard(1)))  # this call registers our rules
    ops.register_dtensor_rules()
    ops.register_dtensor_rules()
    ranks.compare("pack_masks", torch.ops.mglu.pack_masks(ranks.shard(masks, Shard(1))), packed, Replicate())
    if len(asked) != 1:
        ranks.failures.append(f"the user's rule was asked {len(asked)} times")
    register_sharding(torch.ops.mglu.pack_logits.default)(rule)
    logits = ranks.shard(make_layer(seed=1, n_masks=2).masks.float(), Shard(1))
    ranks.compare("pack_logits", torch.ops.mglu.pack_logits(logits), torch.ops.mglu.pack_logits(logits.full_tensor()))
    if len(asked) != 2:
        ranks.failures.append("the user's later rule was not asked")


def _stored_weights(ranks: Ranks) -> None:
    """Quantized weights and their scales. A shard holds whole blocks of rows that share scales."""
    rank = dist.get_rank()

    def rows(tensor: Tensor) -> Tensor:  # without communication, since gloo cannot scatter fp8
        return DTensor.from_local(tensor.chunk(RANKS)[rank].contiguous(), ranks.mesh, [Shard(0)])

    for name in (name for name in FORMATS if name != "dense"):
        given, _ = stored_layer(name, torch.float32, 6, 256, 264, 2)
        expected = forward(*given)
        whole = {key: ranks.shard(getattr(given, key), Replicate()) for key in ("x", "mask_weights")}
        shards = {key: rows(getattr(given, key)) for key in ("weight", "weight_scale", "packed_masks")}
        got = forward(*given._replace(**whole, **shards))
        ranks.compare(name, got, expected, Shard(1), rtol=1e-5)
        if name in ACTIVATION_FORMATS["fp8_token"]:
            # Rounding needs whole tokens, so x that is sharded along in_features is gathered first.
            expected = forward(*given._replace(activation_format="fp8_token"))
            for placement in (Replicate(), Shard(1)):
                rounded = given._replace(**shards, activation_format="fp8_token", mask_weights=whole["mask_weights"])
                got = forward(*rounded._replace(x=ranks.shard(given.x, placement)))
                ranks.compare(f"{name}, x in fp8", got, expected, Shard(1), rtol=1e-5)
    given, _ = stored_layer("fp8_block", torch.float32, 6, 384, 264, 2)
    shards = {key: rows(getattr(given, key)) for key in ("weight", "packed_masks")}
    scale = ranks.shard(given.weight_scale, Replicate())
    x = ranks.shard(given.x, Replicate())
    with pytest.raises(RuntimeError, match="384 rows of fp8_block in 2 shards, must be a multiple of 128 rows in each"):
        torch.ops.mglu.forward(x, **shards, weight_scale=scale, weight_format="fp8_block")


def _check_experts(ranks: Ranks, op: Any, given: dict[str, Tensor], ways: dict[str, Any], **options: Any) -> None:
    """Check an operator's result and gradients.

    Each entry of `ways` has the placements of the tensors, of the result, and of the gradients.
    """
    is_learned = {name for name, tensor in given.items() if tensor.requires_grad}
    for way, (placements, result_placement, grad_placements) in ways.items():
        what = f"{op}, {way}"
        plain = {name: t.detach().requires_grad_(name in is_learned) for name, t in given.items()}
        shards = {name: ranks.shard(t, placements.get(name, Replicate())) for name, t in plain.items()}
        want, got = op(**plain, **options), op(**shards, **options)
        if isinstance(want, tuple):
            ranks.compare(f"{what}: packed masks", got[1], want[1], Shard(1))
            want, got = want[0], got[0]
        ranks.compare(f"{what}: result", got, want, result_placement)
        if is_learned:
            want.square().sum().backward()
            got.square().sum().backward()
        for name in is_learned:
            ranks.compare(f"{what}: gradient of {name}", shards[name].grad, plain[name].grad, grad_placements[name])


def _experts(ranks: Ranks) -> None:
    """Layers of experts, sharded by rows, tokens or experts. A weight that is sharded by experts is gathered."""
    mglu, sum_of_ranks = torch.ops.mglu, Partial()
    layer = make_layer((6,), routing="ids", weighted=True, dtype=torch.float64, loads="some out of range")
    x, weight, packed_masks, _, mask_weights, *_, expert_ids, _ = layer.given
    assert mask_weights is not None
    assert expert_ids is not None
    given = {"x": x, "weight": weight, "packed_masks": packed_masks, "expert_ids": expert_ids}
    by_row = {"weight": Shard(1), "packed_masks": Shard(1)}
    by_token = {"x": Shard(0), "expert_ids": Shard(0), "mask_weights": Shard(0)}
    ways: dict[str, Any] = {
        "rows": (by_row, Shard(2), {}),
        "tokens": (by_token, Shard(0), {}),
        "experts": ({"weight": Shard(0), "packed_masks": Shard(0)}, None, {}),
    }
    _check_experts(ranks, mglu.experts_forward.default, given | {"mask_weights": mask_weights}, ways)
    learned = {"x": x.nan_to_num(), "weight": weight, "mask_weights": mask_weights.double().nan_to_num()}
    of_rows = {"x": sum_of_ranks, "weight": Shard(1), "mask_weights": sum_of_ranks}
    of_tokens = {"x": Shard(0), "weight": sum_of_ranks, "mask_weights": Shard(0)}
    for tokens in (6, 5, 1):  # the ranks hold different numbers of 5 tokens, and the second has none of 1
        some = {name: tensor if name == "weight" else tensor[:tokens] for name, tensor in learned.items()}
        some = {name: tensor.detach().requires_grad_() for name, tensor in some.items()}
        some |= {"packed_masks": packed_masks, "expert_ids": expert_ids[:tokens]}
        ways = {"rows": (by_row, Shard(2), of_rows), "tokens": (by_token, Shard(0), of_tokens)}
        _check_experts(ranks, mglu.experts_forward.default, some, ways)

    rows = {"x": x.nan_to_num(), "weight": weight, "mask_weights": mask_weights[:, 0].double().nan_to_num()}
    rows = {name: tensor.requires_grad_() for name, tensor in rows.items()}
    rows["offs"] = torch.tensor([1, 1, 4, 5], dtype=torch.int32)
    grad_placements = {"x": sum_of_ranks, "weight": Shard(1), "mask_logits": Shard(2), "mask_weights": sum_of_ranks}
    by_rows = {"rows": (by_row | {"mask_logits": Shard(2)}, Shard(1), grad_placements)}
    _check_experts(ranks, mglu.grouped_forward.default, rows | {"packed_masks": packed_masks}, by_rows)
    logits = (layer.masks.double() - 0.5).requires_grad_()
    _check_experts(ranks, mglu.grouped_forward_ste.default, rows | {"mask_logits": logits}, by_rows)

    y = torch.randn(*expert_ids.shape, 10, dtype=torch.float64)
    down = {"y": y, "weight": weight.detach().transpose(1, 2), "expert_weights": torch.rand(6, 2, dtype=torch.float64)}
    down = {name: tensor.requires_grad_() for name, tensor in down.items()} | {"expert_ids": expert_ids}
    by_token = {"y": Shard(0), "expert_ids": Shard(0), "expert_weights": Shard(0)}
    weights_grad = {"expert_weights": sum_of_ranks}
    ways = {
        "rows": ({"weight": Shard(1)}, Shard(1), {"y": sum_of_ranks, "weight": Shard(1), **weights_grad}),
        "columns": ({"y": Shard(2), "weight": Shard(2)}, None, {"y": Shard(2), "weight": Shard(2), **weights_grad}),
        "tokens": (by_token, Shard(0), {"y": Shard(0), "weight": sum_of_ranks, "expert_weights": Shard(0)}),
    }
    _check_experts(ranks, mglu.experts_down.default, down, ways)


def _stored_experts(ranks: Ranks) -> None:
    """Quantized experts and their scales, sharded by rows, in formats in which no two rows share a scale."""
    for name in ("int8_row", "int4_group"):  # gloo cannot scatter fp8
        layer = make_layer((6,), routing="ids", weight_format=name)
        x, weight, packed_masks, _, _, scale, *_, expert_ids, _ = layer.given
        given = {"x": x, "weight": weight, "packed_masks": packed_masks, "expert_ids": expert_ids}
        ways = {"rows": (dict.fromkeys(("weight", "packed_masks", "weight_scale"), Shard(1)), Shard(2), {})}
        _check_experts(
            ranks, torch.ops.mglu.experts_forward.default, given | {"weight_scale": scale}, ways, weight_format=name
        )


CHECKS = {
    check.__name__.strip("_"): check
    for check in (
        _packing,
        _layers,
        _learned_masks,
        _stored_weights,
        _experts,
        _stored_experts,
        _rules_of_the_user,
        _compiled_modules,
    )
}


def _run_check(rank: int, check: str) -> None:
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # with a warm cache, the sharding rules are not called
    ranks = Ranks()
    CHECKS[check](ranks)
    assert not ranks.failures, "\n".join(ranks.failures)


@pytest.mark.long  # the quick tests with two ranks are in tests/distributed
@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks_equal_one_process(check: str, tmp_path: Path) -> None:
    """Each check runs in new processes, so that it makes their first call with a DTensor."""
    run_on_ranks(_run_check, tmp_path, check)
