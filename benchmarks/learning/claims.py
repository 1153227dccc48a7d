"""Compares layers by their training runs: the paper's claims (arXiv 2506.23225), and questions about our recipe.

The paper's claims are about layers of equal width that are trained with the paper's recipe. It gives validation
perplexities of its small models. The logarithm of the ratio of two perplexities is a difference in nats a token, the
unit in which the runs are compared too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path

from benchmarks.frames import markdown
from benchmarks.learning import comparisons, paired
from benchmarks.learning.comparisons import ALL_SIZES, CHOICES, COMPARISONS, NAMES, PAPERS, SCALED, Comparison
from benchmarks.learning.experiments import BEST, LARGER, SWIGLU, same_load
from benchmarks.learning.recipe import SIZES, Recipe
from benchmarks.learning.tables import Finished, by_recipe, deviation, label, mean_loss, runs, source

CONFIDENCE = 2.0
"""Standard errors that a difference must exceed: about 95% confidence."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper: `better` has a lower loss than `worse`, or at most `within` nats a token more.

    `where` is the paper's table or figure; `perplexities` are its figures of both, None where it has only curves.
    """

    text: str
    better: Recipe
    worse: Recipe
    where: str
    perplexities: tuple[float, float] | None = None
    within: float = 0.0

    @property
    def published(self) -> float | None:
        """The paper's advantage of `better`, in nats a token."""
        return None if self.perplexities is None else math.log(self.perplexities[1] / self.perplexities[0])


GELU = Recipe("lu", activation="gelu")
SHARED = Recipe("glu_shared")
ONE, TWO, FOUR, EIGHT, SIXTEEN = PAPERS.values()
TOP_1, TOP_2, TOP_4 = (replace(FOUR, top_k=k) for k in (1, 2, 4))
CLOSE = 0.01
"""Nats a token that 'comparable' allows: 1% of the perplexity."""

CLAIMS = [
    Claim("SwiGLU is better than GELU", SWIGLU, GELU, "Table 3", (23.7, 25.8)),
    Claim("SwiGLU with one shared matrix is worse than GELU", GELU, SHARED, "Table 1", (25.6, 27.0)),
    Claim("one mask is better than GELU", ONE, GELU, "Table 3", (25.0, 25.8)),
    Claim("one mask is worse than SwiGLU", SWIGLU, ONE, "Table 3", (23.7, 25.0)),
    Claim("two masks are better than one", TWO, ONE, "Table 3", (24.5, 25.0)),
    Claim("four masks are better than two", FOUR, TWO, "Table 3", (23.9, 24.5)),
    Claim("eight masks are better than four", EIGHT, FOUR, "Table 3", (23.5, 23.9)),
    Claim("sixteen masks are better than eight", SIXTEEN, EIGHT, "Table 14", (23.3, 23.5)),
    Claim("four masks are as good as SwiGLU, to 1%", FOUR, SWIGLU, "Table 3", (23.9, 23.7), CLOSE),
    Claim("eight masks are better than SwiGLU", EIGHT, SWIGLU, "Table 3", (23.5, 23.7)),
    Claim("SiLU is better than ReLU", FOUR, replace(FOUR, activation="relu"), "Table 8", (23.9, 24.3)),
    Claim("SiLU is better than GELU as the gate", FOUR, replace(FOUR, activation="gelu"), "Table 8", (23.9, 24.0)),
    Claim("two learned masks are better than two fixed", TWO, replace(TWO, learned=False), "Table 12", (24.5, 25.1)),
    Claim("a learned mask is better than a fixed one", ONE, replace(ONE, learned=False), "Table 12", (25.0, 25.1)),
    Claim("Top-1 of four is worse than their sum", FOUR, TOP_1, "Table 10", (23.9, 25.2)),
    Claim("Top-2 of four is as good as their sum, to 1%", TOP_2, FOUR, "Table 10", (24.0, 23.9), CLOSE),
    Claim("Top-4 of four is better than their sum", TOP_4, FOUR, "Table 10", (23.8, 23.9)),
    Claim("no gate mask is worse than one mask", ONE, Recipe("no_gate_mask", n_masks=1), "Figure 13"),
    Claim("no value mask is worse than one mask", ONE, Recipe("no_value_mask", n_masks=1), "Figure 13"),
    Claim("no masks are worse than one mask", ONE, SHARED, "Figure 13"),
]


