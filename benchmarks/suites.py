"""The suites that measure the results of a GPU, and the two that make tables and plots from results.

`python -m mglu_ops bench` runs all of them; see `mglu_ops/bench.py` for its options. The following command measures one
suite and, with `--resume`, only those problems that the result in DIR lacks:

python -m benchmarks.suites experts_layer --out DIR [--resume]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import activations, decode_model, masks_at_inference, overheads, serve, train, train_model
from benchmarks.decode import SWEEPS
from benchmarks.records import QUICK_ROUNDS, Result, Row, parser_of, version

RESULTS = Path(__file__).parent / "results"
GPU, PANDAS = ("cuda-core",), ("pandas",)
VLLM = (*GPU, "vllm", "transformers")


class SuiteError(ValueError):
    """A suite is unknown or cannot run here; the message says what to do."""


class Suite(NamedTuple):
    """A suite of benchmarks.

    Attributes:
        about: what the suite shows, in a line.
        run: takes the folder of the results, writes the suite's results into it, and returns the rows that it measured.
            A suite that needs a GPU also takes `resume`, as in `records.measure`.
        quick: like `run`, but only for a small problem. It checks that the suite works; its times mean little.
        needs: the packages that the suite needs; `GPU` stands for a CUDA GPU and the package for its kernels.
    """

    about: str
    run: Callable[..., Sequence[Row]]
    quick: Callable[[Path], Sequence[Row]]
    needs: tuple[str, ...] = GPU

    @property
    def on_gpu(self) -> bool:
        """True if the suite measures a GPU."""
        return self.needs[: len(GPU)] == GPU


def _measuring(about: str, result: Result) -> Suite:
    return Suite(about, result.run, result.check)


def _sweep(name: str, about: str) -> dict[str, Suite]:
    return {name: _measuring(about, SWEEPS[name].result(name))}


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
    **_sweep("one_token", "one token, float16: every backend, the naive layer and SwiGLU in all their forms"),
    **_sweep("sustained", "one token, bfloat16, under sustained load: our kernels, and SwiGLU in all its forms"),
    **_sweep("tokens", "1 to 8192 tokens: our kernels against the floor"),
    **_sweep("routes", "1 to 8192 tokens: the dispatch against every other backend, the naive layer and SwiGLU"),
    **_sweep(
        "formats",
        "1 to 16 tokens, bfloat16, weights in 8 and 4 bits: our kernels, SwiGLU of torch, and of vLLM if installed",
    ),
    **_sweep("models", "one token, bfloat16: the layers of current models"),
    "activations": _measuring(
        "1 to 8192 tokens, x and weights in fp8: our kernels, and the library's products", activations.RESULT
    ),
    **_sweep(
        "experts", "1 to 1024 tokens through experts, first half, bfloat16: our operator, and SwiGLU in its forms"
    ),
    **_sweep("experts_fp8", "the same with weights in fp8"),
    **_sweep("experts_int4", "the same with weights in 4 bits; SwiGLU only in vLLM's kernels"),
    **_sweep("experts_layer", "the same in bfloat16 with the second half: time and launches"),
    **_sweep("experts_layer_fp8", "the same with the weights of both halves in fp8"),
    "decode_model": _measuring(
        "tokens a second of a whole model, with SwiGLU and with SwiMGLU", decode_model.IN_BFLOAT16
    ),
    "decode_model_fp8": _measuring("the same with weights in fp8, for one and for 8 sequences", decode_model.IN_FP8),
    "train": _measuring("a training step of a layer, in every form: time, peak memory and errors", train.LAYERS),
    "train_experts": _measuring(
        "a training step of experts on sorted rows, in every form: time, peak memory and errors", train.EXPERTS
    ),
    "train_model": _measuring("a training step of whole models, with SwiGLU and with SwiMGLU", train_model.RESULT),
    "masks_at_inference": _measuring(
        "what packing the masks costs at inference, by when it is done", masks_at_inference.RESULT
    ),
    "overheads": Suite(
        "host time per call, and the first call of a kernel in a process",
        overheads.run,
        partial(overheads.run, rounds=QUICK_ROUNDS, processes=1, at_once=1),
    ),
    "serve": Suite("models served by vLLM: steps, prompts and a mixed load", serve.run, serve.check, VLLM),
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
        if suite.on_gpu and not torch.cuda.is_available():
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


def main() -> None:
    parser = parser_of(__doc__, resume=True)
    parser.add_argument("suite", choices=[name for name, suite in SUITES.items() if suite.on_gpu])
    options = parser.parse_args()
    (suite,) = select([options.suite]).values()
    rows = suite.run(options.out, resume=options.resume)
    raise SystemExit(any(row.is_wrong for row in rows))


if __name__ == "__main__":
    main()
