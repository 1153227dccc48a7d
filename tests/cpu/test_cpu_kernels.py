"""The CPU kernels of each instruction set in inference and training, compared with float64 and the naive layer.

Kernels for bfloat16 instructions also run with emulated intrinsics. test_ops.py has tests for any backend, which run
these kernels too. `test_sanitizers` runs all kernels in a separate program (cpu_driver.cpp).
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mglu_ops
from mglu_ops.backends import BACKENDS, cpu
from mglu_ops.backends.cpu import build
from mglu_ops.call import Call
from mglu_ops.files import source_directory
from mglu_ops.formats import FORMATS
from mglu_ops.given import Given
from tests.support import layers as s
from tests.support.budgets import BUDGET, NAIVE_FACTOR, assert_matches, relative_error
from tests.support.cpu import BFLOAT16, EMULATED, NATIVE, needs_compiler, run
from tests.support.families import quick_only_for
from tests.support.hard_values import TOKENS, assert_loses_no_more_than_naive, layer_of_large_gates, outlier_layers
from tests.support.layers import Layer, every_stored_value, make_layer, stored_layer
from tests.support.training_steps import exact_partials, products_of

pytest_plugins = ["tests.support.cpu"]
pytestmark = needs_compiler
TESTS = Path(__file__).parent


def run_stored(given: Given, isa: str) -> Tensor:
    """The CPU backend's result for arguments with a weight in any format."""
    return BACKENDS["cpu"].prepare("forward", Call.of(given), isa)(given)


def forward_train(layer: Layer, isa: str | None = None) -> tuple[Tensor, Tensor]:
    """The result and the partial derivatives of a layer with x `[tokens, in_features]`."""
    given = Given(layer.x, layer.weight, layer.packed_masks, layer.activation, layer.mask_weights)
    return BACKENDS["cpu"].prepare("train", Call.of(given), isa)(given)


def assert_right(layer: Layer, isa: str | None, what: str) -> None:
    """Assert that the results in inference and training, and all partial derivatives, are within the budget."""
    products = products_of(layer.x, layer.weight, layer.masks)
    exact, exact_entries = exact_partials(products, layer.activation, layer.mask_weights)
    assert_matches(run(layer, isa or "best"), exact, what=what)
    y, partials = forward_train(layer, isa)
    assert y.dtype is partials.dtype is layer.x.dtype
    assert y.is_contiguous()
    assert partials.is_contiguous()
    assert_matches(y, exact, what=f"{what} in training")
    assert partials.shape == exact_entries.shape
    for entry in range(partials.shape[1]):
        assert_matches(partials[:, entry], exact_entries[:, entry], what=f"{what}, {entry=}")


def kernels_of(*dtypes: torch.dtype) -> pytest.MarkDecorator:
    kernels = [kernel for kernel in NATIVE if kernel.dtype in dtypes]
    return pytest.mark.parametrize("kernel", kernels, indirect=True, ids=str)


@pytest.mark.parametrize("n_masks", quick_only_for([1, 2, 3, 8, 16], range(1, 17)))
def test_every_number_of_masks_and_tokens(kernel, n_masks):
    """Covers kernels for few and many tokens, partial vectors, and partial chunks, panels and blocks of tokens."""
    for tokens in (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 33):
        layer = make_layer(
            (tokens,), 67 + tokens, 19 + tokens, n_masks, dtype=kernel.dtype, weighted=tokens % 3 != 0, seed=tokens
        )
        assert_right(layer, kernel.isa, f"{tokens} tokens")


def test_more_tokens_and_features_than_a_block_holds(kernel):
    sizes = ((513, 300, 53, 1), (700, 300, 53, 3), (260, 300, 53, 16), (40, 300, 300, 1), (9, 1100, 70, 1))
    for tokens, *others in sizes:
        layer = make_layer((tokens,), *others, dtype=kernel.dtype, weighted=tokens != 40)
        assert_right(layer, kernel.isa, f"{tokens} tokens")


