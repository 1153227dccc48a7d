"""The results of a GPU as Markdown tables. Each function takes the folder of the results; `pages.py` names them all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.decode_model import MODELS
from benchmarks.markdown import markdown, microseconds, speedup, time_cell, time_of, times
from benchmarks.paper import GPUS, Shape
from benchmarks.records import Row, read, read_environment
from benchmarks.rows import chosen, fastest, fastest_other, masks, of, only, shapes, tokens

ONE_TOKEN = {
    "only reading the bytes": "read ceiling",
    "CUDA backend": "mglu cuda",
    "Triton backend": "mglu triton",
    "naive, best of torch.compile": "naive compiled",
    "naive, eager": "naive eager",
}
"""Label of a line to the beginning of the names of its variants."""


class MissingResultError(FileNotFoundError):
    """There is no result to make a table from."""


def rows_of(results: Path, name: str, command: str | None = None) -> list[Row]:
    """The rows of a result, which a command measures; None for `python -m mglu_ops bench` and its name.

    Raises:
        MissingResultError: it is not there.
    """
    rows = read(results, name)
    if not rows:
        command = command or f"python -m mglu_ops bench {name}"
        raise MissingResultError(f"{results / name}.csv: no such result; `{command}` measures it")
    return rows


def source(results: Path, name: str) -> str:
    """The line above a table: where, with which torch and at which commit its figures were measured."""
    run = read_environment(results, name)
    commits = ", ".join(commit[:7] for commit in run["commit"].split(", "))
    return f"`{name}.csv`: {run['device']}, torch {run['torch']}, commit {commits}."


def one_token(results: Path, name: str = "one_token") -> str:
    """Microseconds per layer of one token, shape by shape; lines are variants, columns numbers of masks."""
    rows = rows_of(results, name)
    parts = [source(results, name)]
    for shape in shapes(rows):
        here = only(rows, shape=shape, tokens=1)
        columns = [only(here, n_masks=n_masks) for n_masks in masks(here)]
        swiglu = fastest(here, "SwiGLU")
        lines = [
            [label, *(microseconds(fastest(column, variant)) for column in columns)]
            for label, variant in ONE_TOKEN.items()
            if fastest(here, variant)
        ]
        lines.append(["SwiGLU, fastest", *[microseconds(swiglu)] * len(columns)])
        head = [f"{shape[0]} x {shape[1]}, us", *(f"n_m = {n_masks}" for n_masks in masks(here))]
        parts.append(markdown(head, lines))
    return "\n\n".join(parts)


def sustained(results: Path) -> str:
    """The same under load that goes on."""
    return one_token(results, "sustained")


PAPER_HEAD = ("n_m", "GPU", "CUDA", "Triton", "Torch", "Torch/CUDA", "Torch/Triton", "GLU", "GLU/CUDA")


def paper_line(n_masks: int, gpu: str, cuda: float, triton: float, torch: float, glu: float) -> list[str]:
    """A line that joins the paper's two tables; times in microseconds."""
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
    """The paper's GPUs and ours for each number of masks; only ours where the paper has no figures."""
    here = only(rows, shape=shape, tokens=1)
    lines = []
    for n_masks in masks(here):
        for gpu, (mglu, glu) in GPUS.items():
            if (shape, n_masks) in mglu:
                figures = (*mglu[shape, n_masks], glu[shape, n_masks].glu)
                lines.append(paper_line(n_masks, f"{gpu}, paper", *(1000 * time for time in figures)))
        column = only(here, n_masks=n_masks)
        found = [time_of(fastest(column, name)) for name in ("mglu cuda", "mglu triton", "naive eager")]
        found.append(time_of(fastest(here, "SwiGLU eager")))
        measured = [time for time in found if time is not None]
        if len(measured) == len(found):
            lines.append(paper_line(n_masks, f"**{device}**", *measured))
    return lines


def paper(results: Path) -> str:
    """The paper's tables with our GPU beside its own, in microseconds."""
    rows, device = rows_of(results, "one_token"), read_environment(results, "one_token")["device"]
    parts = [
        f"{shape[0]} x {shape[1]}, us\n\n{markdown(PAPER_HEAD, paper_lines(rows, shape, device))}"
        for shape in shapes(rows)
    ]
    return "\n\n".join([source(results, "one_token"), *parts])


