"""`generate` on a GPU: Transformers compiles the static cache into CUDA graphs, and the tokens stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed on every machine with a GPU")
from hf_models import TOKENS, frozen, mglus, tiny
from transformers import CompileConfig

pytestmark = pytest.mark.gpu


def generated(model: Any, **options: Any) -> list[list[int]]:
    return model.generate(TOKENS.cuda(), max_new_tokens=16, do_sample=False, **options).tolist()


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("form", ["logits", "packed"])
def test_cuda_graphs_give_the_same_tokens(name: str, form: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny(name, initializer_range=0.5, hidden_size=64, intermediate_size=128).cuda()
    expected = generated(model)
    if form == "packed":
        assert all(mglu.packed_masks.is_cuda for mglu in mglus(frozen(model)))
    compiled = CompileConfig(fullgraph=True, mode="reduce-overhead")
    for _ in range(3):  # the first calls warm up and record
        assert generated(model, cache_implementation="static", compile_config=compiled) == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
