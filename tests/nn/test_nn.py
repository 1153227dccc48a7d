"""MGLU modules, compared with the naive layer and the oracle, their arguments, and PyTorch's operations on modules."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mglu_ops.masks import check_packed_masks
from mglu_ops.nn import GLU, LU, MGLU, GeMGLU, MGLUFeedForward, NaiveMGLU, ReMGLU, SwiMGLU
from tests.support import modules, reference
from tests.support.budgets import NAIVE_FACTOR, assert_matches, relative_error
from tests.support.families import family
from tests.support.layers import ACTIVATION_NAMES, DTYPES, examples
from tests.support.modules import learned_or_fixed, results

MASKED = [MGLU, NaiveMGLU]
each_kind = pytest.mark.parametrize("kind", MASKED)
pair = partial(modules.pair, kinds=MASKED)


def oracle(layer: MGLU | NaiveMGLU, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The float64 result and gradients of a layer. The logits get the gradient of the masks, straight through."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, layer.weight))
    if layer.learnable_masks:
        masks = (layer.mask_logits.detach() > 0).double().requires_grad_()
    else:
        masks = torch.ops.mglu.unpack_masks(layer.packed_masks, layer.in_features).double()
    wanted = {"x": x, "weight": weight} | ({"mask_logits": masks} if layer.learnable_masks else {})
    mask_weights = None
    if layer.top_k is not None:
        router = wanted["router.weight"] = layer.router.weight.detach().double().requires_grad_()
        logits = F.linear(x, router)
        # The layer uses `topk`. The oracle does not: it masks out the logits below the k-th largest.
        kth = logits.sort(-1, descending=True).values[..., layer.top_k - 1, None]
        mask_weights = logits.masked_fill(logits < kth, -torch.inf).softmax(-1)
    result = reference.forward(x, weight, masks, layer.activation, mask_weights)
    grads = torch.autograd.grad(result, list(wanted.values()), grad.double())
    return {"y": result.detach()} | dict(zip(wanted, grads, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@learned_or_fixed
@pytest.mark.parametrize(("n_masks", "top_k"), [(1, None), (4, None), (4, 1), (4, 2), (4, 4)])
def test_results_and_gradients_match_the_oracle(dtype, learnable_masks, n_masks, top_k):
    if top_k is not None and dtype.itemsize == 2:
        return  # in a near tie, the oracle's router could keep another mask; the next test covers this
    fused, naive = pair(67, 48, n_masks=n_masks, top_k=top_k, learnable_masks=learnable_masks, dtype=dtype)
    x, grad = torch.randn(3, 11, 67, dtype=dtype), torch.randn(3, 11, 48, dtype=dtype)
    expected = oracle(fused, x, grad)
    got, got_naive = results(fused, x, grad), results(naive, x, grad)
    assert set(expected) == set(got) == set(got_naive)
    for name in expected:
        assert got[name].dtype == dtype
        assert_matches(got[name], expected[name], dtype, name)
        assert_matches(got_naive[name], expected[name], dtype, f"naive {name}")
    if dtype.itemsize == 2:
        # Tests of the operators do this for float32. In float64, the oracle's errors are as large as the layer's.
        naive_error = relative_error(got_naive["y"], expected["y"])
        assert relative_error(got["y"], expected["y"]) <= NAIVE_FACTOR * naive_error


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_routed_in_16_bits_matches_the_oracle_with_the_same_mask_weights(dtype):
    """The oracle gets the layer's mask weights, so that near ties do not matter."""
    fused, naive = pair(40, 24, n_masks=4, top_k=2, dtype=dtype)
    x = torch.randn(18, 40, dtype=dtype)
    mask_weights = fused.mask_weights(x)
    assert torch.equal(mask_weights, naive.mask_weights(x))
    expected = reference.forward(x, fused.weight, fused.mask_logits > 0, "silu", mask_weights)
    assert_matches(fused(x), expected, dtype)
    assert_matches(naive(x), expected, dtype)


