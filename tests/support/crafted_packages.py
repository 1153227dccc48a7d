"""Packages and zip archives as an attacker would write them, byte by byte, with a right seal."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import mglu_ops
from mglu_ops.packaging.package import KEY, LayerInfo, PackageInfo

INFO = PackageInfo(torch.__version__, mglu_ops.__version__, "cpu", "cpu", "operator", True, [], [])
LAYER = asdict(LayerInfo(2, 8, 16, "float32", "silu", None))
INPUT = {
    "name": "x",
    "dtype": "float32",
    "shape": [[1, None, "s0"], 64],
    "order": [0, 1],
    "is_written": False,
    "constant": None,
}
WEIGHT = {"name": "0.weight", "dtype": "float32", "shape": [8, 16], "strides": [16, 1]}
FOLDER = b"model/data/aotinductor/model/"


@dataclass(frozen=True)
class Member:
    """A member of an archive. What is None is as torch writes it."""

    name: bytes
    data: bytes = b""
    method: int = 0
    flags: int = 0x0808
    attributes: int = 0
    size: int | None = None
    offset: int | None = None
    crc32: int | None = None
    extra: bytes = b""
    local_name: bytes | None = None
    local_method: int = 0


def archive(members: Sequence[Member], comment: bytes = b"", zip64: bool = False, **end: int) -> bytes:
    """The bytes of an archive. `end` sets values of the last record: `count`, `size` or `start`."""
    data, directory = b"", b""
    for member in members:
        checksum = zlib.crc32(member.data) if member.crc32 is None else member.crc32
        stored = member.data if member.method == 0 else _deflated(member.data)
        size = len(member.data) if member.size is None else member.size
        offset = len(data) if member.offset is None else member.offset
        name = member.name if member.local_name is None else member.local_name
        local = (b"PK\3\4", 20, member.flags, member.local_method or member.method, 0, 0, 0, 0, 0, len(name), 0)
        data += struct.pack("<4s5H3I2H", *local) + name + stored
        data += struct.pack("<4s3I", b"PK\7\x08", checksum, len(stored), size & 0xFFFFFFFF)
        stored_size = size if member.method == 0 else len(stored)
        entry = (b"PK\1\2", 0, 0, member.flags, member.method, 0, 0, checksum, stored_size, size, len(member.name))
        directory += struct.pack("<4s6H3IH", *entry)
        directory += struct.pack("<4H2I", len(member.extra), 0, 0, 0, member.attributes, offset)
        directory += member.name + member.extra
    values = {"count": len(members), "size": len(directory), "start": len(data), **end}
    count, size, start = values["count"], values["size"], values["start"]
    data += directory
    if zip64:
        record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
        data += record + struct.pack("<4sIQI", b"PK\6\7", 0, len(data), 1)
    return data + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, start, len(comment)) + comment


def _deflated(data: bytes) -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    return compressor.compress(data) + compressor.flush()


def sealed(members: Sequence[Member], torch_version: str = INFO.torch, device: str = "cpu", **options: Any) -> bytes:
    """The bytes of an archive with a right seal."""
    seal = f"mglu_ops seal 1 torch={torch_version} device={device} adler32=".encode()
    whole = archive(members, seal + b"0" * 8, **options)[:-8]
    return whole + b"%08x" % zlib.adler32(whole)


def good_members(info: PackageInfo = INFO) -> list[Member]:
    """The members of a package without code."""
    return [described(info.texts()), Member(FOLDER + b"code.wrapper.so", b"no code")]


def described(texts: object) -> Member:
    """The file with the texts of a package. `texts` is its JSON, or what becomes JSON."""
    raw = texts if isinstance(texts, bytes) else json.dumps(texts).encode()
    return Member(FOLDER + b"code.wrapper_metadata.json", raw)


def package_with(description: object, **options: Any) -> bytes:
    """The bytes of a package with this description: JSON, or what becomes JSON. The options are those of `sealed`."""
    text = description if isinstance(description, str) else json.dumps(description)
    return sealed([described({**INFO.texts(), KEY: text}), *good_members()[1:]], **options)


def description(**changes: object) -> dict[str, Any]:
    """A right description with a layer, an input and a weight, and these changes."""
    right = json.loads(INFO.texts()[KEY])
    return {**right, "layers": [LAYER], "inputs": [INPUT], "weights": [WEIGHT], **changes}


def write_small_package(path: Path, code: bytes = bytes(range(256)) * 8, info: PackageInfo = INFO) -> None:
    """Write a package whose machine code is none, or the given bytes."""
    members = [replace(member, data=code) if member.name.endswith(b".so") else member for member in good_members(info)]
    path.write_bytes(sealed(members, info.torch, info.device))
