"""The cost model of `tile_wgmma`: its constants follow from the committed timings, and its choices are fast."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from mglu_ops.backends.cuda.device import KNOWN_GPUS
from mglu_ops.backends.cuda.kernels import tile_wgmma_costs
from mglu_ops.backends.cuda.kernels.tile_wgmma_costs import CostModelError, costs_of, read, write
from mglu_ops.tuning.fit import START, error_of, fit, read_timings, regret_of, sample, write_timings

H200 = KNOWN_GPUS[9, 0]
TIMINGS = Path(__file__).parents[2] / "benchmarks/results/tile_wgmma_timings.csv"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    tile_wgmma_costs._costs_of.cache_clear()
    yield
    tile_wgmma_costs._costs_of.cache_clear()


def numbers(value: Any) -> list[float]:
    return [number for item in value for number in (numbers(item) if isinstance(item, tuple) else [item])]


def test_fitting_the_committed_timings_explains_them_better() -> None:
    pytest.importorskip("scipy")
    timings = read_timings(TIMINGS)
    found = fit(timings, H200, START)
    assert error_of(timings, H200, found) < 1.054 < error_of(timings, H200, START)
    assert regret_of(timings, H200, found) < 1.008
    assert all(0.2 <= a / b <= 5 for a, b in zip(numbers(astuple(found)), numbers(astuple(START)), strict=True) if b)


def test_the_model_explains_the_timings_and_chooses_fast_launches() -> None:
    timings = read_timings(TIMINGS)
    assert len(timings) > 1600
    assert error_of(timings, H200, costs_of(H200)) < 1.07
    assert regret_of(timings, H200, costs_of(H200)) < 1.01


def test_timings_are_written_as_they_are_read(tmp_path: Path) -> None:
    timings = read_timings(TIMINGS)[:50]
    write_timings(tmp_path / "timings.csv", timings, "some GPU")
    assert read_timings(tmp_path / "timings.csv") == timings
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv: not a file of timings"):
        read_timings(tmp_path / "other.csv")


def test_the_sample_can_run_and_is_the_same_each_time() -> None:
    first = list(sample(H200))
    assert first == list(sample(H200))
    assert sum(len(wanted) for _, _, wanted in first) == 1655


def test_a_gpu_of_another_name_has_the_constants_of_its_architecture() -> None:
    from dataclasses import replace

    assert costs_of(replace(H200, name="NVIDIA H100 PCIe", multiprocessors=114)) == costs_of(H200)


def test_a_users_constants_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "mine.json", {"device": "mine"}, START)
    monkeypatch.setenv(tile_wgmma_costs.VARIABLE, str(tmp_path / "mine.json"))
    assert costs_of(H200) == START


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda found: found.update(format=2), "format: got .*, must be an object with format 1"),
        (lambda found: found.pop("costs"), "environment and costs: must be objects"),
        (lambda found: found["costs"].pop("column_us"), "costs: column_us: got None, must be a number"),
        (lambda found: found["costs"].update(column_us="1"), "costs: column_us: got '1', must be a number"),
        (lambda found: found["costs"].update(column_us=-1), "costs: column_us: got -1, must be a number"),
        (lambda found: found["costs"].update(mask_columns=[1, 2]), "mask_columns: got .*, must be three numbers"),
        (lambda found: found["costs"].update(alone={"flips": 1}), "alone: got .*, must be an object of flips, gap, f"),
    ],
)
def test_a_file_that_is_no_cost_model_says_why(damage: Callable[[Any], Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write(path, {"device": "a GPU"}, START)
    assert read(path)[1] == START
    found = json.loads(path.read_text())
    damage(found)
    path.write_text(json.dumps(found))
    with pytest.raises(CostModelError, match=f"^{re.escape(str(path))}: .*{words}"):
        read(path)
