"""What the paper (arXiv 2506.23225) claims about learning, what the best recipe reaches, and verdicts from the runs.

A claim says that one layer learns better than another. The paper's claims are of equal width and of its own recipe. Its
figures are validation perplexities of its small models; the logarithm of their ratio is a difference in nats a token,
in which the runs are compared too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.learning.experiments import (
    AGAIN,
    BEST,
    LARGER,
    PAPER,
    SAME_WEIGHTS,
    SIZED,
    SIZED_EIGHT,
    SLOW,
    SWIGLU,
    gained,
    level,
    leveled,
    same_load,
    same_training,
)
from benchmarks.learning.recipe import SIZES, Recipe
from benchmarks.learning.tables import Finished, label, runs, source
from benchmarks.markdown import markdown
from benchmarks.tables import MissingResultError

CONFIDENCE = 2.0
"""Standard errors that a difference must exceed: about 95% confidence."""


@dataclass(frozen=True)
class Claim:
    """A claim that one layer has a lower loss than another.

    Attributes:
        text: the claim.
        better: the layer that has the lower loss in the claim.
        worse: the layer that has the higher one.
        where: the place in the paper; empty for a claim that is not the paper's.
        perplexities: the paper's figures of both; None where it has only curves.
        within: nats a token by which `better` may be worse: for a claim that it is about as good.
    """

    text: str
    better: Recipe
    worse: Recipe
    where: str = ""
    perplexities: tuple[float, float] | None = None
    within: float = 0.0

    @property
    def published(self) -> float | None:
        """The paper's advantage of `better`, in nats a token."""
        return None if self.perplexities is None else math.log(self.perplexities[1] / self.perplexities[0])


GELU = Recipe("lu", activation="gelu")
SHARED = Recipe("glu_shared")
ONE, TWO, FOUR, EIGHT, SIXTEEN = (replace(PAPER, n_masks=number) for number in (1, 2, 4, 8, 16))
ABOUT_AS_GOOD = 0.01
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
    Claim("four masks are as good as SwiGLU, to 1%", FOUR, SWIGLU, "Table 3", (23.9, 23.7), ABOUT_AS_GOOD),
    Claim("eight masks are better than SwiGLU", EIGHT, SWIGLU, "Table 3", (23.5, 23.7)),
    Claim("SiLU is better than ReLU", FOUR, replace(FOUR, activation="relu"), "Table 8", (23.9, 24.3)),
    Claim("SiLU is better than GELU as the gate", FOUR, replace(FOUR, activation="gelu"), "Table 8", (23.9, 24.0)),
    Claim("two learned masks are better than two fixed", TWO, replace(TWO, learned=False), "Table 12", (24.5, 25.1)),
    Claim("a learned mask is better than a fixed one", ONE, replace(ONE, learned=False), "Table 12", (25.0, 25.1)),
    Claim("Top-1 of four is worse than their sum", FOUR, replace(FOUR, top_k=1), "Table 10", (23.9, 25.2)),
    Claim(
        "Top-2 of four is as good as their sum, to 1%",
        replace(FOUR, top_k=2),
        FOUR,
        "Table 10",
        (24.0, 23.9),
        ABOUT_AS_GOOD,
    ),
    Claim("Top-4 of four is better than their sum", replace(FOUR, top_k=4), FOUR, "Table 10", (23.8, 23.9)),
    Claim("no gate mask is worse than one mask", ONE, Recipe("no_gate_mask", n_masks=1), "Figure 13"),
    Claim("no value mask is worse than one mask", ONE, Recipe("no_value_mask", n_masks=1), "Figure 13"),
    Claim("no masks are worse than one mask", ONE, SHARED, "Figure 13"),
]


