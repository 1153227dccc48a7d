"""The results of CPUs as Markdown tables: the kernels, the compile time and the calls of packages."""

from __future__ import annotations

from pathlib import Path

from benchmarks.markdown import markdown, speedup
from benchmarks.records import read_table
from benchmarks.rows import only
from benchmarks.tables import MissingResultError, rows_of, source

CPU_HEAD = (
    "dtype",
    "tokens",
    "n_m",
    "only reading",
    "mglu_ops",
    "fraction of reading (least, median)",
    "naive compiled",
    "speed-up",
    "fastest SwiGLU",
    "speed-up over SwiGLU",
)
CpuLine = dict[str, str]


def cpu_problems(results: Path, name: str) -> dict[tuple[str, str, str], dict[str, CpuLine]]:
    """The lines of a result of `benchmarks.cpu` by `(dtype, tokens, n_masks)` and variant.

    Raises:
        MissingResultError: the result is not there.
    """
    try:
        _, lines = read_table(results / f"{name}.csv")
    except FileNotFoundError as error:
        raise MissingResultError(f"{results / name}.csv: no such result; `benchmarks.cpu` measures it") from error
    problems: dict[tuple[str, str, str], dict[str, CpuLine]] = {}
    for line in lines:
        problems.setdefault((line["dtype"], line["tokens"], line["n_masks"]), {})[line["variant"]] = line
    return problems


def fastest_swiglu(lines: dict[str, CpuLine]) -> float | None:
    """The least time of any SwiGLU of a problem, in microseconds."""
    return min((float(line["least"]) for name, line in lines.items() if name.startswith("SwiGLU")), default=None)


def cpu(results: Path, name: str) -> str:
    """The least times of each problem, in microseconds."""
    lines = []
    for problem, variants in cpu_problems(results, name).items():
        ours, reading, naive = (variants[variant] for variant in ("mglu cpu", "read loop", "naive compiled"))
        fractions = (float(reading[time]) / float(ours[time]) for time in ("least", "median"))
        swiglu = fastest_swiglu(variants)
        lines.append(
            [
                *problem,
                reading["least"],
                f"{ours['least']} ({ours['isa']})",
                ", ".join(f"{fraction:.2f}" for fraction in fractions),
                naive["least"],
                speedup(float(naive["least"]), float(ours["least"])),
                "" if swiglu is None else f"{swiglu:.1f}",
                speedup(swiglu, float(ours["least"])),
            ]
        )
    return f"{source(results, name)}\n\n{markdown(CPU_HEAD, lines)}"


def compile_time(results: Path) -> str:
    """Seconds to compile a model, and the fusion pass's part of them."""
    rows = rows_of(results, "compile_time")
    lines = []
    for case in dict.fromkeys(row.case for row in rows):
        seconds = {row.variant: row.microseconds / 1e6 for row in only(rows, case=case)}
        # Tracing is only a part of compiling: the time is more, and the share of the pass less, than what was measured.
        more, less = ("more than ", "less than ") if "traced" in seconds else ("", "")
        without = next(seconds[name] for name in ("naive compiled", "compiled", "traced") if name in seconds)
        fused = f"{seconds['fused']:.1f}" if "fused" in seconds else ""
        share = f"{less}{100 * seconds['pass'] / without:.2f}%"
        lines.append([case, f"{more}{without:.1f}", fused, f"{seconds['pass'] * 1000:.1f}", share])
    head = ("model", "without fusion, s", "with fusion, s", "the pass, ms", "the pass, of the time without")
    return f"{source(results, 'compile_time')}\n\n{markdown(head, lines)}"


def packages(results: Path) -> str:
    """Microseconds per layer of a package that a C++ program runs."""
    try:
        _, lines = read_table(results / "packages.csv")
    except FileNotFoundError as error:
        raise MissingResultError(
            f"{results}/packages.csv: no such result; `benchmarks.packages` measures it"
        ) from error
    cells = [[line["variant"], line["device"], f"{float(line['microseconds']):.1f}"] for line in lines]
    return f"{source(results, 'packages')}\n\n{markdown(('a layer is called by', 'device', 'us a layer'), cells)}"
