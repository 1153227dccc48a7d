"""Gradients of the operators, compared with autograd through the oracle, and the number of their GEMMs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jacrev
from torch.utils.flop_counter import FlopCounterMode

from tests.support import layers as s
from tests.support import reference
from tests.support.budgets import assert_matches
from tests.support.families import family
from tests.support.layers import DTYPES, LOADS, Layer, make_layer

forward, forward_ste = torch.ops.mglu.forward, torch.ops.mglu.forward_ste
NAMES = ("x", "weight", "logits", "mask_weights")


def straight_through(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """`logits > 0` in `dtype`, with the gradient of the identity."""
    hard = (logits > 0).to(dtype)
    return hard + (logits - logits.detach()).to(dtype)


def leaves(layer: Layer, *wanted: str) -> dict[str, Tensor | None]:
    """Copies of a layer's tensors, of which those in `wanted` require a gradient."""
    tensors = {"x": layer.x, "weight": layer.weight, "logits": layer.logits, "mask_weights": layer.mask_weights}
    return {
        name: None if tensor is None else tensor.clone().requires_grad_(name in wanted)
        for name, tensor in tensors.items()
    }


def run_ste(layer: Layer, args: dict[str, Tensor | None]) -> Tensor:
    """The result of `forward_ste`, or `grouped_forward_ste`, for a layer with the tensors of `leaves`."""
    x, weight, logits, mask_weights = args.values()
    return layer.with_(x=x, weight=weight, mask_weights=mask_weights).result_of("forward_ste", logits)[0]


def exact_gradients(layer: Layer, grad_output: Tensor, *wanted: str) -> dict[str, Tensor]:
    """The gradients by autograd through the float64 oracle, with straight-through masks."""
    x, weight, logits, mask_weights = (
        None if tensor is None else tensor.detach().double().requires_grad_() for tensor in leaves(layer).values()
    )
    masks = straight_through(logits, torch.float64)
    exact = layer.with_(x=x, weight=weight, masks=masks, packed_masks=layer.packed_masks, mask_weights=mask_weights)
    result = exact.in_parts(
        lambda one: reference.forward(one.x, one.weight, one.masks, one.activation, one.mask_weights), torch.float64
    )
    result.backward(grad_output.double())
    inputs = {"x": x, "weight": weight, "logits": logits, "mask_weights": mask_weights}
    return {name: inputs[name].grad for name in wanted}


def wanted_of(layer: Layer) -> tuple[str, ...]:
    return NAMES if layer.mask_weights is not None else NAMES[:3]


