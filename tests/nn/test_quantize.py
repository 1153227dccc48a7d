"""Modules with weights of 8 and 4 bits: results, checkpoints, moves, and PyTorch's operations on modules."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision, _setup_mixed_precision_params
from torch.nn.utils import parametrize

import mglu_ops
from mglu_ops.formats import ACTIVATION_FORMATS, FORMATS, round_activation
from mglu_ops.nn import (
    MGLU,
    MGLUExpertsFeedForward,
    MGLUFeedForward,
    NaiveMGLU,
    SwiMGLU,
    check_masks,
    freeze,
    quantize,
)
from tests.support.budgets import assert_matches

STORED = [name for name in FORMATS if name != "dense"]
each_format = pytest.mark.parametrize("weight_format", STORED)
IN, OUT = 132, 140  # more than one block and one group of 128


def frozen(**options: Any) -> SwiMGLU:
    return freeze(SwiMGLU(IN, OUT, n_masks=2, **options))


def stored(weight_format: str, **options: Any) -> SwiMGLU:
    """A new model in this format, into which a checkpoint can be loaded."""
    return SwiMGLU(IN, OUT, n_masks=2, learnable_masks=False, weight_format=weight_format, **options)


@each_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_results_and_gradients_of_x_agree_with_the_dequantized_weight(weight_format: str, dtype: torch.dtype) -> None:
    model = frozen(top_k=1, dtype=dtype)
    chosen, weight, down = FORMATS[weight_format], model.mglu.weight.detach().clone(), model.down_proj.weight
    assert quantize(model, weight_format) is model
    expected_weight, expected_scale = chosen.quantize(weight)
    assert torch.equal(model.mglu.weight.view(torch.uint8), expected_weight.view(torch.uint8))
    assert torch.equal(model.mglu.weight_scale, expected_scale)
    assert model.down_proj.weight is down, "only MGLU is quantized"
    exact = MGLU(IN, OUT, n_masks=2, learnable_masks=False, dtype=torch.float64)
    exact.packed_masks = model.mglu.packed_masks
    exact.weight = nn.Parameter(chosen.dequantize(expected_weight, expected_scale, torch.float64))
    x = torch.randn(2, 5, IN, dtype=dtype, requires_grad=True)
    weights = torch.rand(2, 5, 2, dtype=dtype)
    wide = x.detach().double().requires_grad_()
    y = model.mglu._project(x, weights, *model.mglu._tensors())
    expected = exact._project(wide, weights.double(), *exact._tensors())
    assert y.dtype == dtype
    assert_matches(y.detach(), expected.detach(), dtype)
    grad = torch.randn_like(y)
    grad_x = torch.autograd.grad(y, x, grad)[0]
    assert_matches(grad_x, torch.autograd.grad(expected, wide, grad.double())[0], dtype, "the gradient of x")
    assert model(x).shape == x.shape


def test_adapters_train_beside_a_quantized_weight_which_has_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(IN, IN), quantize(frozen(), "fp8_row"))
    x = torch.randn(3, IN)
    grads = {}
    for model[1].mglu.save_activations in (True, False):
        grads[model[1].mglu.save_activations] = torch.autograd.grad(model(x).sum(), model[0].weight)[0]
    assert torch.equal(grads[True], grads[False])
    assert grads[True].norm() > 0
    before = copy.deepcopy(model[1].mglu.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    model(x).sum().backward()
    optimizer.step()
    assert all(
        torch.equal(value.view(torch.uint8), before[key].view(torch.uint8))
        for key, value in model[1].mglu.state_dict().items()
    )
    model[1].mglu.weight.requires_grad_()
    with pytest.raises(ValueError, match=r"weight: got a tensor that requires a gradient.*weight_format='fp8_row'"):
        model(x)


@each_format
def test_compiled_and_exported_modules_compute_the_same(weight_format: str) -> None:
    model, x = quantize(frozen(), weight_format), torch.randn(3, IN)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


# --- Activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_format", ACTIVATION_FORMATS["fp8_token"])
def test_activations_are_rounded_where_the_user_chose_it(weight_format: str) -> None:
    model, x = quantize(frozen(top_k=1), weight_format), torch.randn(3, IN)
    weight, weights = model.mglu.weight, torch.rand(3, 2)
    as_it_is = model.mglu._project(x, weights, *model.mglu._tensors())
    rounded = model.mglu._project(round_activation(x), weights, *model.mglu._tensors())
    assert "activation_format" not in repr(model)
    quantize(model, weight_format, activation_format="fp8_token")
    assert model.mglu.weight is weight, "a quantized weight is not rounded twice"
    assert "activation_format='fp8_token'" in repr(model)
    loaded = stored(weight_format, top_k=1, activation_format="fp8_token")
    loaded.load_state_dict(model.state_dict())
    for one in (model, loaded, copy.deepcopy(model), _saved(model), model.to(torch.float32)):
        assert torch.equal(one.mglu._project(x, weights, *one.mglu._tensors()), rounded)
    with torch.no_grad():
        for whole in (
            torch.compile(model, backend="aot_eager", fullgraph=True),
            torch.export.export(model, (x,)).module(),
        ):
            torch.testing.assert_close(whole(x), model(x))
    quantize(model, weight_format)
    assert torch.equal(model.mglu._project(x, weights, *model.mglu._tensors()), as_it_is)


def test_layers_that_round_activations_do_not_train() -> None:
    model = quantize(frozen(), "fp8_row", activation_format="fp8_token")
    x = torch.randn(3, IN, requires_grad=True)
    with torch.no_grad():
        expected = model(x)
    assert torch.equal(model(x.detach()), expected)
    for model.mglu.save_activations in (True, False):
        with pytest.raises(ValueError, match=r"x: got a tensor that requires a gradient, must be called under torch"):
            model(x)


def test_activation_formats_that_do_not_fit_are_refused() -> None:
    words = "activation_format: got 'fp8_token', must be dense for weight_format='{}'"
    for name in ("int8_row", "int4_group"):
        model = frozen()
        with pytest.raises(ValueError, match=words.format(name)):
            quantize(model, name, activation_format="fp8_token")
        assert model.mglu.weight_format == "dense"
        with pytest.raises(ValueError, match=words.format(name)):
            stored(name, activation_format="fp8_token")
    for make in (MGLU, MGLUFeedForward, NaiveMGLU):
        with pytest.raises(ValueError, match=words.format("dense")):
            make(16, 16, activation_format="fp8_token")
        layer = make(16, 16)
        getattr(layer, "mglu", layer).activation_format = "fp8_token"
        with pytest.raises(ValueError, match=words.format("dense")):
            layer(torch.randn(3, 16))
    with pytest.raises(ValueError, match="activation_format: got 'fp8', must be one of dense, fp8_token"):
        quantize(frozen(), "fp8_row", activation_format="fp8")


# --- PyTorch's operations on modules ----------------------------------------------------------------------------------


def _pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _saved(model: nn.Module) -> nn.Module:
    return torch.load(_file(model), weights_only=False)


def _swapped(model: nn.Module) -> nn.Module:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(torch.float16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


# Name -> operation, and the dtype of dense parameters afterwards.
OPERATIONS: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "to bfloat16": (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    "to another model's dtype": (lambda m: m.to(nn.Linear(1, 1, dtype=torch.float16).weight), torch.float16),
    "half and back": (lambda m: m.half().float(), torch.float32),
    "swapped parameters": (_swapped, torch.float16),
    "type": (lambda m: m.down_proj.type(torch.float16) and m.mglu.type(torch.uint8) and m, torch.float16),
    "deepcopy": (copy.deepcopy, torch.float32),
    "pickle": (_pickled, torch.float32),
    "torch.save": (_saved, torch.float32),
}


@each_format
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_operation_converts_the_stored_weight(name: str, weight_format: str) -> None:
    operation, dtype = OPERATIONS[name]
    if name == "pickle" and FORMATS[weight_format].dtype is torch.float8_e4m3fn:
        pytest.skip("torch 2.13 cannot unpickle a float8 tensor; torch.save works")
    model = quantize(frozen(), weight_format)
    before = copy.deepcopy(dict(model.mglu.named_parameters()))
    model = operation(model)
    assert model.down_proj.weight.dtype == dtype
    for key, expected in before.items():
        found = model.mglu.get_parameter(key)
        assert found.dtype == expected.dtype
        assert not found.requires_grad
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), key
    assert model(torch.randn(2, IN, dtype=dtype)).dtype == dtype


def test_a_moved_model_keeps_its_dtypes_on_every_device() -> None:
    model = quantize(frozen(), "fp8_row").to("meta", torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {
        ("meta", torch.float8_e4m3fn),
        ("meta", torch.float32),
        ("meta", torch.bfloat16),
    }
    model.to_empty(device="cpu").mglu.reset_parameters()
    assert model.mglu.weight.dtype is torch.float8_e4m3fn
    decoded = FORMATS["fp8_row"].dequantize(model.mglu.weight, model.mglu.weight_scale, torch.float32)
    assert 0.5 < decoded.abs().max() * IN**0.5 < 1.1  # the initial weights of nn.Linear


@each_format
@pytest.mark.parametrize(
    "options", [{}, {"assign": True}, {"strict": False}, {"assign": True, "device": "meta"}], ids=str
)
def test_a_checkpoint_is_loaded_bit_for_bit(weight_format: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, x = quantize(frozen(), weight_format).eval(), torch.randn(3, IN)
    assert set(model.mglu.state_dict()) == {"weight", "weight_scale", "packed_masks"}
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    options = dict(options)
    empty = stored(weight_format, device=options.pop("device", None))
    empty.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"), **options)
    assert torch.equal(empty(x), model(x))
    assert not any(p.requires_grad for p in empty.mglu.parameters())
    with torch.device("meta"):
        skeleton = quantize(frozen(), weight_format)
    skeleton.load_state_dict(torch.load(_file(model.state_dict()), weights_only=True), assign=True)
    assert torch.equal(skeleton(x), model(x))


def _file(state: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def _without(key: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.pop(f"mglu.{key}")


def _with(key: str, change: Callable[[Tensor], object]) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.update({f"mglu.{key}": change(state[f"mglu.{key}"])})


def _with_scale(value: float) -> Callable[[dict[str, Tensor]], None]:
    return _with("weight_scale", lambda scale: torch.cat([scale[:-1], scale.new_tensor([value])]))


# Name -> a change to the state dict of a model in fp8_row, and the error.
WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "no scale": (_without("weight_scale"), r"mglu\.weight_scale: got no tensor, must be torch\.float32 \[140\]"),
    "no weight": (_without("weight"), r"mglu\.weight: got no tensor, must be torch\.float8_e4m3fn \[140, 132\]"),
    "the scale in bfloat16": (
        _with("weight_scale", Tensor.bfloat16),
        r"weight_scale: got torch\.bfloat16 \[140\], must",
    ),
    "a scale of another shape": (
        _with("weight_scale", lambda s: s[:, None]),
        r"weight_scale: got .*\[140, 1\], must be",
    ),
    "a scale of NaN": (
        _with_scale(torch.nan),
        r"mglu\.weight_scale: got nan among 140 scales, must be finite and above",
    ),
    "an infinite scale": (_with_scale(torch.inf), r"mglu\.weight_scale: got inf among 140 scales, must be finite"),
    "a negative scale": (_with_scale(-1.0), r"mglu\.weight_scale: got -1\.0 among 140 scales, must be finite"),
    "a scale of 0": (_with_scale(0.0), r"mglu\.weight_scale: got 0\.0 among 140 scales, must be finite and above 0"),
    "no tensor": (_with("weight_scale", Tensor.tolist), r"weight_scale: got no tensor"),
    "int8": (_with("weight", lambda w: w.view(torch.int8)), r"mglu\.weight: got torch\.int8 \[140, 132\], must be"),
    "a bfloat16 weight": (
        _with("weight", Tensor.bfloat16),
        r"mglu\.weight: got torch\.bfloat16 .* call mglu_ops\.quantize after loading",
    ),
    "another shape": (_with("weight", lambda w: w[:, :8]), r"mglu\.weight: got .*\[140, 8\], must be .*\[140, 132\]"),
    "a dense checkpoint": (
        lambda state: [_without("weight_scale")(state), _with("weight", Tensor.half)(state)],
        r"mglu\.weight: got torch\.float16 .*load it into a dense model, and call mglu_ops\.quantize after loading",
    ),
}
LOADING = [{}, {"strict": False}, {"assign": True}, {"strict": False, "assign": True}]


@pytest.mark.parametrize("options", LOADING, ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_weights_and_scales_are_refused_by_name(name: str, options: dict[str, bool]) -> None:
    change, words = WRONG[name]
    state = quantize(frozen(), "fp8_row").state_dict()
    change(state)
    _is_refused(stored("fp8_row"), state, words, options)


@each_format
@pytest.mark.parametrize("options", LOADING, ids=str)
def test_checkpoints_of_another_format_are_refused(weight_format: str, options: dict[str, bool]) -> None:
    dense, state = frozen(), quantize(frozen(), weight_format).state_dict()
    words = r"mglu\.weight_scale: the checkpoint holds a quantized weight, .* call mglu_ops\.quantize\(model"
    _is_refused(dense, state, words, options)
    del state["mglu.weight_scale"]
    _is_refused(dense, state, r"mglu\.weight: got dtype .*, must be one of torch\.float16", options)
    for other in STORED:
        if other != weight_format:
            words = rf"mglu\.weight(_scale)?: got .*, must be .* for weight_format='{weight_format}'"
            _is_refused(stored(weight_format), quantize(frozen(), other).state_dict(), words, options)


def _is_refused(model: nn.Module, state: dict[str, Tensor], words: str, options: dict[str, bool]) -> None:
    before = {key: value.clone() for key, value in model.mglu.named_parameters()}
    with pytest.raises(RuntimeError, match=words) as raised:
        model.load_state_dict(state, **options)
    assert "Missing" not in str(raised.value)
    assert "Unexpected" not in str(raised.value)
    assert "size mismatch" not in str(raised.value)
    for key, expected in before.items():
        found = model.mglu.get_parameter(key)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), "a refused tensor was loaded"


@each_format
def test_scales_of_zeros_are_above_0(weight_format: str) -> None:
    model = frozen()
    nn.init.zeros_(model.mglu.weight)
    loaded = stored(weight_format)
    loaded.load_state_dict(quantize(model, weight_format).state_dict())
    check_masks(loaded)
    assert not loaded.mglu(torch.ones(1, IN)).any()


def test_scales_that_were_written_are_checked_with_the_masks() -> None:
    model = quantize(frozen(), "int4_group")
    model.mglu.weight_scale.data[5, 1] = torch.nan
    with pytest.raises(ValueError, match=r"^model: mglu\.weight_scale: got nan among 280 scales, must be finite"):
        check_masks(model)


def test_missing_keys_are_reported_as_ever() -> None:
    state = {"down_proj.weight": torch.zeros(IN, OUT)}
    assert "mglu.weight_scale" in stored("fp8_row").load_state_dict(state, strict=False).missing_keys
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*mglu\.weight_scale"):
        stored("fp8_row").load_state_dict(state)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("weight", torch.zeros(OUT, IN), r"weight: got dtype torch\.float32, must be torch\.float8_e4m3fn"),
        ("weight_scale", torch.ones(OUT, 1), r"weight_scale: got shape \[140, 1\], must be \[140\]"),
        ("weight_scale", None, r"weight_scale: got None, must be torch\.float32 \[140\]"),
    ],
)
def test_what_other_loaders_assign_is_refused_in_use(key: str, value: Tensor | None, words: str) -> None:
    model = quantize(frozen(), "fp8_row")
    other = "weight" if key == "weight_scale" else "weight_scale"
    setattr(model.mglu, other, copy.deepcopy(getattr(model.mglu, other)))
    setattr(model.mglu, key, None if value is None else nn.Parameter(value, requires_grad=False))
    with pytest.raises((TypeError, ValueError), match=words):
        model(torch.randn(2, IN))


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}], ids=str)
def test_a_weight_that_accelerate_casts_is_refused_in_use(options: dict[str, Any], tmp_path: Path) -> None:
    accelerate, path, x = pytest.importorskip("accelerate"), str(tmp_path / "model.safetensors"), torch.randn(2, IN)

    def loaded(checkpoint: nn.Module, **options: Any) -> nn.Module:
        safetensors.torch.save_file(checkpoint.state_dict(), path)
        return accelerate.load_checkpoint_and_dispatch(stored("fp8_row"), path, device_map={"": "cpu"}, **options)

    model, words = loaded(frozen(), **options), "weight, weight_scale: one of the two was replaced"
    with pytest.raises(ValueError, match=words):
        model(x.to(options.get("dtype")))
    with pytest.raises(ValueError, match=rf"model: mglu\.{words}"):
        check_masks(model)
    quantized = quantize(frozen(), "fp8_row")
    assert torch.equal(loaded(quantized)(x), quantized(x))


# Ways to give a layer the weight of another layer without its scales, or the scales without the weight.
PARTING: dict[str, Callable[[Any, Any], None]] = {
    "the weight": lambda layer, other: setattr(layer, "weight", other.weight),
    "the scales": lambda layer, other: setattr(layer, "weight_scale", other.weight_scale),
    "a copy": lambda layer, other: setattr(layer, "weight", copy.deepcopy(other.weight)),
    "a new parameter": lambda layer, other: setattr(layer, "weight", nn.Parameter(other.weight.data, False)),
    "registered": lambda layer, other: layer.register_parameter("weight_scale", other.weight_scale),
    "swapped": lambda layer, other: torch.utils.swap_tensors(layer.weight, other.weight),
}


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("name", PARTING)
def test_a_weight_and_its_scales_are_not_parted_unnoticed(name: str, copied: bool) -> None:
    x, layers = torch.randn(2, IN), [quantize(frozen(), "int8_row").mglu for _ in range(2)]
    layer, other = map(copy.deepcopy, layers) if copied else layers
    PARTING[name](layer, other)
    words = "weight, weight_scale: one of the two was replaced without the other one, must be replaced together"
    with pytest.raises(ValueError, match=f"^{words}"):
        layer(x)
    with pytest.raises(ValueError, match=f"^model: {words}"):
        mglu_ops.dequantize(layer)
    if name != "swapped":
        layer.weight, layer.weight_scale = other.weight, other.weight_scale
        layer.packed_masks = other.packed_masks
        assert torch.equal(layer(x), other(x))


def test_a_pair_is_tied_moved_and_replaced_together() -> None:
    x, (layer, other) = torch.randn(2, IN), [quantize(frozen(), "fp8_row").mglu for _ in range(2)]
    for name in ("weight_scale", "weight"):
        setattr(layer, name, getattr(other, name))  # `layer` now has the weight and scales of `other`
    layer.packed_masks = other.packed_masks
    for one in (layer, other, copy.deepcopy(layer), _saved(layer), layer.half().float()):
        assert torch.equal(one(x), other(x))
    with torch.device("meta"):
        moved = quantize(frozen(), "fp8_row").mglu
    moved.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(moved(x), other(x))


# --- Back to dense weights --------------------------------------------------------------------------------------------


@each_format
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_dequantized_weights_are_the_products_of_numbers_and_scales(
    weight_format: str, dtype: torch.dtype | None
) -> None:
    block = MGLUExpertsFeedForward(2, IN, 160, 1, n_masks=2)
    model = quantize(freeze(nn.Sequential(SwiMGLU(IN, OUT, n_masks=2), block)), weight_format)
    layers = [model[0].mglu, block.experts, block.down_proj]
    before = copy.deepcopy(model.state_dict())
    expected = [
        FORMATS[weight_format].dequantize(one.weight, one.weight_scale, dtype or torch.float32) for one in layers
    ]
    assert mglu_ops.dequantize(model, dtype=dtype) is model
    for layer, weight in zip(layers, expected, strict=True):
        assert torch.equal(layer.weight, weight)
        assert layer.weight.dtype == weight.dtype
        assert layer.weight.requires_grad
        assert (layer.weight_scale, layer.weight_format) == (None, "dense")
    if dtype is None:  # in float32, quantizing again gives the same bits
        for key, value in quantize(model, weight_format).state_dict().items():
            assert torch.equal(value.view(torch.uint8), before[key].view(torch.uint8)), key


@pytest.mark.parametrize("kind", ["experts", "down projections"])
def test_a_stored_weight_that_is_parametrized(kind: str) -> None:
    """Adapters may parametrize a weight. This parametrization is the identity, so results must not change."""
    block = quantize(freeze(MGLUExpertsFeedForward(2, IN, OUT, 1)), "int8_row")
    x, layer = torch.randn(3, IN), block.experts if kind == "experts" else block.down_proj
    expected = block(x)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    with pytest.raises(
        ValueError, match=r"^weight: got a tensor that .* computes, must be the stored one for weight_f"
    ):
        block(x)
    parametrize.register_parametrization(layer, "weight_scale", nn.Identity())
    assert torch.equal(block(x), expected)
    check_masks(block)
    with pytest.raises(ValueError, match=r"model: \w+ computes its weight from other tensors"):
        mglu_ops.dequantize(block)
    assert block.half()(x.half()).dtype == torch.float16, "what the weight is computed from keeps its dtype"


@each_format
def test_data_parallel_training_makes_no_copies_of_stored_weights(weight_format: str) -> None:
    """This test calls only the part of mixed precision that casts copies of parameters. The rest needs a GPU."""
    model = quantize(frozen(), weight_format)
    for one in (model, copy.deepcopy(model), _saved(model), model.half()):
        _setup_mixed_precision_params(_MixedPrecision(torch.bfloat16), one)
        cast = {name for name, parameter in one.named_parameters() if hasattr(parameter, "_mp_param")}
        assert cast == {"down_proj.weight"}


@each_format
def test_autocast_computes_as_a_model_in_its_dtype(weight_format: str) -> None:
    model, x = quantize(frozen(), weight_format), torch.randn(3, IN)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    assert torch.equal(found, model.bfloat16()(x.bfloat16()))
