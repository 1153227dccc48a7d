"""Parameters for large families of tests. Some cases of each family are quick, and the others have the mark `long`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def family(
    *axes: Iterable[Any], fits: Callable[..., bool] = lambda *case: True, most: int = 3, one_in: int | None = None
) -> list[Any]:
    """A thinned product of several axes: each value of the longest axis, with a few combinations of the other axes.

    The combinations rotate from value to value, so that all combinations occur. One case is quick for each value of the
    first axis, or for every second value if there are more than 8 values.

    Args:
        *axes: the values of each parameter.
        fits: returns False for combinations to skip.
        most: the most combinations with one value of the longest axis.
        one_in: if given, one in this many values of the first axis has a quick case.
    """
    lists = [list(axis) for axis in axes]
    longest = max(range(len(lists)), key=lambda axis: len(lists[axis]))
    every = [case for case in itertools.product(*lists) if fits(*case)]
    chosen = set()
    for number, value in enumerate(lists[longest]):
        matching = [k for k, case in enumerate(every) if case[longest] is value]
        chosen.update(itertools.islice(itertools.cycle(matching), number * most, (number + 1) * most))
    quick = lists[0][:: one_in or (2 if len(lists[0]) > 8 else 1)]
    found = []
    for case in (every[k] for k in sorted(chosen)):
        found.append(_parameters(case, is_long=case[0] not in quick))
        quick = [value for value in quick if value != case[0]]
    return found


def sample(values: Iterable[Any], every: int) -> list[Any]:
    """All values. One value in `every` is quick."""
    return [_parameters((value,), is_long=number % every != 0) for number, value in enumerate(values)]


def quick_only_for(quick: Sequence[Any], values: Iterable[Any]) -> list[Any]:
    """All values. The values in `quick` are quick."""
    return [_parameters((value,), is_long=value not in quick) for value in values]


def quick_cases(quick: Sequence[tuple[Any, ...]], every: Iterable[tuple[Any, ...]]) -> list[Any]:
    """All cases (tuples of parameters). The cases in `quick` are quick."""
    return [_parameters(case, is_long=case not in quick) for case in every]


def _parameters(case: tuple[Any, ...], *, is_long: bool) -> Any:
    return pytest.param(*case, marks=pytest.mark.long if is_long else ())
