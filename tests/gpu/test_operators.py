"""The operators on a GPU: results, gradients, CUDA graphs, streams, autocast and compilation with the pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.given import Given
from tests.support import reference
from tests.support.budgets import BUDGET, assert_matches, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def problem(
    tokens: tuple[int, ...], d: int, h: int, n_masks: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = torch.randn(*tokens, h, device="cuda").to(dtype)
    weight = (torch.randn(d, h, device="cuda") / h**0.5).to(dtype)
    logits = torch.randn(n_masks, d, h, device="cuda").to(dtype)
    mask_weight = torch.rand(*tokens, n_masks, device="cuda").to(dtype)
    return x, weight, logits, mask_weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_masks", [1, 4, 16])
@pytest.mark.parametrize(
    ("tokens", "d", "h"), [((1,), 256, 512), ((3, 5), 129, 333), ((200,), 512, 768), ((600,), 160, 256), ((0,), 8, 16)]
)
def test_forward_agrees_with_the_oracle(dtype, n_masks, tokens, d, h):
    x, weight, logits, mask_weight = problem(tokens, d, h, n_masks, dtype)
    packed = torch.ops.mglu.pack_masks(logits > 0)
    for weights in (None, mask_weight):
        result = torch.ops.mglu.forward(x, weight, packed, "silu", weights)
        assert_matches(result, reference.forward(x, weight, logits > 0, "silu", weights))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 4, 100])
def test_cuda_graph_replay_is_bit_equal_to_eager(tokens: int, dtype: torch.dtype) -> None:
    """Captures the first call with a shape, and replays it with other inputs, weights and masks."""
    x, weight, logits, _ = problem((tokens,), 264, 520, 4, dtype)
    packed = torch.ops.mglu.pack_masks(logits > 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.ops.mglu.forward(x, weight, packed)
    for _ in range(3):
        for tensor in (x, weight):
            tensor.copy_(torch.randn_like(tensor))
        packed.copy_(torch.ops.mglu.pack_masks(torch.rand_like(logits) > 0.3))
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, torch.ops.mglu.forward(x, weight, packed))


def test_tokens_run_on_the_cuda_backend() -> None:
    x, weight, logits, mask_weight = problem((2, 3), 264, 520, 4, torch.bfloat16)
    packed = torch.ops.mglu.pack_masks(logits > 0)
    assert mglu_ops.explain_dispatch(x, weight, packed).backend == "cuda"
    many = "cuda" if torch.cuda.get_device_capability() == (9, 0) else "composite"
    assert mglu_ops.explain_dispatch(x.repeat(100, 1, 1), weight, packed).backend == many
    assert mglu_ops.explain_dispatch(x.repeat(100, 1, 1)[..., :519], weight[:, :519], packed).backend == "composite"
    expected = reference.forward(x, weight, logits > 0, "silu", mask_weight)
    for backend in ("cuda", "composite"):
        assert_matches(dispatch.forward(Given(x, weight, packed, "silu", mask_weight), backend=backend), expected)


def test_runs_on_the_current_stream() -> None:
    x, weight, logits, _ = problem((2,), 512, 512, 2, torch.bfloat16)
    packed = torch.ops.mglu.pack_masks(logits > 0)
    expected = torch.ops.mglu.forward(2 * x, weight, packed)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.mul_(2)
        result = torch.ops.mglu.forward(x, weight, packed)
    stream.synchronize()
    assert torch.equal(result, expected)


def test_autocast() -> None:
    x, weight, logits, _ = problem((16,), 64, 96, 2, torch.float32)
    weight.requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        y, packed = torch.ops.mglu.forward_ste(x, weight, logits)
        assert y.dtype is torch.bfloat16
        assert torch.equal(torch.ops.mglu.forward(x, weight, packed), y)
    y.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32


def test_bad_input_leaves_the_context_alive() -> None:
    x, weight, logits, _ = problem((2,), 64, 96, 2, torch.bfloat16)
    packed = torch.ops.mglu.pack_masks(logits > 0)
    with pytest.raises(ValueError, match="packed_masks: got device cpu"):
        torch.ops.mglu.forward(x, weight, packed.cpu())
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        torch.ops.mglu.pack_masks(logits)
    torch.cuda.synchronize()
    assert torch.ops.mglu.forward(x, weight, packed).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_fused_compile_trains_and_infers(dtype: torch.dtype, mode: str) -> None:
    torch._dynamo.reset()
    model = torch.nn.Sequential(*(mglu_ops.nn.NaiveMGLU(192, 192, n_masks=3) for _ in range(2))).cuda().to(dtype)
    x = torch.randn(24, 192, device="cuda", dtype=dtype)
    exact = torch.nn.Sequential(*(mglu_ops.nn.NaiveMGLU(192, 192, n_masks=3) for _ in range(2))).cuda().double()
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    with mglu_ops.fusion(strict=True) as report:
        compiled = torch.compile(model, mode=mode)
        for _ in range(3):
            model.zero_grad()
            y = compiled(x)
            y.float().square().mean().backward()
        assert [site.operator for site in report.fused] == ["forward_ste"] * 2
        assert not report.missed
        exact(x.double()).square().mean().backward()
        assert_matches(y, exact(x.double()), dtype)
        for name, parameter in model.named_parameters():
            expected = dict(exact.named_parameters())[name].grad
            assert relative_error(parameter.grad, expected) <= 4 * BUDGET[dtype], name
        with torch.no_grad():
            for _ in range(3):
                x.copy_(torch.randn_like(x))
                y = compiled(x).clone()
                assert_matches(y, exact(x.double()), dtype)


@pytest.mark.parametrize("tokens", [1, 8, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reduce_overhead_replays_two_layers_bit_for_bit(dtype: torch.dtype, tokens: int) -> None:
    """A compiled model's CUDA graphs, replayed with other inputs, weights and masks, give the operator's bits."""
    torch._dynamo.reset()
    layers = (mglu_ops.nn.MGLU(264, 512, n_masks=4), mglu_ops.nn.MGLU(512, 200, n_masks=8, activation="gelu"))
    model = mglu_ops.freeze(torch.nn.Sequential(*layers).to("cuda", dtype)).eval()
    compiled = torch.compile(model, mode="reduce-overhead")
    x = torch.randn(tokens, 264, device="cuda", dtype=dtype)
    with torch.no_grad():
        for _ in range(3):  # compiles, records, replays
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x)
        with torch.profiler.profile() as profile:
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x)
        assert "cudaGraphLaunch" in {event.key for event in profile.key_averages()}
        for change in ("nothing", "x", "x in place", "weights and masks"):
            if change == "x":
                x = torch.randn_like(x)
            elif change == "x in place":
                x.normal_()
            elif change == "weights and masks":
                for layer in model:
                    layer.weight.normal_(0, 0.05)
                    layer.packed_masks.random_(0, 256)
            torch.compiler.cudagraph_mark_step_begin()
            result = compiled(x).clone()
            expected = x
            for layer in model:
                expected = torch.ops.mglu.forward(expected, layer.weight, layer.packed_masks, layer.activation)
            assert torch.equal(result, expected), change
