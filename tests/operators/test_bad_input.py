"""Every wrong argument raises an error that says its name, what it was and what it must be, also in tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.given import OPERATORS
from tests.support import layers as s
from tests.support.layers import OPS, OPS_OF_EXPERTS, arguments_of, make_layer, routing_of

mglu = torch.ops.mglu

# Operators, separated by spaces. `forward:fp8_row:fp8_token` is `forward` with the weight and x in these formats.
DENSE = "forward forward_ste forward_train"
SORTED = "grouped_forward grouped_forward_ste grouped_forward_train"
LAYERS = f"{DENSE} experts_forward {SORTED}"
BACKWARD = "backward grouped_backward"
STE = "forward_ste grouped_forward_ste"
WITH_X = f"{LAYERS} {BACKWARD}"
OF_ONE = f"{DENSE} backward"
OF_SORTED = f"{SORTED} grouped_backward"
OF_EXPERTS = f"experts_forward {OF_SORTED}"
OF_IDS = "experts_forward experts_down"
PACKED = "forward forward_train backward"
UNPACK = f"{PACKED} unpack_masks"
EACH_PACKED = "experts_forward grouped_forward grouped_forward_train grouped_backward"
DOWN = "experts_down experts_down_backward"


def good(op: str) -> dict[str, Any]:
    """The arguments of a valid call with weights of 10 x 24, three masks, and mask weights.

    x is [5, 24], or has 6 tokens with 2 of 4 experts each, or 12 rows that are sorted by expert.
    """
    op, *formats = op.split(":")
    stored = dict(zip(("weight_format", "activation_format"), formats, strict=False))
    routing = routing_of(op)
    layer = make_layer((6,) if routing else (5,), routing=routing, weighted=True, **stored)
    return arguments_of(op, layer) | ({"weight_scale": layer.weight_scale, **stored} if stored else {})


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def first(tensor: Tensor) -> Tensor:
    return tensor[0]


def no(tensor: Tensor) -> Tensor:
    return tensor[:0]


def most(tensor: Tensor) -> Tensor:
    return tensor[:-1]


def complex64(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex64)


def fp8(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float8_e4m3fn)


FLOATS = "must be float16, bfloat16, float32 or float64"
SCALAR = torch.tensor(1.0)
TABLE: list[tuple[str, str, Any, str]] = [
    # Operators, an argument, its wrong value (or a function of the right one), and the error after the argument's name.
    (WITH_X, "x", Tensor.long, rf"got dtype torch.int64, {FLOATS}"),
    (WITH_X, "x", complex64, rf"got dtype torch.complex64, {FLOATS}"),
    (WITH_X, "x", lambda x: x[:, :1], r"got last size 1 \(shape \[(5|6|12), 1\]\), must be weight's in_features 24"),
    ("forward:int4_group", "x", lambda x: x[:, :23], "got last size 23 .* must be weight's in_features 24"),
    (OF_ONE, "x", SCALAR, r"got a scalar, must be \[\.\.\., in_features\]"),
    (f"experts_forward {SORTED}", "x", lambda x: x[None], r"got shape \[1, \d+, 24\], must be \[(T|S), in_features\]"),
    (WITH_X, "weight", Tensor.half, "got dtype torch.float16, must be x's dtype torch.float32"),
    (WITH_X, "weight", meta, "got device meta, must be x's device cpu"),
    (OF_ONE, "weight", first, r"got shape \[24\], must be \[out_features, in_features\]"),
    (OF_EXPERTS, "weight", first, r"got shape \[10, 24\], must be \[E, \.\.\.\]"),
    (OF_EXPERTS, "weight", no, r"got shape \[0, 10, 24\], must be .* at least 1 expert"),
    ("forward:int4_group", "weight", lambda w: w[:, 0], r"got shape \[10\], must be \[out_features, in_feat"),
    (LAYERS, "activation", "swish", "got 'swish', must be one of silu, gelu, gelu_tanh, relu, "),
    (LAYERS, "mask_weights", Tensor.long, rf"got dtype torch.int64, {FLOATS}"),
    (LAYERS, "mask_weights", meta, "got device meta, must be x's device cpu"),
    (LAYERS, "mask_weights", most, r"got shape .*, must be .*\[(5|6, 2|12), 3\]"),
    (LAYERS, "mask_weights", first, r"got shape .*, must be .*\[(5|6, 2|12), 3\]"),
    (DENSE, "mask_weights", lambda r: r[:, :2], r"got shape \[5, 2\], must be the result's leading .* \[5, 3\]"),
    (OF_SORTED, "offs", Tensor.long, "got dtype torch.int64, must be torch.int32, as for torch.nn.functional"),
    (OF_SORTED, "offs", most, r"got shape \[3\], must be \[4\], the end of each expert's rows"),
    (OF_SORTED, "offs", meta, "got device meta, must be x's device cpu"),
    (OF_IDS, "expert_ids", Tensor.float, "got dtype torch.float32, must be torch.int32 or torch.int64"),
    (OF_IDS, "expert_ids", most, r"got shape \[5, 2\], must be \[T, K\] = \[6, K\]"),
    (OF_IDS, "expert_ids", lambda ids: ids[:, :0], r"got shape \[6, 0\], .* K of at least 1"),
    (OF_IDS, "expert_ids", meta, "got device meta, must be (x|y)'s device cpu"),
    (f"{UNPACK} {EACH_PACKED}", "packed_masks", Tensor.bool, "got dtype torch.bool, must be torch.uint8"),
    (UNPACK, "packed_masks", lambda p: p[..., 0], r"got shape \[10, 3\], must be .*, 3, n_masks\]"),
    (UNPACK, "packed_masks", lambda p: p[:, :2], r"got shape \[10, 2, 3\], .* for in_features=24"),
    (UNPACK, "packed_masks", lambda p: p[..., :0], "got n_masks=0, must be 1 to 16"),
    (UNPACK, "packed_masks", lambda p: p[..., :1].expand(-1, -1, 17), "got n_masks=17, must be 1 to 16"),
    (PACKED, "packed_masks", most, r"got shape \[9, 3, 3\], must be .*\[10, 3, n_masks\]"),
    (f"{PACKED} {EACH_PACKED}", "packed_masks", meta, "got device meta, must be x's device cpu"),
    (EACH_PACKED, "packed_masks", most, r"got shape \[3, 10, 3, 3\], must begin with E = 4 experts"),
    (EACH_PACKED, "packed_masks", lambda p: p[:, :9], r"got shape \[9, 3, 3\], must be .*\(of each expert\)"),
    ("unpack_masks", "in_features", -1, "got -1, must be at least 0"),
    (f"pack_logits pack_expert_logits {STE}", "mask_logits", Tensor.bool, f"got dtype torch.bool, {FLOATS}"),
    ("pack_logits forward_ste", "mask_logits", no, "got n_masks=0, must be 1 to 16"),
    ("pack_logits forward_ste", "mask_logits", lambda m: m[:1].expand(17, -1, -1), "got n_masks=17, must be 1 to 16"),
    ("pack_logits", "mask_logits", first, r"got shape \[10, 24\], must be \[n_masks, out_f.*, in_features\]$"),
    ("pack_expert_logits", "mask_logits", first, r"got shape \[3, 10, 24\], must be \[E, n_masks"),
    ("pack_expert_logits", "mask_logits", no, r"got shape \[0, 3, 10, 24\], .* at least 1 expert"),
    ("forward_ste", "mask_logits", first, r"got shape \[10, 24\], must be .* = \[n_masks, 10, 24\]"),
    ("forward_ste", "mask_logits", lambda m: m[:, :9], r"got shape \[3, 9, 24\], must be"),
    (STE, "mask_logits", meta, "got device meta, must be x's device cpu"),
    ("grouped_forward_ste", "mask_logits", most, r"got shape \[3, 3, 10, 24\], must begin with E = 4 experts"),
    ("grouped_forward_ste", "mask_logits", lambda m: m[:, :0], "got n_masks=0, must be 1 to 16"),
    ("pack_masks", "masks", lambda m: m[0, 0], r"got shape \[24\], one value per channel; MGLU needs one bit"),
    ("pack_masks", "masks", lambda m: m[None], r"got shape \[1, 3, 10, 24\], must be \[n_masks, out_features, in_feat"),
    ("pack_masks", "masks", no, "got n_masks=0, must be 1 to 16"),
    ("pack_masks", "masks", lambda m: m[:1].expand(17, -1, -1), "got n_masks=17, must be 1 to 16"),
    ("pack_masks", "masks", complex64, "got dtype torch.complex64, must be bool, or integer or real"),
    ("forward experts_forward experts_down", "weight_format", "fp7", "got 'fp7', must be one of dense, fp8_row"),
    ("forward:fp8_row", "weight_format", "fp7", "got 'fp7', must be one of dense, fp8_row"),
    ("forward:int8_row", "weight", fp8, "got dtype torch.float8_e4m3fn, must be torch.int8 for .*'int8_row'"),
    ("forward", "weight", fp8, "got dtype torch.float8_e4m3fn, must be x's dtype torch.float32"),
    ("forward:fp8_row:fp8_token", "x", Tensor.double, "got dtype torch.float64, must be float16"),
    ("forward", "weight_scale", torch.ones(10), r"got a tensor of shape \[10\], must be None for .*='dense'"),
    (OF_IDS, "weight_scale", torch.ones(4, 10), r"got a tensor of shape \[10\], must be None"),
    ("forward:fp8_row", "weight_scale", None, r"got None, must be torch\.float32 \[10\]"),
    ("forward:fp8_row", "weight_scale", Tensor.half, "got dtype torch.float16, must"),
    ("forward:fp8_row", "weight_scale", lambda s: s[:, None], r"got shape \[10, 1\], must be \[10"),
    ("forward:fp8_block", "weight_scale", torch.ones(2, 2), r"got shape \[2, 2\], must be \[1, 1\]"),
    ("forward:fp8_row", "activation_format", "fp8", "got 'fp8', must be one of dense, fp8_token"),
    ("forward", "activation_format", "fp8_token", "got 'fp8_token', must be dense for weight_format='dense'"),
    ("forward:int8_row", "activation_format", "fp8_token", "got 'fp8_token', must be dense for .*='int8_row'"),
    ("forward:int4_group", "activation_format", "fp8_token", "got 'fp8_token', must be dense for .*='int4_group'"),
    (BACKWARD, "needs", [True], r"got \[True\], must be 2 bools, for the gradients of x, weight"),
    (BACKWARD, "grad_output", lambda g: g[:, :9], r"got shape \[\d+, 9\], must be \[(5|12), 10\]"),
    (BACKWARD, "grad_output", SCALAR, r"got shape \[\], must be \[(5|12), 10\]"),
    (BACKWARD, "grad_output", Tensor.half, "got dtype torch.float16, must be x's dtype"),
    (BACKWARD, "partials", SCALAR, r"got shape \[\], must be \[(5|12), 7, 10\]"),
    (BACKWARD, "partials", lambda p: p[:, 0], r"got shape \[\d+, 10\], must be \[(5|12), 7, 10\]"),
    (BACKWARD, "partials", lambda p: p[:, :4], r"got shape \[\d+, 4, 10\], must be \[(5|12), 7, 10\]"),
    (BACKWARD, "partials", Tensor.double, "got dtype torch.float64, must be x's dtype"),
    (BACKWARD, "partials", meta, "got device meta, must be x's device"),
    (BACKWARD, "logits_dtype", torch.int64, f"got torch.int64, {FLOATS}, or None"),
    (BACKWARD, "mask_weights_dtype", torch.bool, f"got torch.bool, {FLOATS}, or None"),
    (DOWN, "y", torch.zeros(6, 3, 10), r"got shape \[6, 3, 10\], must begin with expert_ids' \[6, 2\]"),
    (DOWN, "y", torch.zeros(6, 10), r"got shape \[6, 10\], must be \[T, K, in_features\]"),
    (DOWN, "y", lambda y: y[..., :9], "got last size 9 .*, must be weight's in_features 10"),
    (DOWN, "expert_weights", lambda w: w[:, 0], r"got shape \[6\], must be expert_ids' \[6, 2\]"),
    (DOWN, "expert_weights", lambda w: w[..., None], r"got shape \[6, 2, 1\], must be expert_ids' \[6, 2\]"),
    (DOWN, "expert_weights", Tensor.long, "got dtype torch.int64, must be float16, bfloat16"),
    ("experts_down_backward", "needs", [True] * 4, r"got \[.*\], must be 3 bools, for the gradients of y, weight, "),
    ("experts_down_backward", "grad_output", SCALAR, r"got shape \[\], must be \[6, 24\]"),
    ("experts_down_backward", "grad_output", lambda g: g[:, :9], r"got shape \[6, 9\], must be \[6, 24\]"),
    ("experts_down_backward", "grad_output", Tensor.half, "got dtype torch.float16, must be y's dtype"),
]
CASES = [(op, name, value, f"^{name}: {message}") for ops, name, value, message in TABLE for op in ops.split()]
IDS = [f"{op}-{name}-{index}" for index, (op, name, *_) in enumerate(CASES)]


def wrong_calls(op: str) -> Iterator[tuple[str, dict[str, Any], type[Exception], str]]:
    """The wrong argument, all arguments, the error and the message of each entry for `op`, in any format."""
    for case in CASES:
        if case[0].partition(":")[0] == op:
            yield case[1], *wrong_call(*case)


def wrong_call(op: str, name: str, value: Any, message: str) -> tuple[dict[str, Any], type[Exception], str]:
    """A wrong dtype is a TypeError. Every other wrong value is a ValueError."""
    args = good(op)
    args[name] = value(args[name]) if callable(value) else value
    return args, TypeError if "dtype" in message else ValueError, message


def operator(op: str) -> Any:
    return getattr(mglu, op.partition(":")[0])


def assert_good_call_works(op: str) -> None:
    results = operator(op)(**good(op))
    for result in results if isinstance(results, tuple) else (results,):
        assert not result.is_floating_point() or result.isfinite().all()


@pytest.mark.parametrize("kind", ["real", "fake", "meta"])
@pytest.mark.parametrize(("op", "name", "value", "message"), CASES, ids=IDS)
def test_an_error_names_the_wrong_argument(op: str, name: str, value: Any, message: str, kind: str) -> None:
    if kind == "meta" and "device" in message:
        return  # all tensors are on the meta device, so devices cannot differ
    convert = {"real": lambda t: t, "fake": FakeTensorMode().from_tensor, "meta": meta}[kind]
    args, error, message = wrong_call(op, name, value, message)
    with pytest.raises(error, match=message):
        operator(op)(**{k: convert(v) if isinstance(v, Tensor) else v for k, v in args.items()})
    assert_good_call_works(op)


@pytest.mark.parametrize("trained", ["x", "weight", "mask_weights"])
@pytest.mark.parametrize("op", ["forward", "forward_ste", "grouped_forward", "grouped_forward_ste"])
def test_a_call_that_records_gradients_names_the_wrong_argument(op: str, trained: str) -> None:
    for _, args, error, message in wrong_calls(op):
        if args[trained].is_floating_point() and args[trained].itemsize > 1:
            args[trained] = args[trained].detach().requires_grad_()
        with pytest.raises(error, match=message):
            operator(op)(**args)


@pytest.mark.parametrize("op", ["pack_masks", "unpack_masks", "forward", "forward_ste"])
def test_torch_compile_names_the_wrong_argument(op: str) -> None:
    """Dynamo raises an error of its own class, whose text contains the message."""
    for name, args, _, message in wrong_calls(op):
        if "device" in message or "weight_format" in args or name == "activation_format":
            continue
        tensors = {k: v for k, v in args.items() if isinstance(v, Tensor)}
        rest = {k: v for k, v in args.items() if k not in tensors}

        def call(tensors: dict[str, Tensor], rest: dict[str, object] = rest) -> object:
            return operator(op)(**tensors, **rest)

        torch._dynamo.reset()
        with pytest.raises(Exception, match=message.removeprefix("^")):
            torch.compile(call, backend="eager", fullgraph=True)(tensors)
    torch._dynamo.reset()
    assert_good_call_works(op)


@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_explain_dispatch_names_the_wrong_argument(op: str) -> None:
    for _, args, error, message in wrong_calls(op):
        with pytest.raises(error, match=message):
            mglu_ops.explain_dispatch(operator(op), **args)
        if op == "forward":
            with pytest.raises(error, match=message):
                mglu_ops.explain_dispatch(**args)


FOR_INFERENCE = r"must be called under torch\.no_grad\(\) or detached, because activation_format='fp8_token' is for"


@pytest.mark.parametrize(
    ("op", "name", "message"),
    [
        *((f"{op}:fp8_row:fp8_token", "x", FOR_INFERENCE) for op in ("forward", "experts_forward", "grouped_forward")),
        ("forward:fp8_row:fp8_token", "mask_weights", FOR_INFERENCE),
        *((f"{op}:fp8_row", "weight_scale", "weight_format='fp8_row'") for op in ("forward", "grouped_forward")),
        ("forward:fp8_row", "weight", "weight_format='fp8_row'"),
        ("experts_forward:fp8_row", "weight", "weight_format='fp8_row'"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gradients_that_are_refused(op: str, name: str, message: str, device: str) -> None:
    args = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in good(op).items()}
    args[name].requires_grad_()
    with pytest.raises(ValueError, match=f"^{name}: got a tensor that requires a gradient, .*{message}"):
        operator(op)(**args)
    with torch.no_grad():
        assert operator(op)(**args).shape[-1] == 10


def test_explain_dispatch_names_missing_and_unknown_arguments():
    args = good("forward")
    del args["x"]
    with pytest.raises(
        TypeError, match=r"^mglu::forward: must get x, weight, .*; missing \['x'\], unknown \['bias'\]$"
    ):
        mglu_ops.explain_dispatch(**args, bias=None)


def test_explain_dispatch_names_the_operators_that_it_explains():
    with pytest.raises(
        ValueError, match=r"^operator: got mglu::pack_masks, must be mglu::\{forward, .*, experts_down\}"
    ):
        mglu_ops.explain_dispatch(mglu.pack_masks, torch.zeros(1, 1))


@pytest.mark.parametrize("value", [2, -1, 0.5, 1e-3, float("nan"), float("inf")])
def test_masks_that_are_not_binary_are_refused(value):
    masks = torch.zeros(2, 3, 9, dtype=torch.int64 if isinstance(value, int) else torch.float32)
    masks[1, 2, 4] = value
    message = rf"masks: 1 of 54 values are neither 0 nor 1 \(the first is {masks[1, 2, 4].item()}\)"
    with pytest.raises(ValueError, match=message):
        mglu.pack_masks(masks)
    assert_good_call_works("pack_masks")


def tensors_of(op: str) -> list[str]:
    return [name for name, value in good(op).items() if isinstance(value, Tensor)]


TENSORS = [(op, name) for op in OPS + OPS_OF_EXPERTS for name in tensors_of(op)]


@pytest.mark.parametrize(("op", "name"), [case for case in TENSORS if case[1] != "mask_weights"])
def test_none_instead_of_a_tensor_is_refused(op: str, name: str) -> None:
    for context in (nullcontext(), torch.autocast("cpu")):
        for trained in (None, "x", "weight"):
            args = good(op)
            if trained in args:
                args[trained].requires_grad_()
            with context, pytest.raises(TypeError, match=f"^{name}: got None, must be a tensor"):
                getattr(mglu, op)(**(args | {name: None}))


def _other_layouts(op: str, name: str) -> list[str]:
    """The layouts, other than dense, that an argument can be converted to."""
    tensor = good(op)[name]
    nested = ["nested", "jagged"] if tensor.dim() > 1 else []
    matrix_layouts = ["sparse_csr"] if tensor.dim() == 2 else []
    return ["sparse_coo", *nested, *matrix_layouts, *(["mkldnn"] if tensor.is_floating_point() else [])]


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    if layout in ("nested", "jagged"):
        kind = torch.jagged if layout == "jagged" else torch.strided
        return torch.nested.nested_tensor([tensor[0], tensor[0]], layout=kind)
    return {"sparse_coo": tensor.to_sparse, "sparse_csr": tensor.to_sparse_csr, "mkldnn": tensor.to_mkldnn}[layout]()


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of its own sparse and nested tensors
@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_tensors_of_another_layout_are_refused(op: str, name: str) -> None:
    for layout in _other_layouts(op, name):
        message = rf"^{name}: got a tensor of layout {layout}, must be a dense tensor \(torch\.strided\)"
        for trained in (None, "x", "weight"):
            args = good(op)
            if trained in args and trained != name:
                args[trained] = args[trained].requires_grad_()
            args[name] = in_layout(args[name], layout)
            with pytest.raises(TypeError, match=message):
                getattr(mglu, op)(**args)
    assert_good_call_works(op)


@pytest.mark.parametrize("is_freed", [True, False])
@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_a_tensor_whose_storage_was_resized_is_refused(op: str, name: str, is_freed: bool) -> None:
    """FSDP frees storages by resizing them. test_repeated_calls.py tests calls that skip most other checks."""
    dispatch._prepared.clear()
    args = good(op) | {name: torch.stack([good(op)[name]] * 2)[1]}
    needed = 2 * args[name].nbytes
    found = 0 if is_freed else needed - 1
    args[name].untyped_storage().resize_(found)
    message = rf"^{name}: got a tensor of shape \[.*\] whose storage has {found} bytes, must have {needed}; the storage"
    with pytest.raises(ValueError, match=message):
        getattr(mglu, op)(**args)
    assert_good_call_works(op)


def test_a_switch_that_is_not_a_bool_is_refused() -> None:
    for call, name in (
        (mglu_ops.set_batch_invariant_mode, "mode"),
        (lambda value: mglu_ops.enable_fusion(strict=value), "strict"),
        (lambda value: mglu_ops.enable_fusion(assume_binary=value), "assume_binary"),
    ):
        with pytest.raises(TypeError, match=f"^{name}: got 'off', must be True or False"):
            call("off")
    assert not mglu_ops.is_batch_invariant_mode_enabled()


def attempt(op: Callable[..., object], *args: object) -> tuple[object, str | None]:
    """The pair (result, None), or (None, message) if the call raises a TypeError or ValueError."""
    try:
        return op(*args), None
    except (TypeError, ValueError) as error:
        return None, str(error)


SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
ANY_DTYPE = st.sampled_from(
    [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.bool, torch.int64, torch.complex64]
)
ANY_DEVICE = st.sampled_from(["cpu", "cpu", "cpu", "meta"])


@st.composite
def any_tensor(draw: st.DrawFn, right: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Draw a tensor of the right shape and dtype, or of any shape, dtype and device."""
    shape = right if draw(st.booleans()) else draw(SHAPES)
    dtype = dtype if draw(st.booleans()) else draw(ANY_DTYPE)
    return torch.ones(shape, dtype=dtype, device=draw(ANY_DEVICE))


