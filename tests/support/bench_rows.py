"""Makes the rows of a benchmark's result, for tests of tables and plots."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.records import Row, write


def row(variant: str, microseconds: float, n_masks: int = 1, tokens: int = 1, **changes: Any) -> Row:
    fields: dict[str, Any] = {
        "case": "decode",
        "out_features": 8192,
        "in_features": 2048,
        "dtype": "bfloat16",
        "spread": 0.5,
        "fraction_of_ceiling": 0.5,
        "error": 1e-3,
    }
    return Row(variant=variant, microseconds=microseconds, n_masks=n_masks, tokens=tokens, **{**fields, **changes})


def frame_of(rows: Iterable[Row], folder: Path) -> Any:
    """The pandas frame of the rows, after a round trip through files in `folder`."""
    from benchmarks import frames

    write(rows, folder, "rows", "by the clock")
    return frames.load(folder, "rows")
