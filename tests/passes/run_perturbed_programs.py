"""Run many perturbed programs: `python tests/passes/run_perturbed_programs.py --programs 2000 --processes 2`.

`perturbed_programs` says what a perturbed program is and what must hold for it. The script prints each failure with its
program and the options that repeat it, and at the end how many programs of each family were fused, refused with a
reason, silent (neither), skipped or failed. It exits with 1 if there was a failure.

    --every 7              run all perturbed programs of seed 7 instead of samples (thousands)
    --seed 7 --index 1234  print and run one program
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
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]  # this working copy, not an installed one

OUTCOMES = ("fused", "refused", "silent", "skipped", "failed")


def start_process() -> None:
    """Poison new memory, as the tests do, and turn off what torch logs and measures."""
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def judge(key: tuple[int, int]) -> tuple[str, str]:
    """The outcome of the program of a seed and an index, and why it failed."""
    from perturbed_programs import perturbation, place, program
    from source_programs import through_the_pass

    changed = program(*key)
    try:
        return through_the_pass(changed), ""
    except Exception as error:  # any error is a failure of the pass
        lines = "\n".join(str(error).strip().splitlines()[:3])
        what = f"--seed {key[0]} --index {key[1]}: {perturbation(key[1])}, {place(*key)}"
        return "failed", f"{lines}\n{what}\n{changed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000, help="how many samples (1000)")
    parser.add_argument("--start", type=int, default=0, help="the number of the first sample (0)")
    parser.add_argument("--every", type=int, metavar="SEED", help="all programs of a seed instead of samples")
    parser.add_argument("--processes", type=int, default=1, help="how many run side by side (1)")
    parser.add_argument("--seed", type=int, help="of one program, with --index")
    parser.add_argument("--index", type=int, help="of one program, with --seed")
    options = parser.parse_args()
    from perturbed_programs import indices, perturbation, program, sample

    if options.seed is not None:
        keys = [(options.seed, options.index)]
        print(program(*keys[0]))
    elif options.every is not None:
        keys = [(options.every, index) for index in indices(options.every)]
    else:
        keys = [sample(number) for number in range(options.start, options.start + options.programs)]
    families: dict[str, Counter[str]] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, spawn, initializer=start_process) as pool:
        for key, (outcome, why) in zip(keys, pool.map(judge, keys, chunksize=10), strict=True):
            families.setdefault(perturbation(key[1]).family, Counter())[outcome.partition(":")[0]] += 1
            if why:
                print(why, flush=True)
    families["all"] = sum(families.values(), Counter())
    for name, counts in families.items():
        print(f"{name:32}" + ", ".join(f"{counts[kind]:5} {kind}" for kind in OUTCOMES))
    return int(families["all"]["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
