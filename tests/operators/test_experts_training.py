"""A training step of experts on a CPU, where each expert's rows are computed as the rows of a layer."""

from __future__ import annotations

import pytest
import torch
from budgets import BUDGET, relative_error
from expert_training import ExpertLayer, assert_zero_without_an_expert
from families import family

from mglu_ops import dispatch
from mglu_ops.backends import triton

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
mglu = torch.ops.mglu


@pytest.mark.parametrize(
    ("loads", "unowned", "n_masks", "dtype", "activation", "mask_weights_dtype"),
    family(
        [[5, 0, 9, 1], [0, 0, 7], [3, 4], [0, 0]],
        [0, 3],
        [2, 1, 5],
        [F64, F32, BF16],
        ["silu", "gelu"],
        [None, F32],
    ),
)
def test_agrees_with_a_loop_in_float64(loads, unowned, n_masks, dtype, activation, mask_weights_dtype):
    torch.manual_seed(0)
    layer = ExpertLayer.random(
        "cpu", dtype, loads, 12, 20, n_masks, unowned=unowned, activation=activation,
        mask_weights_dtype=mask_weights_dtype,
    )  # fmt: skip
    found = layer.step(mglu.grouped_forward_train, mglu.grouped_backward)
    for name, exact in layer.in_plain_torch(F64).items():
        assert relative_error(found[name], exact) <= 2 * max(BUDGET[dtype], BUDGET[found[name].dtype]), name
        assert_zero_without_an_expert(name, found[name], layer)


@pytest.mark.parametrize("needed", range(4))
def test_computes_only_what_is_needed(needed: int) -> None:
    layer = ExpertLayer.random("cpu", F32, [2, 3], 8, 16, 2, mask_weights_dtype=F32)
    every = layer.step(mglu.grouped_forward_train, mglu.grouped_backward)
    needs = [i == needed for i in range(4)]
    for name, tensor in layer.step(mglu.grouped_forward_train, mglu.grouped_backward, needs).items():
        torch.testing.assert_close(tensor, every[name])


@pytest.mark.parametrize(
    ("dtype", "capability", "reason"),
    [
        (F64, (9, 0), "too narrow for float64"),
        (BF16, (7, 5), "need compute capability 8.0, this GPU has (7, 5)"),
        (torch.float16, None, "triton is not installed"),
    ],
    ids=["dtype", "GPU", "no Triton"],
)
def test_a_gpu_for_which_the_host_would_wait(monkeypatch, dtype, capability, reason):
    monkeypatch.setattr(triton, "is_installed", lambda: capability is not None)
    monkeypatch.setattr(triton, "_runs_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton, "device_reason", triton.device_reason.__wrapped__)
    for task in ("forward", "train") if dtype is F64 else ("train",):  # the CUDA backend asks the GPU about the others
        text = dispatch.waiting_reason(task, torch.device("cuda", 0), dtype)
        assert text is not None
        assert text.startswith("the host waits for the device, to read which rows each expert has: ")
        assert reason in text
