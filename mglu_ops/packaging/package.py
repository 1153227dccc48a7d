"""The description that a package holds of itself, read without running or unpacking any of the package.

A `.pt2` package is a zip archive without compression: machine code, weights, and a JSON file of texts, to which
mglu_ops adds its own. torch's loader extracts every member and maps the machine code, without comparing checksums. So
`export` ends the file with a seal, a checksum of all bytes before it. Python and C++ check the seal, the archive
(`archive`) and the description, in this order, before torch gets the file.

These checks find damage and mistakes, and keep what only reads a package (`read_info`) from harm. A package is code all
the same: whoever writes one can write its seal too, and loading it runs what it holds.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from ..activations import ACTIVATIONS
from ..checks import FLOATING
from ..masks import MAX_MASKS
from ..words import counted
from . import description as rules
from .archive import LONGEST_COMMENT, Member, PackageError, comment_position, opened, quoted, read_at, read_members

KEY = "mglu_ops"
"""The name of mglu_ops's description among a package's texts."""

FORMAT = 3

_SEAL = "mglu_ops seal 1 torch={torch} device={device} adler32="
_SEAL_AT_END = re.compile(rb"mglu_ops seal 1 torch=([!-~]+) device=([!-~]+) adler32=([0-9a-f]{8})\Z")
_CHECKSUM_DIGITS = 8
_CHUNK_BYTES = 1 << 24
_MOST_TEXT_BYTES = 1 << 22


@dataclass(frozen=True)
class InputInfo:
    """An input of the model: a tensor, or a value that was fixed when the model was exported.

    Attributes:
        name: its name in the exported program.
        dtype: the dtype of a tensor; the type of a value.
        shape: the sizes of a tensor. One that varies is `[lowest, highest or None, expression]`; the same symbol in two
            expressions has one value (`packaging.inputs`).
        order: the dimensions as they are in memory, the outermost first. The code is compiled for these strides.
        is_written: whether the model writes to it.
        constant: the `repr` of a value, None for a tensor.
    """

    name: str
    dtype: str
    shape: list[Any]
    order: list[int]
    is_written: bool
    constant: str | None

    def __str__(self) -> str:
        if self.constant is not None:
            return f"{self.name}: {self.constant}"
        return f"{self.name}: {self.dtype} [{', '.join(_size(size) for size in self.shape)}]"


def _size(size: Any) -> str:
    if not isinstance(size, (list, tuple)):
        return str(size)
    low, high, _ = size
    return f"{low}.." if high is None else f"{low}..{high}"


@dataclass(frozen=True)
class WeightInfo:
    """A tensor that the package takes from a weights file. Its code is compiled for these sizes and strides."""

    name: str
    dtype: str
    shape: list[int]
    strides: list[int]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape} with the strides {self.strides}"

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> WeightInfo:
        """Describe a dense tensor."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride()))


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
        conditions: expressions in the symbols of the inputs' sizes. The model branches on them, and was compiled for
            inputs for which all are true.
        layers: the MGLU layers.
        weights: the tensors that are in a weights file; none if the package embeds them.
        cpu: the machine and the vector instructions of the CPU that compiled it, by torch's names; None if unknown.
        arch: the compute capability of the GPU that it was compiled for; None for a CPU.
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
    weights: list[WeightInfo] = field(default_factory=list)
    conditions: list[str] = field(default_factory=list)
    cpu: list[str] | None = None
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
        """Read the JSON of `texts`; anything else raises a PackageError that names the field."""
        values = rules.parse(text.encode(errors="surrogatepass"), _DESCRIPTION)
        _RULE(_DESCRIPTION, values)
        if values["device"] == "cuda" and values["arch"] is None:
            raise PackageError(f"{_DESCRIPTION}: arch: got null, must be a list of 2 for the device cuda")
        inputs = [InputInfo(**entry) for entry in values.pop("inputs")]
        layers = [LayerInfo(**entry) for entry in values.pop("layers")]
        weights = [WeightInfo(**entry) for entry in values.pop("weights")]
        return cls(**values, inputs=inputs, layers=layers, weights=weights, path=path)

    def __str__(self) -> str:
        gpu = "" if self.arch is None else f" sm_{self.arch[0]}{self.arch[1]}{' and later' if self.multi_arch else ''}"
        needs = {
            "operator": "needs mglu::forward: from mglu_ops in Python, from libmglu_ops.so in C++",
            "shim": "needs libmglu_ops.so",
            "nothing": "needs no operator library",
        }[self.calls]
        weights = "" if self.embeds_weights else ", weights in a file of their own"
        layers = counted(len(self.layers), "MGLU layer")
        lines = [f"{self.path}: {layers}, backend {self.backend}, {self.device}{gpu}{weights}"]
        lines += [f"  torch {self.torch}; {needs}", *(f"  input {entry}" for entry in self.inputs)]
        lines += [f"  only where {self._in_words(condition)}" for condition in self.conditions]
        lines += [f"  not fused: {reason}" for reason in self.missed]
        return "\n".join(lines)

    def _in_words(self, condition: str) -> str:
        """A condition with `x.shape[0]` in place of the symbol of this size."""
        sizes = ((entry.name, dim, size) for entry in self.inputs for dim, size in enumerate(entry.shape))
        words = {size[2]: f"{name}.shape[{dim}]" for name, dim, size in sizes if not isinstance(size, int)}
        return re.sub(r"[A-Za-z_]\w*", lambda found: words.get(found[0], found[0]), condition)