ROUTES_HEAD = (
    "tokens",
    "floor",
    "mglu_ops",
    "over the floor",
    "next best",
    "its time",
    "speed-up",
    "SwiGLU",
    "speed-up over SwiGLU",
)


def route_line(rows: Sequence[Row], swiglu: Row | None) -> list[str]:
    """A line for one problem: the backend that the dispatch chose, and the fastest alternatives."""
    ours, other, floor = chosen(rows), fastest_other(rows), fastest(rows, "floor")
    if ours is None:
        return []
    return [
        str(ours.tokens),
        microseconds(floor),
        f"{microseconds(ours)} ({ours.variant.removeprefix('mglu ')})",
        times(time_of(ours), time_of(floor)),
        other.variant if other else "",
        microseconds(other),
        speedup(time_of(other), time_of(ours)),
        microseconds(swiglu),
        speedup(time_of(swiglu), time_of(ours)),
    ]


def routes(results: Path) -> str:
    """A table with a line for each number of tokens, for each shape and number of masks."""
    rows = rows_of(results, "routes")
    parts = [source(results, "routes")]
    for shape in shapes(rows):
        here = only(rows, shape=shape)
        for n_masks in masks(here):
            lines = [
                route_line(only(here, n_masks=n_masks, tokens=count), fastest(only(here, tokens=count), "SwiGLU"))
                for count in tokens(only(here, n_masks=n_masks))
            ]
            parts.append(f"{shape[0]} x {shape[1]}, n_m = {n_masks}, us\n\n{markdown(ROUTES_HEAD, lines)}")
    return "\n\n".join(parts)


def floors(results: Path) -> str:
    """Times of the chosen backend and how many times the floor they are, by tokens and masks."""
    rows = rows_of(results, "tokens")
    parts = [source(results, "tokens")]
    for shape in shapes(rows):
        here = only(rows, shape=shape)
        lines = []
        for count in tokens(here):
            cells = []
            for n_masks in masks(here):
                problem = only(here, tokens=count, n_masks=n_masks)
                ours, floor = chosen(problem), fastest(problem, "floor")
                cells.append(f"{microseconds(ours)}, {times(time_of(ours), time_of(floor))}")
            lines.append([str(count), *cells])
        head = [f"tokens, {shape[0]} x {shape[1]}", *(f"n_m = {n_masks}" for n_masks in masks(here))]
        parts.append(markdown(head, lines))
    return "\n\n".join(parts)


def models(results: Path) -> str:
    """One token through the layers of current models: the fastest SwiGLU, and ours with its speed-up."""
    rows = rows_of(results, "models")
    counts = masks(rows)
    lines = []
    for shape in shapes(rows):
        here = only(rows, shape=shape, tokens=1)
        swiglu = fastest(here, "SwiGLU")
        cells = []
        for n_masks in counts:
            ours = chosen(only(here, n_masks=n_masks))
            cells.append(f"{microseconds(ours)}, {times(time_of(swiglu), time_of(ours))}")
        lines.append([here[0].case, f"{shape[0]} x {shape[1]}", microseconds(swiglu), *cells])
    head = ["layer of", "d x h", "SwiGLU, us", *(f"SwiMGLU, n_m = {n_masks}" for n_masks in counts)]
    return f"{source(results, 'models')}\n\n{markdown(head, lines)}"


DECODE_HEAD = ("feed-forward layer", "MB of weights", "ms a step", "tokens a second", "over SwiGLU", "of reading")


def decode_model(results: Path) -> str:
    """Tokens a second of whole models, from the fastest compilation of each."""
    rows = rows_of(results, "decode_model")
    parts = [source(results, "decode_model")]
    for shape in shapes(rows):
        for batch in tokens(only(rows, shape=shape)):
            lines = _decode_lines(only(rows, shape=shape, tokens=batch))
            sequences = "one sequence" if batch == 1 else f"{batch} sequences"
            parts.append(f"{models_of(shape)}, {sequences}:\n\n{markdown(DECODE_HEAD, lines)}")
    return "\n\n".join(parts)


def models_of(shape: Shape) -> str:
    """The name of the model that decodes with layers of a shape."""
    names = [name for name, of in MODELS.items() if (of.intermediate, of.hidden) == shape]
    return names[0] if names else f"{shape[0]} x {shape[1]}"


