"""Run many random programs through the pass: `python tests/passes/run_random_programs.py blocks --programs 2000`.

    blocks     one or two layers among regions, views, writes and casts (`blocks`), counted by part
    perturbed  a correct layer with one change (`perturbations`), counted by family of changes

`source_programs` says what must hold for each program. The script prints each failure with its program and the options
that repeat it. At the end it prints how many programs were fused, refused with a reason, silent (neither), skipped or
failed. It exits with 1 if there was a failure.

    blocks --seed 7                  print and run one program
    perturbed --seed 7 --index 1234  print and run one program
    perturbed --every 7              run all perturbed programs of seed 7, which are thousands
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # import this working copy, not an installed package

OUTCOMES = ("fused", "refused", "silent", "skipped", "failed")
Key = tuple[int, int | None]
"""`(seed, None)` for a block, and `(seed, index)` for a perturbed program."""


def start_process() -> None:
    """Fill new memory with NaN, as the tests do, and turn off logs and measurements of torch."""
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def judge(key: Key) -> tuple[str, str, tuple[str, ...]]:
    """The outcome of a program, the reason for a failure, and the families under which it is counted."""
    from tests.support.programs.blocks import block_program
    from tests.support.programs.perturbations import perturbation, place, program
    from tests.support.programs.source_programs import SourceProgram, through_the_pass

    seed, index = key
    if index is None:
        block = block_program(seed)
        made: SourceProgram = block
        what, families = f"blocks --seed {seed}", block.parts
    else:
        made = program(seed, index)
        families = (perturbation(index).family,)
        what = f"perturbed --seed {seed} --index {index}: {perturbation(index)}, {place(seed, index)}"
    try:
        return through_the_pass(made), "", families
    except Exception as error:  # any error is a failure of the pass
        lines = "\n".join(str(error).strip().splitlines()[:3])
        return "failed", f"{lines}\n{what}\n{made}", families


def keys(options: argparse.Namespace) -> list[Key]:
    from tests.support.programs.perturbations import indices, sample

    numbers = range(options.start, options.start + options.programs)
    if options.seed is not None:
        return [(options.seed, options.index)]
    if options.kind == "blocks":
        return [(number, None) for number in numbers]
    if options.every is not None:
        return [(options.every, index) for index in indices(options.every)]
    return [sample(number) for number in numbers]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["blocks", "perturbed"])
    parser.add_argument("--programs", type=int, default=1000, help="how many (1000)")
    parser.add_argument("--start", type=int, default=0, help="the number of the first one (0)")
    parser.add_argument("--every", type=int, metavar="SEED", help="all perturbed programs of a seed")
    parser.add_argument("--processes", type=int, default=1, help="how many run side by side (1)")
    parser.add_argument("--seed", type=int, help="of one program")
    parser.add_argument("--index", type=int, help="of one perturbed program")
    options = parser.parse_args()
    if (options.seed is not None and options.kind == "perturbed") != (options.index is not None):
        parser.error("a perturbed program has --seed and --index, and a block has --seed only")
    found: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, spawn, initializer=start_process) as pool:
        for outcome, why, families in pool.map(judge, keys(options), chunksize=10):
            for family in (*families, "all"):
                found.setdefault(family, Counter())[outcome.partition(":")[0]] += 1
            reasons[outcome] += ":" in outcome
            if why:
                print(why, flush=True)
    width = max(map(len, found))
    for name in (*sorted(found.keys() - {"all"}), "all"):
        print(f"{name:{width}} " + ", ".join(f"{found[name][kind]:5} {kind}" for kind in OUTCOMES))
    print("".join(f"{count:5} {reason}\n" for reason, count in reasons.items() if count), end="")
    return int(found["all"]["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
