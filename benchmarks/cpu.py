"""CPUs: MGLU's kernels against a loop that only reads, the naive layer and SwiGLU, in one run with the same threads.

python -m benchmarks.cpu --out benchmarks/results [--tokens 1 2 4 8] [--masks 1 2 4 8 16] [--dtypes bfloat16 float32]

Protocol: as in harness.py, but by the clock on the wall. Each variant runs over layers in memory of their own, together
at least three times the last cache; variants take turns, layer by layer, round after round, until each has had its
seconds (and three rounds). A time is the least of the rounds, per layer, with the median beside it: on a machine that
others use too, the median says more of them than of the code. Results (of up to 64 tokens, spread over all) are checked
against float64 before anything is timed.
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

from benchmarks.baselines import compiled, naive, swiglu, swiglu_stacked
from benchmarks.harness import ERROR_BUDGET, environment, write_table
from benchmarks.layers import masks_of
from mglu_ops.backends import BACKENDS, cpu
from mglu_ops.backends.cpu.build import find_compiler
from mglu_ops.backends.cpu.library import Library, load
from mglu_ops.layer_call import LayerCall

MIN_ROUNDS = 3
CHECKED_TOKENS = 64


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
    isa: str
    """Of our kernels, the instruction set that ran."""


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


def layers_for(*tensors: Tensor) -> int:
    """How many layers of such tensors are beyond the caches: an even number."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    last_cache = max(int(size.read_text().removesuffix("K\n")) * 1024 for size in sizes)
    return 2 * -(-3 * last_cache // (2 * sum(tensor.nbytes for tensor in tensors)))


def bench(
    d: int, h: int, n_masks: int, tokens: int, dtype: torch.dtype, seconds: float, baselines: list[str]
) -> list[Row]:
    """All rows of one problem."""
    x = torch.randn(tokens, h).to(dtype)
    weight = (torch.randn(d, h) / h**0.5).to(dtype)
    bits = torch.randint(0, 256, (d, h // 8, n_masks), dtype=torch.uint8)
    count = layers_for(weight, bits)
    weights, packed = ([tensor.clone() for _ in range(count)] for tensor in (weight, bits))
    read = read_loop()
    call = LayerCall.of(x, weight, bits)
    by_kernels = BACKENDS["cpu"].prepare(call)

    variants: dict[str, Callable[[int], Tensor | None]] = {
        "read loop": lambda i: read(weights[i], packed[i]),
        "mglu cpu": lambda i: by_kernels(x, weights[i], packed[i], None),
    }
    if "composite" in baselines:
        by_gemms = BACKENDS["composite"].prepare(call)
        variants["mglu composite"] = lambda i: by_gemms(x, weights[i], packed[i], None)
    if "naive" in baselines:
        floats = torch.stack([masks_of(bits, m) for m in range(n_masks)]).to(dtype)
        masks = [floats.clone() for _ in range(layers_for(weight, floats))]
        run = compiled(naive)
        variants["naive compiled"] = lambda i: run(x, weights[i % len(masks)], masks[i % len(masks)])
    if "swiglu" in baselines:
        pairs = list(zip(weights[::2], weights[1::2], strict=True))
        both = [torch.cat(pair) for pair in pairs]
        whole, stacked = compiled(swiglu), compiled(swiglu_stacked)
        variants["SwiGLU eager"] = lambda i: swiglu(x, *pairs[i % len(pairs)])
        variants["SwiGLU compiled"] = lambda i: whole(x, *pairs[i % len(pairs)])
        variants["SwiGLU stacked, compiled"] = lambda i: stacked(x, both[i % len(both)])

    checked = torch.linspace(0, tokens - 1, min(tokens, CHECKED_TOKENS)).long()
    exact = torch.zeros(len(checked), d, dtype=torch.float64)
    for m in range(n_masks):
        mask = masks_of(bits, m)
        gate = F.linear(x[checked].double(), weight.double() * mask)
        exact += F.silu(gate) * F.linear(x[checked].double(), weight.double() * ~mask)
    errors: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for name, variant in variants.items():
        output = variant(0)
        errors[name] = float("nan")
        if output is not None and not name.startswith("SwiGLU"):
            errors[name] = float((output[checked].double() - exact).norm() / exact.norm())
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
            (cpu.isa(dtype, tokens, n_masks) or "") if name == "mglu cpu" else "",
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
    facts = {**environment(protocol), "load": os.getloadavg()}
    write_table([asdict(row) for row in rows], facts, arguments.out, arguments.name)


if __name__ == "__main__":
    main()
