"""Modules of experts: results and gradients compared with a loop over experts, routing, compiling, and errors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mglu_ops.formats import FORMATS
from mglu_ops.nn import (
    MGLUExperts,
    MGLUExpertsFeedForward,
    NaiveMGLUExperts,
    check_masks,
    decompose,
    freeze,
    parameter_groups,
    quantize,
)
from tests.support.budgets import NAIVE_FACTOR, assert_matches, relative_error
from tests.support.families import family
from tests.support.layers import ACTIVATION_NAMES, examples
from tests.support.modules import KINDS, each_kind, layer_of, learned_or_fixed, pair, results

F64 = torch.float64


# --- Results and gradients --------------------------------------------------------------------------------------------


@given(
    num_experts=st.integers(1, 6),
    in_features=st.integers(1, 33),
    out_features=st.integers(1, 9),
    n_masks=st.integers(1, 5),
    leading=st.lists(st.integers(0, 4), max_size=2),
    experts_of_a_token=st.integers(1, 3),
    learnable=st.booleans(),
    saved=st.booleans(),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
@examples(60)
def test_any_shape_and_load_matches_the_loop_over_experts(
    num_experts, in_features, out_features, n_masks, leading, experts_of_a_token, learnable, saved, seed, data
):
    activation = data.draw(st.sampled_from([name for name in ACTIVATION_NAMES if name != "relu"]), label="activation")
    options = {"n_masks": n_masks, "learnable_masks": learnable, "activation": activation, "dtype": F64}
    options["top_k"] = data.draw(st.none() | st.integers(1, n_masks), label="top_k")
    fused, naive = pair(num_experts, in_features, out_features, seed=seed, **options)
    fused.save_activations = saved
    # The ids -1 and num_experts are out of range. In about half of the examples, one expert has all rows.
    ids = torch.randint(-1, num_experts + 1, (*leading, experts_of_a_token))
    if data.draw(st.booleans(), label="one expert"):
        ids[...] = num_experts - 1
    ids = ids.to(data.draw(st.sampled_from([torch.int32, torch.int64]), label="dtype of the ids"))
    x = torch.randn(*leading, in_features, dtype=F64)
    grad = torch.randn(*ids.shape, out_features, dtype=F64)
    expected, got = results(naive, x, ids, grad), results(fused, x, ids, grad)
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-11, atol=1e-13)
    with torch.no_grad():
        torch.testing.assert_close(freeze(fused)(x, ids), expected["y"], rtol=1e-11, atol=1e-13)


@learned_or_fixed
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_results_and_gradients_in_fewer_bits(dtype, learnable_masks):
    fused, naive = pair(5, 67, 48, n_masks=3, learnable_masks=learnable_masks, dtype=dtype)
    exact = copy.deepcopy(naive).double()
    ids = torch.randint(-1, 6, (3, 11, 2))
    x, grad = torch.randn(3, 11, 67, dtype=dtype), torch.randn(3, 11, 2, 48, dtype=dtype)
    expected, got, got_naive = (
        results(exact, x.double(), ids, grad.double()),
        *(results(layer, x, ids, grad) for layer in (fused, naive)),
    )
    for name, want in expected.items():
        assert got[name].dtype == dtype
        assert_matches(got[name], want, dtype, name)
    naive_error = relative_error(got_naive["y"], expected["y"])
    assert relative_error(got["y"], expected["y"]) <= NAIVE_FACTOR * naive_error


@each_kind
@learned_or_fixed
def test_an_expert_is_an_mglu(kind, learnable_masks):
    """An expert has the results and gradients of an MGLU with its weight and masks.

    The gradients of an expert without rows are zeros.
    """
    layer = kind(4, 21, 12, n_masks=3, top_k=2, learnable_masks=learnable_masks, activation="gelu", dtype=F64)
    x, ids, grad = torch.randn(6, 21, dtype=F64), torch.tensor([0, 3, 0, 1, 3, 3]), torch.randn(6, 12, dtype=F64)
    got = results(layer, x, ids[:, None], grad[:, None])
    for expert in range(4):
        rows = ids == expert
        one, mine = layer_of(layer, expert), x[rows].requires_grad_()
        y = one(mine)
        torch.testing.assert_close(got["y"][rows, 0], y)
        y.backward(grad[rows])
        torch.testing.assert_close(got["x"][rows], mine.grad)
        for name, parameter in one.named_parameters():
            if name != "router.weight":
                torch.testing.assert_close(got[name][expert], parameter.grad)
    assert not got["weight"][2].any()


@learned_or_fixed
def test_rows_of_no_expert_are_never_read(learnable_masks):
    layer = MGLUExperts(3, 16, 8, n_masks=2, learnable_masks=learnable_masks)
    x = torch.randn(4, 16)
    x[2] = torch.nan
    ids = torch.tensor([[0, 1], [2, -1], [3, -1], [7, 0]])
    got = results(layer, x, ids, torch.ones(4, 2, 8))
    outside = (ids < 0) | (ids > 2)
    assert all(tensor.isfinite().all() for tensor in got.values())
    assert not got["y"][outside].any()
    assert got["y"][~outside].any(1).all()
    assert not got["x"][2].any()
    with torch.no_grad():
        torch.testing.assert_close(freeze(layer)(x, ids), got["y"])


@learned_or_fixed
def test_transforms_of_torch_func(learnable_masks):
    """An ensemble of layers under vmap, and Jacobians, which are batches of gradients."""
    layers = [MGLUExperts(3, 9, 4, n_masks=2, learnable_masks=learnable_masks) for _ in range(2)]
    x, ids = torch.randn(5, 9), torch.tensor([[0, 1], [2, 2], [1, -1], [0, 3], [2, 1]])
    parameters, buffers = torch.func.stack_module_state(layers)

    def call(parameters, buffers):
        return torch.func.functional_call(layers[0], (parameters, buffers), (x, ids))

    together = torch.vmap(call)(parameters, buffers)
    together.square().sum().backward()
    for i, layer in enumerate(layers):
        result = layer(x, ids)
        result.square().sum().backward()
        torch.testing.assert_close(together[i], result)
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(parameters[name].grad[i], parameter.grad)

    def of_x(x):
        return layers[0](x, ids).sum(0)

    expected = torch.autograd.functional.jacobian(of_x, x)
    torch.testing.assert_close(torch.autograd.functional.jacobian(of_x, x, vectorize=True), expected)
    torch.testing.assert_close(torch.func.jacrev(of_x)(x), expected)


def test_training_follows_the_loop_over_experts():
    """Three AdamW steps with the recommended parameter groups, in which the router learns too."""
    losses = []
    for kind in KINDS:
        torch.manual_seed(0)
        block = MGLUExpertsFeedForward(6, 20, 24, 2, n_masks=2, mask_top_k=1, weight_init="leveled", dtype=F64)
        if kind is NaiveMGLUExperts:
            naive = kind(6, 20, 24, n_masks=2, top_k=1, weight_init="leveled", dtype=F64)
            naive.load_state_dict(block.experts.state_dict())
            block.experts = naive
        groups = parameter_groups(block, lr=0.03, weight_decay=0.1)
        assert [group["name"] for group in groups] == ["weights", "mask_logits"]
        assert groups[1]["params"] == [block.experts.mask_logits]
        assert groups[1]["lr"] == pytest.approx(0.009)
        optimizer = torch.optim.AdamW(groups)
        torch.manual_seed(1)
        x, target = torch.randn(2, 50, 20, dtype=F64), torch.randn(2, 50, 20, dtype=F64)
        for _ in range(3):
            y, logits = block(x, output_router_logits=True)
            loss = F.mse_loss(y, target) + 0.01 * logits.square().mean()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses[2] < losses[0]
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-9)


@learned_or_fixed
def test_autocast_gives_bfloat16_results_and_float32_gradients(learnable_masks):
    block = MGLUExpertsFeedForward(4, 33, 16, 2, n_masks=2, learnable_masks=learnable_masks)
    x = torch.randn(7, 33)
    exact = block(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = block(x)
    assert y.dtype is torch.bfloat16
    assert relative_error(y, exact) < 0.1  # in a near tie, a token may get other experts
    y.sum().backward()
    assert {parameter.grad.dtype for parameter in block.parameters()} == {torch.float32}


# --- The feed-forward layer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_the_feed_forward_layer_routes_as_qwen_and_mixtral_do(norm_topk_prob):
    block = MGLUExpertsFeedForward(5, 12, 20, 2, norm_topk_prob=norm_topk_prob, n_masks=2, dtype=F64)
    x = torch.randn(3, 4, 12, dtype=F64)
    y, logits = block(x, output_router_logits=True)
    assert torch.equal(block(x), y)
    torch.testing.assert_close(logits, x @ block.gate.weight.T)
    ones = [layer_of(block.experts, expert) for expert in range(5)]
    for token in range(12):
        row, probabilities = x.view(12, 12)[token], logits.view(12, 5)[token].softmax(0)
        chosen = probabilities.sort(descending=True).indices[:2].tolist()
        total = probabilities[chosen].sum() if norm_topk_prob else 1
        expected = sum(probabilities[e] / total * (ones[e](row) @ block.down_proj.weight[e].T) for e in chosen)
        torch.testing.assert_close(y.view(12, 12)[token], expected)
    assert torch.equal(block(x[0, 0]), block(x[:1, :1])[0, 0])


def test_the_feed_forward_layer_has_the_names_and_initial_values_of_its_parts():
    block = MGLUExpertsFeedForward(4, 300, 200, 2, n_masks=4, mask_top_k=2)
    names = {f"experts.{name}" for name in ("weight", "mask_logits", "router.weight")}
    assert set(block.state_dict()) == names | {"gate.weight", "down_proj.weight"}
    for weight, columns in ((block.experts.weight, 300), (block.down_proj.weight, 200), (block.gate.weight, 300)):
        assert weight.abs().max() <= columns**-0.5  # the bound of nn.Linear
        assert weight.std().item() == pytest.approx((3 * columns) ** -0.5, rel=0.05)
    leveled = MGLUExpertsFeedForward(4, 300, 200, 2, weight_init="leveled").experts.weight
    assert leveled.std().item() == pytest.approx(10**0.25 * 900**-0.5, rel=0.02)


@pytest.mark.parametrize("weight_format", [name for name in FORMATS if name != "dense"])
def test_both_halves_are_quantized_but_for_skipped_down_projections(weight_format):
    dense = freeze(MGLUExpertsFeedForward(3, 36, 260, 2, n_masks=2)).requires_grad_(False)
    block, kept = copy.deepcopy(dense), copy.deepcopy(dense)
    quantize(block, weight_format)
    quantize(kept, weight_format, skip=["*down_proj"])
    assert block.down_proj.weight_format == block.experts.weight_format == kept.experts.weight_format == weight_format
    assert kept.down_proj.weight_format == "dense"
    assert torch.equal(kept.down_proj.weight, dense.down_proj.weight)
    with torch.no_grad():
        for layer in (dense.experts, dense.down_proj):
            layer.weight.copy_(torch.stack([_rounded(one, weight_format) for one in layer.weight]))
    x = torch.randn(7, 36)
    assert_matches(block(x), dense(x))
    options = {"n_masks": 2, "learnable_masks": False}
    made = MGLUExpertsFeedForward(3, 36, 260, 2, weight_format=weight_format, **options)
    for empty in (quantize(MGLUExpertsFeedForward(3, 36, 260, 2, **options), weight_format), made):
        empty.load_state_dict(block.state_dict())
        assert torch.equal(empty(x), block(x))
    with pytest.raises(RuntimeError, match=r"down_proj\.weight_scale: the checkpoint holds a quantized weight, but"):
        kept.load_state_dict(block.state_dict())
    assert block.half().down_proj.weight.dtype == FORMATS[weight_format].dtype
    check_masks(block)
    weight = copy.deepcopy(block.down_proj.weight)
    block.down_proj._parameters["weight"] = weight  # accelerate replaces parameters this way
    with pytest.raises(ValueError, match=r"model: down_proj\.weight, weight_scale: one of the two was replaced"):
        check_masks(block)
    with pytest.raises(ValueError, match=r"^weight, weight_scale: one of the two was replaced without the other"):
        block(x.half())


def _rounded(weight, weight_format):
    return FORMATS[weight_format].dequantize(*FORMATS[weight_format].quantize(weight), weight.dtype)


# --- Compiling and exporting ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "mask_top_k"), family(["learned", "fixed", "frozen", "quantized"], [None, 1], most=1))
def test_a_layer_compiles_as_one_graph_for_all_loads(case, mask_top_k):
    block = MGLUExpertsFeedForward(
        4,
        16,
        24,
        2,
        n_masks=2,
        mask_top_k=mask_top_k,
        learnable_masks=case != "fixed",
        save_activations=case == "fixed",
    )
    if case in ("frozen", "quantized"):
        freeze(block).requires_grad_(False)
    if case == "quantized":
        quantize(block, "fp8_row")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        for shift in (0, 3):
            x = torch.randn(6, 16) + shift
            (y, _), (expected, _) = compiled(x, output_router_logits=True), block(x, output_router_logits=True)
            assert_matches(y.detach(), expected.detach())
            parameters = [parameter for parameter in block.parameters() if parameter.requires_grad]
            if parameters:
                grads, wanted = (torch.autograd.grad(one.sum(), parameters, allow_unused=True) for one in (y, expected))
                for grad, want in zip(grads, wanted, strict=True):
                    torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5)


def test_an_exported_layer_takes_any_number_of_tokens_and_is_not_decomposed():
    block = freeze(MGLUExpertsFeedForward(4, 16, 24, 2, n_masks=2)).eval().requires_grad_(False)
    tokens = {"x": {0: torch.export.Dim("tokens", min=1, max=512)}, "output_router_logits": None}
    program = torch.export.export(block, (torch.randn(5, 16), False), dynamic_shapes=tokens)
    for count in (1, 5, 9):
        x = torch.randn(count, 16)
        torch.testing.assert_close(program.module()(x, False), block(x))
    with pytest.raises(ValueError, match="program: it has experts"):
        decompose(program)


# --- Errors -----------------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize(
    ("x", "ids", "error", "message"),
    [
        ((4, 8), [[0]] * 4, TypeError, "expert_ids: got list, must be a tensor"),
        ((4, 8), torch.zeros(4, 2), TypeError, "expert_ids: got dtype torch.float32, must be torch.int32 or"),
        (
            (4, 8),
            torch.zeros(4, dtype=torch.int64),
            ValueError,
            r"got shape \[4\], must be \[4, K\] with K of at least 1",
        ),
        ((2, 3, 8), torch.zeros(3, 2, 1, dtype=torch.int64), ValueError, r"shape \[3, 2, 1\], must be \[2, 3, K\]"),
        (
            (4, 8),
            torch.zeros(4, 2, dtype=torch.int64, device="meta"),
            ValueError,
            "expert_ids: got device meta, must be",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_named(kind, x, ids, error, message):
    with pytest.raises(error, match=message):
        kind(3, 8, 8)(torch.randn(x), ids)


def test_x_of_another_size_is_named():
    for top_k in (None, 1):
        with pytest.raises(ValueError, match=r"x: got .*8"):
            MGLUExperts(3, 8, 8, top_k=top_k)(torch.randn(4, 7), torch.zeros(4, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="x: got "):
        MGLUExpertsFeedForward(3, 8, 8, 1, mask_top_k=1)(torch.randn(4, 7))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MGLUExperts(0, 8, 8), "num_experts: got 0, must be an int of at least 1"),
        (lambda: NaiveMGLUExperts(2.0, 8, 8), r"num_experts: got 2\.0"),
        (lambda: MGLUExperts(2, 8, 0), "out_features: got 0"),
        (lambda: NaiveMGLUExperts(2, 8, 8, weight_format="fp8_row"), "weight_format: got 'fp8_row', must be 'dense'"),
        (lambda: MGLUExpertsFeedForward(4, 8, 8, 5), "top_k: got 5, must be an int from 1 to num_experts=4"),
        (lambda: MGLUExpertsFeedForward(4, 8, 8, 2, norm_topk_prob=1), "norm_topk_prob: got 1, must be True or False"),
        (
            lambda: MGLUExpertsFeedForward(4, 8, 8, 2, mask_top_k=2),
            "^mask_top_k: got 2, must be None or an int from 1 to n_masks=1",
        ),
        (lambda: MGLUExpertsFeedForward(4, 8, 8, 2, dtype=torch.int8), "dtype: got torch.int8"),
        (
            lambda: MGLUExperts.from_parameters(torch.ones(8, 8), torch.ones(1, 8, 8)),
            r"weight: got shape \[8, 8\], must be \[num_experts, out_features, in_features\]",
        ),
        (
            lambda: MGLUExperts.from_parameters(torch.ones(2, 4, 8), torch.ones(3, 2, 4, 8)),
            r"masks: got shape \[3, 2, 4, 8\], must be \[2, n_masks, 4, 8\] beside a weight of shape \[2, 4, 8\]",
        ),
        (
            lambda: MGLUExperts.from_parameters(torch.ones(2, 4, 8), torch.ones(2, 4, 8)),
            r"masks: got shape \[2, 4, 8\], must be \[num_experts, n_masks, out_features, in_features\]",
        ),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@each_kind
def test_repr_names_the_number_of_experts(kind):
    start = f"{kind.__name__}(num_experts=3, in_features=19, out_features=12, n_masks=2, activation='silu', "
    assert repr(kind(3, 19, 12, n_masks=2)).startswith(start)
    assert "top_k=2, norm_topk_prob=True" in repr(MGLUExpertsFeedForward(4, 8, 8, 2))
