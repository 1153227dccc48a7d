"""Models of Transformers on a GPU: `generate` with a static cache, which uses CUDA graphs, and `convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed on every machine with a GPU")
from transformers import CompileConfig

from mglu_ops.nn import fitting
from mglu_ops.transformers import convert
from tests.support.hf_models import BY_NAME, MIXTURES, TOKENS, frozen, mglus, tiny, tiny_swiglu

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


@pytest.mark.parametrize("name", ["llama", MIXTURES[0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convert_gives_the_same_errors_as_on_the_cpu(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "ADAM_STEPS", 50)
    torch.manual_seed(0)
    batches = [{"input_ids": torch.randint(1, 32, (8, 32))} for _ in range(2)]
    model = tiny_swiglu(name).to(dtype)
    expected = convert(model, batches, progress=False).errors
    on_gpu = [{"input_ids": batch["input_ids"].cuda()} for batch in batches]
    for _ in range(2):  # the second call loads the layers that the first one has written
        result = convert(model.cuda(), on_gpu, folder=tmp_path, progress=False)
        for path, errors in expected.items():
            assert result.errors[path] == pytest.approx(errors, rel=0.25 if dtype == torch.bfloat16 else 0.1)
        parameters = list(result.model.parameters())
        assert all(one.is_cuda and one.isfinite().all() for one in parameters)
