"""`from_swiglu`: what it copies, the weights and masks that it makes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

import mglu_ops
from mglu_ops.nn import fitting
from mglu_ops.nn.conversion import WEIGHTS
from mglu_ops.transformers import MGLUTrainer, convert, from_swiglu
from tests.support.hf_models import BY_NAME, MIXTURES, SIZES, TOKENS, logits, mglus, tiny, tiny_swiglu

EACH = pytest.mark.parametrize("name", BY_NAME)


@pytest.fixture
def quick_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "ADAM_STEPS", 20)


def masks_of(mglu: Any) -> Tensor:
    return mglu.mask_logits > 0


@EACH
@pytest.mark.parametrize("init", WEIGHTS)
def test_all_but_the_feed_forward_layers_is_copied(name: str, init: str, tmp_path: Path) -> None:
    model = tiny_swiglu(name, rms_norm_eps=1e-3, tie_word_embeddings=True, attention_dropout=0.25).train()
    model.model.layers[1].eval()
    model.generation_config.max_length = 33
    model.model.norm.weight.requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = from_swiglu(model, 2, init=init)

    assert type(result) is BY_NAME[name].mglu[1]
    assert all(module.training == ("layers.1" not in path) for path, module in result.named_modules())
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


@EACH
def test_fitted_models_have_their_own_class(name: str, tmp_path: Path, quick_fits: None) -> None:
    model = tiny_swiglu(name)
    batches = [torch.randint(model.config.vocab_size, (4, 32)) for _ in range(2)]
    result = convert(model, [{"input_ids": ids} for ids in batches], progress=False)
    assert type(result.model) is BY_NAME[name].mglu[1]
    place = "mlp.experts" if name in MIXTURES else "mlp"
    assert list(result.errors) == [f"model.layers.{i}.{place}" for i in range(model.config.num_hidden_layers)]
    assert all(errors["joint"] < errors["magnitude"] for errors in result.errors.values())
    result.model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(result.model.eval()))


@pytest.mark.parametrize("name", ["llama", MIXTURES[0]])
def test_padding_does_not_change_a_fit(name: str, quick_fits: None) -> None:
    model = tiny_swiglu(name)
    ids = torch.randint(1, model.config.vocab_size, (8, 32))
    mask = torch.arange(32) < torch.randint(8, 32, (8, 1))
    errors = [
        convert(model, [{"input_ids": ids.where(mask, padding), "attention_mask": mask.long()}], progress=False).errors
        for padding in (0, 7)
    ]
    assert errors[0] == errors[1]


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
        model.model.layers[0].mlp.experts.gate_up_proj[1] *= 100  # larger weights must not give larger logits
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


@EACH
@pytest.mark.parametrize("part", ["language model", "decoder"])
def test_gradient_checkpointing_stays_enabled(name: str, part: str) -> None:
    model = tiny_swiglu(name).train()
    model = model if part == "language model" else model.model
    model.gradient_checkpointing_enable({"use_reentrant": True}, every_n_layers=2)
    result = from_swiglu(model, 2)
    layers = (result.model if part == "language model" else result).layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, False]
    assert layers[0]._gradient_checkpointing_func.keywords == {"use_reentrant": True}
    assert result.get_input_embeddings()(TOKENS).requires_grad, "reentrant checkpoints need it"
    model.gradient_checkpointing_disable()
    assert not from_swiglu(model, 2).is_gradient_checkpointing


def test_decoders_and_activations() -> None:
    model = tiny_swiglu(hidden_act="gelu_pytorch_tanh").model
    result = from_swiglu(model, 1)
    assert type(result).__name__ == "MGLULlamaModel"
    assert mglus(result)[0].activation == "gelu_tanh"
    assert torch.equal(result.embed_tokens.weight, model.embed_tokens.weight)


EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 20}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    **{f"linear_num_{kind}_heads": 2 for kind in ("key", "value")},
    **{f"linear_{kind}_head_dim": 8 for kind in ("key", "value")},
}
OTHERS: dict[str, dict[str, Any]] = {
    "Gemma2": {},
    "Granite": {},
    "GraniteMoe": EXPERTS,
    "Olmo2": {},
    "Phi3": {},
    "Qwen2Moe": SHARED,
    "Qwen3_5": LINEAR_ATTENTION,
    "Qwen3_5Moe": {**LINEAR_ATTENTION, **SHARED},
    "SmolLM3": {},
}
"""Models without an MGLU class, by the name of their class, with the sizes that differ from `SIZES`."""


def other(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    cls = getattr(transformers, f"{name}ForCausalLM")
    return cls(cls.config_class(**{**SIZES, **OTHERS.get(name, {}), "initializer_range": 0.2, **changes})).eval()


def pairs(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The gate and up matrices of all layers and experts of a model. They may be parts of larger tensors."""
    found = []
    for module in model.modules():
        tensors = {name: getattr(one, "weight", one) for name, one in {**module._modules, **module._parameters}.items()}
        if "up_proj" in tensors:
            found.append((tensors["gate_proj"], tensors["up_proj"]))
        elif "gate_up_proj" in tensors:
            gate, up = tensors["gate_up_proj"].chunk(2, dim=-2)
            found.append((gate, up))
    return found


