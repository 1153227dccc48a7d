"""The activation format `fp8_token`, with every kernel that takes weights in fp8."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.backends.cuda import DecodeMma, LaunchConfig, Plain, TileWgmma
from mglu_ops.call import Call
from mglu_ops.formats import ACTIVATION_FORMATS, quantize_activation, round_activation
from mglu_ops.given import Given
from tests.support.budgets import BUDGET, NAIVE_FACTOR, relative_error
from tests.support.layers import naive_error, rows_apart, stored_layer, transposed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:mglu..forward runs on the backend"),  # warns of unaligned rows
]

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32)
each_format = pytest.mark.parametrize("name", ACTIVATION_FORMATS["fp8_token"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def make(
    name: str, dtype: torch.dtype, tokens: int, d: int, h: int, n_masks: int, weighted: bool = True
) -> tuple[Given, Tensor]:
    given, rounded = stored_layer(name, dtype, tokens, d, h, n_masks, "cuda", "fp8_token")
    return (given, rounded) if weighted else (given._replace(mask_weights=None), rounded)


def assert_as_good_as_naive(found: Tensor, given: Given) -> None:
    """Compare with float64 and unrounded x: the error may be little more than what rounding x to fp8 alone causes."""
    exact, naive = naive_error(given)
    assert found.dtype == given.x.dtype
    assert relative_error(found, exact) <= max(NAIVE_FACTOR * naive, BUDGET[found.dtype])


@each_dtype
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_the_gpu_rounds_as_a_cpu_does(dtype: torch.dtype, size: float) -> None:
    x = (size * torch.randn(33, 1001)).to(dtype)
    x[0], x[1, 1000], x[2, 7], x[3, :5] = 0, math.nan, math.inf, torch.tensor([448, -0.0, 2**-10, 17, 449])
    x[4] = torch.finfo(dtype).max
    x[5] = torch.finfo(dtype).tiny * torch.finfo(dtype).eps * torch.arange(1001)
    on_cpu, on_gpu = (*quantize_activation(x), round_activation(x)), x.cuda()
    for found, expected in zip((*quantize_activation(on_gpu), round_activation(on_gpu)), on_cpu, strict=True):
        is_nan = expected.float().isnan()
        assert torch.equal(found.cpu().float().isnan(), is_nan)
        assert torch.equal(found.cpu().float()[~is_nan], expected.float()[~is_nan])


@each_format
@each_dtype
@pytest.mark.parametrize(
    ("tokens", "d", "h", "n_masks"),
    [
        (1, 67, 46, 3),
        (5, 130, 64, 16),
        (1, 2048, 4096, 4),
        (16, 1030, 2064, 16),
        (9, 1030, 2064, 7),
        (40, 1030, 2064, 1),
        (40, 1030, 2072, 2),
        (300, 1030, 2080, 2),
        (130, 1030, 2080, 9),
        (1000, 200, 4096, 1),
        (600, 300, 1056, 4),
    ],
)
def test_errors_equal_a_naive_layers(name: str, dtype: torch.dtype, tokens: int, d: int, h: int, n_masks: int) -> None:
    """Covers every backend, other layouts of x, and the kernel that the dispatch chooses, which may multiply in fp8."""
    given, _ = make(name, dtype, tokens, d, h, n_masks)
    found = torch.ops.mglu.forward(*given[:8])
    assert_as_good_as_naive(found, given)
    for change in (rows_apart, transposed):
        assert_as_good_as_naive(torch.ops.mglu.forward(*given._replace(x=change(given.x))[:8]), given)
    assert torch.equal(torch.ops.mglu.forward(*given[:8]), found)
    call = Call.of(given)
    for backend in ("cuda", "triton", "composite"):
        if dispatch.BACKENDS[backend].reason("forward", call) is None:
            assert_as_good_as_naive(dispatch.forward(given, backend=backend), given)


@each_format
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("n_masks", range(1, 17))
def test_every_mask_count(name: str, dtype: torch.dtype, n_masks: int) -> None:
    for tokens in (1, 8, 100):
        given, _ = make(name, dtype, tokens, 208, 544, n_masks, weighted=n_masks % 3 == 0)
        assert_as_good_as_naive(torch.ops.mglu.forward(*given[:8]), given)


LAUNCHES = (
    Plain(block_tokens=4),
    DecodeMma(sub=2, mask_group=4, block_tokens=8),
    TileWgmma(rows=80, block_tokens=32, stages=3),
    TileWgmma(block_tokens=32, stages=3, steps=2, permuted=True),
    TileWgmma(block_tokens=32, stages=4, decoded=True),
    TileWgmma(block_tokens=16, stages=4, sparse=True),
)


@each_format
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_each_kernel_gives_the_result_of_rounded_values(name: str, dtype: torch.dtype, launch: LaunchConfig) -> None:
    """Kernels that do not multiply in fp8 add no further error. All memory layouts of x give the same bits."""
    tokens = 13 if isinstance(launch, DecodeMma) else 70
    given, expected = make(name, dtype, tokens, 330, 2080, 4)
    found = dispatch.forward(given, backend="cuda", launch=launch)
    assert relative_error(found, expected) < BUDGET[dtype]
    assert torch.equal(dispatch.forward(given._replace(x=transposed(given.x)), backend="cuda", launch=launch), found)


@each_format
@pytest.mark.parametrize("tokens", [1, 8, 64, 700])
def test_a_token_does_not_depend_on_the_others(name: str, tokens: int) -> None:
    """All tokens but the first and the last are multiplied by 0, 1000, infinity and NaN in turn."""
    given, _ = make(name, torch.bfloat16, tokens + 2, 330, 2080, 4)
    expected = torch.ops.mglu.forward(*given[:8])
    for value in (0.0, 1000.0, math.inf, math.nan):
        x = given.x.clone()
        x[1:-1] *= value
        found = torch.ops.mglu.forward(*given._replace(x=x)[:8])
        assert torch.equal(found[[0, -1]], expected[[0, -1]])
        assert bool(found[1:-1].isnan().all()) == (not math.isfinite(value))


@each_format
@pytest.mark.parametrize("tokens", [1, 16, 200, 1500])
def test_graphs_are_replayed_with_new_inputs(name: str, tokens: int) -> None:
    given, _ = make(name, torch.bfloat16, tokens, 1030, 2080, 4)
    torch.ops.mglu.forward(*given[:8])  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.ops.mglu.forward(*given[:8])
    for scale in (1.0, 1e-3, 70.0):
        given.x.copy_(scale * torch.randn_like(given.x))
        graph.replay()
        assert torch.equal(found, torch.ops.mglu.forward(*given[:8]))
        assert_as_good_as_naive(found, given)


@each_format
def test_rows_of_any_batch_in_the_batch_invariant_mode(name: str) -> None:
    given, _ = make(name, torch.bfloat16, 200, 512, 2048, 4)
    with torch.no_grad(), mglu_ops.set_batch_invariant_mode():
        everyone = torch.ops.mglu.forward(*given[:8])
        for tokens in (1, 7, 16, 17, 64):
            part = given._replace(x=given.x[:tokens], mask_weights=given.mask_weights[:tokens])  # type: ignore[index]
            assert torch.equal(torch.ops.mglu.forward(*part[:8]), everyone[:tokens]), tokens
