"""Selects rows of a result table."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.records import Row


def only(rows: Iterable[Row], **fields: object) -> list[Row]:
    """The rows whose fields (or `shape`) have these values."""
    return [row for row in rows if all(getattr(row, name) == value for name, value in fields.items())]


def fastest(rows: Iterable[Row], *prefixes: str) -> Row | None:
    """The fastest correct row whose variant begins with one of the prefixes; None if there is no such row."""
    right = [row for row in rows if row.variant.startswith(prefixes) and row.has_time]
    return min(right, key=lambda row: row.microseconds, default=None)


def of(rows: Iterable[Row], variant: str) -> Row | None:
    """The row of a variant among the rows of one problem; None if there is none."""
    return next(iter(only(rows, variant=variant)), None)


def chosen(rows: Iterable[Row]) -> Row | None:
    """The row of the backend that the dispatch chose, among the rows of one problem."""
    return next((row for row in rows if row.extra.get("chosen")), None)


def fastest_other(rows: Iterable[Row]) -> Row | None:
    """The fastest other implementation of the same problem: another backend of ours, or the naive layer."""
    return fastest([row for row in rows if not row.extra.get("chosen")], "mglu ", "naive ")


def shapes(rows: Iterable[Row]) -> list[tuple[int, int]]:
    """The shapes `(out_features, in_features)` of a table, in its order."""
    return list(dict.fromkeys(row.shape for row in rows))


def masks(rows: Iterable[Row]) -> list[int]:
    """The numbers of masks in a table, in ascending order, without the 0 of layers that have none."""
    return sorted({row.n_masks for row in rows} - {0})


def tokens(rows: Iterable[Row]) -> list[int]:
    """The numbers of tokens of the rows with masks, in ascending order."""
    return sorted({row.tokens for row in rows if row.n_masks})
