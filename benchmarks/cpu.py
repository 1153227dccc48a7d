"""Times MGLU on a CPU beside a loop that only reads, the naive layer and SwiGLU, in one run with the same threads.

python -m benchmarks.cpu --out benchmarks/results [--tokens 1 2 4 8] [--n-masks 1 2 4 8 16] [--dtypes bfloat16 float32]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.baselines import NAIVE_ON_CPU, SWIGLU, in_modes, swiglu_stacked
from benchmarks.harness import relative_error
from benchmarks.layers import masks_of
from benchmarks.records import environment, write_table
from benchmarks.timing import summarise, wall_microseconds
from mglu_ops.accuracy import ERROR_BUDGET
from mglu_ops.backends import BACKENDS, PreparedCall, cpu
from mglu_ops.backends.cpu.build import find_compiler
from mglu_ops.backends.cpu.library import Library, load
from mglu_ops.layer_call import LayerArguments, LayerCall

MIN_ROUNDS = 3
CHECKED_TOKENS = 64
CACHES_OF_LAYERS = 3
"""The layers together take at least this many times the size of the last-level cache."""
PROTOCOL = (
    "wall clock; each variant runs over layers of its own that together take at least three times the last-level "
    "cache; variants run in turn, layer by layer, until each has had its seconds and three rounds; the least time and "
    "the median of the rounds, us per layer (on a shared machine the median also shows what other users do); "
    "results of up to 64 tokens, spread over all, are compared with float64 before the timing"
)

Variants = dict[str, Callable[[int], Tensor | None]]


@dataclass(frozen=True)
class CpuRow:
    """One line of a result table of a CPU.

    Attributes:
        variant: the implementation that ran.
        tokens: rows of x.
        out_features: rows of the weight.
        in_features: columns of the weight.
        n_masks: number of masks.
        dtype: of x and the weight.
        least: least time per layer, in microseconds.
        median: median time per layer, in microseconds.
        fraction_of_reading: least time of the read loop on the same bytes, divided by `least`.
        error: norm of the error relative to the norm of the float64 result; NaN for SwiGLU and the read loop.
        isa: the instruction set that our kernel used; empty for the other variants.
    """

    variant: str
    tokens: int
    out_features: int
    in_features: int
    n_masks: int
    dtype: str
    least: float
    median: float
    fraction_of_reading: float
    error: float
    isa: str


def read_loop() -> Callable[[Tensor, Tensor], None]:
    """Build the loop that reads two tensors, with the compiler of the kernels; it uses torch's threads."""
    library = load()
    assert isinstance(library, Library), library
    source, out = Path(__file__).parent / "read_loop.c", Path(tempfile.mkdtemp()) / "read_loop.so"
    flags = ["-x", "c", "-O2", "-march=native", "-shared", "-fPIC", "-Wno-psabi"]
    subprocess.run([*find_compiler(), *flags, str(source), "-o", str(out)], check=True)
    read = ctypes.CDLL(str(out)).read_both
    read.restype = None
    read.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    return lambda a, b: read(a.data_ptr(), a.nbytes, b.data_ptr(), b.nbytes, library.parallel_for)


def layers_for(*tensors: Tensor) -> int:
    """The number of layers with these tensors that exceeds the caches; even, since SwiGLU takes pairs of weights."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    last_cache = max(int(size.read_text().removesuffix("K\n")) * 1024 for size in sizes)
    return 2 * -(-CACHES_OF_LAYERS * last_cache // (2 * sum(tensor.nbytes for tensor in tensors)))


class CpuLayers:
    """Copies of one layer, each in its own memory, and its float64 result for some tokens.

    Attributes:
        x: `[tokens, h]`.
        weights: a weight `[d, h]` for each layer.
        packed: packed masks `uint8 [d, h / 8, n_masks]` for each layer.
    """

    def __init__(self, d: int, h: int, n_masks: int, tokens: int, dtype: torch.dtype) -> None:
        self.n_masks = n_masks
        self.x = torch.randn(tokens, h).to(dtype)
        weight = (torch.randn(d, h) / h**0.5).to(dtype)
        bits = torch.randint(0, 256, (d, h // 8, n_masks), dtype=torch.uint8)
        self.count = layers_for(weight, bits)
        self.weights, self.packed = ([tensor.clone() for _ in range(self.count)] for tensor in (weight, bits))

    def masks(self) -> list[Tensor]:
        """Masks `[n_masks, d, h]` in the dtype of the weight, for as few layers as exceed the caches."""
        weight, packed = self.weights[0], self.packed[0]
        masks = torch.stack([masks_of(packed, m) for m in range(self.n_masks)]).to(weight.dtype)
        return [masks.clone() for _ in range(layers_for(weight, masks))]

    def error(self, output: Tensor) -> float:
        """Relative error of a layer's result against float64, for up to `CHECKED_TOKENS` tokens."""
        tokens = len(self.x)
        checked = torch.linspace(0, tokens - 1, min(tokens, CHECKED_TOKENS)).long()
        x, weight = self.x[checked].double(), self.weights[0].double()
        exact = torch.zeros(len(checked), weight.shape[0], dtype=torch.float64)
        for m in range(self.n_masks):
            mask = masks_of(self.packed[0], m)
            exact += F.silu(F.linear(x, weight * mask)) * F.linear(x, weight * ~mask)
        return relative_error(output[checked], exact)


