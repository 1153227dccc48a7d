"""`tile_wgmma` for experts, compared with a float64 loop over experts, in all its variants and with any loads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.backends.cuda import TileWgmma
from mglu_ops.backends.cuda.device import gpu_of
from mglu_ops.backends.cuda.kernels.tile_experts import TileItems, choose
from mglu_ops.backends.cuda.launch import load
from mglu_ops.call import Call
from mglu_ops.formats import FORMATS
from mglu_ops.given import Given
from tests.support.budgets import assert_matches
from tests.support.calls import assert_follows_producers, on_gpu
from tests.support.layers import (
    ROUTINGS,
    Experts,
    bands_of,
    between,
    make_experts,
    rows_apart,
    sorted_rows,
    transposed,
    unaligned,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or gpu_of(0).arch != (9, 0), reason="wgmma needs Hopper"),
]


def chosen(given: Given) -> TileItems:
    launch = choose(Call.of(given), gpu_of(0))
    assert launch is not None
    return launch


def run(given: Given, launch: TileItems | None = None) -> Tensor:
    """The result, in memory that held NaN before."""
    torch.full(Call.of(given).result_shape, torch.nan, dtype=given.x.dtype, device="cuda")
    return dispatch.forward(given, backend="cuda", launch=launch or chosen(given))


def check(layer: Experts, launch: TileItems | None = None) -> None:
    """Check `experts_forward`, and `grouped_forward` with the same rows sorted by expert."""
    expected = layer.oracle()
    result = run(on_gpu(layer.given), launch).cpu()
    assert not result[~layer.has_expert].count_nonzero()
    assert_matches(result, expected, what=str(launch))
    rows, pairs = sorted_rows(layer)
    assert_matches(run(on_gpu(rows), launch).cpu(), expected.flatten(0, 1)[pairs], layer.given.x.dtype, str(launch))


def random_layer(tokens: int, d: int, h: int, n_masks: int, **options: Any) -> Experts:
    """A layer of seven experts, of which each token has three. Loads are uneven, and some experts have no rows."""
    return make_experts(tokens, 3, 7, h, d, n_masks, **{"dtype": torch.bfloat16, "routing": "skewed"} | options)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing(routing: str) -> None:
    for tokens, d, h, n_masks in ((1, 64, 64, 1), (40, 130, 520, 4), (150, 208, 352, 1)):
        check(random_layer(tokens, d, h, n_masks, routing=routing, index_dtype=torch.int32))


@pytest.mark.parametrize("n_masks", range(1, 17))
def test_every_number_of_masks(n_masks: int) -> None:
    dtype = (torch.float16, torch.bfloat16)[n_masks // 2 % 2]
    options: dict[str, Any] = {"dtype": dtype, "weighted": n_masks % 2 == 0, "activation": "gelu"}
    check(random_layer(70, 144, 384 if n_masks % 2 else 416, n_masks, routing="some out of range", **options))


LAUNCHES = {
    "one warpgroup": (1, TileWgmma(rows=64, block_tokens=16, stages=4, sub=2, permuted=True)),
    "rows that overlap": (4, TileWgmma(rows=80, block_tokens=32, stages=3, sub=1, permuted=True)),
    "several items of an expert": (2, TileWgmma(rows=128, block_tokens=8, stages=3, sub=2, permuted=True)),
    "many rows": (1, TileWgmma(rows=128, block_tokens=128, stages=3, sub=2, steps=2, permuted=True)),
    "warpgroups that share rows": (4, TileWgmma(block_tokens=48, stages=4, sub=2, mask_groups=2, permuted=True)),
    "passes": (8, TileWgmma(rows=128, block_tokens=32, stages=3, sub=2, passes=2, permuted=True)),
    "passes of two warpgroups": (8, TileWgmma(block_tokens=32, stages=3, passes=2, mask_groups=2, permuted=True)),
    "sparse": (4, TileWgmma(rows=128, block_tokens=24, stages=4, sub=2, sparse=True)),
    "clusters": (1, TileWgmma(rows=128, block_tokens=32, stages=4, sub=2, permuted=True, cluster=2)),
    "clusters of sparse tiles": (4, TileWgmma(rows=64, block_tokens=16, stages=4, sub=2, sparse=True, cluster=2)),
    "sparse, shared rows": (9, TileWgmma(block_tokens=16, stages=3, sub=2, mask_groups=2, sparse=True)),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_form(name: str) -> None:
    n_masks, config = LAUNCHES[name]
    for routing, tokens, d in (("skewed", 3, 128), ("some out of range", 90, 200), ("one expert", 60, 131)):
        check(random_layer(tokens, d, 416, n_masks, routing=routing, weighted=True), TileItems(config, True))


@pytest.mark.parametrize("activation_format", ["dense", "fp8_token"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_format(name: str, activation_format: str) -> None:
    """`out_features` is not a multiple of 128, the number of rows of W that share a scale in `fp8_block`."""
    if activation_format != "dense" and not name.startswith("fp8"):
        pytest.skip("x is rounded for weights in fp8")
    for tokens, n_masks in ((5, 1), (60, 4), (90, 8)):
        options = {"weight_format": name, "activation_format": activation_format, "routing": "some out of range"}
        check(random_layer(tokens, 200, 544, n_masks, weighted=True, **options))


def test_masks_that_tma_cannot_load() -> None:
    for n_masks, h in ((1, 96), (4, 136), (3, 544)):
        given = random_layer(40, 80, h, n_masks)
        assert chosen(given.given).config.matrices(Call.of(given.given).one)[2] is None
        check(given)


def test_strides_of_x_and_mask_weights() -> None:
    layer = random_layer(40, 80, 256, 4, weighted=True)
    given, expected = on_gpu(layer.given), layer.oracle()
    for changes in (
        {"x": unaligned(given.x)},
        {"x": transposed(given.x)},
        {"x": rows_apart(given.x), "mask_weights": transposed(given.mask_weights)},
    ):
        assert_matches(run(given._replace(**changes)).cpu(), expected)


def test_weights_that_form_no_matrix_are_refused() -> None:
    given = on_gpu(random_layer(40, 80, 256, 4).given)
    apart = torch.cat((given.weight, given.weight), 1)[:, :80]
    call = Call.of(given._replace(weight=apart))
    assert choose(call, gpu_of(0)) is None
    with pytest.raises(ValueError, match="weight: got 40960 elements from one expert to the next, must be 80 rows"):
        run(given._replace(weight=apart), chosen(given))


@pytest.mark.parametrize(("tokens", "d", "h", "n_masks"), [(2, 70, 96, 1), (60, 100, 520, 4), (33, 131, 352, 9)])
def test_guard_bands(tokens: int, d: int, h: int, n_masks: int) -> None:
    """NaN around inputs and in weights of unused experts must not be used. Bands around outputs must not change."""
    layer = random_layer(tokens, d, h, n_masks, routing="some out of range", weighted=True)
    given = on_gpu(layer.given)
    expected = run(given)
    assert given.mask_weights is not None
    assert given.expert_ids is not None
    unused = torch.isin(torch.arange(7, device="cuda"), given.expert_ids, invert=True)
    given = given._replace(
        x=between(given.x, torch.nan),
        weight=between(given.weight.masked_fill(unused[:, None, None], torch.nan), torch.nan),
        packed_masks=between(given.packed_masks, 255),
        mask_weights=between(given.mask_weights, torch.nan),
        expert_ids=between(given.expert_ids, 0),
    )
    sequence = load(chosen(given).plan(Call.of(given), gpu_of(0)), 0)
    out = between(torch.full_like(expected, torch.nan), 7.0)
    workspace = between(torch.full((sequence.workspace_bytes,), 255, dtype=torch.uint8, device="cuda"), 7)
    sequence(torch.cuda.current_stream().cuda_stream, given.in_rows().addresses(out), workspace.data_ptr())
    assert torch.equal(out, expected)
    assert bool((bands_of(out) == 7.0).all())
    assert bool((bands_of(workspace) == 7).all())


@pytest.mark.parametrize("ends", [(5, 3, 40, 1), (-1, -9, 2**31 - 1, 0), (2**31 - 1,) * 4, (-(2**31),) * 4])
def test_offs_that_do_not_ascend_lead_nowhere_else(ends: tuple[int, ...]) -> None:
    rows, _ = sorted_rows(make_experts(20, 2, 4, 64, 72, 4, dtype=torch.bfloat16))
    given = on_gpu(rows)._replace(offs=torch.tensor(ends, dtype=torch.int32, device="cuda"))
    sequence = load(chosen(given).plan(Call.of(given), gpu_of(0)), 0)
    out = between(torch.full((40, 72), torch.nan, dtype=torch.bfloat16, device="cuda"), 7.0)
    workspace = between(torch.full((sequence.workspace_bytes,), 255, dtype=torch.uint8, device="cuda"), 7)
    sequence(torch.cuda.current_stream().cuda_stream, given.addresses(out), workspace.data_ptr())
    assert not out.isnan().any()
    assert bool((bands_of(out) == 7.0).all())
    assert bool((bands_of(workspace) == 7).all())


@pytest.mark.parametrize("n_masks", [1, 4])
def test_graph_replay_with_other_loads(n_masks: int) -> None:
    given = on_gpu(random_layer(70, 256, 512, n_masks).given)
    assert given.expert_ids is not None
    launch = chosen(given)
    run(given, launch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, chained = run(given, launch), run(given, launch)
    for loads in (torch.randint(-1, 8, (70, 3)), torch.full((70, 3), 6), torch.full((70, 3), -1)):
        given.expert_ids.copy_(loads)
        graph.replay()
        assert torch.equal(captured, run(given, launch))
        assert torch.equal(chained, captured)
        assert not captured[given.expert_ids < 0].count_nonzero()


@pytest.mark.parametrize("n_masks", [1, 4])
def test_a_row_does_not_depend_on_the_others(n_masks: int) -> None:
    given = on_gpu(random_layer(80, 256, 1024, n_masks).given)
    assert given.expert_ids is not None
    launch = chosen(given)
    everyone = run(given, launch)
    assert all(torch.equal(run(given, launch), everyone) for _ in range(5))
    for tokens in (1, 9, 63):
        some = given._replace(x=given.x[-tokens:], expert_ids=given.expert_ids[-tokens:])
        assert torch.equal(run(some, launch), everyone[-tokens:])


def test_batch_invariant_mode() -> None:
    given = on_gpu(random_layer(150, 256, 1024, 4).given)
    assert given.expert_ids is not None
    with mglu_ops.set_batch_invariant_mode():
        everyone = run(given)
        for tokens in (1, 9, 40):
            some = given._replace(x=given.x[-tokens:], expert_ids=given.expert_ids[-tokens:])
            assert torch.equal(run(some), everyone[-tokens:])


@pytest.mark.parametrize("tokens", [8, 100])
def test_follows_the_producer_of_its_inputs(tokens: int) -> None:
    assert_follows_producers(run, on_gpu(make_experts(tokens, 4, 16, 2048, 768, 1, dtype=torch.bfloat16).given))
