"""Compares layers by their training runs: the paper's claims (arXiv 2506.23225), our recipe, and 2:4 masks.

`claims.csv` and `comparisons.csv` list the pairs of layers by their names (`tables.label`). A difference is the loss of
the first layer minus the loss of the second, so a negative difference is better for the first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from scipy.stats import t

from benchmarks.frames import grid, markdown
from benchmarks.learning.experiments import SLOW
from benchmarks.learning.gather import RESULTS
from benchmarks.learning.masks import LOGIT_BYTES
from benchmarks.learning.recipe import SIZES, Recipe
from benchmarks.learning.tables import bytes_of_token, label, read, recipe_of, runs

CLAIMS = pd.read_csv(Path(__file__).with_name("claims.csv"))
"""The claims of the paper: `better` has a lower loss than `worse`, or at most `within` nats a token more.

`where` is the table or figure of the paper. The perplexities are the paper's, and missing if it has only curves.
"""
COMPARISONS = pd.read_csv(Path(__file__).with_name("comparisons.csv"), true_values=["yes"], false_values=["no"])
"""Pairs of layers to compare, by corpus and question, at every size at which both were trained.

The standard deviation between seeds is estimated from pairs with `noise` and from the layers of the claims. Questions
about the corpus `python` that were added later have no `noise`, so that the estimate stays as it was.
"""
ERRORS = 2.0
"""Standard errors that a difference must exceed to be more than noise: about 95% confidence."""


class Difference(NamedTuple):
    """The mean difference of two layers, and its noise: half the width of its 95% confidence interval, NaN if unknown.

    `error` is the standard deviation of the mean, and `pairs` the number of seeds that both layers have.
    """

    mean: float
    noise: float
    error: float
    pairs: int

    @property
    def is_noise(self) -> bool:
        return not abs(self.mean) > self.noise

    def text(self, digits: int) -> str:
        return f"{self.mean:+.{digits}f}" + ("" if math.isnan(self.noise) else f" ± {self.noise:.{digits}f}")

    def cell(self, digits: int = 4) -> str:
        """The text, in bold if the difference exceeds the noise."""
        return self.text(digits) if self.is_noise else f"**{self.text(digits)}**"

    def __str__(self) -> str:
        return self.text(4)


def difference(ours: pd.Series, theirs: pd.Series, deviation: float | None = None) -> Difference | None:
    """Compare the losses of two layers by seed.

    If `deviation`, the standard deviation between seeds, is given, all runs count as independent, and the noise is
    `ERRORS` standard errors. Otherwise, runs with the same seed are pairs, and the noise follows from the differences
    of the pairs by Student's t. Without a common seed, the result is None.
    """
    pairs = (ours - theirs).dropna()
    if deviation is not None:
        error = deviation * math.sqrt(1 / len(ours) + 1 / len(theirs))
        return Difference(ours.mean(skipna=False) - theirs.mean(skipna=False), ERRORS * error, error, len(pairs))
    if pairs.empty:
        return None
    error = pairs.sem()
    return Difference(pairs.mean(), t.ppf(0.975, len(pairs) - 1) * error, error, len(pairs))


def deviation_of(losses: Iterable[pd.Series]) -> float:
    """The standard deviation between seeds, pooled over layers with several finite losses; NaN without such layers."""
    several = [of for of in losses if len(of) > 1 and of.notna().all()]
    freedom = sum(len(of) - 1 for of in several)
    return math.sqrt(sum((len(of) - 1) * of.var() for of in several) / freedom) if several else math.nan


def losses_of(found: pd.DataFrame, measure: str = "held_out") -> dict[Recipe, pd.Series]:
    """Recipe, with its seed set to 0 -> the losses of its runs by seed, in nats per byte."""
    return {one: of.set_index("seed")[measure] for one, of in found.groupby("recipe", sort=False)}


class Study:
    """The losses of the runs on a corpus, and for each size of model their standard deviation between seeds.

    The losses are in nats per token for the corpus `python`, and in nats per byte for other corpora. Names of layers in
    `texts` omit the megabytes, which grow with the model. For other corpora than `python` and `texts`, `deviations`
    is empty, and layers are compared seed by seed.
    """

    def __init__(self, results: Path, corpus: str = "python", measure: str = "held_out") -> None:
        found = runs(results, corpus)
        self.unit, self.digits = (bytes_of_token(found), 3) if corpus == "python" else (1.0, 4)
        self.losses = {one: self.unit * of for one, of in losses_of(found, measure).items()}
        alike = [replace(one, megabytes=Recipe.megabytes) for one in self.losses] if corpus == "texts" else self.losses
        self.named = {(label(one), one.size): of for one, of in zip(alike, self.losses.values(), strict=True)}
        sizes = SIZES if corpus in ("python", "texts") else ()
        self.deviations = {size: deviation_of(self._noisy(corpus, size)) for size in sizes}

    def _noisy(self, corpus: str, size: str) -> list[pd.Series]:
        """The losses of each layer in a pair with `noise`, if both layers of the pair were trained at this size."""
        asked = COMPARISONS[COMPARISONS.noise & (COMPARISONS.corpus == corpus)]
        pairs = {*zip(asked["layer"], asked["compared with"], strict=True)}
        if corpus == "python":
            pairs |= {*zip(CLAIMS.better, CLAIMS.worse, strict=True)}
        names = {name for pair in pairs if all((one, size) in self.named for one in pair) for name in pair}
        return [self.named[name, size] for name in sorted(names)]

    def difference(self, layer: str, other: str, size: str = Recipe.size) -> Difference | None:
        """Compare two layers, given by name, at a size; None if one was not trained."""
        ours, theirs = (self.named.get((name, size)) for name in (layer, other))
        return None if ours is None or theirs is None else difference(ours, theirs, self.deviations.get(size))

    def cell(self, layer: str, other: str, size: str) -> str:
        """The difference and its noise, in bold if it exceeds the noise; empty if a layer was not trained."""
        found = self.difference(layer, other, size)
        return "" if found is None else found.cell(self.digits)

    def spread(self) -> str:
        """The sentence about the standard deviation between seeds."""
        known = {size: deviation for size, deviation in self.deviations.items() if not math.isnan(deviation)}
        each = ", ".join(f"{deviation:.{self.digits}f} in the {size} model" for size, deviation in known.items())
        unit = "byte" if self.unit == 1 else f"token of {self.unit:.2f} bytes"
        return f"Standard deviation between seeds, in nats a {unit}: {each}."


def table(asked: pd.DataFrame, columns: Mapping[str, tuple[Study, str]]) -> str:
    """A table with the difference of each pair of layers in each study and size, without empty columns and rows."""
    pairs = asked.set_index(["layer", "compared with"])
    cells = {
        head: [study.cell(one, other, size) for one, other in pairs.index] for head, (study, size) in columns.items()
    }
    found = pd.DataFrame({head: own for head, own in cells.items() if any(own)}, pairs.index)
    return grid("layer", found[(found != "").any(axis="columns")])


def findings(results: Path) -> str:
    """The comparisons of the corpus `python`, with a table for each question."""
    study = Study(results)
    parts = [study.spread()]
    for question, asked in COMPARISONS[COMPARISONS.corpus == "python"].groupby("question", sort=False):
        parts.append(f"**{question}**\n\n{table(asked, {size: (study, size) for size in SIZES})}")
    return "\n\n".join(parts)


def texts(results: Path) -> str:
    """The comparisons on three kinds of text together, and for the largest model on each kind alone."""
    study = Study(results, "texts")
    columns = {size: (study, size) for size in ("25M", "90M", "300M")}
    for kind in ("python", "rfc", "c"):
        columns[f"300M, {kind}"] = Study(results, "texts", f"held_out_{kind}"), "300M"
    return f"{study.spread()}\n\n{table(COMPARISONS[COMPARISONS.corpus == 'texts'], columns)}"


MEASURES = {"held_out": "held out", "train": "last text"}
"""Column of the runs -> its heading. `train` is the loss on the last 10 MB of training text, which are read once."""


MANY_PAIRS = 5
"""The least number of pairs of a mean whose standard deviation is stated."""


def structure(results: Path, corpora: Sequence[str] = ("pinned", "pinned_earlier")) -> str:
    """The paired differences of 2:4 masks and their rivals on some corpora, and how precise the means are."""
    studies = {(corpus, measure): Study(results, corpus, measure) for corpus, measure in product(corpora, MEASURES)}
    asked, columns, errors = COMPARISONS[COMPARISONS.corpus == "pinned"], dict[str, tuple[Study, str]](), list[str]()
    pairs = [*zip(asked["layer"], asked["compared with"], strict=True)]
    for corpus, size, (measure, about) in product(corpora, SIZES, MEASURES.items()):
        study = studies[corpus, measure]
        columns[f"{corpus}, {size}, {about}"] = study, size
        found = [one for pair in pairs if (one := study.difference(*pair, size)) is not None]
        if many := [one.error for one in found if one.pairs >= MANY_PAIRS]:
            errors.append(f"{max(many):.4f} ({corpus}, {size}, {about})")
    spread = (
        f"Largest standard deviation of a mean of at least {MANY_PAIRS} pairs, in nats a byte: {', '.join(errors)}.\n\n"
    )
    return (spread if errors else "") + table(asked, columns)


def averaged(results: Path) -> str:
    """The same for averaged parameters on the corpus `pinned_whole`, and the standard deviations of the losses."""
    losses = Study(results, "pinned_whole").losses
    each = (
        f"{deviation_of(of for recipe, of in losses.items() if recipe.size == size):.4f} in the {size} model"
        for size in sorted({recipe.size for recipe in losses})
    )
    spread = f"Standard deviation between seeds on held-out text, in nats a byte: {', '.join(each)}."
    return f"{spread}\n\n{structure(results, ['pinned_whole'])}"


def repeats(results: Path) -> str:
    """The losses of runs that were repeated with the same seed and kind of GPU, and their standard deviation."""
    first, second = (runs(results, corpus).set_index("run") for corpus in ("pinned", "pinned_repeats"))
    first = first.loc[second.index]
    cells = {"model": first["recipe.size"], "seed": first.seed.astype(str)}
    for measure, about in MEASURES.items():
        spread = ((first[measure] - second[measure]) ** 2).mean() ** 0.5 / 2**0.5
        figures = first[measure].map("{:.4f}".format) + ", " + second[measure].map("{:.4f}".format)
        cells[f"{about} (deviation {spread:.5f})"] = figures
    return grid("layer", pd.DataFrame(cells).set_axis(first.recipe.map(label)))


def same_text(one: Recipe) -> Recipe:
    """SwiGLU trained on with the text of a converted model."""
    return replace(one.teacher, start="teacher", skip=one.skip, megabytes=one.megabytes, lr=one.lr)


def conversions(results: Path) -> str:
    """The paired differences of converted models to SwiGLU trained on with the same text, and their bytes of a token.

    Raises:
        FileNotFoundError: no conversion on the corpus `pinned` has been compared yet.
    """
    found, lines = runs(results, "pinned"), dict[str, dict[str, str]]()
    loads, losses = found.groupby("recipe", sort=False).load.first(), losses_of(found)
    for one, own in losses.items():
        base = same_text(one)
        if one.layer == "glu" or base not in losses or (of := difference(own, losses[base])) is None:
            continue
        row = lines.setdefault(label(replace(one, megabytes=Recipe.megabytes)), {})
        row[f"bytes to SwiGLU, {one.size}"] = f"{loads[one] / loads[base]:.2f}"
        row[f"{one.size}, {one.megabytes / one.skip:.1%} of the text"] = of.cell()
    if not lines:
        raise FileNotFoundError(f"{results}: no such result: conversions of SwiGLU, and SwiGLU trained on")
    return grid("conversion", pd.DataFrame(lines).T.fillna(""))


def fits(results: Path) -> str:
    """The mean error of the layers after each step of a fit, by the first points of the curves of `pinned`.

    An error is `E |y' - y|^2 / E |y|^2` for the results y of the teacher's layer and y' of the fit.

    Raises:
        FileNotFoundError: no run on the corpus `pinned` began with a fit.
    """
    curves, found = (read(results / RESULTS.name / f"pinned_{name}.csv") for name in ("curves", "runs"))
    if "errors" not in curves:
        raise FileNotFoundError(f"{results}: no such result: runs that began with a fit")
    recipes = dict(zip(found.run, map(recipe_of, found.to_dict("records")), strict=True))
    first = curves[curves.errors.notna()]
    errors = pd.DataFrame([pd.DataFrame(json.loads(one)).mean() for one in first.errors])
    usual = {"megabytes": SLOW.megabytes, "mask_lr": SLOW.mask_lr, "seed": 0}
    names = [label(replace(recipes[run].fit, **usual)) for run in first.run]
    mean = errors.groupby([names, [recipes[run].size for run in first.run]], sort=False).mean()
    return grid("fit", mean.rename_axis(["fit", "model"]).reset_index("model").map(_figure))


def logits(results: Path) -> str:
    """Optimizers of mask logits: the bytes of a logit, the peak memory of training, and what they change in the loss.

    The changes are paired differences to AdamW, in each of `MEASURES`.

    Raises:
        FileNotFoundError: no run on the corpus `pinned` used another optimizer than AdamW.
    """
    found, lines = runs(results, "pinned"), dict[str, dict[str, str]]()
    peaks = found.groupby("recipe", sort=False).peak_mb.max() / 1000
    for measure, about in MEASURES.items():
        losses = losses_of(found, measure)
        for one, own in losses.items():
            base = replace(one, logits=Recipe.logits)
            if one == base or base not in losses or (of := difference(own, losses[base])) is None:
                continue
            row = lines.setdefault(label(one), {})
            row["bytes a logit"] = str(LOGIT_BYTES[one.logits])
            row["GB of training memory, AdamW"] = f"{peaks[one]:.2f}, {peaks[base]:.2f}"
            row[f"{one.size}, {about}"] = of.cell()
    if not lines:
        raise FileNotFoundError(f"{results}: no such result: runs with other optimizers of mask logits")
    return grid("layer", pd.DataFrame(lines).T.fillna(""))


def _figure(value: object) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4f}"  # the fit ended before this step
    return str(value)


def verdict(found: Difference | None, within: float = 0.0) -> str:
    """What the runs say about a claim. `found` is the loss of `worse` minus the loss of `better`."""
    if found is None:
        return "not run"
    if math.isnan(found.mean):
        return "not reproduced: a run diverged"
    over = found.mean + within
    if not abs(over) > found.noise:  # also if the noise is NaN
        return "undecided"
    return "reproduced" if over > 0 else "not reproduced"


def claims(results: Path) -> str:
    """A row for each claim of the paper."""
    study, lines = Study(results), []
    for claim in CLAIMS.itertuples():
        found = study.difference(claim.worse, claim.better)
        perplexities, nats = "curve against curve", ""
        if claim.better_perplexity > 0:  # false for NaN: the paper has only curves
            perplexities = f"{claim.better_perplexity} against {claim.worse_perplexity}"
            nats = f"{math.log(claim.worse_perplexity / claim.better_perplexity):+.3f}"
        lines.append([claim.claim, claim.where, perplexities, nats, found or "", verdict(found, claim.within)])
    return markdown(["claim", "in the paper", "perplexities", "nats a token", "here", "verdict"], lines)


TABLES: dict[str, Callable[[Path], str]] = {
    "learning_claims": claims,
    "learning_findings": findings,
    "learning_structure": structure,
    "learning_averaged": averaged,
    "learning_repeats": repeats,
    "learning_conversions": conversions,
    "learning_fits": fits,
    "learning_logits": logits,
    "learning_texts": texts,
}
"""Name of a table -> the function that makes it from a folder of results."""
