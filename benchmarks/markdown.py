"""Markdown tables and the cells in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.records import Row


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table from the cells of its head and its lines."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def time_of(row: Row | None) -> float | None:
    """Microseconds of a row; None if there is no row or its result was wrong."""
    return None if row is None or row.is_wrong else row.microseconds


def microseconds(row: Row | None) -> str:
    """The time of a row with one decimal; empty for no row."""
    if row is None:
        return ""
    return "wrong" if row.is_wrong else f"{row.microseconds:.1f}"


def duration(microseconds: float) -> str:
    """A time in us or ms with three digits."""
    value, unit = (microseconds, "us") if microseconds < 1000 else (microseconds / 1000, "ms")
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def times(above: float | None, below: float | None) -> str:
    """`above / below` as `1.79x`; empty if either is missing."""
    return f"{above / below:.2f}x" if above and below else ""


def speedup(theirs: float | None, ours: float | None) -> str:
    """How many times as fast ours is, in bold where it is slower; empty if either is missing."""
    ratio = times(theirs, ours)
    return f"**{ratio}, slower**" if theirs and ours and theirs < ours else ratio
