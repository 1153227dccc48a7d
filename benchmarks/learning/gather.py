"""Gathers finished runs into the two tables of their corpus.

python -m benchmarks.learning.gather --runs DIR [DIR ...] --corpus pinned [--out benchmarks/results/learning]

`<corpus>_runs.csv` has a row for each run: its recipe, its environment, its costs and the last point of its curve.
`<corpus>_curves.csv` has every point of every curve. The heads of both files describe the corpus and the protocol,
which all runs share. If a run is already in the tables, its rows are kept, so the command can be repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from benchmarks.learning.recipe import KINDS, Recipe
from benchmarks.records import read_table, write_table

RESULTS = Path("benchmarks/results/learning")
SHARED = ("protocol", "corpus")
"""All runs of a table share the facts whose name, up to its first dot, is one of these."""
ONLY_IN_CURVES = ("step", "megabytes", "seconds", "gate_ratios", "errors")
"""Columns of a point that the row of a run leaves out, for example because the head of the run has them."""


def is_shared(fact: str) -> bool:
    return fact.partition(".")[0] in SHARED


def row_of(run: str, facts: Mapping[str, str], last: Mapping[str, str]) -> dict[str, str]:
    """The row of a run, from the head of its file and the last point of its curve. None becomes an empty cell.

    Fields that were added to `Recipe` after the run have their defaults.
    """
    recipe = {f"recipe.{name}": str(getattr(Recipe, name)) for name in KINDS}
    own = {name: value for name, value in facts.items() if name in recipe or not is_shared(name)}
    given = {name: "" if value == "None" else value for name, value in ({**recipe, "idle_weights": "0"} | own).items()}
    final = {name: value for name, value in last.items() if name not in ONLY_IN_CURVES}
    return {"run": run, **given, **final}


def gather(folders: Iterable[Path], out: Path, corpus: str) -> None:
    """Add the finished runs in some folders to the tables of a corpus.

    Raises:
        FileNotFoundError: the folders have no finished run.
        ValueError: the runs, or the runs and the tables, differ in their text or in another fact that they must share.
    """
    names = [f"{corpus}_runs", f"{corpus}_curves"]
    heads, runs, curves = [], [], []
    for path in chain.from_iterable(sorted(folder.glob("*.csv")) for folder in folders):
        facts, points = read_table(path)
        heads.append(facts)
        runs.append(row_of(path.stem, facts, points[-1]))
        curves += [{"run": path.stem, **point} for point in points]
    if not runs:
        raise FileNotFoundError(f"no finished run is in {', '.join(map(str, folders))}")
    before = [read_table(path) if (path := out / f"{name}.csv").is_file() else ({}, []) for name in names]
    heads += [facts for facts, _ in before if facts]
    shared = {name: value for name, value in heads[0].items() if is_shared(name)}
    for facts in heads:
        for name, value in shared.items():
            if facts.get(name) != value:
                raise ValueError(f"{corpus}: the runs have several values of {name}: {value!r} and {facts.get(name)!r}")
    for name, (_, old), new in zip(names, before, (runs, curves), strict=True):
        write_table(merged(old, new), shared, out, name)


def merged(old: Sequence[dict[str, str]], new: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The rows of a table, and the new rows of runs that it lacks. All rows get the same columns."""
    known = {row["run"] for row in old}
    rows = [*old, *(row for row in new if row["run"] not in known)]
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name, "") for name in columns} for row in sorted(rows, key=lambda row: row["run"])]


def done(paths: Iterable[Path], digest: str) -> set[str]:
    """The names of the runs on the corpus with this digest, in tables of runs. A path is a table or a folder of tables.

    Raises:
        FileNotFoundError: a path has no table of runs.
    """
    names: set[str] = set()
    for path in paths:
        tables = [path] if path.is_file() else sorted(path.glob("*_runs.csv"))
        if not tables:
            raise FileNotFoundError(f"{path}: no table of runs is there; benchmarks/learning/gather.py makes them")
        for facts, rows in map(read_table, tables):
            if facts["corpus.digest"] == digest:
                names.update(row["run"] for row in rows)
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="folders of finished runs of one text")
    parser.add_argument("--corpus", required=True, help="the name of the tables, such as python, texts or pinned")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    gather(options.runs, options.out, options.corpus)


if __name__ == "__main__":
    main()
