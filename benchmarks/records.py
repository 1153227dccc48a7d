"""Result tables: their rows, and the CSV files that hold them.

A result is one file, `<name>.csv`. Its first lines have the form `# name: value` and state the commit, the device, the
versions and the protocol. The table follows, with its column names first.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import io
import json
import math
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import release, summarise
from mglu_ops.tuning.command import commit

COMMENT = "# "
QUICK_ROUNDS = 3


@dataclass(frozen=True)
class Row:
    """One line of a result table.

    Attributes:
        case: the kind of work, in tables with several kinds; otherwise the name of the problem.
        variant: the implementation that ran.
        tokens: rows of x.
        out_features: rows of the weight.
        in_features: columns of the weight.
        n_masks: number of masks; 0 for a layer without masks.
        dtype: dtype of x and the weight.
        microseconds: median time per layer, or per call; NaN if the result was wrong, or nothing was measured.
        spread: distance between the quartiles of the times, in microseconds.
        fraction_of_ceiling: time of the read ceiling divided by this row's time; NaN if there is no read ceiling.
        error: norm of the error relative to the norm of the float64 result; NaN if there is nothing to compare.
        extra: further columns by name, as JSON can hold them; `left_out` says why nothing was measured, such as "out of
            memory".
    """

    case: str
    variant: str
    tokens: int
    out_features: int
    in_features: int
    n_masks: int
    dtype: str
    microseconds: float
    spread: float
    fraction_of_ceiling: float = math.nan
    error: float = math.nan
    extra: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of_times(
        cls,
        case: str,
        variant: str,
        tokens: int,
        shape: tuple[int, int],
        n_masks: int,
        times: Sequence[float],
        *,
        dtype: torch.dtype = torch.bfloat16,
        error: float = math.nan,
        budget: float = math.inf,
        extra: dict[str, object] | None = None,
    ) -> Row:
        """Build a row from times in microseconds. Its time is NaN if `times` is empty or `error` exceeds `budget`."""
        median, spread = summarise(times) if times else (math.nan, math.nan)
        problem = case, variant, tokens, *shape, n_masks, str(dtype).removeprefix("torch.")
        return cls(*problem, math.nan if error > budget else median, spread, error=error, extra=extra or {})

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def key(self) -> tuple[object, ...]:
        """The values that identify a row within a result."""
        return self.case, self.variant, self.tokens, self.shape, self.n_masks, self.dtype, self.extra.get("compilation")

    @property
    def has_time(self) -> bool:
        """True if the row was measured and its result was right."""
        return not math.isnan(self.microseconds)

    @property
    def is_wrong(self) -> bool:
        """True if the row has no time because its result disagreed with the oracle."""
        return not self.has_time and "left_out" not in self.extra

    def __str__(self) -> str:
        problem = f"{self.out_features}x{self.in_features} n_m={self.n_masks} T={self.tokens}"
        result = f"{self.microseconds:.2f} us" if self.has_time else "WRONG" if self.is_wrong else "left out"
        extra = "".join(f", {name} {value}" for name, value in self.extra.items())
        return (
            f"{problem} {f'{self.case}: {self.variant}':60} {result:>13} +-{self.spread:<7.2f} "
            f"{self.fraction_of_ceiling:.3f} of the ceiling, error {self.error:.1e}{extra}"
        )


def _cpu_name() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{found[1] if found else platform.processor()}, {torch.get_num_threads()} threads"


def version(distribution: str) -> str:
    """The version of a distribution, or "not installed"."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def environment(protocol: str) -> dict[str, str]:
    """The facts at the head of every result: the commit, the device, versions and the protocol."""
    return {
        "commit": commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "protocol": protocol,
    }


def write(rows: Iterable[Row], out: Path, name: str, facts: str | Mapping[str, str]) -> None:
    """Write rows, at least one, to `<name>.csv` in a folder. Floats have six digits.

    `facts` is the environment in which the rows were measured. If this process measured them, `facts` may be the
    protocol alone.
    """
    table = [
        {column: float(f"{value:.6g}") if isinstance(value, float) else value for column, value in asdict(row).items()}
        for row in rows
    ]
    write_table(table, environment(facts) if isinstance(facts, str) else facts, out, name)


def write_table(table: Sequence[Mapping[str, Any]], environment: Mapping[str, str], out: Path, name: str) -> None:
    """Write a table of any columns to `<name>.csv` in a folder; a dict in a cell becomes JSON."""
    text = io.StringIO()
    text.writelines(f"{COMMENT}{fact}: {' '.join(value.split())}\n" for fact, value in environment.items())
    writer = csv.DictWriter(text, fieldnames=list(table[0]), lineterminator="\n")
    writer.writeheader()
    for row in table:
        writer.writerow({key: json.dumps(cell) if isinstance(cell, dict) else cell for key, cell in row.items()})
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / f"{name}.csv", lambda path: path.write_text(text.getvalue()))


