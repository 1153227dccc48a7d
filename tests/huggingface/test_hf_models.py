"""The models: their layers, configurations and initial weights, and `generate`."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, CompileConfig, LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import mglu_ops.transformers as mt
from mglu_ops.activations import get_activation
from mglu_ops.nn import NaiveMGLU, NaiveMGLUExperts, check_masks
from mglu_ops.transformers.configuration import ACTIVATIONS
from tests.support.hf_models import BY_NAME, MIXTURES, SIZES, TOKENS, frozen, logits, mglus, sizes_of, tiny, tiny_swiglu

EACH = pytest.mark.parametrize("name", BY_NAME)


class NaiveFeedForward(nn.Module):
    """The paper's layer in place of a SwiGLU feed-forward layer."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        mglu = mlp.mglu
        self.naive = NaiveMGLU(
            mglu.in_features, mglu.out_features, n_masks=mglu.n_masks, activation=mglu.activation, top_k=mglu.top_k
        )
        self.naive.load_state_dict(mglu.state_dict())
        self.down_proj = mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.naive(x))


class NaiveExperts(nn.Module):
    """The paper's layer in each expert of a mixture, in place of Transformers' experts."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        mglu = experts.mglu
        sizes = mglu.num_experts, mglu.in_features, mglu.out_features
        self.naive = NaiveMGLUExperts(*sizes, n_masks=mglu.n_masks, activation=mglu.activation, top_k=mglu.top_k)
        self.naive.load_state_dict(mglu.state_dict())
        self.down_proj = experts.down_proj.weight

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.einsum("tkd,tkhd,tk->th", self.naive(x, ids), self.down_proj[ids], weights)


@EACH
@pytest.mark.parametrize(
    "changes",
    [{}, {"n_masks": 3, "mask_top_k": 2, "hidden_act": "gelu_pytorch_tanh", "mlp_only_layers": [1]}],
    ids=["plain", "routed"],
)
def test_a_model_equals_transformers_model_with_the_papers_layer(name: str, changes: dict[str, Any]) -> None:
    model = tiny(name, **changes)
    reference = tiny_swiglu(name)
    reference.load_state_dict(model.state_dict(), strict=False)
    for own, other in zip(model.model.layers, reference.model.layers, strict=True):
        if hasattr(own.mlp, "experts"):
            other.mlp.experts = NaiveExperts(own.mlp.experts)
        else:
            other.mlp = NaiveFeedForward(own.mlp)
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-4, atol=1e-5)


@EACH
def test_auto_classes_know_the_models(name: str) -> None:
    architecture = BY_NAME[name]
    config = AutoConfig.for_model(f"mglu_{name}", **sizes_of(name))
    assert type(config) is architecture.config
    assert type(AutoModel.from_config(config)) is architecture.mglu[0]
    assert type(AutoModelForCausalLM.from_config(config)) is architecture.mglu[1]
    for cls in (architecture.config, *architecture.mglu):
        assert cls.__name__ in mt.__all__
        assert getattr(mt, cls.__name__) is pickle.loads(pickle.dumps(cls)) is cls
        assert cls.__name__.removeprefix("MGLU") in cls.__doc__


@EACH
def test_the_tensor_parallel_plan_names_the_layers(name: str) -> None:
    model = tiny(name, mlp_only_layers=[1])
    plan = model.config.base_model_tp_plan
    if name != "mixtral":
        assert plan["layers.*.mlp.mglu"] == "mglu_colwise"
        assert plan["layers.*.mlp.down_proj"] == "rowwise"
    assert plan["layers.*.self_attn.o_proj"] == "rowwise"
    modules = {re.sub(r"\d+", "*", module) for module, _ in model.model.named_modules()}
    assert plan.keys() <= modules


@EACH
def test_the_constructor_sets_all_that_transformers_sets(name: str) -> None:
    """Language models do not call the constructor of Transformers' class, so attributes could be missing."""
    model, base = tiny(name), tiny_swiglu(name)
    assert vars(model).keys() == vars(base).keys()
    assert vars(model.model).keys() == vars(base.model).keys()
    assert dict(model.named_children()).keys() == dict(base.named_children()).keys()
    added = set() if name == "mixtral" else {"model.layers.*.mlp.mglu"}
    assert model.tp_plan.keys() - base.tp_plan.keys() == added


