"""The description that is stored in a package, which can be read without running or extracting anything.

A `.pt2` package is a zip archive with machine code, weights, and a JSON file of texts, one of which is the description.
The last bytes are a seal (`seal`), which is checked first.

A package is code. Whoever writes one can also write its description and its seal, and loading it runs its code.
"""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ..call import Call
from ..words import counted
from .seal import PackageError, check_seal, seal

KEY = "mglu_ops"
"""The key of the description among a package's texts."""

_MOST_TEXT_BYTES = 1 << 26


@dataclass(frozen=True)
class InputInfo:
    """An input of the model: a tensor, or a value that was fixed when the model was exported.

    Attributes:
        name: its name in the exported program.
        dtype: the dtype of a tensor; the type of a value.
        shape: the sizes of a tensor. A dynamic size is `[lowest, highest or None, expression]`; a symbol has the same
            value in all expressions (`packaging.inputs`).
        order: the order of the dimensions in memory, outermost first, for which the code is compiled.
        is_written: True if the model writes to it.
        constant: the `repr` of a value; None for a tensor.
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
        return f"{self.name}: {self.dtype} [{', '.join(map(_range, self.shape))}]"


def _range(size: int | list[Any]) -> str:
    low, high, *_ = (size, size) if isinstance(size, int) else size
    return str(low) if low == high else f"{low}..{'' if high is None else high}"


@dataclass(frozen=True)
class WeightInfo:
    """A tensor that the package takes from a weights file. The code is compiled for these sizes and strides."""

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
    """The properties of an MGLU layer, or of a call of `mglu::experts_down`, on which the choice of a kernel depends.

    `dtype` is x's dtype. `experts` is the number of experts, and 0 for a layer without experts. `top_k` is the number
    of experts of a token, and 0 if the rows of x are sorted by expert. `experts_down` has no masks and the activation
    "identity", and its expert weights take the place of mask weights.
    """

    n_masks: int
    out_features: int
    in_features: int
    dtype: str
    activation: str
    mask_weights_dtype: str | None
    weight_format: str = "dense"
    activation_format: str = "dense"
    experts: int = 0
    top_k: int = 0

    def call(self, device: torch.device, tokens: int) -> Call:
        """Describe a call of the layer, or of `experts_down`, with contiguous, aligned tensors."""
        weights = None if self.mask_weights_dtype is None else getattr(torch, self.mask_weights_dtype)
        call = Call.contiguous(
            device,
            getattr(torch, self.dtype),
            self.n_masks,
            tokens,
            self.out_features,
            self.in_features,
            self.activation,
            weights if self.n_masks else None,
            self.weight_format,
            self.activation_format,
        )
        if not self.experts:
            return call
        return call.over_experts(self.experts, tokens, self.top_k or None, None if self.n_masks else weights)


@dataclass(frozen=True)
class PackageInfo:
    """The description of a package.

    Attributes:
        torch: the version of torch that compiled it.
        mglu_ops: the version of mglu_ops that made it.
        device: "cpu" or "cuda".
        backend: what runs the layers: "cpu" or "cuda" (the operator), "triton" or "composite" (code in the package).
        embeds_weights: True if the tensors are in the package.
        inputs: the model's inputs, flattened.
        conditions: expressions in the symbols of the inputs' sizes. The model branches on them, and the code is correct
            only if all are true.
        layers: the MGLU layers, and after them the calls of `mglu::experts_down`.
        weights: the tensors in the weights file; none if the package embeds them.
        cpu: the machine and the vector instructions of the CPU that compiled it, by torch's names; None if unknown.
        arch: the compute capability of the GPU that it was compiled for; None for a CPU.
        missed: layers that were recognised but not fused, each with the reason.
        path: the path of the package.
    """

    torch: str
    mglu_ops: str
    device: str
    backend: str
    embeds_weights: bool
    inputs: list[InputInfo]
    layers: list[LayerInfo]
    weights: list[WeightInfo] = field(default_factory=list)
    conditions: list[str] = field(default_factory=list)
    cpu: list[str] | None = None
    arch: list[int] | None = None
    missed: list[str] = field(default_factory=list)
    path: str = ""

    def texts(self) -> dict[str, str]:
        """The description without the path, as JSON, in the form that Inductor adds to a package's texts."""
        values = asdict(self)
        del values["path"]
        return {KEY: json.dumps(values)}

    def __str__(self) -> str:
        gpu = "" if self.arch is None else f" sm_{self.arch[0]}{self.arch[1]}"
        operators = "the operators of mglu_ops: from mglu_ops in Python, from libmglu_ops.so in C++"
        needs = "no operator library" if self.backend in ("triton", "composite") else operators
        weights = "" if self.embeds_weights else ", weights in a file of their own"
        layers = counted(sum(layer.n_masks > 0 for layer in self.layers), "MGLU layer")
        lines = [f"{self.path}: {layers}, backend {self.backend}, {self.device}{gpu}{weights}"]
        lines += [f"  torch {self.torch}; needs {needs}", *(f"  input {entry}" for entry in self.inputs)]
        sizes = ((entry.name, dim, size) for entry in self.inputs for dim, size in enumerate(entry.shape))
        words = {size[2]: f"{name}.shape[{dim}]" for name, dim, size in sizes if not isinstance(size, int)}
        lines += [f"  only where {in_words(condition, words)}" for condition in self.conditions]
        lines += [f"  not fused: {reason}" for reason in self.missed]
        return "\n".join(lines)


