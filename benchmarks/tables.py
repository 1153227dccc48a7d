"""The results as Markdown, from the CSV files alone: one token, the paper's tables with our GPU beside its own, every
route by number of tokens, the layers of today's models, decoding with a whole model, and CPUs.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.harness import Row, read, read_environment
from benchmarks.paper import GPUS, Shape
from benchmarks.rows import chosen, fastest, fastest_other, masks, only, shapes, tokens

FILE = "tables.md"


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table, its cells as they are."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def microseconds(row: Row | None) -> str:
    if row is None:
        return ""
    return "wrong" if row.is_wrong else f"{row.microseconds:.1f}"


def times(above: float | None, below: float | None) -> str:
    """`above / below`, as `1.79x`."""
    return f"{above / below:.2f}x" if above and below else ""


def _time(row: Row | None) -> float | None:
    return None if row is None or row.is_wrong else row.microseconds


ONE_TOKEN = {
    "only reading the bytes": "read ceiling",
    "CUDA backend": "mglu cuda",
    "Triton backend": "mglu triton",
    "naive, best of torch.compile": "naive compiled",
    "naive, eager": "naive eager",
}
"""Label to what its variants begin with."""


def one_token(rows: Sequence[Row], device: str) -> str:
    """What one token takes, shape by shape: rows are variants, columns numbers of masks."""
    parts = []
    for shape in shapes(rows):
        here = only(rows, shape=shape, tokens=1)
        columns = [only(here, n_masks=n_masks) for n_masks in masks(here)]
        swiglu = fastest(here, "SwiGLU")
        lines = [
            [label, *(microseconds(fastest(column, variant)) for column in columns)]
            for label, variant in ONE_TOKEN.items()
        ]
        lines.append(["SwiGLU, fastest", *[microseconds(swiglu)] * len(columns)])
        head = [f"{shape[0]} x {shape[1]}, us on one {device}", *(f"n_m = {n_masks}" for n_masks in masks(here))]
        parts.append(markdown(head, lines))
    return "\n\n".join(parts)


PAPER_HEAD = ("n_m", "GPU", "CUDA", "Triton", "Torch", "Torch/CUDA", "Torch/Triton", "GLU", "GLU/CUDA")


def paper_line(n_masks: int, gpu: str, cuda: float, triton: float, torch: float, glu: float) -> list[str]:
    """A line of the paper's two tables in one; times in microseconds."""
    ratios = [times(torch, cuda), times(torch, triton)]
    return [
        str(n_masks),
        gpu,
        *(f"{time:.1f}" for time in (cuda, triton, torch)),
        *ratios,
        f"{glu:.1f}",
        times(glu, cuda),
    ]


def paper_lines(rows: Sequence[Row], shape: Shape, device: str) -> list[list[str]]:
    """For each number of masks, the paper's GPUs and ours; ours alone where the paper has none."""
    here = only(rows, shape=shape, tokens=1)
    lines = []
    for n_masks in masks(here):
        for gpu, (of_mglu, of_glu) in GPUS.items():
            if (shape, n_masks) in of_mglu:
                figures = (*of_mglu[shape, n_masks], of_glu[shape, n_masks].glu)
                lines.append(paper_line(n_masks, f"{gpu}, paper", *(1000 * time for time in figures)))
        column = only(here, n_masks=n_masks)
        found = [_time(fastest(column, name)) for name in ("mglu cuda", "mglu triton", "naive eager")]
        found.append(_time(fastest(here, "SwiGLU eager")))
        measured = [time for time in found if time is not None]
        if len(measured) == len(found):
            lines.append(paper_line(n_masks, f"**{device}**", *measured))
    return lines


def paper(rows: Sequence[Row], device: str) -> str:
    return "\n\n".join(
        f"{shape[0]} x {shape[1]}\n\n{markdown(PAPER_HEAD, paper_lines(rows, shape, device))}" for shape in shapes(rows)
    )


ROUTES_HEAD = (
    "tokens",
    "floor",
    "ours",
    "over the floor",
    "next best",
    "it takes",
    "ours is",
    "SwiGLU",
    "against SwiGLU",
)


def route_line(rows: Sequence[Row], swiglu: Row | None) -> list[str]:
    """One problem: what the dispatch chose, and what else there is."""
    ours, other, floor = chosen(rows), fastest_other(rows), fastest(rows, "floor")
    if ours is None:
        return []
    versus = times(_time(other), _time(ours))
    loses = other is not None and not ours.is_wrong and other.microseconds < ours.microseconds
    return [
        str(ours.tokens),
        microseconds(floor),
        f"{microseconds(ours)} ({ours.variant.removeprefix('mglu ')})",
        times(_time(ours), _time(floor)),
        other.variant if other else "",
        microseconds(other),
        f"**{versus}, slower**" if loses else versus,
        microseconds(swiglu),
        times(_time(swiglu), _time(ours)),
    ]


def routes(rows: Sequence[Row], device: str) -> str:
    """Shape by shape and number of masks, a line for each number of tokens; those where we lose are in bold."""
    parts = []
    for shape in shapes(rows):
        here = only(rows, shape=shape)
        for n_masks in masks(here):
            lines = [
                route_line(only(here, n_masks=n_masks, tokens=count), fastest(only(here, tokens=count), "SwiGLU"))
                for count in tokens(only(here, n_masks=n_masks))
            ]
            title = f"{shape[0]} x {shape[1]}, n_m = {n_masks}, us on one {device}"
            parts.append(f"{title}\n\n{markdown(ROUTES_HEAD, filter(None, lines))}")
    return "\n\n".join(parts)


