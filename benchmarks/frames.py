"""Results as pandas frames, and frames as Markdown. Measuring needs neither this module nor pandas."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pandas as pd

from benchmarks.records import read_table
from mglu_ops.words import counted as many  # noqa: F401 (for the modules that make tables)

EXTRA = ("chosen", "left_out", "peak_mb", "errors", "bits_repeat")
"""Keys of `Row.extra` that are columns of every frame, even if no row has them."""


def load(results: Path, name: str) -> pd.DataFrame:
    """The rows of `<name>.csv` in a folder of results. The frame's `attrs` hold the facts at the head of the file.

    The frame has the columns of the file, except that each name in `extra` has a column of its own and `least` is
    called `microseconds`. Two columns are added: `layer`, such as `8192 x 2048`, and `rate`, in tokens per second.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = results / f"{name}.csv"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such result; benchmarks/README.md has the command that measures it")
    environment = read_table(path)[0]
    rows = pd.read_csv(path, skiprows=len(environment), keep_default_na=False, na_values=["nan"])
    rows = rows.rename(columns={"least": "microseconds"})
    if "extra" in rows:
        extra = pd.DataFrame([json.loads(cell) for cell in rows.pop("extra")], rows.index)
        rows = rows.join(extra.reindex(columns=extra.columns.union(EXTRA)))
        rows["chosen"] = rows.chosen.eq(True)
    if "tokens" in rows:
        rows["layer"] = rows.out_features.astype(str) + " x " + rows.in_features.astype(str)
        rows["rate"] = 1e6 * rows.tokens / rows.microseconds
    rows.attrs = environment
    return rows


def fastest(rows: pd.DataFrame, prefix: str | tuple[str, ...], by: str | list[str]) -> pd.DataFrame:
    """The fastest correct row of each problem, among variants whose name begins with a prefix or one of several.

    The columns `by` identify a problem, and become the index.
    """
    found = rows[rows.variant.str.startswith(prefix) & rows.microseconds.notna()]
    return found.sort_values("microseconds", kind="stable").drop_duplicates(by).set_index(by).sort_index()


def swiglu_time(rows: pd.DataFrame) -> float:
    """The microseconds of the fastest SwiGLU; NaN if there is none."""
    return float(rows.microseconds[rows.variant.str.startswith("SwiGLU")].min())


# --- Figures as text; a missing figure is an empty text ---------------------------------------------------------------


def form(pattern: str) -> Callable[[float], str]:
    """A function that formats a figure by a pattern."""
    return lambda figure: "" if math.isnan(figure) else pattern.format(figure)


us, whole, ratio = form("{:.1f}"), form("{:.0f}"), form("{:.2f}x")


def ms(time: float) -> str:
    """Microseconds as milliseconds: two decimals below 10 ms, and one above."""
    return form("{:.2f}" if time < 10_000 else "{:.1f}")(time / 1000)


def duration(time: float) -> str:
    """Microseconds as us or ms with three digits."""
    value, unit = (time, "us") if time < 1000 else (time / 1000, "ms")
    return form(f"{{:.{2 if value < 10 else 1 if value < 100 else 0}f}} {unit}")(value)


def speedup(theirs_over_ours: float) -> str:
    """A speed-up such as `1.25x`, in bold if our variant is slower than theirs."""
    return f"**{ratio(theirs_over_ours)}, slower**" if theirs_over_ours < 1 else ratio(theirs_over_ours)


def share(ours_over_theirs: float) -> str:
    """Our figure as a percentage of theirs, such as `64%`, in bold if ours is larger."""
    return form("**{:.0%}, more**" if ours_over_theirs > 1 else "{:.0%}")(ours_over_theirs)


def shown(rows: pd.DataFrame, form: Callable[[float], str] = us, column: str = "microseconds") -> pd.Series:
    """A figure of each row as text. For a row without a time, the text is its `left_out`, or else "wrong"."""
    cells = rows[column].map(form).astype(object)
    return cells.where(rows.microseconds.notna(), rows.left_out.astype(object).fillna("wrong"))


# --- Tables -----------------------------------------------------------------------------------------------------------


def in_order(rows: pd.DataFrame, lines: str | list[str], columns: str, cells: pd.Series) -> pd.DataFrame:
    """Arrange `cells`, one for each of `rows`, in a frame.

    The values of the columns `lines` become the index. The values of the column `columns` become the frame's columns,
    in the order in which they first occur.
    """
    return rows.assign(cell=cells).pivot_table("cell", lines, columns, aggfunc="first", sort=False)


def markdown(head: Iterable[object], lines: Iterable[Sequence[object]]) -> str:
    """A Markdown table from the cells of its head and its lines."""
    head = list(head)
    every: list[Sequence[object]] = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in every)


def grid(corner: str, cells: pd.DataFrame | Mapping[str, pd.Series]) -> str:
    """A Markdown table of a frame, or of columns by name. The levels of the index are the first columns.

    `corner` is the heading of the first column. A column whose name is an int is for this number of masks.
    """
    cells = pd.DataFrame(cells)
    levels = ["n_m" if name == "n_masks" else name for name in cells.index.names[1:]]
    head = [f"n_m = {name}" if isinstance(name, int) else name for name in cells.columns]
    lines = cells.astype(object).where(cells.notna(), "").set_axis(range(len(head)), axis="columns").reset_index()
    return markdown([corner, *levels, *head], lines.itertuples(index=False))


Parts: TypeAlias = Callable[[pd.DataFrame], Iterable[str]]
"""Makes the parts of a table from the rows of a result."""
TABLES: dict[str, Callable[[Path], str]] = {}
"""Name of a table -> the function that makes it from a folder of results. `table` adds to this dict."""


def table(*names: str, result: str | None = None) -> Callable[[Parts], Parts]:
    """Add the decorated function to `TABLES` under each name; `result` names the CSV file if its name differs.

    A line above the table states the file, the device, torch's version and the commits.
    """

    def enter(parts: Parts) -> Parts:
        def text(name: str, results: Path) -> str:
            rows = load(results, name)
            commits = ", ".join(commit[:7] for commit in rows.attrs["commit"].split(", "))
            head = f"`{name}.csv`: {rows.attrs['device']}, torch {rows.attrs['torch']}, commit {commits}."
            return "\n\n".join([head, *parts(rows)])

        TABLES.update({name: partial(text, result or name) for name in names})
        return parts

    return enter
