"""Models that `mglu_ops.quantize` has quantized: saved and loaded, alone and beside a quantizer of linear layers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

import mglu_ops
from mglu_ops.formats import FORMATS
from mglu_ops.transformers import MGLUQuantizationConfig
from tests.support.families import family
from tests.support.hf_models import BY_NAME, frozen, loaded_from_disk, logits, mglus, rewrite, tiny

STORED = [name for name, one in FORMATS.items() if not one.is_dense]
KEY = "layers.1.mlp.mglu"


def quantized(weight_format: str, name: str = "llama", skip: tuple[str, ...] = (), **changes: Any) -> Any:
    return mglu_ops.quantize(frozen(tiny(name, **changes)), weight_format, skip=skip)


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def assert_same_layers(result: Any, model: Any) -> None:
    """Check that all MGLU layers hold the same bits in the same dtypes, and that only dense weights have gradients."""
    for ours, theirs in zip(mglus(model), mglus(result), strict=True):
        assert theirs.weight_format == ours.weight_format
        state = theirs.state_dict()
        for key, tensor in ours.state_dict().items():
            assert state[key].dtype == tensor.dtype, key
            assert torch.equal(state[key].view(torch.uint8), tensor.view(torch.uint8)), key
        is_dense = ours.weight_format == "dense"
        assert theirs.weight.requires_grad == is_dense
        assert is_dense or not theirs.weight_scale.requires_grad


@pytest.mark.parametrize(("name", "weight_format"), family(BY_NAME, STORED, most=1))
def test_a_quantized_model_comes_back(weight_format: str, name: str, tmp_path: Path) -> None:
    model = quantized(weight_format, name, mask_top_k=1)
    expected = logits(model)
    model.save_pretrained(tmp_path / "first")
    entry = {"quant_method": "mglu", "weight_format": weight_format, "modules_to_not_convert": []}
    assert config_of(tmp_path / "first")["quantization_config"] == entry
    load(tmp_path / "first").save_pretrained(tmp_path / "second", max_shard_size="20KB")
    for result in (load(tmp_path / "first", dtype="auto"), load(tmp_path / "second", device_map="cpu")):
        assert_same_layers(result, model)
        assert torch.equal(logits(result), expected)
    assert (tmp_path / "second" / "config.json").read_text() == (tmp_path / "first" / "config.json").read_text()
    decoder = AutoModel.from_pretrained(tmp_path / "first")
    assert_same_layers(decoder, model)


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize(("weight_format", "name"), family(STORED, BY_NAME, most=2))
def test_a_layer_on_the_disk_is_that_of_the_checkpoint(
    weight_format: str, name: str, offload_buffers: bool, tmp_path: Path
) -> None:
    """An offloaded layer has its weight on meta. Transformers must not treat this weight as missing."""
    model = quantized(weight_format, name, mask_top_k=1)
    model.save_pretrained(tmp_path / "first")
    result = loaded_from_disk(tmp_path / "first", offload_buffers=offload_buffers)
    assert mglus(result)[1].weight.is_meta
    assert mglus(result)[1].packed_masks.is_meta == offload_buffers
    assert torch.equal(logits(result), logits(model))
    with pytest.warns(UserWarning, match="save a model with offloaded modules"):
        result.save_pretrained(tmp_path / "second")
    assert_same_layers(load(tmp_path / "second"), model)


def test_layers_that_max_memory_leaves_on_the_disk_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = quantized("int8_row")
    model.save_pretrained(tmp_path)
    options = {"device_map": "auto", "max_memory": {"cpu": 40_000}, "offload_folder": tmp_path / "offload"}
    result = load(tmp_path, **options)
    assert mglus(result)[1].weight.is_meta
    assert torch.equal(logits(result), logits(model))


@pytest.mark.parametrize("weight_format", STORED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype_casts_no_stored_weight(weight_format: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = quantized(weight_format)
    model.save_pretrained(tmp_path)
    result = load(tmp_path, dtype=dtype)
    assert_same_layers(result, model)
    x = torch.ones(3, 36, dtype=dtype)
    assert torch.equal(mglus(result)[1](x), mglus(model)[1](x))


def test_the_format_of_activations_comes_back(tmp_path: Path) -> None:
    model = quantized("fp8_row", skip=("model.layers.0",))
    dense = logits(model)
    mglu_ops.quantize(model, "fp8_row", activation_format="fp8_token", skip=["model.layers.0"])
    assert not torch.equal(logits(model), dense)
    model.save_pretrained(tmp_path)
    assert config_of(tmp_path)["quantization_config"]["activation_format"] == "fp8_token"
    result = load(tmp_path)
    assert [mglu.activation_format for mglu in mglus(result)] == ["dense", "fp8_token"]
    assert torch.equal(logits(result), logits(model))
    mglu_ops.quantize(result, "fp8_row")
    mglus(result)[1].activation_format = "fp8_token"
    words = "model: some layers are quantized to fp8_row and others to fp8_row with x in fp8_token, which no"
    with pytest.raises(ValueError, match=words):
        result.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="activation_format: got 'fp8_token', must be dense for weight_format='int8"):
        MGLUQuantizationConfig("int8_row", activation_format="fp8_token")


def dequantized_after_saving(model: Any) -> Any:
    """Transformers' method. Saving a model replaces the dtype in its configuration by its name."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
    return model.dequantize()


