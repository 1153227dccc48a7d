"""Tables, plots and verdicts of the experiments about learning."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.learning import comparisons, cost, experiments, gather, tables
from benchmarks.learning.experiments import PAPER
from benchmarks.learning.recipe import Recipe
from benchmarks.records import read_table, write_table
from mglu_ops.__main__ import main

pytest_plugins = ["tests.support.learning"]


def finished(folder: Path, one: Recipe, loss: float, name: str = "python", **last: object) -> None:
    """Write the result file of a run that ended with `loss`, without training. `tabled` makes tables from the files."""
    facts = {f"recipe.{key}": str(value) for key, value in asdict(one).items()}
    facts |= {"commit": "0123456789", "device": "a GPU", "torch": "2.13", "weights": "20000000", "mask_bits": "8000000"}
    facts |= {"seconds": "61.4", "peak_mb": "1234.5", "corpus.kind": "python", "corpus.digest": "abcd"}
    facts |= {"corpus.held_out_bytes": "5200000", "corpus.held_out_tokens": "1300000", "tflop": "6004"}
    last = {"train": 3.0, "worst": 3.5, "gate_ratios": "[0.5, 0.52]", "agreement": 0.5, "flips": 0.001} | last
    write_table([{"step": 10, "megabytes": one.megabytes, "held_out": loss, **last}], facts, folder / name, one.name)


def tabled(folder: Path, name: str = "python") -> Path:
    """Make tables from all runs in `folder / name`, and return the folder of the results."""
    gather.gather([folder / name], folder / "learning", name)
    return folder


def test_recipes_survive_their_table(tmp_path):
    every = experiments.chosen(experiments.USUAL)
    for one in every:
        finished(tmp_path, one, 0.75, gate_ratio=0.5, flipped=0.1)
    found = tables.runs(tabled(tmp_path))
    recipes = {replace(one, seed=seed) for one, seed in zip(found.recipe, found.seed, strict=True)}
    assert recipes == {*every}
    assert tables.recipe_of({"recipe.layer": "glu", "recipe.top_k": float("nan")}) == Recipe("glu")
    with pytest.raises(FileNotFoundError, match=r"texts_runs\.csv: no such result"):
        comparisons.TABLES["learning_texts"](tmp_path)


def test_layers_that_read_several_texts_are_compared_for_each(tmp_path):
    four, swiglu = "4 masks with ReLU", "leveled SwiGLU"
    for one in experiments.EXPERIMENTS["text"]:
        loss = 0.75 + 0.001 * one.seed + 0.01 * (one.layer == "mglu" and one.n_masks == 4)
        kinds = {f"held_out_{kind}": loss + more for kind, more in (("python", 0.1), ("rfc", 0.2), ("c", -one.seed))}
        finished(tmp_path, one, loss, "texts", **kinds)
    lines = comparisons.TABLES["learning_texts"](tabled(tmp_path, "texts")).splitlines()
    assert lines[0].endswith("a byte: 0.0010 in the 25M model, 0.0010 in the 90M model, 0.0010 in the 300M model.")
    head, _, first, *_ = [line.strip("| ").split(" | ") for line in lines[2:]]
    beyond = "**+0.0100 ± 0.0016**"
    assert head == ["layer", "compared with", "25M", "90M", "300M", "300M, python", "300M, rfc", "300M, c"]
    assert first == [four, swiglu, *[beyond] * 5, "+0.0100 ± 1.6314"]


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
    assert (row.seeds, row.held_out, row.load, row.tflop) == (3, pytest.approx(0.72), 41, 6004)
    assert row.peak_gb == 1.2345


def test_a_seed_that_diverged_is_not_left_out_of_a_mean(tmp_path):
    for seed, loss in enumerate((0.70, float("nan"))):
        finished(tmp_path, Recipe("glu", seed=seed), loss)
    assert np.isnan(tables.by_recipe(tables.runs(tabled(tmp_path))).held_out[Recipe("glu")])


@pytest.mark.parametrize(
    "corpus",
    [experiments.USUAL, ["text"], ["structure", "conversion"], ["averaged"], ["long"]],
    ids=("python", "texts", "pinned", "pinned_whole", "long"),
)
def test_layers_of_a_corpus_have_names_of_their_own(corpus):
    layers = {replace(one, seed=0) for one in experiments.chosen(corpus)}
    assert len({(tables.label(one), one.size) for one in layers}) == len(layers)


def test_labels_say_what_differs_from_our_recipe():
    best = experiments.BEST
    names = {
        best[1]: "1 mask",
        replace(best[8], size="90M"): "8 masks",
        PAPER: "4 masks, the paper's recipe",
        experiments.SLOW: "4 masks",
        replace(experiments.LARGER, width=0.75): "scaled SwiGLU, 0.75 times as wide",
        replace(best[2], weight_gain=1.0, mask_lr=0.1): "2 masks, the paper's weights, mask_lr 0.1",
        experiments.AGAIN[1]: "Top-2 of 4 masks",
        experiments.AGAIN[3]: "1 mask, on the value only",
        experiments.FROZEN[1]: "4 masks with ReLU, not learned",
        experiments.OTHERWISE[1]: "1 mask with ReLU, flips 0.2",
        experiments.STRUCTURE[4]: "1 mask, 2:4, centered",
        Recipe("lu", activation="gelu"): "GELU, the paper's weights",
        Recipe(n_masks=1, mask_lr=0.3, megabytes=6.0, start="up", skip=60.0): "1 mask, 6 MB, start up",
    }
    assert {one: tables.label(one) for one in names} == names


def test_plots_show_the_losses(tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    from benchmarks.learning import plots

    finished(tmp_path, Recipe("glu"), 0.73)
    finished(tmp_path, Recipe("mglu", n_masks=4), 0.74)
    finished(tmp_path, Recipe("mglu", n_masks=4, seed=1), 0.76)
    for seed, loss in enumerate((0.70, 0.72)):
        finished(tmp_path, replace(experiments.BEST[1], seed=seed), loss)
    results = tabled(tmp_path)
    lines = {line.get_label(): line.get_xydata().tolist() for line in plots.by_masks(results).axes[0].lines}
    assert lines["the paper's recipe"] == [[4, 0.75]]
    assert lines["our recipe"] == [[1, pytest.approx(0.71)]]
    assert lines["SwiGLU"] == [[n_masks, 0.73] for n_masks in (1, 2, 4, 8, 16)]
    assert [[1, 0.70], [1, 0.72]] in lines.values()  # a bar from the best seed to the worst
    assert main(["bench", "plots", "--out", str(tmp_path)]) == 0  # works without other results
    for name, label in {"by_masks": "our recipe", "pareto": "lowest loss at no higher cost"}.items():
        assert label in (tmp_path / f"learning_{name}.svg").read_text()


def test_the_pareto_plot_has_layers_to_choose_and_the_best_for_each_cost(tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    from benchmarks.learning import plots

    points = pd.DataFrame(
        [(2.0, 5.0), (1.0, 7.0), (3.0, 6.0), (4.0, 5.0), (2.0, 6.0), (5.0, 1.0)], columns=["cost", "loss"]
    )
    assert plots.frontier(points, "cost").values.tolist() == [[1, 7], [2, 5], [5, 1]]
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
    assert {plots.family(one) for one in shown} == {*plots.FAMILIES}
    assert {plots.family(one) for one in hidden} == {None}
    for one, losses in ((experiments.SWIGLU, (0.8, 0.82)), (experiments.BEST[1], (0.78, 0.80)), (PAPER, (0.1, 0.1))):
        for seed, loss in enumerate(losses):
            finished(tmp_path, replace(one, seed=seed), loss)
    points = plots.pareto_points(tabled(tmp_path), "25M")
    assert points[["family", "loss", "megabytes", "pflop"]].values.tolist() == [
        ["GLU, any gate", pytest.approx(0.81), 41, 6.004],
        ["1 mask, any gate", pytest.approx(0.79), 41, 6.004],
    ]
    squares = 2 * 2 * 0.01**2  # two layers have losses 0.01 from their mean; PAPER's losses are equal
    assert points.noise.iloc[0] == pytest.approx(2 * (squares / 3 / 2) ** 0.5)


def test_the_pareto_plot_compares_paired_runs(tmp_path):
    """A converted model is compared with SwiGLU trained on, and 2:4 SwiGLU is read in 9 bits a weight."""
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    from benchmarks.learning import plots

    converted = experiments.converted(**experiments.DISTILLED)
    swiglu, _, _, pruned, *_ = experiments.STRUCTURE
    trained_on = comparisons.same_text(converted)
    losses = {swiglu: (0.7, 0.8), pruned: (0.7, 0.7), trained_on: (0.60, 0.70), converted: (0.61, 0.73)}
    for one, of in losses.items():
        for seed, loss in enumerate(of):
            finished(tmp_path, replace(one, seed=seed), loss, "pinned")
    finished(tmp_path, experiments.SWIGLU, 0.73)
    results = tabled(tmp_path)
    assert len(plots.pareto(results).axes) == 4
    tabled(tmp_path, "pinned")
    assert len(plots.pareto(results).axes) == 6
    points = {name: (load, of.mean) for name, load, of in plots.paired_points(results, "25M")}
    sizes = swiglu.sizes
    saved = 2 * sizes.layers * sizes.hidden * sizes.intermediate * (16 - 9) / 8 / 1e6
    assert points == {
        "SwiGLU": (41, 0),
        "2:4 SwiGLU": (pytest.approx(41 - saved), pytest.approx(-0.05)),
        "1 mask, converted": (41, pytest.approx(0.02)),
    }
    assert not list(plots.paired_points(results, "90M"))


def test_claims_and_comparisons_are_about_layers_that_are_trained():
    corpora = {"python": experiments.USUAL, "texts": ["text"], "pinned": ["structure", "conversion"]}
    asked = comparisons.COMPARISONS
    assert {*asked.corpus} == {*corpora}
    assert not asked.duplicated(["corpus", "question", "layer", "compared with"]).any()
    for corpus, names in corpora.items():
        layers = {tables.label(replace(one, seed=0)) for one in experiments.chosen(names)}
        own = asked[asked.corpus == corpus]
        assert layers.issuperset([*own["layer"], *own["compared with"]])
        if corpus == "python":
            assert layers.issuperset([*comparisons.CLAIMS.better, *comparisons.CLAIMS.worse])


def test_the_tables_explain_every_experiment():
    text = (experiments.RESULTS.parent / "learning_tables.md").read_text()
    assert all(f"`{name}`" in text for name in experiments.EXPERIMENTS)


def test_verdicts_need_more_than_the_spread_of_seeds(tmp_path):
    """Two layers' losses differ by 0.001 between seeds, a standard deviation of 0.001 / sqrt(2). A token is 4 bytes."""
    for seed, (swiglu, gelu) in enumerate([(0.730, 0.732), (0.731, 0.733)]):
        finished(tmp_path, Recipe("glu", seed=seed), swiglu)
        finished(tmp_path, Recipe("lu", activation="gelu", seed=seed), gelu)
    for seed in (0, 1):  # no claim is about this learning rate, so its larger differences do not count
        finished(tmp_path, Recipe("glu", lr=3e-3, seed=seed), 0.7 + 0.1 * seed)
    finished(tmp_path, Recipe("glu_shared"), 0.7335)
    finished(tmp_path, Recipe("mglu", n_masks=1), 0.7330)
    finished(tmp_path, Recipe("mglu", n_masks=4), 0.7334)
    finished(tmp_path, Recipe("mglu", n_masks=8), 0.7200)
    finished(tmp_path, Recipe("mglu", n_masks=4, top_k=1), float("nan"))
    study = comparisons.Study(tabled(tmp_path))

    claims = comparisons.CLAIMS.set_index("claim")

    def of(text: str) -> tuple[float, str]:
        claim = claims.loc[text]
        found = study.difference(claim.worse, claim.better)
        return pytest.approx(found.mean), comparisons.verdict(found, claim.within)

    assert of("SwiGLU is better than GELU") == (0.008, "reproduced")
    assert of("SwiGLU with one shared matrix is worse than GELU") == (0.004, "undecided")
    assert of("one mask is better than GELU") == (-0.002, "undecided")
    assert of("one mask is worse than SwiGLU") == (0.010, "reproduced")
    assert of("four masks are as good as SwiGLU, to 1%") == (-0.0116, "undecided")
    assert of("eight masks are better than SwiGLU") == (0.042, "reproduced")
    assert of("no masks are worse than one mask") == (0.002, "undecided")
    noises = {
        text: study.difference(claims.better[text], claims.worse[text]).noise
        for text in ("SwiGLU is better than GELU", "one mask is worse than SwiGLU", "no masks are worse than one mask")
    }
    assert [*noises.values()] == pytest.approx([4 * 2 * 0.001 / 2**0.5 * seeds**0.5 for seeds in (1, 3 / 2, 2)])
    assert study.deviations["25M"] == pytest.approx(4 * 0.001 / 2**0.5)
    lines = comparisons.claims(tmp_path).splitlines()
    assert lines[2].startswith(
        "| SwiGLU is better than GELU | Table 3 | 23.7 against 25.8 | +0.085 | +0.0080 ± 0.0057 | "
    )
    (line,) = [one for one in lines if one.startswith("| Top-1")]
    assert line.endswith("not reproduced: a run diverged |")
    assert lines[-1].startswith("| no masks are worse than one mask | Figure 13 | curve against curve |  | +0.0020")
    assert study.difference("2 masks, the paper's recipe", "1 mask, the paper's recipe") is None
    cells = [study.cell(claims.better[text], claims.worse[text], "25M") for text in noises]
    assert cells == ["**-0.008 ± 0.006**", "**-0.010 ± 0.007**", "-0.002 ± 0.008"]