def _at(size: str) -> list[Claim]:
    """What is asked of the best recipe at each size."""
    swiglu, one, four, best_one, best_four, larger = (replace(of, size=size) for of in SIZED)
    eight, best_eight = (replace(of, size=size) for of in SIZED_EIGHT)
    return [
        Claim(f"{size}: one mask learns better than with the paper's recipe", best_one, one),
        Claim(f"{size}: four masks learn better than with the paper's recipe", best_four, four),
        Claim(f"{size}: eight masks learn better than with the paper's recipe", best_eight, eight),
        Claim(f"{size}: SwiGLU is better than one mask", swiglu, best_one),
        Claim(f"{size}: SwiGLU is better than four masks", swiglu, best_four),
        Claim(f"{size}: SwiGLU is better than eight masks", swiglu, best_eight),
        Claim(f"{size}: SwiGLU learns better with a product 1.6 times as large", larger, swiglu),
        Claim(f"{size}: that SwiGLU is better than one mask", larger, best_one),
        Claim(f"{size}: that SwiGLU is better than four masks", larger, best_four),
    ]


_DOWN_8 = replace(SLOW, n_masks=8, down_gain=level(8))
_DOWN_1 = replace(PAPER, n_masks=1, down_gain=level(1))
_TOP_1, _TOP_2, _TOP_4, _NO_GATE_MASK, _NO_VALUE_MASK, _NO_MASKS = AGAIN

FINDINGS = [
    *(claim for size in SIZES for claim in _at(size)),
    Claim("two masks learn better than with the paper's recipe", BEST[2], TWO),
    Claim("sixteen masks learn better than with the paper's recipe", BEST[16], SIXTEEN),
    Claim("SwiGLU is better than two masks", SWIGLU, BEST[2]),
    Claim("SwiGLU is better than sixteen masks", SWIGLU, BEST[16]),
    Claim("SwiGLU with the larger product is better than eight masks", LARGER, BEST[8]),
    *(
        Claim(f"a constant factor of the sum is better than one of the initial weights, n_m = {n}", summed, BEST[n])
        for n, summed in {n: leveled(SLOW, n) for n in (1, 2, 8, 16)}.items()
    ),
    Claim("the same of one of the initial down projection, n_m = 8", _DOWN_8, BEST[8]),
    Claim("and, with the paper's rate of masks, n_m = 1", _DOWN_1, gained(PAPER, 1)),
    *(
        Claim(f"masks at 0.3 times the rate are better, with the paper's initial weights, n_m = {n}", slow, paper)
        for n, slow, paper in ((n, replace(SLOW, n_masks=n), replace(PAPER, n_masks=n)) for n in (1, 8))
    ),
    Claim("masks at 0.3 times the rate are better, with leveled weights, n_m = 1", BEST[1], gained(PAPER, 1)),
    Claim("one mask is better than SwiGLU with as many weights", BEST[1], replace(SWIGLU, width=SAME_WEIGHTS)),
    Claim("four masks are better than SwiGLU with as many weights", BEST[4], replace(SWIGLU, width=SAME_WEIGHTS)),
    Claim("one mask is better than SwiGLU with as many bytes", BEST[1], replace(SWIGLU, width=same_load(1))),
    Claim("four masks are better than SwiGLU with as many bytes", BEST[4], replace(SWIGLU, width=same_load(4))),
    Claim("the same of one mask, and the larger product", BEST[1], replace(LARGER, width=same_load(1))),
    Claim("the same of four masks, and the larger product", BEST[4], replace(LARGER, width=same_load(4))),
    Claim(
        "SwiGLU with as many operations in training is better than four masks",
        replace(SWIGLU, width=same_training(4)),
        BEST[4],
    ),
    Claim("learning one mask is better than a random one", BEST[1], replace(gained(PAPER, 1), learned=False)),
    Claim("learning eight masks is better than random ones", BEST[8], replace(gained(PAPER, 8), learned=False)),
    Claim("Top-1 of four is worse than their sum", BEST[4], _TOP_1),
    Claim("Top-2 of four is worse than their sum", BEST[4], _TOP_2),
    Claim("Top-4 of four is better than their sum", _TOP_4, BEST[4]),
    Claim("no gate mask is worse than one mask", BEST[1], _NO_GATE_MASK),
    Claim("no value mask is worse than one mask", BEST[1], _NO_VALUE_MASK),
    Claim("no masks are worse than one mask", BEST[1], _NO_MASKS),
]
"""What is asked of the best recipe. Models have 25M weights and equal widths unless the text says otherwise."""

