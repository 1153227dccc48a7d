"""Every wrong argument raises an error that names it, what it was and what it must be, in eager mode and in tracing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import strategies as s
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import make_layer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

mglu = torch.ops.mglu
LAYER_OPS = ("forward", "forward_ste", "forward_train", "backward")


def good(op: str) -> dict[str, object]:
    """The arguments of a valid call: x [5, 24], weight [10, 24], three masks, and route weights."""
    layer = make_layer(routed=True)
    if op == "pack_masks":
        return {"masks": layer.masks}
    if op == "unpack_masks":
        return {"packed_masks": layer.packed_masks, "in_features": 24}
    args = {"x": layer.x, "weight": layer.weight, "packed_masks": layer.packed_masks}
    tail = {"activation": "silu", "route_weights": layer.route_weights}
    if op == "forward_ste":
        args["mask_logits"] = layer.logits
        del args["packed_masks"]
    if op == "backward":
        saved = torch.zeros(3, 5, 10)
        args = {"grad_output": torch.ones(5, 10), **args, "gates": saved, "values": saved.clone()}
        tail |= {"needs": (True, True, True), "logits_dtype": None}
    return args | tail


# Valid x, weight, mask_logits, route_weights and packed_masks, from which the wrong arguments are made.
X, W, L, R = torch.zeros(5, 24), torch.zeros(10, 24), torch.zeros(3, 10, 24), torch.zeros(5, 3)
P = torch.zeros(10, 3, 3, dtype=torch.uint8)

_FLOATS = "must be float16, bfloat16, float32 or float64"
_LAYER_CASES = [
    ("x", X.long(), TypeError, rf"x: got dtype torch.int64, {_FLOATS}"),
    ("x", X.bool(), TypeError, rf"x: got dtype torch.bool, {_FLOATS}"),
    ("x", X.to(torch.complex64), TypeError, rf"x: got dtype torch.complex64, {_FLOATS}"),
    ("x", X.double(), TypeError, r"weight: got dtype torch.float32, must be x's dtype torch.float64"),
    ("x", torch.tensor(1.0), ValueError, r"x: got a scalar, must be \[\.\.\., in_features\]"),
    ("x", X[:, :23], ValueError, r"x: got last size 23 \(shape \[5, 23\]\), must be weight's in_features 24"),
    ("x", X[:, :1], ValueError, r"x: got last size 1 .* must be weight's in_features 24"),
    ("x", X.to("meta"), ValueError, r"device cpu, must be x's device meta"),
    ("weight", W.half(), TypeError, r"weight: got dtype torch.float16, must be x's dtype torch.float32"),
    ("weight", W[0], ValueError, r"weight: got shape \[24\], must be \[out_features, in_features\]"),
    ("weight", W[None], ValueError, r"weight: got shape \[1, 10, 24\], must be \[out_features, in_features\]"),
    ("weight", W.T, ValueError, r"x: got last size 24 .* must be weight's in_features 10"),
    ("weight", W.to("meta"), ValueError, r"weight: got device meta, must be x's device cpu"),
    ("activation", "swish", ValueError, r"activation: got 'swish', must be one of silu, gelu, gelu_tanh, relu, "),
    ("activation", "", ValueError, r"activation: got '', must be one of"),
    ("activation", "SiLU", ValueError, r"activation: got 'SiLU', must be one of"),
    ("route_weights", R[:, :2], ValueError, r"route_weights: got shape \[5, 2\], must be x's leading .* \[5, 3\]"),
    ("route_weights", R[:4], ValueError, r"route_weights: got shape \[4, 3\], must be .*\[5, 3\]"),
    ("route_weights", R[0], ValueError, r"route_weights: got shape \[3\], must be .*\[5, 3\]"),
    ("route_weights", R[None], ValueError, r"route_weights: got shape \[1, 5, 3\], must be .*\[5, 3\]"),
    ("route_weights", R.long(), TypeError, rf"route_weights: got dtype torch.int64, {_FLOATS}"),
    ("route_weights", R.to("meta"), ValueError, r"route_weights: got device meta, must be x's device cpu"),
]
_PACKED_CASES = [
    ("packed_masks", P.bool(), TypeError, r"packed_masks: got dtype torch.bool, must be torch.uint8; pack masks with"),
    ("packed_masks", P.int(), TypeError, r"packed_masks: got dtype torch.int32, must be torch.uint8"),
    ("packed_masks", P[..., 0], ValueError, r"packed_masks: got shape \[10, 3\], must be .*, 3, n_masks\]"),
    ("packed_masks", P[0, 0], ValueError, r"packed_masks: got shape \[3\], must be"),
    ("packed_masks", P[:, :2], ValueError, r"packed_masks: got shape \[10, 2, 3\], .* for in_features=24"),
    ("packed_masks", P[..., :0], ValueError, r"packed_masks: got n_masks=0, must be 1 to 16"),
    ("packed_masks", P[..., :1].expand(-1, -1, 17), ValueError, r"packed_masks: got n_masks=17, must be 1 to 16"),
]
_ROWS_CASES = [
    ("packed_masks", P[:9], ValueError, r"packed_masks: got shape \[9, 3, 3\], must be .*\[10, 3, n_masks\]"),
    ("packed_masks", P.to("meta"), ValueError, r"packed_masks: got device meta, must be x's device cpu"),
]
_LOGITS_CASES = [
    ("mask_logits", L > 0, TypeError, rf"mask_logits: got dtype torch.bool, {_FLOATS}"),
    ("mask_logits", L.long(), TypeError, rf"mask_logits: got dtype torch.int64, {_FLOATS}"),
    ("mask_logits", L[0], ValueError, r"mask_logits: got shape \[10, 24\], must be .* = \[n_masks, 10, 24\]"),
    ("mask_logits", L[:, :, 0], ValueError, r"mask_logits: got shape \[3, 10\], must be"),
    ("mask_logits", L[:, :9], ValueError, r"mask_logits: got shape \[3, 9, 24\], must be"),
    ("mask_logits", L[..., :16], ValueError, r"mask_logits: got shape \[3, 10, 16\], must be"),
    ("mask_logits", L[:0], ValueError, r"mask_logits: got n_masks=0, must be 1 to 16"),
    ("mask_logits", L[:1].expand(17, -1, -1), ValueError, r"mask_logits: got n_masks=17, must be 1 to 16"),
    ("mask_logits", L.to("meta"), ValueError, r"mask_logits: got device meta, must be x's device cpu"),
]
_MASKS_CASES = [
    (
        "masks",
        torch.ones(24),
        ValueError,
        r"masks: got shape \[24\], one value per channel; MGLU needs one bit per weight",
    ),
    ("masks", torch.tensor(1), ValueError, r"masks: got shape \[\], must be \[n_masks, out_features, in_features\]"),
    ("masks", L[None] > 0, ValueError, r"masks: got shape \[1, 3, 10, 24\], must be"),
    ("masks", L[:0] > 0, ValueError, r"masks: got n_masks=0, must be 1 to 16"),
    ("masks", L[:1].expand(17, -1, -1) > 0, ValueError, r"masks: got n_masks=17, must be 1 to 16"),
    ("masks", L.to(torch.complex64), TypeError, r"masks: got dtype torch.complex64, must be bool, or integer or real"),
]
_BACKWARD_CASES = [
    ("grad_output", torch.ones(5, 9), ValueError, r"grad_output: got shape \[5, 9\], must be \[5, 10\]"),
    ("grad_output", torch.ones(5, 10).half(), TypeError, r"grad_output: got dtype torch.float16, must be x's dtype"),
    ("gates", torch.ones(5, 10), ValueError, r"gates: got shape \[5, 10\], must be \[3, 5, 10\]"),
    ("values", torch.ones(2, 5, 10), ValueError, r"values: got shape \[2, 5, 10\], must be \[3, 5, 10\]"),
    ("values", torch.ones(3, 5, 10).double(), TypeError, r"values: got dtype torch.float64, must be x's dtype"),
    ("gates", torch.ones(3, 5, 10, device="meta"), ValueError, r"gates: got device meta, must be x's device cpu"),
]
_CASES_BY_OP = {
    "pack_masks": _MASKS_CASES,
    "unpack_masks": _PACKED_CASES,
    "forward": _LAYER_CASES + _PACKED_CASES + _ROWS_CASES,
    "forward_ste": _LAYER_CASES + _LOGITS_CASES,
    "forward_train": _LAYER_CASES + _PACKED_CASES + _ROWS_CASES,
    "backward": _LAYER_CASES + _PACKED_CASES + _ROWS_CASES + _BACKWARD_CASES,
}
CASES = [(op, *case) for op, cases in _CASES_BY_OP.items() for case in cases]
IDS = [f"{op}-{name}-{index}" for index, (op, name, *_) in enumerate(CASES)]
each_case = pytest.mark.parametrize(("op", "name", "value", "error", "message"), CASES, ids=IDS)


def run(op: str, **changes: object) -> object:
    return getattr(mglu, op)(**(good(op) | changes))


def assert_good_call_works(op: str) -> None:
    results = run(op)
    for result in results if isinstance(results, tuple) else (results,):
        assert not result.is_floating_point() or result.isfinite().all()


@each_case
def test_eager_mode_names_the_wrong_argument(op, name, value, error, message):
    with pytest.raises(error, match=message):
        run(op, **{name: value})
    assert_good_call_works(op)


@pytest.mark.parametrize("trained", ["x", "weight", "route_weights"])
@pytest.mark.parametrize("op", ["forward", "forward_ste"])
def test_a_call_that_records_gradients_names_the_wrong_argument(op, trained):
    for name, value, error, message in _CASES_BY_OP[op]:
        args = good(op) | {name: value}
        if args[trained].is_floating_point():
            args[trained] = args[trained].detach().requires_grad_()
        with pytest.raises(error, match=message):
            getattr(mglu, op)(**args)


@each_case
def test_fake_tensors_name_the_wrong_argument(op, name, value, error, message):
    with FakeTensorMode() as mode:
        args = good(op) | {name: value}
        args = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in args.items()}
        with pytest.raises(error, match=message):
            run(op, **args)


@pytest.mark.parametrize(
    ("op", "name", "value", "error", "message"), [case for case in CASES if "device" not in case[-1]]
)
def test_meta_tensors_name_the_wrong_argument(op, name, value, error, message):
    args = good(op) | {name: value}
    with pytest.raises(error, match=message):
        run(op, **{k: v.to("meta") if isinstance(v, Tensor) else v for k, v in args.items()})


@pytest.mark.parametrize("op", ["pack_masks", "unpack_masks", "forward", "forward_ste"])
def test_torch_compile_names_the_wrong_argument(op):
    """Dynamo's error contains the message."""
    for name, value, _, message in _CASES_BY_OP[op]:
        if value is not None and isinstance(value, Tensor) and value.is_meta:
            continue
        args = good(op) | {name: value}
        tensors = {k: v for k, v in args.items() if isinstance(v, Tensor)}
        rest = {k: v for k, v in args.items() if k not in tensors}
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(lambda t, op=op, rest=rest: getattr(mglu, op)(**t, **rest), backend="eager", fullgraph=True)(
                tensors
            )
    torch._dynamo.reset()
    assert_good_call_works(op)


