"""benchmarks/generate.py: all forms compute the same model, and rows say what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
import torch

import mglu_ops
from benchmarks import generate
from benchmarks.generate import Form, Problem

LlamaConfig = pytest.importorskip("transformers", reason="transformers is not installed").LlamaConfig

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


class Inline(Executor):
    """An executor that runs its tasks in this process instead of a new one. Each executor keeps its own model."""

    served: Callable[[], torch.Tensor]

    def submit(self, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if hasattr(self, "served"):
            generate._served = self.served
        future.set_result(task(*args, **kwargs))
        self.served = generate._served
        return future


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "process", Inline)
    # Transformers compiles generate's step only on a GPU, so no layer would be fused here.
    monkeypatch.setattr(generate, "MGLUS", tuple(form for form in generate.MGLUS if not form.fused))


@pytest.mark.usefixtures("inline")
def test_a_row_for_each_form() -> None:
    rows = generate.bench(Problem("tiny", 2, (1, 4)), SIZES, "cpu", rounds=2, new_tokens=3)
    assert [(row.variant, row.n_masks) for row in rows] == [
        ("SwiGLU", 0),
        ("SwiGLU, pdl", 0),
        ("naive", 1),
        ("freeze(replace=...)", 1),
        ("naive", 4),
        ("freeze(replace=...)", 4),
    ]
    assert all(row.has_time and row.tokens == 2 and row.shape == (48, 32) for row in rows)
    assert [math.isnan(row.error) for row in rows] == [True, True, True, False, True, False]
    assert max(rows[3].error, rows[5].error) < 0.02


@pytest.mark.long
def test_every_form_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "SWIGLU", generate.SWIGLU[:1])
    monkeypatch.setattr(generate, "MGLUS", generate.MGLUS[:1])
    processes: list[Executor] = []
    start = generate.process

    def process() -> Executor:
        processes.append(start())
        return processes[-1]

    monkeypatch.setattr(generate, "process", process)
    rows = generate.bench(Problem("tiny", 1, (1,)), SIZES, "cpu", rounds=1, new_tokens=2)
    assert [(row.variant, row.has_time) for row in rows] == [("SwiGLU", True), ("naive", True)]
    assert len(processes) == 2
    for one in processes:
        with pytest.raises(RuntimeError, match="shutdown"):
            one.submit(generate.time_served)


@pytest.mark.usefixtures("inline")
def test_a_form_with_wrong_masks_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: generate.PlainMGLU) -> torch.nn.Module:
        return torch.nn.Sequential(generate.MGLU.from_parameters(module.weight, -module.logits), module.down_proj)

    monkeypatch.setattr(generate, "packed", wrong)
    monkeypatch.setattr(generate, "MGLUS", (Form("naive"), Form("packed", packed=True)))
    rows = generate.bench(Problem("tiny", 1, (4,)), SIZES, "cpu", rounds=1, new_tokens=2)
    assert [row.has_time for row in rows] == [True, True, True, False]


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.long
def test_a_fused_form_compiles_with_the_pass_and_pdl_with_its_option() -> None:
    layer = generate.PlainMGLU(32, 48, n_masks=2)
    x = torch.randn(3, 32)
    torch._dynamo.reset()
    frozen = mglu_ops.freeze(torch.nn.Sequential(layer), replace={generate.PlainMGLU: generate.packed})
    packed = Form("packed and fused", packed=True, fused=True)
    for form, model in ((Form("fused", fused=True), layer), (packed, frozen)):
        with torch.no_grad(), generate.settings(form):
            torch.testing.assert_close(torch.compile(model)(x), layer(x), rtol=1e-4, atol=1e-5)
    with generate.settings(Form("pdl", pdl=True)):
        assert torch._inductor.config.triton.enable_pdl
    assert not torch._inductor.config.triton.enable_pdl
