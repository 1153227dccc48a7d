"""Measures a table in parts, since a command on a borrowed machine may be limited in time, and joins the parts.

python -m benchmarks.parts --name train --out benchmarks/results part1 part2

joins `part1/train.csv` and `part2/train.csv`. A row replaces that of the same problem and variant in an earlier part.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from benchmarks.records import Row, read, read_environment, write, write_rows


class Estimated(Protocol):
    """A problem that knows about how long it takes."""

    def seconds(self) -> float:
        """An estimate of the time to measure the problem, with its compilations."""
        ...


P = TypeVar("P", bound=Estimated)


class Schedule:
    """Decides which problems are still begun before a limit.

    Estimates are corrected by how long the problems so far took in comparison with theirs.

    Attributes:
        limit: seconds from now on; None for no limit.
    """

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit
        self._start = time.perf_counter()
        self._estimated = self._taken = 0.0

    def expected(self, problem: Estimated) -> float:
        """The corrected estimate for a problem, in seconds."""
        return problem.seconds() * (self._taken / self._estimated if self._estimated else 1.0)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return float("inf") if self.limit is None else self.limit - (time.perf_counter() - self._start)

    def finished(self, problem: Estimated, seconds: float) -> None:
        """Take into account how long a problem took."""
        self._estimated += problem.seconds()
        self._taken += seconds


def measure(
    problems: Sequence[P],
    bench: Callable[[P], list[Row]],
    out: Path,
    name: str,
    protocol: str,
    limit: float | None = None,
) -> list[Row]:
    """Measure problem by problem; print the rows of each, and write all rows so far after each.

    A problem that would probably not end before the limit is left out, and a line says so.

    Args:
        problems: what to measure.
        bench: measures one of them.
        out: the folder for `<name>.csv`, which is replaced.
        name: the name of the result.
        protocol: how it is measured.
        limit: seconds for all problems; None for no limit.
    """
    schedule = Schedule(limit)
    rows: list[Row] = []
    for i, problem in enumerate(problems):
        expected, left = schedule.expected(problem), schedule.left
        if expected > left:
            print(f"{problem}: left out, because it takes about {expected:.0f} s and {left:.0f} s are left", flush=True)
            continue
        print(f"{problem}: {i + 1} of {len(problems)}, about {expected:.0f} s", flush=True)
        start = time.perf_counter()
        found = bench(problem)
        seconds = time.perf_counter() - start
        schedule.finished(problem, seconds)
        print(*found, f"{problem}: {seconds:.0f} s", sep="\n", flush=True)
        rows += found
        write(rows, out, name, protocol)
    return rows


def add_arguments(parser: argparse.ArgumentParser, *, only_compile: bool = True) -> None:
    """Add the arguments of a table that is measured in parts; `only_compile` where it takes kernels from the cache."""
    parser.add_argument("--seconds", type=float, help="begin no problem that would end later")
    parser.add_argument("--done", type=Path, nargs="+", default=[], metavar="DIR", help="parts that are measured")
    if only_compile:
        parser.add_argument(
            "--only-compile",
            action="store_true",
            help="measure nothing, but fill Inductor's cache on the disk; several processes may do so at once",
        )


def key(row: Row) -> tuple[object, ...]:
    """The columns that identify a row of a table."""
    return row.case, row.variant, row.tokens, row.shape, row.n_masks, row.dtype, row.extra.get("compilation")


def joined(parts: Iterable[Sequence[Row]]) -> list[Row]:
    """The rows of all parts, by shape, tokens and masks; a row replaces an earlier one with the same key."""
    rows = {key(row): row for part in parts for row in part}
    return sorted(rows.values(), key=lambda row: (row.shape, row.tokens, row.n_masks))


def joined_environment(parts: Sequence[dict[str, str]]) -> dict[str, str]:
    """The environment of all parts, with every commit.

    Raises:
        ValueError: the parts differ in anything but the commit.
    """
    first = parts[0]
    for part in parts[1:]:
        for fact, value in part.items():
            if fact != "commit" and value != first.get(fact):
                raise ValueError(f"the parts differ in {fact}: {first.get(fact)!r} and {value!r}; measure them alike")
    commits = dict.fromkeys(commit for part in parts for commit in part["commit"].split(", "))
    return {**first, "commit": ", ".join(commits)}


def join(folders: Sequence[Path], out: Path, name: str) -> list[Row]:
    """Join `<name>.csv` of some folders into that of the folder `out`, and return its rows.

    Raises:
        ValueError: the parts were measured on different machines or by different protocols.
        FileNotFoundError: a folder has no such result.
    """
    environment = joined_environment([read_environment(folder, name) for folder in folders])
    rows = joined(read(folder, name) for folder in folders)
    write_rows(rows, environment, out, name)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="a folder with a part")
    parser.add_argument("--name", required=True, help="the name of the result: train, train_model")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    print(*join(arguments.folders, arguments.out, arguments.name), sep="\n")


if __name__ == "__main__":
    main()