@pytest.mark.parametrize("value", [2, -1, 0.5, 1e-3, float("nan"), float("inf")])
def test_masks_that_are_not_binary_are_refused(value):
    masks = torch.zeros(2, 3, 9)
    masks[1, 2, 4] = value
    if not isinstance(value, int):
        message = rf"masks: 1 of 54 values are neither 0 nor 1 \(the first is {masks[1, 2, 4].item()}\)"
    else:
        masks, message = masks.long(), rf"1 of 54 values are neither 0 nor 1 \(the first is {value}\)"
    with pytest.raises(ValueError, match=message):
        mglu.pack_masks(masks)
    assert_good_call_works("pack_masks")


@pytest.mark.parametrize("op", ["pack_masks", "unpack_masks", *LAYER_OPS[:3]])
def test_none_instead_of_a_tensor_is_refused(op):
    for name in good(op):
        if name in ("x", "weight", "masks", "packed_masks", "mask_logits"):
            with pytest.raises(TypeError, match=f"^{name}: got None, must be a tensor"):
                run(op, **{name: None})


def attempt(op: Callable[..., object], *args: object) -> tuple[object, str | None]:
    """The result of a call and None, or None and the message of its TypeError or ValueError."""
    try:
        return op(*args), None
    except (TypeError, ValueError) as error:
        return None, str(error)


