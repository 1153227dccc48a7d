"""Imports of `mglu_ops` and `compile_passes` follow the diagram in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DRAWING = re.search(r"```mermaid\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[1]  # type: ignore[index]
PARTS = {
    module: part
    for part, label in re.findall(r'(\w+)\["(.*)"\]', DRAWING)
    for module in re.findall(r"\b(?:mglu_ops|compile_passes)[\w.]*", label)
}
"""Module or package -> its node in the diagram."""


def part_of(module: str) -> str | None:
    """The node of the diagram that lists a module or a package that contains it."""
    while module and module not in PARTS:
        module = module.rpartition(".")[0]
    return PARTS.get(module)


@cache
def reachable() -> dict[str, set[str]]:
    """Node -> nodes that it may import: itself, and all that arrows lead to."""
    arrows = [line.split(" --> ") for line in DRAWING.splitlines() if " --> " in line]
    found = {part: {part} for part in PARTS.values()}
    for _ in found:
        for chain in arrows:
            for a, b in pairwise(chain):
                found[a.strip()] |= found[b.strip()]
    return found


def imports(file: Path) -> Iterator[str]:
    """The modules of this project that a file imports, in whole or in part."""
    package = list(file.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] in ("mglu_ops", "compile_passes"))


FILES = sorted(
    str(path.relative_to(ROOT))
    for package in ("mglu_ops", "compile_passes")
    for path in (ROOT / package).rglob("*.py")
    if path != ROOT / "mglu_ops" / "__init__.py"  # imports public names of all modules, on first use
)


@pytest.mark.parametrize("file", FILES)
def test_imports_follow_the_arrows(file: str) -> None:
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    part = part_of(module)
    assert part is not None, f"{module} is missing in the drawing"
    allowed = reachable()[part]
    for name in imports(ROOT / file):
        assert part_of(name) in (*allowed, None), f"{module} imports {name}, to which no arrow leads from {part!r}"


def test_drawing_has_no_circle() -> None:
    found = reachable()
    for a, parts in found.items():
        assert not [b for b in parts if b != a and a in found[b]], a


def test_one_module_names_the_pass() -> None:
    named = [file for file in FILES if any(name.startswith("compile_passes") for name in imports(ROOT / file))]
    assert [file for file in named if file.startswith("mglu_ops/")] == ["mglu_ops/passes.py"]
