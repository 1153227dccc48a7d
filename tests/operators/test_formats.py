"""Weights in other formats than x's dtype, below the operators, which do not take them yet."""

from __future__ import annotations

import re

import pytest
import torch
from budgets import BUDGET, relative_error
from stored_weights import stored_layer

from mglu_ops import dispatch
from mglu_ops.backends import BACKENDS
from mglu_ops.backends.cuda import DecodeMma, Plain
from mglu_ops.backends.cuda.choice import choose
from mglu_ops.backends.cuda.compiler import source_directory
from mglu_ops.backends.cuda.device import KNOWN_GPUS
from mglu_ops.formats import FORMATS
from mglu_ops.layer_call import LayerArguments, LayerCall
from mglu_ops.masks import pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "d", "h", "n_masks"), [(1, 67, 45, 3), (2, 130, 64, 16), (40, 1030, 2056, 1)])
def test_cpu_and_composite_match_the_oracle(dtype: torch.dtype, tokens: int, d: int, h: int, n_masks: int) -> None:
    """On the CPU the decoded weights are exact, so that the error is as for a dense weight."""
    given, expected = stored_layer("fp8_row", dtype, tokens, d, h, n_masks)
    found = dispatch.forward(given, backend="cpu")
    assert relative_error(found, expected) < BUDGET[dtype]
    strided = given._replace(weight=given.weight.t().contiguous().t())
    assert torch.equal(dispatch.forward(strided, backend="cpu"), found)
    assert relative_error(dispatch.forward(given, backend="composite"), expected) < 2 * BUDGET[dtype]


def test_every_value_of_a_byte_is_decoded() -> None:
    """One weight a row, and a mask of ones, so that a result is `gate * value` with a value of x alone."""
    stored = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = torch.stack((stored, torch.ones_like(stored, dtype=torch.float32).to(stored.dtype)), 1)
    packed = pack(torch.tensor([[[True, False]]]).expand(1, 256, 2))
    x = torch.ones(1, 2)
    found = dispatch.forward(
        LayerArguments(x, weight, packed, "identity", None, torch.full((256,), 3.0), "fp8_row"), backend="cpu"
    )
    torch.testing.assert_close(found[0], 9 * stored.float(), equal_nan=True, rtol=0, atol=0)


def test_python_and_cpp_list_the_same_formats() -> None:
    source = (source_directory() / "weight_formats.cuh").read_text()
    found = {name: int(code) for name, code in re.findall(r"^    (\w+) = (\d+),", source, flags=re.MULTILINE)}
    assert found == {one.name: one.code for one in FORMATS.values()}


def test_other_backends_and_kernels_refuse_a_format_that_they_cannot_read() -> None:
    call = LayerCall.of(stored_layer("fp8_row", torch.bfloat16, 1, 64, 256, 4)[0])
    assert call.bytes_of_columns(8) == 8 + 4
    assert "fp8_row" in str(BACKENDS["triton"].unsupported_reason(call))
    choice = choose(call, KNOWN_GPUS[9, 0])
    assert isinstance(choice.config, Plain)
    assert choice.slow_reason == "the weight is in the format fp8_row"
    assert choice.config.sources(call, KNOWN_GPUS[9, 0])[0][2]["MGLU_WEIGHT_FORMAT"] == 1
    assert DecodeMma().violation(call, KNOWN_GPUS[9, 0]) == "decode_mma has no weight format fp8_row"


def test_autocast_leaves_a_weight_in_8_bits() -> None:
    given, _ = stored_layer("fp8_row", torch.float32, 1, 16, 16, 1)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=r"weight: got dtype torch\.float8_e4m3fn"),
    ):
        torch.ops.mglu.forward(*given[:3])
