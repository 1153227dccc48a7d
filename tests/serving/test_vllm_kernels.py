"""Kernels are compiled in the background while vLLM starts. The tests need neither vLLM nor a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.call import Call
from mglu_ops.vllm.kernels import compile_in_background

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
