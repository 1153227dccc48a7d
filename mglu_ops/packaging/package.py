"""What a package says of itself, read without running or unpacking any of it.

A `.pt2` package is a zip of stored members: the machine code, and beside it a JSON file of texts, of which one,
`mglu_ops`, is ours. Python's zip reader checks each member against its checksum; torch's maps the code and jumps in.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

KEY = "mglu_ops"
"""Of our description among a package's texts."""

FORMAT = 1


class PackageError(RuntimeError):
    """A file is no package, is damaged, or does not fit this process; the words say which and what to do."""


@dataclass(frozen=True)
class InputInfo:
    """An input: `shape` has a number, or `[lowest, highest or None]` for a size that may change."""

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
    """An MGLU layer of a package: what a kernel for it depends on."""

    n_masks: int
    out_features: int
    in_features: int
    dtype: str
    activation: str
    route_dtype: str | None


@dataclass(frozen=True)
class PackageInfo:
    """What stands in a package.

    Attributes:
        path: of the file.
        torch: version that compiled it.
        mglu_ops: version that made it.
        device: "cpu" or "cuda".
        cpu: machine and vector instructions of the CPU that compiled it, as torch calls them.
        arch: compute capability of the GPU that it was compiled for.
        multi_arch: whether it runs on later GPUs too.
        backend: what runs the layers: "cpu" or "cuda" (the operator), "triton" or "composite" (code in the package).
        calls: "operator" (through torch's dispatcher), "shim" (a C function of libmglu_ops.so), or "nothing" where the
            layers are code in the package.
        embeds_weights: whether the tensors are in the package.
        inputs: of the model, flattened.
        layers: the MGLU layers.
        missed: layers that were recognised but not fused, and why.
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
        """For a package: all of it, and what C++ checks in the flat form that it reads."""
        values = asdict(self)
        del values["path"]
        weights = "inside" if self.embeds_weights else "in a file"
        flat = {"torch": self.torch, "device": self.device, "weights": weights}
        return {KEY: json.dumps(values), **{f"{KEY}_{name}": text for name, text in flat.items()}}

    @classmethod
    def from_json(cls, text: str, path: str) -> PackageInfo:
        """Raises TypeError, ValueError, KeyError or AttributeError on anything but the first of `texts`."""
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
            "operator": "needs mglu::forward: of mglu_ops in Python, of libmglu_ops.so in C++",
            "shim": "needs libmglu_ops.so",
            "nothing": "needs no operator library",
        }[self.calls]
        weights = "" if self.embeds_weights else ", weights in a file of their own"
        lines = [f"{self.path}: {len(self.layers)} MGLU layers, backend {self.backend}, {self.device}{gpu}{weights}"]
        lines += [f"  torch {self.torch}; {needs}", *(f"  input {entry}" for entry in self.inputs)]
        lines += [f"  not fused: {reason}" for reason in self.missed]
        return "\n".join(lines)


def read_info(path: str | Path) -> PackageInfo:
    """What a package says of itself, after every byte of it was checked against its checksum.

    Raises:
        FileNotFoundError: there is no such file.
        PackageError: it is no package of ours, or is damaged.
    """
    check_archive(path)
    with zipfile.ZipFile(path) as archive:
        texts = _texts(archive)
    if KEY not in texts:
        raise PackageError(f"{path} was not made by mglu_ops.export: it lacks its description; export the model anew")
    try:
        return PackageInfo.from_json(texts[KEY], str(path))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise PackageError(f"{path}: its description cannot be read: {error}") from error


def check_archive(path: str | Path) -> None:
    """Check every byte of a file of torch's (a package, or tensors) against its checksum.

    Raises:
        FileNotFoundError: there is no such file.
        PackageError: it is no zip archive, truncated or damaged.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not a file")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            compressed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    except Exception as error:  # zipfile has no one type for what may be wrong with a file
        raise PackageError(f"{path} is no file of torch's, or a truncated or damaged one: {error}") from error
    if damaged or compressed:
        what = f"the checksum of {damaged} is wrong" if damaged else f"{compressed[0]} is compressed"
        raise PackageError(f"{path} is damaged: {what}")


def _texts(archive: zipfile.ZipFile) -> dict[str, str]:
    """The texts of the wrapper's metadata file: `AOTI_DEVICE_KEY` and the like, and ours."""
    found: dict[str, str] = {}
    for name in archive.namelist():
        if name.endswith("_metadata.json"):
            try:
                texts = json.loads(archive.read(name))
            except ValueError:
                continue  # not torch's
            found.update(texts if isinstance(texts, dict) else {})
    return found
