"""Experts on the CUDA backend: all kernels and launches, compared with a float64 loop over experts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.backends import BACKENDS
from mglu_ops.backends.cuda import Cuda, CudaCall, Plain
from mglu_ops.backends.cuda.device import gpu_of
from mglu_ops.backends.cuda.kernels import group_tokens
from mglu_ops.backends.cuda.kernels.experts import DecodeItems, ExpertLaunch, choose
from mglu_ops.call import Call
from mglu_ops.formats import FORMATS
from mglu_ops.given import Given
from mglu_ops.routing import sort_pairs
from tests.support.budgets import assert_matches
from tests.support.calls import assert_follows_producers, on_gpu
from tests.support.layers import (
    ROUTINGS,
    Experts,
    bands_of,
    between,
    make_experts,
    mask_major,
    rows_apart,
    sorted_rows,
    transposed,
    unaligned,
)

pytestmark = pytest.mark.gpu

HALVES = (torch.float16, torch.bfloat16)


def run(given: Given, launch: ExpertLaunch | None = None) -> Tensor:
    """The result, in memory that held NaN before."""
    call = Call.of(given)
    torch.full(call.result_shape, torch.nan, dtype=given.x.dtype, device="cuda")
    return dispatch.forward(given, backend="cuda", launch=launch)


def check(layer: Experts, launch: ExpertLaunch | None = None, given: Given | None = None) -> None:
    result = run(given or on_gpu(layer.given), launch).cpu()
    assert not result[~layer.has_expert].count_nonzero()
    assert_matches(result, layer.oracle(), what=str(launch))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_every_routing(routing: str, dtype: torch.dtype) -> None:
    for i, (tokens, top_k, experts) in enumerate(((1, 4, 6), (5, 3, 40), (16, 2, 3), (40, 4, 9), (130, 2, 5))):
        for d, h in ((80, 192), (100, 520), (37, 45)):
            index_dtype = (torch.int32, torch.int64)[i % 2]
            options = {"routing": routing, "dtype": dtype, "index_dtype": index_dtype, "seed": tokens + d}
            layer = make_experts(tokens, top_k, experts, h, d, **options)
            check(layer)
            rows, pairs = sorted_rows(layer)
            expected = layer.oracle().flatten(0, 1)[pairs]
            assert_matches(run(on_gpu(rows)).cpu(), expected, dtype, "sorted rows")


@pytest.mark.parametrize("n_masks", range(1, 17))
def test_every_number_of_masks(n_masks: int) -> None:
    dtype = HALVES[n_masks // 2 % 2]
    for tokens, top_k, experts in ((1, 3, 4), (6, 2, 4), (90, 2, 3)):
        options = {"dtype": dtype, "weighted": n_masks % 2 == 0, "activation": "gelu", "routing": "some out of range"}
        check(make_experts(tokens, top_k, experts, 264, 112, n_masks, **options))


LAUNCHES = [
    *(
        ExpertLaunch(DecodeItems(tiles=2, split_k=2, mask_group=4, block_tokens=rows, cluster=cluster), grouped)
        for rows in (1, 2, 8, 16)
        for cluster in (1, 2)
        for grouped in (False, True)
    ),
    *(ExpertLaunch(Plain(block_tokens=rows), grouped) for rows in (1, 4) for grouped in (False, True)),
]


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_override(launch: ExpertLaunch) -> None:
    """Covers more rows than a warp has lanes, and clusters in which one block has no rows of W."""
    if isinstance(launch.config, DecodeItems) and launch.config.cluster > 1 and gpu_of(0).arch != (9, 0):
        pytest.skip("clusters of blocks need compute capability 9.0")
    for routing in ("skewed", "one expert", "some out of range"):
        for tokens, d in ((2, 64), (33, 100), (75, 112)):
            check(make_experts(tokens, 2, 7, 520, d, 8, routing=routing, dtype=torch.bfloat16), launch)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_format(name: str, dtype: torch.dtype) -> None:
    for tokens, top_k, n_masks in ((1, 2, 4), (9, 3, 1), (70, 2, 16)):
        options = {"routing": "some out of range", "weighted": True, "dtype": dtype, "weight_format": name}
        layer = make_experts(tokens, top_k, 4, 544, 130, n_masks, **options)
        check(layer)
        rows, pairs = sorted_rows(layer)
        assert_matches(run(on_gpu(rows)).cpu(), layer.oracle().flatten(0, 1)[pairs], dtype)


@pytest.mark.parametrize("tokens", [1, 20])
def test_x_that_is_rounded(tokens: int) -> None:
    formats = {"weight_format": "fp8_block", "activation_format": "fp8_token"}
    check(make_experts(tokens, 3, 5, 512, 160, 4, dtype=torch.bfloat16, **formats))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 12])
def test_strides(tokens: int, dtype: torch.dtype) -> None:
    layer = make_experts(tokens, 3, 5, 256, 48, 4, dtype=dtype, weighted=True, routing="some out of range")
    given = on_gpu(layer.given)
    assert given.expert_ids is not None
    changes = {
        "x": (unaligned, rows_apart, transposed),
        "weight": (unaligned, rows_apart, transposed, lambda one: torch.cat((one, one), 1)[:, : one.shape[1]]),
        "packed_masks": (unaligned, mask_major, transposed),
        "expert_ids": (transposed, rows_apart, unaligned),
        "mask_weights": (transposed, unaligned),
    }
    for name, functions in changes.items():
        for change in functions:
            check(layer, given=given._replace(**{name: change(getattr(given, name))}))


def test_empty() -> None:
    def shape(tokens: int, top_k: int, d: int) -> tuple[int, ...]:
        return tuple(run(on_gpu(make_experts(tokens, top_k, 3, 64, d, dtype=torch.float16).given)).shape)

    assert [shape(0, 2, 32), shape(2, 2, 0)] == [(0, 2, 32), (2, 2, 0)]
    no_columns = make_experts(2, 2, 3, 0, 32)
    assert torch.equal(run(on_gpu(no_columns.given)).cpu(), torch.zeros(2, 2, 32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "d", "h"), [(1, 50, 520), (6, 100, 544), (60, 67, 264)])
def test_guard_bands(tokens: int, d: int, h: int, dtype: torch.dtype) -> None:
    """NaN around inputs and in weights of unused experts must not be used. Bands around outputs must not change."""
    layer = make_experts(tokens, 2, 6, h, d, 8, routing="some out of range", dtype=dtype, weighted=True)
    given = on_gpu(layer.given)
    expected = run(given)
    assert given.expert_ids is not None
    unused = torch.isin(torch.arange(6, device="cuda"), given.expert_ids, invert=True)
    weight = given.weight.masked_fill(unused[:, None, None], torch.nan)
    assert given.mask_weights is not None
    given = given._replace(
        x=between(given.x, torch.nan),
        weight=between(weight, torch.nan),
        packed_masks=between(given.packed_masks, 255),
        mask_weights=between(given.mask_weights, torch.nan),
        expert_ids=between(given.expert_ids, 0),
    )
    rows = on_gpu(sorted_rows(layer)[0])
    assert rows.offs is not None
    rows = rows._replace(weight=weight, offs=between(rows.offs, 1 << 30))
    for one in (given, rows):
        prepared = cuda().prepare("forward", Call.of(one))
        assert isinstance(prepared, CudaCall)
        assert prepared.sequence is not None
        out = between(torch.full(Call.of(one).result_shape, torch.nan, dtype=dtype, device="cuda"), 7.0)
        workspace = between(torch.zeros(prepared.sequence.workspace_bytes, dtype=torch.uint8, device="cuda"), 7)
        stream = torch.cuda.current_stream().cuda_stream
        prepared.sequence(stream, one.in_rows().addresses(out), workspace.data_ptr())
        if one is given:
            assert torch.equal(out, expected)
        assert not out.isnan().any()
        assert bool((bands_of(out) == 7.0).all())
        assert bool((bands_of(workspace) == 7).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ends", [(5, 3, 40, 1), (-1, -9, 2**31 - 1, 0), (2**31 - 1,) * 4, (-(2**31),) * 4])
def test_offs_that_do_not_ascend_lead_nowhere_else(ends: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, _ = sorted_rows(make_experts(20, 2, 4, 64, 48, dtype=dtype))
    given = on_gpu(rows)._replace(offs=torch.tensor(ends, dtype=torch.int32, device="cuda"))
    prepared = cuda().prepare("forward", Call.of(given))
    assert isinstance(prepared, CudaCall)
    sequence = prepared.sequence
    assert sequence is not None
    out = between(torch.full((40, 48), torch.nan, dtype=dtype, device="cuda"), 7.0)
    workspace = between(torch.zeros(sequence.workspace_bytes, dtype=torch.uint8, device="cuda"), 7)
    sequence(torch.cuda.current_stream().cuda_stream, given.addresses(out), workspace.data_ptr())
    assert not out.isnan().any()
    assert bool((bands_of(out) == 7.0).all())
    assert bool((bands_of(workspace) == 7).all())


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "experts"), [(1, 1), (33, 8), (1000, 128), (8192, 1024), (2**20, 1024), (2**20, 1)])
def test_table_of_items(rows: int, experts: int, index_dtype: torch.dtype) -> None:
    """The table lists the rows sorted by expert, in stable order, and an entry for each item."""
    ids = (torch.rand(rows, 1, device="cuda") ** 3 * (experts + 2)).to(index_dtype) - 1
    layer = Call.contiguous(ids.device, torch.bfloat16, 1, 1, 16, 64)
    call = layer.over_experts(experts, rows, 1)
    call = replace(call, routing=replace(call.routed, index_dtype=index_dtype))
    pairs, offs = sort_pairs(ids, experts)
    for item_rows in (1, 8, 256):
        for one, index in ((call, ids), (layer.over_experts(experts, rows, None), offs)):
            count = group_tokens.max_items(one, item_rows)
            table = torch.full((group_tokens.table_bytes(one, item_rows) // 4,), -7, dtype=torch.int32, device="cuda")
            step = group_tokens.step(one, gpu_of(0), f"sm_{''.join(map(str, gpu_of(0).arch))}", item_rows)
            stream = torch.cuda.current_stream().cuda_stream
            step.load(0)(stream, {"expert_ids": index.data_ptr(), "out": table.data_ptr()})
            entries = table[: 4 * count].view(count, 4).cpu()
            if not one.routed.is_sorted:
                assert torch.equal(table[4 * count :].long(), pairs)
            ends = [0, *offs.tolist(), rows]
            expected = []
            for expert, (first, end) in enumerate(pairwise(ends)):
                places = torch.arange(first, end, item_rows)
                ids_of_expert = torch.full_like(places, expert if expert < experts else -1)
                expected.append(torch.stack((ids_of_expert, places, (end - places).clamp(max=item_rows)), 1))
            known = torch.cat(expected)
            assert torch.equal(entries[: len(known), :3].long(), known)
            assert not entries[len(known) :, 2].any()


@pytest.mark.parametrize("tokens", [1, 6, 70])
def test_graph_replay_with_other_ids(tokens: int) -> None:
    layer = make_experts(tokens, 2, 8, 512, 256, 4, dtype=torch.bfloat16)
    given = on_gpu(layer.given)
    rows = on_gpu(sorted_rows(layer)[0])
    assert given.expert_ids is not None
    assert rows.offs is not None
    run(given), run(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, chained, sorted_result = run(given), run(given), run(rows)
    for _ in range(4):
        given.expert_ids.copy_(torch.randint(-1, 9, given.expert_ids.shape))
        rows.offs.copy_(torch.randint(0, tokens, rows.offs.shape).cumsum(0).clamp(max=2 * tokens))
        graph.replay()
        assert torch.equal(captured, run(given))
        assert torch.equal(chained, captured)
        assert torch.equal(sorted_result, run(rows))


@pytest.mark.parametrize("tokens", [1, 8, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_same_bits_every_time(tokens: int, dtype: torch.dtype) -> None:
    """The bits are the same for int32 and int64 ids, with and without a table of items, and in every repetition."""
    given = on_gpu(make_experts(tokens, 4, 8, 1024, 256, 4, dtype=dtype).given)
    assert given.expert_ids is not None
    narrow = given._replace(expert_ids=given.expert_ids.int())
    chosen = choose(Call.of(given), gpu_of(0))
    first = run(given, chosen)
    for one in (given, narrow):
        for grouped in (True, False):
            assert all(torch.equal(run(one, replace(chosen, grouped=grouped)), first) for _ in range(5))


def test_a_row_does_not_depend_on_the_others() -> None:
    given = on_gpu(make_experts(24, 2, 4, 1024, 256, 4, dtype=torch.bfloat16).given)
    assert given.expert_ids is not None
    launch = choose(Call.of(given), gpu_of(0))
    everyone = run(given, launch)
    for tokens in (2, 5, 23):
        some = given._replace(x=given.x[-tokens:], expert_ids=given.expert_ids[-tokens:])
        assert torch.equal(run(some, launch), everyone[-tokens:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batch_invariant_mode(dtype: torch.dtype) -> None:
    given = on_gpu(make_experts(150, 2, 4, 1024, 256, 4, dtype=dtype).given)
    assert given.expert_ids is not None
    with mglu_ops.set_batch_invariant_mode():
        everyone = run(given)
        for tokens in (1, 2, 9, 40):
            some = given._replace(x=given.x[-tokens:], expert_ids=given.expert_ids[-tokens:])
            assert torch.equal(run(some), everyone[-tokens:])


@pytest.mark.parametrize("tokens", [1, 8, 80])
def test_follows_the_producer_of_its_inputs(tokens: int) -> None:
    assert_follows_producers(run, on_gpu(make_experts(tokens, 4, 16, 2048, 768, 1, dtype=torch.bfloat16).given))


@pytest.mark.alone(gibibytes=16)
def test_more_than_2_31_weights() -> None:
    experts, d, h = 20, 28672, 4096
    weight = torch.empty(experts, d, h, dtype=torch.bfloat16, device="cuda").normal_(0, h**-0.5)
    packed = torch.randint(0, 256, (experts, d, h // 8, 1), dtype=torch.uint8, device="cuda")
    x = torch.randn(3, h, dtype=torch.bfloat16, device="cuda")
    ids = torch.tensor([[19, 0], [1, 19], [18, -1]], device="cuda")
    result = run(Given(x, weight, packed, expert_ids=ids))
    tail = run(Given(x, weight[18:].clone(), packed[18:].clone(), expert_ids=ids - 18))
    assert torch.equal(result[ids >= 18], tail[ids >= 18])


def cuda() -> Cuda:
    backend = BACKENDS["cuda"]
    assert isinstance(backend, Cuda)
    return backend
