"""Wrong arguments of the operators over experts raise errors that name them, in eager mode and in tracing."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mglu_ops
from mglu_ops.given import OPERATORS
from tests.support.layers import arguments_of_experts, make_experts

mglu = torch.ops.mglu


def good(op: str) -> dict[str, object]:
    """The arguments of a valid call: 6 tokens with 2 of 4 experts each, which have weights of 10 x 24 and 3 masks."""
    return arguments_of_experts(op, make_experts(weighted=True))


X, W, IDS = torch.zeros(6, 24), torch.zeros(4, 10, 24), torch.zeros(6, 2, dtype=torch.int64)
P, L = torch.zeros(4, 10, 3, 3, dtype=torch.uint8), torch.zeros(4, 3, 10, 24)
OFFS = torch.zeros(4, dtype=torch.int32)
_WEIGHT = [
    ("weight", None, TypeError, "weight: got None, must be a tensor"),
    ("weight", W[0], ValueError, r"weight: got shape \[10, 24\], must be \[E, \.\.\.\]"),
    ("weight", W[:0], ValueError, r"weight: got shape \[0, 10, 24\], must be .* at least 1 expert"),
    ("weight", W.half(), TypeError, "weight: got dtype torch.float16, must be x's dtype torch.float32"),
    ("weight", W.to("meta"), ValueError, "weight: got device meta, must be x's device cpu"),
]
_PACKED = [
    ("packed_masks", P[:3], ValueError, r"packed_masks: got shape \[3, 10, 3, 3\], must begin with E = 4 experts"),
    ("packed_masks", P[:, :9], ValueError, r"packed_masks: got shape \[9, 3, 3\], must be .*\(of each expert\)"),
    ("packed_masks", P.bool(), TypeError, "packed_masks: got dtype torch.bool, must be torch.uint8"),
]
_LAYER = [
    ("x", X[None], ValueError, r"x: got shape \[1, 6, 24\], must be \[(T|S), in_features\]"),
    ("activation", "swish", ValueError, "activation: got 'swish', must be one of silu"),
    ("mask_weights", torch.zeros(5, 3), ValueError, r"mask_weights: got shape \[5, 3\], must be .*\[(6, 2|12), 3\]"),
]
_OFFS = [
    ("offs", None, TypeError, "^offs: got None, must be a tensor"),
    ("offs", OFFS.long(), TypeError, "offs: got dtype torch.int64, must be torch.int32, as for torch.nn.functional"),
    ("offs", OFFS[:3], ValueError, r"offs: got shape \[3\], must be \[4\], the end of each expert's rows"),
    ("offs", OFFS.to("meta"), ValueError, "offs: got device meta, must be x's device cpu"),
]
_IDS = [
    ("expert_ids", None, TypeError, "^expert_ids: got None, must be a tensor"),
    ("expert_ids", IDS.float(), TypeError, "expert_ids: got dtype torch.float32, must be torch.int32 or torch.int64"),
    ("expert_ids", IDS[:5], ValueError, r"expert_ids: got shape \[5, 2\], must be \[T, K\] = \[6, K\]"),
    ("expert_ids", IDS[:, :0], ValueError, r"expert_ids: got shape \[6, 0\], .* K of at least 1"),
    ("expert_ids", IDS.to("meta"), ValueError, "expert_ids: got device meta, must be (x|y)'s device cpu"),
]
_STORED = [
    ("weight_format", "fp7", ValueError, "weight_format: got 'fp7', must be one of dense"),
    ("weight_scale", torch.ones(4, 10), ValueError, r"weight_scale: got a tensor of shape \[10\], must be None"),
]
_DOWN = [
    ("y", torch.zeros(6, 3, 10), ValueError, r"y: got shape \[6, 3, 10\], must begin with expert_ids' \[6, 2\]"),
    ("y", torch.zeros(6, 10), ValueError, r"y: got shape \[6, 10\], must be \[T, K, in_features\]"),
    ("y", torch.zeros(6, 2, 9), ValueError, "y: got last size 9 .*, must be weight's in_features 10"),
    ("expert_weights", torch.ones(6), ValueError, r"expert_weights: got shape \[6\], must begin with expert_ids'"),
    ("expert_weights", IDS, TypeError, "expert_weights: got dtype torch.int64, must be float16, bfloat16"),
]
_BACKWARD = [
    ("grad_output", torch.ones(12, 9), ValueError, r"grad_output: got shape \[12, 9\], must be \[12, 10\]"),
    ("grad_output", torch.tensor(1.0), ValueError, r"grad_output: got shape \[\], must be \[12, 10\]"),
    ("grad_output", None, TypeError, "grad_output: got None, must be a tensor"),
    ("partials", torch.tensor(1.0), ValueError, r"partials: got shape \[\], must be \[12, 7, 10\]"),
    ("partials", None, TypeError, "partials: got None, must be a tensor"),
    ("needs", [True], ValueError, r"needs: got \[True\], must be 2 bools, for the gradients of x, weight"),
    ("partials", torch.ones(12, 4, 10), ValueError, r"partials: got shape \[12, 4, 10\], must be \[12, 7, 10\]"),
    ("logits_dtype", torch.int64, TypeError, "logits_dtype: got torch.int64, must be float16"),
]
_CASES_BY_OP = {
    "pack_expert_logits": [
        ("mask_logits", L[0], ValueError, r"mask_logits: got shape \[3, 10, 24\], must be \[E, n_masks"),
        ("mask_logits", L[:0], ValueError, r"mask_logits: got shape \[0, 3, 10, 24\], .* at least 1 expert"),
        ("mask_logits", L > 0, TypeError, "mask_logits: got dtype torch.bool, must be float16"),
    ],
    "experts_forward": _WEIGHT + _PACKED + _LAYER + _IDS + _STORED,
    "experts_down": _IDS + _STORED + _DOWN,
    "experts_down_backward": [
        *_DOWN,
        (
            "needs",
            [True] * 4,
            ValueError,
            r"needs: got \[.*\], must be 3 bools, for the gradients of y, weight, expert_",
        ),
        ("grad_output", torch.tensor(1.0), ValueError, r"grad_output: got shape \[\], must be \[6, 24\]"),
        ("grad_output", torch.ones(6, 9), ValueError, r"grad_output: got shape \[6, 9\], must be \[6, 24\]"),
        ("grad_output", torch.ones(6, 24).half(), TypeError, "grad_output: got dtype torch.float16, must be y's dtype"),
    ],
    "grouped_forward": _WEIGHT + _PACKED + _LAYER + _OFFS,
    "grouped_forward_ste": [
        *_WEIGHT,
        *_LAYER,
        *_OFFS,
        ("mask_logits", L[:3], ValueError, r"mask_logits: got shape \[3, 3, 10, 24\], must begin with E = 4 experts"),
        ("mask_logits", L[:, :0], ValueError, "mask_logits: got n_masks=0, must be 1 to 16"),
    ],
    "grouped_forward_train": _WEIGHT + _PACKED + _LAYER + _OFFS,
    "grouped_backward": _WEIGHT + _PACKED + _OFFS + _BACKWARD,
}
CASES = [(op, *case) for op, cases in _CASES_BY_OP.items() for case in cases]


@pytest.mark.parametrize("kind", ["real", "fake"])
@pytest.mark.parametrize(
    ("op", "name", "value", "error", "message"),
    CASES,
    ids=[f"{op}-{name}-{i}" for i, (op, name, *_) in enumerate(CASES)],
)
def test_an_error_names_the_wrong_argument(
    op: str, name: str, value: object, error: type[Exception], message: str, kind: str
) -> None:
    wrong = good(op) | {name: value}
    getattr(mglu, op)(**good(op))
    if kind == "real":
        with pytest.raises(error, match=message):
            getattr(mglu, op)(**wrong)
        return
    with FakeTensorMode() as mode:
        fake = {key: mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for key, arg in wrong.items()}
        with pytest.raises(error, match=message):
            getattr(mglu, op)(**fake)


@pytest.mark.parametrize("op", sorted(OPERATORS.keys() & _CASES_BY_OP.keys()))
def test_explain_dispatch_names_the_wrong_argument(op: str) -> None:
    for name, value, error, message in _CASES_BY_OP[op]:
        with pytest.raises(error, match=message):
            mglu_ops.explain_dispatch(getattr(mglu, op), **good(op) | {name: value})


@pytest.mark.parametrize("op", [op for op in _CASES_BY_OP if op != "pack_expert_logits"])
def test_the_batch_invariant_mode_refuses_every_operator_on_a_cpu(op: str) -> None:
    getattr(mglu, op)(**good(op))
    with (
        mglu_ops.set_batch_invariant_mode(),
        pytest.raises(RuntimeError, match=r"set_batch_invariant_mode\(True\) asks"),
    ):
        getattr(mglu, op)(**good(op))


@pytest.mark.parametrize("op", _CASES_BY_OP)
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused_by_name(op: str, layout: torch.layout) -> None:
    args = good(op)
    name = "y" if "down" in op else "mask_logits" if "pack" in op else "x"
    nested = torch.nested.nested_tensor([torch.ones(2, 24), torch.ones(3, 24)], layout=layout)
    with pytest.raises(TypeError, match=f"{name}: got a tensor of layout (jagged|nested), must be a dense tensor"):
        getattr(mglu, op)(**args | {name: nested})


def test_a_storage_that_was_freed_is_refused() -> None:
    given = good("experts_forward")
    weight = given["weight"].clone()
    assert mglu.experts_forward(**given | {"weight": weight}).isfinite().all()
    weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"weight: .* the storage was resized"):
        mglu.experts_forward(**given | {"weight": weight})