@pytest.mark.parametrize(
    "dequantize", [mglu_ops.dequantize, lambda model: model.dequantize(), dequantized_after_saving]
)
def test_a_dequantized_model_is_saved_as_a_dense_one(dequantize: Callable[[Any], Any], tmp_path: Path) -> None:
    quantized("fp8_row").save_pretrained(tmp_path / "quantized")
    model = dequantize(load(tmp_path / "quantized"))
    assert all(mglu.weight.requires_grad for mglu in mglus(model))
    model.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in config_of(tmp_path / "dense")
    assert_same_layers(load(tmp_path / "dense"), model)
    mglu_ops.quantize(model, "int8_row").save_pretrained(tmp_path / "other")
    assert_same_layers(load(tmp_path / "other"), model)


def test_down_projections_of_experts_that_were_skipped_stay_dense(tmp_path: Path) -> None:
    model = quantized("int8_row", "mixtral", skip=("*.down_proj",))
    model.save_pretrained(tmp_path)
    names = [f"model.layers.{i}.mlp.experts.down_proj" for i in range(len(model.model.layers))]
    assert config_of(tmp_path)["quantization_config"]["modules_to_not_convert"] == names
    result = load(tmp_path)
    assert_same_layers(result, model)
    assert [layer.mlp.experts.down_proj.weight_format for layer in result.model.layers] == ["dense"] * len(names)
    assert torch.equal(logits(result), logits(model))


def test_layers_that_were_skipped_stay_dense(tmp_path: Path) -> None:
    """The configuration of a decoder names layers without the prefix `model.` of the language model."""
    model = quantized("fp8_row", skip=("model.layers.0",))
    model.save_pretrained(tmp_path / "model")
    model.model.save_pretrained(tmp_path / "decoder")
    for folder, name in (("model", "model.layers.0.mlp.mglu"), ("decoder", "layers.0.mlp.mglu")):
        assert config_of(tmp_path / folder)["quantization_config"]["modules_to_not_convert"] == [name]
        assert_same_layers(AutoModel.from_pretrained(tmp_path / folder), model)
        result = load(tmp_path / folder)
        assert_same_layers(result, model)
        hidden = result.model(torch.arange(5)[None]).last_hidden_state
        assert torch.equal(hidden, model.model(torch.arange(5)[None]).last_hidden_state)


