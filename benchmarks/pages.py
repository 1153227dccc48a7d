"""Fills the tables of the documentation from the results.

A page marks the place of a table by two lines, `<!-- table: NAME -->` and `<!-- end -->`. The text between the two
lines is generated. `python -m mglu_ops bench tables` fills all pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from benchmarks import frames, summary, tables  # noqa: F401 (importing `tables` registers its tables)
from benchmarks.learning import comparisons, formats
from benchmarks.learning import tables as learning

ROOT = Path(__file__).parents[1]
EVERY_TABLE = ROOT / "benchmarks" / "results" / "tables.md"
"""Page for the tables that no other page shows."""
FOLDERS = ("benchmarks", "compile_passes", "csrc", "mglu_ops")
"""Folders that are searched for pages. Pages in the root itself are found too."""
TABLES: dict[str, Callable[[Path], str]] = {
    **summary.TABLES,
    **frames.TABLES,
    **learning.TABLES,
    "learning_formats": formats.table,
    **comparisons.TABLES,
}
"""Name of a table -> the function that makes it from a folder of results."""
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
    """Write `tables.md` into a folder of results: a copy of the committed page with the tables of that folder.

    Tables that only other pages show follow, each under its name. Sections without results are left out.

    Raises:
        FileNotFoundError: the folder has no result of any table.
    """
    page = EVERY_TABLE.read_text()
    sections = re.findall(r"^## .*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    shown = MARKED.findall(page)
    sections += [f"## {name}\n\n<!-- table: {name} -->\n<!-- end -->\n" for name in TABLES if name not in shown]
    parts = []
    for section in sections:
        with suppress(FileNotFoundError):
            parts.append(fill(section, out))
    if not parts:
        raise FileNotFoundError(f"{out}: no results are here to make tables from; measure some first")
    path = out / EVERY_TABLE.name
    path.write_text("".join(parts))
    return path
