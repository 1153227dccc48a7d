"""The bars for training: what `fused` must reach beside the naive layer, the complement trick and the GEMMs alone.

python -m benchmarks.bars DIR

prints every bar that the rows of `DIR/train.csv` miss, and exits with 1 if there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.markdown import time_of
from benchmarks.records import Row, read
from benchmarks.rows import of, only, shapes, tokens
from benchmarks.train_layers import CASE, FUSED, GEMMS, MODULE, NAIVE, OPERATOR, TRICK

MAX_ERROR_OVER_NAIVE = 1.5
"""The limit for the result and for each gradient, with masks half of whose bits are set."""
MAX_DIFFERENCE_OF_CALLS = 0.03
"""The limit between the fused layer and the same layer as an operator or a module, relative to the fused one's time."""


@dataclass(frozen=True)
class Bar:
    """The figures that a layer with a given number of masks must reach.

    Attributes:
        over_naive: least speed-up over the naive layer.
        over_trick: least speed-up over the complement trick.
        of_gemms: largest multiple of the time of the three stacked GEMMs; None for no bar.
        of_naive_memory: largest share of the naive layer's peak memory.
        of_trick_memory: largest share of the complement trick's peak memory; None for no bar.
    """

    over_naive: float
    over_trick: float
    of_gemms: float | None
    of_naive_memory: float
    of_trick_memory: float | None = 1.0


BARS = {
    1: Bar(1.02, 1.0, None, 1.0, None),
    2: Bar(1.35, 1.05, None, 0.7),
    4: Bar(1.65, 1.06, 1.1, 0.6),
    8: Bar(1.8, 1.07, 1.1, 0.6),
    16: Bar(1.0, 1.0, 1.1, 0.6),
}


def missed(rows: Sequence[Row]) -> list[str]:
    """A line for every bar that is missed; a bar whose rows are not all there is skipped."""
    lines = []
    steps = only(rows, case=CASE)
    for shape in shapes(steps):
        for count in tokens(steps):
            for n_masks in BARS:
                here = only(steps, shape=shape, tokens=count, n_masks=n_masks)
                problem = f"{shape[0]}x{shape[1]}, {count} tokens, n_m = {n_masks}"
                lines += [f"bar missed: {problem}: {line}" for line in _missed(here, BARS[n_masks])]
    return lines


def _missed(rows: Sequence[Row], bar: Bar) -> Iterator[str]:
    fused, naive, trick = (of(rows, name) for name in (FUSED, NAIVE, TRICK))
    yield from _slow(fused, naive, bar.over_naive)
    yield from _slow(fused, trick, bar.over_trick)
    ours, gemms = time_of(fused), time_of(of(rows, GEMMS))
    if bar.of_gemms and ours and gemms and ours > bar.of_gemms * gemms:
        yield f"{ours / gemms:.2f}x of the {GEMMS}, must be {bar.of_gemms:.2f}x at most"
    yield from _large(fused, naive, bar.of_naive_memory)
    if bar.of_trick_memory:
        yield from _large(fused, trick, bar.of_trick_memory)
    for name in (OPERATOR, MODULE):
        other = time_of(of(rows, name))
        if ours and other and abs(other / ours - 1) > MAX_DIFFERENCE_OF_CALLS:
            yield f"{name} takes {other / ours:.2f}x of {FUSED}, must differ by {MAX_DIFFERENCE_OF_CALLS:.0%} at most"
    yield from _inexact(fused, naive)
    yield from (f"the bits of {row.variant} do not repeat" for row in rows if row.extra.get("bits_repeat") is False)


def _slow(ours: Row | None, theirs: Row | None, least: float) -> Iterator[str]:
    above, below = time_of(theirs), time_of(ours)
    if theirs and above and below and above / below < least:
        yield f"{above / below:.2f}x over {theirs.variant}, must be {least:.2f}x"


def _large(ours: Row | None, theirs: Row | None, most: float) -> Iterator[str]:
    if ours and theirs and (share := peak_of(ours) / peak_of(theirs)) > most:
        yield f"{share:.0%} of the memory of {theirs.variant}, must be {most:.0%} at most"


def peak_of(row: Row) -> float:
    """The peak of memory in MB; NaN if it is unknown."""
    return float(str(row.extra.get("peak_mb", "nan")))


def errors_of(row: Row | None) -> dict[str, float]:
    """The errors of the result and of the gradients; empty if they are unknown."""
    errors = row.extra.get("errors") if row else None
    return errors if isinstance(errors, dict) else {}


def _inexact(ours: Row | None, theirs: Row | None) -> Iterator[str]:
    naive = errors_of(theirs)
    for name, error in errors_of(ours).items():
        if error > MAX_ERROR_OVER_NAIVE * naive.get(name, float("inf")):
            ratio = error / naive[name]
            yield f"{name} has {ratio:.2f}x the error of the naive layer, must be {MAX_ERROR_OVER_NAIVE}x at most"


if __name__ == "__main__":
    rows = read(Path(sys.argv[1]), "train")
    misses = missed(rows)
    print(*misses, f"{len(rows)} rows, {len(misses)} bars missed", sep="\n")
    sys.exit(bool(misses))
