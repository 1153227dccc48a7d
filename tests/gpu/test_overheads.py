"""Host time and first use of the operator on a GPU.

Limits in seconds are generous: a slow machine stays below them, and only a regression exceeds them.
`benchmarks/overheads.py` measures the times.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import mglu_ops  # noqa: F401 (registers the operators)
from tests.support.calls import without_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

TOKENS = (1, 8, 64)
COLD_SECONDS, WARM_SECONDS = 8.0, 0.15


def operands_of(tokens: int) -> tuple[torch.Tensor, ...]:
    x, weight = (torch.randn(rows, 256, device="cuda").bfloat16() for rows in (tokens, 256))
    return x, weight, torch.ops.mglu.pack_masks(torch.rand(4, 256, 256, device="cuda") < 0.5)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_call_costs_the_host_less_than_swiglu(mode: type[torch.no_grad], tokens: int) -> None:
    """SwiGLU in plain PyTorch takes four calls, and two to four times as long."""
    x, weight, masks = operands_of(tokens)

    def swiglu() -> torch.Tensor:
        return F.silu(F.linear(x, weight)) * F.linear(x, weight)

    calls = {"mglu": lambda: torch.ops.mglu.forward(x, weight, masks), "swiglu": swiglu}
    times: dict[str, list[float]] = {name: [] for name in calls}
    # In the deterministic mode that tests/conftest.py sets, torch fills all new tensors, which takes another kernel.
    torch.use_deterministic_algorithms(False)
    with mode():
        for _ in range(50):
            for name, call in calls.items():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(100):
                    call()
                times[name].append(time.perf_counter() - begin)
    assert min(times["mglu"]) <= min(times["swiglu"])  # the minimum, because other processes share the CPU


@pytest.mark.parametrize(("tokens", "copy"), [(1, 0), (8, 0), (64, 64 * 256 * 2)])
def test_a_call_allocates_its_output_and_at_most_a_copy_of_x_and_waits_for_nothing(tokens: int, copy: int) -> None:
    operands = operands_of(tokens)
    with torch.no_grad():
        torch.ops.mglu.forward(*operands)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with without_waiting():
            result = torch.ops.mglu.forward(*operands)
    held = torch.cuda.memory_allocated() - before
    assert held == -(-result.numel() * 2 // 512) * 512
    assert torch.cuda.max_memory_allocated() - before <= held + 2 * copy


FIRST_CALL = """
import time
import torch
import mglu_ops
x = torch.randn({tokens}, 512, device="cuda").bfloat16()
weight = torch.randn(256, 512, device="cuda").bfloat16()
packed = torch.randint(256, (256, 64, 4), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
with torch.no_grad():
    begin = time.perf_counter()
    torch.ops.mglu.forward(x, weight, packed)
    torch.cuda.synchronize()
    print(time.perf_counter() - begin)
"""


@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_the_first_use_of_a_kernel_is_short(tokens: int, tmp_path: Path) -> None:
    """The first process compiles the kernel with NVRTC. The next one reads the cache and does not load NVRTC."""

    def first() -> float:
        command = [sys.executable, "-c", FIRST_CALL.format(tokens=tokens)]
        environment = {**os.environ, "MGLU_CACHE_DIR": str(tmp_path)}
        return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)

    assert first() <= COLD_SECONDS
    assert min(first() for _ in range(2)) <= WARM_SECONDS
