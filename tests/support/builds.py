"""The two kinds of artifacts that mglu_ops builds on the user's machine, with fake compilers and a temporary cache."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mglu_ops.backends import cache
from mglu_ops.backends.cpu import build
from mglu_ops.backends.cuda import compiler

CONTENT = b"\x7fELF of nothing"
"""The output of the fake compilers."""


@dataclass
class Kind:
    """A kind of artifact: the CPU library or a cubin.

    Attributes:
        use: loads the artifact from the cache, building it if it is missing, and returns its content.
        log: a file that gets one line per build.
        remove_compiler: makes the compiler impossible to find.
    """

    use: Callable[[], bytes]
    log: Path
    remove_compiler: Callable[[], None]

    @property
    def builds(self) -> int:
        return len(self.log.read_text().splitlines())


def fake_compiler(folder: Path, body: str) -> Path:
    """A shell script that replaces a C++ compiler. Its `body` must write the file `$out`."""
    path = folder / "fake-c++"
    path.write_text(f'#!/bin/sh\nfor out; do :; done\ncase "$*" in *-shared*) linking=yes;; esac\n{body}\n')
    path.chmod(0o755)
    return path


def cpu_kind(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> Kind:
    log = folder / "log"
    body = f'test $linking && echo built >> {log} && sleep {seconds}; printf "\\177ELF of nothing" > $out'
    monkeypatch.setenv("CXX", str(fake_compiler(folder, body)))

    def remove_compiler() -> None:
        monkeypatch.delenv("CXX")
        monkeypatch.setenv("PATH", str(folder))

    return Kind(lambda: build.load_library(Path.read_bytes), log, remove_compiler)


def cuda_kind(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> Kind:
    log = folder / "log"

    def run_nvrtc(*_: object) -> bytes:
        with log.open("a") as file:
            file.write("built\n")
        time.sleep(seconds)
        return CONTENT

    monkeypatch.setattr(compiler, "has_cuda_core", lambda: True)
    monkeypatch.setattr(compiler, "_run_nvrtc", run_nvrtc)

    def remove_compiler() -> None:
        monkeypatch.setattr(compiler, "has_cuda_core", lambda: False)
        monkeypatch.setenv("PATH", str(folder))

    return Kind(lambda: compiler.compile_cubin("plain", "sm_90", {"A": 1}), log, remove_compiler)


KINDS = {"cpu": cpu_kind, "cuda": cuda_kind}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kind:
    return KINDS[request.param](tmp_path, monkeypatch, 0)


@pytest.fixture(params=KINDS)
def slow_kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kind:
    """A kind whose build takes half a second."""
    return KINDS[request.param](tmp_path, monkeypatch, 0.5)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the cache folder, which does not exist yet. Temporary files go into a folder beside it."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("MGLU_CACHE_DIR", str(tmp_path / "cache"))
    cache.say.cache_clear()
    return tmp_path / "cache"


def artifact(name: str = "some", *inputs: str) -> cache.Artifact:
    return cache.Artifact(name, ".so", inputs, "building it", "a second")


def obtain(wanted: cache.Artifact, make: Callable[[Path], bytes] = lambda _: CONTENT) -> Path:
    return cache.obtain(wanted, make, lambda path, _: path)


def files(folder: Path) -> list[Path]:
    """All files in a folder except the locks, which are never deleted."""
    return [path for path in folder.iterdir() if path.suffix != ".lock"]


def only_file(folder: Path) -> Path:
    (path,) = files(folder)
    return path


def shared_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"mglu_ops-{os.geteuid()}"