def in_words(expression: str, words: dict[str, str]) -> str:
    """Replace the symbols in an expression by words such as `x.shape[0]`."""
    return re.sub(r"[A-Za-z_]\w*", lambda found: words.get(found[0], found[0]), expression)


def seal_package(path: Path, info: PackageInfo) -> None:
    """Write the seal of a package whose description is `info`."""
    weights = "inside" if info.embeds_weights else "outside"
    seal(path, f"package torch={minor_version(info.torch)} device={info.device} weights={weights}")


def minor_version(version: str) -> str:
    """Return `2.13` for `2.13.1+cu130`. Packages run with all versions of torch that have the same minor version."""
    return ".".join(version.split(".")[:2])


def read_info(path: str | Path) -> PackageInfo:
    """Check the seal of a package and read its description, without running or extracting anything.

    Raises:
        FileNotFoundError: there is no such file.
        PackageError: mglu_ops did not write the package, the package is damaged or of another version, the name of a
            member leads out of the folder to which torch extracts it, or the description has other fields than
            `PackageInfo`.
    """
    path = Path(path)
    check_seal(path, "package")
    try:
        with zipfile.ZipFile(path) as archive:
            values = json.loads(_description(archive))
        return _read(PackageInfo, {**values, "path": str(path)}, "its description")
    except (PackageError, zipfile.BadZipFile, TypeError, ValueError, RecursionError) as error:
        raise PackageError(f"{path}: {error}") from None


def _description(archive: zipfile.ZipFile) -> str:
    """Return the JSON of the description. torch stores the texts in a file beside each file of code."""
    for name in archive.namelist():
        if name.startswith("/") or ".." in name.split("/"):
            raise PackageError(f"the name of its member {name!r} leads out of the folder that torch extracts it to")
    for member in archive.infolist():
        if not member.filename.endswith("_metadata.json"):
            continue
        if member.file_size > _MOST_TEXT_BYTES:
            raise PackageError(f"{member.filename} has {member.file_size} bytes, must have at most {_MOST_TEXT_BYTES}")
        if KEY in (texts := json.loads(archive.read(member))):
            return texts[KEY]
    raise PackageError("it lacks its description")


def _read(hint: Any, value: Any, field_name: str) -> Any:
    """Convert a value of JSON to the type of a hint: a dataclass, a list, a union of types, or a type of JSON."""
    for kind in get_args(hint) if get_origin(hint) is UnionType else (hint,):
        if kind is Any or kind is type(value):
            return value
        if get_origin(kind) is list and isinstance(value, list):
            (item,) = get_args(kind)
            return [_read(item, each, f"{field_name}[{index}]") for index, each in enumerate(value)]
        if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
            hints = get_type_hints(kind)
            if hints.keys() != value.keys():
                raise PackageError(f"{field_name}: got the fields {list(value)}, must be {list(hints)}")
            return kind(**{name: _read(hints[name], each, f"{field_name}.{name}") for name, each in value.items()})
    raise PackageError(f"{field_name}: got {value!r:.100}, must be {hint}")
