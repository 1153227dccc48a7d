"""Times MGLU on a CPU, a loop that only reads, the naive layer and SwiGLU, in one run with the same threads.

python -m benchmarks.cpu --out benchmarks/results [--tokens 1 2 4 8] [--n-masks 1 2 4 8 16] [--formats int8_row fp8_row]
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import NAIVE_ON_CPU, swiglu_variants
from benchmarks.layers import Layers, all_masks, mglu
from benchmarks.records import environment, parser_of, write_table
from benchmarks.timing import Variant, relative_error, summarise, wall_microseconds
from mglu_ops.accuracy import ERROR_BUDGET
from mglu_ops.backends import BACKENDS, cpu
from mglu_ops.backends.cpu.build import find_compiler
from mglu_ops.backends.cpu.library import Library, load
from mglu_ops.call import Call
from mglu_ops.formats import FORMATS
from mglu_ops.given import Given

MIN_ROUNDS = 3
CHECKED_TOKENS = 64
CACHES_OF_LAYERS = 3
"""The layers together are at least this many times as large as the last-level cache."""
PROTOCOL = (
    "wall clock; each variant runs over layers of its own that together take at least three times the last-level "
    "cache; variants run in turn, layer by layer, until each has had its seconds and three rounds; the least time and "
    "the median of the rounds, us per layer (on a shared machine the median also shows what other users do); "
    "results of up to 64 tokens, spread over all, are compared with float64 before the timing"
)


def read_loop() -> Callable[[Tensor, Tensor], None]:
    """Compile a function that reads two tensors on torch's threads. It uses the compiler that builds our kernels."""
    library = load()
    assert isinstance(library, Library), library
    source, out = Path(__file__).parent / "read_loop.c", Path(tempfile.mkdtemp()) / "read_loop.so"
    flags = ["-x", "c", "-O2", "-march=native", "-shared", "-fPIC", "-Wno-psabi"]
    subprocess.run([*find_compiler(), *flags, str(source), "-o", str(out)], check=True)
    read = ctypes.CDLL(str(out)).read_both
    read.restype = None
    read.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    return lambda a, b: read(a.data_ptr(), a.nbytes, b.data_ptr(), b.nbytes, library.parallel_for)


