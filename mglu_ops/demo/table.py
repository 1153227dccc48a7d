"""The one table of results: rows are quantities, columns are variants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .timing import COLUMNS, FUSED, NAIVE, SWIGLU

RATIOS = ((NAIVE, "naive/fused"), (SWIGLU, "SwiGLU/fused"))


@dataclass(frozen=True)
class Row:
    """A quantity by column; `form` shows its numbers, `ratio` says whether a quotient of columns means something."""

    label: str
    values: Mapping[str, float | str]
    form: str = "{}"
    ratio: bool = False

    def cells(self) -> list[str]:
        """The row as text: label, a cell a column, the ratios."""
        shown = [self._show(self.values.get(name, "")) for name in COLUMNS]
        return [self.label, *shown, *(self._quotient(other) for other, _ in RATIOS)]

    def _show(self, value: float | str) -> str:
        return value if isinstance(value, str) else self.form.format(value)

    def _quotient(self, other: str) -> str:
        above, below = self.values.get(other), self.values.get(FUSED)
        if not self.ratio or not isinstance(above, (int, float)) or not isinstance(below, (int, float)):
            return ""
        return f"{above / below:.2f}x" if above and below else ""


def render(rows: list[Row]) -> str:
    """The table as text, columns aligned."""
    lines = [["", *COLUMNS, *(title for _, title in RATIOS)], *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["  ".join(_align(cell, widths[i], i) for i, cell in enumerate(line)).rstrip() for line in lines]
    text.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(text)


def _align(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)
