"""The suites that measure the results of a GPU, and the two that make tables and plots from results.

`python -m mglu_ops bench` runs all of them; see `mglu_ops/bench.py` for its options.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import (
    activations,
    decode,
    decode_model,
    experts,
    masks_at_inference,
    overheads,
    train,
    train_experts,
    train_model,
)
from benchmarks.decode import BASELINES, SHAPES, Sweep
from benchmarks.records import Row, version
from mglu_ops.formats import FORMATS

RESULTS = Path(__file__).parent / "results"
ONE_TO_8192 = tuple(2**i for i in range(14))
QUICK_ROUNDS = 3
GPU, PANDAS = ("cuda-core",), ("pandas",)

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
        about: what the suite shows, in a line.
        run: takes the folder of the results, writes the suite's results into it, and returns the rows that it measured.
        quick: like `run`, but only for a small problem. It checks that the suite works; its times mean little.
        needs: the packages that the suite needs; `GPU` stands for a CUDA GPU and the package for its kernels.
    """

    about: str
    run: Callable[[Path], Sequence[Row]]
    quick: Callable[[Path], Sequence[Row]]
    needs: tuple[str, ...] = GPU


def _sweep(name: str, about: str, sweep: Sweep) -> dict[str, Suite]:
    """The suite that measures a sweep into `<name>.csv`."""
    quick = partial(decode.run, sweep.quick(), name=name, rounds=QUICK_ROUNDS)
    return {name: Suite(about, partial(decode.run, sweep, name=name), quick)}


def _experts(name: str, about: str) -> dict[str, Suite]:
    """The suite that measures a table of experts into `<name>.csv`."""
    quick = partial(experts.run, experts.quick(name), name=name, rounds=QUICK_ROUNDS)
    return {name: Suite(about, partial(experts.run, experts.PROBLEMS[name], name=name), quick)}


def _tables(out: Path) -> Sequence[Row]:
    """Fill the pages from the committed results. For another folder of results, write all tables into that folder."""
    from benchmarks import pages  # imports pandas, which measuring does not need

    changed = pages.fill_pages(out) if out.resolve() == RESULTS.resolve() else [pages.write_tables(out)]
    print(*changed, sep="\n")
    return []


def _plots(out: Path) -> Sequence[Row]:
    from benchmarks import plots
    from benchmarks.learning import plots as learning

    paths = learning.draw(out, out) if (out / "learning").is_dir() else []
    with suppress(FileNotFoundError) if paths else nullcontext():
        paths += plots.draw(out, out)
    print(*paths, sep="\n")
    return []