def variants_of(layers: CpuLayers, baselines: list[str]) -> Variants:
    """Each variant by name: a function that runs the layer with a given index."""
    x, weights, packed = layers.x, layers.weights, layers.packed
    read = read_loop()
    variants: Variants = {"read loop": lambda i: read(weights[i], packed[i])}

    def ours(call: PreparedCall, i: int) -> Tensor:
        return call(LayerArguments(x, weights[i], packed[i]))

    for name in ("cpu", *(name for name in baselines if name == "composite")):
        prepared = BACKENDS[name].prepare(LayerCall.of(LayerArguments(x, weights[0], packed[0])))
        variants[f"mglu {name}"] = partial(ours, prepared)

    def rotating(form: Callable[..., Tensor], arguments: list[tuple[Tensor, ...]], i: int) -> Tensor:
        return form(x, *arguments[i % len(arguments)])

    if "naive" in baselines:
        masked: list[tuple[Tensor, ...]] = list(zip(weights, layers.masks(), strict=False))
        for baseline in NAIVE_ON_CPU:
            variants[baseline.name] = partial(rotating, baseline.build(), masked)
    if "swiglu" in baselines:
        pairs: list[tuple[Tensor, ...]] = list(zip(weights[::2], weights[1::2], strict=True))
        stacks: list[tuple[Tensor, ...]] = [(torch.cat(pair),) for pair in pairs]
        for baseline in in_modes(SWIGLU, ("eager", "compiled")):
            arguments = stacks if baseline.function is swiglu_stacked else pairs
            variants[baseline.name] = partial(rotating, baseline.build(), arguments)
    return variants


def errors_of(variants: Variants, layers: CpuLayers) -> dict[str, float]:
    """Run every variant once, and check the results of MGLU.

    Raises:
        AssertionError: a result is wrong.
    """
    errors = {}
    for name, variant in variants.items():
        output = variant(0)
        errors[name] = float("nan")
        if output is not None and not name.startswith("SwiGLU"):
            errors[name] = layers.error(output)
            assert errors[name] <= ERROR_BUDGET[layers.x.dtype], f"{name}: error {errors[name]}"
    return errors


def times_of(variants: Variants, count: int, seconds: float) -> dict[str, list[float]]:
    """Microseconds of every call; variants run in turn, each for `seconds` and for at least `MIN_ROUNDS` rounds."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    i, running = 0, list(variants)
    while running:
        for offset, name in enumerate(running):
            # Each variant takes another layer than the one before it, whose layer is in the cache.
            layer = (i + offset * (count // 2 + 1)) % count
            times[name].append(wall_microseconds(partial(variants[name], layer)))
        i += 1
        running = [name for name in running if len(times[name]) < MIN_ROUNDS or sum(times[name]) < seconds * 1e6]
    return times


def bench(
    d: int, h: int, n_masks: int, tokens: int, dtype: torch.dtype, seconds: float, baselines: list[str]
) -> list[CpuRow]:
    """Measure one problem and return its rows; every variant runs for `seconds`."""
    layers = CpuLayers(d, h, n_masks, tokens, dtype)
    variants = variants_of(layers, baselines)
    errors = errors_of(variants, layers)
    times = times_of(variants, layers.count, seconds)
    reading = min(times["read loop"])
    return [
        CpuRow(
            variant=name,
            tokens=tokens,
            out_features=d,
            in_features=h,
            n_masks=n_masks,
            dtype=str(dtype).removeprefix("torch."),
            least=round(min(found), 1),
            median=round(summarise(found).median, 1),
            fraction_of_reading=round(reading / min(found), 3),
            error=errors[name],
            isa=(cpu.isa(dtype, tokens, n_masks) or "") if name == "mglu cpu" else "",
        )
        for name, found in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--shape", type=int, nargs=2, default=(8192, 2048), help="out_features and in_features")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--n-masks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16", "float16"], default=["float32", "bfloat16"]
    )
    parser.add_argument("--seconds", type=float, default=4, help="for each variant of a problem")
    parser.add_argument("--baselines", nargs="*", choices=["naive", "swiglu", "composite"], default=["naive", "swiglu"])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows: list[CpuRow] = []
    for dtype in arguments.dtypes:
        for tokens in arguments.tokens:
            for n_masks in arguments.n_masks:
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
    facts = {**environment(PROTOCOL), "load": " ".join(f"{load:.2f}" for load in os.getloadavg())}
    write_table([asdict(row) for row in rows], facts, arguments.out, arguments.name)


if __name__ == "__main__":
    main()
