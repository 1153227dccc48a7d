"""The activation format `fp8_token`: x is rounded to fp8 with one scale per token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.backends import Backend
from mglu_ops.backends.base import Prepared
from mglu_ops.call import Call
from mglu_ops.formats import quantize_activation, round_activation
from mglu_ops.given import Given
from tests.support.budgets import NAIVE_FACTOR, relative_error
from tests.support.layers import examples, forward, laid_out, naive_error, stored_layer

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HIGHEST = 448 * 2.0**119


each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def make(
    weight_format: str = "fp8_row",
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int, int] = (5, 130, 264),
    n_masks: int = 2,
) -> tuple[Given, Tensor]:
    return stored_layer(weight_format, dtype, *sizes, n_masks, activation_format="fp8_token")


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


# --- The format -------------------------------------------------------------------------------------------------------


@given(amax=st.floats(2**-149, HIGHEST, width=32), exponent=st.integers(-149, 119))
@example(amax=2**-149, exponent=-126)
@example(amax=448.0, exponent=-135)
@examples(200)
def test_the_scale_is_the_smallest_power_of_two(amax: float, exponent: int) -> None:
    """If the largest magnitude is 448 * 2^k, the scale is 2^k. For the next larger float it is 2^(k + 1)."""
    edge = torch.tensor(448 * 2.0**exponent, dtype=torch.float32)
    above = torch.nextafter(edge, torch.tensor(math.inf))
    for largest in (amax, edge.item(), above.item()):
        _, scale = quantize_activation(torch.tensor([[largest / 4, -largest, 0.0]], dtype=torch.float32))
        fraction, _ = math.frexp(scale.item())
        assert fraction == 0.5
        assert largest <= 448 * scale.item()
        assert largest > 448 * scale.item() / 2 or scale.item() == 2**-126
    if exponent >= -126:
        scales = quantize_activation(torch.stack((edge, above))[:, None])[1]
        assert scales.flatten().tolist() == [2.0**exponent, 2.0 ** (exponent + 1)]


@each_dtype
@pytest.mark.parametrize("size", [1e-5, 1.0, 1e4])
def test_each_value_is_rounded_to_the_nearest(dtype: torch.dtype, size: float) -> None:
    """The oracle searches all fp8 numbers for the nearest one. On a tie, it takes the one whose last bit is 0."""
    x = (size * torch.randn(7, 50) * torch.logspace(-6, 0, 50)).to(dtype)
    # 448 fixes the scale of the first row. Most of the other values of this row are ties.
    x[0, :8] = torch.tensor([448, -0.0, 2**-10, 3 * 2**-10, 17, 19, -21, 432]) * 2.0**-9
    x[0, 8:] = 0
    stored, scale = quantize_activation(x)
    numbers = torch.arange(128, dtype=torch.uint8)[:127].view(FP8).double()
    distance = ((x.double() / scale.double()).abs()[..., None] - numbers).abs()
    is_nearest = distance == distance.amin(-1, keepdim=True)
    expected = (is_nearest * (2 - torch.arange(127) % 2)).argmax(-1)
    assert torch.equal(bits(stored) & 0x7F, expected.to(torch.uint8))
    assert torch.equal(stored.float().signbit(), x.signbit())
    rounded = round_activation(x)
    assert rounded.dtype == dtype
    assert torch.equal(rounded.double(), stored.double() * scale.double())


@each_dtype
def test_the_smallest_and_largest_numbers_are_rounded_exactly(dtype: torch.dtype) -> None:
    """Rounded denormals are exact in x's dtype. Values rounded past its largest number become this number."""
    info = torch.finfo(dtype)
    tiny = (info.smallest_normal * info.eps * torch.arange(1, 600)).to(dtype)
    for x in (tiny[None], tiny[:3, None], torch.cat((tiny, tiny.new_ones(1)))[None]):
        stored, scale = quantize_activation(x)
        assert torch.equal(round_activation(x).double(), stored.double() * scale.double())
    most = torch.tensor([[info.max, -info.max, 0.0]], dtype=dtype)
    stored, scale = quantize_activation(most)
    assert (stored.double() * scale.double())[0, 0] > info.max
    assert round_activation(most).tolist() == [[info.max, -info.max, 0.0]]


@each_dtype
def test_zeros_and_values_that_are_not_finite(dtype: torch.dtype) -> None:
    x = torch.randn(4, 1000).to(dtype)
    x[0], x[1, 999], x[2, 17] = 0, math.nan, -math.inf
    stored, scale = quantize_activation(x)
    assert scale.flatten().nan_to_num(-1).tolist() == [1, -1, -1, quantize_activation(x[3:])[1].item()]
    assert stored.float().isnan().all(1).tolist() == round_activation(x).isnan().all(1).tolist()
    assert stored.float().isnan().any(1).tolist() == [False, True, True, False]
    assert torch.equal(bits(stored[3:]), bits(quantize_activation(x[3:])[0]))
    for shape in ((0, 8), (3, 0), (2, 0, 5)):
        stored, scale = quantize_activation(torch.ones(shape, dtype=dtype))
        assert (stored.shape, scale.shape, scale.dtype) == (shape, (*shape[:-1], 1), torch.float32)


