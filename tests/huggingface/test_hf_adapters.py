"""PEFT trains LoRA on the weights of MGLU layers, and merges it into them. Merged models are frozen."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import AutoModelForCausalLM

import mglu_ops
import mglu_ops.transformers as mt
from mglu_ops.nn import MGLU, MGLUExpertsFeedForward
from mglu_ops.nn.masked_linear import packed_logits
from tests.support.hf_models import TOKENS, logits, mglus, tiny, tiny_swiglu


def adapted(model: Any) -> Any:
    """The model with LoRA on the weights of its MGLU layers, trained for three steps."""
    torch.manual_seed(1)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=["mglu.weight"])
    peft_model = get_peft_model(model, settings)
    trainable = [parameter for parameter in peft_model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.05)
    for _ in range(3):
        peft_model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return peft_model.eval()


@pytest.mark.parametrize("learnable", [True, False], ids=["logits", "packed"])
@pytest.mark.parametrize(("name", "top_k"), [("llama", None), ("llama", 1), ("mixtral", None)])
def test_lora_trains_merges_and_freezes(learnable: bool, name: str, top_k: int | None, tmp_path: Path) -> None:
    model = tiny(name, learnable_masks=learnable, mask_top_k=top_k)
    before, masks = logits(model), [mask_bits(mglu) for mglu in mglus(model)]
    peft_model = adapted(model)
    names = {name for name, parameter in peft_model.named_parameters() if parameter.requires_grad}
    assert sum(".mglu." in name for name in names) == 4, "two matrices in each of two layers"
    assert all("lora_" in name for name in names)
    expected = logits(peft_model)
    assert (expected - before).abs().max() > 1e-3

    merged = peft_model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)
    assert type(merged) is type(model)
    mt.freeze(merged).save_pretrained(tmp_path)
    assert all(torch.equal(mask_bits(mglu), bits) for mglu, bits in zip(mglus(merged), masks, strict=True))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(merged))


def mask_bits(mglu: Any) -> torch.Tensor:
    return mglu.packed_masks if mglu.mask_logits is None else packed_logits(mglu.mask_logits)


@pytest.mark.parametrize("name", ["experts.weight", "down_proj.weight"])
def test_lora_on_the_experts_of_a_block_trains_and_merges(name: str) -> None:
    block, x = MGLUExpertsFeedForward(3, 16, 24, 2), torch.randn(5, 16)
    settings = LoraConfig(r=2, target_modules=[], target_parameters=[name])
    before, model = block(x), get_peft_model(nn.ModuleDict({"mlp": block}), settings)
    torch.testing.assert_close(block(x), before)
    trained = {key: one for key, one in model.named_parameters() if one.requires_grad}
    nn.init.ones_(next(one for key, one in trained.items() if "lora_B" in key))
    adapted = block(x)
    adapted.sum().backward()
    assert all(one.grad is not None for one in trained.values())
    assert not torch.allclose(adapted, before)
    merged = model.merge_and_unload()["mlp"]
    torch.testing.assert_close(merged(x), adapted)


def test_an_adapter_is_loaded_onto_its_model(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "base")
    peft_model = adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    peft_model.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(again), logits(peft_model))
    through_transformers = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(through_transformers), logits(peft_model))


def test_an_adapter_does_not_hide_missing_masks(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "base")
    adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "base")).save_pretrained(tmp_path / "adapter")
    tiny(learnable_masks=False).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "base" / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no model\.layers\.0\.mlp\.mglu\.mask_logits and 1 more; it holds p"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")


def test_whole_layers_of_an_adapter_are_not_drawn_at_random(tmp_path: Path) -> None:
    """Transformers 5.17 does not find tensors of `modules_to_save` in an adapter, and would draw new ones at random."""
    tiny().save_pretrained(tmp_path / "base")
    settings = LoraConfig(target_modules=["q_proj"], modules_to_save=["mglu"])
    peft_model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings)
    with torch.no_grad():
        for mglu in mglus(peft_model):
            mglu.mask_logits.neg_()
    peft_model.save_pretrained(tmp_path / "adapter")
    refused = ""
    try:
        through_transformers = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
        assert torch.equal(logits(through_transformers), logits(peft_model))  # Transformers 5.24 loads it
    except ValueError as error:
        refused = str(error)
    assert re.search(r"^$|cannot load .*mask_logits and 3 more .*peft\.PeftModel\.from_pretrained", refused)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(logits(again), logits(peft_model))


PASSED_BY = {
    "all-linear": "all-linear",
    "names of swiglu": ["q_proj", "gate_proj", "up_proj", "down_proj"],
    "down_proj": ["down_proj"],
}
TRAINED = {
    "with the parameter": {"target_modules": "all-linear", "target_parameters": ["mglu.weight"]},
    "attention alone": {"target_modules": ["q_proj", "v_proj"]},
    "whole layers": {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]},
}


@pytest.mark.parametrize("targets", PASSED_BY)
@pytest.mark.parametrize("wrapped", [True, False], ids=["get_peft_model", "as Transformers' add_adapter"])
def test_an_adapter_that_misses_the_weight_is_named(targets: str, wrapped: bool) -> None:
    settings = LoraConfig(r=2, target_modules=PASSED_BY[targets])
    with pytest.warns(UserWarning, match=r'train.* down_proj .* add target_parameters=\["mglu\.weight"\]'):
        get_peft_model(tiny(), settings) if wrapped else inject_adapter_in_model(settings, tiny())


def test_an_adapter_of_a_quantized_weight_asks_to_dequantize() -> None:
    """PEFT would add its product to the numbers of an fp8 weight, as if their scales were 1."""
    model = mglu_ops.quantize(mt.freeze(tiny()), "fp8_row")
    with pytest.warns(UserWarning, match=r"call mglu_ops\.dequantize\(model\) before, and add target_parameters"):
        get_peft_model(copy.deepcopy(model), LoraConfig(r=2, target_modules=["down_proj"]))
    settings = LoraConfig(r=2, target_modules=[], target_parameters=["mglu.weight"])
    peft_model = get_peft_model(copy.deepcopy(model), settings)
    words = r"weight: got a tensor that an adapter or .* call mglu_ops\.dequantize\(model\) before an adapter is added"
    for one in (peft_model, torch.compile(peft_model, backend="eager")):
        with pytest.raises(ValueError, match=words):
            logits(one)
    adapted(mglu_ops.dequantize(model))


def test_a_model_with_an_adapter_compiles() -> None:
    """Dynamo traces the registration of the parametrization that PEFT adds in each call."""
    peft_model = adapted(tiny())
    expected = logits(peft_model)
    torch._dynamo.reset()
    torch.testing.assert_close(logits(torch.compile(peft_model, backend="aot_eager")), expected)


@pytest.mark.parametrize("settings", TRAINED)
def test_other_adapters_cause_no_warning(settings: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        peft_model = get_peft_model(tiny(), LoraConfig(r=2, **TRAINED[settings]))
        get_peft_model(tiny_swiglu(), LoraConfig(r=2, target_modules="all-linear"))
    assert hasattr(peft_model.base_model.model, "peft_config")


def test_freeze_asks_to_merge_first() -> None:
    with pytest.raises(TypeError, match=r"model: got PeftModel.*merge an adapter before \(merge_and_unload\)"):
        mt.freeze(adapted(tiny()))


@pytest.mark.parametrize("parameter", ["mask_logits", "weight"])
def test_masks_and_formats_ask_to_merge_the_adapter_of_their_parameter(parameter: str) -> None:
    """Packing removes the logits, and rounding the weight, to which the adapter would be added later."""
    model = nn.Sequential(MGLU(16, 8, learnable_masks=parameter == "mask_logits"))
    settings = LoraConfig(r=2, target_modules=[], target_parameters=[f"0.{parameter}"], init_lora_weights=False)
    peft_model = get_peft_model(model, settings)
    x = torch.randn(3, 16)
    expected = peft_model(x)
    change = (
        mglu_ops.freeze if parameter == "mask_logits" else functools.partial(mglu_ops.quantize, weight_format="fp8_row")
    )
    with pytest.raises(ValueError, match=rf"adapter of PEFT for {parameter}, must be merged first"):
        change(peft_model)
    torch.testing.assert_close(peft_model(x), expected)
    merged = change(peft_model.merge_and_unload())
    torch.testing.assert_close(merged(x), expected, rtol=0.1, atol=0.1)
