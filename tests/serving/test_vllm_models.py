"""The plugin with the real vLLM: registration, tensor-parallel layers on two ranks, and whole models in its engine.

Continuous integration does not install vLLM, because its wheels take gigabytes and bring another torch. The file
mglu_ops/vllm/README.md lists the versions with which the tests were run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import mglu_ops
from mglu_ops.call import Call
from mglu_ops.formats import FORMATS
from mglu_ops.given import Given
from mglu_ops.nn import MGLUFeedForward
from tests.support.ranks import run_on_ranks
from tests.support.vllm_engines import (
    BY_EXPERTS,
    N_MASKS,
    TRANSFORMERS_BACKEND,
    TWO_RANKS,
    answers,
    make_small,
    save_small,
    start,
)

pytest.importorskip("vllm", reason="vLLM is not a dependency of the tests: it brings gigabytes and a torch of its own")
pytest.importorskip("mglu_ops.transformers")
pytestmark = pytest.mark.long

KINDS = ("llama", "mistral", "qwen3", "qwen3_moe", "mixtral")
PROMPT, NEW_TOKENS = [1, 5, 9, 30, 2, 7], 12
HIDDEN, INTERMEDIATE = 20, 24


def test_the_entry_point_registers_the_architectures_and_configs() -> None:
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.plugins import load_general_plugins

    from mglu_ops.vllm.plugin import ARCHITECTURES
    from mglu_ops.vllm.quantization import MGLUConfig

    load_general_plugins()
    assert set(ARCHITECTURES) <= set(ModelRegistry.get_supported_archs())
    for architecture in ARCHITECTURES:
        assert ModelRegistry.models[architecture].load_model_cls().__name__ == architecture
    assert get_quantization_config("mglu") is MGLUConfig
    assert [AutoConfig.for_model(f"mglu_{kind}").model_type for kind in KINDS] == [f"mglu_{kind}" for kind in KINDS]


class InVllm:
    """A context with a vLLM process group and config for this rank, as in vLLM's workers."""

    def __init__(self, rank: int, ranks: int) -> None:
        from vllm.config import VllmConfig, set_current_vllm_config

        self.rank, self.ranks = rank, ranks
        self.config = set_current_vllm_config(VllmConfig())

    def __enter__(self) -> None:
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        self.config.__enter__()
        first = [os.getpid()]
        torch.distributed.broadcast_object_list(first)
        os.environ["VLLM_DIST_IDENT"] = f"mglu_ops_{first[0]}"  # names the shared memory of these ranks
        init_distributed_environment(self.ranks, self.rank, local_rank=self.rank, backend="gloo")
        initialize_model_parallel(self.ranks, backend="gloo")

    def __exit__(self, *exception: object) -> None:
        self.config.__exit__(*exception)


def entry(weight_format: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "mglu", "weight_format": weight_format, **more}


def settings(top_k: int | None, **changes: Any) -> Any:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "n_masks": N_MASKS, "mask_top_k": top_k}
    return SimpleNamespace(**{"hidden_act": "silu", **sizes, **changes})


