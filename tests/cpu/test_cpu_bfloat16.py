"""The CPU kernels for bfloat16: native if the machine has the instructions, else by emulated intrinsics."""

from __future__ import annotations

import math
import platform
import shutil

import pytest
import strategies as s
import torch
from backend_calls import run_on
from budgets import BUDGET, NAIVE_FACTOR, assert_matches, relative_error
from cpu_calls import assert_trains, emulated_library, oracle, run
from hypothesis import given
from hypothesis import strategies as st
from outliers import TOKENS, assert_loses_no_more_than_naive, layer_of_large_gates, outlier_layers
from strategies import make_layer

import mglu_ops
from mglu_ops.backends import cpu
from mglu_ops.backends.cpu import build, library

ISAS = ("avx512_bf16", "amx")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="needs a C++ compiler"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64"),
]


@pytest.fixture(scope="session")
def kernels() -> library.Library:
    """The machine's own library if it has both instruction sets, else a library that emulates them."""
    loaded = library.load()
    assert isinstance(loaded, library.Library), loaded
    if all(loaded.supports(isa, torch.bfloat16) for isa in ISAS):
        return loaded
    return emulated_library()


@pytest.fixture(autouse=True)
def _loaded_kernels(kernels: library.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", kernels)


def bfloat16_layer(tokens, in_features, out_features, n_masks, **options):
    return make_layer((tokens,), in_features, out_features, n_masks, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("n_masks", range(1, 17))
@pytest.mark.parametrize("isa", ISAS)
def test_every_number_of_masks_and_tokens(isa, n_masks):
    """Whole and ragged steps of in_features, chunks and pairs of tiles of out_features, panels of tokens."""
    for tokens in (1, 2, 3, 15, 16, 17, 33):
        layer = bfloat16_layer(tokens, 67 + tokens, 35, n_masks, weighted=tokens % 2 == 0, seed=tokens)
        assert_matches(run(layer, isa), oracle(layer), what=f"{tokens} tokens")


@pytest.mark.parametrize("n_masks", [1, 2, 5, 16])
@pytest.mark.parametrize("isa", ISAS)
def test_training(isa, n_masks):
    for tokens in (1, 17, 40):
        layer = bfloat16_layer(tokens, 67 + tokens, 35, n_masks, weighted=tokens == 17, seed=tokens)
        assert_trains(layer, isa, f"{tokens} tokens")


@pytest.mark.parametrize("isa", ISAS)
def test_more_tokens_and_features_than_a_block_holds(isa):
    for tokens, in_features, out_features, n_masks in ((9, 1100, 70, 1), (40, 600, 33, 2), (700, 40, 200, 1)):
        layer = bfloat16_layer(tokens, in_features, out_features, n_masks, weighted=True)
        assert_matches(run(layer, isa), oracle(layer), what=f"{tokens} tokens, {n_masks} masks")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", s.ACTIVATION_NAMES)
def test_activations(isa, activation):
    """Activations are exact to the rounding of bfloat16, over the whole range in which they are not linear."""
    gates = torch.linspace(-30, 30, 2001).bfloat16()
    x = torch.stack((gates, torch.ones_like(gates)), 1)  # one weight for the gate, one for the value, which is 1
    packed = torch.ops.mglu.pack_masks(torch.tensor([[[True, False]]]))
    result = run_on("cpu", x, torch.ones(1, 2).bfloat16(), packed, activation, None, launch=isa)[:, 0]
    exact = s.ACTIVATIONS[activation].forward(gates.double())
    limit = 2.0**-8 * exact.abs() + 2e-7 * gates.double().abs().clamp(max=6) + 1e-12
    assert ((result.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 20])
def test_error_is_close_to_the_naive_layers(isa, tokens):
    for n_masks in (1, 2, 4, 16):
        for activation, density in (("silu", 0.5), ("sigmoid", 0.9), ("relu", 0.1)):
            layer = bfloat16_layer(tokens, 256, 64, n_masks, activation=activation, density=density)
            exact = oracle(layer)
            naive = relative_error(s.naive(layer.x, layer.weight, layer.masks, activation), exact)
            assert relative_error(run(layer, isa), exact) <= NAIVE_FACTOR * max(naive, 2.0**-9)


@given(st.data())
def test_every_layout_agrees_with_the_oracle(data):
    layer = data.draw(s.layers(dtype=torch.bfloat16))
    total = layer.x.abs().double() @ layer.weight.abs().double().T
    term_weights = len(layer.masks) if layer.mask_weights is None else layer.mask_weights.double().sum(-1, keepdim=True)
    limit = BUDGET[torch.bfloat16] * term_weights * total * (total + 1) + torch.finfo(torch.bfloat16).tiny
    for isa in ISAS:
        assert ((run(layer, isa).double() - oracle(layer)).abs() <= limit).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_value_is_not_lost_beside_a_large_gate(isa):
    for tokens in TOKENS:
        for n_masks in (1, 2, 4, 9):
            layer = layer_of_large_gates(torch.bfloat16, tokens, n_masks)
            assert_loses_no_more_than_naive(run(layer, isa), layer, what=f"{tokens=} {n_masks=}")


@given(outlier_layers(torch.bfloat16, in_features=(16, 67, 256)))
def test_outliers(layer):
    for isa in ISAS:
        assert_loses_no_more_than_naive(run(layer, isa), layer, what=isa)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "weight"])
