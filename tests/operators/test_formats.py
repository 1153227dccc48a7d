"""Weights in quantized formats."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.backends.cuda import DecodeMma, Plain, TileWgmma
from mglu_ops.backends.cuda.choice import choose
from mglu_ops.backends.cuda.device import KNOWN_GPUS
from mglu_ops.call import Call
from mglu_ops.files import source_directory
from mglu_ops.formats import FORMATS
from tests.support.families import quick_only_for
from tests.support.layers import every_stored_value, forward, stored_layer

STORED = [name for name, one in FORMATS.items() if not one.is_dense]
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
every_format = pytest.mark.parametrize("name", STORED)


@every_format
@pytest.mark.parametrize("sizes", [(3, 0, 64), (3, 0, 0), (0, 5, 64), (3, 5, 0)])
def test_empty_sizes_give_what_dense_weights_give(name: str, sizes: tuple[int, int, int]) -> None:
    given, expected = stored_layer(name, torch.float32, *sizes, 2)
    assert torch.equal(forward(*given).double(), expected)


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_strides_of_no_argument_matter(name: str, dtype: torch.dtype) -> None:
    given, _ = stored_layer(name, dtype, 6, 130, 264, 2)
    tensors = {key: value for key, value in given.tensors().items() if key != "mask_weights"}
    found = forward(*given)
    for key, tensor in tensors.items():
        spread = torch.zeros(*tensor.shape, 2, dtype=torch.uint8).to(tensor.dtype)[..., 0].copy_(tensor)
        transposed = tensor.t().contiguous().t() if tensor.dim() == 2 else spread
        for changed in (spread, transposed):
            assert not changed.is_contiguous() or changed.shape[0] == 1
            assert torch.equal(forward(*given._replace(**{key: changed})), found), key


@every_format
def test_more_dimensions_are_more_tokens(name: str) -> None:
    given, _ = stored_layer(name, torch.float32, 6, 130, 264, 2)
    found = forward(*given._replace(x=given.x.view(2, 3, -1), mask_weights=given.mask_weights.view(2, 3, -1)))
    assert torch.equal(found.view(6, -1), forward(*given))


@every_format
def test_every_stored_value_is_decoded(name: str) -> None:
    given, expected = every_stored_value(name)
    for backend in ("cpu", "composite"):
        found = dispatch.forward(given, backend=backend)
        torch.testing.assert_close(found[0], expected, equal_nan=True, rtol=0, atol=0)


@every_format
def test_quantizing_rounds_to_the_nearest(name: str) -> None:
    chosen, weight = FORMATS[name], torch.randn(130, 264, dtype=torch.float64)
    weight[7] = 0
    stored, scale = chosen.quantize(weight)
    assert (stored.dtype, scale.dtype, tuple(scale.shape)) == (
        chosen.dtype,
        chosen.scale_dtype,
        chosen.scale_shape(130, 264),
    )
    decoded = chosen.dequantize(stored, scale, torch.float64)
    assert torch.equal(decoded[7], weight[7])
    again, _ = chosen.quantize(decoded)
    assert torch.equal(again.view(torch.uint8), stored.view(torch.uint8))
    # The largest distance between neighbouring numbers: 32 for fp8 with its 4 significant bits, and 1 for integers.
    step = {torch.float8_e4m3fn: 32, torch.int8: 1, torch.uint8: 1}[chosen.dtype]
    columns = scale[:, None] if scale.dim() == 1 else scale.repeat_interleave(128, 1)[:, :264]
    rows = columns.repeat_interleave(chosen.rows, 0)[:130].double()
    assert ((decoded - weight).abs() <= 0.51 * step * rows).all()


def test_python_and_cpp_list_the_same_formats() -> None:
    source = (source_directory("cuda") / "weight_formats.cuh").read_text()
    found = {name: int(code) for name, code in re.findall(r"^    (\w+) = (\d+),", source, flags=re.MULTILINE)}
    assert found == {one.name: one.code for one in FORMATS.values()}
    assert f"kWeightFormats = {len(FORMATS)};" in source


LAYER, _ = stored_layer("fp8_row", torch.float32, 3, 256, 264, 2)
BLOCKS, _ = stored_layer("fp8_block", torch.float32, 3, 256, 264, 2)
NIBBLES, _ = stored_layer("int4_group", torch.float32, 3, 256, 264, 2)


@pytest.mark.parametrize("name", quick_only_for(["int4_group"], STORED))
def test_opcheck(name: str) -> None:
    """fp8 formats skip `test_schema`, which compares arguments before and after a call. torch cannot compare fp8."""
    given, _ = stored_layer(name, torch.float32, 3, 130, 264, 2)
    trained = given._replace(x=given.x.clone().requires_grad_(), mask_weights=given.mask_weights.requires_grad_())
    checks = CHECKS if given.weight.dtype.is_floating_point else ("test_schema", *CHECKS)
    for arguments in (given, trained):
        report = torch.library.opcheck(torch.ops.mglu.forward.default, tuple(arguments[:8]), test_utils=checks)
        assert set(report.values()) == {"SUCCESS"}


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_x_and_of_mask_weights(name: str, dtype: torch.dtype) -> None:
    """The gradients equal those of a layer with the decoded weight, in eager mode and compiled."""
    given, _ = stored_layer(name, dtype, 5, 130, 264, 3)
    decoded = FORMATS[name].dequantize(given.weight, given.weight_scale, dtype)

    def gradients(function: object, *rest: object) -> list[Tensor]:
        x, weights = given.x.clone().requires_grad_(), given.mask_weights.clone().requires_grad_()
        function(x, *rest[:1], given.packed_masks, "silu", weights, *rest[1:]).square().sum().backward()
        return [x.grad, weights.grad]

    expected = gradients(forward, decoded)
    stored = (given.weight, given.weight_scale, name)
    for function in (forward, torch.compile(forward, backend="aot_eager", fullgraph=True)):
        for found, want in zip(gradients(function, *stored), expected, strict=True):
            torch.testing.assert_close(found, want, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)


def test_autocast_casts_x_alone() -> None:
    for layer in (LAYER, NIBBLES):
        with torch.autocast("cpu", torch.bfloat16):
            found = forward(*layer)
        assert torch.equal(found, forward(*layer._replace(x=layer.x.bfloat16())))


@every_format
def test_vmap(name: str) -> None:
    """A vmap over x makes one call with more tokens. A vmap over the scales is a loop of calls."""
    given, _ = stored_layer(name, torch.float32, 4, 130, 264, 2)
    x = torch.stack((given.x, 2 * given.x))
    batched = torch.vmap(lambda one: forward(*given._replace(x=one)))(x)
    torch.testing.assert_close(batched, torch.stack([forward(*given._replace(x=one)) for one in x]))
    scales = torch.stack((given.weight_scale, 2 * given.weight_scale))
    per_scale = torch.vmap(lambda one: forward(*given._replace(weight_scale=one)))(scales)
    assert torch.equal(per_scale, torch.stack([forward(*given._replace(weight_scale=one)) for one in scales]))


def test_flops_count_the_decoded_weight() -> None:
    with FlopCounterMode(display=False) as counter:
        forward(*NIBBLES)
    assert counter.get_total_flops() == 3 * 2 * 3 * 256 * 264


def test_the_choice_names_the_format() -> None:
    for device in ("cpu", "meta"):
        given = [value.to(device) if isinstance(value, Tensor) else value for value in NIBBLES]
        assert ", weight in int4_group: " in str(mglu_ops.explain_dispatch(*given[:8]))


@every_format
@pytest.mark.parametrize("tokens", [1, 8, 16, 64, 256])
def test_kernels_that_take_a_format(name: str, tokens: int) -> None:
    hopper = KNOWN_GPUS[9, 0]
    call = Call.of(stored_layer(name, torch.bfloat16, tokens, 64, 256, 4)[0])
    assert call.bytes_of_columns(8) == (4 if name == "int4_group" else 8) + 4
    choice = choose(call, hopper)
    assert choice.config.plan(call, hopper)[-1].macros["MGLU_WEIGHT_FORMAT"] == FORMATS[name].code
    fast = DecodeMma if tokens <= 16 else TileWgmma
    assert isinstance(choice.config, fast)
    assert choice.slow_reason is None
    # A 16-byte vector holds 16 columns of 8 bits or 32 columns of 4 bits.
    for columns, expected in ((256 + 128 // call.weight.bits, fast), (264, Plain)):
        wider = Call.of(stored_layer(name, torch.bfloat16, tokens, 64, columns, 4)[0])
        assert isinstance(choose(wider, hopper).config, expected)
    if FORMATS[name].columns:
        assert DecodeMma(sub=1).violation(call, hopper) == f"sub: got 1, must be 2 or 4 for {name}"
