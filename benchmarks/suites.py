"""The suites that measure the results of a GPU, and the two that make tables and plots from results.

`python -m mglu_ops bench` runs all of them; see `mglu_ops/bench.py` for its options.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import decode_model, masks_at_inference, overheads, train, train_model
from benchmarks.decode import SHAPES, Sweep
from benchmarks.decode import run as run_sweep
from benchmarks.decoder import Sizes
from benchmarks.records import Row, version, written
from mglu_ops.formats import FORMATS

RESULTS = Path(__file__).parent / "results"
ONE_TO_8192 = tuple(2**i for i in range(14))
QUICK_ROUNDS = 3
GPU = ("cuda-core",)

MODELS = {
    (8192, 2048): "Llama-3.2 1B",
    (8192, 3072): "Llama-3.2 3B",
    (14336, 4096): "Llama-3.1 8B, Mistral 7B",
    (28672, 8192): "Llama-3.1 70B",
    (9728, 2560): "Qwen3 4B",
    (25600, 5120): "Qwen3 32B",
}
"""`(intermediate, hidden)` of feed-forward layers, and the models that have them."""


class SuiteError(ValueError):
    """A suite is unknown or cannot run here; the message says what to do."""


class Suite(NamedTuple):
    """A suite of benchmarks.

    Attributes:
        about: what it shows, in a line.
        run: takes `(out, quick)`, writes its result into the folder `out`, and returns the rows that it measured.
        needs: the packages that it needs; `GPU` stands for a CUDA GPU and the package for its kernels.
    """

    about: str
    run: Callable[[Path, bool], Sequence[Row]]
    needs: tuple[str, ...] = GPU


SWEEPS = {
    "one_token": (
        "one token, float16: every backend, the naive layer and SwiGLU in all their forms",
        Sweep(dtype=torch.float16, baselines=("naive", "swiglu", "triton", "composite")),
    ),
    "sustained": (
        "one token, bfloat16, under sustained load: our kernels, and SwiGLU in all its forms",
        Sweep(masks=(1, 4, 8, 16), baselines=("swiglu",), shapes={SHAPES[0]: "decode"}, settle_seconds=0.8),
    ),
    "tokens": (
        "1 to 8192 tokens: our kernels against the floor",
        Sweep(tokens=ONE_TO_8192, masks=(1, 4, 8, 16), baselines=("triton",)),
    ),
    "routes": (
        "1 to 8192 tokens: the dispatch against every other backend, the naive layer and SwiGLU",
        Sweep(
            tokens=ONE_TO_8192,
            masks=(1, 4),
            baselines=("naive", "swiglu", "triton", "composite"),
            shapes={SHAPES[1]: "decode"},
            tuned_at=(1, 8192),
        ),
    ),
    "formats": (
        "1 to 16 tokens, bfloat16, weights in 8 and 4 bits: our kernels, and SwiGLU with such weights",
        Sweep(
            tokens=(1, 8, 16),
            masks=(1, 2, 4, 8),
            baselines=("swiglu",),
            weight_formats=tuple(name for name in FORMATS if name != "dense"),
        ),
    ),
    "models": (
        "one token, bfloat16: the layers of current models",
        Sweep(masks=(1, 4, 8), baselines=("swiglu",), shapes=MODELS),
    ),
}
"""Name of a suite to what it shows and its problems."""


def _sweep(sweep: Sweep, name: str, out: Path, quick: bool) -> Sequence[Row]:
    return run_sweep(sweep.quick(), out, name, QUICK_ROUNDS) if quick else run_sweep(sweep, out, name)


def _decode_model(out: Path, quick: bool, fp8: bool = False) -> Sequence[Row]:
    if quick:
        small = Sizes(layers=2, vocabulary=1024)
        rows = decode_model.bench(small, masks=(0, 1), rounds=QUICK_ROUNDS, compilations=1, fp8=fp8)
        return written(rows, out, "decode_model_fp8" if fp8 else "decode_model", decode_model.PROTOCOL)
    every = product(decode_model.MODELS, decode_model.BATCHES[:2] if fp8 else decode_model.BATCHES)
    return decode_model.run([decode_model.Problem(name, batch, fp8=fp8) for name, batch in every], out)


def _train(out: Path, quick: bool) -> Sequence[Row]:
    if quick:
        return train.run(train.problems(tokens=(64,), masks=(1,))[:1], out, rounds=QUICK_ROUNDS)
    return train.run(train.problems(), out)


def _train_model(out: Path, quick: bool) -> Sequence[Row]:
    if quick:
        sizes = replace(train_model.MODELS["350M"].sizes, layers=2, context=128)
        problem = train_model.Problem("350M", "autocast", 1)
        rows = train_model.bench(problem, train_model.Model(sizes, batch=1), rounds=QUICK_ROUNDS)
        return written(rows, out, "train_model", train_model.PROTOCOL)
    return train_model.run(train_model.problems(), out)


def _masks_at_inference(out: Path, quick: bool) -> Sequence[Row]:
    masks, rounds = ((1,), QUICK_ROUNDS) if quick else ((1, 4, 8), 30)
    return masks_at_inference.run("cuda", masks, rounds, out)


def _overheads(out: Path, quick: bool) -> Sequence[Row]:
    return overheads.bench(out, rounds=QUICK_ROUNDS, processes=1) if quick else overheads.bench(out)


def _tables(out: Path, quick: bool) -> Sequence[Row]:
    """Fill the pages from the committed results; for another folder of results, write all tables into it."""
    from benchmarks import pages  # with pandas, which measuring does not need

    changed = pages.fill_pages(out) if out.resolve() == RESULTS.resolve() else [pages.write_tables(out)]
    print(*changed, sep="\n")
    return []


def _plots(out: Path, quick: bool) -> Sequence[Row]:
    from benchmarks import plots
    from benchmarks.learning import plots as learning

    print(*plots.draw(out, out), sep="\n")
    if (out / "learning").is_dir():
        print(*learning.draw(out, out), sep="\n")
    return []


SUITES = {
    **{name: Suite(about, partial(_sweep, sweep, name)) for name, (about, sweep) in SWEEPS.items()},
    "decode_model": Suite("tokens a second of a whole model, with SwiGLU and with SwiMGLU", _decode_model),
    "decode_model_fp8": Suite(
        "the same with weights in fp8, for one and for 8 sequences", partial(_decode_model, fp8=True)
    ),
    "train": Suite("a training step of a layer, in every form: time, peak memory and errors", _train),
    "train_model": Suite("a training step of whole models, with SwiGLU and with SwiMGLU", _train_model),
    "masks_at_inference": Suite("what packing the masks costs at inference, by when it is done", _masks_at_inference),
    "overheads": Suite("host time per call, and the first call of a kernel in a process", _overheads),
    "tables": Suite("the tables of README.md and benchmarks/README.md, from the CSV files", _tables, ("pandas",)),
    "plots": Suite("plots, from the CSV files", _plots, ("matplotlib", "pandas")),
}


def problem_of(suite: Suite) -> str | None:
    """The reason why a suite cannot run here, or None."""
    if suite.needs == GPU and not torch.cuda.is_available():
        return (
            f"needs a CUDA GPU, and torch {torch.__version__} sees none; "
            "`bench tables plots` works anywhere, from results that are there"
        )
    missing = [name for name in suite.needs if version(name) == "not installed"]
    return f"needs {' and '.join(missing)}: pip install {' '.join(missing)}" if missing else None


def select(names: Sequence[str]) -> dict[str, Suite]:
    """The suites of these names; without names, all suites that can run here.

    Raises:
        SuiteError: a name is unknown, a named suite cannot run here, or there is no GPU to measure.
    """
    if unknown := [name for name in names if name not in SUITES]:
        raise SuiteError(f"no suite is named {', '.join(unknown)}; there are {', '.join(SUITES)}")
    chosen = {}
    for name in names or SUITES:
        suite = SUITES[name]
        if (problem := problem_of(suite)) is None:
            chosen[name] = suite
        elif names or suite.needs == GPU:
            raise SuiteError(f"{name} {problem}")
        else:
            print(f"{name} is left out: it {problem}")
    return chosen


def listing() -> str:
    """The suites, one per line."""
    return "\n".join(f"{name:20} {suite.about}" for name, suite in SUITES.items())


def run(names: Sequence[str], out: Path, quick: bool = False) -> int:
    """Run suites one after the other.

    Args:
        names: names of suites; empty for all.
        out: the folder for results and plots.
        quick: measure only a small problem of each suite, to see that everything works; the times mean little.

    Returns:
        The number of rows whose result was wrong.

    Raises:
        SuiteError: as in `select`, or there are no results to make tables or plots from.
    """
    wrong: list[Row] = []
    for name, suite in select(names).items():
        start = time.perf_counter()
        try:
            wrong += [row for row in suite.run(out, quick) if row.is_wrong]
        except FileNotFoundError as error:
            raise SuiteError(f"{name}: {error}") from error
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    for row in wrong:
        print(f"WRONG: {row}")
    return len(wrong)