def layer_of_gates(gates: torch.Tensor, activation: str) -> Layer:
    """A layer whose results are act(gate): one column of W makes the gate, and the other one makes the value 1."""
    x, masks = torch.stack((gates, torch.ones_like(gates)), 1), torch.tensor([[[True, False]]])
    return Layer(x, torch.ones_like(x[:1]), masks, torch.ops.mglu.pack_masks(masks), activation, None)


@pytest.mark.parametrize("activation", s.ACTIVATION_NAMES)
def test_activations_and_their_derivatives(kernel, activation):
    """Activations and derivatives are exact to a few roundings, in the whole range in which they are not linear.

    With value 1, dy/dt is (act(gate) + act'(gate)) / 2 and dy/df is (act(gate) - act'(gate)) / 2.
    """
    gates = torch.linspace(-30, 30, 4001).to(kernel.dtype)
    layer = layer_of_gates(gates, activation)
    wide, rounding = gates.double().requires_grad_(), torch.finfo(kernel.dtype).eps
    act = s.ACTIVATIONS[activation].forward(wide)
    (slope,) = torch.autograd.grad(act.sum(), wide)
    act, size = act.detach(), wide.detach().abs().clamp(max=6)
    # Near -5, gelu is the gate times a small difference of two numbers near 1. As in torch, the difference has the
    # rounding error of these numbers.
    error_of_one = 1.5e-7 if kernel.dtype is torch.float32 else 2e-7
    limit = (
        max(4e-7, rounding / 2) * act.abs() + error_of_one * size + 1e-12 + torch.finfo(kernel.dtype).tiny * rounding
    )
    assert ((run(layer, kernel.isa)[:, 0].double() - act).abs() <= limit).all()
    y, partials = forward_train(layer, kernel.isa)
    limit = rounding * (act.abs() + slope.abs()) + 4e-7 * size + 1e-7
    for found, exact in ((y, act), (partials[:, 0], (slope + act) / 2), (partials[:, 1], (act - slope) / 2)):
        assert ((found[:, 0].double() - exact).abs() <= limit).all()


def test_derivative_of_relu_at_zero_and_nan(kernel):
    """The derivative of relu is 0 at 0 and 1 at NaN, as in torch."""
    y, partials = forward_train(
        layer_of_gates(torch.tensor([0.0, -0.0, math.nan]).to(kernel.dtype), "relu"), kernel.isa
    )
    assert torch.equal(partials[:2], torch.zeros(2, 2, 1).to(kernel.dtype))
    assert y[2].isnan().all()
    assert partials[2].isnan().all()


@pytest.mark.parametrize("tokens", quick_only_for([5], [1, 2, 5, 20, 32]))
def test_error_is_close_to_the_naive_layers(kernel, tokens):
    """Sigmoid is the hardest case: an error that the values of all masks have in common would add up over masks."""
    narrow = kernel.dtype is torch.float32  # sums are no more precise than operands, so errors come close to the limit
    for n_masks in (1, 2, 4, 16):
        for in_features in (64, 256, 2048) if narrow else (256,):
            for activation, density in (("silu", 0.5), ("sigmoid", 0.9), ("relu", 0.1)):
                squares = [0.0, 0.0]
                for seed in range(8 if narrow else 1):
                    options = {"activation": activation, "dtype": kernel.dtype, "density": density, "seed": seed}
                    layer = make_layer((tokens,), in_features, 64, n_masks, **options)
                    exact = layer.oracle()
                    naive = s.naive(layer.x, layer.weight, layer.masks, activation)
                    squares[0] += relative_error(run(layer, kernel.isa), exact) ** 2
                    squares[1] += max(relative_error(naive, exact), torch.finfo(kernel.dtype).eps / 4) ** 2
                assert squares[0] <= NAIVE_FACTOR**2 * squares[1], f"{n_masks=} {in_features=} {activation} {squares}"


