"""Compares layers by their training runs: the paper's claims (arXiv 2506.23225), our recipe, and paired seeds.

A difference is the loss of the first layer minus the loss of the second, so that negative is better for the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from benchmarks.frames import form, grid, markdown
from benchmarks.learning.experiments import (
    AGAIN,
    BEST,
    EQUAL_TIME,
    FROZEN,
    LARGER,
    MIXTURE,
    OTHERWISE,
    PAPER,
    RELU_SQUARED,
    SAME_WEIGHTS,
    SLOW,
    STRUCTURE,
    SWIGLU,
    TEXT,
    USUAL,
    best_with,
    chosen,
    gained,
    level,
    leveled,
    leveled_glu,
    leveled_lu,
    same_fp8_load,
    same_load,
    same_training,
)
from benchmarks.learning.recipe import SIZES, Recipe
from benchmarks.learning.tables import bytes_of_token, label, runs

ERRORS = 2.0
"""Standard errors that a difference must exceed to be more than noise: about 95% confidence."""
QUANTILES = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5% quantiles of Student's t with 0 (none), 1, 2, ... degrees of freedom."""


class Difference(NamedTuple):
    """The mean difference of two layers, and its noise: half the width of its 95% confidence interval, NaN if unknown.

    `deviation` is the standard deviation of paired differences, or the one between seeds.
    """

    mean: float
    noise: float
    deviation: float

    @property
    def is_noise(self) -> bool:
        return abs(self.mean) <= self.noise

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + ("" if math.isnan(self.noise) else f" ± {self.noise:.4f}")


def difference(ours: pd.Series, theirs: pd.Series, deviation: float | None = None) -> Difference | None:
    """Compare the losses of two layers by seed.

    With the standard deviation between seeds, seeds are independent and the noise is `ERRORS` standard errors. Without
    it, runs with the same seed are pairs, and the noise follows from their differences by Student's t; the result is
    None if no seed is in both.
    """
    if deviation is not None:
        error = deviation * math.sqrt(1 / len(ours) + 1 / len(theirs))
        return Difference(ours.mean(skipna=False) - theirs.mean(skipna=False), ERRORS * error, deviation)
    pairs = (ours - theirs).dropna()
    if pairs.empty:
        return None
    return Difference(pairs.mean(), QUANTILES[len(pairs) - 1] * pairs.std() / math.sqrt(len(pairs)), pairs.std())


def deviation_of(losses: Iterable[pd.Series]) -> float:
    """The standard deviation between seeds, pooled over layers with several seeds, all finite; NaN without any."""
    several = [of for of in losses if len(of) > 1 and of.notna().all()]
    freedom = sum(len(of) - 1 for of in several)
    return math.sqrt(sum((len(of) - 1) * of.var() for of in several) / freedom) if several else math.nan


def losses_of(found: pd.DataFrame, measure: str = "held_out") -> dict[Recipe, pd.Series]:
    """The losses of each recipe (with seed 0) by seed, in nats a byte."""
    return {one: of.set_index("seed")[measure] for one, of in found.groupby("recipe", sort=False)}


# --- The paper's claims -----------------------------------------------------------------------------------------------


class Claim(NamedTuple):
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
    def published(self) -> float:
        """The paper's advantage of `better` in nats a token; NaN without figures."""
        return math.nan if self.perplexities is None else math.log(self.perplexities[1] / self.perplexities[0])


PAPERS = {n_masks: replace(PAPER, n_masks=n_masks) for n_masks in BEST}
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

# --- Questions about our recipe ---------------------------------------------------------------------------------------

Pairs = Mapping[str, list[tuple[Recipe, Recipe]]]
GATES = ("relu", "gelu", "silu")
FACTOR = replace(PAPER, n_masks=1, down_gain=level(1))
LEVELED = leveled_glu("silu")


def as_fp8(gate: str | None, n_masks: int) -> Recipe:
    """GLU, or ReLU squared if `gate` is None, with as many bytes as masks if weights have 8 bits."""
    width = same_fp8_load(n_masks)
    return leveled_glu(gate, round(width, 4)) if gate else leveled_lu("relu_squared", round(1.5 * width, 4))


