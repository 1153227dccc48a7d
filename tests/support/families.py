"""Parameters of large families of tests: a part of each family is quick, and the rest has the mark `long`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def family(*axes: Iterable[Any], fits: Callable[..., bool] = lambda *case: True) -> list[Any]:
    """All combinations of several axes that fit, the first axis varying slowest.

    For each value of the first axis one combination is quick, so put what must always be tested first.
    """
    seen: set[Any] = set()
    found = []
    for case in itertools.product(*axes):
        if fits(*case):
            found.append(_parameters(case, is_long=case[0] in seen))
            seen.add(case[0])
    return found


def sample(values: Iterable[Any], every: int) -> list[Any]:
    """All values, of which one in `every` is quick."""
    return [_parameters((value,), is_long=number % every != 0) for number, value in enumerate(values)]


def quick_only_for(quick: Sequence[Any], values: Iterable[Any]) -> list[Any]:
    """All values, of which those in `quick` are quick."""
    return [_parameters((value,), is_long=value not in quick) for value in values]


def _parameters(case: tuple[Any, ...], *, is_long: bool) -> Any:
    return pytest.param(*case, marks=pytest.mark.long if is_long else ())
