"""The error of a demo whose results are wrong."""

from __future__ import annotations


class Disagreement(Exception):  # noqa: N818 (the word for what the demo looks for)
    """Two results that must agree do not, or a model did not learn. The command exits with code 1."""


def require(condition: bool, message: str) -> None:
    """Raise `Disagreement(message)` unless `condition` holds."""
    if not condition:
        raise Disagreement(message)