COMPARED = frozenset(recipe for claim in (*CLAIMS, *FINDINGS) for recipe in (claim.better, claim.worse))
"""The recipes of both tables, whose seeds give the noise. Higher learning rates have larger differences of seeds."""


@dataclass(frozen=True)
class Measured:
    """The advantage of `better` over `worse` in the runs, in nats a token.

    Attributes:
        advantage: the difference of the means over seeds.
        seeds: the numbers of seeds of both.
        noise: CONFIDENCE standard errors of the advantage.
    """

    advantage: float
    seeds: tuple[int, int]
    noise: float


def deviation(losses: Iterable[Sequence[float]]) -> float:
    """The standard deviation of a seed, pooled over recipes with two seeds or more; NaN if there is none."""
    several = [of for of in losses if len(of) > 1 and all(map(math.isfinite, of))]
    if not several:
        return math.nan
    freedom = [len(of) - 1 for of in several]
    return math.sqrt(sum(map(math.prod, zip(map(statistics.variance, several), freedom, strict=True))) / sum(freedom))


def losses_of(found: Iterable[Finished], size: str) -> Mapping[Recipe, list[float]]:
    """The losses of all seeds of each recipe that is compared, of a size of model; the recipes have seed 0."""
    losses: dict[Recipe, list[float]] = {}
    for run in found:
        recipe = replace(run.recipe, seed=0)
        if recipe.size == size and recipe in COMPARED:
            losses.setdefault(recipe, []).append(run.loss)
    return losses


def measure(claim: Claim, found: Sequence[Finished]) -> Measured | None:
    """What the runs say about a claim; None if a run of a layer is missing, or if no recipe has two seeds."""
    losses = losses_of(found, claim.better.size)
    better, worse, one_seed = losses.get(claim.better), losses.get(claim.worse), deviation(losses.values())
    if not better or not worse or math.isnan(one_seed):
        return None
    advantage = statistics.fmean(worse) - statistics.fmean(better)
    noise = CONFIDENCE * one_seed * math.sqrt(1 / len(better) + 1 / len(worse))
    unit = found[0].bytes_of_token
    return Measured(advantage * unit, (len(better), len(worse)), noise * unit)


PAPER_WORDS = ("reproduced", "not reproduced")
OUR_WORDS = ("yes", "no")


def verdict(claim: Claim, measured: Measured | None, words: tuple[str, str] = PAPER_WORDS) -> str:
    """The first of two words where the claim holds by more than noise, the second where its reverse does."""
    if measured is None:
        return "not run"
    if math.isnan(measured.advantage):
        return f"{words[1]}: a run diverged"
    over = measured.advantage + claim.within
    if abs(over) <= measured.noise:
        return "undecided"
    return words[0] if over > 0 else words[1]


def table(found: Sequence[Finished]) -> str:
    """A line for each claim of the paper."""
    head = ["claim", "in the paper", "perplexities", "nats a token", "here", "noise", "seeds", "verdict"]
    lines = []
    for claim in CLAIMS:
        measured = measure(claim, found)
        paper = "curves" if claim.perplexities is None else "{} against {}".format(*claim.perplexities)
        published = "" if claim.published is None else f"{claim.published:+.3f}"
        lines.append([claim.text, claim.where, paper, published, *_cells(measured), verdict(claim, measured)])
    return markdown(head, lines)


def _cells(measured: Measured | None) -> list[str]:
    if measured is None:
        return ["", "", ""]
    return [f"{measured.advantage:+.4f}", f"{measured.noise:.4f}", "{} and {}".format(*measured.seeds)]