def write_whole(path: Path, write_to: Callable[[Path], object]) -> None:
    """Call `write_to` with a temporary path and rename the result to `path`, so that `path` is never half written."""
    temporary = path.with_name(f"{path.name}.tmp")
    write_to(temporary)
    temporary.replace(path)


def read_table(path: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The environment and the rows of a CSV file that `write_table` wrote, all values as text.

    Raises:
        FileNotFoundError: the file is missing.
    """
    environment: dict[str, str] = {}
    lines = path.read_text().splitlines(keepends=True)
    for line in lines:
        if not line.startswith(COMMENT):
            break
        fact, _, value = line.removeprefix(COMMENT).rstrip("\n").partition(": ")
        environment[fact] = value
    return environment, list(csv.DictReader(lines[len(environment) :]))


def read(out: Path, name: str) -> list[Row]:
    """The rows of a `<name>.csv` that `write` wrote; an empty list if there is no such file."""
    path = out / f"{name}.csv"
    lines = read_table(path)[1] if path.is_file() else []
    kinds: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float}
    value_of = {one.name: kinds.get(str(one.type), json.loads) for one in fields(Row)}
    return [Row(**{name: value_of[name](cell) for name, cell in line.items()}) for line in lines]


def parser_of(about: str, resume: bool = False) -> argparse.ArgumentParser:
    """A parser with the option `--out`, which all benchmarks have, and `--resume` for benchmarks that can resume."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    if resume:
        text = "keep the rows of the result in --out, and measure only the problems that it lacks"
        parser.add_argument("--resume", action="store_true", help=text)
    return parser


def facts_to_resume(out: Path, name: str, facts: Mapping[str, str]) -> dict[str, str]:
    """The facts of a result `<name>.csv` to which rows are added here: `facts`, and all commits.

    Raises:
        ValueError: the result was measured on another machine, with other versions or by another protocol.
    """
    earlier = read_table(out / f"{name}.csv")[0]
    for fact, value in facts.items():
        if fact != "commit" and " ".join(value.split()) != earlier.get(fact):
            raise ValueError(
                f"the result to resume has another {fact}: {earlier.get(fact)!r} instead of {value!r}; "
                "measure all of it here, in another folder"
            )
    return {**facts, "commit": ", ".join(dict.fromkeys([*earlier["commit"].split(", "), facts["commit"]]))}


def measure(
    problems: Sequence[Any],
    bench: Callable[[Any], list[Row]],
    out: Path,
    name: str,
    protocol: str,
    resume: bool = False,
) -> list[Row]:
    """Measure the problems in turn, each with `bench`, and write `<name>.csv` into the folder `out`.

    After each problem, its rows are printed and all rows so far are written, so a command that is stopped loses little.
    With `resume`, the rows of an existing `<name>.csv` are kept, and problems whose `is_in(rows)` is true are skipped.
    Problems without `is_in` are measured again.

    Returns:
        All rows of the result.

    Raises:
        ValueError: the result to resume was measured on another machine, with other versions or by another protocol.
    """
    rows = read(out, name) if resume else []
    facts = environment(protocol)
    torch.manual_seed(0)
    if rows:
        facts = facts_to_resume(out, name, facts)
    for i, problem in enumerate(problems):
        if resume and hasattr(problem, "is_in") and problem.is_in(rows):
            continue
        print(f"{problem}: {i + 1} of {len(problems)}", flush=True)
        release()
        found = bench(problem)
        print(*found, sep="\n", flush=True)
        rows = list({row.key: row for row in [*rows, *found]}.values())
        write(rows, out, name, facts)
    return rows


@dataclass(frozen=True)
class Result:
    """A result to measure.

    Attributes:
        name: the result is `<name>.csv`.
        problems: what to measure.
        small: problems for a quick check.
        bench: measures a problem in at most `rounds` rounds and returns its rows: `bench(problem, rounds=...)`.
        protocol: describes the measurement, in the head of the file.
    """

    name: str
    problems: Sequence[Any]
    small: Sequence[Any]
    bench: Callable[..., list[Row]]
    protocol: str

    def run(self, out: Path, resume: bool = False) -> list[Row]:
        """Measure all problems, as in `measure`."""
        return measure(self.problems, self.bench, out, self.name, self.protocol, resume)

    def check(self, out: Path) -> list[Row]:
        """Measure the small problems in few rounds. This shows that everything works; the times mean little."""
        return measure(self.small, partial(self.bench, rounds=QUICK_ROUNDS), out, self.name, self.protocol)
