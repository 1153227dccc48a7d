"""Tables, plots and verdicts of the experiments about learning."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import pytest

from benchmarks.learning import claims, cost, experiments, gather, tables
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
    head, _, first, *_ = [line.split(" | ") for line in tables.TABLES["learning_text"](tmp_path).splitlines()[2:]]
    losses = {name: value for name, value in zip(head, first, strict=True) if name in ("python", "c")}
    assert losses == {"python": "1.7000", "c": "0.8000"}
    assert {run.recipe for run in tables.runs(tmp_path)} == set(every)
    assert tables.recipe_of({"recipe.layer": "glu", "recipe.top_k": ""}) == Recipe("glu")
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


def test_plots_show_the_curves_and_the_gate_ratios(tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    from benchmarks.learning import plots

    finished(tmp_path, Recipe("glu"), 0.73)
    finished(tmp_path, Recipe("mglu", n_masks=4), 0.74)
    finished(tmp_path, Recipe("mglu", n_masks=4, seed=1), 0.76)
    found = tables.runs(tabled(tmp_path))
    lines = {line.get_label(): line.get_xydata().tolist() for line in plots.curves(found).axes[0].get_lines()}
    assert lines == {"SwiGLU": [[60, 0.73]], "SwiMGLU, n_m = 4": [[60, 0.74]]}
    for seed, loss in enumerate((0.70, 0.72)):
        finished(tmp_path, replace(experiments.BEST[1], seed=seed), loss)
    lines = {
        line.get_label(): line.get_xydata().tolist()
        for line in plots.by_masks(tables.runs(tabled(tmp_path))).axes[0].lines
    }
    assert lines["the paper's recipe"] == [[4, 0.75]]
    assert lines["our recipe"] == [[1, pytest.approx(0.71)]]
    assert lines["SwiGLU"] == [[n_masks, 0.73] for n_masks in (1, 2, 4, 8, 16)]
    assert [[1, 0.70], [1, 0.72]] in lines.values()  # from the best seed to the worst
    (ratios, *_) = plots.gate_ratios(found).axes[0].get_lines()
    assert (ratios.get_label(), ratios.get_xydata().tolist()) == ("SwiMGLU, n_m = 4", [[1, 0.5], [2, 0.52]])
    paths = plots.draw(tmp_path, tmp_path / "out")
    labels = {"curves": "SwiMGLU, n_m = 4", "by_masks": "our recipe", "gate_ratios": "SwiMGLU, n_m = 4"}
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
    points = plots.pareto_points(tables.runs(tabled(tmp_path)), "25M")
    assert [(one.recipe, one.loss, one.megabytes, one.pflop) for one in points] == [
        (experiments.SWIGLU, pytest.approx(0.81), 41, 6.004),
        (experiments.BEST[1], pytest.approx(0.79), 41, 6.004),
    ]
    squares = 2 * 2 * 0.01**2  # of two layers, whose seeds are 0.01 from their mean; PAPER's have none
    assert points[0].noise == pytest.approx(2 * (squares / 3 / 2) ** 0.5)


def claim(text: str) -> claims.Claim:
    (found,) = [one for one in claims.CLAIMS if one.text == text]
    return found


def test_claims_and_comparisons_are_about_recipes_that_are_run():
    every = set(experiments.chosen(experiments.EXPERIMENTS))
    assert every >= claims.COMPARED
    for one in chain(*claims.COMPARISONS.values(), *claims.CHOICES.values()):
        assert all(every >= {*one.at(size)} for size in one.sizes)
    asked = [(one.layer, one.other) for comparisons in claims.COMPARISONS.values() for one in comparisons]
    assert len(set(asked)) == len(asked)
    assert claim("SwiGLU is better than GELU").published == pytest.approx(0.0849, abs=1e-4)
    assert claim("four masks are as good as SwiGLU, to 1%").published == pytest.approx(-0.0084, abs=1e-4)


def test_the_page_explains_every_experiment():
    text = (Path(claims.__file__).parent / "README.md").read_text()
    assert all(f"| `{name}` |" in text for name in experiments.EXPERIMENTS)


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
    found = tables.runs(tabled(tmp_path))

    def of(text: str) -> tuple[float, tuple[int, int], str]:
        measured = claims.measure(claim(text).better, claim(text).worse, found)
        return pytest.approx(measured.advantage), measured.seeds, claims.verdict(claim(text), measured)

    assert of("SwiGLU is better than GELU") == (0.008, (2, 2), "reproduced")
    assert of("SwiGLU with one shared matrix is worse than GELU") == (0.004, (2, 1), "undecided")
    assert of("one mask is better than GELU") == (-0.002, (1, 2), "undecided")
    assert of("one mask is worse than SwiGLU") == (0.010, (2, 1), "reproduced")
    assert of("four masks are as good as SwiGLU, to 1%") == (-0.0116, (1, 2), "undecided")
    assert of("eight masks are better than SwiGLU") == (0.042, (1, 2), "reproduced")
    assert of("no masks are worse than one mask") == (0.002, (1, 1), "undecided")
    noise = claims.measure(Recipe("glu"), Recipe("lu", activation="gelu"), found).noise
    assert noise == pytest.approx(4 * 2 * 0.001 / 2**0.5)
    assert "The standard deviation between seeds is 0.0007 nats a byte" in claims.claims(tmp_path)
    (line,) = [one for one in claims.claims(tmp_path).splitlines() if one.startswith("| Top-1")]
    assert line.endswith("not reproduced: a run diverged |")
    assert claims.measure(replace(PAPER, n_masks=2), replace(PAPER, n_masks=1), found) is None


@pytest.mark.gpu
def test_the_kernels_of_a_step_take_milliseconds():
    assert 1 < cost.cost(Recipe("glu", size="10M"), compiled=False) < 1000


@pytest.mark.gpu
def test_other_ways_to_learn_masks_take_about_as_long_as_ours():
    ours, *others = (
        cost.cost(Recipe("mglu", n_masks=4, size="10M", **how)) for how in ({}, {"continuous": 0.5}, {"flips": 0.2})
    )
    assert all(0.7 < other / ours < 1.5 for other in others), (ours, others)
