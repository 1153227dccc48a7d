"""Layers that Transformers shards on two gloo ranks, by the style "mglu_colwise", compute what whole layers compute."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mglu_ops.nn import MGLU, MGLUFeedForward
from tests.support.ranks import RANKS, run_on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")

PLAN = {"model.layers.*.mlp.mglu": "mglu_colwise", "model.layers.*.mlp.down_proj": "rowwise"}
N_MASKS = 3
TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def tiny_llama(config):
    """A Llama of Transformers' own classes, except that its feed-forward layers are MGLU."""
    from transformers import LlamaForCausalLM

    class Llama(LlamaForCausalLM):
        def __init__(self, config) -> None:
            super().__init__(config)
            options = {"learnable_masks": config.learnable_masks, "top_k": config.mask_top_k}
            for layer in self.model.layers:
                layer.mlp = MGLUFeedForward(config.hidden_size, config.intermediate_size, n_masks=N_MASKS, **options)
            self.post_init()

    return Llama


def config_of(learnable_masks: bool, top_k: int | None):
    from transformers import LlamaConfig

    sizes = {"vocab_size": 32, "hidden_size": 36, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaConfig(**sizes, **heads, learnable_masks=learnable_masks, mask_top_k=top_k)


def logits_and_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The logits in inference, the loss, and the gradients of all parameters."""
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        found = {"logits": model(TOKENS).logits}
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    found["loss"] = loss.detach()
    for name, parameter in model.named_parameters():
        found[name] = parameter.grad
    return {key: t.full_tensor() if isinstance(t, DTensor) else t for key, t in found.items()}


def check_loaded(rank: int, folders: list[str]) -> None:
    from mglu_ops.parallel import register_transformers_style

    register_transformers_style()
    for folder in folders:
        check_one(folder)
    check_refusals()


def check_one(folder: str) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from transformers import AutoConfig
    from transformers.distributed import DistributedConfig

    config = AutoConfig.from_pretrained(folder)
    model_class = tiny_llama(config)
    whole = model_class.from_pretrained(folder)
    distributed = DistributedConfig(tp_size=RANKS, tp_plan=PLAN)
    model = model_class.from_pretrained(folder, distributed_config=distributed)
    layer, expected = model.model.layers[1].mlp.mglu, whole.model.layers[1].mlp.mglu
    placements = {"weight": Shard(0), "mask_logits": Shard(1), "packed_masks": Shard(0)}
    for name, placement in placements.items():
        tensor, want = getattr(layer, name), getattr(expected, name)
        assert (tensor is None) == (want is None), name
        if want is not None:
            assert isinstance(tensor, DTensor), name
            assert tensor.placements == (placement,), name
            assert tensor.to_local().shape[placement.dim] == want.shape[placement.dim] // RANKS, name
            assert torch.equal(tensor.full_tensor(), want), name
    assert set(dict(layer.named_buffers())) == set(dict(expected.named_buffers()))
    assert set(dict(layer.named_parameters())) == set(dict(expected.named_parameters()))
    if layer.router is not None:
        assert layer.router.weight.placements == (Replicate(),)
    want, got = logits_and_gradients(whole), logits_and_gradients(model)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-6, msg=f"{folder}: {name}")


def check_refusals() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    from mglu_ops.parallel import register_transformers_style

    register_transformers_style()  # a second registration must not fail
    style, mesh = ALL_PARALLEL_STYLES["mglu_colwise"], init_device_mesh("cpu", (RANKS,))
    with pytest.raises(TypeError, match='tp_plan: got the style "mglu_colwise" for a Linear, must be for an MGLU'):
        style.install_forward(nn.Linear(4, 4), mesh)
    with pytest.raises(ValueError, match="out_features: got 7, must be a multiple of the number of ranks, 2"):
        style.install_forward(MGLU(4, 7), mesh)


@pytest.mark.long
def test_from_pretrained_shards_and_computes_the_same(tmp_path: Path) -> None:
    """Covers learned masks with a router, and fixed masks without one. tests/huggingface freezes and saves models."""
    folders = []
    for learnable_masks, top_k in ((True, 2), (False, None)):
        config = config_of(learnable_masks, top_k)
        torch.manual_seed(0)
        folders.append(str(tmp_path / f"{learnable_masks} {top_k}"))
        tiny_llama(config)(config).save_pretrained(folders[-1])
    run_on_ranks(check_loaded, tmp_path, folders)


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from mglu_ops.parallel import register_transformers_style

    monkeypatch.delitem(sys.modules, "mglu_ops.parallel.transformers_style", raising=False)
    monkeypatch.setitem(sys.modules, "transformers.distributed.tensor_parallel", None)
    words = r'register_transformers_style: needs transformers 5\.17 or later.* "\.\[transformers\]"'
    with pytest.raises(ImportError, match=words):
        register_transformers_style()
