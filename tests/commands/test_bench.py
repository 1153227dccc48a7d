"""The parts of the benchmarks that need no GPU: arithmetic, results, the command and the tables."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks import decode, pages, suites
from benchmarks.ceiling import GEMM_TOKENS, floor
from benchmarks.records import Row, read, read_table, write, write_table
from benchmarks.timing import relative_error, summarise
from mglu_ops import bench
from mglu_ops.__main__ import main
from mglu_ops.timer import BYTES_OF_LAYERS, layers_for
from tests.support.commands import row

NAN = float("nan")


def test_floor_is_the_larger_of_reading_and_arithmetic() -> None:
    product = 400.0  # microseconds of one product of 8192 tokens
    assert floor(10.0, product, tokens=GEMM_TOKENS, n_masks=4) == 5 * product
    assert floor(10.0, product, tokens=64, n_masks=4) == 5 * product / 128
    assert floor(10.0, product, tokens=16, n_masks=1) == 10.0
    assert floor(10.0, None, tokens=1, n_masks=16) == 10.0


def test_layers_exceed_a_gigabyte() -> None:
    for size in (1_000_000, 33_554_432, 470_000_000):
        assert layers_for(size) * size >= BYTES_OF_LAYERS > (layers_for(size) - 1) * size
    assert layers_for(10**10) == 2


def test_error_is_infinite_for_nan_and_for_no_output() -> None:
    expected = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, NAN]), expected) == math.inf
    assert relative_error(None, expected) == math.inf


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = [
        row("mglu cuda", 10.25, extra={"chosen": True, "packed": "at each call, twice"}),
        row("naive, of a name with a comma", NAN, error=math.inf),
        row("read ceiling", 9.5, error=NAN, fraction_of_ceiling=1.0, extra={"peak_mb": 500.0, "errors": {"y": 0.002}}),
    ]
    write(written, tmp_path, "some", "by the clock:\n  # twice")
    assert [path.name for path in tmp_path.iterdir()] == ["some.csv"]
    found = read(tmp_path, "some")
    assert [repr(one) for one in found] == [repr(one) for one in written]  # NaN is not equal to itself
    assert [one.is_wrong for one in found] == [False, True, False]
    assert "WRONG" in str(found[1])
    assert "chosen True" in str(found[0])
    assert read(tmp_path, "another") == []
    facts = read_table(tmp_path / "some.csv")[0]
    assert facts["protocol"] == "by the clock: # twice"
    assert {"commit", "device", "torch", "triton", "cuda", "python"} < set(facts)


def test_tables_of_other_columns_are_read_as_text(tmp_path: Path) -> None:
    write_table([{"variant": "# one, two", "least": 1.5}], {"load": "0.10 0.20"}, tmp_path, "other")
    assert read_table(tmp_path / "other.csv") == ({"load": "0.10 0.20"}, [{"variant": "# one, two", "least": "1.5"}])


def test_summary_of_times_is_their_median_and_interquartile_range() -> None:
    assert summarise([3.0, 1.0, 2.0]) == (2.0, 2.0)
    assert summarise([5.0, 1.0, 4.0, 2.0, 3.0, 7.0, 6.0]) == (4.0, 4.0)
    assert summarise([3.0]) == (3.0, 0.0)


def test_sweep_measures_each_problem_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []

    def measured(one: decode.Problem, rounds: int) -> list[Row]:
        (d, h), (n_masks,), tokens, case = one.shape, one.masks, one.tokens, one.case
        assert one.settle_seconds == 0.25
        calls.append((d, h, n_masks, tokens, one.baselines, one.tuned, case))
        assert one.weight_format == (case if case == "fp8_row" else "dense")
        return [row("mglu cuda", 1.0, n_masks, tokens, out_features=d, in_features=h, case=case)]

    monkeypatch.setattr(decode, "bench", measured)
    shapes = {(64, 32): "a", (32, 16): "b"}
    sweep = decode.Sweep((1, 2), (1, 4), baselines=("naive", "swiglu"), shapes=shapes, settle_seconds=0.25)
    found = sweep.result("some").run(tmp_path)
    assert calls[:4] == [
        (64, 32, 1, 1, ("naive", "swiglu"), True, "a"),
        (64, 32, 4, 1, ("naive",), True, "a"),  # SwiGLU has no masks, so it is measured for one number only
        (64, 32, 1, 2, ("naive", "swiglu"), False, "a"),
        (64, 32, 4, 2, ("naive",), False, "a"),
    ]
    assert len(calls) == len(found) == len(read(tmp_path, "some")) == 8
    assert "in turns of 0.5 s" in read_table(tmp_path / "some.csv")[0]["protocol"]
    calls.clear()
    replace(sweep, weight_formats=("dense", "fp8_row")).result("some").run(tmp_path)
    assert [case for *_, case in calls[:8]] == ["a"] * 4 + ["fp8_row"] * 4
    assert sweep.quick() == replace(sweep, tokens=(1,), masks=(1,), shapes={(32, 16): "b"}, settle_seconds=0.0)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["bench", *arguments]) == 2
    return capsys.readouterr().err


def test_command_lists_its_suites(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(suites.SUITES)


def test_command_says_what_it_needs(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no suite is named latency; there are one_token, " in error_of(capsys, "latency")
    assert "models needs a CUDA GPU, and torch" in error_of(capsys, "tables", "models")
    assert "`bench tables plots` works anywhere" in error_of(capsys)
    assert f"{tmp_path}: no results are here to make tables from" in error_of(capsys, "tables", "--out", str(tmp_path))
    monkeypatch.setattr(suites, "version", lambda name: "not installed")
    assert "tables needs pandas: pip install pandas" in error_of(capsys, "tables")
    assert "plots needs matplotlib and pandas: pip install matplotlib pandas" in error_of(capsys, "plots")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "one_token needs cuda-core: pip install cuda-core" in error_of(capsys, "one_token")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert "clone, run `pip install -e .`" in error_of(capsys)


def test_command_leaves_out_the_plots_without_their_packages(capsys, monkeypatch, tmp_path):
    ran: list[str] = []

    def suite(name: str, needs: tuple[str, ...]) -> suites.Suite:
        def run(out: Path) -> Sequence[Row]:
            ran.append(name)
            return [row("mglu cuda", NAN)]

        return suites.Suite(name, lambda out: [], run, needs)

    monkeypatch.setattr(suites, "SUITES", {"measure": suite("measure", ()), "draw": suite("draw", ("matplotlib",))})
    monkeypatch.setattr(suites, "version", lambda name: "not installed")
    assert main(["bench", "--quick", "--out", str(tmp_path)]) == 1  # a row is wrong
    assert ran == ["measure"]
    printed = capsys.readouterr().out
    assert "draw is left out: it needs matplotlib" in printed
    assert "WRONG: 8192x2048" in printed


@patch.dict(sys.modules, {"pandas": None})
def test_measuring_does_not_import_pandas() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]
    for name in ("compile_time", "cpu", "generate", "packages", "suites", "tensor_parallel"):
        importlib.import_module(f"benchmarks.{name}")
    for name in ("cost", "experiments"):
        importlib.import_module(f"benchmarks.learning.{name}")


def test_routes_show_where_we_lose(tmp_path: Path) -> None:
    problem = [
        row("floor", 80.0),
        row("mglu cuda", 100.0, extra={"chosen": True}),
        row("mglu composite", 300.0),
        row("naive eager", 250.0),
        row("naive compiled", NAN),
    ]

    def lines(*others: Row) -> list[str]:
        write([*problem, *others], tmp_path, "routes", "by the clock")
        return pages.TABLES["routes"](tmp_path).splitlines()[2:]

    won = lines(row("SwiGLU compiled", 150.0))
    assert won[0] == "8192 x 2048, n_m = 1, us"
    assert won[4] == "| 1 | 80.0 | 100.0 (cuda) | 1.25x | naive eager | 250.0 | 2.50x | 150.0 | 1.50x |"
    lost = lines(row("naive compiled, bool masks", 90.0), row("SwiGLU compiled", 50.0))[4]
    assert lost.endswith("| naive compiled, bool masks | 90.0 | **0.90x, slower** | 50.0 | **0.50x, slower** |")
    (wrong,) = [line for line in lines(row("mglu cuda", NAN, tokens=2, extra={"chosen": True})) if "| 2 |" in line]
    assert wrong == "| 2 |  | wrong (cuda) |  |  |  |  |  |  |"


def test_marked_tables_are_replaced_and_the_rest_of_a_page_stays(tmp_path: Path) -> None:
    write([row("mglu cuda", 10.0), row("SwiGLU eager", 20.0)], tmp_path, "sustained", "by the clock")
    page = "# A\n\n<!-- table: sustained -->\nold\n<!-- end -->\n\nafter\n"
    filled = pages.fill(page, tmp_path)
    assert filled.startswith("# A\n\n<!-- table: sustained -->\n\n`sustained.csv`: ")
    assert filled.endswith("| SwiGLU, fastest | 20.0 |\n\n<!-- end -->\n\nafter\n")
    assert pages.fill(filled, tmp_path) == filled
    with pytest.raises(FileNotFoundError, match=r"one_token\.csv: no such result; benchmarks/README\.md"):
        pages.fill(page.replace("sustained", "one_token"), tmp_path)


def test_results_in_another_folder_get_tables_of_their_own(tmp_path: Path) -> None:
    write([row("mglu cuda", 10.0), row("SwiGLU eager", 20.0)], tmp_path, "sustained", "by the clock")
    write(
        [row("mglu cuda", 10.0, extra={"chosen": True}), row("SwiGLU eager", 20.0)], tmp_path, "models", "by the clock"
    )
    assert main(["bench", "tables", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "tables.md").read_text()
    assert text.startswith("## One token under sustained load\n")
    assert "| SwiGLU, fastest | 20.0 |" in text
    assert "\n## models\n" in text, "tables of other pages follow"
    assert text.count("<!-- table: ") == 2


def test_a_short_table_compares_with_swiglu_beside_the_same_number_of_masks(tmp_path: Path) -> None:
    case = {"case": "350M, autocast"}
    rows = [
        *(row("SwiGLU", time, n_masks, **case) for n_masks, time in ((1, 30.0), (4, 20.0))),
        *(row("naive", time, n_masks, **case) for n_masks, time in ((1, 20.0), (4, 100.0))),
        *(row("fused", time, n_masks, **case) for n_masks, time in ((1, 25.0), (4, 40.0))),
        row("SwiGLU", 1.0, case="another"),
    ]
    for name in ("train", "train_experts", "train_model"):
        facts = {"device": "NVIDIA H200", "torch": "2.11", "commit": "1234567"}
        write(rows, tmp_path, name, facts)
    assert pages.TABLES["summary_training"](tmp_path).splitlines() == [
        "| work | fastest SwiGLU | n_m = 1 | n_m = 4 |",
        "| --- | --- | --- | --- |",
        "| H200: whole model, 350M, autocast | 20.0 us to 30.0 us | 25.0 us (1.20x, **0.80x**) "
        "| 40.0 us (**0.50x**, 2.50x) |",
    ]
