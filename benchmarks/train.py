"""Times a training step of one layer in every form: forward and backward passes with straight-through masks.

python -m benchmarks.train --out DIR [--shapes 8192x2048] [--tokens 2048 8192] [--n-masks 1 4] [--resume]

Without `--shapes`, `--tokens` and `--n-masks`, all problems are measured. `--resume` measures only problems that
`DIR/train.csv` lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from benchmarks.records import Row, measure, parser_of
from benchmarks.timing import LOAD_SECONDS, SETTLED_ROUNDS, clock_of, first_call, release, under_load
from benchmarks.train_layers import (
    CASE,
    CHECKED_TOKENS,
    GEMMS,
    SWIGLU,
    Oracle,
    Step,
    Training,
    gemms_step,
    prepared,
    rows_of,
    steps,
    swiglu_step,
)

SHAPES = ((8192, 2048), (14336, 4096))
TOKENS = (2048, 8192, 32768)
MASKS = (1, 2, 4, 8, 16)
PROTOCOL = (
    "calls between two events, variants in turns whose order changes; a turn repeats its call for 60 ms and is then "
    "timed for 60 ms or one call; median over 5 to 9 rounds, us per forward and backward; gradients dropped before "
    "each step; peak_mb: the most memory over x, parameters and grad_output, in MB; errors: against float64, over "
    f"{CHECKED_TOKENS} tokens of the timed call (the upstream gradient of the others is 0)"
)


@dataclass(frozen=True)
class Problem:
    """A layer and a number of tokens."""

    shape: tuple[int, int]
    tokens: int
    n_masks: int

    def is_in(self, rows: Sequence[Row]) -> bool:
        return self in {Problem(row.shape, row.tokens, row.n_masks) for row in rows}


def problems(
    shapes: Sequence[tuple[int, int]] = SHAPES, tokens: Sequence[int] = TOKENS, masks: Sequence[int] = MASKS
) -> list[Problem]:
    """All combinations of shapes, numbers of tokens and numbers of masks."""
    return [Problem(shape, count, n_masks) for shape, count, n_masks in product(shapes, tokens, masks)]


def candidates(training: Training) -> dict[str, Step]:
    """The step of each variant, by name."""
    found = steps(training)
    if training.naive.n_masks == 1:  # SwiGLU has no masks, so one measurement per shape and number of tokens is enough
        found[SWIGLU] = swiglu_step(training)
    return found


def bench(
    problem: Problem, device: str = "cuda", rounds: int = SETTLED_ROUNDS, load: float = LOAD_SECONDS
) -> list[Row]:
    """Measure one problem in at most `rounds` rounds, and return a row for each variant.

    On a CPU, memory is not measured. `load` is the argument `seconds` of `timing.under_load`.
    """
    release(device)
    torch._dynamo.reset()
    training = Training(problem.shape, problem.tokens, problem.n_masks, device)
    ready, columns = prepared(candidates(training), Oracle(training), device)
    ready[GEMMS], columns[GEMMS] = gemms_step(training), {}
    first_call(GEMMS, ready[GEMMS])
    release(device)
    times = under_load(ready, clock_of(device), rounds, load)
    return rows_of(CASE, (problem.tokens, problem.shape, problem.n_masks), times, columns)


def run(
    problems: Sequence[Problem],
    out: Path,
    device: str = "cuda",
    rounds: int = SETTLED_ROUNDS,
    load: float = LOAD_SECONDS,
    resume: bool = False,
) -> list[Row]:
    """Measure problems, and write `train.csv` into a folder."""
    torch.manual_seed(0)
    return measure(problems, lambda one: bench(one, device, rounds, load), out, "train", PROTOCOL, resume)


def shape_of(text: str) -> tuple[int, int]:
    """`(out_features, in_features)` from `8192x2048`."""
    d, h = text.split("x")
    return int(d), int(h)


def main() -> None:
    parser = parser_of(__doc__, resume=True)
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=SHAPES, metavar="DxH")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--n-masks", type=int, nargs="+", default=MASKS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    chosen = problems(arguments.shapes, arguments.tokens, arguments.n_masks)
    run(chosen, arguments.out, arguments.device, resume=arguments.resume)


if __name__ == "__main__":
    main()
