"""Fills the tables of the documentation from the results.

A page marks the place of a table by two lines, `<!-- table: NAME -->` and `<!-- end -->`; what stands between them is
generated. `python -m mglu_ops bench tables` fills all pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks import frames, summary, tables, tables_train  # noqa: F401 (the last two enter their tables in frames)
from benchmarks.learning import claims, formats
from benchmarks.learning import tables as learning

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "compile_passes", "csrc", "mglu_ops")
"""Folders that are searched for pages, besides the root itself."""
TABLES: dict[str, Callable[[Path], str]] = {
    "summary": summary.summary,
    **frames.TABLES,
    **learning.TABLES,
    "learning_formats": formats.table,
    **claims.TABLES,
}
"""Name of a table to the function that makes it from the folder of the results."""
MARKED = re.compile(r"^<!-- table: (\w+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


def fill(page: str, results: Path) -> str:
    """The text of a page with its tables generated from the results in a folder.

    Raises:
        KeyError: the page names a table that does not exist.
        FileNotFoundError: a result is missing.
    """
    return MARKED.sub(lambda found: f"<!-- table: {found[1]} -->\n\n{TABLES[found[1]](results)}\n\n<!-- end -->", page)


def all_pages() -> list[Path]:
    """The Markdown files of the project."""
    return sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])


def pages() -> list[Path]:
    """The Markdown files of the project that have tables."""
    return [path for path in all_pages() if MARKED.search(path.read_text())]


def fill_pages(results: Path) -> list[Path]:
    """Generate the tables of all pages, and return the pages that changed."""
    filled = {path: fill(path.read_text(), results) for path in pages()}
    changed = [path for path, text in filled.items() if text != path.read_text()]
    for path in changed:
        path.write_text(filled[path])
    return changed


def write_tables(out: Path) -> Path:
    """Write `tables.md` with every table whose results are in a folder, for results that no page shows.

    Raises:
        FileNotFoundError: the folder has no result of any table.
    """
    parts = []
    for name, table in TABLES.items():
        try:
            parts.append(f"## {name}\n\n{table(out)}\n")
        except FileNotFoundError:
            continue
    if not parts:
        raise FileNotFoundError(f"{out}: no results are here to make tables from; measure some first")
    path = out / "tables.md"
    path.write_text("\n".join(parts))
    return path