@given(st.data())
def test_every_layout(kernel, data):
    """Covers strided rows, strided columns, and tensors that cannot be viewed as a matrix."""
    layer = data.draw(s.layers(dtypes=(kernel.dtype,)))
    total = layer.x.abs().double() @ layer.weight.abs().double().T
    term_weights = len(layer.masks) if layer.mask_weights is None else layer.mask_weights.double().sum(-1, keepdim=True)
    tiny = torch.finfo(kernel.dtype).tiny
    limit = BUDGET[kernel.dtype] * term_weights * total * (total + 1) + tiny
    assert ((run(layer, kernel.isa).double() - layer.oracle()).abs() <= limit).all()
    tokens, in_features = math.prod(layer.x.shape[:-1]), layer.x.shape[-1]
    if in_features == 0:
        return
    if layer.mask_weights is not None:
        layer = layer.with_(mask_weights=layer.mask_weights.reshape(tokens, len(layer.masks)))
    layer = layer.with_(x=layer.x.reshape(tokens, in_features))
    limit = (BUDGET[kernel.dtype] * (term_weights + 1) * (total + 1) ** 2 + tiny).view(tokens, -1)
    y, partials = forward_train(layer, kernel.isa)
    products = products_of(layer.x, layer.weight, layer.masks)
    exact, exact_entries = exact_partials(products, layer.activation, layer.mask_weights)
    assert ((y.double() - exact).abs() <= limit).all()
    assert ((partials.double() - exact_entries).abs() <= limit[:, None]).all()


@pytest.mark.parametrize("kernel", EMULATED, indirect=True, ids=str)
@given(outlier_layers(torch.bfloat16, in_features=(16, 67, 256)))
def test_outliers(kernel, layer):
    """Covers emulated instruction sets. tests/operators/test_outliers.py covers this machine's instruction sets."""
    assert_loses_no_more_than_naive(run(layer, kernel.isa), layer, what=kernel.isa)


@pytest.mark.parametrize("kernel", EMULATED, indirect=True, ids=str)
def test_a_value_is_not_lost_beside_a_large_gate(kernel):
    for tokens in TOKENS:
        for n_masks in (1, 2, 4, 9):
            layer = layer_of_large_gates(torch.bfloat16, tokens, n_masks)
            assert_loses_no_more_than_naive(run(layer, kernel.isa), layer, what=f"{tokens=} {n_masks=}")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "weight"])
def test_nan_and_inf_propagate_as_in_the_naive_layer(kernel, where, value):
    for tokens, n_masks in ((1, 2), (2, 1), (2, 4), (9, 3), (18, 4)):
        for activation in s.ACTIVATION_NAMES:
            layer = make_layer((tokens,), 40, 9, n_masks, activation=activation, dtype=kernel.dtype)
            changed = getattr(layer, where).clone()
            changed[0, 33] = value
            layer = layer.with_(**{where: changed})
            expected = s.naive(layer.x, layer.weight, layer.masks, activation)
            assert expected.isnan().any()
            assert torch.equal(run(layer, kernel.isa).isnan(), expected.isnan())


def plain_products(x: torch.Tensor, weight: torch.Tensor, mask_weights: torch.Tensor | None = None) -> Layer:
    """A layer with the result x W^T / 2: all gates are 0, and sigmoid(0) is a half."""
    masks = torch.zeros(1, *weight.shape, dtype=torch.bool)
    return Layer(x, weight, masks, torch.ops.mglu.pack_masks(masks), "sigmoid", mask_weights)


@kernels_of(torch.float16)
def test_subnormal_and_extreme_float16(kernel):
    """Conversions from and to float16: subnormals, the largest numbers, and results that round to infinity."""
    x = torch.tensor([[2.0**-24], [3 * 2.0**-20], [0.5], [1.0], [65504.0]], dtype=torch.float16)
    weight = torch.tensor([[1.0], [2.0**-10], [1.00098]], dtype=torch.float16)
    for rows in (x, x[:2]):
        result = run(plain_products(rows, weight), kernel.isa)
        assert torch.equal(result, (rows.float() @ weight.float().T / 2).half())
    large = run(plain_products(x[4:], weight, torch.tensor([[2.0]])), kernel.isa)
    assert torch.equal(large, torch.tensor([[65504.0, 63.96875, math.inf]]).half())


