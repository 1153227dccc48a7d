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

import mglu_ops
from mglu_ops import dispatch

mglu = torch.ops.mglu
LAYER_OPS = ("forward", "forward_ste", "forward_train", "backward")


def good(op: str) -> dict[str, object]:
    """The arguments of a valid call: x [5, 24], weight [10, 24], three masks, and mask weights."""
    layer = make_layer(weighted=True)
    if op == "pack_masks":
        return {"masks": layer.masks}
    if op == "pack_logits":
        return {"mask_logits": layer.logits}
    if op == "unpack_masks":
        return {"packed_masks": layer.packed_masks, "in_features": 24}
    args = {"x": layer.x, "weight": layer.weight, "packed_masks": layer.packed_masks}
    tail = {"activation": "silu", "mask_weights": layer.mask_weights}
    if op == "forward_ste":
        args["mask_logits"] = layer.logits
        del args["packed_masks"]
    if op == "backward":
        args = {"grad_output": torch.ones(5, 10), **args, "partials": torch.zeros(5, 7, 10)}
        tail = {"needs": (True, True), "logits_dtype": None, "mask_weights_dtype": torch.float32}
    return args | tail


# Valid x, weight, mask_logits, mask_weights and packed_masks, from which the wrong arguments are made.
X, W, L, R = torch.zeros(5, 24), torch.zeros(10, 24), torch.zeros(3, 10, 24), torch.zeros(5, 3)
P = torch.zeros(10, 3, 3, dtype=torch.uint8)

_FLOATS = "must be float16, bfloat16, float32 or float64"
_X_AND_W_CASES = [
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
]
_LAYER_CASES = [
    *_X_AND_W_CASES,
    ("activation", "swish", ValueError, r"activation: got 'swish', must be one of silu, gelu, gelu_tanh, relu, "),
    ("activation", "", ValueError, r"activation: got '', must be one of"),
    ("activation", "SiLU", ValueError, r"activation: got 'SiLU', must be one of"),
    ("mask_weights", R[:, :2], ValueError, r"mask_weights: got shape \[5, 2\], must be x's leading .* \[5, 3\]"),
    ("mask_weights", R[:4], ValueError, r"mask_weights: got shape \[4, 3\], must be .*\[5, 3\]"),
    ("mask_weights", R[0], ValueError, r"mask_weights: got shape \[3\], must be .*\[5, 3\]"),
    ("mask_weights", R[None], ValueError, r"mask_weights: got shape \[1, 5, 3\], must be .*\[5, 3\]"),
    ("mask_weights", R.long(), TypeError, rf"mask_weights: got dtype torch.int64, {_FLOATS}"),
    ("mask_weights", R.to("meta"), ValueError, r"mask_weights: got device meta, must be x's device cpu"),
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
    ("grad_output", torch.ones(10), ValueError, r"grad_output: got shape \[10\], must be \[5, 10\]"),
    ("partials", torch.ones(5, 10), ValueError, r"partials: got shape \[5, 10\], must be \[5, 7, 10\]"),
    ("partials", torch.ones(7, 5, 10), ValueError, r"partials: got shape \[7, 5, 10\], must be \[5, 7, 10\]"),
    ("partials", torch.ones(5, 4, 10), ValueError, r"partials: got shape \[5, 4, 10\], must be \[5, 7, 10\]"),
    ("partials", torch.ones(5, 7, 10).double(), TypeError, r"partials: got dtype torch.float64, must be x's dtype"),
    ("partials", torch.ones(5, 7, 10, device="meta"), ValueError, r"partials: got device meta, must be x's device"),
    ("logits_dtype", torch.int64, TypeError, rf"logits_dtype: got torch.int64, {_FLOATS}, or None"),
    ("mask_weights_dtype", torch.bool, TypeError, rf"mask_weights_dtype: got torch.bool, {_FLOATS}, or None"),
]
_CASES_BY_OP = {
    "pack_masks": _MASKS_CASES,
    "unpack_masks": [*_PACKED_CASES, ("in_features", -1, ValueError, "in_features: got -1, must be at least 0")],
    "forward": _LAYER_CASES + _PACKED_CASES + _ROWS_CASES,
    "forward_ste": _LAYER_CASES + _LOGITS_CASES,
    "forward_train": _LAYER_CASES + _PACKED_CASES + _ROWS_CASES,
    "backward": _X_AND_W_CASES + _PACKED_CASES + _ROWS_CASES + _BACKWARD_CASES,
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


@pytest.mark.parametrize("trained", ["x", "weight", "mask_weights"])
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


def tensors_of(op: str) -> list[str]:
    return [name for name, value in good(op).items() if isinstance(value, Tensor)]


OPS = ["pack_masks", "unpack_masks", "pack_logits", *LAYER_OPS]
each_tensor = pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in tensors_of(op)])


