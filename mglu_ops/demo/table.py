"""Tables of results: rows are quantities, columns are variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .timing import COLUMNS, FUSED, NAIVE, SWIGLU

RATIOS = (NAIVE, SWIGLU)
"""The columns that a ratio column compares with the fused one."""


@dataclass(frozen=True)
class Row:
    """A quantity, by column.

    Attributes:
        label: what the quantity is.
        values: the quantity of each variant; a number, or text that is shown as it is.
        form: the format of the numbers.
        ratio: whether the quotient of two columns means something.
    """

    label: str
    values: Mapping[str, float | str]
    form: str = "{}"
    ratio: bool = False

    def cells(self, columns: Sequence[str], ratios: Sequence[str]) -> list[str]:
        """The row as text: the label, one cell for each column, and the ratios."""
        shown = [self._show(self.values.get(name, "")) for name in columns]
        return [self.label, *shown, *(self._quotient(other) for other in ratios)]

    def _show(self, value: float | str) -> str:
        return value if isinstance(value, str) else self.form.format(value)

    def _quotient(self, other: str) -> str:
        above, below = self.values.get(other), self.values.get(FUSED)
        if not self.ratio or not isinstance(above, (int, float)) or not isinstance(below, (int, float)):
            return ""
        return f"{above / below:.2f}x" if above and below else ""


def render(rows: Sequence[Row], columns: Sequence[str] = COLUMNS, ratios: Sequence[str] = RATIOS) -> str:
    """The table as text, with aligned columns."""
    head = ["", *columns, *(f"{name}/{FUSED}" for name in ratios)]
    lines = [head, *(row.cells(columns, ratios) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(_align(cell, widths[i], i) for i, cell in enumerate(line)).rstrip() for line in lines]
    text.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(text)


def _align(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)
