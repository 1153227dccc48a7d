"""The seal of a package: any damage is found, and a file without it is refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from crafted_packages import INFO, write_small_package

from mglu_ops.packaging.package import PackageError, read_info, seal


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt2"
    write_small_package(path)
    assert read_info(path).texts() == INFO.texts()
    return path


def test_a_changed_bit_is_refused_wherever_it_is(package: Path) -> None:
    whole = package.read_bytes()
    for at in [*range(0, len(whole), 11), *range(len(whole) - 80, len(whole))]:  # all of the seal, and every 11th byte
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        package.write_bytes(changed)
        with pytest.raises(PackageError):
            read_info(package)


def test_a_package_without_a_seal_is_refused(package: Path) -> None:
    with zipfile.ZipFile(package, "a") as archive:
        archive.comment = b""
    with pytest.raises(PackageError, match="has no seal at its end"):
        read_info(package)


def test_a_package_that_is_sealed_again_stays_the_same(package: Path) -> None:
    whole = package.read_bytes()
    assert whole.endswith(b"adler32=" + whole[-8:])
    seal(package, INFO.torch, "cpu")
    assert package.read_bytes() == whole
