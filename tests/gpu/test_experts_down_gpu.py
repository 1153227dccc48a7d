"""`experts_down` on a GPU, compared with float64: formats, loads, ids out of range, memory layouts, CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.backends import BACKENDS
from mglu_ops.backends.cuda.device import gpu_of
from mglu_ops.backends.cuda.down import CudaDown
from mglu_ops.backends.cuda.kernels import experts_down
from mglu_ops.backends.cuda.kernels.experts_down import ExpertsDown
from mglu_ops.call import Call
from mglu_ops.formats import FORMATS
from mglu_ops.given import DownGiven
from tests.support.budgets import assert_matches
from tests.support.layers import bands_of, between, down_oracle

pytestmark = pytest.mark.gpu


def problem(
    tokens: int,
    top_k: int,
    experts: int,
    out_features: int,
    in_features: int,
    dtype: torch.dtype = torch.bfloat16,
    weight_format: str = "dense",
    index_dtype: torch.dtype = torch.int32,
) -> DownGiven:
    """Random arguments with repeated ids and ids out of range. Rows of y whose id is out of range are NaN."""
    weight = torch.randn(experts, out_features, in_features, device="cuda") / in_features**0.5
    chosen = FORMATS[weight_format]
    stored, scales = zip(*(chosen.quantize(one.to(dtype)) for one in weight), strict=True)
    ids = torch.randint(-2, experts + 2, (tokens, top_k), device="cuda", dtype=index_dtype)
    y = torch.randn(tokens, top_k, in_features, device="cuda", dtype=dtype)
    y[(ids < 0) | (ids >= experts)] = float("nan")
    weights = torch.rand(tokens, top_k, device="cuda")
    scale = None if chosen.is_dense else torch.stack(scales)
    return DownGiven(y, torch.stack(stored), ids, weights, scale, weight_format)


def run(given: DownGiven, launch: ExpertsDown | None = None) -> Tensor:
    """The result of `launch`, or else of the operator, which must choose the CUDA backend."""
    if launch is not None:
        return dispatch.down(None, given, backend="cuda", launch=launch)
    assert dispatch.choose("down", Call.of_down(given.in_rows())).backend == "cuda"
    return torch.ops.mglu.experts_down(*given)


SIZES = {
    "one token": (1, 8, 16, 2048, 768),
    "one token, few rows": (1, 3, 4, 16, 416),
    "one token, ragged": (1, 4, 4, 1036, 1440),
    "few rows an expert": (5, 8, 128, 512, 768),
    "ragged rows": (9, 2, 3, 83, 352),
    "some": (50, 4, 19, 272, 1440),
    "many": (200, 8, 40, 272, 544),
    "most": (300, 2, 5, 400, 1024),
    "library products": (700, 2, 4, 384, 512),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_format(sizes: tuple[int, ...], weight_format: str, dtype: torch.dtype) -> None:
    given = problem(*sizes, dtype=dtype, weight_format=weight_format)
    got = run(given)
    assert_matches(got, down_oracle(given))
    assert torch.equal(got, run(given))


@pytest.mark.parametrize("tokens", [1, 7, 90])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weights_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_of_the_router(weights_dtype: torch.dtype, index_dtype: torch.dtype, tokens: int) -> None:
    given = problem(tokens, 4, 6, 64, 256, index_dtype=index_dtype)
    given = given._replace(expert_weights=given.expert_weights.to(weights_dtype))
    assert_matches(run(given), down_oracle(given))


@pytest.mark.parametrize("tokens", [1, 8, 33, 250])
def test_loads_of_experts(tokens: int) -> None:
    """Covers one expert that has all rows, and ids that are all out of range."""
    given = problem(tokens, 4, 64, 96, 384)._replace(y=torch.randn(tokens, 4, 384, device="cuda").bfloat16())
    for expert in (0, 63):
        one = given._replace(expert_ids=torch.full_like(given.expert_ids, expert))
        assert_matches(run(one), down_oracle(one))
    none = given._replace(expert_ids=torch.full_like(given.expert_ids, -1))
    assert not run(none).any()


def test_results_do_not_depend_on_the_launch_nor_on_other_rows() -> None:
    given = problem(60, 4, 5, 272, 1440)
    call, gpu = Call.of_down(given), gpu_of(0)
    with mglu_ops.set_batch_invariant_mode():
        expected = run(given)
    for launch in (
        ExpertsDown(8, stages=3),
        ExpertsDown(24, row_warps=2, stages=2),
        ExpertsDown(32, row_tiles=2, row_warps=8, stages=2),
        ExpertsDown(48, row_warps=1),
    ):
        assert launch.violation(call, gpu) is None
        assert torch.equal(run(given, launch), expected)
    with mglu_ops.set_batch_invariant_mode():
        for token in (0, 17):
            alone = given._replace(**{n: t[token : token + 1] for n, t in given.tensors().items() if len(t) == 60})
            assert torch.equal(run(alone)[0], expected[token])


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_divided_units(parts: int, weight_format: str) -> None:
    """Covers split-K of the last units of work, rows that two tiles compute, and experts with several items."""
    for sizes in ((20, 2, 3, 83, 4128), (90, 8, 40, 2880, 1056), (200, 2, 5, 1000, 800)):
        given = problem(*sizes, weight_format=weight_format)
        chosen = experts_down.choose(Call.of_down(given.in_rows()), gpu_of(0))
        assert chosen is not None
        for block_tokens in (chosen.block_tokens, 8):
            launch = replace(chosen, parts=parts, block_tokens=block_tokens)
            got = run(given, launch)
            assert_matches(got, down_oracle(given))
            assert torch.equal(got, run(given, launch))


@pytest.mark.parametrize("tokens", [1, 6, 70])
def test_memory_layouts(tokens: int) -> None:
    """Weight and y are views of larger tensors."""
    given = problem(tokens, 3, 4, 64, 256)
    weight = torch.full((4, 90, 264), float("nan"), device="cuda", dtype=torch.bfloat16)[:, :64, :256]
    shifted = torch.full((given.y.numel() + 1,), float("nan"), device="cuda", dtype=torch.bfloat16)[1:]
    apart = given._replace(weight=weight.copy_(given.weight), y=shifted.view_as(given.y).copy_(given.y))
    assert torch.equal(run(apart), run(given))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("weight_format", [name for name in FORMATS if name != "dense"])
def test_every_stored_value(weight_format: str, tokens: int) -> None:
    """Each of the 256 rows of W holds a different byte."""
    given = problem(tokens, 1, 1, 256, 64, torch.float16, weight_format)
    stored = torch.full((1, 256, given.weight.shape[2]), 0x88 if weight_format == "int4_group" else 0).byte()
    stored[0, :, 5] = torch.arange(256)
    weight = stored.view(given.weight.dtype).cuda()
    given = given._replace(weight=weight, y=torch.ones_like(given.y), expert_ids=torch.zeros_like(given.expert_ids))
    torch.testing.assert_close(run(given).double(), down_oracle(given), rtol=1e-3, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 12, 130, 600])
def test_graph_replay_with_other_ids(tokens: int) -> None:
    given = problem(tokens, 4, 16, 256, 512)._replace(y=torch.randn(tokens, 4, 512, device="cuda").bfloat16())
    run(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(given)
    for _ in range(3):
        given.expert_ids.random_(-1, 17)
        given.y.normal_()
        graph.replay()
        assert_matches(got, down_oracle(given))


@pytest.mark.parametrize("last", ["y", "weight", "expert_ids", "expert_weights"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_follows_the_producer_of_its_inputs(tokens: int, last: str) -> None:
    """The kernel may start while earlier kernels still write its inputs, and must not read the old values."""
    given = problem(tokens, 4, 16, 1024, 2048)
    expected = run(given)
    kept = {name: tensor.clone() for name, tensor in given.tensors().items()}
    kept[last] = kept.pop(last)
    for _ in range(30):
        for name in kept:
            getattr(given, name).zero_()
        run(given)
        for name, tensor in kept.items():
            getattr(given, name).copy_(tensor)
        assert torch.equal(run(given), expected)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 5, 44])
def test_guard_bands(tokens: int, weight_format: str) -> None:
    """Bands of memory around inputs must not be used, and bands around products and the result must not change."""
    given = problem(tokens, 3, 5, 100, 4128, weight_format=weight_format)
    expected = run(given)
    floating = {"y": float("nan"), "expert_weights": float("nan"), "weight_scale": float("nan")}
    others = {name: tensor for name, tensor in given.tensors().items() if name != "weight"}
    filled = {name: between(tensor, floating.get(name, 0)) for name, tensor in others.items()}
    weight = between(given.weight.view(torch.uint8), 255).view(given.weight.dtype)
    given = given._replace(**filled | {"weight": weight})
    prepared = BACKENDS["cuda"].prepare("down", Call.of_down(given))
    assert isinstance(prepared, CudaDown)
    assert prepared.launches is not None
    out = between(torch.full_like(expected, float("nan")), 7.0)
    workspace = torch.full((prepared.launches.workspace_bytes,), 255, device="cuda", dtype=torch.uint8)
    products = between(workspace, 7)
    names = ("y", "weight", "weight_scale", "expert_ids", "expert_weights")
    pointers = {name: 0 if getattr(given, name) is None else getattr(given, name).data_ptr() for name in names}
    stream = torch.cuda.current_stream().cuda_stream
    prepared.launches(stream, {**pointers, "places": 0, "out": out.data_ptr()}, products.data_ptr())
    assert torch.equal(out, expected)
    assert bool((bands_of(out) == 7.0).all())
    assert bool((bands_of(products) == 7).all())


def test_many_experts_and_rows() -> None:
    """Ids of many experts and rows take shared memory, which leaves room for fewer pipeline stages."""
    for tokens, top_k, experts in ((64, 8, 512), (1500, 8, 256)):
        given = problem(tokens, top_k, experts, 64, 128)
        assert_matches(run(given), down_oracle(given))


def test_calls_without_kernels() -> None:
    call, gpu = Call.of_down(problem(4, 2, 3, 64, 128)), gpu_of(0)
    many = replace(call, leading=(10_000, 2))
    assert experts_down.launch_for(many, gpu) is None  # such calls use torch's GEMMs
    for other, reason in (
        (replace(call, dtype=torch.float32), "float32"),
        (replace(call, in_features=132), "aligned vectors"),
        (replace(call, out_features=8), "below 16"),
        (replace(many, dtype=torch.float16), "20000 rows"),
        (replace(many, batch_invariant=True), "20000 rows"),
        (replace(call, routing=replace(call.routed, expert_weights_dtype=torch.float64)), "float64"),
    ):
        assert reason in str(experts_down.unsupported_reason(other, gpu))