COMPARISONS: Pairs = {
    "How many masks": [(BEST[n], BEST[1]) for n in (2, 4, 8, 16)],
    "Against SwiGLU of equal width": [
        *((BEST[n], SWIGLU) for n in BEST),
        *((BEST[n], LARGER) for n in (1, 4, 8)),
        (LARGER, SWIGLU),
    ],
    "As many weights": [(BEST[n], replace(SWIGLU, width=SAME_WEIGHTS)) for n in (1, 4)],
    "As many bytes": [(BEST[n], replace(glu, width=same_load(n))) for glu in (SWIGLU, LARGER) for n in (1, 4)],
    "As many training operations": [
        (BEST[4], replace(SWIGLU, width=same_training(4))),
        (best_with("relu", 4, 0.5), SWIGLU),
        (best_with("relu", 4), leveled_lu("relu_squared", 3.0)),
        *((best_with("relu", 4), leveled_glu(gate, 2.0)) for gate in ("relu", "silu")),
    ],
    "As many bytes, if weights have 8 bits": [
        *((best_with(gate, n), as_fp8(glu, n)) for n in (1, 4) for gate in GATES for glu in (None, "relu", "silu")),
        *(
            (best_with("relu", n, round(1 / same_fp8_load(n), 4)), glu)
            for n in (1, 4)
            for glu in (leveled_glu("relu"), LEVELED)
        ),
    ],
    "Our recipe against the paper's": [(BEST[n], PAPERS[n]) for n in BEST],
    "The parts of the recipe": [
        *((replace(SLOW, n_masks=n), PAPERS[n]) for n in (1, 8)),
        (BEST[1], gained(PAPER, 1)),
        *((BEST[n], leveled(SLOW, n)) for n in (1, 2, 8, 16)),
        (BEST[8], replace(SLOW, n_masks=8, down_gain=level(8))),
        (gained(PAPER, 1), FACTOR),
    ],
    "Learned masks, routes and ablations": [
        *((BEST[n], replace(gained(PAPER, n), learned=False)) for n in (1, 8)),
        *((BEST[4], top) for top in AGAIN[:3]),
        *((BEST[1], one) for one in AGAIN[3:]),
    ],
    "Masks that are not learned, by gate": [(replace(one, learned=True), one) for one in FROZEN],
}
"""Question to pairs of layers, compared at every size at which both were trained. Their seeds give the noise."""
LATER: Pairs = {
    "As many bytes, other gates": [
        (best_with("gelu", 1), leveled_lu("relu_squared", 1.5 * same_load(1))),
        (best_with("gelu", 1), replace(LARGER, width=same_load(1))),
        *((best_with("relu", n), leveled_glu("relu", same_load(n))) for n in (1, 4)),
    ],
    "As much time a training step": [
        *((one, other) for one in EQUAL_TIME[1:3] for other in (SWIGLU, LEVELED, EQUAL_TIME[0])),
        *((best_with("relu", 4), other) for other in EQUAL_TIME[3:]),
    ],
    "Gates": [(best_with(gate, n), BEST[n]) for n in (1, 4) for gate in ("relu", "gelu", "relu_squared")],
    "GLU with other gates": [
        *((leveled_glu(gate), LEVELED) for gate in ("relu", "gelu", "relu_squared")),
        *((best_with(gate, 1), leveled_glu(gate)) for gate in ("relu", "gelu")),
        (leveled_glu("gelu"), SWIGLU),
        (best_with("gelu", 1), SWIGLU),
    ],
    "ReLU squared without masks, and 1.5 times as wide with as many bytes as SwiGLU": [
        *((relu_squared, SWIGLU) for relu_squared in RELU_SQUARED),
        *((best_with(gate, n), relu_squared) for relu_squared in RELU_SQUARED for n in (1, 4) for gate in GATES),
    ],
    "Mixtures of 8 experts, 2 active": [
        *((one, MIXTURE[0]) for one in MIXTURE[1:]),
        *((one, MIXTURE[1]) for one in MIXTURE[2:4]),
    ],
    "Other ways to learn masks": [(one, best_with(one.activation, one.n_masks)) for one in OTHERWISE],
}
"""Questions that were asked after the noise had been estimated, which texts quote. Their layers do not enter it."""


def compared() -> set[Recipe]:
    """The recipes of the corpus `python` whose seeds give the noise; those of the searches differ more by seed."""
    planned = set(chosen(USUAL))
    sized = ([replace(one, size=size) for one in pair] for pair in chain(*COMPARISONS.values()) for size in SIZES)
    claimed = ((claim.better, claim.worse) for claim in CLAIMS)
    return {one for pair in chain(claimed, sized) if planned.issuperset(pair) for one in pair}