def test_a_configuration_makes_a_model_with_random_stored_weights(tmp_path: Path) -> None:
    quantized("fp8_block").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert [mglu.weight.dtype for mglu in mglus(model)] == [torch.float8_e4m3fn] * 2
    assert logits(model).isfinite().all()


def test_adapters_of_other_layers_train(tmp_path: Path) -> None:
    """Trainer asks the quantizer whether a model can be trained."""
    peft = pytest.importorskip("peft")
    from transformers.trainer_utils import validate_quantization_for_training

    quantized("int8_row").save_pretrained(tmp_path)
    model = load(tmp_path)
    with pytest.raises(ValueError, match="cannot perform fine-tuning on purely quantized models"):
        validate_quantization_for_training(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    validate_quantization_for_training(adapted)
    text = torch.arange(1, 10)[None]
    adapted(input_ids=text, labels=text).loss.backward()
    trained = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert trained
    assert all("lora" in name for name in trained)


# Name -> a change of the tensors of a checkpoint in fp8_row, the error, and its message.
WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor | None]], type[Exception], str]] = {
    "no scale": (
        lambda _: {f"model.{KEY}.weight_scale": None},
        ValueError,
        rf"has no (model\.)?{KEY}.weight_scale; masks and weights of MGLU layers are never drawn at random",
    ),
    "scales of other rows": (
        lambda state: {f"model.{KEY}.weight_scale": state[f"model.{KEY}.weight_scale"][1:].clone()},
        ValueError,
        rf"{KEY}.weight_scale has shape \[43\], but the configuration says \[44\]",
    ),
    "scales in bfloat16": (
        lambda state: {f"model.{KEY}.weight_scale": state[f"model.{KEY}.weight_scale"].bfloat16()},
        TypeError,
        rf"{KEY}.weight_scale has dtype BF16, must be float32 \(F32\) for the weight_format fp8_row",
    ),
    "a dense weight": (
        lambda state: {f"model.{KEY}.weight": state[f"model.{KEY}.weight"].float()},
        TypeError,
        rf"{KEY}.weight has dtype F32, must be float8_e4m3fn \(F8_E4M3\) for the weight_format fp8_row",
    ),
    "a router of more masks": (
        lambda state: {f"model.{KEY}.router.weight": torch.ones(3, 36)},
        ValueError,
        rf"{KEY}.router.weight has shape \[3, 36\], but the configuration says \[2, 36\]",
    ),
    "a down projection of other rows": (
        lambda state: {"model.layers.1.mlp.down_proj.weight": torch.ones(35, 44)},
        ValueError,
        r"layers.1.mlp.down_proj.weight has shape \[35, 44\], but the configuration says \[36, 44\]",
    ),
    "a weight of other rows": (
        lambda state: {f"model.{KEY}.weight": state[f"model.{KEY}.weight"][1:].clone()},
        ValueError,
        rf"{KEY}.weight has shape \[43, 36\], but the configuration says \[44, 36\]",
    ),
}


def _with_scale(value: float) -> tuple[Callable[[dict[str, Tensor]], dict[str, Tensor | None]], type[Exception], str]:
    def change(state: dict[str, Tensor]) -> dict[str, Tensor | None]:
        scale = state[f"model.{KEY}.weight_scale"].clone()
        scale[3] = value
        return {f"model.{KEY}.weight_scale": scale}

    return change, ValueError, rf"{KEY}.weight_scale: got {value} among 44 scales, must be finite and above 0"


WRONG |= {f"a scale of {value}": _with_scale(value) for value in (torch.nan, torch.inf, -1.0, 0.0)}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": torch.bfloat16, "ignore_mismatched_sizes": True}, {"device_map": {"": "disk"}}],
    ids=["plain", "bfloat16", "disk"],
)
def test_a_wrong_tensor_is_named(wrong: str, options: dict[str, Any], tmp_path: Path) -> None:
    change, error, words = WRONG[wrong]
    quantized("fp8_row", mask_top_k=1).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda state: {k: v for k, v in {**state, **change(state)}.items() if v is not None})
    for cls in (AutoModel, AutoModelForCausalLM):
        with pytest.raises(error, match=words):
            cls.from_pretrained(tmp_path, **options)