_DESCRIPTION = "its description"

_FLOATING = rules.one_of(*(str(dtype).removeprefix("torch.") for dtype in FLOATING))
_INPUT = {
    "name": rules.text,
    "dtype": rules.text,
    "shape": rules.list_of(rules.size_or_range),
    "order": rules.list_of(rules.size),
    "is_written": rules.boolean,
    "constant": rules.optional(rules.text),
}
_LAYER = {
    "n_masks": rules.integer(1, MAX_MASKS),
    "out_features": rules.size,
    "in_features": rules.size,
    "dtype": _FLOATING,
    "activation": rules.one_of(*ACTIVATIONS),
    "route_dtype": rules.optional(_FLOATING),
}
_WEIGHT = {
    "name": rules.text,
    "dtype": rules.text,
    "shape": rules.list_of(rules.size),
    "strides": rules.list_of(rules.size),
}
_RULE = rules.entries(
    {
        "format": rules.equal(FORMAT, "export the model anew"),  # first, because another format has other entries
        "torch": rules.text,
        "mglu_ops": rules.text,
        "device": rules.one_of("cpu", "cuda"),
        "backend": rules.one_of("cpu", "cuda", "triton", "composite"),
        "calls": rules.one_of("operator", "shim", "nothing"),
        "embeds_weights": rules.boolean,
        "inputs": rules.list_of(rules.entries(_INPUT)),
        "layers": rules.list_of(rules.entries(_LAYER)),
        "weights": rules.list_of(rules.entries(_WEIGHT)),
        "conditions": rules.list_of(rules.text),
        "cpu": rules.optional(rules.items(rules.text, rules.text)),
        "arch": rules.optional(rules.items(rules.size, rules.size)),
        "multi_arch": rules.boolean,
        "missed": rules.list_of(rules.text),
    },
    prefix=": ",
)
"""The only fields of a description (`check_description` of csrc/library/package_description.cpp)."""


def read_info(path: str | Path) -> PackageInfo:
    """The description of a package, after its seal and its archive were checked. Runs nothing of it.

    Raises:
        FileNotFoundError: there is no such file.
        PackageError: mglu_ops did not make it, it is damaged, or its archive or its description is not what `export`
            writes; the message names the member or the field.
    """
    with opened(path) as file:
        sealed = _check_seal(file)
        described = {text for text in map(partial(_described, file), read_members(file)) if text is not None}
        if len(described) != 1:
            raise PackageError("it holds two different descriptions" if described else "it lacks its description")
        info = PackageInfo.from_json(described.pop(), str(path))
        for name, stated, in_seal in zip(("torch", "device"), (info.torch, info.device), sealed, strict=True):
            if stated != in_seal:
                raise PackageError(
                    f"{_DESCRIPTION}: {name}: got {quoted(stated)}, must be {quoted(in_seal)}, as in the seal"
                )
    return info


