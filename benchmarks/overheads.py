"""Times what a call costs besides the GPU's work: host time of every call, and the first use of a kernel.

Host time: a round times 100 calls of a small layer, and waits for the GPU only afterwards.

First use: a new process imports everything and puts its tensors on the GPU. Its first call is timed with an empty
kernel cache (cold), and again in another process with the cache that the first process left (warm).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import mglu_ops
from benchmarks.layers import swiglu
from benchmarks.records import Row, measure
from benchmarks.timing import wall_microseconds

PROTOCOL = (
    "host: median of rounds of 100 calls, us a call; first use: one call in a new process, us, median of processes"
)
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad mode, nothing requires it": nullcontext,
}
FIRST_USES = ((1, 1), (1, 4), (1, 16), (8, 4), (64, 1), (64, 4), (64, 16))
"""`(tokens, n_masks)` of the first uses to measure."""
CALLS_PER_ROUND = 100
WARMUP_ROUNDS = 3


def layer(tokens: int, d: int, h: int, n_masks: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and packed masks in bfloat16."""
    x = torch.randn(tokens, h, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(d, h, device="cuda", dtype=torch.bfloat16)
    return x, weight, torch.randint(256, (d, h // 8, n_masks), dtype=torch.uint8, device="cuda")


def host_times(call: Callable[[], object], rounds: int) -> list[float]:
    """The host time per call in microseconds, for each round after `WARMUP_ROUNDS`."""
    times = []
    for _ in range(WARMUP_ROUNDS + rounds):
        torch.cuda.synchronize()
        times.append(wall_microseconds(call, CALLS_PER_ROUND))
    torch.cuda.synchronize()
    return times[WARMUP_ROUNDS:]


def host_rows(rounds: int) -> list[Row]:
    """Measure our operator, F.linear and SwiGLU for 1, 8 and 64 tokens in each mode."""
    d, h, n_masks = 256, 256, 4
    rows = []
    for mode, context in MODES.items():
        with context():
            for tokens in (1, 8, 64):
                x, weight, packed = layer(tokens, d, h, n_masks)
                kernel = mglu_ops.explain_dispatch(x, weight, packed).kernel
                forward = torch.ops.mglu.forward
                calls: dict[str, Callable[[], object]] = {
                    f"mglu::forward, {kernel}": partial(forward, x, weight, packed),
                    f"mglu::forward, {kernel}, x [1, tokens, h]": partial(forward, x[None], weight, packed),
                    "F.linear": partial(F.linear, x, weight),
                    "SwiGLU": partial(swiglu, x, weight, weight),
                }
                for name, call in calls.items():
                    times = host_times(call, rounds)
                    rows.append(Row.of_times("host time a call", f"{name}, {mode}", tokens, (d, h), n_masks, times))
    return rows


_FIRST_USE = """
import json, sys, time
import torch
import mglu_ops
from benchmarks.overheads import layer
x, weight, packed = layer(*map(int, sys.argv[1:]))
torch.cuda.synchronize()
with torch.no_grad():
    begin = time.perf_counter()
    torch.ops.mglu.forward(x, weight, packed)
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - begin
print(json.dumps([mglu_ops.explain_dispatch(x, weight, packed).kernel, elapsed * 1e6]))
"""


def first_use(tokens: int, n_masks: int, cache: Path) -> tuple[str, float]:
    """The kernel's name, and the time of its first call in microseconds, in a new process with this kernel cache."""
    command = [sys.executable, "-c", _FIRST_USE, str(tokens), "14336", "4096", str(n_masks)]
    environment = {**os.environ, "MGLU_CACHE_DIR": str(cache)}
    process = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    kernel, microseconds = json.loads(process.stdout)
    return kernel, microseconds


def first_use_rows(processes: int, at_once: int) -> list[Row]:
    """Time the first call of each kernel, cold and warm, in new processes. Up to `at_once` of them run side by side."""

    def times_of(use: tuple[int, int]) -> tuple[str, list[float], list[float]]:
        cold, warm = [], []
        for _ in range(processes):
            with tempfile.TemporaryDirectory() as cache:
                kernel, microseconds = first_use(*use, Path(cache))
                cold.append(microseconds)
                warm.append(first_use(*use, Path(cache))[1])
        return kernel, cold, warm

    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(times_of, FIRST_USES))
    return [
        Row.of_times("first use", f"{kernel}, {name}", tokens, (14336, 4096), n_masks, times)
        for (tokens, n_masks), (kernel, cold, warm) in zip(FIRST_USES, found, strict=True)
        for name, times in (("cold", cold), ("warm", warm))
    ]


def run(out: Path, resume: bool = False, *, rounds: int = 200, processes: int = 2, at_once: int = 4) -> list[Row]:
    """Measure `overheads.csv`. `processes` is the number of cold and of warm processes for each first use."""
    protocol = f"{PROTOCOL} ({processes}, {at_once} side by side)"
    parts = {"host time": partial(host_rows, rounds), "first use": partial(first_use_rows, processes, at_once)}
    return measure(list(parts), lambda name: parts[name](), out, "overheads", protocol, resume)