def test_a_configuration_of_another_format_is_refused(tmp_path: Path) -> None:
    quantized("fp8_row").save_pretrained(tmp_path)
    entry = config_of(tmp_path)
    for changed, words in (
        ({"quant_method": "mglu", "weight_format": "int8_row"}, r"dtype F8_E4M3, must be int8 \(I8\)"),
        ({"quant_method": "mglu", "weight_format": "fp4"}, "weight_format: got 'fp4', must be one of dense, fp8_row"),
        (None, "dtype F8_E4M3, must be one of F16, .* whose configuration says so in quantization_config"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**entry, "quantization_config": changed}))
        with pytest.raises((TypeError, ValueError), match=words):
            load(tmp_path)


# Name -> the entries of quantization_config besides quant_method, and the error.
UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "no format": ({}, "weight_format: got None, must be one of dense, fp8_row"),
    "a list of formats": ({"weight_format": ["fp8_row"]}, r"weight_format: got \['fp8_row'\], must be one of dense"),
    "a format of activations": (
        {"weight_format": "fp8_row", "activation_format": {}},
        "activation_format: got {}, must be one of dense, fp8_token",
    ),
    "an unknown key": (
        {"weight_format": "fp8_row", "group_size": 64},
        "quantization_config: got group_size=64, must have no keys but quant_method, weight_format",
    ),
    "names in a str": (
        {"weight_format": "fp8_row", "modules_to_not_convert": f"model.{KEY}"},
        f"modules_to_not_convert: got 'model.{KEY}', must be a list of names",
    ),
    "an empty str": (
        {"weight_format": "fp8_row", "modules_to_not_convert": ""},
        "modules_to_not_convert: got '', must be a list of names",
    ),
    "a number": (
        {"weight_format": "fp8_row", "modules_to_not_convert": [5]},
        r"modules_to_not_convert: got \[5\], must be a list of names",
    ),
    "an unknown name": (
        {"weight_format": "fp8_row", "modules_to_not_convert": ["model.layers.1"]},
        "modules_to_not_convert: got 'model.layers.1', must be names of layers .* layers.0.mlp.mglu, layers.1.mlp.mglu",
    ),
}


@pytest.mark.parametrize("place", ["quantization_config", "mglu_quantization_config"])
@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_configuration_is_refused(name: str, place: str, tmp_path: Path) -> None:
    entries, words = UNREADABLE[name]
    quantized("fp8_row").save_pretrained(tmp_path)
    rest = {key: value for key, value in config_of(tmp_path).items() if key != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps({**rest, place: {"quant_method": "mglu", **entries}}))
    with pytest.raises(ValueError, match=words):
        load(tmp_path)
    with pytest.raises(ValueError, match=words):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))


def test_what_is_no_configuration_of_ours_is_refused() -> None:
    with pytest.raises(ValueError, match="quant_method: got 'fp8', must be 'mglu'"):
        tiny(learnable_masks=False, mglu_quantization_config={"quant_method": "fp8", "weight_format": "fp8_row"})
    with pytest.raises(ValueError, match="mglu_quantization_config: got 'fp8_row', must be a dictionary"):
        tiny(learnable_masks=False, mglu_quantization_config="fp8_row")


def test_two_formats_are_not_saved(tmp_path: Path) -> None:
    model = quantized("fp8_row", skip=("model.layers.0",))
    mglu_ops.quantize(model, "int8_row", skip=["model.layers.1"])
    words = "model: some layers are quantized to fp8_row and others to int8_row, which no configuration describes"
    with pytest.raises(ValueError, match=words):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_dense_checkpoint_is_not_quantized_on_loading(tmp_path: Path) -> None:
    frozen(tiny()).save_pretrained(tmp_path)
    words = r"quantization_config: got 'mglu' for a checkpoint .* call mglu_ops\.quantize\(model, 'fp8_row'\)"
    with pytest.raises(ValueError, match=words):
        load(tmp_path, quantization_config=MGLUQuantizationConfig("fp8_row"))


