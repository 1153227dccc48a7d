"""Kernels are compiled in the background while vLLM starts. The tests need neither vLLM nor a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.backends import BACKENDS, cuda
from mglu_ops.backends.cuda.device import KNOWN_GPUS
from mglu_ops.call import Call
from mglu_ops.vllm.kernels import compile_in_background, steps

CALLS = [("forward", Call.contiguous(torch.device("cuda:0"), torch.bfloat16, 4, n, 64, 64)) for n in (8192, 8, 1)]


@pytest.mark.parametrize("is_invariant", [False, True])
def test_all_calls_are_compiled_in_order_and_errors_are_left_to_them(is_invariant, monkeypatch):
    built: list[tuple[str, int, bool]] = []

    def build(task: str, call: Call) -> None:
        built.append((task, call.tokens, call.batch_invariant))
        if call.tokens == 8:
            raise RuntimeError("no compiler")

    monkeypatch.setattr(dispatch, "build", build)
    with mglu_ops.set_batch_invariant_mode(is_invariant):
        thread: Any = compile_in_background(CALLS)
        thread.join(60)
    assert built == [("forward", tokens, is_invariant) for tokens in (8192, 8, 1)]
    assert thread.daemon


CAPTURED = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]  # vLLM's default


@pytest.mark.parametrize("captured", [CAPTURED, []], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("experts", [None, 8])
def test_every_step_finds_its_kernels_compiled(captured, experts, monkeypatch):
    most_tokens = 1500
    compiled: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cuda, "gpu_of", lambda _: KNOWN_GPUS[9, 0])
    monkeypatch.setattr(cuda, "is_cached", lambda *source: source in compiled)
    monkeypatch.setattr(cuda, "compile_cubin", lambda *source: compiled.append(source))

    def build(tokens: int) -> None:
        call = Call.contiguous(torch.device("cuda:0"), torch.bfloat16, 1, tokens, 14336, 4096)
        BACKENDS["cuda"].build("forward", call if experts is None else call.over_experts(experts, tokens, 2))

    sizes = steps(captured, most_tokens)
    assert sizes[0] == most_tokens
    assert sizes[1 : len(captured) + 1] == sorted(captured, reverse=True)
    for tokens in sizes:
        build(tokens)
    before = len(compiled)
    assert before > 2
    for tokens in (*captured, *range(max(captured, default=0) + 1, most_tokens + 1)):
        build(tokens)
    assert len(compiled) == before