def _other_layouts(op: str, name: str) -> list[str]:
    """The layouts other than dense that torch can give an argument."""
    tensor = good(op)[name]
    return [
        "sparse_coo",
        "nested",
        "jagged",
        *(["sparse_csr"] if tensor.dim() == 2 else []),
        *(["mkldnn"] if tensor.is_floating_point() else []),
    ]


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    if layout in ("nested", "jagged"):
        kind = torch.jagged if layout == "jagged" else torch.strided
        return torch.nested.nested_tensor([tensor[0], tensor[0]], layout=kind)
    return {"sparse_coo": tensor.to_sparse, "sparse_csr": tensor.to_sparse_csr, "mkldnn": tensor.to_mkldnn}[layout]()


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of its own sparse and nested tensors
@pytest.mark.parametrize(
    ("op", "name", "layout"),
    [(op, name, layout) for op in OPS for name in tensors_of(op) for layout in _other_layouts(op, name)],
)
def test_tensors_of_another_layout_are_refused(op: str, name: str, layout: str) -> None:
    message = rf"^{name}: got a tensor of layout {layout}, must be a dense tensor \(torch\.strided\)"
    for trained in (None, "x", "weight"):
        args = good(op)
        if trained in args and trained != name:
            args[trained] = args[trained].requires_grad_()
        args[name] = in_layout(args[name], layout)
        with pytest.raises(TypeError, match=message):
            getattr(mglu, op)(**args)
    assert_good_call_works(op)


@each_tensor
@pytest.mark.parametrize("known", [False, True])
def test_a_tensor_whose_storage_was_freed_is_refused(op: str, name: str, known: bool) -> None:
    """FSDP frees storages in this way. A repeated call skips most checks, but must refuse such a tensor too."""
    args = good(op)
    if known:
        getattr(mglu, op)(**args)
    args[name] = args[name].clone()
    args[name].untyped_storage().resize_(0)
    message = (
        rf"^{name}: got a tensor of shape \[.*\] whose storage has 0 bytes, must have \d+; the storage was resized"
    )
    with pytest.raises(ValueError, match=message):
        getattr(mglu, op)(**args)
    assert_good_call_works(op)


@each_tensor
def test_a_tensor_whose_storage_was_shrunk_is_refused(op: str, name: str) -> None:
    """This covers the first call of a kind; test_repeated_calls.py covers later ones."""
    dispatch._prepared.clear()
    args = good(op) | {name: torch.stack([good(op)[name]] * 2)[1]}
    tensor = args[name]
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    tensor.untyped_storage().resize_(needed - 1)
    with pytest.raises(ValueError, match=f"^{name}: .* whose storage has {needed - 1} bytes, must have {needed}"):
        getattr(mglu, op)(**args)


def test_none_under_autocast_is_refused() -> None:
    for op in ("forward", "forward_ste"):
        for name in ("x", "weight"):
            with torch.autocast("cpu"), pytest.raises(TypeError, match=f"^{name}: got None, must be a tensor"):
                run(op, **{name: None})


def test_none_for_a_tensor_of_backward_is_refused() -> None:
    for name in tensors_of("backward"):
        if name != "mask_weights":
            with pytest.raises(TypeError, match=f"^{name}: got None, must be a tensor"):
                run("backward", **{name: None})


def test_none_for_logits_that_are_trained_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^mask_logits: got None, must be a tensor"):
        run("forward_ste", mask_logits=None, x=good("forward_ste")["x"].requires_grad_())


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


@pytest.mark.parametrize(
    ("name", "value", "error", "message"), [case for case in _CASES_BY_OP["forward"] if "meta" not in case[-1]]
)
def test_explain_dispatch_names_the_wrong_argument(name, value, error, message):
    with pytest.raises(error, match=message):
        mglu_ops.explain_dispatch(**(good("forward") | {name: value}))


def test_a_switch_that_is_not_a_bool_is_refused() -> None:
    for call, name in (
        (mglu_ops.set_batch_invariant_mode, "mode"),
        (lambda value: mglu_ops.enable_fusion(strict=value), "strict"),
        (lambda value: mglu_ops.enable_fusion(assume_binary=value), "assume_binary"),
    ):
        with pytest.raises(TypeError, match=f"^{name}: got 'off', must be True or False"):
            call("off")
    assert not mglu_ops.is_batch_invariant_mode_enabled()


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
    x, weight = args[:2]
    assert x.shape[-1:] == weight.shape[1:]
    assert result.shape == (*x.shape[:-1], weight.shape[0])
    assert result.dtype is x.dtype is weight.dtype
    assert result.device == x.device == args[2].device
    if not x.is_meta:
        if op != "forward_ste":
            args[2] = mglu.unpack_masks(args[2], h)
        expected = s.naive(*(args if op != "forward_ste" else (x, weight, args[2] > 0)), activation, mask_weight)
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