@pytest.mark.parametrize("isa", ISAS)
def test_nan_and_inf_propagate_as_in_the_naive_layer(isa, where, value):
    for tokens, n_masks, activation in ((2, 1, "silu"), (9, 3, "tanh"), (18, 4, "relu"), (1, 2, "identity")):
        layer = bfloat16_layer(tokens, 40, 9, n_masks, activation=activation)
        changed = getattr(layer, where).clone()
        changed[0, 33] = value
        layer = layer.with_(**{where: changed})
        expected = s.naive(layer.x, layer.weight, layer.masks, activation)
        assert expected.isnan().any()
        assert torch.equal(run(layer, isa).isnan(), expected.isnan())


@pytest.mark.parametrize("size", [(0, 8, 8), (3, 0, 8), (3, 8, 0), (40, 40, 0), (0, 0, 0)])
@pytest.mark.parametrize("isa", ISAS)
def test_empty_sizes(isa, size):
    tokens, out_features, in_features = size
    layer = bfloat16_layer(tokens, in_features, out_features, 1)
    assert torch.equal(run(layer, isa), torch.zeros(tokens, out_features).bfloat16())


@pytest.mark.parametrize("isa", ISAS)
def test_threads_and_repetition_do_not_change_bits(isa):
    before = torch.get_num_threads()
    try:
        for tokens in (1, 9, 70):
            layer, results = bfloat16_layer(tokens, 330, 700, 2), []
            for threads in (1, 2, 5, 2):
                torch.set_num_threads(threads)
                results.append(run(layer, isa))
            assert all(torch.equal(result, results[0]) for result in results)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", ISAS)
def test_strided_and_unaligned_rows_are_read_in_place(isa):
    """The memory between rows is neither read nor written."""
    for tokens in (3, 20):
        base = bfloat16_layer(tokens, 45, 9, 3)
        wide_x, wide_weight = (torch.full((rows, 101), math.nan).bfloat16() for rows in (tokens, 9))
        wide_x[:, 1:46], wide_weight[:, 7:52] = base.x, base.weight
        layer = base.with_(x=wide_x[:, 1:46], weight=wide_weight[:, 7:52])
        assert torch.equal(run(layer, isa), run(base, isa))


def test_explain_names_the_instruction_set_that_runs(kernels):
    """The choice depends on dtype, tokens and masks; `explain_dispatch` names it, and results have its bits."""
    for tokens, n_masks in ((1, 2), (1, 3), (300, 2)):
        layer = bfloat16_layer(tokens, 64, 128, n_masks)
        isa = kernels.isa(torch.bfloat16, tokens, n_masks)
        assert torch.equal(run(layer), run(layer, isa))
        assert mglu_ops.explain_dispatch(layer.x, layer.weight, layer.packed_masks).reason.endswith(
            f"instruction set {isa}"
        )
    assert cpu.isa(torch.bfloat16, 300, 2) == "amx"
    assert cpu.isa(torch.bfloat16, 1, 2) == "avx512_bf16"
    assert cpu.isa(torch.bfloat16, 1, 3) == "avx512"
    assert cpu.isa(torch.float32, 300, 2) == "avx512"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_types_are_refused(isa, dtype):
    with pytest.raises(RuntimeError, match="lacks the instruction set"):
        run(make_layer((2,), dtype=dtype), isa)