@pytest.mark.filterwarnings("ignore:from_swiglu. mglu_ops.transformers has no MGLU class")
@pytest.mark.parametrize("name", [*BY_NAME, *OTHERS])
def test_a_model_whose_matrices_share_no_element_is_converted_exactly(name: str) -> None:
    """One mask says for each element of the new weight which matrix it comes from, so nothing is lost."""
    model = tiny_swiglu(name, initializer_range=0.2) if name in BY_NAME else other(name)
    found = pairs(model)
    assert len(found) >= 2
    with torch.no_grad():
        for gate, up in found:
            kept = gate.abs() >= up.abs()
            gate *= kept
            up *= ~kept
    result = from_swiglu(model, 1)
    assert len(mglus(result)) == len(found)
    torch.testing.assert_close(logits(result), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_without_an_mglu_class_trains_generates_and_is_loaded_into_another(name: str, tmp_path: Path) -> None:
    words = f"no MGLU class for {name}ForCausalLM, whose from_pretrained would draw new layers"
    model = other(name)
    with pytest.warns(UserWarning, match=words):
        result = from_swiglu(model, 2, mask_top_k=1)
    assert type(result) is type(model)
    assert result.config.to_dict() == model.config.to_dict()
    examples = [{"input_ids": row, "labels": row} for row in TOKENS]
    kind = {"save_strategy": "no", "report_to": [], "use_cpu": True, "learning_rate": 1e-2, "max_grad_norm": 1e3}
    before = [mglu.mask_logits.clone() for mglu in mglus(result)]
    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=2, **kind)
    MGLUTrainer(model=result, args=arguments, train_dataset=examples).train()
    assert all(not torch.equal(a, mglu.mask_logits) for a, mglu in zip(before, mglus(result), strict=True))

    expected = logits(mglu_ops.freeze(result.eval()))
    tokens = result.generate(TOKENS, max_new_tokens=3, do_sample=False)
    assert tokens.shape == (2, TOKENS.shape[1] + 3)
    result.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=words):
        again = mglu_ops.freeze(from_swiglu(model, 2, mask_top_k=1))
    safetensors.torch.load_model(again, tmp_path / "model.safetensors")
    assert torch.equal(logits(again), expected)


@pytest.mark.filterwarnings("ignore:from_swiglu. mglu_ops.transformers has no MGLU class")
@pytest.mark.parametrize("name", OTHERS)
def test_each_feed_forward_layer_of_other_models_is_fitted(name: str, quick_fits: None) -> None:
    batches = [{"input_ids": torch.randint(1, 32, (4, 32))} for _ in range(2)]
    result = convert(other(name), batches, progress=False)
    assert len(result.errors) == len(mglus(result.model)) > 0
    assert all(errors["joint"] < errors["magnitude"] for errors in result.errors.values())


