"""CPUs: MGLU's kernels against a loop that only reads, the naive layer and SwiGLU, in one run with the same threads.

python -m benchmarks.cpu --out benchmarks/results [--tokens 1 2 4 8] [--masks 1 2 4 8 16] [--dtypes bfloat16 float32]

Protocol: as in harness.py, but by the clock on the wall. Each variant runs over layers of distinct weights, together
several times the last cache; variants take turns, layer by layer, round after round, until each has had its seconds
(and three rounds). A time is the least of the rounds, per layer, with the median beside it: on a machine that others
use too, the median says more of them than of the code. Results are checked against float64 before anything is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.decode import compiled, masks_of, naive, swiglu, swiglu_stacked
from benchmarks.harness import ERROR_BUDGET, environment, write_table
from mglu_ops.backends import composite, cpu
from mglu_ops.backends.cpu.build import find_compiler
from mglu_ops.backends.cpu.library import Library, load

BYTES_OF_LAYERS = 256_000_000
MAX_LAYERS = 8
MIN_ROUNDS = 3


@dataclass(frozen=True)
class Row:
    """One line of a result table; times in microseconds per layer."""

    variant: str
    tokens: int
    out_features: int
    in_features: int
    n_masks: int
    dtype: str
    least: float
    median: float
    fraction_of_reading: float
    """The read loop's least time for the same bytes, divided by this one's."""
    error: float


def read_loop() -> Callable[[Tensor, Tensor], None]:
    """Reads two tensors with torch's threads; built by the compiler that builds the kernels."""
    library = load()
    assert isinstance(library, Library), library
    source, out = Path(__file__).parent / "read_loop.c", Path(tempfile.mkdtemp()) / "read_loop.so"
    flags = ["-x", "c", "-O2", "-march=native", "-shared", "-fPIC", "-Wno-psabi"]
    subprocess.run([*find_compiler().command, *flags, str(source), "-o", str(out)], check=True)
    read = ctypes.CDLL(str(out)).read_both
    read.restype = None
    read.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    return lambda a, b: read(a.data_ptr(), a.nbytes, b.data_ptr(), b.nbytes, library.parallel_for)


def bench(
    d: int, h: int, n_masks: int, tokens: int, dtype: torch.dtype, seconds: float, baselines: list[str]
) -> list[Row]:
    """All rows of one problem."""
    count = max(2, min(MAX_LAYERS, BYTES_OF_LAYERS // (d * h * dtype.itemsize)))
    x = torch.randn(tokens, h).to(dtype)
    weights = [(torch.randn(d, h) / h**0.5).to(dtype) for _ in range(count)]
    packed = [torch.randint(0, 256, (d, h // 8, n_masks), dtype=torch.uint8) for _ in range(count)]
    read = read_loop()

    variants: dict[str, Callable[[int], Tensor | None]] = {
        "read loop": lambda i: read(weights[i], packed[i]),
        "mglu cpu": lambda i: cpu.forward(x, weights[i], packed[i], "silu", None),
    }
    if "composite" in baselines:
        variants["mglu composite"] = lambda i: composite.forward(x, weights[i], packed[i], "silu", None)
    if "naive" in baselines:
        few = min(count, 2)  # a float mask is as large as W: two layers are beyond the cache
        masks = [torch.stack([masks_of(packed[i], m) for m in range(n_masks)]).to(dtype) for i in range(few)]
        run = compiled(naive, False)
        variants["naive compiled"] = lambda i: run(x, weights[i % few], masks[i % few])
    if "swiglu" in baselines:
        variants["SwiGLU eager"] = lambda i: swiglu(x, weights[i], weights[i - 1])
        whole = torch.compile(swiglu, fullgraph=True)
        variants["SwiGLU compiled"] = lambda i: whole(x, weights[i], weights[i - 1])
        both = [torch.cat((weights[i], weights[i - 1])) for i in range(min(count, 4))]
        stacked = torch.compile(swiglu_stacked, fullgraph=True)
        variants["SwiGLU stacked, compiled"] = lambda i: stacked(x, both[i % len(both)])

    exact = torch.zeros(tokens, d, dtype=torch.float64)
    for m in range(n_masks):
        mask = masks_of(packed[0], m)
        gate = F.linear(x.double(), weights[0].double() * mask)
        exact += F.silu(gate) * F.linear(x.double(), weights[0].double() * ~mask)
    errors: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for name, variant in variants.items():
        output = variant(0)
        errors[name] = float("nan")
        if output is not None and not name.startswith("SwiGLU"):
            errors[name] = float((output.double() - exact).norm() / exact.norm())
            assert errors[name] <= ERROR_BUDGET[dtype], f"{name}: error {errors[name]}"
    i, running = 0, list(variants)
    while running:
        for offset, name in enumerate(running):
            layer = (i + offset * (count // 2 + 1)) % count  # not the one that the variant before has left in the cache
            start = time.perf_counter()
            variants[name](layer)
            times[name].append((time.perf_counter() - start) * 1e6)
        i += 1
        running = [name for name in running if len(times[name]) < MIN_ROUNDS or sum(times[name]) < seconds * 1e6]
    reading = min(times["read loop"])
    return [
        Row(
            name, tokens, d, h, n_masks, str(dtype)[6:], round(min(times[name]), 1),
            round(statistics.median(times[name]), 1), round(reading / min(times[name]), 3), errors[name],
        )
        for name in variants
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--shape", type=int, nargs=2, default=(8192, 2048), help="out_features and in_features")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--masks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16", "float16"], default=["float32", "bfloat16"]
    )
    parser.add_argument("--seconds", type=float, default=4, help="for each variant of a row")
    parser.add_argument("--baselines", nargs="*", choices=["naive", "swiglu", "composite"], default=["naive", "swiglu"])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Row] = []
    for dtype in arguments.dtypes:
        for tokens in arguments.tokens:
            for n_masks in arguments.masks:
                torch._dynamo.reset()
                d, h = arguments.shape
                found = bench(d, h, n_masks, tokens, getattr(torch, dtype), arguments.seconds, arguments.baselines)
                for row in found:
                    print(
                        f"{dtype:8} T={tokens:<4} n_m={n_masks:<2} {row.variant:26} {row.least:10.1f} us"
                        f" (median {row.median:10.1f}) {row.fraction_of_reading:6.3f} error {row.error:.1e}",
                        flush=True,
                    )
                rows += found
    protocol = " ".join((__doc__ or "").split("Protocol: ")[1].split())
    facts = {**environment(protocol), "isa": cpu.isa(), "load": os.getloadavg()}
    write_table([asdict(row) for row in rows], facts, arguments.out, arguments.name)


if __name__ == "__main__":
    main()
