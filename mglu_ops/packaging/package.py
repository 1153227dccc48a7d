"""The description that a package holds of itself, read without running or unpacking any of the package.

A `.pt2` package is a zip archive without compression: machine code, weights, and a JSON file of texts, to which
mglu_ops adds its own. torch's loader maps the machine code without comparing checksums. So `export` ends the file with
a seal, a checksum of all bytes before it, which Python and C++ check first; C++ needs no zip reader for that.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

KEY = "mglu_ops"
"""The name of mglu_ops's description among a package's texts."""

FORMAT = 1

_SEAL = "mglu_ops seal 1 torch={torch} device={device} adler32="
_SEAL_AT_END = re.compile(rb"mglu_ops seal 1 torch=\S+ device=\S+ adler32=([0-9a-f]{8})\Z")
_LONGEST_SEAL, _CHECKSUM_DIGITS = 256, 8
_CHUNK_BYTES = 1 << 24


class PackageError(RuntimeError):
    """A file is no package, is damaged, or does not fit this process; the message says which, and what to do."""


@dataclass(frozen=True)
class InputInfo:
    """An input of the model. A size in `shape` is a number, or `[lowest, highest or None]` if it may vary."""

    name: str
    dtype: str
    shape: list[Any]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} [{', '.join(_size(size) for size in self.shape)}]"


def _size(size: Any) -> str:
    if not isinstance(size, (list, tuple)):
        return str(size)
    low, high = size
    return f"{low}.." if high is None else f"{low}..{high}"


@dataclass(frozen=True)
class LayerInfo:
    """An MGLU layer of a package: the properties on which its kernel depends."""

    n_masks: int
    out_features: int
    in_features: int
    dtype: str
    activation: str
    route_dtype: str | None


@dataclass(frozen=True)
class PackageInfo:
    """The description of a package.

    Attributes:
        torch: the version of torch that compiled it.
        mglu_ops: the version of mglu_ops that made it.
        device: "cpu" or "cuda".
        backend: what runs the layers: "cpu" or "cuda" (the operator), "triton" or "composite" (code in the package).
        calls: what the package calls for a layer: "operator" (through torch's dispatcher), "shim" (a C function of
            libmglu_ops.so), or "nothing" where the layers are code in the package.
        embeds_weights: whether the tensors are in the package.
        inputs: the model's inputs, flattened.
        layers: the MGLU layers.
        cpu: the machine and the vector instructions of the CPU that compiled it, by torch's names.
        arch: the compute capability of the GPU that it was compiled for.
        multi_arch: whether it runs on later GPUs too.
        missed: layers that were recognised but not fused, each with the reason.
        format: the version of this description.
        path: the path of the file.
    """

    torch: str
    mglu_ops: str
    device: str
    backend: str
    calls: str
    embeds_weights: bool
    inputs: list[InputInfo]
    layers: list[LayerInfo]
    cpu: list[str] = field(default_factory=list)
    arch: list[int] | None = None
    multi_arch: bool = False
    missed: list[str] = field(default_factory=list)
    format: int = FORMAT
    path: str = ""

    def texts(self) -> dict[str, str]:
        """The texts that a package holds: all of this as JSON, and three facts by name, which C++ programs read."""
        values = asdict(self)
        del values["path"]
        weights = "inside" if self.embeds_weights else "in a file"
        flat = {"torch": self.torch, "device": self.device, "weights": weights}
        return {KEY: json.dumps(values), **{f"{KEY}_{name}": text for name, text in flat.items()}}

    @classmethod
    def from_json(cls, text: str, path: str) -> PackageInfo:
        """Read the JSON of `texts`; anything else raises TypeError, ValueError, KeyError or AttributeError."""
        values = json.loads(text)
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']}, this version of mglu_ops reads {FORMAT}")
        values["inputs"] = [InputInfo(**entry) for entry in values["inputs"]]
        values["layers"] = [LayerInfo(**entry) for entry in values["layers"]]
        if unknown := values.keys() - {item.name for item in fields(cls)}:
            raise ValueError(f"unknown entries {sorted(unknown)}")
        return cls(**{**values, "path": path})

    def __str__(self) -> str:
        gpu = "" if self.arch is None else f" sm_{self.arch[0]}{self.arch[1]}{' and later' if self.multi_arch else ''}"
        needs = {
            "operator": "needs mglu::forward: from mglu_ops in Python, from libmglu_ops.so in C++",
            "shim": "needs libmglu_ops.so",
            "nothing": "needs no operator library",
        }[self.calls]
        weights = "" if self.embeds_weights else ", weights in a file of their own"
        lines = [f"{self.path}: {len(self.layers)} MGLU layers, backend {self.backend}, {self.device}{gpu}{weights}"]
        lines += [f"  torch {self.torch}; {needs}", *(f"  input {entry}" for entry in self.inputs)]
        lines += [f"  not fused: {reason}" for reason in self.missed]
        return "\n".join(lines)


def read_info(path: str | Path) -> PackageInfo:
    """The description of a package, after its seal was checked.

    Raises:
        FileNotFoundError: there is no such file.
        PackageError: mglu_ops did not make it, or it is damaged.
    """
    with _archive(path) as archive:
        texts = _texts(archive)
    if KEY not in texts:
        raise PackageError(f"{path} was not made by mglu_ops.export: it lacks its description; export the model anew")
    _check_seal(path)
    try:
        return PackageInfo.from_json(texts[KEY], str(path))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise PackageError(f"{path}: its description cannot be read: {error}") from error


def check_archive(path: str | Path) -> None:
    """Compare every member of a file of `torch.save` with its checksum.

    Raises:
        FileNotFoundError: there is no such file.
        PackageError: it is no zip archive, truncated or damaged.
    """
    with _archive(path) as archive:
        damaged = archive.testzip()
        compressed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    if damaged or compressed:
        what = f"the checksum of {damaged} is wrong" if damaged else f"{compressed[0]} is compressed"
        raise PackageError(f"{path} is damaged: {what}")


@contextmanager
def _archive(path: str | Path) -> Iterator[zipfile.ZipFile]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not a file")
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except Exception as error:  # zipfile raises errors of many types for damaged files
        raise PackageError(f"{path} is no file of torch's, or a truncated or damaged one: {error}") from error


def seal(path: str | Path, torch_version: str, device: str) -> None:
    """Write the seal of a package, as the archive's comment (csrc/library/package_check.cpp reads it too).

    Its last eight characters are the Adler-32 checksum (RFC 1950) of all bytes before them.
    """
    comment = _SEAL.format(torch=torch_version, device=device).encode()
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = comment + b"0" * _CHECKSUM_DIGITS
    checksum = _checksum_before_the_end(path)
    with Path(path).open("r+b") as file:
        file.seek(-_CHECKSUM_DIGITS, os.SEEK_END)
        file.write(checksum)


def _check_seal(path: str | Path) -> None:
    with Path(path).open("rb") as file:
        file.seek(-min(_LONGEST_SEAL, Path(path).stat().st_size), os.SEEK_END)
        found = _SEAL_AT_END.search(file.read())
    if found is None:
        raise PackageError(
            f"{path} has no seal at its end: it is truncated, or was not made by this version of mglu_ops.export"
        )
    if found[1] != _checksum_before_the_end(path):
        raise PackageError(f"{path} is damaged: its checksum is wrong")


def _checksum_before_the_end(path: str | Path) -> bytes:
    """The checksum of a package in hexadecimal digits, over all bytes but as many at the end."""
    unread = Path(path).stat().st_size - _CHECKSUM_DIGITS
    checksum = zlib.adler32(b"")
    with Path(path).open("rb") as file:
        while unread > 0:
            chunk = file.read(min(unread, _CHUNK_BYTES))
            checksum = zlib.adler32(chunk, checksum)
            unread -= len(chunk)
    return b"%08x" % checksum


def _texts(archive: zipfile.ZipFile) -> dict[str, str]:
    """The texts of the package's metadata file: torch's (`AOTI_DEVICE_KEY` and the like), and those of mglu_ops."""
    found: dict[str, str] = {}
    for name in archive.namelist():
        if name.endswith("_metadata.json"):
            try:
                texts = json.loads(archive.read(name))
            except ValueError:
                continue  # another file of that name
            found.update(texts if isinstance(texts, dict) else {})
    return found
