"""Weights that a program decodes from 8 or 4 bits: the operator reads their stored form, or a note says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map

import mglu_ops
from compile_passes.exported import fuse_exported
from compile_passes.report import FusionReport, layers_present
from mglu_ops.formats import FORMATS
from tests.support.budgets import BUDGET, NAIVE_FACTOR, assert_matches, relative_error
from tests.support.families import family
from tests.support.layers import examples
from tests.support.programs.compiled import export, operators, saved_and_loaded
from tests.support.programs.graphs import Capture, compare, results
from tests.support.programs.spellings import straight_through

Decode = Callable[[Tensor, Tensor, torch.dtype], Tensor]
"""A function that decodes a stored weight. Its arguments are the weight, the scales and the dtype of x."""


def blocks(scale: Tensor, like: Tensor) -> Tensor:
    return scale.repeat_interleave(128, 0)[: like.shape[0]].repeat_interleave(128, 1)[:, : like.shape[1]]


def expanded_blocks(scale: Tensor, like: Tensor) -> Tensor:
    rows, columns = scale.shape
    whole = scale.view(rows, 1, columns, 1).expand(rows, 128, columns, 128).reshape(128 * rows, 128 * columns)
    return whole[: like.shape[0], : like.shape[1]]


def by_blocks(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode like Hugging Face Transformers, which supports only whole blocks."""
    (rows, columns), (m, n) = q.shape, scale.shape
    blocked = q.reshape(-1, m, rows // m, n, columns // n).to(scale.dtype)
    return (blocked * scale.reshape(-1, m, n).unsqueeze(-1).unsqueeze(2)).reshape(q.shape).to(dtype)


OF_ROWS: dict[str, Decode] = {
    "in float32": lambda q, s, dtype: (q.to(torch.float32) * s[:, None]).to(dtype),
    "in x's dtype": lambda q, s, dtype: q.to(dtype) * s[:, None].to(dtype),
    "the scales first": lambda q, s, dtype: (s.unsqueeze(1) * q.float()).to(dtype),
    "expand": lambda q, s, dtype: q.to(dtype) * s.to(dtype).unsqueeze(-1).expand(-1, q.shape[1]),
    "expand_as": lambda q, s, dtype: q.to(dtype).mul(s.to(dtype).view(-1, 1).expand_as(q)),
    "in place": lambda q, s, dtype: q.to(dtype).mul_(s.to(dtype)[:, None]),
    "copies": lambda q, s, dtype: q.clone().to(dtype) * s.detach().to(dtype).contiguous()[:, None],
    "one of a stack": lambda q, s, dtype: torch.stack([q, q])[1].to(dtype) * torch.stack([s, s])[1][:, None].to(dtype),
}
OF_BLOCKS: dict[str, Decode] = {
    "repeat_interleave": lambda q, s, dtype: (q.float() * blocks(s, q)).to(dtype),
    "expand": lambda q, s, dtype: q.to(dtype) * expanded_blocks(s, q).to(dtype),
    "of transposed scales": lambda q, s, dtype: q.to(dtype) * blocks(s.t().contiguous().t(), q).to(dtype),
}


def groups(scale: Tensor, like: Tensor) -> Tensor:
    return scale.repeat_interleave(128, 1)[:, : 2 * like.shape[1]]


def pairs(low: Tensor, high: Tensor) -> Tensor:
    return torch.stack((low, high), -1).flatten(1)


def numbers(q: Tensor) -> Tensor:
    return pairs(q & 15, q >> 4).to(torch.int8) - 8


def by_groups(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode by views, which support only whole groups."""
    low, high = (half.to(torch.int8) - 8 for half in (q & 0xF, q >> 4))
    grouped = torch.stack([low, high], dim=-1).reshape(q.shape[0], -1, 128)
    return (grouped.to(dtype) * scale.to(dtype).unsqueeze(-1)).view(q.shape[0], -1)


OF_GROUPS: dict[str, Decode] = {
    "the format's own": FORMATS["int4_group"].dequantize,
    "integers": lambda q, s, dtype: numbers(q).to(dtype) * groups(s, q).to(dtype),
    "in x's dtype": lambda q, s, dtype: groups(s, q).to(dtype) * pairs((q & 15).to(dtype), (q >> 4).to(dtype)).sub_(8),
    "quotients": lambda q, s, dtype: (pairs(q % 16, q // 16).char() + -8).to(dtype) * groups(s.to(dtype), q),
    "a reshaped copy": lambda q, s, dtype: OF_GROUPS["integers"](q.reshape(-1).clone().view(q.shape), s, dtype),
}


def layer(decode: Decode) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def function(x: Tensor, q: Tensor, s: Tensor, m: Tensor) -> Tensor:
        weight = decode(q, s, x.dtype)
        return sum(F.silu(F.linear(x, weight * mask)) * F.linear(x, weight * ~mask) for mask in m)

    return function


def arguments(
    name: str, dtype: torch.dtype = torch.float32, d: int = 12, h: int = 16, n_masks: int = 1, seed: int = 0
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, scale = FORMATS[name].quantize(torch.randn(d, h, generator=generator) / h**0.5)
    assert scale is not None
    masks = torch.rand(n_masks, d, h, generator=generator) > 0.5
    return {"x": torch.randn(5, h, generator=generator).to(dtype), "q": q, "s": scale, "m": masks}


def formats(capture: Capture) -> list[str]:
    return [site.weight_format for site in capture.report.fused]


def check(decode: Decode, name: str, given: dict[str, Tensor], *, trains_x: bool = False) -> Capture:
    """Fuse a layer, and check its result and gradient against float64.

    The result must be as accurate as eager's, up to a little slack, because sums are rounded in another order. The
    gradient must be within the budget of its dtype.
    """
    function, capture = layer(decode), Capture(strict=True)
    dtype = given["x"].dtype
    given["x"].requires_grad_(trains_x)
    exact = {key: value.detach().double() if key == "x" else value for key, value in given.items()}
    exact["x"].requires_grad_(trains_x)
    oracle = results(layer(lambda q, s, _: FORMATS[name].dequantize(q, s, torch.float64)), exact)
    eager, found = results(function, given), results(capture.compile(function), given)
    for key, wanted in oracle.items():
        errors = [relative_error(outputs[key].double(), wanted) for outputs in (found, eager)]
        slack = BUDGET[dtype] / (10 if key == "result 0" and dtype is not torch.float64 else 1)
        assert errors[0] <= max(NAIVE_FACTOR * errors[1], slack), (key, errors)
    return capture


@pytest.mark.parametrize(("spelling", "name"), family(OF_ROWS, ["fp8_row", "int8_row"]))
def test_scales_of_rows(spelling: str, name: str) -> None:
    capture = check(OF_ROWS[spelling], name, arguments(name, torch.bfloat16))
    assert formats(capture) == [name]
    assert not {"mul", "linear"} & set(capture.calls), "the weight is still decoded"


@pytest.mark.parametrize("spelling", OF_BLOCKS)
def test_scales_of_blocks(spelling: str) -> None:
    assert formats(check(OF_BLOCKS[spelling], "fp8_block", arguments("fp8_block", d=140, h=300))) == ["fp8_block"]


def test_whole_blocks_by_views() -> None:
    assert formats(check(by_blocks, "fp8_block", arguments("fp8_block", d=256, h=384))) == ["fp8_block"]


@pytest.mark.parametrize("spelling", OF_GROUPS)
def test_scales_of_groups(spelling: str) -> None:
    capture = check(OF_GROUPS[spelling], "int4_group", arguments("int4_group", torch.bfloat16, h=300))
    assert formats(capture) == ["int4_group"]
    assert not {"mul", "linear", "stack", "and"} & set(capture.calls), "the weight is still unpacked"


def test_whole_groups_by_views() -> None:
    assert formats(check(by_groups, "int4_group", arguments("int4_group", h=384))) == ["int4_group"]


@pytest.mark.parametrize(
    "decode",
    [
        lambda q, s, dtype: q.to(dtype) * s[0],
        lambda q, s, dtype: (q.float() * s[:1]).to(dtype),
        lambda q, s, dtype: q.to(dtype) * s[:1, None].to(dtype).expand(q.shape),
    ],
)
def test_one_scale_for_all_weights(decode: Decode) -> None:
    given = arguments("fp8_row", torch.float16)
    given["s"][1:] = given["s"][0]
    assert formats(check(decode, "fp8_row", given)) == ["fp8_row"]


@pytest.mark.parametrize("name", ["fp8_row", "int8_row"])
def test_scales_of_rows_that_multiply_the_products(name: str) -> None:
    """In `x (M * q)^T * s`, the scales s belong to the rows of q."""

    def function(x: Tensor, q: Tensor, s: Tensor, m: Tensor) -> Tensor:
        weight = q.to(x.dtype)
        gate, value = F.linear(x, weight * m[0]), F.linear(x, weight * ~m[0])
        return F.silu(gate * s) * (value * s)

    given, capture = arguments(name), Capture(strict=True)
    found = capture.compile(function)(**given)
    torch.testing.assert_close(found, layer(OF_ROWS["in float32"])(**given))
    assert formats(capture) == [name]


def test_columns_of_a_transposed_weight() -> None:
    def function(x: Tensor, q: Tensor, s: Tensor, m: Tensor) -> Tensor:
        weight = q.to(x.dtype) * s
        return F.silu(x @ (weight * m[0].t())) * (x @ (weight * ~m[0].t()))

    given = arguments("int8_row")
    capture, turned = Capture(strict=True), {**given, "q": given["q"].t().contiguous()}
    found = capture.compile(function)(**turned)
    torch.testing.assert_close(found, layer(OF_ROWS["in float32"])(**given))
    assert formats(capture) == ["int8_row"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_x(dtype: torch.dtype) -> None:
    given = arguments("fp8_row", dtype, n_masks=2)
    assert formats(check(OF_ROWS["in float32"], "fp8_row", given, trains_x=True)) == ["fp8_row"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Decode, torch.dtype, dict[str, int]]:
    name = draw(st.sampled_from(["fp8_row", "int8_row", "fp8_block", "int4_group"]))
    decode = draw(st.sampled_from(list({"fp8_block": OF_BLOCKS, "int4_group": OF_GROUPS}.get(name, OF_ROWS).values())))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    sizes = {key: draw(st.integers(1, most)) for key, most in {"d": 300, "h": 300, "n_masks": 3, "seed": 9}.items()}
    sizes["h"] += sizes["h"] % 2 if name == "int4_group" else 0
    return name, decode, dtype, sizes


@examples(20)
@given(case=cases(), trains_x=st.booleans())
def test_a_fused_layer_is_as_accurate_as_eager(case: Any, trains_x: bool) -> None:
    name, decode, dtype, sizes = case
    tensors = arguments(name, dtype, **sizes)
    found = formats(check(decode, name, tensors, trains_x=trains_x))
    assert found == [name] or dtype is torch.float64 or (found == ["fp8_row"] and tensors["s"].numel() == 1)


# --- Weights that the operator reads decoded --------------------------------------------------------------------------

# A part of the reason, the format of the arguments, and a decoding that differs from the format in one way.
DECODED: dict[str, tuple[str, str, Decode]] = {
    "float8_e5m2": (
        "is float8_e5m2, and the operator takes float8_e4m3fn and int8",
        "fp8_row",
        lambda q, s, dtype: q.float().to(torch.float8_e5m2).to(dtype) * s[:, None],
    ),
    "a zero point": (
        "is not a product",
        "int8_row",
        lambda q, s, dtype: (q.view(torch.uint8).to(dtype) - 128) * s[:, None],
    ),
    "a sum": ("is not a product", "int8_row", lambda q, s, dtype: q.to(dtype) * s[:, None] + s[:, None]),
    "a number": ("are a number, which is not proved", "int8_row", lambda q, s, dtype: q.to(dtype) * 0.01),
    "scales of columns": ("number for each row", "int8_row", lambda q, s, dtype: q.to(dtype) * s),
    "groups of 4 columns": (
        "for each row or block of 128 x 128",
        "fp8_row",
        lambda q, s, dtype: q.to(dtype) * torch.stack([s, s + 1, s + 2, s + 3], 1).repeat_interleave(4, 1),
    ),
    "blocks of 4 x 4": (
        "for each row or block of 128 x 128",
        "fp8_row",
        lambda q, s, dtype: q.to(dtype) * s.view(4, 4).repeat_interleave(4, 0).repeat_interleave(4, 1),
    ),
    "transposed blocks": (
        "for each row or block of 128 x 128",
        "fp8_block",
        lambda q, s, dtype: q.to(dtype) * blocks(s, q).t(),
    ),
    "blocks of integers": (
        "number for each row",
        "fp8_block",
        lambda q, s, dtype: q.float().to(torch.int8).to(dtype) * blocks(s, q),
    ),
    "scales in float64": (
        "(float64), which is not proved",
        "int8_row",
        lambda q, s, dtype: (q * (s.double() + 1e-12)[:, None]).to(dtype),
    ),
    "a narrower product": (
        "rounds the weight to float16, and the layer is float32",
        "fp8_row",
        lambda q, s, dtype: OF_ROWS["in x's dtype"](q, s, torch.float16).to(dtype),
    ),
    "truncated numbers": (
        "rounds the stored weight to int32",
        "fp8_row",
        lambda q, s, dtype: q.to(torch.int32).to(dtype) * s[:, None],
    ),
    "other scales of 4 bits": (
        "(float32), which is not proved to be one bfloat16 number for each block of 1 x 128",
        "int4_group",
        lambda q, s, dtype: numbers(q).to(dtype) * groups(s.float() + 0.001, q).to(dtype),
    ),
    "groups of 32 columns": (
        "for each block of 1 x 128",
        "int4_group",
        lambda q, s, dtype: numbers(q).to(dtype) * torch.cat((s, s, s, s), 1).repeat_interleave(32, 1),
    ),
}
UNPACKED: dict[str, Callable[[Tensor], Tensor]] = {
    "the high four bits first": lambda q: pairs(q >> 4, q & 15).to(torch.int8) - 8,
    "no zero point": lambda q: pairs(q & 15, q >> 4).to(torch.int8),
    "another zero point": lambda q: numbers(q) + 1,
    "signed bits": lambda q: pairs(q & 15, q >> 4).to(torch.int8).add(8).remainder(16) - 8,
    "three bits": lambda q: pairs(q & 7, q >> 4).to(torch.int8) - 8,
    "signed bytes": lambda q: pairs((q & 15).to(torch.int8), q.to(torch.int8) >> 4) - 8,
    "only the low bits": lambda q: pairs(q & 15, q & 15).to(torch.int8) - 8,
    "halves of a row": lambda q: torch.cat((q & 15, q >> 4), 1).to(torch.int8) - 8,
    "transposed bytes": lambda q: pairs(q.t() & 15, q.t() >> 4).view(q.shape[0], -1).to(torch.int8) - 8,
}
"""Functions that unpack 4 bits to other numbers or columns than the format does, or by a view that needs strides."""

UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "another order of rows": lambda q: numbers(q).flip(0),
    "bits of different rows": lambda q: pairs(q & 15, q.flip(0) >> 4).to(torch.int8) - 8,
    "a sum of bytes": lambda q: pairs((q & 15) + (q & 0), q >> 4).to(torch.int8) - 8,
    "an index": lambda q: numbers(q).long()[numbers(q).long()[:, 0] + 8].to(torch.int8),
    "a view of bytes": lambda q: pairs(q & 15, q >> 4).view(torch.int8) - 8,
    "a tensor of shifts": lambda q: ((q[..., None] >> torch.tensor([0, 4])) & 15).flatten(1).to(torch.int8) - 8,
}
"""Functions that unpack 4 bits by calls that the proof does not know, so it takes the result for numbers of 8 bits."""

DECODED |= {
    name: (reason, "int4_group", lambda q, s, dtype, unpack=unpack: unpack(q).to(dtype) * groups(s, q).to(dtype))
    for reason, table in {
        "one float32 number": UNPACKED | UNKNOWN,
        "`sub` is uint8": {"a difference of bytes": lambda q: pairs(q & 15, q >> 4) - 8},
        "is not a product of a tensor": {"one row": lambda q: numbers(q)[:1]},
    }.items()
    for name, unpack in table.items()
}


def assert_format(
    wanted: str, function: Callable[..., Any], make: Callable[[], dict[str, Tensor]], reason: str = ""
) -> None:
    """Check that a layer is fused with a format and has eager's results. For `dense`, the note must give the reason."""
    capture = compare(function, make, 10 * BUDGET[torch.float32])
    assert formats(capture) == [wanted]
    note = capture.report.fused[0].note
    assert reason in note if wanted == "dense" else not note, note


@pytest.mark.parametrize("name", DECODED)
def test_a_note_says_why_a_weight_is_read_decoded(name: str) -> None:
    reason, weight_format, decode = DECODED[name]
    size = 256 if weight_format in ("fp8_block", "int4_group") else 16
    assert_format("dense", layer(decode), lambda: arguments(weight_format, d=size, h=size), reason)


def test_unpacked_numbers_in_another_order_are_numbers_of_8_bits() -> None:
    def decode(q: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
        return UNPACKED["the high four bits first"](q).to(dtype) * s.to(dtype)

    assert_format("int8_row", layer(decode), lambda: arguments("int4_group"))


def test_scales_that_the_program_rounds_stay_rounded() -> None:
    def decode(q: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
        return q.to(dtype) * s.half().to(dtype)[:, None]

    assert_format("fp8_row", layer(decode), lambda: arguments("fp8_row"))


def test_one_spelling_of_scales_of_two_shapes() -> None:
    """With scales `[12, 1]` the calls fit a format. With scales `[2, 6]` the calls change the order of the scales."""
    function = layer(lambda q, s, dtype: q.to(dtype) * s.t().reshape(-1)[:, None])
    for shape in ((12, 1), (2, 6)):
        given = arguments("int8_row")
        given["s"] = given["s"].view(shape)
        assert_format("int8_row", function, lambda given=given: given)


def test_scales_whose_bits_are_another_dtype() -> None:
    def decode(q: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
        return q.to(dtype) * s.half().view(torch.bfloat16)[:, None]

    given, capture = arguments("fp8_row", torch.bfloat16), Capture(strict=True)
    assert_matches(capture.compile(layer(decode))(**given), layer(decode)(**given))
    assert formats(capture) == ["fp8_row"]


def test_views_that_need_the_strides_of_the_scales() -> None:
    def make() -> dict[str, Tensor]:
        given = arguments("int8_row")
        return {**given, "s": given["s"].view(3, 4).t()}

    assert_format("int8_row", layer(lambda q, s, dtype: q.to(dtype) * s.t().view(-1)[:, None]), make)


def test_a_weight_that_is_used_elsewhere() -> None:
    def function(x: Tensor, q: Tensor, s: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        weight = q.to(x.dtype) * s[:, None]
        return F.silu(F.linear(x, weight * m[0])) * F.linear(x, weight * ~m[0]), weight.sum()

    assert_format("fp8_row", function, lambda: arguments("fp8_row"))


@pytest.mark.parametrize(("trained", "grad"), [("s", True), ("s", False), ("q", False)])
def test_a_stored_weight_has_no_gradient(trained: str, grad: bool) -> None:
    def make() -> dict[str, Tensor]:
        given = arguments("fp8_row")
        given[trained].requires_grad_()
        return given

    with torch.set_grad_enabled(grad):
        assert_format("dense" if grad else "fp8_row", layer(OF_ROWS["in float32"]), make, "requires a gradient")


def test_a_parameter_that_is_decoded_without_a_gradient() -> None:
    """The operator does not read the stored weight, because it rejects scales that require a gradient."""

    @torch.no_grad()
    def decode(q: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
        return q.to(dtype) * s[:, None]

    def make() -> dict[str, Tensor]:
        given = arguments("int8_row")
        return {key: t.requires_grad_() if key in "xs" else t for key, t in given.items()}

    assert_format("dense", layer(decode), make, "requires a gradient")


def test_trained_masks() -> None:
    def function(x: Tensor, q: Tensor, s: Tensor, logits: Tensor) -> Tensor:
        weight, mask = q.to(x.dtype) * s[:, None], straight_through(logits)
        return F.silu(F.linear(x, weight * mask)) * F.linear(x, weight * (1 - mask))

    def make() -> dict[str, Tensor]:
        given = arguments("int8_row")
        given["logits"] = given.pop("m")[0].float() - 0.5
        given["logits"].requires_grad_()
        return given

    assert_format("dense", function, make, "trains masks of weights in x's dtype only")


# For each time at which a program writes to a stored weight or its scales: `(inference, training)`, True if the
# operator may read the stored weight in that mode. In training of x, backward decodes the stored weight again.
WRITES: dict[str, tuple[bool, bool]] = {"before the layer": (False, False), "after the layer": (True, False)}


@pytest.mark.parametrize("written", ["q", "s"])
@pytest.mark.parametrize("trains_x", [False, True])
@pytest.mark.parametrize("when", WRITES)
def test_a_write_after_the_weight_was_decoded(when: str, trains_x: bool, written: str) -> None:
    def function(x: Tensor, q: Tensor, s: Tensor, m: Tensor) -> Tensor:
        weight = q.to(x.dtype) * s[:, None]
        if when == "before the layer":
            (q if written == "q" else s).zero_()
        result = F.silu(F.linear(x, weight * m[0])) * F.linear(x, weight * ~m[0])
        if when == "after the layer":
            (q if written == "q" else s).zero_()
        return result

    def make() -> dict[str, Tensor]:
        given = arguments("int8_row")
        given["x"].requires_grad_(trains_x)
        return given

    assert_format("int8_row" if WRITES[when][trains_x] else "dense", function, make, "writes in place")


# --- Other ways into the pass ----------------------------------------------------------------------------------------


class Stored(nn.Module):
    """A layer that decodes its weight at each call."""

    def __init__(self, given: dict[str, Tensor], decode: Decode) -> None:
        super().__init__()
        for name in ("q", "s", "m"):
            self.register_buffer(name, given[name])
        self.decode = decode

    def forward(self, x: Tensor) -> Tensor:
        return layer(self.decode)(x, self.q, self.s, self.m)


@pytest.mark.parametrize(
    ("name", "decode"),
    [
        ("fp8_row", OF_ROWS["in float32"]),
        ("fp8_block", OF_BLOCKS["expand"]),
        ("fp8_block", OF_BLOCKS["repeat_interleave"]),
        ("int4_group", OF_GROUPS["integers"]),
    ],
)
def test_export(name: str, decode: Decode) -> None:
    given = arguments(name, d=140, h=150)
    module = Stored(given, decode)
    report = FusionReport()
    fused = fuse_exported(export(module, given["x"]), report=report, strict=True)
    assert [site.weight_format for site in report.fused] == [name]
    assert operators(fused) == ["mglu.forward.default"]
    assert [site.weight_format for site in layers_present(fused.graph)] == [name]
    torch.testing.assert_close(saved_and_loaded(fused).module()(given["x"]), module(given["x"]))


@pytest.mark.long
def test_inductor() -> None:
    given = arguments("fp8_row", torch.bfloat16)
    module = Stored(given, OF_ROWS["in float32"])
    with mglu_ops.fusion() as report, torch.no_grad():
        torch._dynamo.reset()
        found = torch.compile(module)(given["x"])
    assert "mglu::forward, fp8_row" in str(report)
    assert_matches(found, module(given["x"]))


def test_autocast() -> None:
    def function(x: Tensor, q: Tensor, s: Tensor, m: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(lambda q, s, dtype: q.float() * s[:, None])(x, q, s, m)

    given, capture = arguments("fp8_row"), Capture(strict=True)
    assert_matches(capture.compile(function)(**given), function(**given))
    assert formats(capture) == ["fp8_row"]


def test_other_devices() -> None:
    """The device `meta` computes nothing, but tracing and the pass work as on other devices."""
    given, capture = arguments("fp8_row"), Capture()
    moved = {name: tensor.to("meta") if name in "xm" else tensor for name, tensor in given.items()}
    capture.compile(layer(lambda q, s, dtype: q.to("meta", dtype) * s.to("meta")[:, None]))(**moved)
    assert formats(capture) == ["dense"]
    assert "is on cpu, and the weight on meta" in capture.report.fused[0].note


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of two ranks. This process is the first rank, and nothing is communicated."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "wanted", "decode"),
    [
        ("int8_row", "int8_row", OF_ROWS["in x's dtype"]),
        ("fp8_block", "dense", OF_BLOCKS["expand"]),
        ("int4_group", "int4_group", OF_GROUPS["the format's own"]),
    ],
)
def test_shards_of_rows(mesh: DeviceMesh, name: str, wanted: str, decode: Decode) -> None:
    given, capture = arguments(name, d=140), Capture(strict=True)
    dims = {"x": Replicate(), "m": Shard(1), "q": Shard(0), "s": Replicate() if name == "fp8_block" else Shard(0)}
    shards = {key: distribute_tensor(t, mesh, [dims[key]], src_data_rank=None) for key, t in given.items()}
    found = capture.compile(layer(decode))(**shards)
    torch.testing.assert_close(found.to_local(), layer(decode)(**given)[:, :70])
    assert formats(capture) == [wanted]
    assert ("shards may divide blocks" in capture.report.fused[0].note) == (wanted == "dense")


class RowScaled(Tensor):
    """A weight with one scale per row, as a tensor subclass that every operation decodes, like torchao's weights."""

    q: Tensor
    s: Tensor

    @staticmethod
    def __new__(cls, q: Tensor, s: Tensor) -> Tensor:
        return Tensor._make_wrapper_subclass(cls, q.shape, dtype=s.dtype)

    def __init__(self, q: Tensor, s: Tensor) -> None:
        self.q, self.s = q, s

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["q", "s"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> RowScaled:
        return RowScaled(inner["q"], inner["s"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        decoded = tree_map(lambda a: a.q.to(a.s.dtype) * a.s[:, None] if isinstance(a, RowScaled) else a, args)
        return func(*decoded, **(kwargs or {}))


class SubclassLayer(nn.Module):
    def __init__(self, given: dict[str, Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(RowScaled(given["q"], given["s"]), requires_grad=False)
        self.register_buffer("m", given["m"])

    def forward(self, x: Tensor) -> Tensor:
        return layer(lambda *_: self.weight)(x, self.weight, self.weight, self.m)


def test_a_tensor_subclass_is_fused_once_export_has_decomposed_it() -> None:
    given = arguments("fp8_row", n_masks=2)
    module, report = SubclassLayer(given), FusionReport()
    program = export(module, given["x"])
    fused = fuse_exported(program.run_decompositions(), report=report, strict=True)
    assert [site.weight_format for site in report.fused] == ["fp8_row"]
    torch.testing.assert_close(fused.module()(given["x"]), module(given["x"]))
    fuse_exported(program, report=report)
    assert "is a RowScaled, and the operator takes plain tensors" in (report.missed[0].reason or "")