COMPARED = frozenset([*chain.from_iterable((one.better, one.worse) for one in CLAIMS), *comparisons.recipes()])
"""The recipes of all comparisons. Their seeds give the noise; runs with higher learning rates differ more by seed."""


@dataclass(frozen=True)
class Measured:
    """By how much one layer is better than another in the runs, in nats a token.

    Attributes:
        advantage: the other layer's mean loss over seeds minus the layer's.
        seeds: the numbers of seeds of both.
        noise: CONFIDENCE standard errors of the advantage.
    """

    advantage: float
    seeds: tuple[int, int]
    noise: float

    @property
    def is_noise(self) -> bool:
        return abs(self.advantage) <= self.noise


def losses_of(found: Iterable[Finished], size: str) -> Mapping[Recipe, list[float]]:
    """The losses of all seeds, by recipe (with seed 0), of the recipes in COMPARED that have a size of model."""
    compared = {recipe: seeds for recipe, seeds in by_recipe(found).items() if recipe in COMPARED}
    return {recipe: [run.loss for run in seeds] for recipe, seeds in compared.items() if recipe.size == size}


def measure(layer: Recipe, other: Recipe, found: Sequence[Finished]) -> Measured | None:
    """Compare two layers of one size; None if a layer has no run, or if no recipe of this size has two seeds."""
    one_seed, of = deviation(losses_of(found, layer.size).values()), by_recipe(found)
    ours, theirs = of.get(layer), of.get(other)
    if not ours or not theirs or math.isnan(one_seed):
        return None
    unit = found[0].bytes_of_token
    advantage = unit * (mean_loss(theirs) - mean_loss(ours))
    noise = unit * CONFIDENCE * one_seed * math.sqrt(1 / len(ours) + 1 / len(theirs))
    return Measured(advantage, (len(ours), len(theirs)), noise)


def verdict(claim: Claim, measured: Measured | None) -> str:
    """What the runs say about a claim of the paper."""
    if measured is None:
        return "not run"
    if math.isnan(measured.advantage):
        return "not reproduced: a run diverged"
    over = measured.advantage + claim.within
    if abs(over) <= measured.noise:
        return "undecided"
    return "reproduced" if over > 0 else "not reproduced"


def claims(results: Path) -> str:
    """A row for each claim of the paper."""
    found, lines = runs(results), []
    for claim in CLAIMS:
        published, measured = claim.published, measure(claim.better, claim.worse, found)
        paper = ["curves", ""]
        if claim.perplexities and published is not None:
            paper = ["{} against {}".format(*claim.perplexities), f"{published:+.3f}"]
        here = ["", "", ""]
        if measured:
            here = [f"{measured.advantage:+.4f}", f"{measured.noise:.4f}", "{} and {}".format(*measured.seeds)]
        lines.append([claim.text, claim.where, *paper, *here, verdict(claim, measured)])
    head = ["claim", "in the paper", "perplexities", "nats a token", "here", "noise", "seeds", "verdict"]
    losses, unit = losses_of(found, Recipe.size).values(), found[0].bytes_of_token
    one_seed, several = deviation(losses), sum(len(of) > 1 for of in losses)
    return (
        f"{source(found)} A token has {unit:.2f} bytes. The standard deviation between seeds is {one_seed:.4f} nats a "
        f"byte or {one_seed * unit:.3f} nats a token, from {several} recipes with several seeds.\n\n"
        f"{markdown(head, lines)}"
    )