SUITES = {
    **_sweep(
        "one_token",
        "one token, float16: every backend, the naive layer and SwiGLU in all their forms",
        Sweep(dtype=torch.float16, baselines=BASELINES),
    ),
    **_sweep(
        "sustained",
        "one token, bfloat16, under sustained load: our kernels, and SwiGLU in all its forms",
        Sweep(masks=(1, 4, 8, 16), baselines=("swiglu",), shapes={SHAPES[0]: "decode"}, settle_seconds=0.8),
    ),
    **_sweep(
        "tokens",
        "1 to 8192 tokens: our kernels against the floor",
        Sweep(tokens=ONE_TO_8192, masks=(1, 4, 8, 16), baselines=("triton",)),
    ),
    **_sweep(
        "routes",
        "1 to 8192 tokens: the dispatch against every other backend, the naive layer and SwiGLU",
        Sweep(ONE_TO_8192, (1, 4), baselines=BASELINES, shapes={SHAPES[1]: "decode"}, tuned_at=(1, 8192)),
    ),
    **_sweep(
        "formats",
        "1 to 16 tokens, bfloat16, weights in 8 and 4 bits: our kernels, and SwiGLU with such weights",
        Sweep((1, 8, 16), (1, 2, 4, 8), baselines=("swiglu",), weight_formats=tuple(FORMATS)[1:]),
    ),
    **_sweep(
        "models",
        "one token, bfloat16: the layers of current models",
        Sweep(masks=(1, 4, 8), baselines=("swiglu",), shapes=MODELS),
    ),
    "activations": Suite(
        "1 to 8192 tokens, x and weights in fp8: our kernels, and the library's products",
        activations.run,
        partial(activations.run, rounds=QUICK_ROUNDS, only=slice(1)),
    ),
    **_experts(
        "experts", "1 to 1024 tokens through experts, first half, bfloat16: our operator, and SwiGLU in its forms"
    ),
    **_experts("experts_fp8", "the same with weights in fp8"),
    **_experts("experts_layer", "the same in bfloat16 with the second half: time and launches"),
    "decode_model": Suite(
        "tokens a second of a whole model, with SwiGLU and with SwiMGLU",
        partial(decode_model.run, decode_model.IN_BFLOAT16),
        partial(decode_model.run, [decode_model.SMALL], rounds=QUICK_ROUNDS),
    ),
    "decode_model_fp8": Suite(
        "the same with weights in fp8, for one and for 8 sequences",
        partial(decode_model.run, decode_model.IN_FP8),
        partial(decode_model.run, [replace(decode_model.SMALL, fp8=True)], rounds=QUICK_ROUNDS),
    ),
    "train": Suite(
        "a training step of a layer, in every form: time, peak memory and errors",
        partial(train.run, train.problems()),
        partial(train.run, [train.Problem(train.SHAPES[0], 64, n_masks=1)], rounds=QUICK_ROUNDS),
    ),
    "train_experts": Suite(
        "a training step of experts on sorted rows, in every form: time, peak memory and errors",
        partial(train_experts.run, train_experts.problems()),
        partial(train_experts.run, [train_experts.Problem("gpt-oss", "zipf", 1, tokens=64)], rounds=QUICK_ROUNDS),
    ),
    "train_model": Suite(
        "a training step of whole models, with SwiGLU and with SwiMGLU",
        partial(train_model.run, train_model.PROBLEMS),
        partial(train_model.run, [train_model.SMALL], rounds=QUICK_ROUNDS),
    ),
    "masks_at_inference": Suite(
        "what packing the masks costs at inference, by when it is done",
        masks_at_inference.run,
        partial(masks_at_inference.run, masks=(1,), rounds=QUICK_ROUNDS),
    ),
    "overheads": Suite(
        "host time per call, and the first call of a kernel in a process",
        overheads.run,
        partial(overheads.run, rounds=QUICK_ROUNDS, processes=1, at_once=1),
    ),
    "tables": Suite("the tables of all pages, from the CSV files", _tables, _tables, PANDAS),
    "plots": Suite("plots, from the CSV files", _plots, _plots, ("matplotlib", *PANDAS)),
}


def select(names: Sequence[str]) -> dict[str, Suite]:
    """The suites of these names; without names, all suites that can run here.

    Raises:
        SuiteError: a name is unknown, a named suite cannot run here, or a GPU is missing.
    """
    if unknown := [name for name in names if name not in SUITES]:
        raise SuiteError(f"no suite is named {', '.join(unknown)}; there are {', '.join(SUITES)}")
    chosen = {name: SUITES[name] for name in names or SUITES}
    for name, suite in list(chosen.items()):
        if suite.needs == GPU and not torch.cuda.is_available():
            raise SuiteError(
                f"{name} needs a CUDA GPU, and torch {torch.__version__} sees none; "
                "`bench tables plots` works anywhere, from results that are there"
            )
        if missing := [needed for needed in suite.needs if version(needed) == "not installed"]:
            problem = f"needs {' and '.join(missing)}: pip install {' '.join(missing)}"
            if names or suite.needs == GPU:
                raise SuiteError(f"{name} {problem}")
            print(f"{name} is left out: it {problem}")
            del chosen[name]
    return chosen


def listing() -> str:
    """The suites, one per line."""
    return "\n".join(f"{name:20} {suite.about}" for name, suite in SUITES.items())


def run(names: Sequence[str], out: Path, quick: bool = False) -> int:
    """Run the named suites, or all that can run here. `out` is the folder for results and plots.

    Returns:
        The number of rows whose result was wrong.

    Raises:
        SuiteError: for the reasons that `select` gives, or if results for tables or plots are missing.
    """
    wrong: list[Row] = []
    for name, suite in select(names).items():
        start = time.perf_counter()
        try:
            wrong += [row for row in (suite.quick if quick else suite.run)(out) if row.is_wrong]
        except FileNotFoundError as error:
            raise SuiteError(f"{name}: {error}") from error
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    print(*(f"WRONG: {row}\n" for row in wrong), sep="", end="")
    return len(wrong)
