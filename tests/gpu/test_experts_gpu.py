"""Experts on a GPU, compared with a float64 loop over experts: all launches of the CUDA kernels, and other backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.backends import BACKENDS
from mglu_ops.backends.composite import Composite
from mglu_ops.backends.cuda import CudaCall, Plain, TileWgmma
from mglu_ops.backends.cuda.device import gpu_of
from mglu_ops.backends.cuda.kernels import experts as decode_experts
from mglu_ops.backends.cuda.kernels import group_tokens, tile_experts
from mglu_ops.backends.cuda.kernels.experts import DecodeItems, ExpertLaunch
from mglu_ops.backends.cuda.kernels.tile_experts import TileItems
from mglu_ops.backends.cuda.launch import load
from mglu_ops.call import Call
from mglu_ops.formats import FORMATS
from mglu_ops.given import Given
from mglu_ops.routing import sort_pairs
from tests.support.budgets import BUDGET, relative_error
from tests.support.calls import Problem, without_waiting
from tests.support.layers import (
    DTYPES,
    LOADS,
    bands_of,
    between,
    down_oracle,
    laid_out,
    make_down,
    make_layer,
    mask_major,
    rows_apart,
    transposed,
    unaligned,
)

pytestmark = pytest.mark.gpu

BF16, F32 = torch.bfloat16, torch.float32
HALVES = (torch.float16, BF16)
Choose = Callable[..., Any]

both_routings = pytest.mark.parametrize("routing", ["ids", "offs"])


def assert_follows_producers(run: Callable[[Given], Tensor], given: Given) -> None:
    """Write ids, x or W just before each call.

    A kernel launched programmatically may start before the writes end. It must not read the old values.
    """
    expected = run(given)
    kept = {name: getattr(given, name).clone() for name in ("x", "weight", "expert_ids")}
    for last in kept:
        for _ in range(20):
            for name in kept:
                getattr(given, name).zero_()
            run(given)
            for name in sorted(kept, key=last.__eq__):
                getattr(given, name).copy_(kept[name])
            assert torch.equal(run(given), expected)


def experts(tokens: int, d: int, h: int, n_masks: int = 3, dtype: torch.dtype = BF16, **options: Any) -> Problem:
    """A layer of seven experts, of which each token has three. Loads are uneven, and some experts have no rows."""
    options = {"routing": "ids", "experts": 7, "top_k": 3, "loads": "skewed"} | options
    return Problem(tokens, d, h, n_masks, dtype, **options)


def decode(p: Problem) -> ExpertLaunch:
    """The launch of `decode_mma` or `plain` for a layer."""
    return decode_experts.choose(p.call, gpu_of(0))


def tile(p: Problem) -> TileItems:
    """The launch of `tile_wgmma` for a layer."""
    skip_without_wgmma()
    launch = tile_experts.choose(p.call, gpu_of(0))
    assert launch is not None
    return launch


def skip_without_wgmma() -> None:
    if gpu_of(0).arch != (9, 0):
        pytest.skip("wgmma needs Hopper")


@both_routings
@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("dtype", [*HALVES, F32])
def test_every_load(dtype: torch.dtype, loads: str, routing: str) -> None:
    """The backend chooses the kernel."""
    for i, (tokens, top_k, count) in enumerate(((1, 4, 6), (5, 3, 40), (16, 2, 3), (40, 4, 9), (130, 2, 5))):
        for d, h in ((80, 192), (100, 520), (37, 45)):
            index_dtype = (torch.int32, torch.int64)[i % 2]
            sizes = {"top_k": top_k, "experts": count}
            experts(tokens, d, h, 3, dtype, routing=routing, loads=loads, index_dtype=index_dtype, **sizes).check()


@both_routings
@pytest.mark.parametrize("loads", LOADS)
def test_every_load_of_tiles(loads: str, routing: str) -> None:
    for tokens, d, h, n_masks in ((1, 64, 64, 1), (40, 130, 520, 4), (150, 208, 352, 1)):
        p = experts(tokens, d, h, n_masks, routing=routing, loads=loads, index_dtype=torch.int32)
        p.check(tile(p))


@both_routings
@pytest.mark.parametrize("n_masks", range(1, 17))
def test_every_number_of_masks(n_masks: int, routing: str) -> None:
    dtype, weights = HALVES[n_masks // 2 % 2], None if n_masks % 2 else F32
    options = {"activation": "gelu", "loads": "some out of range", "routing": routing, "mask_weights_dtype": weights}
    for tokens in (1, 6, 90):
        p = experts(tokens, 112, 264, n_masks, dtype, **options)
        p.check(decode(p))
    p = experts(70, 144, 384 if n_masks % 2 else 416, n_masks, dtype, **options)
    p.check(tile(p))


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
    for loads in ("skewed", "one expert", "some out of range"):
        for tokens, d in ((2, 64), (33, 100), (75, 112)):
            experts(tokens, d, 520, 8, top_k=2, loads=loads).check(launch)


TILES = {
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


@both_routings
@pytest.mark.parametrize("name", TILES)
def test_every_form_of_tiles(name: str, routing: str) -> None:
    skip_without_wgmma()
    n_masks, config = TILES[name]
    for loads, tokens, d in (("skewed", 3, 128), ("some out of range", 90, 200), ("one expert", 60, 131)):
        experts(tokens, d, 416, n_masks, routing=routing, loads=loads, weighted=True).check(TileItems(config, True))


@both_routings
@pytest.mark.parametrize("dtype", [*HALVES, F32])
@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_format(name: str, dtype: torch.dtype, routing: str) -> None:
    options = {"loads": "some out of range", "weighted": True, "weight_format": name, "routing": routing}
    for tokens, top_k, n_masks in ((1, 2, 4), (9, 3, 1), (70, 2, 16)):
        experts(tokens, 130, 544, n_masks, dtype, top_k=top_k, **options).check()


FORMS = [*((name, "dense") for name in FORMATS), ("fp8_row", "fp8_token"), ("fp8_block", "fp8_token")]


@both_routings
@pytest.mark.parametrize(("name", "activation_format"), FORMS)
def test_every_weight_format_of_tiles(name: str, activation_format: str, routing: str) -> None:
    """`out_features` is not a multiple of 128, the number of rows of W that share a scale in `fp8_block`."""
    options = {"weight_format": name, "activation_format": activation_format, "loads": "some out of range"}
    for tokens, n_masks in ((5, 1), (60, 4), (90, 8)):
        p = experts(tokens, 200, 544, n_masks, routing=routing, weighted=True, **options)
        p.check(tile(p))


@pytest.mark.parametrize("tokens", [1, 20])
def test_x_that_is_rounded(tokens: int) -> None:
    experts(tokens, 160, 512, 4, weight_format="fp8_block", activation_format="fp8_token").check()


def test_masks_that_tma_cannot_load() -> None:
    for n_masks, h in ((1, 96), (4, 136), (3, 544)):
        p = experts(40, 80, h, n_masks)
        launch = tile(p)
        assert launch.config.matrices(p.call.one)[2] is None
        p.check(launch)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("tokens", [1, 12])
def test_strides(tokens: int, dtype: torch.dtype) -> None:
    p = experts(tokens, 48, 256, 4, dtype, weighted=True, loads="some out of range")
    changes: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
        "x": (unaligned, rows_apart, transposed),
        "weight": (unaligned, rows_apart, transposed, lambda one: torch.cat((one, one), 1)[:, : one.shape[1]]),
        "packed_masks": (unaligned, mask_major, transposed),
        "expert_ids": (transposed, rows_apart, unaligned),
        "mask_weights": (transposed, unaligned),
    }
    for name, functions in changes.items():
        tensor = getattr(p, name)
        for change in functions:
            setattr(p, name, change(tensor))
            p.check()
        setattr(p, name, tensor)


def test_strides_of_x_and_mask_weights_of_tiles() -> None:
    p = experts(40, 80, 256, 4, weighted=True)
    x, weights = p.x, p.mask_weights
    assert weights is not None
    for p.x, p.mask_weights in (
        (unaligned(x), weights),
        (transposed(x), weights),
        (rows_apart(x), transposed(weights)),
    ):
        p.check(tile(p))


def test_weights_that_form_no_matrix_are_refused() -> None:
    p = experts(40, 80, 256, 4)
    launch = tile(p)
    p.weight = torch.cat((p.weight, p.weight), 1)[:, :80]
    assert tile_experts.choose(p.call, gpu_of(0)) is None
    with pytest.raises(ValueError, match="weight: got 40960 elements from one expert to the next, must be 80 rows"):
        p.run(launch)


def test_empty() -> None:
    for tokens, d in ((0, 32), (2, 0)):
        assert experts(tokens, d, 64, 3, torch.float16, top_k=2).run().shape == (tokens, 2, d)
    no_columns = experts(2, 32, 0, 3, F32, top_k=2)
    assert torch.equal(no_columns.run().cpu(), torch.zeros(2, 2, 32))


def launched(p: Problem, launch: TileItems | None) -> Tensor:
    """The result of a launch, or of the backend's own. Memory around the result and the workspace must not change."""
    if launch is None:
        prepared = BACKENDS["cuda"].prepare("forward", p.call)
        assert isinstance(prepared, CudaCall)
        sequence = prepared.sequence
        assert sequence is not None
    else:
        sequence = load(launch.plan(p.call, gpu_of(0)), 0)
    out = between(torch.full(p.call.result_shape, torch.nan, dtype=p.x.dtype, device="cuda"), 7.0)
    fill = 0 if launch is None else 255
    workspace = between(torch.full((sequence.workspace_bytes,), fill, dtype=torch.uint8, device="cuda"), 7)
    p.launch(sequence, out, workspace)
    assert not out.isnan().any()
    assert bool((bands_of(out) == 7.0).all())
    assert bool((bands_of(workspace) == 7).all())
    return out


