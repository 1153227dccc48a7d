"""What can go wrong in the demo, by whose fault it is."""

from __future__ import annotations


class OptionError(Exception):
    """An option cannot be obeyed, or a package is missing: the words say what to do (exit code 2)."""


class Disagreement(Exception):  # noqa: N818 (it is what the demo looks for)
    """Two things that must agree do not, or a model did not learn (exit code 1)."""


def require(holds: bool, words: str) -> None:
    """Raise `Disagreement(words)` unless `holds`."""
    if not holds:
        raise Disagreement(words)
