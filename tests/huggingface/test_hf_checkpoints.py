"""Saving and loading: logits and packed masks come back bit for bit, and checkpoints that do not fit are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

import mglu_ops
import mglu_ops.transformers as mt
from tests.support.commands import snippets
from tests.support.families import family
from tests.support.hf_models import BY_NAME, frozen, loaded_from_disk, logits, mglus, rewrite, tiny, tiny_swiglu

EACH = pytest.mark.parametrize("name", BY_NAME)
FORMS = pytest.mark.parametrize("learnable", [True, False], ids=["logits", "packed"])
MASKS = "model.layers.1.mlp.mglu.packed_masks"


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def assert_same(result: Any, model: Any) -> None:
    expected = model.state_dict()
    state = result.state_dict()
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(state[key], value), key
        assert state[key].dtype == value.dtype, key
    assert torch.equal(logits(result), logits(model))


@EACH
@FORMS
def test_a_checkpoint_comes_back(name: str, learnable: bool, tmp_path: Path) -> None:
    model = tiny(name, learnable_masks=learnable, n_masks=3, mask_top_k=2)
    result = load(saved(model, tmp_path))
    assert type(result) is type(model)
    assert_same(result, model)


@FORMS
@pytest.mark.parametrize("options", [{"device_map": "cpu"}, {"device_map": "auto"}, {"use_safetensors": True}])
def test_shards_and_device_maps(learnable: bool, options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny(learnable_masks=learnable, tie_word_embeddings=True)
    saved(model, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(load(tmp_path, **options), model)


@pytest.mark.parametrize("freeze", [mt.freeze, mglu_ops.freeze])
def test_offloaded_logits_are_not_packed(freeze: Callable[[Any], Any], tmp_path: Path) -> None:
    """An offloaded layer holds tensors without values, so there is nothing to pack."""
    model = tiny()
    result = loaded_from_disk(saved(model, tmp_path / "logits"), offload_buffers=True)
    assert mglus(result)[1].weight.is_meta
    words = r"model: model\.layers\.1\.mlp\.mglu is offloaded by accelerate, .* call freeze, save it, and load the"
    with pytest.raises(ValueError, match=words):
        freeze(result)
    assert all(mglu.learnable_masks for mglu in mglus(result))
    assert torch.equal(logits(result), logits(model))
    packed = loaded_from_disk(saved(frozen(model), tmp_path / "packed"), offload_buffers=True)
    assert freeze(packed) is packed
    assert torch.equal(logits(packed), logits(model))


@FORMS
def test_a_decoder_loads_the_checkpoint_of_a_language_model(learnable: bool, tmp_path: Path) -> None:
    model = tiny(learnable_masks=learnable)
    decoder = AutoModel.from_pretrained(saved(model, tmp_path))
    for key, value in decoder.state_dict().items():
        assert torch.equal(value, model.model.state_dict()[key]), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype_changes_no_mask(dtype: torch.dtype, tmp_path: Path) -> None:
    """A logit of 1e-9 would become 0 in float16, which changes its mask."""
    model = tiny()
    with torch.no_grad():
        for mglu in mglus(model):
            mglu.mask_logits.mul_(1e-7)
    result = load(saved(model, tmp_path / "logits"), dtype=dtype)
    for ours, theirs in zip(mglus(model), mglus(result), strict=True):
        assert torch.equal(ours.mask_logits, theirs.mask_logits)
        assert theirs.weight.dtype == dtype
    packed = load(saved(frozen(model), tmp_path / "packed"), dtype=dtype)
    for ours, theirs in zip(mglus(model), mglus(packed), strict=True):
        assert torch.equal(ours.packed_masks, theirs.packed_masks)


@EACH
@pytest.mark.parametrize("freeze", [mt.freeze, mglu_ops.freeze])
def test_a_frozen_model_comes_back(name: str, freeze: Callable[[Any], Any], tmp_path: Path) -> None:
    model = tiny(name)
    expected = logits(model)
    assert freeze(model) is model
    result = load(saved(model, tmp_path))
    assert not model.config.learnable_masks
    assert_same(result, model)
    assert torch.equal(logits(result), expected)
    assert not any("mask_logits" in key for key in safetensors.torch.load_file(tmp_path / "model.safetensors"))


def test_freeze_takes_compiled_models_and_names_others(tmp_path: Path) -> None:
    model = tiny()
    mt.freeze(torch.compile(model, backend="eager"))
    assert not model.config.learnable_masks
    with pytest.raises(TypeError, match=r"model: got LlamaForCausalLM, must be a model of mglu_ops\.transformers"):
        mt.freeze(tiny_swiglu())


def test_a_model_with_both_forms_is_not_saved(tmp_path: Path) -> None:
    model = tiny()
    mglu_ops.freeze(model.model.layers[0])
    with pytest.raises(ValueError, match="model: some layers have packed masks and others learn theirs"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@FORMS
def test_a_model_on_meta_takes_a_state_dict(learnable: bool) -> None:
    model = tiny(learnable_masks=learnable)
    with torch.device("meta"):
        result = type(model)(model.config)
    result.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(mglus(result)[0](torch.ones(1, 36)), mglus(model)[0](torch.ones(1, 36)))


@EACH
def test_a_checkpoint_says_what_to_import(name: str, tmp_path: Path) -> None:
    folder = saved(tiny(name), tmp_path / "my-model")
    assert json.loads((folder / "config.json").read_text())["needs_import"] == "mglu_ops.transformers"
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert f"`mglu_{name}`" in card
    (snippet,) = snippets(card, "python")
    assert "import mglu_ops.transformers" in snippet
    names: dict[str, Any] = {}
    exec(snippet.replace('"my-model"', repr(str(folder))), names)
    assert_same(names["model"], tiny(name))


def test_a_model_card_of_the_user_is_kept_and_one_process_writes(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert (saved(tiny(), tmp_path) / "README.md").read_text() == "mine"
    saved(tiny(), tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other" / "README.md").exists()


LOADERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "device map": {"device_map": "cpu"},
    "mismatches ignored": {"ignore_mismatched_sizes": True},
}
SHARD_SIZES = ["5GB", "20KB"]  # the checkpoint is one file, or several files


@pytest.mark.parametrize(("loader", "shard_size"), family(LOADERS, SHARD_SIZES, most=1))
def test_the_other_form_is_refused(loader: str, shard_size: str, tmp_path: Path) -> None:
    saved(tiny(), tmp_path / "logits", max_shard_size=shard_size)
    saved(tiny(learnable_masks=False), tmp_path / "packed", max_shard_size=shard_size)
    with pytest.raises(ValueError, match=r"logits: has no .*packed_masks and 1 more; it holds the logits of masks"):
        load(tmp_path / "logits", learnable_masks=False, **LOADERS[loader])
    with pytest.raises(ValueError, match=r"packed: has no .*mask_logits and 1 more; it holds packed masks"):
        load(tmp_path / "packed", learnable_masks=True, **LOADERS[loader])


@pytest.mark.parametrize(("name", "loader"), family(BY_NAME, LOADERS, most=1))
def test_a_swiglu_checkpoint_is_refused(name: str, loader: str, tmp_path: Path) -> None:
    folder = saved(tiny_swiglu(name), tmp_path)
    for cls in BY_NAME[name].mglu:
        with pytest.raises(ValueError, match=r"it is a SwiGLU model: .* mglu_ops\.transformers\.from_swiglu"):
            cls.from_pretrained(folder, **LOADERS[loader])


@pytest.mark.parametrize(
    ("loader", "shard_size", "size"), family(LOADERS, SHARD_SIZES, [{"n_masks": 3}, {"intermediate_size": 48}], most=1)
)
def test_other_sizes_are_refused(loader: str, shard_size: str, size: dict[str, int], tmp_path: Path) -> None:
    saved(tiny(), tmp_path, max_shard_size=shard_size)
    words = r"mlp\.mglu\.\w+ has shape \[.*44, 36\], but the configuration says \["
    with pytest.raises(ValueError, match=words):
        load(tmp_path, **size, **LOADERS[loader])


@FORMS
def test_other_experts_are_refused(learnable: bool, tmp_path: Path) -> None:
    saved(tiny("qwen3_moe", learnable_masks=learnable), tmp_path)
    with pytest.raises(ValueError, match=r"mlp\.experts\.down_proj\.weight has shape \[4, .* says \[3,.*the number"):
        load(tmp_path, num_local_experts=3)
    with pytest.raises(ValueError, match=r"has no model\.layers\.1\.mlp\.mglu\.\w+ and 1 more; masks and weights of"):
        load(tmp_path, mlp_only_layers=[1])


@FORMS
@pytest.mark.parametrize("part", ["weight", "masks", "router.weight"])
def test_a_missing_tensor_is_refused(learnable: bool, part: str, tmp_path: Path) -> None:
    masks = "mask_logits" if learnable else "packed_masks"
    model = tiny(learnable_masks=learnable, mask_top_k=1)
    key = f"model.layers.1.mlp.mglu.{masks if part == 'masks' else part}"
    rewrite(saved(model, tmp_path), lambda state: {k: v for k, v in state.items() if k != key})
    with pytest.raises(ValueError, match=f"has no {key}; masks and weights of MGLU layers are never drawn at random"):
        load(tmp_path)


@pytest.mark.parametrize("of_decoder", [False, True], ids=["language model", "decoder"])
@FORMS
def test_a_router_is_not_ignored(learnable: bool, of_decoder: bool, tmp_path: Path) -> None:
    """Without its router, a model would sum over all masks, and so compute another function."""
    model = tiny(learnable_masks=learnable, mask_top_k=1)
    folder = saved(model.model if of_decoder else model, tmp_path)
    words = r"has (model\.)?layers\.0\.mlp\.mglu\.router\.weight and 1 more, which the configuration does not mention"
    for cls in (AutoModel, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=words):
            cls.from_pretrained(folder, mask_top_k=None)


def test_logits_beside_packed_masks_are_refused(tmp_path: Path) -> None:
    """If a checkpoint holds logits and packed masks of one layer, it is not clear which of them to use."""
    saved(tiny(), tmp_path)
    logits_key = MASKS.replace("packed_masks", "mask_logits")
    rewrite(tmp_path, lambda state: {**state, MASKS: torch.ops.mglu.pack_logits(state[logits_key])})
    with pytest.raises(ValueError, match=f"has {MASKS}, which the configuration does not mention"):
        load(tmp_path)
    with pytest.raises(ValueError, match="some layers hold packed masks and others the logits of masks"):
        load(tmp_path, learnable_masks=False)


@FORMS
def test_layers_in_two_forms_are_named(learnable: bool, tmp_path: Path) -> None:
    """Some layers have logits, others packed masks. No value of `learnable_masks` fits, so the message names none."""
    saved(tiny(), tmp_path)
    logits_key = MASKS.replace("packed_masks", "mask_logits")
    rewrite(tmp_path, lambda state: {MASKS: torch.ops.mglu.pack_logits(state.pop(logits_key)), **state})
    with pytest.raises(ValueError, match="some layers hold packed masks and others the logits of masks"):
        load(tmp_path, learnable_masks=learnable)


# Name -> a change that makes packed masks invalid, the error, and its message.
WRONG: dict[str, tuple[Callable[[Tensor], Tensor], type[Exception], str]] = {
    "padding": (lambda p: p | 0x80, ValueError, "padding bits past in_features=36 are set"),
    "int8": (lambda p: p.view(torch.int8), TypeError, "has dtype I8, must be uint8"),
    "n_masks": (lambda p: p[..., :1].contiguous(), ValueError, r"has shape \[44, 5, 1\], but"),
    "transposed": (lambda p: p.transpose(0, 2).contiguous(), ValueError, r"has shape \[2, 5, 44\], but"),
}


@pytest.mark.parametrize(("wrong", "loader"), family(WRONG, LOADERS, most=1))
def test_wrong_packed_masks_are_refused(wrong: str, loader: str, tmp_path: Path) -> None:
    corrupt, error, words = WRONG[wrong]
    saved(tiny(learnable_masks=False), tmp_path)
    rewrite(tmp_path, lambda state: {**state, MASKS: corrupt(state[MASKS])})
    with pytest.raises(error, match=rf"{tmp_path}: {MASKS}:? .*{words}"):
        load(tmp_path, **LOADERS[loader])
    with pytest.raises(error, match=words):
        AutoModel.from_pretrained(tmp_path, **LOADERS[loader])


@FORMS
def test_layers_that_the_configuration_does_not_have_are_refused(learnable: bool, tmp_path: Path) -> None:
    saved(tiny(learnable_masks=learnable, mask_top_k=1), tmp_path)
    words = r"has model\.layers\.1\.input_layernorm\.weight and \d+ more, of a layer that the configuration does not"
    for cls in (AutoModel, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=words):
            cls.from_pretrained(tmp_path, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"has no model\.layers\.2\.mlp\.mglu\.\w+ and 2 more"):
        load(tmp_path, num_hidden_layers=3)


@pytest.mark.parametrize("of_decoder", [False, True], ids=["language model", "decoder"])
def test_layers_of_another_kind_are_refused_too(of_decoder: bool, tmp_path: Path) -> None:
    """The checkpoint has layers with experts, and the configuration keeps only a layer without experts."""
    model = tiny("qwen3_moe", mlp_only_layers=[0])
    saved(model.model if of_decoder else model, tmp_path)
    words = r"has (model\.)?layers\.1\.input_layernorm\.weight and \d+ more, of a layer that the configuration does not"
    for cls in (AutoModel, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=words):
            cls.from_pretrained(tmp_path, num_hidden_layers=1)


@pytest.mark.parametrize(
    "key",
    [
        "mlp.experts.mglu.weight",
        "mlp.experts.gate_up_proj",
        "mlp.gate.weight",
        "mlp.gate_proj.weight",
        "mlp.mglu.router.bias",
        "mlp.mglu.gate_bias",
    ],
)
def test_tensors_that_a_feed_forward_layer_does_not_have_are_refused(key: str, tmp_path: Path) -> None:
    saved(tiny("qwen3_moe", mlp_only_layers=[0, 1], mask_top_k=1), tmp_path)
    key = f"model.layers.1.{key}"
    rewrite(tmp_path, lambda state: {**state, key: torch.ones(4)})
    with pytest.raises(ValueError, match=f"has {key}, which the configuration does not mention"):
        load(tmp_path)


def test_unknown_tensors_of_other_layers_are_left_to_transformers(tmp_path: Path) -> None:
    """Checkpoints of early versions of Llama have frequencies in each layer, and quantizers add tensors."""
    model = tiny()
    names = ["self_attn.rotary_emb.inv_freq", "mlp.down_proj.scale"]
    more = {f"model.layers.1.{name}": torch.ones(8) for name in names}
    rewrite(saved(model, tmp_path), lambda state: {**state, **more})
    assert_same(load(tmp_path), model)


@FORMS
@pytest.mark.parametrize("key", ["mlp.experts.mglu.router.weight", "mlp.experts.mglu.weight", "mlp.gate.weight"])
def test_other_shapes_on_the_disk_are_refused(learnable: bool, key: str, tmp_path: Path) -> None:
    """The loader of Transformers does not compare the shapes of what it leaves on the disk."""
    saved(tiny("mixtral", learnable_masks=learnable, mask_top_k=1), tmp_path)
    key = f"model.layers.1.{key}"
    rewrite(tmp_path, lambda state: {**state, key: torch.cat([state[key]] * 2)})
    with pytest.raises(ValueError, match=rf"{key} has shape \[\d+, .*but the configuration says \["):
        loaded_from_disk(tmp_path)


def test_renamed_tensors_are_checked(tmp_path: Path) -> None:
    model = tiny(learnable_masks=False)
    rewrite(saved(model, tmp_path), lambda state: {k.replace("model.layers", "blocks"): v for k, v in state.items()})
    renaming = {"key_mapping": {r"^blocks": "model.layers"}}
    assert_same(load(tmp_path, **renaming), model)
    key = MASKS.replace("model.layers", "blocks")
    rewrite(tmp_path, lambda state: {**state, key: state[key].to(torch.int32)})
    with pytest.raises(TypeError, match=f"{key} has dtype I32, must be uint8"):
        load(tmp_path, **renaming)


WRITTEN = {"int64": "I64", "int8": "I8", "float8_e4m3fn": "F8_E4M3"}
"""Dtype of torch that no weight has -> its name in a checkpoint."""


@pytest.mark.parametrize(("loader", "name", "dtype"), family(LOADERS, ["weight", "mask_logits"], WRITTEN, most=1))
def test_weights_and_logits_of_a_wrong_dtype_are_refused(loader: str, name: str, dtype: str, tmp_path: Path) -> None:
    model = tiny()
    key = f"model.layers.1.mlp.mglu.{name}"
    rewrite(saved(model, tmp_path), lambda state: {**state, key: state[key].to(getattr(torch, dtype))})
    for cls in (AutoModel, AutoModelForCausalLM):
        words = rf"{tmp_path}: {key} has dtype {WRITTEN[dtype]}, must be one of F16, BF16, F32"
        with pytest.raises(TypeError, match=words):
            cls.from_pretrained(tmp_path, **LOADERS[loader])
    state = {**model.state_dict(), key: model.state_dict()[key].to(getattr(torch, dtype))}
    with pytest.raises(TypeError, match=f"state_dict: {key} has dtype torch.{dtype}, must be one of"):
        type(model).from_pretrained(None, config=model.config, state_dict=state)


def test_dtypes_of_other_layers_are_left_to_transformers(tmp_path: Path) -> None:
    rewrite(saved(tiny(), tmp_path), lambda state: {**state, "lm_head.weight": state["lm_head.weight"].to(torch.int8)})
    assert load(tmp_path).lm_head.weight.dtype == torch.float32


def test_a_pickled_checkpoint_is_checked(tmp_path: Path) -> None:
    model = tiny(learnable_masks=False)
    state = model.state_dict()
    saved(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert_same(load(tmp_path), model)
    torch.save({**state, MASKS: state[MASKS].to(torch.int32)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(TypeError, match=f"{MASKS} has dtype torch.int32, must be uint8"):
        load(tmp_path)
