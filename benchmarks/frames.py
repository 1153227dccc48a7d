"""Results as pandas frames, and the text of their figures. Measuring does not import this module, nor pandas."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from benchmarks.records import read_environment

EXTRA = ("chosen", "left_out", "peak_mb", "errors", "bits_repeat")
"""Names in `Row.extra` that are columns of every frame, also where no row has them."""


class MissingResultError(FileNotFoundError):
    """No result has what a table needs."""


def load(results: Path, name: str, command: str | None = None) -> pd.DataFrame:
    """The rows of a result, with a column for each name in `extra`, and `layer`, such as `8192 x 2048`.

    The environment is in `attrs` of the frame.

    Args:
        results: the folder of the results.
        name: the name of the CSV file.
        command: what measures it, for the error; None for `python -m mglu_ops bench` and its name.

    Raises:
        MissingResultError: it is not there.
    """
    path = results / f"{name}.csv"
    if not path.is_file():
        command = command or f"python -m mglu_ops bench {name}"
        raise MissingResultError(f"{path}: no such result; `{command}` measures it")
    environment = read_environment(results, name)
    rows = pd.read_csv(path, skiprows=len(environment), keep_default_na=False, na_values=["nan"])
    if "extra" in rows:
        extra = pd.DataFrame([json.loads(cell) for cell in rows.pop("extra")], rows.index)
        rows = rows.join(extra.reindex(columns=extra.columns.union(EXTRA)))
        rows["chosen"] = rows.chosen.eq(True)
    if "out_features" in rows:
        rows["layer"] = rows.out_features.astype(str) + " x " + rows.in_features.astype(str)
    rows.attrs = environment
    return rows


def fastest(rows: pd.DataFrame, prefix: str | tuple[str, ...], by: str | list[str]) -> pd.DataFrame:
    """The fastest correct row of each problem, among the variants that begin with a prefix.

    Args:
        rows: the rows of a result.
        prefix: one beginning, or several.
        by: the columns that tell problems apart, which become the index.
    """
    found = rows[rows.variant.str.startswith(prefix) & rows.microseconds.notna()]
    return found.sort_values("microseconds", kind="stable").drop_duplicates(by).set_index(by).sort_index()


def swiglu_time(rows: pd.DataFrame) -> float:
    """The microseconds of the fastest SwiGLU; NaN if there is none."""
    return float(rows.microseconds[rows.variant.str.startswith("SwiGLU")].min())


# --- Text: empty where a figure is missing ----------------------------------------------------------------------------


def us(time: float) -> str:
    """Microseconds with one decimal."""
    return "" if math.isnan(time) else f"{time:.1f}"


def ms(time: float) -> str:
    """Microseconds as milliseconds with three digits or more."""
    return "" if math.isnan(time) else f"{time / 1000:.{2 if time < 10_000 else 1}f}"


def duration(time: float) -> str:
    """Microseconds as us or ms with three digits."""
    value, unit = (time, "us") if time < 1000 else (time / 1000, "ms")
    return "" if math.isnan(time) else f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def rate(time: float, tokens: int) -> str:
    """Tokens a second, from the microseconds of a step."""
    return "" if math.isnan(time) else f"{1e6 * tokens / time:.0f}"


def times(above: float, below: float) -> str:
    """`above / below` as `1.79x`."""
    return "" if math.isnan(above / below) else f"{above / below:.2f}x"


def speedup(theirs: float, ours: float) -> str:
    """How many times as fast ours is, in bold where it is slower."""
    return f"**{times(theirs, ours)}, slower**" if theirs < ours else times(theirs, ours)


def share(ours: float, theirs: float) -> str:
    """How much of theirs ours is, as `64%`, in bold where it is more."""
    percent = "" if math.isnan(ours / theirs) else f"{100 * ours / theirs:.0f}%"
    return f"**{percent}, more**" if ours > theirs else percent


def text(form: Callable[..., str], *figures: pd.Series) -> pd.Series:
    """`form` of the figures of each problem, which are aligned by their index."""
    table = pd.concat(figures, axis=1)
    return pd.Series([form(*line) for line in table.itertuples(index=False)], table.index, dtype=object)


def shown(rows: pd.DataFrame, form: Callable[..., str] = us, *columns: str) -> pd.Series:
    """`form` of the time and of other columns of each row; if it has no time, why it was left out, or "wrong"."""
    cells = text(form, rows.microseconds, *(rows[column] for column in columns))
    return cells.where(rows.microseconds.notna(), rows.left_out.astype(object).fillna("wrong"))


def in_order(rows: pd.DataFrame, lines: str | list[str], columns: str, cells: str) -> pd.DataFrame:
    """A cell of each row by its line and its column, both in the order of the rows."""
    return rows.pivot_table(cells, lines, columns, aggfunc="first", sort=False)


def markdown(head: Iterable[object], lines: Iterable[Sequence[object]]) -> str:
    """A table from the cells of its head and its lines."""
    head = list(head)
    every: list[Sequence[object]] = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in every)


def table(lines: Iterable[Mapping[str, object]]) -> str:
    """A table whose lines map the names of its columns to cells."""
    lines = list(lines)
    return markdown(lines[0] if lines else (), [[*line.values()] for line in lines])


def grid(corner: str, cells: pd.DataFrame) -> str:
    """A table with the index of a frame as its first column; columns that are numbers are numbers of masks."""
    head = [f"n_m = {name}" if isinstance(name, int) else name for name in cells.columns]
    return markdown([corner, *head], cells.astype(object).where(cells.notna(), "").itertuples())


def page(results: Path, name: str, *parts: str) -> str:
    """Tables below a line that says where, with which torch and at which commit their figures were measured."""
    facts = read_environment(results, name)
    commits = ", ".join(commit[:7] for commit in facts["commit"].split(", "))
    return "\n\n".join([f"`{name}.csv`: {facts['device']}, torch {facts['torch']}, commit {commits}.", *parts])
