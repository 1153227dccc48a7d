"""Runs the GPU tests, one process a file and several at a time, because the compiler of the kernels runs on the CPU.

    python3 .ci/gpu_test.py [--jobs N] [arguments of pytest]

Tests of correctness share the GPU. Tests of time run alone, after the others. Prints the output of each file when it
ends; exits with 1 if any file fails. Needs pytest alone, and not pytest-xdist.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMED = ("test_overheads.py",)
SEPARATE = ("test_sanitizer.py",)  # make gpu-sanitize
NO_TESTS_COLLECTED = 5  # pytest's exit code for a file in which, for example, `-k` selects nothing


@dataclass(frozen=True)
class Outcome:
    file: str
    code: int
    seconds: float
    output: str

    @property
    def is_empty(self) -> bool:
        return self.code == NO_TESTS_COLLECTED

    @property
    def summary(self) -> str:
        return self.output.strip().splitlines()[-1].strip("= ") if self.output.strip() else "no output"


def run_file(file: str, arguments: Sequence[str]) -> Outcome:
    begin = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *arguments, f"tests/gpu/{file}"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    return Outcome(file, done.returncode, time.perf_counter() - begin, done.stdout)


def run_files(files: Sequence[str], arguments: Sequence[str], jobs: int) -> list[Outcome]:
    """Start the files in the order given, at most `jobs` at a time, and print each when it ends."""
    outcomes = []
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run_file, file, arguments) for file in files]):
            outcome = future.result()
            print(f"\n######## {outcome.file}, {outcome.seconds:.0f} s\n{outcome.output}", flush=True)
            outcomes.append(outcome)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = max(1, min(8, (os.cpu_count() or 1) // 2))
    parser.add_argument("--jobs", type=int, default=default, help=f"processes at a time (default here: {default})")
    options, arguments = parser.parse_known_args()
    found = sorted((ROOT / "tests/gpu").glob("test_*.py"), key=lambda path: -path.stat().st_size)
    files = [path.name for path in found if path.name not in (*TIMED, *SEPARATE)]
    outcomes = run_files(files, arguments, options.jobs) + run_files(TIMED, arguments, 1)
    failures = [outcome for outcome in outcomes if outcome.code != 0 and not (arguments and outcome.is_empty)]
    for outcome in outcomes:
        result = "FAILED" if outcome in failures else "empty " if outcome.is_empty else "passed"
        print(f"{result}  {outcome.file}: {outcome.summary}")
    return 1 if failures or all(outcome.is_empty for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