class Study:
    """The losses of a corpus, and for each size of model their standard deviation between seeds.

    They are in nats a token for the corpus `python`, and in nats a byte for others, whose noise all runs give.
    """

    def __init__(self, results: Path, corpus: str = "python") -> None:
        found = runs(results, corpus)
        self.unit = bytes_of_token(found) if corpus == "python" else 1.0
        self.losses = {one: self.unit * of for one, of in losses_of(found).items()}
        noisy = compared() if corpus == "python" else self.losses.keys()
        self.deviations = {
            size: deviation_of(of for one, of in self.losses.items() if one in noisy and one.size == size)
            for size in SIZES
        }

    def difference(self, layer: Recipe, other: Recipe, size: str = Recipe.size) -> Difference | None:
        """Compare two layers at a size; None if one was not trained, or if no layer of the size has two seeds."""
        one, two = (self.losses.get(replace(recipe, size=size)) for recipe in (layer, other))
        deviation = self.deviations[size]
        return None if one is None or two is None or math.isnan(deviation) else difference(one, two, deviation)

    def cell(self, layer: Recipe, other: Recipe, size: str) -> str:
        """The difference and its noise, in bold if it is more than noise; empty if a layer was not trained."""
        if (found := self.difference(layer, other, size)) is None:
            return ""
        text = f"{found.mean:+.3f} ± {found.noise:.3f}"
        return text if found.is_noise else f"**{text}**"


def verdict(claim: Claim, found: Difference | None) -> str:
    """What the runs say about a claim of the paper; `found` is the difference of its worse layer and its better one."""
    if found is None:
        return "not run"
    if math.isnan(found.mean):
        return "not reproduced: a run diverged"
    over = found.mean + claim.within
    return "undecided" if abs(over) <= found.noise else "reproduced" if over > 0 else "not reproduced"


def claims(results: Path) -> str:
    """A row for each claim of the paper."""
    study, lines = Study(results), []
    for claim in CLAIMS:
        found = study.difference(claim.worse, claim.better)
        paper = ["{} against {}".format(*claim.perplexities or ("curve", "curve")), form("{:+.3f}")(claim.published)]
        lines.append([claim.text, claim.where, *paper, found or "", verdict(claim, found)])
    return markdown(["claim", "in the paper", "perplexities", "nats a token", "here", "verdict"], lines)


def findings(results: Path) -> str:
    """The tables of all comparisons, one for each question."""
    study = Study(results)
    sizes = {size: deviation for size, deviation in study.deviations.items() if not math.isnan(deviation)}
    deviations = ", ".join(f"{deviation:.3f} in the {size} model" for size, deviation in sizes.items())
    parts = [f"Standard deviation between seeds, in nats a token of {study.unit:.2f} bytes: {deviations}."]
    for question, pairs in {**COMPARISONS, **LATER}.items():
        columns = [size for size in sizes if any(study.cell(*pair, size) for pair in pairs)]
        lines = [[*map(label, pair), *(study.cell(*pair, size) for size in columns)] for pair in pairs]
        parts += [f"**{question}**", markdown(["layer", "compared with", *columns], lines)]
    return "\n\n".join(parts)


def texts(results: Path) -> str:
    """The comparisons of the layers that read three kinds of text, in nats a byte."""
    study, sizes = Study(results, "texts"), {size: layers[0].megabytes for size, layers in TEXT.items()}
    swiglu, relu_squared, one, four = TEXT["25M"]
    silu = [best_with("silu", n) for n in (1, 4)]
    pairs = [(four, swiglu), (one, swiglu), (four, one), (relu_squared, swiglu), (four, relu_squared)]
    pairs += [(one, relu_squared), *((mask, swiglu) for mask in silu), *zip(silu, (one, four), strict=True)]
    pairs += [(other, replace(other, continuous=0.0, flips=0.0, mask_lr=SLOW.mask_lr)) for other in OTHERWISE[:4]]

    def cell(pair: tuple[Recipe, Recipe], size: str) -> str:
        layer, other = (replace(recipe, megabytes=sizes[size]) for recipe in pair)
        found = study.difference(layer, other, size)
        return "" if found is None else str(found) if found.is_noise else f"**{found}**"

    lines = [[*map(label, pair), *(cell(pair, size) for size in sizes)] for pair in pairs]
    deviations = ", ".join(f"{study.deviations[size]:.4f} in the {size} model" for size in sizes)
    return (
        f"Standard deviation between seeds, in nats a byte: {deviations}.\n\n"
        f"{markdown(['layer', 'compared with', *sizes], lines)}"
    )


