"""Tables, plots and verdicts of the experiments about learning."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from benchmarks.learning import comparisons, cost, experiments, gather, tables
from benchmarks.learning.experiments import PAPER
from benchmarks.learning.recipe import Recipe
from benchmarks.records import read_table, write_table

pytest_plugins = ["learning_fixtures"]


def finished(folder: Path, one: Recipe, loss: float, name: str = "python", **last: object) -> None:
    """Write a result as a run does, without training; `tabled` makes the tables of all runs of a name."""
    facts = {f"recipe.{key}": str(value) for key, value in asdict(one).items()}
    facts |= {"commit": "0123456789", "device": "a GPU", "torch": "2.13", "weights": "20000000", "mask_bits": "8000000"}
    facts |= {"seconds": "61.4", "peak_mb": "1234.5", "corpus.kind": "python", "corpus.digest": "abcd"}
    facts |= {"corpus.held_out_bytes": "5200000", "corpus.held_out_tokens": "1300000", "tflop": "6004"}
    last = {"train": 3.0, "worst": 3.5, "gate_ratios": "[0.5, 0.52]", "agreement": 0.5, "flips": 0.001} | last
    write_table([{"step": 10, "megabytes": one.megabytes, "held_out": loss, **last}], facts, folder / name, one.name)


def tabled(folder: Path, name: str = "python") -> Path:
    """Gather the runs of a name into the tables of a corpus, and return the folder of the results."""
    gather.gather([folder / name], folder / "learning", name)
    return folder


def test_recipes_survive_their_table(tmp_path):
    every = experiments.chosen(experiments.USUAL)
    for one in every:
        finished(tmp_path, one, 0.75, gate_ratio=0.5, flipped=0.1)
    tabled(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"texts_runs\.csv: no such table"):
        tables.TABLES["learning_text"](tmp_path)
    for one in experiments.EXPERIMENTS["text"]:
        loss = {"held_out_python": 0.7 + one.seed, "held_out_c": 0.8}
        finished(tmp_path, one, 0.75, "texts", gate_ratio=0.5, flipped=0.1, **loss)
    tabled(tmp_path, "texts")
    head, _, first, *_ = [line.split(" | ") for line in tables.TABLES["learning_text"](tmp_path).splitlines()]
    losses = {name: value for name, value in zip(head, first, strict=True) if name in ("python", "c")}
    assert losses == {"python": "1.7000", "c": "0.8000"}
    found = tables.runs(tmp_path)
    recipes = {replace(one, seed=seed) for one, seed in zip(found.recipe, found.seed, strict=True)}
    assert recipes == {*every}
    assert tables.recipe_of({"recipe.layer": "glu", "recipe.top_k": float("nan")}) == Recipe("glu")
    for name in tables.TABLES:
        assert "Not run" not in tables.TABLES[name](tmp_path)


def test_runs_are_gathered_once_and_are_of_one_text(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"benchmarks\.learning\.gather"):
        tables.runs(tmp_path)
    with pytest.raises(FileNotFoundError, match="no finished run"):
        tabled(tmp_path)
    finished(tmp_path, other := Recipe("lu", activation="gelu"), 0.75)
    before = (tabled(tmp_path) / "learning" / "python_runs.csv").read_text()
    finished(tmp_path, other, 0.74)
    finished(tmp_path, Recipe("mglu", start="up"), 0.73, flipped=0.1)
    rows, curves = (read_table(tabled(tmp_path) / "learning" / f"python_{name}.csv")[1] for name in ("runs", "curves"))
    assert [(row["run"], row["held_out"], row["flipped"], row["recipe.start"]) for row in rows] == [
        ("lu_activation=gelu_seed=0", "0.75", "", ""),
        ("mglu-4_start=up_seed=0", "0.73", "0.1", "up"),
    ]
    assert [row["held_out"] for row in curves] == ["0.75", "0.73"]
    assert len(before.splitlines()) == len((tmp_path / "learning" / "python_runs.csv").read_text().splitlines()) - 1
    assert gather.done([tmp_path / "learning"], "abcd") == {row["run"] for row in rows}
    assert gather.done([tmp_path / "learning" / "python_runs.csv"], "efgh") == set()
    with pytest.raises(FileNotFoundError, match="no table of runs"):
        gather.done([tmp_path], "abcd")
    path = tmp_path / "python" / f"{other.name}.csv"
    path.write_text(path.read_text().replace("abcd", "efgh"))
    with pytest.raises(ValueError, match=r"several values of corpus\.digest: 'efgh' and 'abcd'"):
        tabled(tmp_path)


@pytest.mark.parametrize("one", [*experiments.chosen(experiments.USUAL)[:1], *experiments.BEST.values()], ids=str)
def test_a_row_of_a_recipe_has_means_over_its_seeds(one, tmp_path):
    for seed, loss in enumerate((0.70, 0.72, 0.74)):
        finished(tmp_path, replace(one, seed=seed), loss, gate_ratio=0.5 + seed, flipped=0.1 + seed)
    of = tables.by_recipe(tables.runs(tabled(tmp_path)))
    assert [*of.index] == [one]
    row = of.loc[one]
    assert (row.seeds, row.held_out, row.distance) == (3, pytest.approx(0.72), pytest.approx(0.04))
    assert (row.gate_ratio, row.flipped, row.load, row.peak_mb) == (0.5, 0.1, 41, 1234.5)


def test_a_seed_that_diverged_is_not_left_out_of_a_mean(tmp_path):
    for seed, loss in enumerate((0.70, float("nan"))):
        finished(tmp_path, Recipe("glu", seed=seed), loss)
    assert np.isnan(tables.by_recipe(tables.runs(tabled(tmp_path))).held_out[Recipe("glu")])


def test_labels_say_what_differs_from_our_recipe():
    best, names = experiments.BEST, {}
    for one in {replace(one, seed=0) for one in experiments.chosen([*experiments.USUAL, "text"])}:
        names.setdefault(tables.label(one), []).append(one)
    same = [of for of in names.values() if len(of) > 1]
    assert all(not one.learned for of in same for one in of)  # their rate means nothing
    assert [tables.label(one) for one in (best[1], best[8], PAPER, experiments.SLOW)] == [
        "1 mask",
        "8 masks",
        "4 masks, the paper's recipe",
        "4 masks",
    ]
    assert tables.label(replace(experiments.LARGER, width=0.75)) == "scaled SwiGLU, 0.75 times as wide"
    assert tables.label(replace(best[2], weight_gain=1.0, mask_lr=0.1)) == "2 masks, the paper's weights, mask_lr 0.1"
    assert tables.label(replace(experiments.AGAIN[1], size="90M")) == "Top-2 of 4 masks, 90M model"


def test_plots_show_the_curves(tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    from benchmarks.learning import plots

    finished(tmp_path, Recipe("glu"), 0.73)
    finished(tmp_path, Recipe("mglu", n_masks=4), 0.74)
    finished(tmp_path, Recipe("mglu", n_masks=4, seed=1), 0.76)
    results = tabled(tmp_path)
    lines = {line.get_label(): line.get_xydata().tolist() for line in plots.learning_curves(results).axes[0].lines}
    assert lines == {"SwiGLU": [[60, 0.73]], "4 masks, the paper's recipe": [[60, 0.74]]}
    for seed, loss in enumerate((0.70, 0.72)):
        finished(tmp_path, replace(experiments.BEST[1], seed=seed), loss)
    tabled(tmp_path)
    lines = {line.get_label(): line.get_xydata().tolist() for line in plots.by_masks(results).axes[0].lines}
    assert lines["the paper's recipe"] == [[4, 0.75]]
    assert lines["our recipe"] == [[1, pytest.approx(0.71)]]
    assert lines["SwiGLU"] == [[n_masks, 0.73] for n_masks in (1, 2, 4, 8, 16)]
    assert [[1, 0.70], [1, 0.72]] in lines.values()  # from the best seed to the worst
    paths = plots.draw(tmp_path, tmp_path / "out")
    labels = {"curves": "4 masks, the paper's recipe", "by_masks": "our recipe"}
    labels["pareto"] = "lowest loss at no higher cost"
    assert [path.name for path in paths] == [f"learning_{name}.svg" for name in labels]
    for path, label in zip(paths, labels.values(), strict=True):
        assert label in path.read_text()


def test_the_pareto_plot_has_layers_to_choose_and_the_best_for_each_cost(tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    from benchmarks.learning import plots

    assert plots.frontier([(2, 5), (1, 7), (3, 6), (4, 5), (2, 6), (5, 1)]) == [(1, 7), (2, 5), (5, 1)]
    assert plots.frontier([]) == []
    shown = [
        experiments.SWIGLU,
        *experiments.RELU_SQUARED,
        *experiments.GELU_GATES,
        *experiments.EQUAL_TIME,
        *experiments.BEST.values(),
    ]
    hidden = [
        experiments.LARGER,
        PAPER,
        Recipe("glu", lr=3e-4),
        replace(experiments.BEST[1], weight_gain=1.0),
        *experiments.FROZEN,
        *experiments.OTHERWISE,
        *experiments.MIXTURE,
        experiments.AGAIN[0],
    ]
    assert [plots.is_pareto(one) for one in shown + hidden] == [True] * len(shown) + [False] * len(hidden)
    for one, losses in ((experiments.SWIGLU, (0.8, 0.82)), (experiments.BEST[1], (0.78, 0.80)), (PAPER, (0.1, 0.1))):
        for seed, loss in enumerate(losses):
            finished(tmp_path, replace(one, seed=seed), loss)
    points = plots.pareto_points(tabled(tmp_path), "25M")
    assert points[["recipe", "loss", "megabytes", "pflop"]].values.tolist() == [
        [experiments.SWIGLU, pytest.approx(0.81), 41, 6.004],
        [experiments.BEST[1], pytest.approx(0.79), 41, 6.004],
    ]
    squares = 2 * 2 * 0.01**2  # of two layers, whose seeds are 0.01 from their mean; PAPER's have none
    assert points.noise[0] == pytest.approx(2 * (squares / 3 / 2) ** 0.5)


def claim(text: str) -> comparisons.Claim:
    (found,) = [one for one in comparisons.CLAIMS if one.text == text]
    return found


def test_claims_and_comparisons_are_about_recipes_that_are_run():
    every = set(experiments.chosen(experiments.EXPERIMENTS))
    assert comparisons.compared() <= every
    for asked in [*comparisons.COMPARISONS.values(), *comparisons.LATER.values()]:
        assert every.issuperset(chain(*asked))
        assert len({tuple(map(tables.label, pair)) for pair in asked}) == len(asked)
    assert claim("SwiGLU is better than GELU").published == pytest.approx(0.0849, abs=1e-4)
    assert claim("four masks are as good as SwiGLU, to 1%").published == pytest.approx(-0.0084, abs=1e-4)


def test_the_tables_explain_every_experiment():
    text = (experiments.RESULTS.parent / "learning_tables.md").read_text()
    assert all(f"`{name}`" in text for name in experiments.EXPERIMENTS)


def test_verdicts_need_more_than_the_spread_of_seeds(tmp_path):
    """A token is 4 bytes. Seeds of two layers lie 0.001 apart, so that the standard deviation is 0.001 / sqrt(2)."""
    for seed, (swiglu, gelu) in enumerate([(0.730, 0.732), (0.731, 0.733)]):
        finished(tmp_path, Recipe("glu", seed=seed), swiglu)
        finished(tmp_path, Recipe("lu", activation="gelu", seed=seed), gelu)
    for seed in (0, 1):  # a learning rate of no claim, whose seeds differ more
        finished(tmp_path, Recipe("glu", lr=3e-3, seed=seed), 0.7 + 0.1 * seed)
    finished(tmp_path, Recipe("glu_shared"), 0.7335)
    finished(tmp_path, Recipe("mglu", n_masks=1), 0.7330)
    finished(tmp_path, Recipe("mglu", n_masks=4), 0.7334)
    finished(tmp_path, Recipe("mglu", n_masks=8), 0.7200)
    finished(tmp_path, Recipe("mglu", n_masks=4, top_k=1), float("nan"))
    study = comparisons.Study(tabled(tmp_path))

    def of(text: str) -> tuple[float, str]:
        found = study.difference(claim(text).worse, claim(text).better)
        return pytest.approx(found.mean), comparisons.verdict(claim(text), found)

    assert of("SwiGLU is better than GELU") == (0.008, "reproduced")
    assert of("SwiGLU with one shared matrix is worse than GELU") == (0.004, "undecided")
    assert of("one mask is better than GELU") == (-0.002, "undecided")
    assert of("one mask is worse than SwiGLU") == (0.010, "reproduced")
    assert of("four masks are as good as SwiGLU, to 1%") == (-0.0116, "undecided")
    assert of("eight masks are better than SwiGLU") == (0.042, "reproduced")
    assert of("no masks are worse than one mask") == (0.002, "undecided")
    noises = {
        text: study.difference(*(claim(text)[1:3])).noise
        for text in ("SwiGLU is better than GELU", "one mask is worse than SwiGLU", "no masks are worse than one mask")
    }
    assert [*noises.values()] == pytest.approx([4 * 2 * 0.001 / 2**0.5 * seeds**0.5 for seeds in (1, 3 / 2, 2)])
    assert study.deviations["25M"] == pytest.approx(4 * 0.001 / 2**0.5)
    (line,) = [one for one in comparisons.claims(tmp_path).splitlines() if one.startswith("| Top-1")]
    assert line.endswith("not reproduced: a run diverged |")
    assert study.difference(replace(PAPER, n_masks=2), replace(PAPER, n_masks=1)) is None
    cells = [study.cell(*claim(text)[1:3], "25M") for text in noises]
    assert cells == ["**-0.008 ± 0.006**", "**-0.010 ± 0.007**", "-0.002 ± 0.008"]


@pytest.mark.gpu
def test_the_kernels_of_a_step_take_milliseconds():
    assert 1 < cost.cost(Recipe("glu", size="10M"), compiled=False) < 1000


@pytest.mark.gpu
def test_other_ways_to_learn_masks_take_about_as_long_as_ours():
    ours, *others = (
        cost.cost(Recipe("mglu", n_masks=4, size="10M", **how)) for how in ({}, {"continuous": 0.5}, {"flips": 0.2})
    )
    assert all(0.7 < other / ours < 1.5 for other in others), (ours, others)
