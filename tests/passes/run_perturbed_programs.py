"""Run many perturbed programs: `python tests/passes/run_perturbed_programs.py --programs 2000 --processes 2`.

`perturbed_programs` says what a perturbed program is and what must hold for it. Sample i is the same program for any
number of processes. The script prints each failure with the source of its program and the command that repeats it, and
at the end how many programs of each family were fused, refused with a reason, silent (neither), skipped or failed. It
exits with 1 if there was a failure. A process that dies, and a program that takes longer than a minute, are failures
too.

    --seconds 600          begin no program after ten minutes
    --inductor             also compile each program that is fused with Inductor (seconds for each)
    --every 7              run all perturbed programs of seed 7 instead of samples (thousands)
    --seed 7 --index 1234  print and run one program; with --shorten, also the shortest one that fails in the same way
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import queue
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from right_programs import Program

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]  # this working copy, not an installed one

OUTCOMES = ("fused", "refused", "silent", "skipped", "failed")
COMMAND = "python tests/passes/run_perturbed_programs.py"
MOST_SECONDS_PER_PROGRAM = 60

Key: TypeAlias = tuple[int, int]
"""The seed and the index of a program."""

# --- One program -----------------------------------------------------------------------------------------------------


def judge(seed: int, index: int, inductor: bool) -> tuple[str, str]:
    """The outcome of one program, and the reason if it failed."""
    from perturbed_programs import perturbation, place, program

    _quiet()
    changed = program(seed, index)
    try:
        return outcome_of(changed, inductor), ""
    except Exception as error:  # any error is a failure of the pass
        first_lines = "\n    ".join(str(error).strip().splitlines()[:3])
        what = f"{perturbation(index)}, {place(seed, index)}, seed {seed}, index {index}"
        return "failed", f"{first_lines}{_without_it(seed)}\n    {what}\n{changed}"


def outcome_of(changed: Program, inductor: bool) -> str:
    """The outcome of a program through the pass, and if it is fused there, perhaps through Inductor."""
    from perturbed_programs import through_inductor, through_the_pass

    outcome = through_the_pass(changed)
    if not inductor or outcome != "fused" or (outcome := through_inductor(changed)) == "fused":
        return outcome
    return f"not by Inductor: {outcome}"


@functools.lru_cache(maxsize=1)
def _without_it(seed: int) -> str:
    """A remark for the reason if the right program of the seed fails even without a perturbation."""
    from perturbed_programs import right_program, through_the_pass

    try:
        through_the_pass(right_program(seed)[0])
    except Exception as error:
        return f"\n    (without the perturbation: {str(error).strip().splitlines()[0]})"
    return ""


@functools.cache
def _quiet() -> None:
    """Turn off a measurement that takes a third of the compile time, and the logs and warnings of torch."""
    import logging
    import warnings

    import torch

    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def run_one(seed: int, index: int, *, inductor: bool, shorten: bool) -> int:
    from perturbed_programs import program
    from source_programs import shortened

    outcome, reason = judge(seed, index, inductor)
    print(reason or program(seed, index), outcome, sep="\n")
    if shorten and outcome == "failed":
        print(shortened(program(seed, index), functools.partial(outcome_of, inductor=inductor)))
    return int(outcome == "failed")


# --- Many programs ----------------------------------------------------------------------------------------------------


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the program took more than {MOST_SECONDS_PER_PROGRAM} seconds")


def _work(programs: dict[int, Key], inductor: bool, deadline: float, results: Any, current: Any) -> None:
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory holds NaN, as in the tests
    signal.signal(signal.SIGALRM, _too_slow)
    for number, key in programs.items():
        if time.monotonic() > deadline:
            break
        current.value = number
        signal.alarm(MOST_SECONDS_PER_PROGRAM)
        outcome = judge(*key, inductor)
        signal.alarm(0)
        results.put((number, *outcome))


def run(
    keys: Sequence[Key], *, inductor: bool = False, processes: int = 1, seconds: float = math.inf
) -> tuple[dict[int, str], dict[int, str]]:
    """Judge programs in several processes, which begin no program after `seconds`.

    Returns the outcomes by number, and the reasons of the failures, which are printed with the commands that repeat
    them. (Two samples may be one program.)
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    started = time.monotonic()
    workers = []
    for k in range(min(processes, len(keys))):
        own, current = dict(list(enumerate(keys))[k::processes]), context.Value("q", k)
        worker = context.Process(target=_work, args=(own, inductor, started + seconds, results, current), daemon=True)
        worker.start()
        workers.append((worker, current))
    outcomes: dict[int, str] = {}
    failures: dict[int, str] = {}

    def failed(number: int, reason: str) -> None:
        outcomes[number], failures[number] = "failed", reason
        print(f"{COMMAND} {options_of(keys[number])}{' --inductor' * inductor}:\n    {reason}", flush=True)

    while True:
        alive = any(worker.is_alive() for worker, _ in workers)
        try:
            number, outcome, reason = results.get(timeout=1)
        except queue.Empty:
            if not alive:
                break
            continue
        outcomes[number] = outcome
        if outcome == "failed":
            failed(number, reason)
        if len(outcomes) % 1000 == 0:
            counts = dict(Counter(outcomes.values()))
            print(f"{len(outcomes)} programs in {time.monotonic() - started:.0f} s: {counts}", flush=True)
    for worker, current in workers:
        if worker.exitcode != 0:
            failed(current.value, f"its process ended with {worker.exitcode}; the programs after it did not run")
    return outcomes, failures