def _decode_lines(rows: Sequence[Row]) -> list[list[str]]:
    swiglu = fastest(rows, "SwiGLU")
    lines = []
    for n_masks in sorted({row.n_masks for row in rows}):
        best = fastest(only(rows, n_masks=n_masks), "SwiGLU", "SwiMGLU")
        if best is None:
            continue
        lines.append(
            [
                f"SwiMGLU, n_m = {n_masks}" if n_masks else "SwiGLU",
                str(best.extra["weight_mb"]),
                f"{best.microseconds / 1000:.3f}",
                f"{best.tokens * 1e6 / best.microseconds:.0f}",
                times(time_of(swiglu), best.microseconds),
                f"{best.fraction_of_ceiling:.2f}",
            ]
        )
    return lines


def tokens_a_second(row: Row | None) -> str:
    """The rate of a row; empty for no row."""
    return time_cell(row, lambda time: f"{row.tokens * 1e6 / time:.0f}" if row else "")


def generate(results: Path) -> str:
    """Tokens a second of `generate` with each form of a model, by the number of sequences and masks."""
    rows = rows_of(results, "generate")
    counts = masks(rows)
    parts = [source(results, "generate")]
    for shape, batch in sorted({(row.shape, row.tokens) for row in rows}):
        here = only(rows, shape=shape, tokens=batch)
        lines = []
        for form in dict.fromkeys(row.variant for row in here):
            found = [of(only(here, n_masks=n_masks), form) for n_masks in (0, *counts)]
            lines.append([form, *map(tokens_a_second, found)])
        sequences = "one sequence" if batch == 1 else f"{batch} sequences"
        head = [f"{models_of(shape)}, {sequences}, tokens a second", "without masks"]
        parts.append(markdown([*head, *(f"n_m = {n_masks}" for n_masks in counts)], lines))
    return "\n\n".join(parts)


def masks_at_inference(results: Path) -> str:
    """Microseconds per call, by the way in which a naive layer is fused."""
    rows = rows_of(results, "masks_at_inference_cuda")
    lines = []
    for variant in dict.fromkeys(row.variant for row in rows):
        here = only(rows, variant=variant)
        cells = [microseconds(fastest(only(here, n_masks=n_masks), variant)) for n_masks in masks(rows)]
        lines.append([variant, str(here[0].extra["packed"]), *cells])
    head = ["us a call", "masks are made or packed", *(f"n_m = {n_masks}" for n_masks in masks(rows))]
    return f"{source(results, 'masks_at_inference_cuda')}\n\n{markdown(head, lines)}"


def overheads(results: Path) -> str:
    """Host time per call, and the first call of a kernel in a process."""
    rows = rows_of(results, "overheads")
    parts = [source(results, "overheads")]
    for case in dict.fromkeys(row.case for row in rows):
        lines = [
            [row.variant, str(row.tokens), str(row.n_masks), microseconds(row), f"{row.spread:.1f}"]
            for row in only(rows, case=case)
        ]
        parts.append(markdown((case, "tokens", "n_m", "us", "spread, us"), lines))
    return "\n\n".join(parts)


def tensor_parallel(results: Path) -> str:
    """Microseconds per layer on one rank and on several, and how many times as fast several are."""
    rows = rows_of(results, "tensor_parallel", "torchrun --standalone --nproc-per-node 2 -m benchmarks.tensor_parallel")
    one, several = dict.fromkeys(row.variant for row in rows)
    lines = []
    for shape in shapes(rows):
        for case in dict.fromkeys(row.case for row in rows):
            for count in tokens(only(rows, case=case)):
                line = [f"{shape[0]} x {shape[1]}", case, str(count)]
                for n_masks in masks(rows):
                    here = only(rows, shape=shape, case=case, tokens=count, n_masks=n_masks)
                    before, after = of(here, one), of(here, several)
                    gain = speedup(time_of(before), time_of(after))
                    line.append(f"{microseconds(before)}, {microseconds(after)}: {gain}" if here else "")
                lines.append(line)
    head = ["out x in", "work", "tokens", *(f"{one}, {several}, us: n_m = {n_masks}" for n_masks in masks(rows))]
    return f"{source(results, 'tensor_parallel')}\n\n{markdown(head, lines)}"