@pytest.mark.parametrize("name", MIXTURES)
def test_other_implementations_of_experts_are_refused(name: str) -> None:
    model = tiny(name)
    with pytest.raises(ValueError, match=r"experts_implementation: got 'batched_mm', must be None or 'eager'"):
        model.set_experts_implementation("batched_mm")
    with pytest.raises(ValueError, match="experts_implementation: got 'grouped_mm', must be None or 'eager'"):
        AutoModelForCausalLM.from_config(model.config, experts_implementation="grouped_mm")
    model.config.architectures = ["TransformersMoEForCausalLM"]
    with pytest.raises(ValueError, match="architectures: got 'TransformersMoEForCausalLM', with which vLLM replaces"):
        AutoModel.from_config(model.config)


@pytest.mark.parametrize("cls", BY_NAME["llama"].mglu)
def test_another_configuration_is_refused(cls: type[Any]) -> None:
    with pytest.raises(TypeError, match=r"config: got LlamaConfig, must be a configuration of mglu_ops\.transformers"):
        cls(LlamaConfig(**SIZES))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_masks": 0}, "n_masks: got 0, must be an int from 1 to 16"),
        ({"n_masks": "4"}, "n_masks: got '4', must be an int from 1 to 16"),
        ({"n_masks": 2, "mask_top_k": 3}, "mask_top_k: got 3, must be None or an int from 1 to n_masks=2"),
        ({"mask_top_k": "1"}, "mask_top_k: got '1', must be None"),
        ({"learnable_masks": 1}, "learnable_masks: got 1, must be True or False"),
        ({"router_aux_loss_coef": -1.0}, "router_aux_loss_coef: got -1.0, must be a finite number of at least 0"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef: got 0.1 without mask_top_k, must be 0"),
        ({"weight_init": "xavier"}, "weight_init: got 'xavier', must be one of paper, leveled"),
        ({"hidden_act": "xielu"}, "hidden_act: got 'xielu', must be one of silu, swish"),
        ({"mlp_bias": True}, "mlp_bias: got True, must be False"),
    ],
)
def test_a_wrong_configuration_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match="(?s)" + words.replace("(", r"\(")):
        mt.MGLULlamaConfig(**changes)


def test_the_activation_has_the_name_that_its_configuration_gives_it() -> None:
    with pytest.raises(Exception, match=r"hidden_activation: got 'xielu', must be one of silu, swish"):
        mt.MGLUGemma3TextConfig(hidden_activation="xielu")
    model = tiny("gemma3_text", hidden_act="mish", hidden_activation="relu2")
    assert [mglu.activation for mglu in mglus(model)] == ["relu_squared"] * 2


def test_a_configuration_survives_as_text() -> None:
    keys = {"n_masks": 4, "mask_top_k": 2, "learnable_masks": False, "router_aux_loss_coef": 0.5}
    config = mt.MGLUQwen3Config(weight_init="leveled", **keys, **SIZES)
    again = mt.MGLUQwen3Config.from_dict(config.to_dict())
    for key in (*keys, "weight_init", "hidden_size"):
        assert getattr(again, key) == getattr(config, key) is not None


def test_leveled_weights_are_transformers_weights_times_a_factor() -> None:
    weights = []
    for weight_init in ("paper", "leveled"):
        torch.manual_seed(0)
        model = mt.MGLULlamaForCausalLM(mt.MGLULlamaConfig(weight_init=weight_init, **SIZES))
        weights.append({name: parameter.detach() for name, parameter in model.named_parameters()})
    for name, weight in weights[0].items():
        factor = 10 ** (1 / 4) if name.endswith("mglu.weight") else 1
        torch.testing.assert_close(weights[1][name], factor * weight)


@pytest.mark.parametrize("hidden_act", ACTIVATIONS)
def test_activations_equal_transformers_activations(hidden_act: str) -> None:
    x = torch.linspace(-6, 6, 1001)
    torch.testing.assert_close(get_activation(ACTIVATIONS[hidden_act]).forward(x), ACT2FN[hidden_act](x))