def models(rows: Sequence[Row], device: str) -> str:
    """The layers of today's models for one token: the fastest SwiGLU, and ours with its speed-up over that."""
    counts = masks(rows)
    lines = []
    for shape in shapes(rows):
        here = only(rows, shape=shape, tokens=1)
        swiglu = fastest(here, "SwiGLU")
        cells = []
        for n_masks in counts:
            ours = chosen(only(here, n_masks=n_masks))
            cells.append(f"{microseconds(ours)}, {times(_time(swiglu), _time(ours))}")
        lines.append([here[0].case, f"{shape[0]} x {shape[1]}", microseconds(swiglu), *cells])
    head = ["layer of", "d x h", f"SwiGLU, us on one {device}", *(f"SwiMGLU, n_m = {n_masks}" for n_masks in counts)]
    return markdown(head, lines)


def decode_model(rows: Sequence[Row], device: str) -> str:
    """Tokens a second of a whole model, by its feed-forward layer: of the fastest compilation of each."""
    swiglu = fastest(rows, "SwiGLU")
    lines = []
    for n_masks in sorted({row.n_masks for row in rows}):
        here = only(rows, n_masks=n_masks)
        best = fastest(here, "SwiGLU", "SwiMGLU")
        if best is None:
            continue
        lines.append(
            [
                f"SwiMGLU, n_m = {n_masks}" if n_masks else "SwiGLU",
                str(best.extra["weight_mb"]),
                f"{best.microseconds / 1000:.3f}",
                f"{1e6 / best.microseconds:.0f}",
                times(_time(swiglu), best.microseconds),
                f"{best.fraction_of_ceiling:.2f}",
            ]
        )
    head = (f"one {device}", "MB of weights", "ms a token", "tokens a second", "against SwiGLU", "of reading the bytes")
    return markdown(head, lines)


SECTIONS: dict[str, tuple[str, Callable[[Sequence[Row], str], str]]] = {
    "One token": ("one_token", one_token),
    "One token, as it goes on": ("sustained", one_token),
    "The paper's tables": ("one_token", paper),
    "Routes by number of tokens": ("routes", routes),
    "Numbers of tokens and masks against the floor": ("tokens", routes),
    "Layers of models, one token": ("models", models),
    "Decoding with a model of Llama-3.2 1B's shape": ("decode_model", decode_model),
}
"""Title to the table of results that a section is drawn from, and how."""


CPU_HEAD = (
    "dtype",
    "tokens",
    "n_m",
    "only reading",
    "ours",
    "of reading, by least and by median",
    "naive compiled",
    "ours is",
    "fastest SwiGLU",
    "against SwiGLU",
)


def cpu(path: Path) -> str:
    """A table of `benchmarks.cpu`: the least times of a problem, in microseconds; those where we lose are in bold."""
    problems: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            problems.setdefault((row["dtype"], row["tokens"], row["n_masks"]), {})[row["variant"]] = row
    lines = []
    for problem, rows in problems.items():
        ours, reading, naive = (rows[name] for name in ("mglu cpu", "read loop", "naive compiled"))
        fractions = (float(reading[time]) / float(ours[time]) for time in ("least", "median"))
        swiglu = min((float(row["least"]) for name, row in rows.items() if name.startswith("SwiGLU")), default=None)
        gain = times(float(naive["least"]), float(ours["least"]))
        lines.append(
            [
                *problem,
                reading["least"],
                f"{ours['least']} ({ours['isa']})",
                ", ".join(f"{fraction:.2f}" for fraction in fractions),
                naive["least"],
                gain if float(naive["least"]) >= float(ours["least"]) else f"**{gain}, slower**",
                "" if swiglu is None else f"{swiglu:.1f}",
                times(swiglu, float(ours["least"])),
            ]
        )
    return markdown(CPU_HEAD, lines)


CPU_SECTIONS = {
    "One token on a CPU with AVX2, 8192 x 2048": "cpu_one_token",
    "Tokens on a CPU with AVX2, 2048 x 2048": "cpu_tokens",
    "One token on a CPU with AVX-512, 8192 x 2048": "cpu_one_token_xeon",
    "Tokens on a CPU with AVX-512 and AMX, 2048 x 2048": "cpu_tokens_xeon",
}


def write_tables(out: Path) -> Path:
    """Write `tables.md` from the results in a folder; those that are not there have no section.

    Raises:
        FileNotFoundError: none of them is there.
    """
    drawn: list[tuple[str, str, str]] = []
    for title, (name, draw) in SECTIONS.items():
        if rows := read(out, name):
            drawn.append((title, name, draw(rows, read_environment(out, name)["device"])))
    for title, name in CPU_SECTIONS.items():
        if (table := out / f"{name}.csv").is_file():
            drawn.append((title, name, cpu(table)))
    if not drawn:
        raise FileNotFoundError(f"{out}: no results are here to draw from; measure some first")
    parts = ["# Results\n\nDrawn from the CSV files beside this one by `python -m mglu_ops bench tables`."]
    for title, name, text in drawn:
        run = read_environment(out, name)
        source = f"{name}.csv: {run['device']}, torch {run['torch']}, commit {run['commit'][:7]}. {run['protocol']}."
        parts.append(f"## {title}\n\n{source}\n\n{text}")
    path = out / FILE
    path.write_text("\n\n".join(parts) + "\n")
    return path