def test_layers_of_structure_are_compared_by_runs_with_the_same_seed(tmp_path):
    losses = ((0.70, 0.72), (0.71, 0.74), (0.72, 0.75, 0.80))
    for layer, of in zip(experiments.STRUCTURE[:3], losses, strict=True):
        for seed, loss in enumerate(of):
            finished(tmp_path, replace(layer, seed=seed), loss, "pinned")
            finished(tmp_path, replace(layer, seed=seed + 1), loss, "pinned_earlier")
    tabled(tmp_path, "pinned")
    head, _, first, second, third, *_ = comparisons.structure(tabled(tmp_path, "pinned_earlier")).splitlines()
    columns = [f"{text}, 25M, {what}" for text in ("pinned", "pinned_earlier") for what in ("held out", "last text")]
    assert head == f"| layer | compared with | {' | '.join(columns)} |"
    # Differences 0.01 and 0.02 have the deviation 0.00707, and an interval of 12.706 * 0.00707 / sqrt(2).
    same = "+0.0000 ± 0.0000"  # because all losses on the last text are equal
    assert first == f"| 1 mask | SwiGLU | +0.0150 ± 0.0635 | {same} | +0.0150 ± 0.0635 | {same} |"
    assert second.startswith("| 1 mask, 2:4 | 1 mask | **+0.0100 ± 0.0000** |")
    assert third.startswith("| 1 mask, 2:4 | SwiGLU | +0.0250 ± 0.0635 |")
    # The variances 0.0002, 0.00045 and 0.00163, weighted by their 1, 1 and 2 degrees of freedom.
    assert comparisons.deviation_of(map(pd.Series, losses)) == pytest.approx(0.03129, rel=1e-3)
    for layer, of in zip(experiments.AVERAGED[:3], losses, strict=True):
        for seed, loss in enumerate(of):
            finished(tmp_path, replace(layer, seed=seed), loss, "pinned_whole")
    spread, _, averaged, _, other, *_ = comparisons.averaged(tabled(tmp_path, "pinned_whole")).splitlines()
    assert spread == "Standard deviation between seeds on held-out text, in nats a byte: 0.0313 in the 25M model."
    assert averaged == "| layer | compared with | pinned_whole, 25M, held out | pinned_whole, 25M, last text |"
    assert other == f"| 1 mask | SwiGLU | +0.0150 ± 0.0635 | {same} |"
    one, other = pd.Series([1.5]), pd.Series([1.0], [1])
    assert comparisons.difference(one, other) is None  # no seed is in both
    assert str(comparisons.difference(one, other.set_axis([0]))) == "+0.5000"


