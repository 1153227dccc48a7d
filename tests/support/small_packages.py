"""Packages with a description and a seal, but without code that runs."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import torch

import mglu_ops
from mglu_ops.packaging.package import KEY, InputInfo, LayerInfo, PackageInfo, WeightInfo, seal_package
from mglu_ops.packaging.seal import seal

FOLDER = "model/data/aotinductor/model/"
TEXTS = f"{FOLDER}code.wrapper_metadata.json"
INFO = PackageInfo(
    torch.__version__,
    mglu_ops.__version__,
    "cpu",
    "cpu",
    "operator",
    True,
    [InputInfo("x", "float32", [[1, None, "s0"], 64], [0, 1], False, None)],
    [LayerInfo(2, 8, 16, "float32", "silu", None)],
    [WeightInfo("0.weight", "float32", [8, 16], [16, 1])],
)


def write_small_package(path: Path, code: bytes = bytes(range(256)) * 8, **changes: object) -> PackageInfo:
    """Write a package with this code and with `changes` to the fields of `INFO`, and return its description."""
    info = replace(INFO, **changes)
    write_archive(path, {TEXTS: json.dumps(info.texts()), f"{FOLDER}code.wrapper.so": code})
    seal_package(path, info)
    return info


def write_package_with(path: Path, members: dict[str, str | bytes]) -> None:
    """Write a package with any members and a valid seal."""
    write_archive(path, members)
    seal(path, "package torch=2.13 device=cpu weights=inside")


def write_archive(path: Path, members: dict[str, str | bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def texts_with(**changes: object) -> str:
    """The texts of a package whose description has `changes`: other values of its fields, or additional fields."""
    return json.dumps({KEY: json.dumps({**json.loads(INFO.texts()[KEY]), **changes})})
