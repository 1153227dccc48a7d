"""The plots of the benchmarks show the numbers of the results."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import decode, suites
from benchmarks.frames import load
from benchmarks.records import Row, read_table, write
from tests.support.commands import row


def frame_of(rows: Iterable[Row], folder: Path) -> Any:
    """The pandas frame of the rows, after a round trip through files in `folder`."""
    from benchmarks import frames

    write(rows, folder, "rows", "by the clock")
    return frames.load(folder, "rows")


@pytest.fixture
def plots() -> Any:
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    from benchmarks import plots

    return plots


def committed(name: str) -> list[dict[str, str]]:
    return read_table(suites.RESULTS / f"{name}.csv")[1]


def least(lines: list[dict[str, str]], prefix: str, **fields: object) -> float:
    """The least time of the variants that begin with `prefix`, in lines of a CSV file."""
    wanted = {name: str(value) for name, value in fields.items()}
    return min(
        float(line["microseconds"])
        for line in lines
        if line["variant"].startswith(prefix) and wanted.items() <= line.items() and line["microseconds"] != "nan"
    )


def drawn(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """The points of each line of a panel that has a label, by label."""
    return {
        line.get_label(): list(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }


def bars(axes: Any) -> dict[str, list[float]]:
    """The lengths of a panel's bars from top to bottom, by label in the legend."""
    return {bars.get_label(): [float(bar.get_width()) for bar in bars] for bars in axes.containers}


def test_layers_and_models_come_from_the_results(plots: Any) -> None:
    tables, picture = plots.PLOTS["layer_and_model"]
    figure = picture(*(load(suites.RESULTS, table) for table in tables))
    assert figure.get_suptitle() == "NVIDIA H200, bfloat16, one token at a time"
    left, right = figure.axes
    shapes = [label.get_text().splitlines()[-1].split(" x ") for label in left.get_yticklabels()]
    names = [label.get_text() for label in right.get_yticklabels()]
    assert names[:2] == ["Llama-3.1 8B", "Llama-3.1 8B\nfp8"]
    assert [tuple(map(int, shape)) for shape in shapes] == list(decode.MODEL_LAYERS)
    lines = committed("models")
    for n_masks, label in ((1, "1 mask"), (4, "4 masks"), (8, "8 masks")):
        swiglu = [least(lines, "SwiGLU", out_features=d, in_features=h) for d, h in shapes]
        ours = [least(lines, "mglu cuda", n_masks=n_masks, out_features=d, in_features=h) for d, h in shapes]
        assert bars(left)[label] == pytest.approx([theirs / mine for theirs, mine in zip(swiglu, ours, strict=True)])
    lines = committed("serve")
    for n_masks, label in ((0, "SwiGLU"), (1, "1 mask"), (4, "4 masks")):
        rates = bars(right)[label]
        for name, rate in zip(names[:2], rates, strict=False):
            variant = ("SwiMGLU" if n_masks else "SwiGLU") + (", fp8" if "fp8" in name else "")
            (time,) = (
                float(line["microseconds"])
                for line in lines
                if line["case"] == "Llama-3.1 8B, decode"
                and (line["variant"], line["tokens"], line["n_masks"]) == (variant, "1", str(n_masks))
            )
            assert rate == pytest.approx(1e6 / time)
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ["SwiGLU", "1 mask", "4 masks", "8 masks"]


def test_roofs_and_speedup_of_a_small_table(plots: Any, tmp_path: Path) -> None:
    chosen = {"chosen": True}
    rows = [
        *(row("read ceiling", 10.0, n_masks=4, tokens=tokens) for tokens in (1, 1024)),
        row("mglu cuda", 12.5, n_masks=4, extra=chosen),
        row("mglu cuda", 320.0, n_masks=4, tokens=1024, extra=chosen),
        row("SwiGLU eager", 25.0, n_masks=4),
        row("SwiGLU compiled", 20.0, n_masks=4),
        row("SwiGLU compiled", 160.0, n_masks=4, tokens=1024),
        row("library GEMM", 400.0, n_masks=4, tokens=1024, extra={"of_tokens": 8192, "tflops": 700.0}),
    ]
    table = frame_of(rows, tmp_path)
    speedup = drawn(plots.speedup_over_swiglu(table).axes[0])
    assert speedup == {"n_m = 4": [(1, 1.6), (1024, 0.5)]}
    roofs = drawn(plots.roofline(table).axes[0])
    bandwidth = 8192 * 2048 * 2.5 / 10e-6 / 1e12  # TB/s
    (low, ridge), (same, high) = roofs["read ceiling"], roofs["library GEMM"]
    assert low == pytest.approx((4, 4 * bandwidth))
    assert ridge == same == pytest.approx((700 / bandwidth, 700))
    assert high == pytest.approx((4 * 1024, 700))


@pytest.mark.long
def test_plots_repeat_byte_for_byte_and_name_their_result(plots: Any, tmp_path: Path) -> None:
    paths = plots.draw(suites.RESULTS, tmp_path)
    assert [path.stem for path in paths] == list(plots.PLOTS)
    shutil.copy(suites.RESULTS / "tokens.csv", tmp_path)
    (again,) = plots.draw(tmp_path, tmp_path / "again")
    assert again.read_bytes() == (tmp_path / again.name).read_bytes()
    for path in paths:
        tables, _ = plots.PLOTS[path.stem]
        source = plots.source(suites.RESULTS, *tables)
        assert source in path.read_text()
        assert len(path.read_bytes()) < 100_000
        assert source in (suites.RESULTS / path.name).read_text(), "`python -m mglu_ops bench plots` draws it again"


def test_plots_need_results(plots: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no results are here"):
        plots.draw(tmp_path, tmp_path)