def claims(results: Path) -> str:
    """The table of the paper's claims.

    Raises:
        MissingResultError: there is no result.
    """
    found = runs(results)
    losses = losses_of(found, Recipe.size)
    several = [of for of in losses.values() if len(of) > 1]
    if not several:
        return f"{source(found)}\n\n{table(found)}"
    one_seed, unit = deviation(several), found[0].bytes_of_token
    return (
        f"{source(found)} A token has {unit:.2f} bytes. The standard deviation of a seed is {one_seed:.4f} nats a byte "
        f"or {one_seed * unit:.3f} nats a token, from {len(several)} recipes with several seeds.\n\n{table(found)}"
    )


def findings(results: Path) -> str:
    """The table of what is asked of the best recipe.

    Raises:
        MissingResultError: there is no result.
    """
    found = runs(results)
    lines = []
    for claim in FINDINGS:
        measured = measure(claim, found)
        lines.append([claim.text, *_cells(measured), verdict(claim, measured, OUR_WORDS)])
    sizes = {size: deviation(losses_of(found, size).values()) * found[0].bytes_of_token for size in SIZES}
    deviations = ", ".join(f"{one:.3f} in the {size} model" for size, one in sizes.items() if not math.isnan(one))
    head = ["question", "nats a token", "noise", "seeds", "answer"]
    return f"{source(found)} Standard deviation of a seed in nats a token: {deviations}.\n\n{markdown(head, lines)}"


def summary(results: Path) -> str:
    """Two sentences for the questions and answers.

    Raises:
        MissingResultError: there is no result, or none of these layers.
    """
    found = runs(results)

    def behind(layer: Recipe, other: Recipe) -> str:
        measured = measure(Claim("", other, layer), found)
        if measured is None:
            raise MissingResultError(f"{results}: no result of {label(layer)} and {label(other)} with several seeds")
        is_noise = abs(measured.advantage) <= measured.noise
        return f"{measured.advantage:+.3f}{' (within the noise)' if is_noise else ''}"

    paper, ours = (
        ", ".join(behind(layer, SWIGLU) for layer in layers)
        for layers in ((ONE, FOUR, EIGHT), (BEST[n_masks] for n_masks in (1, 4, 8)))
    )
    return (
        f"In this project's runs with 25M weights and {SWIGLU.megabytes:.0f} MB of Python source, layers with 1, 4 and "
        f"8 masks, trained as in the paper, differ from SwiGLU of the same width by {paper} nats a token; less is "
        f"better. With [our recipe](mglu_ops/nn/README.md#the-recipe-that-we-recommend) they differ by {ours}, and one "
        f"mask differs from SwiGLU with as many bytes by {behind(BEST[1], replace(SWIGLU, width=same_load(1)))}, or by "
        f"{behind(BEST[1], replace(LARGER, width=same_load(1)))} if that SwiGLU's product is 1.6 times as large."
    )


def stability(results: Path) -> str:
    """The table of learning rates: the loss, and by how much single steps exceed the mean of their part of the run.

    A run has parts between the points of its curve; the first, with the warm-up, is left out. 'Rise' is by how much the
    mean of a part exceeds that of an earlier one. Of several seeds, the loss is the mean, and the rest the largest.

    Raises:
        MissingResultError: there is no result.
    """
    found = runs(results)
    lines = []
    for lr in (1e-3, 3e-3, 6e-3, 1e-2):
        for recipe in (SWIGLU, FOUR):
            of = [run for run in found if replace(run.recipe, seed=0) == replace(recipe, lr=lr)]
            if of:
                parts = [[(float(row["train"]), float(row["worst"])) for row in run.rows[1:]] for run in of]
                spike = max(worst - mean for run in parts for mean, worst in run)
                rise = max(late - early for run in parts for i, (early, _) in enumerate(run) for late, _ in run[i:])
                loss = statistics.fmean(run.loss for run in of)
                lines.append([f"{lr:g}", label(recipe), f"{loss:.4f}", f"{spike:.2f}", f"{rise:.2f}", str(len(of))])
    head = ["learning rate", "layer", "nats a byte", "largest step over its part's mean", "rise", "seeds"]
    return f"{source(found)}\n\n{markdown(head, lines)}"
