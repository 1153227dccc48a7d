"""The cost model of `tile_wgmma`: its constants are fitted to the committed timings, and its choices are fast."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from mglu_ops.backends.cuda.device import KNOWN_GPUS
from mglu_ops.backends.cuda.kernels import tile_wgmma_costs
from mglu_ops.backends.cuda.kernels.tile_wgmma_choice import fastest
from mglu_ops.backends.cuda.kernels.tile_wgmma_costs import CostModelError, costs_of, read, write
from mglu_ops.tuning.fit import (
    START,
    error_of,
    fit,
    launches_to_measure,
    read_timings,
    regret_of,
    sampled_calls,
    write_timings,
)

H200 = KNOWN_GPUS[9, 0]
TIMINGS = Path(__file__).parents[2] / "benchmarks/results/tile_wgmma_timings.csv"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    tile_wgmma_costs._costs_of.cache_clear()
    yield
    tile_wgmma_costs._costs_of.cache_clear()


def numbers(value: Any) -> list[float]:
    return [number for item in value for number in (numbers(item) if isinstance(item, tuple) else [item])]


@pytest.mark.long
def test_the_committed_constants_follow_from_the_committed_timings() -> None:
    pytest.importorskip("scipy")
    timings = read_timings(TIMINGS)
    found = fit(timings, H200, START)
    assert numbers(astuple(found)) == pytest.approx(numbers(astuple(costs_of(H200))), rel=0.03)


def test_the_model_explains_the_timings_and_chooses_fast_launches() -> None:
    timings = read_timings(TIMINGS)
    assert error_of(timings, H200, costs_of(H200)) < 1.05 < error_of(timings, H200, START)
    assert regret_of(timings, H200, costs_of(H200)) < 1.01 < regret_of(timings, H200, START)


def test_timings_survive_writing_and_reading(tmp_path: Path) -> None:
    timings = read_timings(TIMINGS)[:50]
    write_timings(tmp_path / "timings.csv", timings, "some GPU")
    assert read_timings(tmp_path / "timings.csv") == timings
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv: not a file of timings"):
        read_timings(tmp_path / "other.csv")


def test_the_sample_is_reproducible_and_has_the_fastest_launches() -> None:
    calls = sampled_calls()
    assert calls == sampled_calls()
    assert {one.call for one in read_timings(TIMINGS)} == set(calls)
    for call in calls[::20]:
        launches = launches_to_measure(call, H200, START, fastest=5, others=2)
        assert launches == launches_to_measure(call, H200, START, fastest=5, others=2)
        assert launches[0] == fastest(call, H200, False, START)
        assert len(set(launches)) == 7
        assert not any(launch.violation(call, H200) for launch in launches)


def test_an_unknown_gpu_gets_the_constants_of_its_architecture_and_a_users_win(tmp_path, monkeypatch):
    assert costs_of(replace(H200, name="NVIDIA H100 PCIe", multiprocessors=114)) == costs_of(H200)
    write(tmp_path / "mine.json", {"device": "mine"}, START)
    monkeypatch.setenv(tile_wgmma_costs.VARIABLE, str(tmp_path / "mine.json"))
    tile_wgmma_costs._costs_of.cache_clear()
    assert costs_of(H200) == START


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda found: found.update(format=1), "format: got .*, must be an object with format 2"),
        (lambda found: found.pop("costs"), "environment and costs: must be objects"),
        (lambda found: found["costs"].pop("column_us"), "costs: column_us: got None, must be a number"),
        (lambda found: found["costs"].update(column_us="1"), "costs: column_us: got '1', must be a number"),
        (lambda found: found["costs"].update(column_us=-1), "costs: column_us: got -1, must be a number"),
        (lambda found: found["costs"].update(mask_columns=[1, 2]), "mask_columns: got .*, must be three numbers"),
        (lambda found: found["costs"].update(alone={"gap": 1}), "alone: got .*, must be an object of gap, fragments"),
    ],
)
def test_damaged_cost_models_are_refused_with_the_reason(damage, words, tmp_path):
    path = tmp_path / "costs.json"
    write(path, {"device": "a GPU"}, START)
    assert read(path)[1] == START
    found = json.loads(path.read_text())
    damage(found)
    path.write_text(json.dumps(found))
    with pytest.raises(CostModelError, match=f"^{re.escape(str(path))}: .*{words}"):
        read(path)
