"""Runs of the experiments about learning that stop, are killed, or share a folder with other processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from filelock import FileLock

from benchmarks.learning import cost, experiments, formats, gather, train, training
from benchmarks.learning.recipe import Recipe
from benchmarks.records import read_table, write_table
from mglu_ops.formats import FORMATS
from tests.support.learning import rows_of, tiny_run

pytest_plugins = ["tests.support.learning"]
pytestmark = pytest.mark.usefixtures("tiny")


def test_a_run_stops_before_a_point_that_would_be_too_late(text, tmp_path, monkeypatch):
    one, now = tiny_run(text, 20, layer="glu"), [0.0]
    monkeypatch.setattr(train.time, "perf_counter", lambda: now[0])
    advance = training.Training.advance

    def slow(run: training.Training, last: int) -> None:
        advance(run, last)
        now[0] += 10

    monkeypatch.setattr(training.Training, "advance", slow)
    assert not train.run(one, text, tmp_path, "cpu", limit=25, compiled=False)
    assert now[0] == 20
    assert train.run(one, text, tmp_path, "cpu", limit=25, compiled=False)


def test_experiments_go_on_where_they_stopped(text, prepared, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(experiments.EXPERIMENTS, "layers", [tiny_run(text, 4, n_masks=n) for n in (1, 2)])
    trained: list[str] = []

    def run(one: Recipe, *_: object) -> bool:
        trained.append(one.name)
        write_table([{"step": "1"}], {"corpus.digest": text.sizes.digest}, tmp_path / "out", one.name)
        return True

    monkeypatch.setattr(experiments, "run", run)
    common = ["experiments", "--only", "layers", "--out", str(tmp_path / "out"), "--corpus", str(prepared)]
    for seconds in ("29", "100", "100"):  # 29 s are too short to start a run: LEAST_SECONDS
        monkeypatch.setattr("sys.argv", [*common, "--seconds", seconds])
        experiments.main()
    assert len(trained) == 2
    assert "the time is over; 2 runs are left" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*common, "--seeds", "0", "1", "--list"])
    experiments.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3  # the runs of the other seed, and a line with their sum
    assert all("seed=1" in line for line in lines[:2])
    assert float(lines[2].split()[0]) == pytest.approx(sum(float(line.split()[0]) for line in lines[:2]), abs=0.1)
    monkeypatch.setattr("sys.argv", [*common, "--scale", "0.5"])
    experiments.main()
    assert len(trained) == 4
    assert all("megabytes=" in name for name in trained[2:])
    gather.gather([tmp_path / "out"], tmp_path / "tables", "python")
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    capsys.readouterr()
    for done in ([], [str(tmp_path / "tables")]):
        monkeypatch.setattr("sys.argv", [*common, "--list", "--done", *done])
        experiments.main()
        assert len(capsys.readouterr().out.splitlines()) == (1 if done else 3)
    write_table([{"step": "1"}], {"corpus.digest": text.sizes.digest}, tmp_path / "out", trained[0])
    path = tmp_path / "out" / f"{trained[0]}.csv"
    path.write_text(path.read_text().replace(text.sizes.digest, "another"))
    monkeypatch.setattr("sys.argv", common)
    with pytest.raises(ValueError, match="the result is of the text another, not"):
        experiments.main()


def test_processes_that_share_a_folder_leave_out_each_others_runs(text, prepared, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    one, other = (experiments.scaled(tiny_run(text, 4, layer="glu", seed=seed), 1.0) for seed in (0, 1))
    monkeypatch.setitem(experiments.EXPERIMENTS, "layers", [one, other])
    monkeypatch.setattr(experiments, "run", lambda *arguments: train.run(*arguments, compiled=False))
    common = ["experiments", "--only", "layers", "--out", str(out), "--corpus", str(prepared), "--device", "cpu"]
    monkeypatch.setattr("sys.argv", [*common, "--done"])
    out.mkdir()
    with FileLock(out / f"{one.name}.lock", timeout=0):  # as if another process trained `one`
        experiments.main()
    assert f"{one.name}: another process trains it" in capsys.readouterr().out
    assert [path.name for path in out.glob("*.csv")] == [f"{other.name}.csv"]
    experiments.main()
    assert len(list(out.glob("*.csv"))) == 2


def test_a_conversion_waits_for_the_process_that_trains_its_teacher(text, tmp_path):
    teacher = tiny_run(text, 8, layer="glu")
    one = tiny_run(text, 4, start="magnitude", skip=teacher.megabytes)
    assert one.teacher == replace(teacher, lr=Recipe.lr)
    with FileLock(tmp_path / f"{one.teacher.name}.lock", timeout=0):
        assert not train.run(one, text, tmp_path, "cpu", limit=0.1, compiled=False)
        threads = ThreadPoolExecutor(1)
        result = threads.submit(train.run, one, text, tmp_path, "cpu", compiled=False)
        with pytest.raises(TimeoutError):
            result.result(0.2)
        assert not list(tmp_path.glob("*.pt")), "nothing is trained meanwhile"
    assert result.result(60)
    assert (tmp_path / f"{one.name}.csv").is_file()


@pytest.mark.long
def test_trained_models_are_evaluated_with_weights_in_each_format(text, tmp_path, monkeypatch):
    recipes = [tiny_run(text, 20, layer="glu"), tiny_run(text, 20, n_masks=2)]
    runs, out = tmp_path / "runs", tmp_path / "out"
    assert not formats.measure(recipes, text, runs, out, "cpu", seconds=29, compiled=False)  # too short to start
    assert formats.measure(recipes, text, runs, out, "cpu", compiled=False)
    facts, rows = read_table(out / f"{formats.NAME}.csv")
    assert facts["corpus.digest"] == text.sizes.digest
    for i, recipe in enumerate(recipes):
        of = {row["format"]: row for row in rows[5 * i : 5 * i + 5]}
        assert list(of) == list(FORMATS)
        assert {row["run"] for row in of.values()} == {recipe.name}
        assert of["dense"]["held_out"] == rows_of(runs, recipe)[-1]["held_out"]
        errors = {name: float(row["error"]) for name, row in of.items()}
        assert errors["dense"] == 0 < errors["int8_row"] < errors["fp8_row"] < errors["int4_group"] < 0.2
        assert len({row["held_out"] for row in of.values()}) > 3
    monkeypatch.setattr(formats, "run", None)  # trained models must not run again
    assert formats.measure(recipes, text, runs, out, "cpu", compiled=False)
    assert read_table(out / f"{formats.NAME}.csv") == (facts, rows)
    before, after = (float(row["held_out"]) for row in rows[5:7])
    (line,) = [line for line in formats.table(out).splitlines() if "SwiMGLU" in line]
    assert line.startswith(f"| 25M | SwiMGLU, n_m = 2 | {before:.4f} | {after - before:+.4f} | ")
    other = replace(text, sizes=replace(text.sizes, digest="another"))
    with pytest.raises(ValueError, match="the result is of the text"):
        formats.measure(recipes, other, runs, out, "cpu", compiled=False)


@pytest.mark.parametrize("options", [{"layer": "glu"}, {"n_masks": 2, "top_k": 1}], ids=str)
def test_only_gate_and_value_weights_are_rounded(options, text):
    run = training.Training(tiny_run(text, 1, **options), text, "cpu", compiled=False)
    before = {name: parameter.clone() for name, parameter in run.model.named_parameters()}
    formats.rows_of(run)
    last = FORMATS[list(FORMATS)[-1]]
    for name, parameter in run.model.named_parameters():
        if name.endswith(("projection.weight", "gate_proj.weight", "up_proj.weight")):
            assert torch.equal(parameter, last.dequantize(*last.quantize(before.pop(name)), torch.float32))
        else:
            assert torch.equal(parameter, before[name])
    assert len(before) < len(list(run.model.parameters()))


@pytest.mark.long
def test_the_cost_of_more_layers_than_torch_compiles_by_itself():
    """By default torch compiles a function at most 8 times, too few for the layers of the experiments."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for layer in ("glu", "lu"):
            assert cost.cost(Recipe(layer), "cpu") == 0


