"""Run many random programs: `python tests/passes/run_random_programs.py --programs 20000 --seed 0 --processes 16`.

Program i is drawn from `random.Random(seed + i)`, for any number of processes. The script prints how many programs were
fused, refused with a reason, silent (neither), or skipped because eager raises an error, and for each failure the
command that repeats it. It exits with 1 if there was a failure. A process that dies, and a program that takes longer
than a minute, are failures too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]  # this working copy, not an installed one

MOST_SECONDS_PER_PROGRAM = 60


def run_seed(seed: int) -> tuple[str, str]:
    """The outcome of the program of a seed, and for a failure its reason."""
    from random_programs import draw_case, run_case

    case = draw_case(random.Random(seed).choice)
    try:
        return run_case(case), ""
    except Exception as error:  # any error is a failure of the pass
        first_lines = "\n    ".join(str(error).strip().splitlines()[:3])
        return "failed", f"{case}\n    {type(error).__name__}: {first_lines}"


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the program took more than {MOST_SECONDS_PER_PROGRAM} seconds")


def _work(seeds: list[int], results: Any, current: Any) -> None:
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory holds NaN, as in the tests
    signal.signal(signal.SIGALRM, _too_slow)
    for seed in seeds:
        current.value = seed
        signal.alarm(MOST_SECONDS_PER_PROGRAM)
        outcome = run_seed(seed)
        signal.alarm(0)
        results.put((seed, *outcome))


def run(first: int, programs: int, processes: int) -> tuple[Counter[str], dict[int, str]]:
    """Run programs in several processes; returns the counts by outcome, and the failures by seed."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = []
    for k in range(min(processes, programs)):
        seeds = list(range(first + k, first + programs, processes))
        current = context.Value("q", seeds[0])
        worker = context.Process(target=_work, args=(seeds, results, current), daemon=True)
        worker.start()
        workers.append((worker, seeds, current))
    counts: Counter[str] = Counter()
    failures: dict[int, str] = {}
    started = time.monotonic()
    while True:
        alive = any(worker.is_alive() for worker, _, _ in workers)
        try:
            seed, outcome, reason = results.get(timeout=1)
        except queue.Empty:
            if not alive:
                break
            continue
        counts[outcome] += 1
        if outcome == "failed":
            failures[seed] = reason
            print(_failure(seed, reason), flush=True)
        if counts.total() % 1000 == 0:
            print(f"{counts.total()} programs in {time.monotonic() - started:.0f} s: {dict(counts)}", flush=True)
    for worker, _, current in workers:
        if worker.exitcode != 0:
            counts["failed"] += 1
            failures[current.value] = f"its process ended with {worker.exitcode}; the programs after it did not run"
            print(_failure(current.value, failures[current.value]), flush=True)
    return counts, failures


def _failure(seed: int, reason: str) -> str:
    return f"seed {seed} (python tests/passes/run_random_programs.py --programs 1 --seed {seed}):\n    {reason}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000, help="how many (1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first program (0)")
    parser.add_argument("--processes", type=int, default=1, help="how many run side by side (1)")
    options = parser.parse_args(arguments)
    import torch

    started = time.monotonic()
    counts, failures = run(options.seed, options.programs, options.processes)
    last = options.seed + options.programs - 1
    print(f"torch {torch.__version__}, seeds {options.seed} to {last}, {time.monotonic() - started:.0f} s")
    print(f"{options.programs} programs: " + ", ".join(f"{counts[name]} {name}" for name in OUTCOMES))
    if failures:
        print("failing seeds:", *sorted(failures))
    return 1 if failures else 0


OUTCOMES = ("fused", "refused", "silent", "skipped", "failed")

if __name__ == "__main__":
    sys.exit(main())