@both_routings
@pytest.mark.parametrize(
    ("choose", "dtype", "tokens", "d", "h", "n_masks"),
    [
        *((None, dtype, *sizes, 8) for dtype in (BF16, F32) for sizes in ((1, 50, 520), (6, 100, 544), (60, 67, 264))),
        *((tile, BF16, *sizes) for sizes in ((2, 70, 96, 1), (60, 100, 520, 4), (33, 131, 352, 9))),
    ],
)
def test_guard_bands(choose, dtype, tokens, d, h, n_masks, routing) -> None:
    """NaN around inputs and in weights of unused experts must not be used. Bands around outputs must not change."""
    p = experts(tokens, d, h, n_masks, dtype, routing=routing, loads="some out of range", weighted=True)
    launch = None if choose is None else choose(p)
    expected = p.run(launch)
    if p.expert_ids is not None:
        unused = torch.isin(torch.arange(7, device="cuda"), p.expert_ids, invert=True)
        p.expert_ids = between(p.expert_ids, 0)
    else:
        assert p.offs is not None
        unused = p.offs.diff(prepend=p.offs.new_zeros(1)) == 0
        p.offs = between(p.offs, 1 << 30)
    assert p.mask_weights is not None
    p.x, p.mask_weights = between(p.x, torch.nan), between(p.mask_weights, torch.nan)
    p.weight = between(p.weight.masked_fill(unused[:, None, None], torch.nan), torch.nan)
    p.packed_masks = between(p.packed_masks, 255)
    assert torch.equal(launched(p, launch), expected)


