"""Checks for `ranks.run_on_ranks`: Transformers models that their parallel plans divide between two ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import mglu_ops
import mglu_ops.transformers as mt
from tests.support.hf_models import TOKENS, logits, mglus, tiny
from tests.support.ranks.tensor_parallel import whole

SIZES: dict[str, Any] = {"vocab_size": 98, "mask_top_k": 1, "initializer_range": 0.2}  # 98 is divisible by 2 ranks
MIXTURE: dict[str, Any] = {**SIZES, "n_masks": 3, "mask_top_k": 2}  # with top_k 1, the masks' router has no gradient


def load(folder: Path, **options: Any) -> Any:
    parallel = DistributedConfig(tp_plan="auto", tp_size=2, **options)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=parallel).eval()


def mixture() -> Any:
    return tiny("qwen3_moe", **MIXTURE)


def gradients(model: Any) -> dict[str, Tensor]:
    """The gradients of all parameters in blocks of experts."""
    tokens = TOKENS.to(model.device)
    model(tokens, labels=tokens).loss.backward()
    return {name: whole(one.grad) for name, one in model.named_parameters() if ".mlp." in name}


def save_mixture(folder: Path) -> None:
    """Save a Qwen3-MoE with mask logits, and a frozen one with quantized experts."""
    mixture().save_pretrained(folder / "logits")
    mglu_ops.quantize(mt.freeze(mixture()), "int8_row").save_pretrained(folder / "quantized")


def check_mixture(rank: int, device: str, folder: Path) -> None:
    """Results and gradients match a single process, whether ranks divide the rows or the experts.

    The ranks then freeze and save the model for `check_saved`.
    """
    alone = mixture().to(device)
    tokens = TOKENS.to(device)
    expected, expected_grads = logits(alone, tokens), gradients(alone)
    quantized = logits(AutoModelForCausalLM.from_pretrained(folder / "quantized").to(device), tokens)
    for by_experts in (False, True):
        model = load(folder / "logits", enable_expert_parallel=by_experts)
        assert model.device.type == device
        layer = mglus(model)[0]
        assert layer.weight.to_local().shape == ((2, 28, 36) if by_experts else (4, 14, 36))
        assert layer.mask_logits.to_local().numel() == layer.mask_logits.numel() // 2
        torch.testing.assert_close(whole(logits(model, tokens)), expected, rtol=1e-4, atol=1e-5)
        own = gradients(model)
        for name, gradient in expected_grads.items():
            assert gradient.abs().sum() > 0, name
            torch.testing.assert_close(own[name], gradient, rtol=1e-3, atol=1e-5)
        mt.freeze(model).save_pretrained(folder / f"saved-{by_experts}")
        stored = load(folder / "quantized", enable_expert_parallel=by_experts)
        assert mglus(stored)[0].packed_masks.to_local().numel() == layer.packed_masks.numel() // 2
        torch.testing.assert_close(whole(logits(stored, tokens)), quantized, rtol=1e-4, atol=1e-5)


def check_saved(folder: Path) -> None:
    """A checkpoint saved by the ranks equals a model frozen in one process."""
    expected = logits(mt.freeze(mixture()))
    for by_experts in (False, True):
        saved = AutoModelForCausalLM.from_pretrained(folder / f"saved-{by_experts}")
        assert torch.equal(logits(saved), expected)