@given(
    in_features=st.integers(1, 33),
    out_features=st.integers(1, 9),
    n_masks=st.integers(1, 16),
    leading=st.lists(st.integers(0, 3), max_size=3),
    learnable=st.booleans(),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
@examples(60)
def test_any_shape_matches_the_naive_layer(in_features, out_features, n_masks, leading, learnable, seed, data):
    top_k = data.draw(st.none() | st.integers(1, n_masks), label="top_k")
    # If a row of a mask has no 1, its gate is 0, where relu has no derivative. test_variants.py tests relu.
    activation = data.draw(st.sampled_from([name for name in ACTIVATION_NAMES if name != "relu"]), label="activation")
    sizes = {"n_masks": n_masks, "learnable_masks": learnable, "top_k": top_k, "activation": activation}
    fused, naive = pair(in_features, out_features, seed=seed, dtype=torch.float64, **sizes)
    x = torch.randn(*leading, in_features, dtype=torch.float64)
    grad = torch.randn(*leading, out_features, dtype=torch.float64)
    expected, got = results(naive, x, grad), results(fused, x, grad)
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name].shape == expected[name].shape
        # A single mask always has weight 1, so its router's gradient is 0 up to rounding: hence the absolute tolerance.
        torch.testing.assert_close(got[name], expected[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("top_k", [1, 3, 5])
def test_mask_weights_are_the_softmax_of_the_kept_logits(top_k):
    layer = MGLU(12, 8, n_masks=5, top_k=top_k, dtype=torch.float64)
    x = torch.randn(4, 7, 12, dtype=torch.float64)
    mask_weights, logits = layer.mask_weights(x), layer.router(x)
    assert ((mask_weights > 0).sum(-1) == top_k).all()
    torch.testing.assert_close(mask_weights.sum(-1), torch.ones(4, 7, dtype=torch.float64))
    for token, weights in zip(logits.flatten(0, 1), mask_weights.flatten(0, 1), strict=True):
        chosen = set(token.sort(descending=True).indices[:top_k].tolist())
        assert set(weights.nonzero().flatten().tolist()) == chosen
        exponentials = token[list(chosen)].exp()
        torch.testing.assert_close(weights[list(chosen)], exponentials / exponentials.sum())


@pytest.mark.parametrize(("kind", "activation"), [(SwiMGLU, "silu"), (GeMGLU, "gelu"), (ReMGLU, "relu")])
def test_feed_forward_blocks_apply_the_activation_of_their_name(kind, activation):
    block = kind(20, 36, n_masks=2, top_k=1, dtype=torch.float64)
    assert kind(8, 8, activation=activation).mglu.activation == activation
    torch.manual_seed(0)
    same = MGLUFeedForward(20, 36, n_masks=2, top_k=1, activation=activation, dtype=torch.float64)
    x = torch.randn(3, 20, dtype=torch.float64)
    masks, mask_weights = block.mglu.mask_logits > 0, block.mglu.mask_weights(x)
    hidden = reference.forward(x, block.mglu.weight, masks, activation, mask_weights)
    assert_matches(block(x), hidden @ block.down_proj.weight.double().t(), torch.float64)
    assert torch.equal(block(x), same(x))
    names = ["mglu.weight", "mglu.mask_logits", "mglu.router.weight", "down_proj.weight"]
    assert list(block.state_dict()) == names


def test_initial_weights_are_as_in_linear_and_logits_are_small():
    torch.manual_seed(3)
    linear = nn.Linear(300, 200, bias=False)
    torch.manual_seed(3)
    layer = MGLU(300, 200, n_masks=4)
    assert torch.equal(layer.weight, linear.weight)
    assert layer.mask_logits.std().item() == pytest.approx(0.01, rel=0.02)
    assert abs(layer.mask_logits.mean().item()) < 1e-4


@pytest.mark.parametrize("in_features", [300, 304, 5])
def test_fixed_masks_are_fair_coins_in_the_packed_format(in_features):
    layer = MGLU(in_features, 200, n_masks=4, learnable_masks=False)
    check_packed_masks(layer.packed_masks, in_features, 200)
    assert layer.packed_masks.unique().numel() == (256 if in_features > 8 else 2**in_features)
    masks = torch.ops.mglu.unpack_masks(layer.packed_masks, in_features)
    assert masks.shape == (4, 200, in_features)
    spread = 0.5 / masks[0].numel() ** 0.5
    assert (masks.double().mean((1, 2)) - 0.5).abs().max() < 5 * spread
    assert (masks[0] ^ masks[1]).double().mean().item() == pytest.approx(0.5, abs=5 * spread)


@pytest.mark.parametrize(("kind", "learnable_masks", "top_k"), family(MASKED, [True, False], [None, 2], most=2))
def test_modules_compile_as_one_graph(kind, learnable_masks, top_k):
    layer = kind(19, 12, n_masks=3, learnable_masks=learnable_masks, top_k=top_k)
    x, grad = torch.randn(5, 19), torch.randn(5, 12)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    expected = results(layer, x, grad)
    got = results(compiled, x, grad)
    for name, want in expected.items():
        assert_matches(got[name if name in got else f"_orig_mod.{name}"], want, what=name)
    with torch.no_grad():
        assert_matches(compiled(x), expected["y"])


def test_a_block_compiles_with_inductor():
    block = SwiMGLU(16, 24, n_masks=2)
    x = torch.randn(5, 16)
    assert_matches(torch.compile(block, fullgraph=True)(x), block(x))


@learned_or_fixed
@pytest.mark.parametrize("top_k", [None, 2])
def test_autocast_gives_bfloat16_results_and_float32_gradients(learnable_masks, top_k):
    fused, naive = pair(33, 16, n_masks=3, learnable_masks=learnable_masks, top_k=top_k)
    x = torch.randn(7, 33)
    exact = oracle(fused, x, torch.ones(7, 16))["y"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, got_naive = fused(x), naive(x)
    assert got.dtype is got_naive.dtype is torch.bfloat16
    assert_matches(got, exact)
    assert_matches(got_naive, exact)
    got.sum().backward()
    assert {parameter.grad.dtype for parameter in fused.parameters()} == {torch.float32}


@each_kind
@learned_or_fixed
def test_copies_are_equal_and_independent(kind, learnable_masks):
    layer = kind(19, 12, n_masks=3, learnable_masks=learnable_masks, top_k=2, activation="gelu_tanh")
    x = torch.randn(4, 19)
    expected = layer(x)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(saved, weights_only=False)]
    with torch.no_grad():
        layer.weight.zero_()
    for duplicate in copies:
        assert type(duplicate) is kind
        assert torch.equal(duplicate(x), expected)


@pytest.mark.parametrize("kind", [*MASKED, MGLUFeedForward])
@learned_or_fixed
def test_modules_on_meta_can_be_materialized(kind, learnable_masks):
    layer = kind(19, 12, n_masks=3, learnable_masks=learnable_masks, top_k=2, device="meta")
    assert all(t.is_meta for t in [*layer.parameters(), *layer.buffers()])
    assert layer(torch.empty(2, 3, 19, device="meta")).is_meta
    layer.to_empty(device="cpu")
    for tensor in [*layer.parameters(), *layer.buffers()]:
        tensor.data.fill_(255)
    layer.reset_parameters()
    for name, parameter in layer.named_parameters():
        assert parameter.abs().max() < 2, f"{name} was not initialized"
    for name, buffer in layer.named_buffers():
        check_packed_masks(buffer, 19, 12)
        assert (buffer[:, :2] != 255).any(), f"{name} was not initialized"
    assert torch.isfinite(layer(torch.randn(2, 19))).all()


@each_kind
def test_packed_masks_stay_bytes_when_the_dtype_changes(kind):
    layer = kind(19, 12, n_masks=3, learnable_masks=False, top_k=1)
    packed = layer.packed_masks.clone()
    layer.to(torch.bfloat16)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert torch.equal(layer.packed_masks, packed)
    assert layer.packed_masks.dtype is torch.uint8
    assert layer(torch.randn(2, 19, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert layer.double()(torch.randn(2, 19, dtype=torch.float64)).dtype is torch.float64
    layer.type(torch.float16)  # which converts all buffers of other modules, also integers
    assert {p.dtype for p in layer.parameters()} == {torch.float16}
    assert torch.equal(layer.packed_masks, packed)
    assert layer.packed_masks.dtype is torch.uint8


@each_kind
def test_repr_names_every_argument(kind):
    text = repr(kind(19, 12, n_masks=3, learnable_masks=False, activation="gelu", top_k=2))
    start = f"{kind.__name__}(\n  in_features=19, out_features=12, n_masks=3, activation='gelu', "
    assert text.startswith(start + "learnable_masks=False, top_k=2"), text


BAD = [
    ({"in_features": 0}, "in_features: got 0, must be an int of at least 1"),
    ({"in_features": 8.0}, r"in_features: got 8\.0"),
    ({"out_features": "8"}, "out_features: got '8'"),
    ({"n_masks": 0}, "n_masks: got 0, must be an int from 1 to 16"),
    ({"n_masks": 17}, "n_masks: got 17"),
    ({"activation": "swish"}, "activation: got 'swish', must be one of silu, gelu"),
    ({"activation": F.silu}, "activation: got <function silu"),
    ({"top_k": 0, "n_masks": 2}, "top_k: got 0, must be None or an int from 1 to n_masks=2"),
    ({"top_k": 3, "n_masks": 2}, "top_k: got 3"),
    ({"top_k": True, "n_masks": 2}, "top_k: got True"),
    ({"learnable_masks": "no"}, "learnable_masks: got 'no', must be True or False"),
    ({"weight_init": "xavier"}, "weight_init: got 'xavier', must be one of paper, leveled"),
    ({"dtype": torch.int8}, "dtype: got torch.int8, must be None or one of torch.float16"),
]


@each_kind
@pytest.mark.parametrize(("wrong", "message"), BAD, ids=[f"{i}-{min(wrong)}" for i, (wrong, _) in enumerate(BAD)])
def test_bad_arguments_are_named(kind, wrong, message):
    with pytest.raises(ValueError, match=message):
        kind(**({"in_features": 8, "out_features": 8} | wrong))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SwiMGLU(0, 8), "hidden: got 0"),
        (lambda: SwiMGLU(8, -1), "intermediate: got -1"),
        (lambda: MGLUFeedForward(8, 8, n_masks=99), "n_masks: got 99"),
        (
            lambda: SwiMGLU(8, 8, activation="swish"),
            "activation: got 'swish', must be 'silu' or left out for SwiMGLU; MG",
        ),
        (lambda: GeMGLU(8, 8, activation="silu"), "activation: got 'silu', must be 'gelu' or left out for GeMGLU"),
        (lambda: ReMGLU(8, 8, activation=F.relu), "activation: got <.*>, must be 'relu' or left out for ReMGLU"),
        (lambda: SwiMGLU(8, 8, weight_init="xavier"), "weight_init: got 'xavier', must be one of paper, leveled"),
        (lambda: MGLU(8, 8, save_activations=None), "save_activations: got None, must be True or False"),
        (lambda: GLU(0, 8), "in_features: got 0"),
        (lambda: GLU(8, 8, "nope"), "activation: got 'nope'"),
        (lambda: LU(8, 0), "out_features: got 0"),
        (lambda: LU(8, 8, dtype=torch.int32), r"dtype: got torch\.int32"),
        (lambda: LU(8, 8, bias=1), "bias: got 1, must be True or False"),
        (lambda: GLU(8, 8, shared="no"), "shared: got 'no', must be True or False"),
        (lambda: NaiveMGLU(8, 8, bias=None), "bias: got None, must be True or False"),
        (lambda: NaiveMGLU(8, 8, mask_gate=0), "mask_gate: got 0, must be True or False"),
        (lambda: NaiveMGLU(8, 8, mask_gate=False, mask_value=False), "mask_gate, mask_value: got False for both"),
    ],
)
def test_bad_arguments_of_blocks_and_baselines_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