@s.examples(60)
@given(st.data(), s.layouts, s.seeds)
def test_gradients_agree_with_the_straight_through_oracle(data, layout, seed):
    layer = data.draw(s.layers(data.draw(st.sampled_from([None, "offs"])), dtypes=(torch.float64,)))
    # If a row of a mask has no 1, the gate is 0 up to rounding, and relu's derivative there is arbitrary.
    assume(layer.activation != "relu" or bool(layer.masks.any(-1).all()))
    wanted = wanted_of(layer)
    args = leaves(layer, *wanted)
    result = run_ste(layer, args)
    grad_output = torch.randn(result.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    grad_output = s.laid_out(grad_output, layout)
    result.backward(grad_output)
    for name, exact in exact_gradients(layer, grad_output, *wanted).items():
        size = 1 + exact.abs().max().item() if exact.numel() else 1
        size += (layer.x.nan_to_num().norm() * layer.weight.norm()).item()
        precision = 1e-12 if args[name].dtype is torch.float64 else 1e-7  # logits can be float32
        torch.testing.assert_close(args[name].grad.double(), exact, rtol=precision, atol=precision * size)


@pytest.mark.parametrize("routing", [None, "offs"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", s.ACTIVATION_NAMES)
def test_relative_error_is_within_the_budget(activation, dtype, weighted, routing):
    options = {"activation": activation, "dtype": dtype, "mask_weights_dtype": dtype if weighted else None}
    layer = make_layer((48,), 96, 40, 4, routing=routing, top_k=1, experts=2, **options)
    wanted = wanted_of(layer)
    args = leaves(layer, *wanted)
    args["logits"] = layer.logits.to(dtype).requires_grad_()
    result = run_ste(layer, args)
    grad_output = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    result.backward(grad_output)
    for name, exact in exact_gradients(layer, grad_output, *wanted).items():
        assert args[name].grad.dtype is args[name].dtype
        assert_matches(args[name].grad, exact, dtype, what=f"gradient of {name}")


@pytest.mark.parametrize(
    ("dtype", "loads", "weighted", "op"), family(DTYPES, LOADS, [False, True], ["forward", "forward_ste"])
)
def test_gradients_of_experts_have_the_bits_of_each_experts_layer(dtype, loads, weighted, op):
    layer = make_layer((9,), routing="offs", loads=loads, dtype=dtype, weighted=weighted, activation="gelu")
    wanted = wanted_of(layer) if op == "forward_ste" else tuple(name for name in wanted_of(layer) if name != "logits")
    args = leaves(layer, *wanted)
    tensors = {name: args[name] for name in ("x", "weight", "mask_weights")}
    layer = layer.with_(**tensors, masks=args["logits"], packed_masks=layer.packed_masks)

    def result(one: Layer) -> Tensor:
        return one.result_of("forward_ste", one.masks)[0] if op == "forward_ste" else one.forward()

    found, expected = result(layer), layer.in_parts(result, dtype)
    assert torch.equal(found, expected)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    grads = [torch.autograd.grad(one, [args[name] for name in wanted], grad) for one in (found, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize("logits_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_logits_have_the_dtype_of_the_logits(dtype, logits_dtype):
    layer = make_layer(dtype=dtype)
    logits = layer.logits.to(logits_dtype).requires_grad_()
    result, packed = forward_ste(layer.x, layer.weight, logits)
    assert not packed.requires_grad
    result.sum().backward()
    assert logits.grad.dtype is logits_dtype
    exact = exact_gradients(layer, torch.ones_like(result), "logits")["logits"]
    coarser = max(dtype, logits_dtype, key=lambda dtype: torch.finfo(dtype).eps)
    assert_matches(logits.grad, exact, coarser)


def matmuls(function) -> int:
    """The number of torch's GEMMs that `function` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm", "aten::bmm"))


SUBSETS = [subset for size in range(5) for subset in itertools.combinations(NAMES, size)]


@pytest.mark.parametrize(
    ("op", "wanted"),
    [("forward", subset) for subset in SUBSETS if "logits" not in subset]
    + [("forward_ste", subset) for subset in SUBSETS],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "none",
)
def test_each_subset_of_gradients_runs_only_its_gemms(op, wanted):
    layer = make_layer(weighted=True, dtype=torch.float64)  # float64 runs torch's GEMMs, which can be counted
    args = leaves(layer, *wanted)
    if op == "forward":
        result = forward(args["x"], args["weight"], layer.packed_masks, "silu", args["mask_weights"])
    else:
        result = run_ste(layer, args)
    assert result.requires_grad == bool(wanted)
    assert torch.equal(result.detach(), layer.forward())
    n = len(layer.masks)
    assert matmuls(layer.forward) == n + 1
    if not wanted:
        return
    grad_output = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape)
    weight_gemms = n + 1 if "weight" in wanted else n if "logits" in wanted else 0
    with FlopCounterMode(display=False) as counter:
        gemms = matmuls(lambda: result.backward(grad_output, retain_graph=True))
    assert gemms == weight_gemms + (n + 1 if "x" in wanted else 0)
    assert counter.get_total_flops() == gemms * 2 * layer.x.shape[0] * layer.weight.numel()
    exact = exact_gradients(layer, grad_output, *wanted)
    for name in NAMES:
        if name in wanted:
            torch.testing.assert_close(args[name].grad.double(), exact[name], rtol=1e-6, atol=1e-6)
        else:
            assert args[name].grad is None


def test_nothing_is_saved_without_gradients():
    layer = make_layer()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer.forward()
        with torch.no_grad():
            layer.with_(weight=layer.weight.clone().requires_grad_()).forward()
        assert not saved
        layer.with_(weight=layer.weight.clone().requires_grad_()).forward()
    assert saved


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_no_grad_and_inference_mode_record_no_gradient(context):
    layer = make_layer()
    args = leaves(layer, "x", "weight", "logits")
    with context():
        result, packed = forward_ste(args["x"], args["weight"], args["logits"])
        fixed = forward(args["x"], args["weight"], packed)
    assert not result.requires_grad
    assert torch.equal(fixed, result)
    assert torch.equal(result, layer.forward())
    assert result.is_inference() == (context is torch.inference_mode)


@pytest.mark.parametrize("name", ["weight", "packed_masks"])
def test_a_change_in_place_before_backward_is_refused(name):
    layer = make_layer()
    args = leaves(layer, "x")
    weight, packed = layer.weight.clone(), layer.packed_masks.clone()
    result = forward(args["x"], weight, packed)
    (weight if name == "weight" else packed).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_nan_in_one_token_stays_out_of_the_others_gradients():
    layer = make_layer(dtype=torch.float64)
    x = layer.x.clone()
    x[2, 1] = torch.nan
    clean, dirty = layer.x.clone().requires_grad_(), x.requires_grad_()
    layer.with_(x=clean).forward().sum().backward()
    layer.with_(x=dirty).forward().sum().backward()
    rest = [0, 1, 3, 4]
    assert dirty.grad[2].isnan().all()
    torch.testing.assert_close(dirty.grad[rest], clean.grad[rest])


def test_autocast_gives_the_gradients_of_the_naive_layer():
    layer = make_layer((64,), 96, 48, 4, weighted=True)
    fused, plain = leaves(layer, *NAMES), leaves(layer, *NAMES)
    with torch.autocast("cpu", torch.bfloat16):
        result = run_ste(layer, fused)
        masks = straight_through(plain["logits"], torch.float32)
        expected = s.naive(plain["x"], plain["weight"], masks, "silu", plain["mask_weights"])
    assert result.dtype is torch.bfloat16
    result.float().sum().backward()
    expected.float().sum().backward()
    for name in NAMES:
        assert fused[name].grad.dtype is plain[name].grad.dtype is torch.float32
        exact = exact_gradients(layer, torch.ones(64, 48), name)[name]
        assert_matches(fused[name].grad, exact, torch.bfloat16, what=name)
        assert_matches(fused[name].grad, plain[name].grad, torch.bfloat16, what=f"{name}, against the naive layer")


LAYER = make_layer(dtype=torch.float64)
EXPERTS = make_layer((6,), routing="offs", dtype=torch.float64)
ROUTED = make_layer((6,), routing="ids", weighted=True, dtype=torch.float64)
FUNCTIONS = {
    "forward": (lambda weight: forward(LAYER.x, weight, LAYER.packed_masks), LAYER.weight),
    "forward_ste": (lambda weight: forward_ste(LAYER.x, weight, LAYER.logits)[0], LAYER.weight),
    "grouped_forward": (lambda weight: EXPERTS.with_(weight=weight).forward(), EXPERTS.weight),
    "grouped_forward_ste": (lambda weight: EXPERTS.with_(weight=weight).result_of("forward_ste")[0], EXPERTS.weight),
    "experts_forward": (lambda weight: ROUTED.with_(weight=weight).forward(), ROUTED.weight),
}
forward_of_weight, _ = FUNCTIONS["forward"]
each_op = pytest.mark.parametrize("op", FUNCTIONS)


SECOND = "second derivative of MGLU is not implemented"


@each_op
def test_double_backward_is_refused(op):
    function, weight = FUNCTIONS[op]
    weight = weight.clone().requires_grad_()
    loss = function(weight).sum()
    (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match=SECOND):
        torch.autograd.grad(first.sum(), weight, retain_graph=True)
    with pytest.raises(RuntimeError, match=SECOND):  # a gradient penalty: only a part of the loss is a gradient
        (loss + first.square().sum()).backward()


@pytest.mark.parametrize("name", ["x", "weight", "logits"])
def test_double_backward_is_refused_if_one_input_needs_a_gradient(name):
    """Such as a gradient penalty of a frozen critic. Without a path from the gradient to the input, it is lost."""
    inputs = {one: getattr(LAYER, one).clone().requires_grad_(one == name) for one in ("x", "weight", "logits")}

    def penalty(of: Tensor) -> Tensor:
        result = forward_ste(*(inputs | {name: of}).values())[0]
        (first,) = torch.autograd.grad(result.sum(), of, create_graph=True)
        return first.square().sum() + of.sum()

    with pytest.raises(RuntimeError, match=SECOND):
        torch.autograd.grad(penalty(inputs[name]), inputs[name])
    inputs = {one: of.detach() for one, of in inputs.items()}
    first = grad(lambda of: forward_ste(*(inputs | {name: of}).values())[0].sum())
    with pytest.raises(RuntimeError, match=SECOND):
        grad(lambda of: first(of).square().sum() + of.sum())(inputs[name])


def test_create_graph_without_a_second_derivative_works():
    weight = LAYER.weight.clone().requires_grad_()
    (plain,) = torch.autograd.grad(forward_of_weight(weight).sum(), weight)
    (kept,) = torch.autograd.grad(forward_of_weight(weight).sum(), weight, create_graph=True)
    assert torch.equal(plain, kept.detach())


def total(weight: Tensor) -> Tensor:
    return forward_of_weight(weight).sum()


def grad_x(weight: Tensor) -> Tensor:
    return grad(lambda x: forward(x, weight, LAYER.packed_masks).sum())(LAYER.x)


@pytest.mark.parametrize(
    "transformed",
    [
        grad(lambda weight: grad(total)(weight).sum()),
        jacrev(jacrev(total)),
        torch.func.hessian(total),
        grad(lambda weight: grad_x(weight).sum()),
    ],
    ids=["grad-grad", "jacrev-jacrev", "hessian", "mixed"],
)
def test_second_derivatives_of_torch_func_are_refused(transformed):
    with pytest.raises((RuntimeError, NotImplementedError), match=f"{SECOND}|forward-mode AD"):
        transformed(LAYER.weight)


def in_dual_level(function: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(weight, weight))


@each_op
@pytest.mark.parametrize("mode", ["jvp", "jacfwd", "dual_level"])
def test_forward_mode_is_refused(op, mode):
    function, weight = FUNCTIONS[op]
    transformed = {
        "jvp": lambda w: torch.func.jvp(function, (w,), (w,)),
        "jacfwd": torch.func.jacfwd(function),
        "dual_level": lambda w: in_dual_level(function, w),
    }[mode]
    with pytest.raises(NotImplementedError, match=r"mglu: forward-mode AD .* is not implemented; use reverse mode"):
        transformed(weight)


def test_forward_mode_through_another_argument_works():
    _, tangent = torch.func.jvp(lambda t: total(LAYER.weight) * t, (torch.tensor(2.0),), (torch.tensor(1.0),))
    torch.testing.assert_close(tangent.double(), total(LAYER.weight))


@each_op
def test_func_grad_equals_autograd(op):
    function, weight = FUNCTIONS[op]
    leaf = weight.clone().requires_grad_()
    function(leaf).square().sum().backward()
    torch.testing.assert_close(grad(lambda w: function(w).square().sum())(weight), leaf.grad)
    result, pull = torch.func.vjp(function, weight)
    torch.testing.assert_close(pull(2 * result.detach())[0], leaf.grad)


def test_func_grad_of_every_argument():
    layer = make_layer(dtype=torch.float64, weighted=True)

    def function(x: Tensor, weight: Tensor, logits: Tensor, mask_weight: Tensor) -> Tensor:
        return forward_ste(x, weight, logits, "gelu", mask_weight)[0].sum()

    args = leaves(layer)
    grads = grad(function, (0, 1, 2, 3))(*args.values())
    exact = exact_gradients(layer.with_(activation="gelu"), torch.ones(5, 10), *NAMES)
    for found, name in zip(grads, NAMES, strict=True):
        torch.testing.assert_close(found.double(), exact[name], rtol=1e-6, atol=1e-6)


def test_jacrev_equals_the_oracles():
    exact = jacrev(lambda w: reference.forward(LAYER.x, w, LAYER.masks))(LAYER.weight)
    torch.testing.assert_close(jacrev(forward_of_weight)(LAYER.weight), exact)


@pytest.mark.parametrize("layer", [LAYER, ROUTED], ids=["layer", "experts"])
def test_per_sample_gradients_equal_a_loop(layer):
    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return layer.with_(x=x, weight=weight).forward().square().sum()

    samples = torch.stack([layer.x, -layer.x])
    each = torch.vmap(grad(loss), (None, 0))(layer.weight, samples)
    for i, x in enumerate(samples):
        torch.testing.assert_close(each[i], grad(loss)(layer.weight, x))


@each_op
def test_gradients_through_vmap_equal_a_loop(op):
    function, weight = FUNCTIONS[op]
    weights = torch.stack([weight, -weight]).requires_grad_()
    torch.vmap(function)(weights).sum().backward()
    for i in range(2):
        torch.testing.assert_close(weights.grad[i], grad(lambda one: function(one).sum())(weights[i].detach()))


@each_op
def test_a_batch_of_gradients_equals_a_loop(op):
    """As `torch.autograd.functional.jacobian(vectorize=True)` computes them."""
    function, weight = FUNCTIONS[op]
    leaf = weight.clone().requires_grad_()
    result = function(leaf)
    each = torch.randn(3, *result.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (batch,) = torch.autograd.grad(result, leaf, each, is_grads_batched=True, retain_graph=True)
    for found, one in zip(batch, each, strict=True):
        torch.testing.assert_close(found, torch.autograd.grad(result, leaf, one, retain_graph=True)[0])


WEIGHTED = make_layer((3,), 6, 4, 2, dtype=torch.float64, weighted=True)
INPUTS = {name: getattr(WEIGHTED, name) for name in NAMES}


def inner(of: str, over: str, transform: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """A function of the input `over`: an inner transform, over the input `of`, of a loss."""

    def function(value: Tensor) -> Tensor:
        inputs = INPUTS | {over: value}

        def loss(changed: Tensor) -> Tensor:
            x, weight, logits, mask_weights = (inputs | {of: changed}).values()
            return forward_ste(x, weight, logits, "silu", mask_weights)[0].sin().sum()

        return transform(loss)(inputs[of])

    return function


@pytest.mark.parametrize("over", NAMES)
def test_an_outer_gradient_passes_through_the_value_of_an_inner_one(over):
    value = inner("x", over, lambda loss: lambda x: torch.func.grad_and_value(loss)(x)[1])
    expected = inner(over, over, grad)(INPUTS[over])
    torch.testing.assert_close(grad(value)(INPUTS[over]), expected)
    leaf = INPUTS[over].clone().requires_grad_()  # autograd outside of the transforms
    value(leaf).backward()
    torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize("of", NAMES)
@pytest.mark.parametrize("over", NAMES)
def test_gradients_inside_of_vmap_equal_a_loop(of, over):
    """The gradients of each layer of an ensemble, whose layers differ in one input."""
    gradient = inner(of, over, grad)
    batch = torch.stack([INPUTS[over], -INPUTS[over]])
    torch.testing.assert_close(torch.vmap(gradient)(batch), torch.stack([*map(gradient, batch)]))


@pytest.mark.parametrize("over", ["x", "weight", "mask_weights"])
def test_an_outer_gradient_passes_through_the_rows_of_experts(over):
    """Sorting the rows by expert is differentiated by the outer level too."""

    def value(changed: Tensor, inner_over: str) -> Tensor:
        layer = ROUTED.with_(**{over: changed})
        loss = torch.func.grad_and_value(lambda one: layer.with_(**{inner_over: one}).forward().sin().sum())
        return loss(getattr(layer, inner_over))[1]

    changed = getattr(ROUTED, over)
    expected = grad(lambda one: ROUTED.with_(**{over: one}).forward().sin().sum())(changed)
    for inner_over in ("x", "weight", "mask_weights"):
        torch.testing.assert_close(grad(value)(changed, inner_over), expected)


@pytest.mark.parametrize("of", NAMES)
@pytest.mark.parametrize("over", NAMES)
def test_derivatives_of_inner_transforms_are_refused_and_never_lost(of, over):
    """Also tangents of forward mode, which autograd disables inside of a Function."""
    tangent = torch.ones_like(INPUTS[over])
    with pytest.raises(RuntimeError, match=SECOND):
        grad(lambda value: inner(of, over, grad)(value).sin().sum())(INPUTS[over])
    value_of = inner(of, over, lambda loss: lambda changed: torch.func.vjp(loss, changed)[0])
    for function in (inner(of, over, grad), value_of):
        with pytest.raises(NotImplementedError, match="forward-mode AD"):
            torch.func.jvp(function, (INPUTS[over],), (tangent,))
