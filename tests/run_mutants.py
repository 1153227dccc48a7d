"""Mutation testing: how many of the small faults that cosmic-ray puts into the code make a test fail.

    pip install cosmic-ray
    python tests/run_mutants.py sample compile_passes --count 150 --seed 1 --out build/mutants.json
    python tests/run_mutants.py run build/mutants.json tests/passes/test_four_rules.py tests/passes --processes 2

`sample` draws mutants of all Python files below some folders. It leaves out those that no test can tell from the code:
of annotations, of `strict=` and of the options of dataclasses. `run` tries each in a copy of the working tree, beside
the tests of the code itself, and prints those that no test killed. Tests with the mark `long` or `gpu` do not run. The
others run in groups, one for each argument, in this order, without the files of earlier groups: name first what kills
most. The first failed test ends a mutant. `run` needs no cosmic-ray, so it may be on another machine.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
QUICK = "not long and not gpu"


@dataclass(frozen=True)
class Mutant:
    """A file with one fault.

    Attributes:
        file: the path in the working tree.
        line: the number of the line.
        operator: cosmic-ray's name of the fault.
        before: the line without it.
        after: the line with it.
        source: the file with it.
    """

    file: str
    line: int
    operator: str
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


def _seen(source: str) -> str:
    return ast.dump(_WithoutWhatNoTestSees().visit(ast.parse(source)))


def mutants(folders: list[str], seed: int) -> Iterator[Mutant]:
    """All mutants in a random order."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    operators = [(name, get_operator(name)) for name in operator_names()]
    places = []
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        nodes = list(ast_nodes(get_ast(path.read_text())))
        for name, operator in operators:
            if not operator.arguments():
                starts = [start for node in nodes for start, _ in operator().mutation_positions(node)]
                places += [(path, name, operator, number, start[0]) for number, start in enumerate(starts)]
    random.Random(seed).shuffle(places)
    for path, name, operator, number, line in places:
        source = path.read_text()
        changed = mutate_code(source, operator(), number)
        if changed is None or _seen(changed) == _seen(source):
            continue
        before, after = ([*text.splitlines(), ""][line - 1].strip() for text in (source, changed))
        if "cache" not in before or "RemoveDecorator" not in name:
            yield Mutant(str(path.relative_to(ROOT)), line, name.rpartition("/")[2], before, after, changed)


def sample(options: argparse.Namespace) -> int:
    drawn = [mutant for mutant, _ in zip(mutants(options.folders, options.seed), range(options.count), strict=False)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps([asdict(mutant) for mutant in drawn]))
    print(f"{len(drawn)} mutants in {options.out}")
    return 0


# --- Running ---------------------------------------------------------------------------------------------------------


def groups_of(arguments: list[str]) -> list[list[str]]:
    """The test files of each argument, which is a file or a folder, without the files of earlier ones."""
    groups: list[list[str]] = []
    for argument in arguments:
        path = ROOT / argument
        if not path.exists():
            raise SystemExit(f"there is no {argument}")
        files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
        names = [str(file.relative_to(ROOT)) for file in files]
        groups.append([name for name in names if name not in {earlier for group in groups for earlier in group}])
    return [group for group in groups if group]


def failed(files: list[str], folder: Path, seconds: float, first: bool = True) -> list[str] | None:
    """The tests of some files that fail in a copy of the working tree; None if the time ends before."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", QUICK, *files]
    environment = {
        **os.environ,
        **{"PYTHONPATH": str(folder), "HYPOTHESIS_PROFILE": "quick", "OMP_NUM_THREADS": "1"},
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    options = {"cwd": folder, "env": environment, "start_new_session": True, "text": True}
    with subprocess.Popen([*command, "-x"] if first else command, stdout=subprocess.PIPE, **options) as process:
        try:
            output, _ = process.communicate(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None
    names = [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return names or ([] if process.returncode == 0 else [f"exit code {process.returncode}"])


def run(options: argparse.Namespace) -> int:
    drawn = [Mutant(**item) for item in json.loads(options.mutants.read_text())]
    groups, end = groups_of(options.tests), time.monotonic() + options.seconds

    def outcome(mutant: Mutant | None) -> str:
        """`killed by` a test, `survived`, or `not finished`; of the code itself, all tests that it fails."""
        with tempfile.TemporaryDirectory() as name:
            folder = shutil.copytree(ROOT, Path(name, "tree"), ignore=NOT_COPIED)
            if mutant is not None:
                (folder / mutant.file).write_text(mutant.source)
            found = []
            for files in groups:
                names = failed(files, folder, end - time.monotonic(), first=mutant is not None)
                if names is None:
                    return "not finished"
                found += names
                if names and mutant is not None:
                    break
        if mutant is None:
            text = f"fails {', '.join(found)}" if found else "fails no test"
        else:
            text = f"killed by {found[0]}" if found else "survived"
        print(f"{mutant or 'the code itself'}: {text}", flush=True)
        return text

    with ThreadPoolExecutor(options.processes) as pool:
        itself, *outcomes = pool.map(outcome, [None, *drawn])
    counts = {word: sum(text.startswith(word) for text in outcomes) for word in ("killed", "survived", "not finished")}
    print("\n".join(f"{mutant}: {text}" for mutant, text in zip(drawn, outcomes, strict=True) if text[0] != "k"))
    print(f"{len(drawn)} mutants: " + ", ".join(f"{count} {word}" for word, count in counts.items()))
    print(f"the code itself: {itself}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("sample", help="draw mutants")
    command.add_argument("folders", nargs="+")
    command.add_argument("--count", type=int, default=150)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.json")
    command.set_defaults(run=sample)
    command = commands.add_parser("run", help="run tests with each mutant")
    command.add_argument("mutants", type=Path)
    command.add_argument("tests", nargs="+", help="files or folders of tests, those first that kill most")
    command.add_argument("--processes", type=int, default=2)
    command.add_argument("--seconds", type=float, default=1e6, help="end after this time")
    command.set_defaults(run=run)
    options = parser.parse_args()
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
