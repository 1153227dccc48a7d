"""Models are loaded, frozen and saved on two gloo ranks, divided by the parallel plans of their configurations."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

import mglu_ops
import mglu_ops.transformers as mt
from tests.support.hf_models import logits, mglus, tiny
from tests.support.ranks import hf_parallel, run_on_ranks
from tests.support.ranks.hf_parallel import SIZES, load
from tests.support.ranks.tensor_parallel import whole


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


@pytest.mark.long
def test_two_ranks_divide_rows_or_experts_of_a_mixture(tmp_path: Path) -> None:
    hf_parallel.save_mixture(tmp_path)
    run_on_ranks(hf_parallel.check_mixture, tmp_path, "cpu", tmp_path)
    hf_parallel.check_saved(tmp_path)
