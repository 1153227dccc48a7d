"""The CPU kernels of each instruction set against the oracle and the naive layer, and a machine without a compiler.

Tests for any backend are in test_ops.py, which also runs these kernels. Tests for bfloat16 instructions are in
test_cpu_bfloat16.py, and tests of the build in test_build_cache.py. `test_sanitizers` runs all kernels in a separate
program (cpu_driver.cpp), those for AVX-512 and AMX also with emulated intrinsics.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import strategies as s
import torch
from backend_calls import run_on
from budgets import BUDGET, NAIVE_FACTOR, assert_matches, relative_error
from cpu_calls import oracle, run
from families import quick_only_for
from hypothesis import given
from hypothesis import strategies as st
from strategies import make_layer

from mglu_ops import dispatch
from mglu_ops.backends import BACKENDS
from mglu_ops.backends.cpu import build, library
from mglu_ops.layer_call import LayerArguments, LayerCall

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ISAS = ("portable", "avx2", "avx512")
TESTS = Path(__file__).parent

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)), reason=f"needs one of {', '.join(build.COMPILERS)}"
)
pytestmark = needs_compiler


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set of the build that this machine has."""
    loaded = library.load()
    assert isinstance(loaded, library.Library), loaded
    if not loaded.supports(request.param, torch.float32):
        pytest.skip(f"this CPU has no {request.param}")
    return str(request.param)


# --- Numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_masks", range(1, 17))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_masks_and_tokens(isa, dtype, n_masks):
    """Kernels for few and for many tokens, whole and ragged vectors, chunks of rows, panels and blocks of tokens."""
    for tokens in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33):
        layer = make_layer((tokens,), 67 + tokens, 21, n_masks, dtype=dtype, weighted=tokens % 2 == 0, seed=tokens)
        assert_matches(run(layer, isa), oracle(layer), what=f"{tokens} tokens")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_tokens_and_features_than_a_block_holds(isa, dtype):
    for tokens, n_masks in ((513, 1), (700, 3), (260, 16)):
        layer = make_layer((tokens,), 300, 53, n_masks, dtype=dtype, weighted=True)
        assert_matches(run(layer, isa), oracle(layer), what=f"{tokens} tokens, {n_masks} masks")


@pytest.mark.parametrize("activation", s.ACTIVATION_NAMES)
def test_activations(isa, activation):
    """Activations are exact to a few roundings of float32, over the whole range in which they are not linear."""
    gates = torch.linspace(-30, 30, 4001)
    # One weight belongs to the gate, the other to the value: act(x_0) * x_1 with x_1 = 1.
    x = torch.stack((gates, torch.ones_like(gates)), 1)
    packed = torch.ops.mglu.pack_masks(torch.tensor([[[True, False]]]))
    result = run_on("cpu", x, torch.ones(1, 2), packed, activation, None, launch=isa)[:, 0]
    exact = s.ACTIVATIONS[activation].forward(gates.double())
    # gelu at -5 contains a difference from 1, which torch also takes in the dtype: exact to the rounding of 1, times x.
    limit = 4e-7 * exact.abs() + 1.5e-7 * gates.abs().clamp(max=6) + 1e-12
    assert ((result.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("tokens", quick_only_for([1, 5], [1, 2, 5, 32]))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_close_to_the_naive_layers(isa, dtype, tokens):
    """The hardest case for the limit is sigmoid, where an error common to the values of all masks would add up."""
    narrow = dtype is torch.float32  # float32 sums of float32 numbers: errors come close to the limit
    for n_masks in (1, 2, 4, 16):
        for in_features in (64, 256, 2048) if narrow else (256,):
            for activation, density in (("silu", 0.5), ("sigmoid", 0.9), ("relu", 0.1)):
                squares = [0.0, 0.0]
                for seed in range(8 if narrow else 1):
                    arguments = (in_features, 64, n_masks)
                    layer = make_layer(
                        (tokens,), *arguments, activation=activation, dtype=dtype, density=density, seed=seed
                    )
                    exact = oracle(layer)
                    naive = s.naive(layer.x, layer.weight, layer.masks, activation)
                    squares[0] += relative_error(run(layer, isa), exact) ** 2
                    squares[1] += max(relative_error(naive, exact), torch.finfo(dtype).eps / 2) ** 2
                assert squares[0] <= NAIVE_FACTOR**2 * squares[1], f"{n_masks=} {in_features=} {activation} {squares}"


@given(st.data())
def test_every_layout_agrees_with_the_oracle(data):
    for name in ISAS:
        if not library.load().supports(name, torch.float32):
            continue
        layer = data.draw(s.layers(dtype=data.draw(st.sampled_from(DTYPES))))
        total = layer.x.abs().double() @ layer.weight.abs().double().T
        term_weights = (
            len(layer.masks) if layer.mask_weights is None else layer.mask_weights.double().sum(-1, keepdim=True)
        )
        limit = BUDGET[layer.x.dtype] * term_weights * total * (total + 1) + torch.finfo(layer.x.dtype).tiny
        assert ((run(layer, name).double() - oracle(layer)).abs() <= limit).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "weight"])
