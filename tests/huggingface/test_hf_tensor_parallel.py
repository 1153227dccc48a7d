"""The parallel plans of the configurations, on two gloo ranks: load, generate, freeze, save, and refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hf_models import TOKENS, logits, mglus, tiny
from ranks import run_on_ranks
from torch import Tensor
from transformers import AutoModelForCausalLM

import mglu_ops
import mglu_ops.transformers as mt

SIZES: dict[str, Any] = {"vocab_size": 98, "mask_top_k": 1, "initializer_range": 0.2}  # sizes that two ranks divide
MIXTURE: dict[str, Any] = {**SIZES, "n_masks": 3, "mask_top_k": 2}  # so that the router of masks has a gradient


def load(folder: Path, **options: Any) -> Any:
    from transformers.distributed import DistributedConfig

    parallel = DistributedConfig(tp_plan="auto", tp_size=2, **options)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=parallel).eval()


def whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(rank: int, folder: Path) -> None:
    expected = logits(tiny(**SIZES))
    for form in ("logits", "packed"):
        model = load(folder / form)
        layer = mglus(model)[0]
        masks = layer.packed_masks if layer.mask_logits is None else layer.mask_logits
        assert layer.weight.to_local().shape[0] == layer.out_features // 2
        assert masks.to_local().numel() == masks.numel() // 2
        torch.testing.assert_close(whole(logits(model)), expected, rtol=1e-4, atol=1e-5)
        mt.freeze(model).save_pretrained(folder / f"{form}-saved")
        torch.testing.assert_close(whole(logits(model)), expected, rtol=1e-4, atol=1e-5)
    model = load(folder / "quantized")
    layer = mglus(model)[0]
    assert layer.weight.to_local().shape[0] == layer.weight_scale.to_local().shape[0] == layer.out_features // 2
    assert layer.weight.dtype == torch.int8
    model.save_pretrained(folder / "quantized-saved")
    expected = logits(AutoModelForCausalLM.from_pretrained(folder / "quantized"))
    torch.testing.assert_close(whole(logits(model)), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"out_features: got 44, must be a multiple of 256 with 2 ranks .* fp8_block"):
        load(folder / "blocks")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.mglu\.packed_masks: padding bits past in_features=36"):
        load(folder / "damaged")


@pytest.mark.long
def test_two_ranks_load_freeze_and_save_a_model(tmp_path: Path) -> None:
    model = tiny(**SIZES)
    expected = logits(model)
    model.save_pretrained(tmp_path / "logits")
    mt.freeze(model).save_pretrained(tmp_path / "packed")
    model.save_pretrained(tmp_path / "damaged")
    file = tmp_path / "damaged" / "model.safetensors"
    state = safetensors.torch.load_file(file)
    state["model.layers.1.mlp.mglu.packed_masks"] |= 0x80
    safetensors.torch.save_file(state, file, metadata={"format": "pt"})
    rows, blocks = (mglu_ops.quantize(mt.freeze(tiny(**SIZES)), chosen) for chosen in ("int8_row", "fp8_block"))
    rows.save_pretrained(tmp_path / "quantized")
    blocks.save_pretrained(tmp_path / "blocks")

    run_on_ranks(check, tmp_path, tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized-saved")
    assert torch.equal(logits(saved), logits(rows))
    for form in ("logits", "packed"):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / f"{form}-saved")
        assert torch.equal(logits(saved), expected)
        for ours, theirs in zip(mglus(saved), mglus(model), strict=True):
            assert torch.equal(ours.packed_masks, theirs.packed_masks)


def gradients(model: Any) -> dict[str, Tensor]:
    """The gradients of all parameters of the blocks with experts."""
    model(TOKENS, labels=TOKENS).loss.backward()
    return {name: whole(one.grad) for name, one in model.named_parameters() if ".mlp." in name}


def check_mixture(rank: int, folder: Path) -> None:
    expected = logits(tiny("qwen3_moe", **MIXTURE))
    for by_experts in (False, True):
        model = load(folder / "logits", enable_expert_parallel=by_experts)
        layer = mglus(model)[0]
        assert layer.weight.to_local().shape == ((2, 28, 36) if by_experts else (4, 14, 36))
        assert layer.mask_logits.to_local().numel() == layer.mask_logits.numel() // 2
        torch.testing.assert_close(whole(logits(model)), expected, rtol=1e-4, atol=1e-5)
        own = gradients(model)
        for name, gradient in gradients(tiny("qwen3_moe", **MIXTURE)).items():
            assert gradient.abs().sum() > 0, name
            torch.testing.assert_close(own[name], gradient, rtol=1e-3, atol=1e-5)
        mt.freeze(model).save_pretrained(folder / f"saved-{by_experts}")
        quantized = load(folder / "quantized", enable_expert_parallel=by_experts)
        assert mglus(quantized)[0].packed_masks.to_local().numel() == layer.packed_masks.numel() // 2
        one = logits(AutoModelForCausalLM.from_pretrained(folder / "quantized"))
        torch.testing.assert_close(whole(logits(quantized)), one, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_two_ranks_divide_rows_or_experts_of_a_mixture(tmp_path: Path) -> None:
    model = tiny("qwen3_moe", **MIXTURE)
    model.save_pretrained(tmp_path / "logits")
    frozen = mt.freeze(tiny("qwen3_moe", **MIXTURE))
    expected = logits(frozen)
    mglu_ops.quantize(frozen, "int8_row").save_pretrained(tmp_path / "quantized")
    run_on_ranks(check_mixture, tmp_path, tmp_path)
    for by_experts in (False, True):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / f"saved-{by_experts}")
        assert torch.equal(logits(saved), expected)
