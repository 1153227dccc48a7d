"""The Triton backend on a GPU: results, repeated bits, CUDA graphs, guard bands, and compiled graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mglu_ops.activations import ACTIVATIONS
from mglu_ops.backends import triton as backend
from mglu_ops.given import Given
from mglu_ops.masks import pack
from tests.support import reference
from tests.support.budgets import NAIVE_FACTOR, assert_matches, relative_error
from tests.support.calls import run_on
from tests.support.layers import every_stored_value, naive, rows_apart, stored_layer, transposed

NO_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not backend.is_installed(), reason="triton is not installed")]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
in_8_bits = pytest.mark.parametrize(
    "weight_format",
    [
        pytest.param("fp8_row", marks=pytest.mark.skipif(NO_FP8, reason="Triton converts fp8 from capability 8.9 on")),
        "int8_row",
    ],
)


def problem(
    tokens: int, d: int, h: int, n_masks: int, dtype: torch.dtype, density: float = 0.5
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, h, device="cuda").to(dtype)
    weight = (torch.randn(d, h, device="cuda") / h**0.5).to(dtype)
    masks = torch.rand(n_masks, d, h, device="cuda") < density
    return x, weight, masks, torch.rand(tokens, n_masks, device="cuda").to(dtype)


# Each case compiles a kernel. To keep cases few, shapes and mask weights vary together with the other parameters.
SHAPES = ((256, 1024), (131, 333), (70, 1032))
CASES = [(torch.float16, n) for n in (1, 2, 3, 4, 8, 16)] + [(dtype, n) for dtype in DTYPES[1:] for n in (1, 4)]


@pytest.mark.parametrize(("dtype", "n_masks"), CASES)
@pytest.mark.parametrize("tokens", [1, 2, 13, 64])
def test_agrees_with_the_oracle(tokens: int, dtype: torch.dtype, n_masks: int) -> None:
    if dtype is torch.float32:
        tokens = min(tokens, backend.MAX_WIDE_TOKENS)
    d, h = SHAPES[(tokens + n_masks) % 3]
    x, weight, masks, mask_weight = problem(tokens, d, h, n_masks, dtype)
    weighted = mask_weight if n_masks % 2 else None
    result = run_on("triton", x, weight, pack(masks), "silu", weighted)
    assert_matches(result, reference.forward(x, weight, masks, "silu", weighted))


@in_8_bits
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "n_masks"), [(1, 1), (1, 16), (2, 3), (13, 1), (13, 8), (64, 4)])
def test_a_weight_in_8_bits(weight_format: str, dtype: torch.dtype, tokens: int, n_masks: int) -> None:
    d, h = SHAPES[(tokens + n_masks) % 3]
    if dtype is torch.float32:
        tokens = min(tokens, backend.MAX_WIDE_TOKENS)
    layer, expected = stored_layer(weight_format, dtype, tokens, d, h, n_masks, "cuda")
    for weight in (layer.weight, rows_apart(layer.weight, 16), rows_apart(layer.weight, 3), transposed(layer.weight)):
        result = run_on("triton", *layer._replace(weight=weight))
        assert_matches(result.cpu(), expected)


@in_8_bits
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_every_stored_value_is_decoded(weight_format: str, dtype: torch.dtype, tokens: int) -> None:
    for column in range(0, 31, 3):
        layer, expected = every_stored_value(weight_format, column, dtype, "cuda")
        result = run_on("triton", *layer._replace(x=layer.x.expand(tokens, -1)))
        torch.testing.assert_close(result, expected.expand(tokens, -1), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.float32), (5, torch.bfloat16)])
def test_activations(activation: str, tokens: int, dtype: torch.dtype) -> None:
    x, weight, masks, _ = problem(tokens, 128, 512, 2, dtype)
    x = x * 4
    result = run_on("triton", x, weight, pack(masks), activation, None)
    assert_matches(result, reference.forward(x, weight, masks, activation))


@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.01, 0.5, 0.99])
def test_error_is_near_the_naive_layers(density: float, dtype: torch.dtype) -> None:
    """With nearly empty or nearly full masks, gate or value is a small difference of large sums."""
    for tokens in (1, 8):
        x, weight, masks, _ = problem(tokens, 512, 2048, 4, dtype, density)
        oracle = reference.forward(x, weight, masks)
        error = relative_error(run_on("triton", x, weight, pack(masks)), oracle)
        limit = NAIVE_FACTOR * relative_error(naive(x, weight, masks), oracle)
        assert error <= max(limit, torch.finfo(dtype).eps / 2), tokens


@pytest.mark.parametrize("fill", [False, True])
def test_empty_gate_or_value_is_exactly_zero(fill: bool) -> None:
    """Tests one token only: for more, two products are summed in different orders, so they differ by rounding."""
    x, weight, masks, _ = problem(1, 128, 1000, 4, torch.float16)
    result = run_on("triton", x, weight, pack(torch.full_like(masks, fill)), "identity", None)
    assert torch.equal(result, torch.zeros_like(result))


@pytest.mark.parametrize("tokens", [1, 8, 64])
@pytest.mark.parametrize("n_masks", [1, 4, 16])
def test_same_bits_always(n_masks: int, tokens: int) -> None:
    x, weight, masks, _ = problem(tokens, 1024, 2048, n_masks, torch.bfloat16)
    packed = pack(masks)
    first = run_on("triton", x, weight, packed)
    assert all(torch.equal(run_on("triton", x, weight, packed), first) for _ in range(20))


@pytest.mark.parametrize("tokens", [1, 8])
def test_strides_offsets_and_guard_bands(tokens: int) -> None:
    """NaN surrounds x and the weight, and ones surround the masks, so that reads outside of them change the result."""
    x, weight, masks, _ = problem(tokens, 67, 344, 4, torch.bfloat16)
    oracle = reference.forward(x, weight, masks)

    def guarded(tensor: Tensor, pad: int) -> Tensor:
        fill = 255 if tensor.dtype is torch.uint8 else float("nan")
        wide = tensor.new_full([size + 2 * pad for size in tensor.shape], fill)
        inner = wide[tuple(slice(pad, -pad) for _ in tensor.shape)]
        return inner.copy_(tensor)

    for pad in (1, 4, 8):
        operands = [guarded(tensor, pad) for tensor in (x, weight, pack(masks))]
        assert_matches(run_on("triton", *operands), oracle, what=f"pad {pad}")
    operands = [transposed(tensor) for tensor in (x, weight, pack(masks))]
    assert_matches(run_on("triton", *operands), oracle, what="transposed")


@pytest.mark.parametrize("tokens", [1, 8])
def test_cuda_graph_replay_is_bit_equal_to_eager(tokens: int) -> None:
    x, weight, masks, _ = problem(tokens, 512, 1024, 4, torch.float16)
    packed = pack(masks)
    run_on("triton", x, weight, packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run_on("triton", x, weight, packed)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        packed.copy_(torch.randint_like(packed, 256))
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, run_on("triton", x, weight, packed))


@pytest.mark.parametrize("tokens", [1, 8])
def test_compiled_graph_holds_the_kernel(tokens: int) -> None:
    """Inductor decomposes a triton_op that calls the backend, and then launches the kernel directly."""
    from torch._inductor.utils import run_and_get_code

    from mglu_ops.backends.triton.launch import launch

    @torch.library.triton_op(f"mglu_test::triton_forward_{tokens}", mutates_args={})
    def operator(x: Tensor, weight: Tensor, packed_masks: Tensor) -> Tensor:
        return launch(Given(x, weight, packed_masks), None)

    x, weight, masks, _ = problem(tokens, 256, 1024, 4, torch.float16)
    packed = pack(masks)
    expected = run_on("triton", x, weight, packed) * 2
    result, code = run_and_get_code(torch.compile(lambda *args: operator(*args) * 2), x, weight, packed)
    assert torch.equal(result, expected)
    assert ("matvec_kernel" if tokens == 1 else "matmul_kernel") in code[0]