@pytest.mark.parametrize("tokens", [2, 9])
def test_nan_and_inf_propagate_as_in_the_naive_layer(isa, tokens, where, value):
    for activation in s.ACTIVATION_NAMES:
        for n_masks in (1, 3, 4):
            layer = make_layer((tokens,), 40, 9, n_masks, activation=activation)
            changed = getattr(layer, where).clone()
            changed[1, 33] = value
            layer = layer.with_(**{where: changed})
            expected = s.naive(layer.x, layer.weight, layer.masks, activation)
            assert expected.isnan().any()
            assert torch.equal(run(layer, isa).isnan(), expected.isnan())


def test_subnormal_and_extreme_float16(isa):
    """Convert in both directions: subnormals, the largest numbers, and results that round to infinity."""
    x = torch.tensor([[2.0**-24], [3 * 2.0**-20], [0.5], [1.0], [65504.0]], dtype=torch.float16)
    weight = torch.tensor([[1.0], [2.0**-10], [1.00098]], dtype=torch.float16)
    packed = torch.ops.mglu.pack_masks(torch.zeros(1, 3, 1, dtype=torch.bool))
    for rows in (x, x[:2]):  # the gate is 0, so the result is half the value
        result = run_on("cpu", rows, weight, packed, "sigmoid", None, launch=isa)
        assert torch.equal(result, (rows.float() @ weight.float().T / 2).half())
    large = run_on("cpu", x[4:], weight, packed, "sigmoid", torch.tensor([[2.0]]), launch=isa)
    assert torch.equal(large, torch.tensor([[65504.0, 63.96875, math.inf]]).half())