def findings(results: Path) -> str:
    """The tables of all comparisons, one for each question."""
    found = runs(results)
    sizes = {size: deviation(losses_of(found, size).values()) * found[0].bytes_of_token for size in SIZES}
    deviations = ", ".join(f"{one:.3f} in the {size} model" for size, one in sizes.items() if not math.isnan(one))
    parts = [f"{source(found)} Standard deviation between seeds, in nats a token: {deviations}."]
    for question, asked in COMPARISONS.items():
        columns = [size for size in SIZES if any(size in one.sizes for one in asked)]
        lines = [[one.layer, one.other, *(_difference(one, size, found) for size in columns)] for one in asked]
        parts += [f"**{question}**", markdown(["layer", "compared with", *columns], lines)]
    return "\n\n".join(parts)


def _difference(one: Comparison, size: str, found: Sequence[Finished]) -> str:
    """The layer's loss minus the other's, and the noise; in bold where the difference exceeds the noise."""
    if size not in one.sizes:
        return ""
    measured = measure(*one.at(size), found)
    if measured is None:
        return "not run"
    text = f"{-measured.advantage:+.3f} ± {measured.noise:.3f}"
    return text if measured.is_noise else f"**{text}**"


def summary(results: Path) -> str:
    """The table of FAQ.md: the loss of layers with masks minus SwiGLU's, in nats a token.

    Raises:
        FileNotFoundError: a layer of the table has no run.
    """
    found = runs(results)

    def to_swiglu(layer: Recipe, other: Recipe) -> str:
        measured = measure(layer, other, found)
        if measured is None:
            raise FileNotFoundError(f"{results}: no result of {label(layer)} and {label(other)} with several seeds")
        return f"{-measured.advantage:+.3f}{' (noise)' if measured.is_noise else ''}"

    lines = [[f"{NAMES[n]}, equal width", to_swiglu(PAPERS[n], SWIGLU), to_swiglu(BEST[n], SWIGLU)] for n in BEST]
    for name, swiglu in (("SwiGLU", SWIGLU), (SCALED, LARGER)):
        narrow = replace(swiglu, width=same_load(1))
        lines.append([f"{NAMES[1]}, against {name} with as many bytes", "", to_swiglu(BEST[1], narrow)])
    return markdown(["layer", "the paper's recipe", "our recipe"], lines)


def choices(results: Path) -> str:
    """The table of FAQ.md that helps to choose a layer: pairs of layers that have a cost in common."""
    found = runs(results)
    lines = [
        [alike, one.layer, one.other, *(_difference(one, size, found) for size in ALL_SIZES)]
        for alike, asked in CHOICES.items()
        for one in asked
    ]
    return f"{source(found)}\n\n{markdown(['alike', 'layer', 'compared with', *ALL_SIZES], lines)}"


def stability(results: Path) -> str:
    """The table of learning rates: the loss, the highest spike of a step's loss, and the largest rise of the mean loss.

    The points of its learning curve divide a run into parts; the first part, with the warm-up, does not count. A spike
    is a step's loss minus the mean of its part. A rise is the mean of a part minus the mean of an earlier part. With
    several seeds, the loss is their mean, and spike and rise are their maxima.
    """
    found = runs(results)
    lines, of = [], by_recipe(found)
    for lr, recipe in product((1e-3, 3e-3, 6e-3, 1e-2), (SWIGLU, FOUR)):
        if seeds := of.get(replace(recipe, lr=lr)):
            parts = [[(float(row["train"]), float(row["worst"])) for row in run.rows[1:]] for run in seeds]
            spike = max(worst - mean for run in parts for mean, worst in run)
            rise = max(late - early for run in parts for i, (early, _) in enumerate(run) for late, _ in run[i:])
            figures = f"{mean_loss(seeds):.4f}", f"{spike:.2f}", f"{rise:.2f}", len(seeds)
            lines.append([f"{lr:g}", label(recipe), *figures])
    head = ["learning rate", "layer", "nats a byte", "largest step over its part's mean", "rise", "seeds"]
    return f"{source(found)}\n\n{markdown(head, lines)}"


TABLES = {
    "learning_claims": claims,
    "learning_choices": choices,
    "learning_findings": findings,
    "learning_stability": stability,
    "learning_summary": summary,
    "learning_structure": paired.table,
}
"""Name of a table to the function that makes it from the folder of the results."""