class NothingConfig(QuantizationConfigMixin):
    def __init__(self, quant_method: str = "nothing") -> None:
        self.quant_method: Any = quant_method


class Nothing(HfQuantizer):
    """A quantizer that quantizes no layer."""

    requires_calibration = False
    is_trainable = False

    def is_serializable(self) -> bool:
        return True


@pytest.fixture
def _nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "nothing", NothingConfig)
    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "nothing", Nothing)


@pytest.mark.usefixtures("_nothing")
def test_a_quantizer_that_leaves_the_weight_alone_is_named(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    words = "quantization_config: nothing quantizes linear layers only, and leaves the weight of MGLU"
    with pytest.warns(UserWarning, match=words):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=NothingConfig())
    assert torch.equal(logits(model), logits(tiny()))


@pytest.mark.usefixtures("_nothing")
def test_a_quantizer_of_linear_layers_keeps_its_configuration(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    frozen(tiny()).save_pretrained(tmp_path / "dense")
    with pytest.warns(UserWarning, match="nothing quantizes linear layers only"):
        model = load(tmp_path / "dense", quantization_config=NothingConfig())
    mglu_ops.quantize(model, "fp8_row", skip=["model.layers.0"]).save_pretrained(tmp_path / "both")
    config = config_of(tmp_path / "both")
    assert config["quantization_config"] == {"quant_method": "nothing"}
    assert config["mglu_quantization_config"]["weight_format"] == "fp8_row"
    with pytest.warns(UserWarning, match="nothing quantizes linear layers only"):
        result = load(tmp_path / "both", dtype=torch.bfloat16)
    assert result.hf_quantizer.quantization_config.quant_method == "nothing"
    assert_same_layers(result, model.to(torch.bfloat16))
    mglu_ops.quantize(result, "fp8_row").save_pretrained(tmp_path / "all")
    recwarn.clear()
    assert_same_layers(load(tmp_path / "all"), result)
    assert not [warning for warning in recwarn if "linear layers only" in str(warning.message)]
    mglu_ops.dequantize(result).save_pretrained(tmp_path / "none")
    assert config_of(tmp_path / "none")["quantization_config"] == {"quant_method": "nothing"}
    assert "mglu_quantization_config" not in config_of(tmp_path / "none")


@pytest.mark.usefixtures("_nothing")
def test_sizes_are_checked_with_a_quantizer_too(tmp_path: Path) -> None:
    """With a quantizer, the loader of Transformers does not report tensors of wrong shapes."""
    tiny().save_pretrained(tmp_path)
    words = r"mlp\.mglu\.\w+ has shape \[.*44, 36\], but the configuration says \["
    with pytest.warns(UserWarning, match="linear layers only"), pytest.raises(ValueError, match=words):
        load(tmp_path, intermediate_size=48, quantization_config=NothingConfig())


def test_torchao_keeps_the_linear_layers(tmp_path: Path) -> None:
    """This test runs torchao, a real quantizer of linear layers. Continuous integration does not install it."""
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    frozen(tiny(mask_top_k=1)).save_pretrained(tmp_path / "dense")
    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    with pytest.warns(UserWarning, match="torchao quantizes linear layers only"):
        model = load(tmp_path / "dense", quantization_config=config)
    mglu_ops.quantize(model, "fp8_row").save_pretrained(tmp_path / "both")
    result = load(tmp_path / "both")
    assert type(result.model.layers[1].mlp.down_proj.weight).__name__ == "Int8Tensor"
    assert mglus(result)[1].weight.dtype == torch.float8_e4m3fn
    assert torch.equal(logits(result), logits(model))
