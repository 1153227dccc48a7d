"""Tiny language models of Transformers, with MGLU and with SwiGLU, for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mglu_ops import transformers as mglu_transformers
from mglu_ops.nn import MGLU
from mglu_ops.transformers.architectures import ARCHITECTURES, Architecture

VOCABULARY = 97
# hidden_size is not a multiple of 8, so that packed masks have padding.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Model type -> arguments of its configuration besides SIZES.
OWN_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 28, **EXPERTS},
    "mixtral": EXPERTS,
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": False,  # otherwise, a tiny model repeats its last token
    },
}
BY_NAME: dict[str, Architecture] = {a.config.model_type.removeprefix("mglu_"): a for a in ARCHITECTURES}
MIXTURES = ("qwen3_moe", "mixtral")
TOKENS = torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


def sizes_of(name: str) -> dict[str, Any]:
    """The sizes of an architecture's tiny models."""
    return {**SIZES, **OWN_SIZES.get(name, {})}


def tiny(name: str = "llama", **changes: Any) -> Any:
    """A language model with MGLU whose weights are drawn with seed 0, in evaluation mode."""
    torch.manual_seed(0)
    architecture = BY_NAME[name]
    return architecture.mglu[1](architecture.config(**{**sizes_of(name), "n_masks": 2, **changes})).eval()


def tiny_swiglu(name: str = "llama", **changes: Any) -> Any:
    """A language model with SwiGLU whose weights are drawn with seed 0, in evaluation mode."""
    torch.manual_seed(0)
    model_class = BY_NAME[name].swiglu[1]
    return model_class(model_class.config_class(**{**sizes_of(name), **changes})).eval()


def frozen(model: Any) -> Any:
    return mglu_transformers.freeze(model)


def mglus(model: Any) -> list[MGLU]:
    """The MGLU modules of a model, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, MGLU)]


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the tensors of a saved model."""
    file = folder / "model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load_file(file)), file, metadata={"format": "pt"})


def loaded_from_disk(folder: Path, **options: Any) -> Any:
    """Load a model so that accelerate reads its last layer from disk at each call."""
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    options = {"device_map": places, "offload_folder": folder / "offload", **options}
    return AutoModelForCausalLM.from_pretrained(folder, **options)


@torch.no_grad()
def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    return model(tokens).logits