@pytest.mark.parametrize(("choose", "dtype"), [(None, BF16), (None, F32), (tile, BF16)])
@pytest.mark.parametrize("ends", [(5, 3, 40, 1), (-1, -9, 2**31 - 1, 0), (2**31 - 1,) * 4, (-(2**31),) * 4])
def test_offs_that_do_not_ascend_lead_nowhere_else(ends, choose, dtype) -> None:
    p = experts(20, 72, 64, 4, dtype, routing="offs", top_k=2, experts=4)
    p.offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    launched(p, None if choose is None else choose(p))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "experts"), [(1, 1), (33, 8), (1000, 128), (8192, 1024), (2**20, 1024), (2**20, 1)])
def test_table_of_items(rows: int, experts: int, index_dtype: torch.dtype) -> None:
    """The table lists the rows sorted by expert, in stable order, and an entry for each item."""
    ids = (torch.rand(rows, 1, device="cuda") ** 3 * (experts + 2)).to(index_dtype) - 1
    layer = Call.contiguous(ids.device, BF16, 1, 1, 16, 64)
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


@pytest.mark.parametrize(
    ("choose", "tokens", "n_masks"), [(decode, 1, 4), (decode, 6, 4), (decode, 70, 4), (tile, 70, 1), (tile, 70, 4)]
)
def test_graph_replay_with_other_loads(choose: Choose, tokens: int, n_masks: int) -> None:
    p = experts(tokens, 256, 512, n_masks, loads="uniform")
    rows = experts(tokens, 256, 512, n_masks, loads="uniform", routing="offs")
    launch, of_rows = choose(p), choose(rows)
    p.run(launch), rows.run(of_rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, chained, sorted_result = p.run(launch), p.run(launch), rows.run(of_rows)
    assert p.expert_ids is not None
    assert rows.offs is not None
    random = [torch.randint(-1, 8, (tokens, 3)) for _ in range(3)]
    for loads in (*random, torch.full((tokens, 3), 6), torch.full((tokens, 3), -1)):
        p.expert_ids.copy_(loads)
        rows.offs.copy_(torch.randint(0, tokens, rows.offs.shape).cumsum(0).clamp(max=3 * tokens))
        graph.replay()
        assert torch.equal(captured, p.run(launch))
        assert torch.equal(chained, captured)
        assert torch.equal(sorted_result, rows.run(of_rows))
        assert not captured[p.expert_ids < 0].count_nonzero()


@pytest.mark.parametrize("tokens", [1, 8, 100])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_same_bits_every_time(tokens: int, dtype: torch.dtype) -> None:
    """The bits are the same for int32 and int64 ids, with and without a table of items, and in every repetition."""
    p = experts(tokens, 256, 1024, 4, dtype, top_k=4, experts=8, loads="uniform")
    assert p.expert_ids is not None
    chosen = decode_experts.choose(p.call, gpu_of(0))
    first = p.run(chosen)
    for ids in (p.expert_ids, p.expert_ids.int()):
        p.expert_ids = ids
        for grouped in (True, False):
            assert all(torch.equal(p.run(replace(chosen, grouped=grouped)), first) for _ in range(5))


def assert_independent_rows(p: Problem, launch: Any, numbers: Sequence[int]) -> None:
    """Check that tokens have the same bits without the tokens before them."""
    everyone, x, ids = p.run(launch), p.x, p.expert_ids
    assert ids is not None
    for tokens in numbers:
        p.x, p.expert_ids = x[-tokens:], ids[-tokens:]
        assert torch.equal(p.run(launch), everyone[-tokens:]), tokens


@pytest.mark.parametrize(
    ("choose", "tokens", "n_masks", "numbers"),
    [(decode, 24, 4, (2, 5, 23)), (tile, 80, 1, (1, 9, 63)), (tile, 80, 4, (1, 9, 63))],
)
def test_a_row_does_not_depend_on_the_others(choose, tokens, n_masks, numbers) -> None:
    p = experts(tokens, 256, 1024, n_masks)
    launch = choose(p)
    first = p.run(launch)
    assert all(torch.equal(p.run(launch), first) for _ in range(5))
    assert_independent_rows(p, launch, numbers)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_batch_invariant_mode(dtype: torch.dtype) -> None:
    with mglu_ops.set_batch_invariant_mode():
        assert_independent_rows(experts(150, 256, 1024, 4, dtype), None, (1, 2, 9, 40))


@pytest.mark.parametrize(("choose", "tokens"), [(decode, 1), (decode, 8), (decode, 80), (tile, 8), (tile, 100)])
def test_follows_the_producer_of_its_inputs(choose: Choose, tokens: int) -> None:
    p = experts(tokens, 768, 2048, 1, top_k=4, experts=16, loads="uniform")
    launch = choose(p)
    assert_follows_producers(lambda given: dispatch.forward(given, backend="cuda", launch=launch), p.given)


@pytest.mark.alone(gibibytes=16)
def test_more_than_2_31_weights() -> None:
    count, d, h = 20, 28672, 4096
    weight = torch.empty(count, d, h, dtype=BF16, device="cuda").normal_(0, h**-0.5)
    packed = torch.randint(0, 256, (count, d, h // 8, 1), dtype=torch.uint8, device="cuda")
    x = torch.randn(3, h, dtype=BF16, device="cuda")
    ids = torch.tensor([[19, 0], [1, 19], [18, -1]], device="cuda")

    def run(*arguments: Tensor, ids: Tensor) -> Tensor:
        return dispatch.forward(Given(*arguments, expert_ids=ids), backend="cuda")

    tail = run(x, weight[18:].clone(), packed[18:].clone(), ids=ids - 18)
    assert torch.equal(run(x, weight, packed, ids=ids)[ids >= 18], tail[ids >= 18])


# --- The backend `triton`, which does not wait for the GPU, and `composite` -------------------------------------------


def on_gpu(args: Any) -> Any:
    """A copy of the arguments with all tensors on the GPU."""
    return type(args)(*(arg.cuda() if isinstance(arg, Tensor) else arg for arg in args))


@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("triton", one) for one in DTYPES if one is not torch.float64] + [("composite", one) for one in DTYPES],
)
def test_other_backends_match_a_loop(backend: str, dtype: torch.dtype, weight_format: str, loads: str) -> None:
    if dtype is torch.float64 and weight_format != "dense":
        pytest.skip("no float64 with stored weights in this family")
    for tokens in (1, 70):
        options = {"loads": loads, "dtype": dtype, "weighted": tokens > 1, "weight_format": weight_format}
        layer = make_layer((tokens,), 136, 72, routing="ids", experts=5, **options)
        down_given, (rows, pairs) = make_down(layer, weight_format), layer.sorted_by_expert()
        given, there, down_there = on_gpu(layer.given), on_gpu(rows.given), on_gpu(down_given)
        forward, down = (partial(run, backend=backend) for run in (dispatch.forward, partial(dispatch.down, None)))
        forward(given), down(down_there)  # torch's first calls, and Triton when it compiles, may wait
        with without_waiting() if backend == "triton" else nullcontext():
            result, grouped, second = forward(given), forward(there), down(down_there)
        assert relative_error(result, layer.oracle()) <= BUDGET[dtype]
        in_order = result.flatten(0, 1)[pairs.cuda()]
        if backend == "triton":
            assert torch.equal(grouped, in_order)
        assert relative_error(grouped, in_order) <= BUDGET[dtype]
        assert relative_error(second, down_oracle(down_given)) <= BUDGET[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_experts_down_repeat_and_do_not_wait(dtype: torch.dtype) -> None:
    for loads in LOADS:
        layer = make_layer((70,), 24, 16, routing="ids", experts=5, loads=loads, dtype=dtype)
        down = make_down(layer)
        grad = torch.randn(70, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
        expected = torch.ops.mglu.experts_down_backward(grad, *down[:4], [True] * 3)
        given, there = on_gpu(down), grad.cuda()
        first = torch.ops.mglu.experts_down_backward(there, *given[:4], [True] * 3)
        with without_waiting() if dtype is not torch.float64 else nullcontext():
            found = torch.ops.mglu.experts_down_backward(there, *given[:4], [True] * 3)
        by_loop = Composite().prepare("down_backward", Call.of_down(given))(there, given.in_rows(), [True] * 3)
        for one, again, other, exact in zip(found, first, by_loop, expected, strict=True):
            assert torch.equal(one, again)
            assert relative_error(one, exact) <= BUDGET[dtype]
            assert relative_error(other, exact) <= BUDGET[dtype]


@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed", "offset"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_masks", [1, 3, 8])
def test_packing_of_experts(dtype: torch.dtype, layout: str, n_masks: int) -> None:
    for in_features in (21, 64):
        logits = torch.randn(7, n_masks, 10, in_features).to(dtype)
        expected = torch.stack([torch.ops.mglu.pack_logits(one) for one in logits])
        assert torch.equal(torch.ops.mglu.pack_expert_logits(laid_out(logits.cuda(), layout)).cpu(), expected)