def near_ties(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs x `[tokens, 3]` and W `[1, 3]` with products x W^T halfway between two 16-bit numbers, or close to it.

    The products are exact in float32. They have both signs and various exponents, and include float16 subnormals.
    """
    bits = 10 if dtype is torch.float16 else 7
    rows = []
    for exponent in (-24, -20, -14, -13, -1, 0, 1, 14, 15):
        last = 2.0 ** (max(exponent, -14) - bits if dtype is torch.float16 else exponent - bits)
        steps = range(4) if exponent < 15 else range(2**bits - 4, 2**bits)
        for number in (2.0**exponent + step * last for step in steps):
            rows += [[sign * number, sign * last, beside * last] for sign in (1, -1) for beside in (-1, 0, 1)]
    return torch.tensor(rows).to(dtype), torch.tensor([[1, 0.5, 2.0**-10]]).to(dtype)


@kernels_of(torch.bfloat16, torch.float16)
def test_results_are_rounded_to_nearest_and_ties_to_even(kernel):
    x, weight = near_ties(kernel.dtype)
    exact = x.double() @ weight.double().T
    assert torch.equal(exact.float().double(), exact)
    for tokens in (1, 3, len(x)):  # runs the kernels for few and for many tokens
        for rows, expected in zip(x.split(tokens), exact.float().to(kernel.dtype).split(tokens), strict=True):
            result = run(plain_products(rows, weight, torch.full((len(rows), 1), 2.0)), kernel.isa)
            assert torch.equal(result, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_products_without_masks(kernel, name):
    """Calls without masks give x W^T in float32, also if columns, rows or tokens do not fill the last step or chunk."""
    if kernel.isa == "amx" or (kernel.isa == "avx512_bf16" and FORMATS[name].columns is not None):
        pytest.skip("has no such kernel")
    for tokens, out_features, in_features in ((1, 9, 70), (2, 8, 64), (3, 1, 2), (5, 17, 200), (9, 30, 130), (4, 3, 0)):
        x = torch.randn(tokens, in_features + 3).to(kernel.dtype)[:, :in_features]
        dense, stored = torch.randn(out_features, in_features), FORMATS[name]
        weight, scale = (dense.to(kernel.dtype), None) if stored.is_dense else stored.quantize(dense)
        exact = weight.double() if stored.is_dense else stored.dequantize(weight, scale, torch.float64)
        no_masks = torch.empty(out_features, 0, 0, dtype=torch.uint8)
        result = run_stored(Given(x, weight, no_masks, "identity", None, scale, name), kernel.isa)
        assert result.dtype is torch.float32
        error, size = (result - x.double() @ exact.t()).abs(), x.double().abs() @ exact.abs().t()
        assert (error <= 1e-6 * size).all(), f"{tokens} x {in_features}"


@kernels_of(torch.float32)
def test_masks_of_ones_give_exactly_zero(kernel):
    """With masks of ones and few tokens, values are exactly 0: gate and total are summed in the same order."""
    for tokens in (1, 4):
        layer = make_layer((tokens,), 333, 10, 5, density=1.0)
        assert torch.equal(run(layer, kernel.isa), torch.zeros(tokens, 10))


@pytest.mark.parametrize("size", [(0, 8, 8), (3, 0, 8), (3, 8, 0), (40, 40, 0), (0, 0, 0)])
def test_empty_sizes(kernel, size):
    tokens, out_features, in_features = size
    layer = make_layer((tokens,), in_features, out_features, dtype=kernel.dtype)
    assert torch.equal(run(layer, kernel.isa), torch.zeros(tokens, out_features).to(kernel.dtype))


every_row_format = pytest.mark.parametrize("name", ["int8_row", "fp8_row"])
in_registers = pytest.mark.parametrize(
    "kernel",
    [kernel for kernel in NATIVE if kernel.isa in ("avx2", "avx512", "avx512_bf16")] + EMULATED[:1],
    indirect=True,
    ids=str,
)
"""Runs a test with the kernels that decode quantized weights in registers, for up to eight tokens."""


@every_row_format
@in_registers
def test_every_stored_value_is_exact_in_every_column(kernel, name):
    """The last step along the 70 columns is partial in every kernel."""
    for column in range(69):
        given, expected = every_stored_value(name, column, kernel.dtype, h=70)
        found = run_stored(given, kernel.isa)[0]
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)


@every_row_format
@in_registers
@pytest.mark.parametrize("n_masks", quick_only_for([2, 9], [1, 2, 4, 7, 9, 16]))
def test_stored_weights_have_the_bits_of_decoded_ones(kernel, name, n_masks):
    """With power-of-two scales, quantized and dense kernels for few tokens give the same bits.

    Dense results are computed two tokens at a time, because the dense kernels for few tokens take at most four.

    The memory between rows must not be read. It is NaN in x, and also in W if the format has a NaN.
    """
    for h in (1, 64, 133, 256 + n_masks):
        stored = torch.randint(0, 256, (70, h + 5), dtype=torch.uint8)
        if name == "fp8_row":
            stored[stored & 127 == 127] = 0
        stored[:, h:] = 127
        stored[9, h // 2] = 255  # -1 or NaN
        weight = stored.view(FORMATS[name].dtype)[:, :h]
        scale = 2.0 ** torch.randint(-12, -6, (70,))
        base = make_layer((8,), h, 70, n_masks, dtype=kernel.dtype, weighted=True)
        wide_x = torch.full((8, h + 3), math.nan).to(kernel.dtype)
        wide_x[:, 1 : h + 1] = base.x
        wide_x[:, 1 + h // 3] *= 2**13  # an outlier, which makes kernels sum the small gates or values again
        for tokens in (1, 2, 3, 8):
            x, weights = wide_x[:tokens, 1 : h + 1], base.mask_weights[:tokens]
            found = run_stored(Given(x, weight, base.packed_masks, "gelu", weights, scale, name), kernel.isa)
            decoded = base.with_(weight=FORMATS[name].dequantize(weight, scale, kernel.dtype), activation="gelu")
            pairs = zip(x.split(2), weights.split(2), strict=True)
            expected = torch.cat(
                [run(decoded.with_(x=two, mask_weights=two_weights), kernel.isa) for two, two_weights in pairs]
            )
            assert expected[:, 9].isnan().all() == (name == "fp8_row")
            torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)


@every_row_format
@in_registers
def test_stored_weights_have_the_error_of_dense_ones(kernel, name):
    for tokens, sizes in ((1, (300, 520)), (4, (41, 2048)), (8, (16, 67))):
        for n_masks in (1, 4, 11):
            given, exact = stored_layer(name, kernel.dtype, tokens, *sizes, n_masks)
            assert relative_error(run_stored(given, kernel.isa), exact) <= BUDGET[kernel.dtype]


def with_threads(call: Callable[[], object]) -> list[object]:
    """The results of `call` with several numbers of threads."""
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 2):
            torch.set_num_threads(threads)
            found.append(call())
    finally:
        torch.set_num_threads(before)
    return found


@every_row_format
@in_registers
def test_threads_do_not_change_bits_of_stored_weights(kernel, name):
    given, _ = stored_layer(name, kernel.dtype, 3, 300, 330, 3)
    found = with_threads(lambda: run_stored(given, kernel.isa))
    assert all(torch.equal(again, found[0]) for again in found)


def test_threads_and_training_do_not_change_bits(kernel):
    for tokens in (1, 4, 9, 100):
        layer = make_layer((tokens,), 330, 300, 2, dtype=kernel.dtype)
        found = with_threads(lambda layer=layer: (run(layer, kernel.isa), *forward_train(layer, kernel.isa)))
        assert all(all(map(torch.equal, again, found[0])) for again in found)
        if tokens == 100:  # for few tokens, inference has another kernel than training
            assert torch.equal(found[0][0], found[0][1])


@kernels_of(torch.float32)
def test_few_tokens_have_the_bits_of_single_tokens(kernel):
    layer = make_layer((4,), 300, 50, 6)
    together = run(layer, kernel.isa)
    for token in range(4):
        assert torch.equal(run(layer.with_(x=layer.x[token : token + 1]), kernel.isa)[0], together[token])


def test_strided_and_unaligned_rows_are_read_in_place(kernel):
    """The memory between rows must be neither read nor written."""
    for tokens in (3, 20):
        base = make_layer((tokens,), 45, 9, 3, dtype=kernel.dtype)
        wide_x, wide_weight = (torch.full((rows, 101), math.nan).to(kernel.dtype) for rows in (tokens, 9))
        wide_x[:, 1:46], wide_weight[:, 7:52] = base.x, base.weight
        layer = base.with_(x=wide_x[:, 1:46], weight=wide_weight[:, 7:52])
        assert torch.equal(run(layer, kernel.isa), run(base, kernel.isa))


def test_calls_from_several_threads():
    layers = [make_layer((tokens,), 200, 64, 4, seed=tokens) for tokens in (1, 3, 20)] * 4
    expected = [run(layer) for layer in layers]
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(run, layers), expected))


@pytest.mark.parametrize("kernel", [*BFLOAT16, *EMULATED], indirect=True, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_bfloat16_instructions_refuse_other_types(kernel, dtype):
    with pytest.raises(RuntimeError, match="lacks the instruction set"):
        run(make_layer((2,), dtype=dtype), kernel.isa)


@pytest.mark.parametrize("kernel", EMULATED[-1:], indirect=True, ids=str)
def test_explain_names_the_instruction_set_that_runs(kernel):
    """The instruction set depends on dtype, tokens and masks. Results have the bits of the set that is named."""
    for tokens, n_masks, isa in ((1, 2, "avx512_bf16"), (1, 3, "avx512"), (300, 2, "amx")):
        layer = make_layer((tokens,), 64, 128, n_masks, dtype=torch.bfloat16)
        assert cpu.isa(torch.bfloat16, tokens, n_masks) == isa
        assert torch.equal(run(layer), run(layer, isa))
        reason = mglu_ops.explain_dispatch(layer.x, layer.weight, layer.packed_masks).reason
        assert reason.endswith(f"instruction set {isa}")
    assert cpu.isa(torch.float32, 300, 2) == "avx512"
    for tokens, name, isa in ((8, "int8_row", "avx512_bf16"), (9, "fp8_row", "amx"), (1, "int4_group", "avx512")):
        assert cpu.isa(torch.bfloat16, tokens, 4, name) == isa


@pytest.mark.long
@pytest.mark.parametrize("emulated", [False, True], ids=["as built", "emulated"])
def test_sanitizers(tmp_path, emulated):
    """Run all kernels in a program of their own: under AddressSanitizer and UBSan, or with emulated AVX-512."""
    compiler = build.find_compiler()
    flags = ["-O0", "-std=c++17", "-pthread", "-ffp-contract=off", "-Wno-psabi", f"-I{source_directory('cpu')}"]
    if emulated:
        flags += ['-DMGLU_EMULATE_AVX512="cpu_avx512_emulation.h"', f"-I{TESTS}"]
    else:
        flags += ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    probe = subprocess.run(
        [*compiler, *flags, "-x", "c++", "-", "-o", str(tmp_path / "probe")],
        input="int main() { return 0; }",
        capture_output=True,
        text=True,
    )
    if probe.returncode != 0:
        pytest.skip(f"this compiler has no sanitizers: {probe.stderr.strip()}")
    sources = [TESTS / "cpu_driver.cpp", *source_directory("cpu").glob("*.cpp")]
    commands = [[*compiler, *flags, "-c", source, "-o", tmp_path / f"{source.stem}.o"] for source in sources]
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(lambda command: subprocess.run(command, capture_output=True, text=True), commands):
            assert result.returncode == 0, result.stderr
    program = tmp_path / "driver"
    objects = [str(tmp_path / f"{source.stem}.o") for source in sources]
    subprocess.run([*compiler, *flags, *objects, "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ran portable: 0 mistakes" in result.stdout
    for name in ("avx512", "avx512_bf16", "amx", "backward") if emulated else ():
        assert f"ran {name}: 0 mistakes" in result.stdout
