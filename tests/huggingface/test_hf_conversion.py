"""`from_swiglu`: what it copies, the weights and masks that it makes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import BY_NAME, MIXTURES, TOKENS, logits, mglus, tiny, tiny_swiglu
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from mglu_ops.nn.conversion import WEIGHTS
from mglu_ops.transformers import from_swiglu

EACH = pytest.mark.parametrize("name", BY_NAME)


def masks_of(mglu: Any) -> Tensor:
    return mglu.mask_logits > 0


@EACH
@pytest.mark.parametrize("init", WEIGHTS)
def test_all_but_the_feed_forward_layers_is_copied(name: str, init: str, tmp_path: Path) -> None:
    model = tiny_swiglu(name, rms_norm_eps=1e-3, tie_word_embeddings=True, attention_dropout=0.25).train()
    model.generation_config.max_length = 33
    model.model.norm.weight.requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = from_swiglu(model, 2, init=init)

    assert type(result) is BY_NAME[name].mglu[1]
    assert result.training
    assert result.config.model_type == f"mglu_{name}"
    assert (result.config.n_masks, result.config.rms_norm_eps, result.config.attention_dropout) == (2, 1e-3, 0.25)
    assert result.generation_config.max_length == 33
    assert result.config._attn_implementation == model.config._attn_implementation
    state = result.state_dict()
    for key, value in before.items():
        if ".mlp." not in key or key.endswith(".mlp.gate.weight"):
            assert torch.equal(state[key], value), key
    assert result.lm_head.weight is result.model.embed_tokens.weight
    frozen_names = [key for key, parameter in result.named_parameters() if not parameter.requires_grad]
    assert frozen_names == ["model.norm.weight"]
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert own.isdisjoint(tensor.data_ptr() for tensor in state.values()), "a tensor is shared"
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    result.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(result.eval()))


@pytest.mark.parametrize("init", WEIGHTS)
def test_weights_are_made_as_the_table_says(init: str) -> None:
    model = tiny_swiglu()
    result = from_swiglu(model, 4, init=init)
    for old, new in zip(model.model.layers, result.model.layers, strict=True):
        gate, up = old.mlp.gate_proj.weight, old.mlp.up_proj.weight
        expected = {
            "magnitude": torch.where(gate.abs() >= up.abs(), gate, up),
            "average": (gate + up) / 2,
            "gate": gate,
            "up": up,
        }[init]
        assert torch.equal(new.mlp.mglu.weight, expected)
        assert torch.equal(new.mlp.down_proj.weight, old.mlp.down_proj.weight / 4)
        logits = new.mlp.mglu.mask_logits
        assert logits.std().item() == pytest.approx(0.01, rel=0.5)
        masks = masks_of(new.mlp.mglu)
        assert 0.4 < masks.float().mean() < 0.6
        agreement = [(masks[0] == mask).float().mean() for mask in masks[1:]]
        if init == "magnitude":
            assert torch.equal(masks[0], gate.abs() >= up.abs())
            assert all(0.6 < share < 0.9 for share in agreement), "further masks mostly agree with the first"
        assert max(agreement) < 1


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("init", ["magnitude", "up"])
def test_every_expert_is_made_as_the_table_says(name: str, init: str) -> None:
    model = tiny_swiglu(name)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj[1] *= 100  # logits do not grow with the weights
    result = from_swiglu(model, 3, init=init)
    for old, new in zip(model.model.layers, result.model.layers, strict=True):
        mglu = new.mlp.experts.mglu
        gate, up = old.mlp.experts.gate_up_proj.chunk(2, dim=1)
        expected = torch.where(gate.abs() >= up.abs(), gate, up) if init == "magnitude" else up
        assert torch.equal(mglu.weight, expected)
        assert torch.equal(new.mlp.experts.down_proj.weight, old.mlp.experts.down_proj / 3)
        first, *further = masks_of(mglu).unbind(1)
        assert torch.equal(first, gate.abs() >= up.abs()) == (init == "magnitude")
        assert all(0.6 < (first == masks).float().mean() < 0.9 for masks in further) == (init == "magnitude")
        for of_expert in mglu.mask_logits:
            assert of_expert.std().item() == pytest.approx(0.01, rel=0.5)


def test_elements_of_equal_magnitude_come_from_the_gate() -> None:
    model = tiny_swiglu()
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        mlp.up_proj.weight[:10] = -mlp.gate_proj.weight[:10]
        mlp.up_proj.weight[10:12] = mlp.gate_proj.weight[10:12] = 0
    new = mglus(from_swiglu(model, 1))[0]
    assert torch.equal(new.weight[:10], mlp.gate_proj.weight[:10])
    assert masks_of(new)[0, :12].all()
    more = mglus(from_swiglu(model, 3))[0]
    assert masks_of(more)[0, :12].all()


def test_a_router_keeps_the_down_projection() -> None:
    model = tiny_swiglu()
    result = from_swiglu(model, 4, mask_top_k=2, router_aux_loss_coef=0.01)
    assert torch.equal(result.model.layers[0].mlp.down_proj.weight, model.model.layers[0].mlp.down_proj.weight)
    assert result.config.mask_top_k == 2
    result.train()(TOKENS, labels=TOKENS).loss.backward()
    assert mglus(result)[0].router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("init", WEIGHTS)
def test_a_converted_model_learns_from_its_teacher(init: str) -> None:
    teacher = tiny_swiglu(initializer_range=0.3)
    student = from_swiglu(teacher, 2, init=init).train()
    target = logits(teacher)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        loss = nn.functional.mse_loss(student(TOKENS).logits, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    model = tiny_swiglu().to(dtype)
    model.model.norm.float()
    result = from_swiglu(model, 2)
    assert result.model.norm.weight.dtype == torch.float32
    for mglu in mglus(result):
        assert mglu.weight.dtype == dtype
        assert mglu.mask_logits.dtype == torch.float32
    assert result.model.layers[0].mlp.down_proj.weight.dtype == dtype


def test_decoders_and_activations() -> None:
    model = tiny_swiglu(hidden_act="gelu_pytorch_tanh").model
    result = from_swiglu(model, 1)
    assert type(result).__name__ == "MGLULlamaModel"
    assert mglus(result)[0].activation == "gelu_tanh"
    assert torch.equal(result.embed_tokens.weight, model.embed_tokens.weight)


def without_linear(model: Any) -> Any:
    model.model.layers[1].mlp.up_proj = nn.Sequential(model.model.layers[1].mlp.up_proj)
    return model


def with_other_experts(model: Any) -> Any:
    model.model.layers[1].mlp.experts = nn.Identity()
    return model


def with_bias(model: Any) -> Any:
    model.model.layers[1].mlp.up_proj.bias = nn.Parameter(torch.zeros(44))
    return model


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "bias": (lambda: tiny_swiglu(mlp_bias=True), {}, ValueError, "mlp_bias: got True, must be False"),
    "own bias": (lambda: with_bias(tiny_swiglu()), {}, ValueError, r"model: layers\.1\.mlp\.up_proj: got a bias"),
    "activation": (lambda: tiny_swiglu(hidden_act="mish"), {}, ValueError, "hidden_act: got 'mish', must be one of"),
    "module": (lambda: without_linear(tiny_swiglu()), {}, TypeError, r"layers\.1\.mlp\.up_proj: got Sequential, must"),
    "experts": (
        lambda: with_other_experts(tiny_swiglu("mixtral")),
        {},
        TypeError,
        r"model: layers\.1\.mlp\.experts: got Identity, must be the experts of Transformers",
    ),
    "balance of experts": (
        lambda: tiny_swiglu("qwen3_moe"),
        {"mask_top_k": 1, "router_aux_loss_coef": 0.1},
        ValueError,
        "router_aux_loss_coef: got 0.1 for a Qwen3MoeForCausalLM, must be 0",
    ),
    "mglu": (tiny, {}, TypeError, "model: got MGLULlamaForCausalLM, must be one of LlamaModel, LlamaForCausalLM"),
    "class": (
        lambda: LlamaForSequenceClassification(LlamaConfig(**{**tiny_swiglu().config.to_dict(), "num_labels": 2})),
        {},
        TypeError,
        "model: got LlamaForSequenceClassification, must be one of LlamaModel",
    ),
    "adapter": (
        lambda: get_peft_model(tiny_swiglu(), LoraConfig(target_modules=["up_proj"])),
        {},
        TypeError,
        "model: got PeftModel, must be one of LlamaModel",
    ),
    "meta": (lambda: tiny_swiglu().to("meta"), {}, ValueError, "model: got parameters on meta, must be on one device"),
    "init": (tiny_swiglu, {"init": "best"}, ValueError, "init: got 'best', must be one of magnitude, average"),
    "n_masks": (tiny_swiglu, {"n_masks": 17}, ValueError, "^n_masks: got 17, must be an int from 1 to 16"),
    "top_k": (tiny_swiglu, {"mask_top_k": 3}, ValueError, "^mask_top_k: got 3, must be None or an int from 1 to"),
    "balance": (
        tiny_swiglu,
        {"router_aux_loss_coef": 0.1},
        ValueError,
        "^router_aux_loss_coef: got 0.1 without mask_top_k",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused(case: str) -> None:
    make, options, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        from_swiglu(make(), **{"n_masks": 2, **options})