def options_of(key: Key) -> str:
    return f"--seed {key[0]} --index {key[1]}"


def table(keys: Sequence[Key], outcomes: dict[int, str]) -> str:
    """A line for each family of perturbations, which counts its programs by outcome."""
    from perturbed_programs import perturbation

    rows: dict[str, Counter[str]] = {}
    for number, outcome in outcomes.items():
        rows.setdefault(perturbation(keys[number][1]).family, Counter())[outcome.split(":")[0]] += 1
    kinds = sorted({kind for row in rows.values() for kind in row} | set(OUTCOMES))
    lines = [f"{'family':32}" + "".join(f"{kind:>17}" for kind in kinds)]
    lines += [f"{name:32}" + "".join(f"{row[kind]:17}" for kind in kinds) for name, row in sorted(rows.items())]
    return "\n".join(lines)


def print_failures(keys: Sequence[Key], failures: dict[int, str]) -> None:
    """Print for each kind of difference how many programs failed with it, and one such program."""
    kinds: dict[str, list[Key]] = {}
    for number, reason in failures.items():
        kind = re.sub(r"[\d.]+(e-?\d+)?$", "...", reason.splitlines()[0])
        kinds.setdefault(kind, []).append(keys[number])
    for kind, failed in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"{len(failed)} failed: {kind} (such as {options_of(failed[0])})")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000, help="how many samples (1000)")
    parser.add_argument("--start", type=int, default=0, help="the number of the first sample (0)")
    parser.add_argument("--every", type=int, metavar="SEED", help="all programs of a seed instead of samples")
    parser.add_argument("--processes", type=int, default=1, help="how many run side by side (1)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no program after this time")
    parser.add_argument("--inductor", action="store_true", help="compile fused programs with Inductor too")
    parser.add_argument("--seed", type=int, help="of one program, with --index")
    parser.add_argument("--index", type=int, help="of one program, with --seed")
    parser.add_argument("--shorten", action="store_true", help="the one program, if it fails")
    options = parser.parse_args(arguments)
    if (options.seed is None) != (options.index is None):
        parser.error("--seed and --index belong together")
    if options.seed is not None:
        return run_one(options.seed, options.index, inductor=options.inductor, shorten=options.shorten)
    from perturbed_programs import indices, sample

    started = time.monotonic()
    keys = [sample(number) for number in range(options.start, options.start + options.programs)]
    if options.every is not None:
        keys = [(options.every, index) for index in indices(options.every)]
    outcomes, failures = run(keys, inductor=options.inductor, processes=options.processes, seconds=options.seconds)
    print(table(keys, outcomes))
    print_failures(keys, failures)
    for reason, count in Counter(outcome for outcome in outcomes.values() if ":" in outcome).most_common():
        print(f"{count} {reason}")
    counts = Counter(outcome.split(":")[0] for outcome in outcomes.values())
    kinds = dict.fromkeys((*OUTCOMES, *counts))
    print(f"{len(outcomes)} programs: " + ", ".join(f"{counts[kind]} {kind}" for kind in kinds))
    print(f"{time.monotonic() - started:.0f} s in {options.processes} processes")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
