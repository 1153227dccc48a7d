"""Markdown tables and the cells in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks.records import Row


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table from the cells of its head and its lines."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def time_of(row: Row | None) -> float | None:
    """Microseconds of a row; None if there is no row, its result was wrong or it is left out."""
    return row.microseconds if row is not None and row.has_time else None


def microseconds(row: Row | None) -> str:
    """The time of a row with one decimal; empty for no row."""
    return time_cell(row, lambda time: f"{time:.1f}")


def milliseconds(row: Row | None) -> str:
    """The time of a row in milliseconds with three digits or more; empty for no row."""
    return time_cell(row, lambda time: f"{time / 1000:.{2 if time < 10_000 else 1}f}")


def time_cell(row: Row | None, text: Callable[[float], str]) -> str:
    """The time of a row as text; "wrong" or the reason if it has none, empty for no row."""
    if row is None:
        return ""
    return text(row.microseconds) if row.has_time else row.left_out or "wrong"


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


def share(ours: float | None, theirs: float | None) -> str:
    """How much of theirs ours is, as `64%`, in bold where it is more; empty if either is missing."""
    if not ours or not theirs:
        return ""
    percent = f"{100 * ours / theirs:.0f}%"
    return f"**{percent}, more**" if ours > theirs else percent
