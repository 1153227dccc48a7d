"""What the paper (arXiv 2506.23225) claims about learning, its figures, and a verdict from the runs made here.

A claim says that one layer learns better than another, at equal width and with the paper's recipe. The paper's figures
are validation perplexities of its small models; the logarithm of their ratio is a difference in nats a token, in which
the runs are compared too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.learning.experiments import PAPER, SWIGLU
from benchmarks.learning.recipe import Recipe
from benchmarks.learning.tables import Finished, runs, source
from benchmarks.markdown import markdown

CONFIDENCE = 2.0
"""Standard errors that a difference must exceed: about 95% confidence."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    Attributes:
        text: the claim.
        where: the place in the paper.
        better: the layer that has the lower loss in the claim.
        worse: the layer that has the higher one.
        perplexities: the paper's figures of both; None where it has only curves.
        within: nats a token by which `better` may be worse: for a claim that it is about as good.
    """

    text: str
    where: str
    better: Recipe
    worse: Recipe
    perplexities: tuple[float, float] | None
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
    Claim("SwiGLU is better than GELU", "Table 3", SWIGLU, GELU, (23.7, 25.8)),
    Claim("SwiGLU with one shared matrix is worse than GELU", "Table 1", GELU, SHARED, (25.6, 27.0)),
    Claim("one mask is better than GELU", "Table 3", ONE, GELU, (25.0, 25.8)),
    Claim("one mask is worse than SwiGLU", "Table 3", SWIGLU, ONE, (23.7, 25.0)),
    Claim("two masks are better than one", "Table 3", TWO, ONE, (24.5, 25.0)),
    Claim("four masks are better than two", "Table 3", FOUR, TWO, (23.9, 24.5)),
    Claim("eight masks are better than four", "Table 3", EIGHT, FOUR, (23.5, 23.9)),
    Claim("sixteen masks are better than eight", "Table 14", SIXTEEN, EIGHT, (23.3, 23.5)),
    Claim("four masks are as good as SwiGLU, to 1%", "Table 3", FOUR, SWIGLU, (23.9, 23.7), ABOUT_AS_GOOD),
    Claim("eight masks are better than SwiGLU", "Table 3", EIGHT, SWIGLU, (23.5, 23.7)),
    Claim("SiLU is better than ReLU", "Table 8", FOUR, replace(FOUR, activation="relu"), (23.9, 24.3)),
    Claim("SiLU is better than GELU as the gate", "Table 8", FOUR, replace(FOUR, activation="gelu"), (23.9, 24.0)),
    Claim("two learned masks are better than two fixed", "Table 12", TWO, replace(TWO, learned=False), (24.5, 25.1)),
    Claim("a learned mask is better than a fixed one", "Table 12", ONE, replace(ONE, learned=False), (25.0, 25.1)),
    Claim("Top-1 of four is worse than their sum", "Table 10", FOUR, replace(FOUR, top_k=1), (23.9, 25.2)),
    Claim(
        "Top-2 of four is as good as their sum, to 1%",
        "Table 10",
        replace(FOUR, top_k=2),
        FOUR,
        (24.0, 23.9),
        ABOUT_AS_GOOD,
    ),
    Claim("Top-4 of four is better than their sum", "Table 10", replace(FOUR, top_k=4), FOUR, (23.8, 23.9)),
    Claim("no gate mask is worse than one mask", "Figure 13", ONE, Recipe("no_gate_mask", n_masks=1), None),
    Claim("no value mask is worse than one mask", "Figure 13", ONE, Recipe("no_value_mask", n_masks=1), None),
    Claim("no masks are worse than one mask", "Figure 13", ONE, SHARED, None),
]


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
    """The losses of all seeds of each recipe of a size of model; the recipes have seed 0."""
    losses: dict[Recipe, list[float]] = {}
    for run in found:
        if run.recipe.size == size:
            losses.setdefault(replace(run.recipe, seed=0), []).append(run.loss)
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


def verdict(claim: Claim, measured: Measured | None) -> str:
    """`reproduced` or `not reproduced` where the difference is more than noise, else `undecided`."""
    if measured is None:
        return "not run"
    if math.isnan(measured.advantage):
        return "not reproduced: a run diverged"
    over = measured.advantage + claim.within
    if abs(over) <= measured.noise:
        return "undecided"
    return "reproduced" if over > 0 else "not reproduced"


def table(found: Sequence[Finished]) -> str:
    """A line for each claim."""
    head = ["claim", "in the paper", "perplexities", "nats a token", "here", "noise", "seeds", "verdict"]
    lines = []
    for claim in CLAIMS:
        measured = measure(claim, found)
        lines.append(
            [
                claim.text,
                claim.where,
                "curves" if claim.perplexities is None else "{} against {}".format(*claim.perplexities),
                "" if claim.published is None else f"{claim.published:+.3f}",
                "" if measured is None else f"{measured.advantage:+.4f}",
                "" if measured is None else f"{measured.noise:.4f}",
                "" if measured is None else "{} and {}".format(*measured.seeds),
                verdict(claim, measured),
            ]
        )
    return markdown(head, lines)


def claims(results: Path) -> str:
    """The table of all claims.

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
