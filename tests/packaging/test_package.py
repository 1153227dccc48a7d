"""A package's description is read back as it was written. The error for a wrong description names the field."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import mglu_ops
from mglu_ops.packaging.package import KEY, PackageError, read_info
from tests.support.packaging import FOLDER, INFO, TEXTS, texts_with, write_package_with, write_small_package

LAYER = asdict(INFO.layers[0])


def test_a_description_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    changes = {"cpu": ["x86_64", "AVX2"], "conditions": ["s0 % 2 == 0"], "missed": ["a reason"]}
    info = write_small_package(path, **changes, embeds_weights=False)
    assert read_info(path) == replace(info, path=str(path))
    assert str(read_info(path)).splitlines() == [
        f"{path}: 1 MGLU layer, backend cpu, cpu, weights in a file of their own",
        f"  torch {info.torch}; needs the operators of mglu_ops: from mglu_ops in Python, from libmglu_ops.so in C++",
        "  input x: float32 [1.., 64]",
        "  only where x.shape[0] % 2 == 0",
        "  not fused: a reason",
    ]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ("", "Expecting value"),
        ("[" * 100_000, "recursion|Stack overflow"),
        ("3", "not (a container or )?iterable"),
        ("{}", "it lacks its description"),
        (json.dumps({KEY: "{"}), "property name"),
        (json.dumps({KEY: 3}), "must be str"),
        (json.dumps({KEY: "3"}), "not a mapping"),
        (json.dumps({KEY: "{}"}), r"its description: got the fields \['path'\], must be \['torch', 'mglu_ops'"),
        (texts_with(surprise=1), r"its description: got the fields .*'surprise', 'path'\], must be"),
        (texts_with(torch=3), "its description.torch: got 3, must be <class 'str'>"),
        (texts_with(embeds_weights=1), "its description.embeds_weights: got 1, must be <class 'bool'>"),
        (texts_with(arch=5), r"its description.arch: got 5, must be list\[int\] \| None"),
        (texts_with(arch=[9, True]), r"its description.arch\[1\]: got True, must be <class 'int'>"),
        (texts_with(layers={}), r"its description.layers: got \{\}, must be list\[.*LayerInfo\]"),
        (texts_with(layers=[LAYER, {}]), r"its description.layers\[1\]: got the fields \[\], must be \['n_masks'"),
        (texts_with(layers=[{**LAYER, "n_masks": 1.5}]), r"its description.layers\[0\].n_masks: got 1.5, must be"),
    ],
)
def test_a_wrong_description_is_refused(texts: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    write_package_with(path, {TEXTS: texts})
    with pytest.raises(PackageError, match=f"^{path}: .*{words}"):
        read_info(path)


def test_texts_are_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt2"
    write_small_package(path)
    monkeypatch.setattr("mglu_ops.packaging.package._MOST_TEXT_BYTES", 500)
    with pytest.raises(PackageError, match=r"_metadata\.json has \d+ bytes, must have at most 500"):
        read_info(path)


@pytest.mark.parametrize("name", [f"{FOLDER}../../../../../outside", "..", "/tmp/outside", "//host/outside"])
def test_a_member_whose_name_leaves_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    write_package_with(path, {TEXTS: texts_with(), name: "outside"})
    with pytest.raises(PackageError, match=r"the name of its member '.*' leads out of the folder"):
        mglu_ops.load(path)