@each_dtype
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_rounding_is_the_same_compiled_and_under_transforms(dtype: torch.dtype, backend: str) -> None:
    x = (torch.randn(3, 4, 33) * 10.0 ** torch.arange(-3, 1)[:, None]).to(dtype)
    x[1, 2, 3], x[2] = math.nan, 0
    expected = [bits(one) for one in quantize_activation(x)]

    def quantize(one: Tensor) -> tuple[Tensor, ...]:
        return (*(one.view(torch.int32 if one.itemsize == 4 else torch.uint8) for one in quantize_activation(one)),)

    compiled = torch.compile(quantize, backend=backend, fullgraph=True, dynamic=True)
    has_rule = torch.__version__ >= "2.12"  # torch 2.11 cannot batch `Tensor.view(dtype)`
    for function in (compiled, *([torch.vmap(quantize)] if has_rule else [])):
        for found, wanted in zip(function(x), expected, strict=True):
            assert torch.equal(found, wanted)
    with FakeTensorMode():
        fake = torch.empty(2, 3, 33, dtype=dtype)
    for rounded in (round_activation(fake), round_activation(x[:2, :3].to("meta"))):
        assert (rounded.shape, rounded.dtype) == ((2, 3, 33), dtype)


# --- The operator -----------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("n_masks", [1, 4])
def test_errors_equal_a_naive_layers_in_fp8(dtype: torch.dtype, n_masks: int) -> None:
    """Power-of-two scales are as exact as scales amax / 448, because fp8 has the same relative precision everywhere."""
    arguments, _ = make("fp8_row", dtype, (16, 256, 1024), n_masks)
    exact, naive = naive_error(arguments)
    assert 0.5 * naive < relative_error(forward(*arguments), exact) < NAIVE_FACTOR * naive


@pytest.mark.parametrize("layout", ["strided", "transposed", "expanded", "offset"])
def test_layouts_of_x_and_more_dimensions(layout: str) -> None:
    """The rounded x is contiguous for every layout of x. Each layout of x gets its own prepared call."""
    arguments, _ = make(dtype=torch.bfloat16, sizes=(6, 130, 264))
    x = laid_out(arguments.x, layout)
    expected = forward(*arguments._replace(x=round_activation(x).contiguous(), activation_format="dense"))
    for _ in range(2):
        assert torch.equal(forward(*arguments._replace(x=x)), expected)
    more = {name: getattr(arguments, name).view(3, 2, -1).transpose(0, 1) for name in ("x", "mask_weights")}
    found = forward(*arguments._replace(**more))
    assert torch.equal(found.transpose(0, 1).flatten(0, 1), forward(*arguments))


@each_dtype
def test_a_token_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    arguments, _ = make(dtype=dtype)
    expected = forward(*arguments)
    for value in (0.0, 1000.0, math.inf, math.nan):
        x = arguments.x.clone()
        x[1:4] *= value
        found = forward(*arguments._replace(x=x))
        assert torch.equal(found[::4], expected[::4])
        assert bool(found[1:4].isnan().all()) == (not math.isfinite(value))


@pytest.mark.parametrize("weight_format", ["fp8_row", "fp8_block"])
def test_opcheck(weight_format: str) -> None:
    """Skip opcheck's `test_schema`: it compares arguments before and after a call, and torch cannot compare fp8."""
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    report = torch.library.opcheck(torch.ops.mglu.forward.default, tuple(make(weight_format)[0][:8]), test_utils=checks)
    assert set(report.values()) == {"SUCCESS"}


def test_autocast_vmap_and_compiled_programs() -> None:
    arguments, _ = make()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(forward(*arguments), forward(*arguments._replace(x=arguments.x.bfloat16())))
    x = torch.stack((arguments.x, 3 * arguments.x))
    expected = torch.stack([forward(*arguments._replace(x=one)) for one in x])
    torch.testing.assert_close(torch.vmap(lambda one: forward(*arguments._replace(x=one)))(x), expected)
    compiled = torch.compile(lambda one: forward(*arguments._replace(x=one)), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x[1]), expected[1])


# --- Dispatch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds_x", [False, True])
def test_x_is_rounded_for_kernels_that_do_not_round_it(rounds_x: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Spy(Backend):
        name = "spy"
        device_type = None

        def reason(self, task: str, call: Call) -> None:
            return None

        def prepare(self, task: str, call: Call, launch: object = None) -> Prepared:
            seen.append((call.activation_format, call.x.strides))
            return lambda given: given.x

    arguments, _ = make()
    x = arguments.x.t().contiguous().t()
    monkeypatch.setattr(Spy, "rounds_x", rounds_x)
    monkeypatch.setattr(dispatch, "BACKENDS", {"spy": Spy()})
    found = dispatch.forward(arguments._replace(x=x), backend="spy")
    assert seen == [("fp8_token", (1, 5)) if rounds_x else ("dense", (264, 1))]
    assert torch.equal(found, x if rounds_x else round_activation(x))


def test_the_choice_names_the_format() -> None:
    for device in ("cpu", "meta"):
        moved = (value.to(device) if isinstance(value, Tensor) else value for value in make()[0])
        choice = mglu_ops.explain_dispatch(*list(moved)[:8])
        assert choice.activation_format == "fp8_token"
        assert ", weight in fp8_row, x rounded to fp8_token: " in str(choice)
