"""The style "mglu_colwise" of Transformers on two gloo ranks: the loader shards, and the model computes the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RANKS, run_on_ranks
from torch import nn

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")

PLAN = {"model.layers.*.mlp.mglu": "mglu_colwise", "model.layers.*.mlp.down_proj": "rowwise"}
N_MASKS = 3
TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def tiny_llama(config):
    """A Llama whose feed-forward layers are MGLU, with Transformers' own classes."""
    from transformers import LlamaForCausalLM

    from mglu_ops.nn import MGLUFeedForward

    class Llama(LlamaForCausalLM):
        def __init__(self, config) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp = MGLUFeedForward(
                    config.hidden_size,
                    config.intermediate_size,
                    n_masks=N_MASKS,
                    learnable_masks=config.learnable_masks,
                    top_k=config.mask_top_k,
                )
            self.post_init()

    return Llama


def config_of(learnable_masks: bool, top_k: int | None):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32,
        hidden_size=36,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        learnable_masks=learnable_masks,
        mask_top_k=top_k,
    )


def logits_and_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The logits of the model without gradients, its loss, and the gradients of all parameters."""
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        found = {"logits": model(TOKENS).logits}
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    found["loss"] = loss.detach()
    for name, parameter in model.named_parameters():
        found[name] = parameter.grad
    return {key: t.full_tensor() if isinstance(t, DTensor) else t for key, t in found.items()}


def check_loaded(rank: int, folder: str) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from transformers import AutoConfig
    from transformers.distributed import DistributedConfig

    from mglu_ops.parallel import register_transformers_style

    register_transformers_style()
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
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-6, msg=name)
    model.save_pretrained(f"{folder}/again")
    dist.barrier()
    again = model_class.from_pretrained(f"{folder}/again").state_dict()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize(
    ("learnable_masks", "top_k"),
    [
        (False, None),
        (True, 2),
        pytest.param(True, None, marks=pytest.mark.long),
        pytest.param(False, 2, marks=pytest.mark.long),
    ],
)
def test_from_pretrained_shards_and_computes_the_same(learnable_masks: bool, top_k: int | None, tmp_path: Path) -> None:
    config = config_of(learnable_masks, top_k)
    torch.manual_seed(0)
    tiny_llama(config)(config).save_pretrained(tmp_path)
    run_on_ranks(check_loaded, tmp_path, str(tmp_path))


def check_refusals(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    from mglu_ops.nn import MGLU
    from mglu_ops.parallel import register_transformers_style

    register_transformers_style()
    register_transformers_style()
    style, mesh = ALL_PARALLEL_STYLES["mglu_colwise"], init_device_mesh("cpu", (RANKS,))
    with pytest.raises(TypeError, match=r'tp_plan: got the style "mglu_colwise" for a Linear, must be for an MGLU'):
        style.install_forward(nn.Linear(4, 4), mesh)
    with pytest.raises(ValueError, match="out_features: got 7, must be a multiple of the number of ranks, 2"):
        style.install_forward(MGLU(4, 7), mesh)


@pytest.mark.long
def test_what_cannot_be_sharded_is_refused(tmp_path: Path) -> None:
    run_on_ranks(check_refusals, tmp_path)


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None
import mglu_ops.parallel
try:
    mglu_ops.parallel.register_transformers_style()
except ImportError as error:
    print(error)
"""


def test_without_transformers_the_error_names_the_extra() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRANSFORMERS], capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stdout.startswith("register_transformers_style: needs transformers 5.17 or later")
    assert '".[transformers]"' in run.stdout
