"""Tables of launches that were measured to be faster than the cost model's choice.

`python -m mglu_ops tune` writes a table, a JSON file for one GPU:

    {"format": 1,
     "environment": {"device": "NVIDIA H200", "compute_capability": [9, 0], "multiprocessors": 132, ...},
     "entries": [{"dtype": "bfloat16", "n_masks": 4, "tokens": 8, "out_features": 14336, "in_features": 4096,
                  "config": {"kernel": "decode_mma", "tiles": 7, ...}, "microseconds": 40.1,
                  "model": {"kernel": "decode_mma", ...}, "model_microseconds": 42.3}, ...]}

The folder `tables` beside this file has the tables of the package, and the environment variable `MGLU_TUNING_TABLE`
names a table of the user. If both have an entry for a call, the user's entry decides. Tables are read once per process,
when the first launch is chosen. Entries for other GPUs are ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...call import Call
from .device import KNOWN_GPUS, Gpu
from .kernels import CONFIGS, LaunchConfig

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
    """A table cannot be used. The message names the file, the entry and the problem."""


@dataclass(frozen=True)
class Entry:
    """The measured times of the fastest launch of a call, and of the launch that is chosen without tables.

    Attributes:
        gpu: the GPU of the measurement.
        call: the measured call of contiguous tensors. The entry is valid for all activations and mask weights.
        config: the fastest launch.
        microseconds: the time of `config`.
        model: the launch that is chosen without tables.
        model_microseconds: the time of `model`.
        table: the file from which the entry was read; None for a new entry.
    """

    gpu: Gpu
    call: Call
    config: LaunchConfig
    microseconds: float
    model: LaunchConfig
    model_microseconds: float
    table: Path | None = None

    @property
    def origin(self) -> str:
        times = f"{self.microseconds:g} us, the model's choice {self.model_microseconds:g} us"
        return f"the table {self.table} ({times})"

    def to_json(self) -> dict[str, Any]:
        """Return the entry as a table stores it."""
        call = self.call
        return {
            "dtype": str(call.dtype)[6:],
            "n_masks": call.n_masks,
            "tokens": call.tokens,
            "out_features": call.out_features,
            "in_features": call.in_features,
            "config": {"kernel": self.config.kernel, **self.config.settings()},
            "microseconds": round(self.microseconds, 2),
            "model": {"kernel": self.model.kernel, **self.model.settings()},
            "model_microseconds": round(self.model_microseconds, 2),
        }


_Key = tuple[object, ...]


def _key(call: Call, gpu: Gpu) -> _Key:
    """Return the properties that a call and its GPU must share with an entry."""
    shape = call.n_masks, call.tokens, call.out_features, call.in_features
    formats = call.dtype, call.weight.format.name, call.activation_format
    return (gpu.name, gpu.arch, gpu.multiprocessors, *formats, *shape)


def find(call: Call, gpu: Gpu) -> Entry | None:
    """Return the entry for a call of aligned tensors, or None.

    Raises:
        TableError: a table cannot be used.
    """
    return _all_tables().get(_key(call, gpu))


@cache
def _all_tables() -> dict[_Key, Entry]:
    own = os.environ.get(VARIABLE)
    paths = [*sorted(FOLDER.glob("*.json")), *([Path(own)] if own else [])]
    return {_key(entry.call, entry.gpu): entry for path in paths for entry in read(path)}


def write(path: Path, environment: Mapping[str, object], entries: list[Entry]) -> None:
    """Write a table. `environment` must have `device`, `compute_capability` and `multiprocessors`."""
    table = {"format": FORMAT, "environment": dict(environment), "entries": [entry.to_json() for entry in entries]}
    path.write_text(json.dumps(table, indent=1) + "\n")


def read(path: Path) -> list[Entry]:
    """Return the entries of a table.

    Raises:
        TableError: the file is not a table of this format, or no kernel can run an entry.
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
    known = KNOWN_GPUS.get((arch[0], arch[1]))
    if known is None:
        raise TableError(f"{path}: environment: compute_capability: got {arch}, which no kernel supports")
    gpu = replace(known, name=device, multiprocessors=multiprocessors)
    entries: dict[_Key, Entry] = {}
    for number, fields_of_entry in enumerate(_get(table, "entries", list, str(path))):
        where = f"{path}: entry {number}"
        if not isinstance(fields_of_entry, dict):
            raise TableError(f"{where}: got {fields_of_entry!r:.80}, must be an object")
        entry = replace(_entry(fields_of_entry, gpu, where), table=path)
        key = _key(entry.call, gpu)
        if key in entries:
            raise TableError(f"{where} ({entry.call}): is already in the table")
        entries[key] = entry
    return list(entries.values())


def _entry(found: dict[str, Any], gpu: Gpu, where: str) -> Entry:
    dtype = _get(found, "dtype", str, where)
    if dtype not in DTYPES:
        raise TableError(f"{where}: dtype: got {dtype!r}, must be one of {', '.join(DTYPES)}")
    n_masks, tokens = _get(found, "n_masks", int, where), _get(found, "tokens", int, where)
    shape = _get(found, "out_features", int, where), _get(found, "in_features", int, where)
    if not 1 <= n_masks <= 16 or min(tokens, *shape) < 1:
        raise TableError(f"{where}: n_masks must be 1 to 16, and every size at least 1")
    call = Call.contiguous(torch.device("cuda"), DTYPES[dtype], n_masks, tokens, *shape)
    where = f"{where} ({call})"
    config = _config(_get(found, "config", dict, where), f"{where}: config")
    problem = config.violation(call, gpu)
    if problem is not None:
        raise TableError(f"{where}: config: {problem}")
    model = _config(_get(found, "model", dict, where), f"{where}: model")
    times = [_get(found, name, float, where) for name in ("microseconds", "model_microseconds")]
    if not min(times) > 0:
        raise TableError(f"{where}: microseconds must be more than 0")
    return Entry(gpu, call, config, times[0], model, times[1])


def _config(found: dict[str, Any], where: str) -> LaunchConfig:
    kernel = _get(found, "kernel", str, where)
    if kernel not in CONFIGS:
        raise TableError(f"{where}: kernel: got {kernel!r}, must be one of {', '.join(CONFIGS)}")
    kinds: dict[str, type] = {field.name: type(field.default) for field in fields(CONFIGS[kernel])}
    settings: dict[str, Any] = {name: _get(found, name, kinds[name], where) for name in found if name in kinds}
    unknown = sorted(found.keys() - kinds.keys() - {"kernel"})
    if unknown:
        raise TableError(f"{where}: {unknown[0]}: not a setting of a launch of {kernel}")
    return CONFIGS[kernel](**settings)


def _get(found: Mapping[str, Any], name: str, kind: type[_T], where: str) -> _T:
    value = found.get(name)
    is_kind = type(value) is kind or (kind is float and type(value) is int)
    if not is_kind:
        raise TableError(f"{where}: {name}: got {value!r:.80}, must be {_KINDS[kind]}")
    return value  # type: ignore[return-value] # as just checked