def test_conversions_are_compared_with_swiglu_trained_on_with_the_same_text(tmp_path):
    finished(tmp_path, experiments.STRUCTURE[0], 0.7, "pinned")
    for table in (comparisons.conversions, comparisons.fits):
        with pytest.raises(FileNotFoundError, match="no "):
            table(tabled(tmp_path, "pinned"))
    on, magnitude, *_, joint = experiments.ablations(10, "25M")[:5]
    errors = json.dumps([{"magnitude": 0.25, "joint": 0.01}, {"magnitude": 0.35, "joint": 0.03}])
    for seed, loss in enumerate((0.70, 0.72)):
        finished(tmp_path, replace(on, seed=seed), loss, "pinned")
        finished(tmp_path, replace(magnitude, seed=seed), loss + 0.03, "pinned")
        finished(tmp_path, replace(joint, seed=seed), loss + 0.01 * seed, "pinned", errors=errors)
    found = comparisons.conversions(tabled(tmp_path, "pinned")).splitlines()
    assert found[0] == "| conversion | bytes to SwiGLU, 25M | 25M, 10.0% of the text |"
    assert found[2] == "| 1 mask, lr 0.0003, start joint | 1.00 | +0.0050 ± 0.0635 |"
    assert found[3] == "| 1 mask, lr 0.0003, start magnitude | 1.00 | **+0.0300 ± 0.0000** |"
    head, _, line = comparisons.fits(tmp_path).splitlines()
    assert head == "| fit | model | magnitude | joint |"
    assert line == "| 1 mask, start joint | 25M | 0.3000 | 0.0200 |"


