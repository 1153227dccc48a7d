"""Run many random programs: `python tests/passes/run_random_programs.py --programs 20000 --seed 0 --processes 16`.

Program i is drawn from `random.Random(seed + i)`, for any number of processes. The script prints how many programs were
fused, refused with a reason, silent (neither), or skipped because eager raises an error, and for each failure the
command that repeats it. It exits with 1 if there was a failure. A process that dies, and a program that takes longer
than a minute, are failures too.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import queue
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]  # this working copy, not an installed one

MOST_SECONDS_PER_PROGRAM = 60

Judge: TypeAlias = Callable[[int], tuple[str, str]]
"""Returns the outcome of the program with a number, and the reason if it failed."""


def run_seed(seed: int) -> tuple[str, str]:
    """The outcome of the program with this seed, and the reason if it failed."""
    from random_programs import draw_case, run_case

    case = draw_case(random.Random(seed).choice)
    try:
        return run_case(case), ""
    except Exception as error:  # any error is a failure of the pass
        first_lines = "\n    ".join(str(error).strip().splitlines()[:3])
        return "failed", f"{case}\n    {type(error).__name__}: {first_lines}"


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the program took more than {MOST_SECONDS_PER_PROGRAM} seconds")


def _work(judge: Judge, numbers: Sequence[int], deadline: float, results: Any, current: Any) -> None:
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory holds NaN, as in the tests
    signal.signal(signal.SIGALRM, _too_slow)
    for number in numbers:
        if time.monotonic() > deadline:
            break
        current.value = number
        signal.alarm(MOST_SECONDS_PER_PROGRAM)
        outcome = judge(number)
        signal.alarm(0)
        results.put((number, *outcome))


def run(
    judge: Judge, numbers: Sequence[int], processes: int, command: str, seconds: float = math.inf
) -> tuple[dict[int, str], dict[int, str]]:
    """Judge programs by their numbers in several processes, which begin no program after `seconds`.

    Returns the outcomes, and the reasons of the failures. `command` repeats a program, with its number as `{number}`.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    started = time.monotonic()
    workers = []
    for k in range(min(processes, len(numbers))):
        current = context.Value("q", numbers[k])
        arguments = (judge, numbers[k::processes], started + seconds, results, current)
        worker = context.Process(target=_work, args=arguments, daemon=True)
        worker.start()
        workers.append((worker, current))
    outcomes: dict[int, str] = {}
    failures: dict[int, str] = {}

    def failed(number: int, reason: str) -> None:
        outcomes[number], failures[number] = "failed", reason
        print(f"{number} ({command.format(number=number)}):\n    {reason}", flush=True)

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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000, help="how many (1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first program (0)")
    parser.add_argument("--processes", type=int, default=1, help="how many run side by side (1)")
    options = parser.parse_args(arguments)
    import torch

    started = time.monotonic()
    seeds = range(options.seed, options.seed + options.programs)
    command = "python tests/passes/run_random_programs.py --programs 1 --seed {number}"
    outcomes, failures = run(run_seed, seeds, options.processes, command)
    counts, last = Counter(outcomes.values()), seeds[-1]
    print(f"torch {torch.__version__}, seeds {options.seed} to {last}, {time.monotonic() - started:.0f} s")
    print(f"{options.programs} programs: " + ", ".join(f"{counts[name]} {name}" for name in OUTCOMES))
    if failures:
        print("failing seeds:", *sorted(failures))
    return 1 if failures else 0


OUTCOMES = ("fused", "refused", "silent", "skipped", "failed")

if __name__ == "__main__":
    sys.exit(main())