@s.examples(300)
@given(st.data(), st.sampled_from(["forward", "forward_ste", "forward_train"]))
def test_any_arguments_give_the_right_result_or_an_error_that_names_one(data, op):
    tokens, d, h, n = (data.draw(st.integers(0, 3)) for _ in range(4))
    masks = ((n, d, h), torch.float32) if op == "forward_ste" else ((d, -(-h // 8), n), torch.uint8)
    args = [data.draw(any_tensor(*spec)) for spec in (((tokens, h), torch.float32), ((d, h), torch.float32), masks)]
    mask_weight = data.draw(st.none() | any_tensor((tokens, n), torch.float32))
    activation = data.draw(st.sampled_from([*s.ACTIVATION_NAMES, "none"]))
    result, refusal = attempt(getattr(mglu, op), *args, activation, mask_weight)
    if refusal is not None:
        names = ("x", "weight", "packed_masks", "mask_logits", "mask_weights", "activation")
        assert refusal.startswith(tuple(f"{name}: got" for name in names))
        return
    result = result[0] if isinstance(result, tuple) else result
    x, weight, given_masks = args
    assert x.shape[-1:] == weight.shape[1:]
    assert result.shape == (*x.shape[:-1], weight.shape[0])
    assert result.dtype is x.dtype is weight.dtype
    assert result.device == x.device == given_masks.device
    if not x.is_meta:
        bits = given_masks > 0 if op == "forward_ste" else mglu.unpack_masks(given_masks, h)
        torch.testing.assert_close(result, s.naive(x, weight, bits, activation, mask_weight).to(result.dtype))


@s.examples(200)
@given(st.data())
def test_any_masks_are_packed_exactly_or_refused(data):
    shape, dtype = data.draw(SHAPES), data.draw(ANY_DTYPE)
    values = data.draw(st.sampled_from([(0, 1), (0, 1, 2), (0, 3), (1,)]))
    count = torch.Size(shape).numel()
    masks = torch.tensor([values[i % len(values)] for i in range(count)]).to(dtype).view(shape)
    packed, refusal = attempt(mglu.pack_masks, masks)
    if refusal is not None:
        assert refusal.startswith("masks: ")
        return
    unpacked = mglu.unpack_masks(packed, shape[-1])
    assert torch.equal(unpacked.to(dtype), masks if len(shape) == 3 else masks[None])
