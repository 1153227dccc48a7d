"""How everything here is timed, checked and written down.

Protocol: each variant runs once over several layers of distinct weights, together more than 1 GB, so that nothing comes
from L2; the run is captured into a CUDA graph. Graphs of all variants of a row are replayed in turn, round after
round, with a warm-up replay queued ahead of the two that are timed; a time is the median over rounds, per layer, and
the spread is the distance between its quartiles. Before that, every output is poisoned with NaN, the graph is
replayed, and the result must agree with the float64 oracle: a row that fails is reported as wrong and has no time.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

PROTOCOL = "CUDA graph replay, rotating layers > 1 GB, variants interleaved, median over rounds, us per layer"
BYTES_OF_LAYERS = 1_300_000_000
ERROR_BUDGET = {torch.float16: 3e-3, torch.bfloat16: 2.4e-2, torch.float32: 4e-6}


@dataclass(frozen=True)
class Variant:
    """Something to time: `run(i)` computes layer i and returns its output (or None if it has none to check)."""

    name: str
    run: Callable[[int], Tensor | None]
    layers: int
    checked: bool = True


@dataclass(frozen=True)
class Row:
    """One line of a result table."""

    case: str
    variant: str
    tokens: int
    out_features: int
    in_features: int
    n_masks: int
    dtype: str
    microseconds: float
    spread: float
    fraction_of_ceiling: float
    error: float
    extra: dict[str, object] = field(default_factory=dict)


@dataclass
class _Captured:
    variant: Variant
    graph: torch.cuda.CUDAGraph
    outputs: list[Tensor | None]
    error: float = float("nan")
    times: list[float] = field(default_factory=list)


def layers_for(bytes_per_layer: int) -> int:
    """How many layers make more than a gigabyte."""
    return max(2, -(-BYTES_OF_LAYERS // bytes_per_layer))


def _capture(variant: Variant) -> _Captured:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            variant.run(0)  # compiles, loads and warms up outside the graph
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [variant.run(i) for i in range(variant.layers)]
    return _Captured(variant, graph, outputs)


def _check(captured: _Captured, oracle: Callable[[int], Tensor], dtype: torch.dtype) -> None:
    outputs = captured.outputs
    for output in outputs:
        if output is not None:
            output.fill_(float("nan"))
    captured.graph.replay()
    torch.cuda.synchronize()
    worst = 0.0
    for i in {0, len(outputs) - 1}:
        output = outputs[i]
        assert output is not None
        expected = oracle(i)
        worst = max(worst, float((output.double() - expected).norm() / expected.norm()))
    unwritten = any(output is not None and bool(output.isnan().any()) for output in outputs)
    captured.error = float("inf") if unwritten or worst != worst else worst


def measure(
    variants: Sequence[Variant], oracle: Callable[[int], Tensor], dtype: torch.dtype, rounds: int = 25
) -> dict[str, tuple[float, float, float]]:
    """Times variants together.

    Args:
        variants: what to time.
        oracle: the float64 result of layer i.
        dtype: decides the error budget.
        rounds: timed replays of every graph.

    Returns:
        For each name, microseconds per layer (NaN if the result is wrong), their interquartile range, and the error.
    """
    captured = [_capture(variant) for variant in variants]
    for one in captured:
        if one.variant.checked:
            _check(one, oracle, dtype)
    pending: list[tuple[_Captured, torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(rounds + 2):
        for one in captured:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            one.graph.replay()
            start.record()
            one.graph.replay()
            one.graph.replay()
            end.record()
            pending.append((one, start, end))
    torch.cuda.synchronize()
    for one, start, end in pending:
        one.times.append(start.elapsed_time(end) * 500 / one.variant.layers)
    result = {}
    for one in captured:
        times = one.times[2:]
        low, _, high = statistics.quantiles(times, n=4)
        wrong = one.variant.checked and not one.error <= ERROR_BUDGET[dtype]
        result[one.variant.name] = (float("nan") if wrong else statistics.median(times), high - low, one.error)
    return result


def _cpu() -> str:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def environment(protocol: str = PROTOCOL) -> dict[str, str]:
    """What a result depends on besides the code: written beside every table."""
    git = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True, check=False)
    return {
        # MGLU_COMMIT names the code where it is measured from a copy without its history.
        "commit": os.environ.get("MGLU_COMMIT") or (git.stdout.strip() if git.returncode == 0 else "unknown"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "protocol": protocol,
    }


def write(rows: Sequence[Row], out: Path, name: str, protocol: str = PROTOCOL) -> None:
    """`<name>.csv` and `<name>.json` in a folder."""
    out.mkdir(parents=True, exist_ok=True)
    table = [asdict(row) for row in rows]
    (out / f"{name}.json").write_text(
        json.dumps({"environment": environment(protocol), "rows": table}, indent=1) + "\n"
    )
    with (out / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)