def check_archive(path: str | Path) -> None:
    """Check a file of `torch.save`: its archive, and every member's checksum.

    Raises:
        FileNotFoundError: there is no such file.
        PackageError: torch.save did not write it, it is truncated or damaged, or a member is compressed.
    """
    with opened(path) as file:
        members = read_members(file)
        for member in members:
            if _checksum(zlib.crc32, file, member.start, member.size) != member.crc32:
                raise PackageError(f"it is damaged: the checksum of member {quoted(member.name)} is wrong")
        if not any(member.name.partition(b"/")[2] == b"data.pkl" for member in members):
            raise PackageError("it is no file of weights: torch.save did not write it")


def _described(file: BinaryIO, member: Member) -> str | None:
    """The description in a member, or None if the member is none of the files with texts, or has no description.

    The texts are torch's (`AOTI_DEVICE_KEY` and the like), and those of mglu_ops.
    """
    if not member.name.endswith(b"_metadata.json"):
        return None
    what = f"member {quoted(member.name)}"
    if member.size > _MOST_TEXT_BYTES:
        raise PackageError(f"{what} has {member.size} bytes, must have at most {_MOST_TEXT_BYTES}")
    texts = rules.parse(read_at(file, member.start, member.size), what)
    rules.object_of(rules.string)(what, texts)
    return texts.get(KEY)


# --- The seal -------------------------------------------------------------------------------------------------------


def seal(path: str | Path, torch_version: str, device: str) -> None:
    """Write the seal of a package, as the archive's comment (csrc/library/package_check.cpp reads it too).

    Its last eight characters are the Adler-32 checksum (RFC 1950) of all bytes before them.

    Raises:
        PackageError: `read_info` refuses the package.
    """
    comment = _SEAL.format(torch=torch_version, device=device).encode() + b"0" * _CHECKSUM_DIGITS
    with opened(path, "r+b") as file:
        read_members(file)
        file.seek(comment_position(file))
        file.write(len(comment).to_bytes(2, "little") + comment)
        file.truncate()
        unsealed = file.tell() - _CHECKSUM_DIGITS
        checksum = _checksum(zlib.adler32, file, 0, unsealed)
        file.seek(unsealed)
        file.write(b"%08x" % checksum)
    read_info(path)


def _check_seal(file: BinaryIO) -> tuple[str, str]:
    """The version of torch and the device of the seal of a package, which is whole."""
    size = file.seek(0, os.SEEK_END)
    found = _SEAL_AT_END.search(read_at(file, max(0, size - LONGEST_COMMENT), LONGEST_COMMENT))
    if found is None:
        if _is_exported_program(file):
            raise PackageError(
                "it is a program of torch.export.save and no package: torch.export.load reads it, and mglu_ops.export "
                "makes a package of the program"
            )
        raise PackageError("it has no seal at its end: it is truncated, or was not made by mglu_ops.export")
    if int(found[3], 16) != _checksum(zlib.adler32, file, 0, size - _CHECKSUM_DIGITS):
        raise PackageError("it is damaged: its checksum is wrong")
    return found[1].decode(), found[2].decode()


def _is_exported_program(file: BinaryIO) -> bool:
    try:
        return any(re.fullmatch(rb"[^/]+/models/[^/]+\.json", member.name) for member in read_members(file))
    except PackageError:
        return False


def _checksum(update: Callable[..., int], file: BinaryIO, start: int, size: int) -> int:
    """A checksum of zlib over `size` bytes of a file, which may be longer than memory."""
    checksum = update(b"")
    file.seek(start)
    for first in range(0, size, _CHUNK_BYTES):
        checksum = update(file.read(min(size - first, _CHUNK_BYTES)), checksum)
    return checksum
