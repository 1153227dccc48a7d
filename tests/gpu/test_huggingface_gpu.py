"""`generate` on a GPU: with a static cache, Transformers uses CUDA graphs, which must give the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed on every machine with a GPU")
from transformers import CompileConfig

from tests.support.hf_models import BY_NAME, TOKENS, frozen, mglus, tiny, tiny_swiglu

pytestmark = pytest.mark.gpu


COMPILED = CompileConfig(fullgraph=True, mode="reduce-overhead")


def generated(model: Any, **options: Any) -> list[list[int]]:
    return model.generate(TOKENS.cuda(), max_new_tokens=16, do_sample=False, **options).tolist()


def graphs(model: Any, expected: list[list[int]] | None = None) -> int:
    """The number of graphs that Dynamo captures in calls of compiled `generate`, which must give `expected`."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(3):  # the first calls warm up and record
        tokens = generated(model, cache_implementation="static", compile_config=COMPILED)
        assert expected is None or tokens == expected
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return count


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("form", ["logits", "packed"])
def test_cuda_graphs_give_the_same_tokens_in_as_few_graphs_as_swiglu(name: str, form: str) -> None:
    sizes = {"initializer_range": 0.5, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 96}
    model = tiny(name, **sizes).cuda()
    expected = generated(model)
    if form == "packed":
        assert all(mglu.packed_masks.is_cuda for mglu in mglus(frozen(model)))
    # Models with a sliding-window cache, such as Mistral and Gemma 3, need two graphs, with SwiGLU as with MGLU.
    assert graphs(model, expected) <= graphs(tiny_swiglu(name, **sizes).cuda())