SIZES = st.integers(0, 4)
SHAPES = st.lists(SIZES, max_size=4).map(tuple)
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
    route = data.draw(st.none() | any_tensor((tokens, n), torch.float32))
    activation = data.draw(st.sampled_from([*s.ACTIVATION_NAMES, "none"]))
    result, refusal = attempt(getattr(mglu, op), *args, activation, route)
    if refusal is not None:
        names = ("x", "weight", "packed_masks", "mask_logits", "route_weights", "activation")
        assert refusal.startswith(tuple(f"{name}: got" for name in names))
        return
    result = result[0] if isinstance(result, tuple) else result
    x, weight = args[:2]
    assert x.shape[-1:] == weight.shape[1:]
    assert result.shape == (*x.shape[:-1], weight.shape[0])
    assert result.dtype is x.dtype is weight.dtype
    assert result.device == x.device == args[2].device
    if not x.is_meta:
        if op != "forward_ste":
            args[2] = mglu.unpack_masks(args[2], h)
        expected = s.naive(*(args if op != "forward_ste" else (x, weight, args[2] > 0)), activation, route)
        torch.testing.assert_close(result, expected.to(result.dtype))


@s.examples(200)
@given(st.data())
def test_any_masks_are_packed_exactly_or_refused(data):
    shape, dtype = data.draw(SHAPES), data.draw(ANY_DTYPE)
    values = data.draw(st.sampled_from([(0, 1), (0, 1, 2), (0, 3), (1,)]))
    count = max(1, torch.Size(shape).numel())
    masks = torch.tensor([values[i % len(values)] for i in range(count)])[: torch.Size(shape).numel()]
    masks = masks.to(dtype).view(shape)
    packed, refusal = attempt(mglu.pack_masks, masks)
    if refusal is not None:
        assert refusal.startswith("masks: ")
        return
    unpacked = mglu.unpack_masks(packed, shape[-1])
    assert torch.equal(unpacked.to(dtype), masks if len(shape) == 3 else masks[None])


@pytest.mark.parametrize(
    ("logits", "error", "message"),
    [
        (L > 0, TypeError, r"mask_logits: got dtype torch.bool, must be float16"),
        (L[0], ValueError, r"mask_logits: got shape \[10, 24\], must be \[n_masks, out_features, in_features\]$"),
        (L[:0], ValueError, r"mask_logits: got n_masks=0, must be 1 to 16"),
    ],
)
def test_logits_that_cannot_be_packed_are_refused(logits: torch.Tensor, error: type[Exception], message: str) -> None:
    for tensor in (logits, logits.to("meta")):
        with pytest.raises(error, match=message):
            torch.ops.mglu.pack_logits(tensor)
