"""DTensor: the sharding rules of the operators, on two gloo ranks, against one process."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from queue import Empty

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo"),
]

RANKS = 2
SECONDS = 90


def _check_rank(rank: int, store: str, results: multiprocessing.Queue) -> None:
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=30)
        )
        results.put((rank, _failures()))
        dist.destroy_process_group()
    except BaseException as error:
        results.put((rank, [f"{type(error).__name__}: {error}"]))
        raise


def _failures() -> list[str]:
    """What differs from one process, for each way to shard."""
    from strategies import make_layer
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    from mglu_ops import ops

    ops.register_dtensor_rules()
    mesh = init_device_mesh("cpu", (RANKS,))
    replicate, failures = Replicate(), []

    def compare(what: str, got: Tensor, want: Tensor, placement: object | None = None) -> None:
        if not isinstance(got, DTensor):
            failures.append(f"{what}: not a DTensor")
            return
        if placement is not None and got.placements != (placement,):
            failures.append(f"{what}: placed {got.placements}, not {placement}")
        full = got.full_tensor()
        if full.shape != want.shape or not torch.allclose(full.to(want.dtype), want, rtol=1e-9, atol=1e-11):
            failures.append(f"{what}: differs")

    masks = make_layer(dtype=torch.float64).masks
    packed = torch.ops.mglu.pack_masks(distribute_tensor(masks, mesh, [Shard(1)]))
    compare("pack_masks, by rows", packed, torch.ops.mglu.pack_masks(masks), Shard(0))
    logits = distribute_tensor(masks.float() - 0.5, mesh, [Shard(1)])
    compare("pack_logits, by rows", torch.ops.mglu.pack_logits(logits), torch.ops.mglu.pack_masks(masks), Shard(0))

    # x, weight and masks, route_weights, result
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
    for way, (of_x, of_weight, of_route, of_result) in ways.items():
        for leading in ((6,), (4, 3)):
            for routed in (False, True):
                layer = make_layer(leading, dtype=torch.float64, routed=routed)
                what = f"{way}, x {list(layer.x.shape)}, {'routed' if routed else 'not routed'}"
                plain = {"x": layer.x, "weight": layer.weight, "route_weights": layer.route_weights}
                plain = {k: t.clone().requires_grad_() for k, t in plain.items() if t is not None}
                places = {"x": of_x, "weight": of_weight, "route_weights": of_route}
                shards = {
                    k: distribute_tensor(t.detach(), mesh, [places[k]]).requires_grad_() for k, t in plain.items()
                }
                packed = distribute_tensor(layer.packed_masks, mesh, [of_weight])

                def run(args: dict[str, Tensor], packed: Tensor) -> Tensor:
                    return torch.ops.mglu.forward(args["x"], args["weight"], packed, "silu", args.get("route_weights"))

                expected, result = run(plain, layer.packed_masks), run(shards, packed)
                compare(f"{what}: result", result, expected, of_result(layer.x))
                expected.square().sum().backward()
                result.square().sum().backward()
                for name, tensor in shards.items():
                    compare(f"{what}: gradient of {name}", tensor.grad, plain[name].grad, gradients[way].get(name))
    return failures


def test_sharded_layers_equal_one_process(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [
        context.Process(target=_check_rank, args=(rank, str(tmp_path / "store"), results), daemon=True)
        for rank in range(RANKS)
    ]
    for worker in workers:
        worker.start()
    try:
        reports = dict(results.get(timeout=SECONDS) for _ in workers)
    except Empty:
        pytest.fail(f"a rank said nothing in {SECONDS} s")
    finally:
        for worker in workers:
            worker.join(10)
            if worker.is_alive():
                worker.kill()
    assert reports == {rank: [] for rank in range(RANKS)}