def load(module: torch.nn.Module, checkpoint: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Load a module with vLLM's loader, and check that no tensor is missing."""
    from vllm.model_executor.models.utils import AutoWeightsLoader

    from mglu_ops.vllm.layers import check_loaded

    loaded = AutoWeightsLoader(module).load_weights(checkpoint.items())
    assert loaded == {name for name, _ in module.named_parameters()}
    check_loaded(module, loaded)
    for part in module.modules():
        if method := getattr(part, "quant_method", None):
            method.process_weights_after_loading(part)
    return module


def check_mlp(rank: int, top_k: int | None, packed: bool, weight_format: str, intermediate: int) -> None:
    """The plugin's layer, loaded by vLLM's loader from a whole checkpoint, equals the layer of `mglu_ops.nn`."""
    from mglu_ops.vllm.layers import MGLUMLP
    from mglu_ops.vllm.quantization import MGLUConfig

    torch.manual_seed(0)
    reference, x = MGLUFeedForward(HIDDEN, intermediate, n_masks=N_MASKS, top_k=top_k), torch.randn(5, HIDDEN)
    if packed:
        mglu_ops.freeze(reference)
    config, quant_config = settings(top_k, intermediate_size=intermediate), None
    if weight_format != "dense":
        mglu_ops.quantize(reference, weight_format)
        config.quantization_config, quant_config = entry(weight_format), MGLUConfig()
    checkpoint = {name: tensor.detach().clone() for name, tensor in reference.state_dict().items()}
    with InVllm(rank, 2), torch.no_grad():
        mlp = load(MGLUMLP(config, quant_config, "mlp"), checkpoint)
        assert mlp.mglu.weight.shape == (intermediate // 2, HIDDEN)
        assert mlp.mglu.weight.dtype == reference.mglu.weight.dtype
        assert mlp.mglu.packed_masks.shape == (intermediate // 2, 3, N_MASKS)
        torch.testing.assert_close(mlp(x), reference(x))
        layer = mlp.mglu
        given = (x, layer.weight, layer.packed_masks, "silu", layer.mask_weights(x))
        stored = (layer.weight_scale, layer.weight_format, layer.activation_format)
        assert mlp.calls(5) == [("forward", Call.of(Given(*given, *stored)))], "kernels are compiled for this call"
        if weight_format != "dense":
            mglu_ops.quantize(reference, weight_format, activation_format="fp8_token")
            config.quantization_config = entry(weight_format, activation_format="fp8_token")
            rounding = load(MGLUMLP(config, quant_config, "mlp"), checkpoint)
            torch.testing.assert_close(rounding(x), reference(x))


@pytest.mark.parametrize(
    ("top_k", "packed", "weight_format", "intermediate"),
    [
        (None, False, "dense", INTERMEDIATE),
        (2, False, "dense", INTERMEDIATE),
        (None, True, "dense", INTERMEDIATE),
        (2, True, "dense", INTERMEDIATE),
        (2, True, "fp8_row", INTERMEDIATE),
        (None, True, "fp8_block", 256),
    ],
)
def test_a_layer_on_two_ranks(top_k, packed, weight_format, intermediate, tmp_path):
    run_on_ranks(check_mlp, tmp_path, top_k, packed, weight_format, intermediate)


EXPERTS = [
    ("qwen3_moe", True, 2, "dense", {}),
    ("mixtral", False, None, "dense", {}),
    ("qwen3_moe", False, 2, "fp8_row", {"activation_format": "fp8_token"}),
    ("mixtral", False, None, "int4_group", {}),
    ("mixtral", False, None, "fp8_block", {}),
]


def check_experts(rank: int) -> None:
    """Mixtures that are divided by experts or by rows compute what Transformers computes."""
    from vllm.config import get_current_vllm_config

    from mglu_ops.vllm.experts import MGLUMoE

    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    with InVllm(rank, 2), torch.no_grad():
        for (kind, learnable, top_k, weight_format, options), by_experts in product(EXPERTS, (False, True)):
            model = make_small(kind, learnable_masks=learnable, mask_top_k=top_k)
            if weight_format != "dense":
                mglu_ops.quantize(model, weight_format, **options)
                model.config.quantization_config = entry(weight_format, **options)
            reference = model.model.layers[1].mlp
            get_current_vllm_config().parallel_config.enable_expert_parallel = by_experts
            mixture = load(MGLUMoE(model.config, None, "model.layers.1.mlp"), reference.state_dict())
            size = (256 if kind == "mixtral" else 32) // FORMATS[weight_format].packed
            expected = (2, 64, size) if by_experts else (4, 64, size // 2)
            assert mixture.experts.down_proj.weight.shape == expected
            torch.testing.assert_close(mixture(x), reference(x[None])[0])


def test_experts_on_two_ranks(tmp_path: Path) -> None:
    run_on_ranks(check_experts, tmp_path)


def check_refusals(rank: int) -> None:
    from mglu_ops.vllm.layers import MGLUMLP, check_loaded

    with InVllm(rank, 2):
        block, beside = entry("fp8_block"), {"quantization_config": {"quant_method": "fp8"}}
        for changes, message in (
            ({"intermediate_size": 25}, "intermediate_size: got 25, must be a multiple"),
            ({"n_masks": 17}, "n_masks: got 17, must be an int from 1 to 16"),
            ({"hidden_act": "mish"}, "activation: got 'mish', must be one of"),
            (
                {"quantization_config": entry("int8_row", activation_format="fp8_token")},
                "activation_format: got 'fp8_token', must be dense for weight_format='int8_row'",
            ),
            ({"quantization_config": block}, "intermediate_size: got 24, must be a multiple of 256 .* fp8_block"),
            ({**beside, "mglu_quantization_config": block}, "intermediate_size: got 24, must be a multiple of 256"),
        ):
            with pytest.raises(ValueError, match=message):
                MGLUMLP(settings(None, **changes), None, "mlp")
        layer = MGLUMLP(settings(None), None, "mlp").mglu
        with pytest.raises(ValueError, match=r"router\.weight: an MGLU layer has no such tensor"):
            layer.load_weights([("router.weight", torch.zeros(N_MASKS, HIDDEN))])
        logits = torch.ones(N_MASKS, INTERMEDIATE, HIDDEN)
        both = [("mask_logits", logits), ("packed_masks", torch.ops.mglu.pack_logits(logits))]
        words = r"mlp\.mglu\.packed_masks: got mask_logits of the layer too"
        with pytest.raises(ValueError, match=words):
            layer.load_weights(both)
        layer.given.clear()
        layer.load_weights(both[:1])
        with pytest.raises(ValueError, match=words):
            layer.load_weights(both[1:])  # vLLM calls the method again for each file
        quantized = MGLUMLP(settings(None, quantization_config=entry("fp8_row")), None, "mlp")
        quantized.mglu.load_weights([("packed_masks", torch.ops.mglu.pack_logits(logits))])
        quantized.mglu.load_weights([("weight", torch.zeros(INTERMEDIATE, HIDDEN, dtype=torch.float8_e4m3fn))])
        with pytest.raises(ValueError, match=r"mglu\.weight_scale: the checkpoint has no such tensor"):
            check_loaded(quantized, {"down_proj.weight"})
        with pytest.raises(ValueError, match=r"^down_proj\.weight: the checkpoint has no such tensor"):
            check_loaded(quantized, ())


def check_refused_mixtures(rank: int) -> None:
    from vllm.config import get_current_vllm_config

    from mglu_ops.vllm.experts import MGLUMoE
    from mglu_ops.vllm.layers import check_loaded

    mixture = {"num_experts": 4, "num_experts_per_tok": 2}
    by_experts = {"enable_expert_parallel": True}
    with InVllm(rank, 2):
        parallel = get_current_vllm_config().parallel_config
        for changes, options, message in (
            ({"num_experts_per_tok": 5}, {}, "num_experts_per_tok: got 5, must be an int from 1 to num_experts=4"),
            ({"moe_intermediate_size": 25}, {}, "moe_intermediate_size: got 25, must be a multiple of the number"),
            ({"num_experts": 5}, by_experts, "num_experts: got 5, must be a multiple of the number of ranks, 2"),
            (
                {},
                {**by_experts, "data_parallel_size": 2},
                "data_parallel_size: got 2, must be 1 with",
            ),
            ({}, {**by_experts, "enable_eplb": True}, "enable_eplb: got True, must be False"),
        ):
            with pytest.MonkeyPatch.context() as patch:
                for name, value in options.items():
                    patch.setattr(parallel, name, value)
                with pytest.raises(ValueError, match=message):
                    MGLUMoE(settings(None, **mixture | changes), None, "mlp")
        experts = MGLUMoE(settings(None, **mixture), None, "mlp").experts
        with pytest.raises(ValueError, match=r"weight: got shape \[3, 24, 20\], must be \[num_experts=4, \.\.\.\]"):
            experts.mglu.load_weights([("weight", torch.zeros(3, INTERMEDIATE, HIDDEN))])
        logits = torch.ones(4, N_MASKS, INTERMEDIATE, HIDDEN)
        experts.mglu.load_weights([("mask_logits", logits), ("weight", torch.zeros(4, INTERMEDIATE, HIDDEN))])
        with pytest.raises(ValueError, match=r"experts\.down_proj\.weight: the checkpoint has no such tensor"):
            check_loaded(torch.nn.ModuleDict({"experts": experts}), ())


@pytest.mark.parametrize("check", [check_refusals, check_refused_mixtures])
def test_configs_and_checkpoints_that_are_refused(check: Callable[[int], None], tmp_path: Path) -> None:
    run_on_ranks(check, tmp_path)


def check_beside_another(rank: int) -> None:
    """The model's quantizer handles its linear layers, but not the weight of MGLU."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from mglu_ops.vllm.layers import MGLUMLP
    from mglu_ops.vllm.quantization import MGLUConfig

    class Another(MGLUConfig):
        asked: ClassVar[set[str]] = set()

        @classmethod
        def get_name(cls) -> str:
            return "another"

        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
            self.asked.add(prefix)
            return UnquantizedLinearMethod()

    with InVllm(rank, 2):
        config = settings(2, quantization_config={"quant_method": "another", "activation_scheme": "dynamic"})
        with pytest.warns(UserWarning, match="quantization: another quantizes linear layers only"):
            assert MGLUMLP(config, Another(), "mlp").mglu.weight.dtype == torch.float32
        config.mglu_quantization_config = entry("int8_row")
        assert MGLUMLP(config, Another(), "mlp").mglu.weight.dtype == torch.int8
        config.mglu_quantization_config = entry("fp8_row")
        assert MGLUMLP(config, Another(), "mlp").mglu.activation_format == "dense", "only the user's own choice counts"
    assert Another.asked == {"mlp.mglu.router", "mlp.down_proj"}


def test_another_quantizer_has_the_linear_layers(tmp_path: Path) -> None:
    run_on_ranks(check_beside_another, tmp_path)


EAGER = {"enforce_eager": True}
SIZES = {"max_model_len": 64, "max_num_seqs": 4, "dtype": "float32"}


def make_model(
    kind: str, learnable_masks: bool, top_k: int | None, weight_format: str, folder: Path, **changes: Any
) -> list[int]:
    """Save a small random model, and return the tokens that Transformers generates with it."""
    model = save_small(kind, folder, weight_format, mask_top_k=top_k, learnable_masks=learnable_masks, **changes)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    ("kind", "learnable_masks", "top_k", "weight_format", "options"),
    [
        ("llama", True, 2, "dense", EAGER),
        ("llama", False, None, "dense", {}),
        ("mistral", False, None, "dense", EAGER),
        ("qwen3", True, None, "dense", EAGER),
        ("qwen3", False, None, "dense", {**TWO_RANKS, **EAGER}),
        ("mistral", True, 1, "dense", {**TWO_RANKS, **EAGER}),
        ("llama", False, None, "dense", {**TRANSFORMERS_BACKEND, **EAGER}),
        ("llama", True, None, "dense", TRANSFORMERS_BACKEND),
        ("llama", False, None, "fp8_row", {}),
        ("mistral", False, 1, "int8_row", EAGER),
        ("llama", False, 2, "fp8_row", {**TWO_RANKS, **EAGER}),
        ("qwen3", False, None, "fp8_block", {**TWO_RANKS, **EAGER}),
        ("mixtral", False, None, "dense", {**TRANSFORMERS_BACKEND, **EAGER}),
        ("qwen3_moe", True, 2, "dense", EAGER),
        ("mixtral", False, None, "fp8_row", {}),
        ("qwen3_moe", False, 1, "fp8_row", {**TWO_RANKS, **BY_EXPERTS}),
        ("mixtral", True, None, "dense", {**TWO_RANKS, **EAGER}),
    ],
    ids=lambda value: "-".join(value) or "compiled" if isinstance(value, dict) else str(value),
)
def test_the_engine_generates_the_tokens_of_transformers(
    kind: str, learnable_masks: bool, top_k: int | None, weight_format: str, options: dict[str, Any], tmp_path: Path
) -> None:
    expected = make_model(kind, learnable_masks, top_k, weight_format, tmp_path / "model")
    assert len(set(expected)) > 1
    ((answer,),) = answers(start(tmp_path / "model", [[(PROMPT, NEW_TOKENS)]], {**SIZES, **options}))
    assert answer.tokens == expected


@pytest.mark.parametrize(("kind", "learnable_masks"), [("llama", True), ("mixtral", False)])
def test_another_checkpoint_is_loaded_into_a_running_engine(kind: str, learnable_masks: bool, tmp_path: Path) -> None:
    expected = [
        make_model(kind, learnable_masks, None, "dense", tmp_path / name, seed=seed)
        for seed, name in enumerate(("model", "next"))
    ]
    assert expected[0] != expected[1]
    found = answers(start(tmp_path / "model", [[(PROMPT, NEW_TOKENS)]], {**SIZES, **EAGER}, then=tmp_path / "next"))
    assert [answer.tokens for (answer,) in found] == expected


@pytest.mark.parametrize(("kind", "learnable_masks"), [("llama", False), ("llama", True), ("mixtral", False)])
def test_the_transformers_backend_refuses_a_checkpoint_without_masks(
    kind: str, learnable_masks: bool, tmp_path: Path
) -> None:
    from tests.support.hf_models import rewrite

    make_model(kind, learnable_masks, None, "dense", tmp_path / "model")
    masks = "mask_logits" if learnable_masks else "packed_masks"
    name = f"model.layers.1.mlp.{'experts.' if kind == 'mixtral' else ''}mglu.{masks}"
    rewrite(tmp_path / "model", lambda tensors: {key: value for key, value in tensors.items() if key != name})
    process = start(tmp_path / "model", [[(PROMPT, NEW_TOKENS)]], {**SIZES, **TRANSFORMERS_BACKEND, **EAGER})
    assert process.returncode != 0
    assert f"not initialized from checkpoint: {{'{name}'}}" in process.stdout + process.stderr


@pytest.mark.parametrize(
    ("kind", "weight_format", "architecture", "message"),
    [
        ("llama", "fp8_row", "TransformersForCausalLM", "the Transformers backend, which casts quantized weights"),
        ("mixtral", "dense", "TransformersMoEForCausalLM", "with which vLLM replaces experts by its own with SwiGLU"),
    ],
)
def test_what_the_transformers_backend_cannot_run_is_refused(
    kind: str, weight_format: str, architecture: str, message: str, tmp_path: Path
) -> None:
    make_model(kind, False, None, weight_format, tmp_path / "model")
    options = {"hf_overrides": {"architectures": [architecture]}, **EAGER}
    process = start(tmp_path / "model", [[(PROMPT, NEW_TOKENS)]], {**SIZES, **options})
    assert process.returncode != 0
    assert message in process.stdout + process.stderr