def test_a_head_of_another_kind_is_converted_in_its_class() -> None:
    config = LlamaConfig(**{**tiny_swiglu().config.to_dict(), "num_labels": 2})
    model = LlamaForSequenceClassification(config).eval()
    with pytest.warns(UserWarning, match="no MGLU class for LlamaForSequenceClassification"):
        result = from_swiglu(model, 2)
    assert type(result) is LlamaForSequenceClassification
    assert result(TOKENS).logits.shape == (2, 2)
    assert len(mglus(result)) == 2


def test_a_part_of_a_model_is_converted_in_place() -> None:
    model = tiny_swiglu()
    layer = model.model.layers[1]
    layer.mlp = from_swiglu(layer.mlp, 2)
    assert len(mglus(model)) == 1
    assert logits(model).isfinite().all()


def with_experts_that(**changes: Any) -> Any:
    model = other("GraniteMoe")
    for name, value in changes.items():
        setattr(model.model.layers[1].block_sparse_moe.experts, name, value)
    return model


def limited(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up.clamp(-7, 7)


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
    "own bias": (
        lambda: with_bias(tiny_swiglu()),
        {},
        ValueError,
        r"model: model\.layers\.1\.mlp\.up_proj: got a bias",
    ),
    "activation": (lambda: tiny_swiglu(hidden_act="mish"), {}, ValueError, "hidden_act: got 'mish', must be one of"),
    "module": (lambda: without_linear(tiny_swiglu()), {}, TypeError, r"layers\.1\.mlp\.up_proj: got Sequential, must"),
    "experts": (
        lambda: with_other_experts(tiny_swiglu("mixtral")),
        {},
        TypeError,
        r"got a MixtralForCausalLM whose layers .* would lack model\.layers\.1\.mlp\.experts\.mglu\.weight",
    ),
    "flags of experts": (
        lambda: with_experts_that(is_transposed=True),
        {},
        TypeError,
        r"layers\.1\.block_sparse_moe\.experts: got GraniteMoeExperts with is_transposed=True, must be False",
    ),
    "limit of experts": (
        lambda: with_experts_that(_apply_gate=limited),
        {},
        TypeError,
        r"layers\.1\.block_sparse_moe\.experts: got GraniteMoeExperts, must compute act\(gate\) \* up",
    ),
    "quantized experts": (
        lambda: with_experts_that(down_proj=nn.Parameter(torch.zeros(4, 36, 44).to(torch.int8), requires_grad=False)),
        {},
        TypeError,
        r"layers\.1\.block_sparse_moe\.experts: got GraniteMoeExperts, must have dense weights in a floating dtype",
    ),
    "GPT-OSS": (
        lambda: other("GptOss", **EXPERTS),
        {},
        TypeError,
        "got GptOssExperts with has_bias=True, must be False",
    ),
    "Seed-OSS": (lambda: other("SeedOss"), {}, TypeError, r"got SeedOssMLP, act_fn SiLU.* must compute .* dropout"),
    "no gate": (
        lambda: other("Starcoder2"),
        {},
        ValueError,
        "got Starcoder2ForCausalLM, must have a module with linear",
    ),
    "balance of experts": (
        lambda: tiny_swiglu("qwen3_moe"),
        {"mask_top_k": 1, "router_aux_loss_coef": 0.1},
        ValueError,
        "router_aux_loss_coef: got 0.1 for a Qwen3MoeForCausalLM, must be 0",
    ),
    "balance of others": (
        lambda: other("Olmo2"),
        {"mask_top_k": 1, "router_aux_loss_coef": 0.1},
        ValueError,
        "router_aux_loss_coef: got 0.1 for a Olmo2ForCausalLM, must be 0",
    ),
    "mglu": (tiny, {}, ValueError, "model: got MGLULlamaForCausalLM, must have a module with linear layers named gate"),
    "adapter": (
        lambda: get_peft_model(tiny_swiglu(), LoraConfig(target_modules=["q_proj"])),
        {},
        TypeError,
        "model: got PeftModel with adapters of PEFT, must have none",
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