def near_ties(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x `[tokens, 3]` and W `[1, 3]` whose products x W^T are at or next to the middle of two 16-bit numbers.

    The products are exact in float32. They have both signs and all exponents of float16, and include subnormal numbers
    of float16.
    """
    bits = 10 if dtype is torch.float16 else 7
    rows = []
    for exponent in (-24, -20, -14, -13, -1, 0, 1, 14, 15):
        last = 2.0 ** (max(exponent, -14) - bits if dtype is torch.float16 else exponent - bits)
        steps = range(4) if exponent < 15 else range(2**bits - 4, 2**bits)
        for number in (2.0**exponent + step * last for step in steps):
            rows += [[sign * number, sign * last, beside * last] for sign in (1, -1) for beside in (-1, 0, 1)]
    return torch.tensor(rows).to(dtype), torch.tensor([[1, 0.5, 2.0**-10]]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_results_are_rounded_to_nearest_and_ties_to_even(isa, dtype):
    x, weight = near_ties(dtype)
    exact = x.double() @ weight.double().T
    assert torch.equal(exact.float().double(), exact)
    packed = torch.ops.mglu.pack_masks(torch.zeros(1, 1, 3, dtype=torch.bool))
    for tokens in (1, 3, len(x)):  # kernels for few tokens and for many
        term_weights = torch.full((tokens, 1), 2.0)  # the gate is 0, and its sigmoid a half
        for rows, expected in zip(x.split(tokens), exact.float().to(dtype).split(tokens), strict=True):
            result = run_on("cpu", rows, weight, packed, "sigmoid", term_weights[: len(rows)], launch=isa)
            assert torch.equal(result, expected)


def test_masks_of_ones_give_exactly_zero(isa):
    """Under a mask of ones the value is exactly 0 for few tokens, since gate and total are summed in the same order."""
    for tokens in (1, 4):
        layer = make_layer((tokens,), 333, 10, 5, density=1.0)
        assert torch.equal(run(layer, isa), torch.zeros(tokens, 10))


@pytest.mark.parametrize("size", [(0, 8, 8), (3, 0, 8), (3, 8, 0), (9, 8, 0), (0, 0, 0)])
def test_empty_sizes(isa, size):
    tokens, out_features, in_features = size
    layer = make_layer((tokens,), in_features, out_features)
    assert torch.equal(run(layer, isa), torch.zeros(tokens, out_features))


# --- Threads and memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 4, 100])
def test_threads_and_repetition_do_not_change_bits(isa, tokens):
    layer = make_layer((tokens,), 512, 700, 4, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5, 2):
            torch.set_num_threads(threads)
            results.append(run(layer, isa))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_few_tokens_have_the_bits_of_single_tokens(isa):
    layer = make_layer((4,), 300, 50, 6)
    together = run(layer, isa)
    for token in range(4):
        assert torch.equal(run(layer.with_(x=layer.x[token : token + 1]), isa)[0], together[token])


def test_strided_and_unaligned_rows_are_read_in_place(isa):
    """Tensors are copied only if their last dimension is not contiguous."""
    base = make_layer((3,), 45, 9, 3)
    wide_x, wide_weight = torch.full((3, 64), math.nan), torch.full((9, 101), math.nan)
    wide_x[:, 1:46], wide_weight[:, 7:52] = base.x, base.weight
    layer = base.with_(x=wide_x[:, 1:46], weight=wide_weight[:, 7:52])
    assert torch.equal(run(layer, isa), run(base, isa))


def test_calls_from_several_threads():
    layers = [make_layer((tokens,), 200, 64, 4, seed=tokens) for tokens in (1, 3, 20)] * 4
    expected = [run(layer) for layer in layers]
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(run, layers), expected))


def test_an_instruction_set_refuses_other_types():
    layer = make_layer((1,))
    with pytest.raises(RuntimeError, match="lacks the instruction set"):
        run(layer, "amx")


# --- The choice of the backend ------------------------------------------------------------------------------------


def in_new_process(code: str, **environment: str) -> str:
    script = "import torch, mglu_ops\n" + textwrap.dedent(code)
    env = {**os.environ, **environment}
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=300)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_without_a_compiler_composite_runs_and_says_so_once(tmp_path):
    out = in_new_process(
        """
        import warnings
        def layer(d, h):
            return torch.randn(2, h), torch.randn(d, h), torch.ops.mglu.pack_masks(torch.rand(2, d, h) > 0.5)
        small, large = layer(16, 24), layer(512, 512)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                torch.ops.mglu.forward(*small)
        assert not seen, seen[0].message
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                torch.ops.mglu.forward(*large)
        assert len(seen) == 1, seen
        print(seen[0].message, mglu_ops.explain_dispatch(*large).is_fallback)
        """,
        CXX="no-such-compiler",
        MGLU_CACHE_DIR=str(tmp_path),
    )
    assert "composite" in out
    assert "no C++ compiler" in out
    assert "CXX=no-such-compiler" in out
    assert out.endswith("True\n")


def test_the_choice_and_its_override(monkeypatch):
    layer = make_layer((3,), 512, 512)
    call = (layer.x, layer.weight, layer.packed_masks, "silu", None)
    assert torch.equal(dispatch.forward(LayerArguments(*call), backend="cpu"), run(layer))
    with pytest.raises(ValueError, match=r"backend: got 'cpu', .*no kernel for x torch.float64"):
        dispatch.forward(LayerArguments(layer.x.double(), layer.weight.double(), *call[2:]), backend="cpu")
    monkeypatch.setattr(library, "_loaded", "there is no compiler in this test")
    monkeypatch.setattr(library, "_tried_with", build.settings())
    with pytest.raises(build.BuildError, match="no compiler in this test"):
        BACKENDS["cpu"].prepare(LayerCall.of(LayerArguments(*call)))
    with pytest.raises(ValueError, match="no compiler in this test"):
        dispatch.forward(LayerArguments(*call), backend="cpu")
    with pytest.warns(UserWarning, match="composite: .*no compiler in this test"):
        dispatch.forward(LayerArguments(*call))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.forward(LayerArguments(*call))


# --- Sanitizers and the emulated instruction set ------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("emulated", [False, True], ids=["as built", "emulated"])
def test_sanitizers(tmp_path, emulated):
    """Run every ISA under the address and undefined-behaviour sanitizers; from AVX-512 on by emulated intrinsics."""
    compiler = build.find_compiler()
    flags = ["-O0", "-std=c++17", "-pthread", "-ffp-contract=off", "-Wno-psabi", f"-I{build.source_directory()}"]
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
    sources = [TESTS / "cpu_driver.cpp", *build.source_directory().glob("*.cpp")]
    with ThreadPoolExecutor(2) as pool:
        commands = [
            [*compiler, *flags, "-c", str(source), "-o", str(tmp_path / f"{source.stem}.o")] for source in sources
        ]
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