def test_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("mglu_ops.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[transformers\]" installs it'):
        importlib.import_module("mglu_ops.transformers")


@pytest.mark.parametrize("learnable", [True, False])
def test_new_weights_and_masks(learnable: bool) -> None:
    model = tiny(learnable_masks=learnable, initializer_range=0.05, n_masks=4, mask_top_k=2, intermediate_size=200)
    for mglu in mglus(model):
        assert mglu.weight.std().item() == pytest.approx(0.05, rel=0.05)
        assert mglu.router.weight.std().item() == pytest.approx(0.05, rel=0.3)
        if learnable:
            assert mglu.mask_logits.std().item() == pytest.approx(0.01, rel=0.05)
        else:
            masks = torch.ops.mglu.unpack_masks(mglu.packed_masks, mglu.in_features)
            assert masks.float().mean().item() == pytest.approx(0.5, abs=0.02)
    first, second = mglus(model)
    assert not torch.equal(first.weight, second.weight)
    check_masks(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_stay_in_float32(dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_config(mt.MGLULlamaConfig(**SIZES), dtype=dtype)
    assert all(mglu.mask_logits.dtype == torch.float32 for mglu in mglus(model))
    assert all(mglu.weight.dtype == dtype for mglu in mglus(model))
    assert logits(model).dtype == dtype


@EACH
def test_packed_masks_are_parameters_in_vllms_transformers_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It checks that a checkpoint has all parameters, but not that it has all buffers."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "vllm", lambda *args, **options: None)  # as vLLM does
    config = BY_NAME[name].config(**sizes_of(name), learnable_masks=False, attn_implementation="vllm")
    model = AutoModel.from_config(config)
    assert dict(model.named_parameters()).keys() == model.state_dict().keys()
    assert all(mglu.packed_masks.dtype == torch.uint8 and not mglu.learnable_masks for mglu in mglus(model))
    check_masks(model)


def generated(model: Any, **options: Any) -> list[list[int]]:
    return model.generate(TOKENS, max_new_tokens=8, do_sample=False, **options).tolist()


@EACH
def test_the_cache_has_the_name_that_transformers_gives_it(name: str) -> None:
    """Transformers 5.24 renamed the argument `past_key_values` to `cache`, and warns at each call with the old name."""
    architecture = BY_NAME[name]
    ours, base = (set(inspect.signature(c[1].forward).parameters) for c in (architecture.mglu, architecture.swiglu))
    assert ours <= base
    assert base - ours <= {"past_key_values", "cache"}
    routed = tiny(name, mask_top_k=1, router_aux_loss_coef=0.1).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = routed(TOKENS, labels=TOKENS, use_cache=True)
        tokens = routed.eval().generate(TOKENS, max_new_tokens=2, do_sample=False)
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    assert cache.get_seq_length() == TOKENS.shape[1]
    assert tokens.shape[1] == TOKENS.shape[1] + 2


@EACH
def test_generate_gives_the_same_tokens_in_every_form(name: str) -> None:
    model = tiny(name, initializer_range=0.5)
    expected = generated(model)
    assert len({token for row in expected for token in row[9:]}) > 3, "all new tokens are alike"
    assert generated(model, cache_implementation="static") == expected
    assert generated(model, use_cache=False) == expected
    frozen(model)
    assert generated(model) == expected
    assert generated(model, cache_implementation="static") == expected


@pytest.mark.parametrize(
    ("name", "form", "backend"),
    [
        ("qwen3_moe", "packed", "aot_eager"),
        pytest.param("llama", "logits", "aot_eager", marks=pytest.mark.long),
        pytest.param("mixtral", "logits", "aot_eager", marks=pytest.mark.long),
        pytest.param("llama", "packed", "inductor", marks=pytest.mark.long),
        pytest.param("mixtral", "packed", "inductor", marks=pytest.mark.long),
    ],
)
def test_generate_compiles_into_one_graph(name: str, form: str, backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny(name, initializer_range=0.5, num_hidden_layers=1)
    expected = generated(model)
    if form == "packed":
        frozen(model)
    compiled = CompileConfig(fullgraph=True, mode="default", backend=backend, dynamic=False)
    compiled._compile_all_devices = True  # otherwise, Transformers compiles only on GPUs
    assert generated(model, cache_implementation="static", compile_config=compiled) == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
