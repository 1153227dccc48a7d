"""Every wrong argument raises an error that says its name, what it was and what it must be, also in tracing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

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
from tests.support.layers import OPS, arguments_of, make_layer

mglu = torch.ops.mglu


def good(op: str) -> dict[str, object]:
    """The arguments of a valid call: x [5, 24], weight [10, 24], three masks, and mask weights."""
    return arguments_of(op, make_layer(weighted=True))


# Valid x, weight, mask_logits, mask_weights and packed_masks. Wrong arguments are made from them.
X, W, L, R = torch.zeros(5, 24), torch.zeros(10, 24), torch.zeros(3, 10, 24), torch.zeros(5, 3)
P = torch.zeros(10, 3, 3, dtype=torch.uint8)

_FLOATS = "must be float16, bfloat16, float32 or float64"
_X_AND_W_CASES = [
    ("x", X.long(), TypeError, rf"x: got dtype torch.int64, {_FLOATS}"),
    ("x", X.to(torch.complex64), TypeError, rf"x: got dtype torch.complex64, {_FLOATS}"),
    ("x", torch.tensor(1.0), ValueError, r"x: got a scalar, must be \[\.\.\., in_features\]"),
    ("x", X[:, :1], ValueError, r"x: got last size 1 \(shape \[5, 1\]\), must be weight's in_features 24"),
    ("weight", W.half(), TypeError, r"weight: got dtype torch.float16, must be x's dtype torch.float32"),
    ("weight", W[0], ValueError, r"weight: got shape \[24\], must be \[out_features, in_features\]"),
    ("weight", W.to("meta"), ValueError, r"weight: got device meta, must be x's device cpu"),
]
_LAYER_CASES = [
    *_X_AND_W_CASES,
    ("activation", "swish", ValueError, r"activation: got 'swish', must be one of silu, gelu, gelu_tanh, relu, "),
    ("mask_weights", R[:, :2], ValueError, r"mask_weights: got shape \[5, 2\], must be x's leading .* \[5, 3\]"),
    ("mask_weights", R[0], ValueError, r"mask_weights: got shape \[3\], must be .*\[5, 3\]"),
    ("mask_weights", R.long(), TypeError, rf"mask_weights: got dtype torch.int64, {_FLOATS}"),
    ("mask_weights", R.to("meta"), ValueError, r"mask_weights: got device meta, must be x's device cpu"),
]
_PACKED_CASES = [
    ("packed_masks", P.bool(), TypeError, r"packed_masks: got dtype torch.bool, must be torch.uint8; pack masks with"),
    ("packed_masks", P[..., 0], ValueError, r"packed_masks: got shape \[10, 3\], must be .*, 3, n_masks\]"),
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
    ("mask_logits", L[:0], ValueError, r"mask_logits: got n_masks=0, must be 1 to 16"),
    ("mask_logits", L[:1].expand(17, -1, -1), ValueError, r"mask_logits: got n_masks=17, must be 1 to 16"),
]
_STE_CASES = [
    ("mask_logits", L[0], ValueError, r"mask_logits: got shape \[10, 24\], must be .* = \[n_masks, 10, 24\]"),
    ("mask_logits", L[:, :9], ValueError, r"mask_logits: got shape \[3, 9, 24\], must be"),
    ("mask_logits", L.to("meta"), ValueError, r"mask_logits: got device meta, must be x's device cpu"),
]
_MASKS_CASES = [
    ("masks", X[0], ValueError, r"masks: got shape \[24\], one value per channel; MGLU needs one bit per weight"),
    ("masks", L[None] > 0, ValueError, r"masks: got shape \[1, 3, 10, 24\], must be \[n_masks, out_features, in_feat"),
    ("masks", L[:0] > 0, ValueError, r"masks: got n_masks=0, must be 1 to 16"),
    ("masks", L[:1].expand(17, -1, -1) > 0, ValueError, r"masks: got n_masks=17, must be 1 to 16"),
    ("masks", L.to(torch.complex64), TypeError, r"masks: got dtype torch.complex64, must be bool, or integer or real"),
]
_PARTIALS = torch.ones(5, 7, 10)
_BACKWARD_CASES = [
    ("needs", [], ValueError, r"needs: got \[\], must be 2 bools, for the gradients of x, weight"),
    ("grad_output", torch.ones(5, 9), ValueError, r"grad_output: got shape \[5, 9\], must be \[5, 10\]"),
    ("grad_output", torch.ones(5, 10).half(), TypeError, r"grad_output: got dtype torch.float16, must be x's dtype"),
    ("partials", _PARTIALS[:, 0], ValueError, r"partials: got shape \[5, 10\], must be \[5, 7, 10\]"),
    ("partials", _PARTIALS[:, :4], ValueError, r"partials: got shape \[5, 4, 10\], must be \[5, 7, 10\]"),
    ("partials", _PARTIALS.double(), TypeError, r"partials: got dtype torch.float64, must be x's dtype"),
    ("partials", _PARTIALS.to("meta"), ValueError, r"partials: got device meta, must be x's device"),
    ("logits_dtype", torch.int64, TypeError, rf"logits_dtype: got torch.int64, {_FLOATS}, or None"),
    ("mask_weights_dtype", torch.bool, TypeError, rf"mask_weights_dtype: got torch.bool, {_FLOATS}, or None"),
]
_RANK = (
    "mask_logits",
    L[0],
    ValueError,
    r"mask_logits: got shape \[10, 24\], must be \[n_masks, out_f.*, in_features\]$",
)
_CASES_BY_OP = {
    "pack_masks": _MASKS_CASES,
    "pack_logits": [*_LOGITS_CASES, _RANK],
    "unpack_masks": [*_PACKED_CASES, ("in_features", -1, ValueError, "in_features: got -1, must be at least 0")],
    "forward": _LAYER_CASES + _PACKED_CASES + _ROWS_CASES,
    "forward_ste": _LAYER_CASES + _LOGITS_CASES + _STE_CASES,
    "forward_train": _LAYER_CASES + _PACKED_CASES + _ROWS_CASES,
    "backward": _X_AND_W_CASES + _PACKED_CASES + _ROWS_CASES + _BACKWARD_CASES,
}
CASES = [(op, *case) for op, cases in _CASES_BY_OP.items() for case in cases]
IDS = [f"{op}-{name}-{index}" for index, (op, name, *_) in enumerate(CASES)]


def run(op: str, **changes: object) -> object:
    return getattr(mglu, op)(**(good(op) | changes))


def assert_good_call_works(op: str) -> None:
    results = run(op)
    for result in results if isinstance(results, tuple) else (results,):
        assert not result.is_floating_point() or result.isfinite().all()


@pytest.mark.parametrize("kind", ["real", "fake", "meta"])
@pytest.mark.parametrize(("op", "name", "value", "error", "message"), CASES, ids=IDS)
def test_an_error_names_the_wrong_argument(op, name, value, error, message, kind):
    if kind == "meta" and "device" in message:
        return  # all tensors are on the meta device, so devices cannot differ
    convert = {"real": lambda t: t, "fake": FakeTensorMode().from_tensor, "meta": lambda t: t.to("meta")}[kind]
    args = good(op) | {name: value}
    with pytest.raises(error, match=message):
        getattr(mglu, op)(**{k: convert(v) if isinstance(v, Tensor) else v for k, v in args.items()})
    assert_good_call_works(op)


@pytest.mark.parametrize("trained", ["x", "weight", "mask_weights"])
@pytest.mark.parametrize("op", ["forward", "forward_ste"])
def test_a_call_that_records_gradients_names_the_wrong_argument(op, trained):
    for name, value, error, message in _CASES_BY_OP[op]:
        args = good(op) | {name: value}
        if args[trained].is_floating_point():
            args[trained] = args[trained].detach().requires_grad_()
        with pytest.raises(error, match=message):
            getattr(mglu, op)(**args)


@pytest.mark.parametrize("op", ["pack_masks", "unpack_masks", "forward", "forward_ste"])
def test_torch_compile_names_the_wrong_argument(op):
    """Dynamo raises an error of its own class, whose text contains the message."""
    for name, value, _, message in _CASES_BY_OP[op]:
        if isinstance(value, Tensor) and value.is_meta:
            continue
        args = good(op) | {name: value}
        tensors = {k: v for k, v in args.items() if isinstance(v, Tensor)}
        rest = {k: v for k, v in args.items() if k not in tensors}

        def call(tensors: dict[str, Tensor], rest: dict[str, object] = rest) -> object:
            return getattr(mglu, op)(**tensors, **rest)

        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(call, backend="eager", fullgraph=True)(tensors)
    torch._dynamo.reset()
    assert_good_call_works(op)


@pytest.mark.parametrize("op", sorted(OPERATORS.keys() & _CASES_BY_OP.keys()))
def test_explain_dispatch_names_the_wrong_argument(op):
    for name, value, error, message in _CASES_BY_OP[op]:
        with pytest.raises(error, match=message):
            mglu_ops.explain_dispatch(getattr(mglu, op), **(good(op) | {name: value}))
        if op == "forward":
            with pytest.raises(error, match=message):
                mglu_ops.explain_dispatch(**(good(op) | {name: value}))


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


TENSORS = [(op, name) for op in OPS for name in tensors_of(op)]


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
    matrix_layouts = ["sparse_csr"] if tensor.dim() == 2 else []
    return ["sparse_coo", "nested", "jagged", *matrix_layouts, *(["mkldnn"] if tensor.is_floating_point() else [])]


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