# --- Pairs of runs with the same seed ---------------------------------------------------------------------------------

PAIRED = ("pinned", "pinned_earlier")
"""The two texts of the experiment `structure`."""
MEASURES = {"held_out": "held out", "train": "last text"}
"""Column of the runs to what it measures: all held-out text, and the last 10 MB of training, which are read once."""
PAIRS = (
    ("one free mask", "SwiGLU"),
    ("one free mask", "leveled SwiGLU"),
    ("one 2:4 mask", "one free mask"),
    ("one 2:4 mask", "SwiGLU"),
    ("one 2:4 mask, centered gradient", "one 2:4 mask"),
    ("2:4 SwiGLU", "SwiGLU"),
    ("2:4 SwiGLU", "leveled SwiGLU"),
    ("2:4 SwiGLU", "one 2:4 mask"),
    ("2:4 SwiGLU", "one free mask"),
    ("2:4 SwiGLU, decay 2e-3", "2:4 SwiGLU"),
    ("2:4 SwiGLU, decay 2e-5", "2:4 SwiGLU"),
    ("ReLU squared", "one free mask"),
    ("ReLU squared", "one 2:4 mask"),
    ("one free mask, rate to 0", "SwiGLU, rate to 0"),
)
"""The layers that are compared seed by seed, keys of `experiments.STRUCTURE`."""


def structured(results: Path) -> dict[str, dict[str, pd.Series]]:
    """The losses by seed of each layer in `experiments.STRUCTURE`, for each text, size of model and measure."""
    found = {}
    for corpus, (measure, about) in product(PAIRED, MEASURES.items()):
        losses = losses_of(runs(results, corpus), measure)
        for size in dict.fromkeys(one.size for one in losses):
            layers = {name: losses.get(replace(one, size=size)) for name, one in STRUCTURE.items()}
            found[f"{corpus}, {size}, {about}"] = {name: of for name, of in layers.items() if of is not None}
    return dict(sorted(found.items()))


def structure(results: Path) -> str:
    """The paired differences of `PAIRS`, in nats a byte."""
    columns, lines = structured(results), []
    for ours, theirs in PAIRS:
        pairs = ([of.get(name) for name in (ours, theirs)] for of in columns.values())
        cells = [None if one is None or other is None else difference(one, other) for one, other in pairs]
        lines.append([ours, theirs, *("" if cell is None else cell for cell in cells)])
    return markdown(["layer", "compared with", *columns], lines)


def structure_losses(results: Path) -> str:
    """The mean loss of each layer, the standard deviation between its seeds, and their number."""
    columns = structured(results)
    lines = [[name, *(_spread(of.get(name)) for of in columns.values())] for name in STRUCTURE]
    pooled = [f"{deviation_of(of.values()):.5f}" for of in columns.values()]
    return markdown(["layer", *columns], [*lines, ["standard deviation between seeds", *pooled]])


def _spread(losses: pd.Series | None) -> str:
    return "" if losses is None else f"{losses.mean():.4f}{form(' ± {:.4f}')(losses.std())} ({len(losses)})"


def repeats(results: Path) -> str:
    """The losses of runs that were made twice, with the same seed and kind of GPU, and their standard deviation."""
    first, second = (runs(results, corpus).set_index("run") for corpus in ("pinned", "pinned_repeats"))
    first = first.loc[second.index]
    names = {replace(one, size=size): name for name, one in STRUCTURE.items() for size in SIZES}
    cells = {"seed": first.seed.astype(str)}
    for measure, about in MEASURES.items():
        spread = ((first[measure] - second[measure]) ** 2).mean() ** 0.5 / 2**0.5
        figures = first[measure].map("{:.4f}".format) + ", " + second[measure].map("{:.4f}".format)
        cells[f"{about} (deviation {spread:.5f})"] = figures
    lines = pd.DataFrame(cells).set_axis([f"{names[one]}, {one.size}" for one in first.recipe])
    return grid("layer", lines)


TABLES: dict[str, Callable[[Path], str]] = {
    "learning_claims": claims,
    "learning_findings": findings,
    "learning_structure": structure,
    "learning_structure_losses": structure_losses,
    "learning_repeats": repeats,
    "learning_texts": texts,
}
"""Name of a table to the function that makes it from the folder of the results."""
