"""What a call costs besides the GPU's time: the host's part of each call, and the first use of a kernel.

python -m benchmarks.overheads --out benchmarks/results

Host time: calls are timed a hundred at a time, and the GPU, which has a small layer to do, is waited for in between; so
no call waits for it. First use: a new process has imported everything, its tensors lie on the GPU, and the time is that
of the first call, with an empty folder of cached kernels (cold) and with the one that this leaves (warm).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import mglu_ops
from benchmarks.baselines import swiglu
from benchmarks.harness import Row, write

PROTOCOL = (
    "host: median of rounds of 100 calls, us a call; first use: one call in a new process, us, median of processes"
)
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad mode, nothing requires it": nullcontext,
}
FIRST_USES = ((1, 1), (1, 4), (1, 16), (8, 4), (64, 1), (64, 4), (64, 16))
"""(tokens, n_masks) of first uses."""
CALLS = 100


def layer(tokens: int, d: int, h: int, n_masks: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and packed masks in bfloat16."""
    x = torch.randn(tokens, h, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(d, h, device="cuda", dtype=torch.bfloat16)
    return x, weight, torch.randint(256, (d, h // 8, n_masks), dtype=torch.uint8, device="cuda")


def host_times(call: Callable[[], object], rounds: int) -> list[float]:
    """Microseconds of host time a call, of each round."""
    found = []
    for _ in range(rounds + 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - begin) * 1e6 / CALLS)
    torch.cuda.synchronize()
    return found[3:]


def host_rows(rounds: int) -> list[Row]:
    """The operator for 1, 8 and 64 tokens in each mode, with x of two and of three dimensions; and torch's own."""
    d, h, n_masks = 256, 256, 4
    rows = []
    for mode, context in MODES.items():
        with context():
            for tokens in (1, 8, 64):
                x, weight, packed = layer(tokens, d, h, n_masks)
                kernel = mglu_ops.explain(x, weight, packed).kernel
                forward = torch.ops.mglu.forward
                calls: dict[str, Callable[[], object]] = {
                    f"mglu::forward, {kernel}": partial(forward, x, weight, packed),
                    f"mglu::forward, {kernel}, x [1, tokens, h]": partial(forward, x[None], weight, packed),
                    "F.linear": partial(F.linear, x, weight),
                    "SwiGLU": partial(swiglu, x, weight, weight),
                }
                for name, call in calls.items():
                    times = host_times(call, rounds)
                    rows.append(_row("host time a call", f"{name}, {mode}", tokens, d, h, n_masks, times))
    return rows


def _row(case: str, variant: str, tokens: int, d: int, h: int, n_masks: int, times: list[float]) -> Row:
    quartiles = statistics.quantiles(times, n=4)
    median, nan = statistics.median(times), float("nan")
    return Row(case, variant, tokens, d, h, n_masks, "bfloat16", median, quartiles[2] - quartiles[0], nan, nan)


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
    print(json.dumps([mglu_ops.explain(x, weight, packed).kernel, (time.perf_counter() - begin) * 1e6]))
"""


def first_use(tokens: int, n_masks: int, cache: Path) -> tuple[str, float]:
    """The kernel, and the microseconds of its first call in a new process that keeps kernels in `cache`."""
    command = [sys.executable, "-c", _FIRST_USE, str(tokens), "14336", "4096", str(n_masks)]
    environment = {**os.environ, "MGLU_CACHE_DIR": str(cache)}
    process = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    kernel, microseconds = json.loads(process.stdout)
    return kernel, microseconds


def first_use_rows(processes: int, at_once: int) -> list[Row]:
    """Each kernel cold and warm, each time in a new process, `at_once` of them side by side."""

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
        _row("first use", f"{kernel}, {name}", tokens, 14336, 4096, n_masks, times)
        for (tokens, n_masks), (kernel, cold, warm) in zip(FIRST_USES, found, strict=True)
        for name, times in (("cold", cold), ("warm", warm))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--processes", type=int, default=3, help="for each first use, cold and warm")
    parser.add_argument("--at-once", type=int, default=1, help="how many first uses are timed side by side")
    options = parser.parse_args()
    protocol = f"{PROTOCOL} ({options.processes}, {options.at_once} side by side)"
    rows: list[Row] = []
    for measured in (partial(host_rows, options.rounds), partial(first_use_rows, options.processes, options.at_once)):
        rows += (found := measured())
        for row in found:
            print(f"{row.case:18} {row.variant:70} T={row.tokens:<3} n_m={row.n_masks:<3}{row.microseconds:12.2f} us")
        write(rows, options.out, "overheads", protocol)  # as far as it is known, should the rest not come


if __name__ == "__main__":
    main()