def test_optimizers_of_mask_logits_are_compared_with_adamw_seed_by_seed(tmp_path):
    adamw = replace(experiments.MEMORY[0], seed=0)
    finished(tmp_path, adamw, 0.7, "pinned")
    with pytest.raises(FileNotFoundError, match="optimizers of mask logits"):
        comparisons.logits(tabled(tmp_path, "pinned"))
    for seed, loss in enumerate((0.7, 0.72)):
        finished(tmp_path, replace(adamw, seed=seed), loss, "pinned")
        finished(tmp_path, replace(adamw, seed=seed, logits="adafactor"), loss + 0.01 * seed, "pinned")
    head, _, line = comparisons.logits(tabled(tmp_path, "pinned")).splitlines()
    assert head.startswith("| layer | bytes a logit | GB of training memory, AdamW | 25M, held out | 25M, last text")
    assert line.startswith("| 1 mask, logits adafactor | 4 |")
    assert "| +0.0050 ± 0.0635 |" in line


@pytest.mark.gpu
def test_the_kernels_of_a_step_take_milliseconds():
    assert 1 < cost.cost(Recipe("glu", size="10M"), compiled=False) < 1000


@pytest.mark.gpu
def test_other_ways_to_learn_masks_take_about_as_long_as_ours():
    ours, *others = (
        cost.cost(Recipe("mglu", n_masks=4, size="10M", **how)) for how in ({}, {"continuous": 0.5}, {"flips": 0.2})
    )
    assert all(0.7 < other / ours < 1.5 for other in others), (ours, others)