def test_the_cost_of_each_layer_is_measured_once(tmp_path, monkeypatch):
    names = []

    def times_of(recipe):
        names.append(recipe.name)
        return 1.75

    monkeypatch.setattr(cost, "cost", times_of)
    cost.measure(experiments.chosen(["layers", "recipe", "converted"]), tmp_path)
    assert len(set(names)) == len(names)
    assert Recipe("mglu", straight_through="tanh").name in names
    assert not any(word in name for name in names for word in ("mask_lr", "lr=", "start", "seed=1"))
    facts, rows = read_table(tmp_path / f"{cost.NAME}.csv")
    assert "mean of 10 steps" in facts["protocol"]
    assert [row["ms"] for row in rows] == ["1.75"] * len(names)
    cost.measure([Recipe("glu", width=2.0, seed=1), Recipe("glu")], tmp_path, resume=True)
    assert read_table(tmp_path / f"{cost.NAME}.csv")[1] == [*rows, {"name": "glu_width=2.0_seed=0", "ms": "1.75"}]
    path = tmp_path / f"{cost.NAME}.csv"
    path.write_text(path.read_text().replace(f"# torch: {facts['torch']}", "# torch: 1.0"))
    with pytest.raises(ValueError, match=r"the result to resume has another torch: '1\.0'"):
        cost.measure([Recipe("glu")], tmp_path, resume=True)