def layers_for(bytes_of_layer: int) -> int:
    """The number of layers that together are at least `CACHES_OF_LAYERS` times as large as the last-level cache.

    It is even, because a SwiGLU layer takes the weights of two MGLU layers.
    """
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    last_cache = max(int(size.read_text().removesuffix("K\n")) * 1024 for size in sizes)
    return 2 * -(-CACHES_OF_LAYERS * last_cache // (2 * bytes_of_layer))


def variants_of(layers: Layers, formats: Sequence[str], baselines: Sequence[str]) -> list[Variant]:
    """The read loop, our kernel for the dense weight and for each of `formats`, and the baselines."""
    x, weights, packed = layers.x, layers.weights, layers.packed
    read = read_loop()
    variants = [Variant("read loop", lambda i: read(weights[i], packed[i]), layers.count)]

    def run(calls: Sequence[Callable[[], Tensor]], i: int) -> Tensor:
        return calls[i]()

    for name in ("dense", *formats):
        stored = [FORMATS[name].quantize(weight) for weight in weights]
        given = [
            Given(x, weight, bits, weight_scale=scale, weight_format=name)
            for (weight, scale), bits in zip(stored, packed, strict=True)
        ]
        prepared = BACKENDS["cpu"].prepare("forward", Call.of(given[0]))
        calls = [partial(prepared, one) for one in given]
        variants.append(Variant(f"mglu cpu {name}".removesuffix(" dense"), partial(run, calls), layers.count))
    if "naive" in baselines:
        # Unpacked masks are larger than packed ones, so fewer layers are enough to exceed the caches.
        count = layers_for((1 + layers.n_masks) * weights[0].nbytes)
        masks = [all_masks(bits, x.dtype) for bits in packed[:count]]
        naive = NAIVE_ON_CPU.build()
        variants.append(Variant(NAIVE_ON_CPU.name, lambda i: naive(x, weights[i], masks[i]), len(masks)))
    if "swiglu" in baselines:
        variants += swiglu_variants(layers, tuned=False)
    return variants


def error_of(variant: Variant, layers: Layers) -> float:
    """Run a variant once. Return the relative error of up to `CHECKED_TOKENS` tokens; NaN for a variant without MGLU.

    Raises:
        AssertionError: the result is wrong.
    """
    output = variant.run(0)
    if output is None or variant.name.startswith("SwiGLU"):
        return float("nan")
    tokens = len(layers.x)
    checked = torch.linspace(0, tokens - 1, min(tokens, CHECKED_TOKENS)).long()
    chosen = FORMATS.get(variant.name.split()[-1], FORMATS["dense"])
    weight = chosen.dequantize(*chosen.quantize(layers.weights[0]), torch.float64)
    error = relative_error(output[checked], mglu(layers.x[checked], weight, layers.packed[0]))
    assert error <= ERROR_BUDGET[layers.x.dtype], f"{variant.name}: error {error}"
    return error


def times_of(variants: list[Variant], count: int, seconds: float) -> dict[str, list[float]]:
    """Microseconds of every call. Variants take turns until each has had `seconds` and `MIN_ROUNDS` rounds."""
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    i, running = 0, variants
    while running:
        for offset, variant in enumerate(running):
            # The previous variant's layer is still in the cache, so take another one.
            layer = (i + offset * (count // 2 + 1)) % count % variant.layers
            times[variant.name].append(wall_microseconds(partial(variant.run, layer)))
        i += 1
        running = [one for one in running if len(of := times[one.name]) < MIN_ROUNDS or sum(of) < seconds * 1e6]
    return times


def bench(layers: Layers, seconds: float, formats: Sequence[str], baselines: Sequence[str]) -> list[dict[str, Any]]:
    """Measure one problem and return its rows. Every variant runs for `seconds`.

    A row has the columns `variant` to `dtype` of `records.Row`, followed by:
        least, median: times per layer in microseconds.
        fraction_of_reading: the read loop's least time for the dense weight and the masks, divided by `least`.
        error: relative error against float64, or NaN for SwiGLU and the read loop.
        isa: instruction set of our kernel for the dense weight, empty for all other variants.
    """
    variants, x, (d, h) = variants_of(layers, formats, baselines), layers.x, layers.weights[0].shape
    errors = {variant.name: error_of(variant, layers) for variant in variants}
    times = times_of(variants, layers.count, seconds)
    return [
        {
            "variant": name,
            "tokens": len(x),
            "out_features": d,
            "in_features": h,
            "n_masks": layers.n_masks,
            "dtype": str(x.dtype).removeprefix("torch."),
            "least": round(min(found), 1),
            "median": round(summarise(found).median, 1),
            "fraction_of_reading": round(min(times["read loop"]) / min(found), 3),
            "error": errors[name],
            "isa": (cpu.isa(x.dtype, len(x), layers.n_masks) or "") if name == "mglu cpu" else "",
        }
        for name, found in times.items()
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--shape", type=int, nargs=2, default=(8192, 2048), help="out_features and in_features")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--n-masks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=4, help="for each variant of a problem")
    parser.add_argument("--formats", nargs="*", choices=[*FORMATS][1:], default=[], help="of the weight, beside dense")
    parser.add_argument("--baselines", nargs="*", choices=["naive", "swiglu"], default=["naive", "swiglu"])
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    d, h = options.shape
    for dtype, tokens, n_masks in product((torch.float32, torch.bfloat16), options.tokens, options.n_masks):
        torch._dynamo.reset()
        bits = min([8 * dtype.itemsize, *(8 // FORMATS[one].packed for one in options.formats)])
        layers = Layers(d, h, n_masks, tokens, dtype, "cpu", layers_for(d * h * (bits + n_masks) // 8))
        found = bench(layers, options.seconds, options.formats, options.baselines)
        print(*(" ".join(f"{key} {value}" for key, value in row.items()) for row in found), sep="\n", flush=True)
        rows += found
    facts = {**environment(PROTOCOL), "load": " ".join(f"{load:.2f}" for load in os.getloadavg())}
    write_table(rows, facts, options.out, options.name)


if __name__ == "__main__":
    main()
