"""Mutation testing: counts how many small faults, put into the code by cosmic-ray, make a test fail.

    pip install cosmic-ray pytest-cov
    pytest -n 2 -m "not long and not gpu" --cov=compile_passes --cov-context=test --cov-report= tests/passes
    python tests/run_mutants.py compile_passes --count 150 --seed 1 --coverage .coverage --processes 2

The first command records which test runs which line. The second draws mutants of the given files and folders. It skips
mutants that no test can tell from the code: changes of annotations, of `strict=`, of options of dataclasses, and of
`==` to `is`, which is the same for small integers, short strings and dtypes.

Each mutant is tried in a copy of the working tree, with the tests that run its line, until one fails. At the end, the
tests that failed run once more without a mutant.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
SAME_TO_A_TEST = ("_Eq_Is", "_Is_Eq", "_NotEq_IsNot", "_IsNot_NotEq")
ENVIRONMENT = {
    "HYPOTHESIS_PROFILE": "quick",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}


@dataclass(frozen=True)
class Mutant:
    """A file with one fault: path, line number, the line before and after, and the new source."""

    file: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.before}  ->  {self.after}"


# --- Sampling --------------------------------------------------------------------------------------------------------


class _WithoutWhatNoTestSees(ast.NodeTransformer):
    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(0)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        is_dataclass = isinstance(node.func, ast.Name) and node.func.id == "dataclass"
        node.keywords = [] if is_dataclass else [keyword for keyword in node.keywords if keyword.arg != "strict"]
        return self.generic_visit(node)


def _differs(changed: str, source: str) -> bool:
    """True if a test could tell the changed code from the source. The changed code may be invalid Python."""
    with suppress(SyntaxError):
        trees = [_WithoutWhatNoTestSees().visit(ast.parse(text)) for text in (changed, source)]
        return ast.dump(trees[0]) != ast.dump(trees[1])
    return False


def mutants(names: list[str], seed: int) -> Iterator[Mutant]:
    """All mutants, in random order."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    operators = [(name, get_operator(name)) for name in operator_names()]
    places = []
    found = [[ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py") for name in names]
    for path in sorted(path for paths in found for path in paths):
        nodes = list(ast_nodes(get_ast(path.read_text())))
        for name, operator in operators:
            if not operator.arguments() and not name.endswith(SAME_TO_A_TEST):
                starts = [start for node in nodes for start, _ in operator().mutation_positions(node)]
                places += [(path, name, operator, number, start[0]) for number, start in enumerate(starts)]
    random.Random(seed).shuffle(places)
    for path, name, operator, number, line in places:
        source = path.read_text()
        changed = mutate_code(source, operator(), number)
        if changed is None or not _differs(changed, source):
            continue
        before, after = ([*text.splitlines(), ""][line - 1].strip() for text in (source, changed))
        if "cache" not in before or "RemoveDecorator" not in name:
            yield Mutant(str(path.relative_to(ROOT)), line, before, after, changed)


# --- Running ---------------------------------------------------------------------------------------------------------


class Coverage:
    """The tests that run each line, as recorded by pytest-cov."""

    def __init__(self, file: Path) -> None:
        from coverage import CoverageData

        data = CoverageData(str(file))
        data.read()
        root = Path(os.path.commonpath([str(Path(name).parent.parent) for name in data.measured_files()]))
        self._lines: dict[str, dict[int, set[str]]] = {}
        for name in data.measured_files():
            contexts = data.contexts_by_lineno(name)
            lines = {n: {test.rpartition("|")[0] for test in found if test} for n, found in contexts.items()}
            self._lines[str(Path(name).relative_to(root))] = lines
        tests = (test for lines in self._lines.values() for found in lines.values() for test in found)
        self._sizes = Counter(tests)

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that run the mutant's statement. If it runs at import, the tests that run any line of its file.

        The first case of each test function comes first, then the second cases, and so on. Among equals, tests that run
        fewer lines come first.
        """
        lines = self._lines.get(mutant.file, {})
        found = set[str]().union(*(lines.get(n, ()) for n in statement(ROOT / mutant.file, mutant.line)))
        found = found or set[str]().union(*lines.values())
        turns: Counter[str] = Counter()
        order = []
        for name in sorted(found, key=lambda name: (self._sizes[name], name)):
            turns[name.partition("[")[0]] += 1
            order.append((turns[name.partition("[")[0]], self._sizes[name], name))
        return [name for *_, name in sorted(order)]


def statement(file: Path, line: int) -> range:
    """The lines of the smallest statement around a line. Bodies of `if`, `for` and the like do not count."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.stmt)]
    around = [lines for node in nodes if line in (lines := _lines(node))]
    return min(around, key=len) if around else range(line, line + 1)


def _lines(node: ast.stmt) -> range:
    end = (node.end_lineno or node.lineno) + 1
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return range(min(item.lineno for item in [node, *node.decorator_list]), end)
    body = getattr(node, "body", None)
    return range(node.lineno, body[0].lineno if body else end)


OPTIONS = ["-q", "--tb=no", "-o", "cache_dir=cache", "@names"]
"""Options of pytest, which reads names of tests from the file `names`. The folder `cache` keeps those that failed."""


def failed(mutant: Mutant | None, names: list[str], seconds: float | None) -> list[str] | None:
    """The first named test that fails with a mutant. Without a mutant, all tests that fail. None on a timeout."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = shutil.copytree(ROOT, Path(temporary, "tree"), ignore=NOT_COPIED)
        if mutant is not None:
            (folder / mutant.file).write_text(mutant.source)
        (folder / "names").write_text("\n".join(names))
        command = [sys.executable, "-m", "pytest", *(["-x"] if mutant else []), *OPTIONS]
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(folder)}
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # pytest and the processes that tests started
        kept = folder / "cache" / "v" / "cache" / "lastfailed"
        found = list(json.loads(kept.read_text())) if kept.exists() else []
        return found or ([] if code in (0, 5) else [f"exit code {code}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="files, or folders of them")
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage", help="what pytest-cov wrote")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="leave a mutant after this time")
    options = parser.parse_args()
    drawn = list(itertools.islice(mutants(options.files, options.seed), options.count))
    coverage = Coverage(options.coverage)

    def outcome(mutant: Mutant) -> tuple[str, list[str]]:
        names = coverage.tests(mutant)
        begin = time.monotonic()
        found = failed(mutant, names, options.seconds) if names else []
        text = "not finished" if found is None else f"killed by {found[0]}" if found else "survived"
        print(f"{mutant}: {text}; {len(names)} tests, {time.monotonic() - begin:.0f} s", flush=True)
        return text, found or []

    with ThreadPoolExecutor(options.processes) as pool:
        outcomes = list(pool.map(outcome, drawn))
    killers = sorted({name for _, names in outcomes for name in names if "::" in name})
    wrong = (failed(None, killers, None) or []) if killers else []
    print(f"without a mutant these fail too: {', '.join(wrong) or 'none'}")
    counts = Counter(text.partition(" by ")[0] for text, _ in outcomes)
    print(f"{len(drawn)} mutants: " + ", ".join(f"{count} {text}" for text, count in counts.items()))


if __name__ == "__main__":
    main()
