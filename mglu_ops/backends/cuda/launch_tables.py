"""Launches that were measured to beat the model of costs: tables of this package, and the user's own.

`python -m mglu_ops tune` writes a table, a JSON file for one GPU:

    {"format": 1,
     "environment": {"device": "NVIDIA H200", "compute_capability": [9, 0], "multiprocessors": 132, ...},
     "entries": [{"dtype": "bfloat16", "n_masks": 4, "tokens": 8, "out_features": 14336, "in_features": 4096,
                  "config": {"kernel": "decode_mma", "tiles": 7, ...}, "microseconds": 40.1,
                  "model": {"kernel": "decode_mma", ...}, "model_microseconds": 42.3}, ...]}

Those in `tables` beside this file are part of the package. `MGLU_TUNING_TABLE` names one more, whose entries win.
Tables are read once a process, when its first launch is chosen; entries for other GPUs are not used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch

from .config import KernelName, LaunchConfig
from .limits import Case, violation

FORMAT = 1
VARIABLE = "MGLU_TUNING_TABLE"
FOLDER = Path(__file__).with_name("tables")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

_KINDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}
_T = TypeVar("_T")


class TableError(ValueError):
    """A table that cannot be used; the message names the file, the entry and what is wrong with it."""


@dataclass(frozen=True)
class Entry:
    """A launch that was measured, beside the one that the model of costs chose, in microseconds."""

    case: Case
    config: LaunchConfig
    microseconds: float
    model: LaunchConfig
    model_microseconds: float

    def to_json(self) -> dict[str, Any]:
        """The entry as it stands in a table's list."""
        case = self.case
        return {
            "dtype": str(case.dtype)[6:],
            "n_masks": case.n_masks,
            "tokens": case.tokens,
            "out_features": case.out_features,
            "in_features": case.in_features,
            "config": {"kernel": self.config.kernel, **self.config.settings()},
            "microseconds": round(self.microseconds, 2),
            "model": {"kernel": self.model.kernel, **self.model.settings()},
            "model_microseconds": round(self.model_microseconds, 2),
        }


@dataclass(frozen=True)
class Found:
    """An entry, and the table that it stands in."""

    entry: Entry
    table: Path

    def __str__(self) -> str:
        times = f"{self.entry.microseconds:g} us, the model's choice {self.entry.model_microseconds:g} us"
        return f"the table {self.table} ({times})"


def find(case: Case) -> Found | None:
    """What the tables have for a case.

    Raises:
        TableError: a table cannot be used.
    """
    return _all_tables().get(case)


@cache
def _all_tables() -> dict[Case, Found]:
    own = os.environ.get(VARIABLE)
    paths = [*sorted(FOLDER.glob("*.json")), *([Path(own)] if own else [])]
    return {entry.case: Found(entry, path) for path in paths for entry in read(path)}


def write(path: Path, environment: Mapping[str, object], entries: list[Entry]) -> None:
    """Write a table. `environment` has at least the three facts of the GPU."""
    table = {"format": FORMAT, "environment": dict(environment), "entries": [entry.to_json() for entry in entries]}
    path.write_text(json.dumps(table, indent=1) + "\n")


def read(path: Path) -> list[Entry]:
    """The entries of a table.

    Raises:
        TableError: the file is not a table of this format, or an entry is one that no kernel can run.
    """
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TableError(f"{path}: not a readable table of launches: {error}") from error
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        found = table.get("format") if isinstance(table, dict) else table
        raise TableError(f"{path}: format: got {found!r:.80}, must be {FORMAT}")
    environment = _get(table, "environment", dict, str(path))
    device = _get(environment, "device", str, f"{path}: environment")
    arch = _get(environment, "compute_capability", list, f"{path}: environment")
    if len(arch) != 2 or not all(type(part) is int for part in arch):
        raise TableError(f"{path}: environment: compute_capability: got {arch!r:.80}, must be [major, minor]")
    multiprocessors = _get(environment, "multiprocessors", int, f"{path}: environment")
    entries: dict[Case, Entry] = {}
    for number, fields_of_entry in enumerate(_get(table, "entries", list, str(path))):
        where = f"{path}: entry {number}"
        if not isinstance(fields_of_entry, dict):
            raise TableError(f"{where}: got {fields_of_entry!r:.80}, must be an object")
        entry = _entry(fields_of_entry, device, (arch[0], arch[1]), multiprocessors, where)
        if entry.case in entries:
            raise TableError(f"{where} ({entry.case}): stands in the table already")
        entries[entry.case] = entry
    return list(entries.values())


def _entry(found: dict[str, Any], device: str, arch: tuple[int, int], multiprocessors: int, where: str) -> Entry:
    dtype = _get(found, "dtype", str, where)
    if dtype not in DTYPES:
        raise TableError(f"{where}: dtype: got {dtype!r}, must be one of {', '.join(DTYPES)}")
    sizes = [_get(found, name, int, where) for name in ("n_masks", "tokens", "out_features", "in_features")]
    case = Case(device, arch, multiprocessors, DTYPES[dtype], *sizes)
    where = f"{where} ({case})"
    if not 1 <= case.n_masks <= 16 or min(sizes) < 1:
        raise TableError(f"{where}: n_masks must be 1 to 16, and every size at least 1")
    config = _config(_get(found, "config", dict, where), f"{where}: config")
    problem = violation(config, case)
    if problem is not None:
        raise TableError(f"{where}: config: {problem}")
    model = _config(_get(found, "model", dict, where), f"{where}: model")
    times = [_get(found, name, float, where) for name in ("microseconds", "model_microseconds")]
    if not min(times) > 0:
        raise TableError(f"{where}: microseconds must be more than 0")
    return Entry(case, config, times[0], model, times[1])


def _config(found: dict[str, Any], where: str) -> LaunchConfig:
    kernel: Any = _get(found, "kernel", str, where)
    if kernel not in get_args(KernelName):
        raise TableError(f"{where}: kernel: got {kernel!r}, must be one of {', '.join(get_args(KernelName))}")
    kinds: dict[str, type] = {field.name: type(field.default) for field in fields(LaunchConfig)[1:]}
    settings: dict[str, Any] = {name: _get(found, name, kinds[name], where) for name in found if name in kinds}
    unknown = sorted(found.keys() - kinds.keys() - {"kernel"})
    if unknown:
        raise TableError(f"{where}: {unknown[0]}: not a setting of a launch")
    return LaunchConfig(kernel, **settings)


def _get(found: Mapping[str, Any], name: str, kind: type[_T], where: str) -> _T:
    value = found.get(name)
    is_kind = type(value) is kind or (kind is float and type(value) is int)
    if not is_kind:
        raise TableError(f"{where}: {name}: got {value!r:.80}, must be {_KINDS[kind]}")
    return value  # type: ignore[return-value] # as just checked
