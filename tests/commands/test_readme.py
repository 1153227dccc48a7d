"""The pages for users: their snippets run, their commands and links lead somewhere, and their tables are up to date."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import pages, suites
from tests.support.commands import ROOT, snippets
from tests.support.commands import run as run_command
from tests.support.families import quick_only_for

README = (ROOT / "README.md").read_text()
MOST_LINES = 150
PYTHON = os.environ.get("MGLU_README_PYTHON")
"""The Python of an environment that mglu_ops is installed into, for `make dist`; None to run this checkout."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


EVERY_PAGE = pytest.mark.parametrize("page", pages.all_pages(), ids=name_of)


def commands(page: str) -> list[str]:
    """The commands of a page without their comments. They are indented by four spaces, or are in a bash fence."""
    indented = re.findall(r"^    (.+)$", page, flags=re.MULTILINE)
    lines = [line.partition("#")[0].strip() for line in [*indented, *"\n".join(snippets(page, "bash")).splitlines()]]
    return [line for line in lines if re.match(r"(make|pip|python) ", line)]


def run(command: Sequence[str | Path], folder: Path) -> str:
    environment = {"PATH": os.pathsep.join([str(Path(PYTHON or sys.executable).parent), os.environ["PATH"]])}
    if PYTHON:
        environment["PYTHONPATH"] = ""
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # the usual folder may hold older code
    process = run_command(command, timeout=600, folder=folder, **environment)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, as torch.compile does")
def test_snippets_of_the_readme_run_in_order_and_print_what_it_shows(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "readme.py").write_text("\n".join(snippets(README, "python")))
    printed = run(["python", "readme.py"], tmp_path)
    shown = [line for text in snippets(README, "text") for line in text.splitlines() if line]
    assert shown
    for line in shown:
        assert line in printed
    run(["bash", "-c", "set -euo pipefail\n" + "\n".join(snippets(README, "bash"))], tmp_path)
    assert (tmp_path / "model.pt2").is_file()


WITH_SNIPPETS = [
    "mglu_ops/weight_formats.md",
    "mglu_ops/nn/README.md",
    "mglu_ops/experts.md",
    "compile_passes/README.md",
    "FAQ.md",
]


@pytest.mark.parametrize("page", quick_only_for(WITH_SNIPPETS[:1], WITH_SNIPPETS))
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, as torch.compile does")
def test_snippets_of_a_page_run(page: str, tmp_path: Path) -> None:
    found = snippets((ROOT / page).read_text(), "python")
    assert found
    (tmp_path / "snippets.py").write_text("\n".join(found))
    run(["python", "snippets.py"], tmp_path)


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


@EVERY_PAGE
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


@EVERY_PAGE
def test_commands_of_a_page_name_targets_modules_and_files_that_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in commands(page.read_text()):
        for target in re.findall(r"^make ([a-z-]+)", command):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), command
        for module in re.findall(r"^python -m ([\w.]+)", command):
            assert module == "pytest" or importlib.util.find_spec(module), command
        for file in re.findall(r"(?<=\s)([\w./-]+\.(?:py|cpp|sh))\b", command):
            assert (ROOT / file).is_file(), command
        for names in re.findall(r'BENCH_ARGS="([^"]*)"', command):
            assert set(names.split()) <= set(suites.SUITES), command


@EVERY_PAGE
def test_a_page_installs_from_the_clone_and_never_by_name(page: Path) -> None:
    """No public index has a project of this name, so anyone could register one, and users would install it."""
    text = page.read_text()
    assert not re.search(r"""pip install[^\n]*["' ]mglu[-_]ops""", text)


@pytest.mark.parametrize("page", pages.pages(), ids=name_of)
def test_tables_of_a_page_are_generated_from_the_results(page: Path) -> None:
    text = page.read_text()
    assert pages.fill(text, suites.RESULTS) == text, "python -m mglu_ops bench tables fills them"
    marks = re.findall(r"^<!-- table: ", text, flags=re.MULTILINE)
    assert len(marks) == len(pages.MARKED.findall(text)), "a marker has no end"


def test_every_table_of_the_results_is_on_a_page() -> None:
    shown = {name for page in pages.pages() for name in pages.MARKED.findall(page.read_text())}
    assert shown <= set(pages.TABLES)
    for name in set(pages.TABLES) - shown:
        with pytest.raises(FileNotFoundError, match="no such result"):
            pages.TABLES[name](suites.RESULTS)
