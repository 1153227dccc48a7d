"""The cache of what is built where it runs: the CPU library and the CUDA kernels, found and stored in one way.

A file is called `NAME-KEY-CHECKSUM.SUFFIX`. The key is the hash of all that it was built from, which does not include
the compiler, so that a folder that holds the file needs none. The checksum is that of its content, and is compared
before the content is used. What is found is trusted as the program itself: only if it, and its folder, belong to this
user or to root, and nobody else can write to them.

Files appear whole, by being renamed. Processes that need the same file at once wait for the first to build it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..notices import say
from .cache_folders import FOLDERS, check_executable, check_trust, prepare
from .file_lock import locked

T = TypeVar("T")

LOCK_SECONDS = 300.0
"""Seconds that a process waits for another that builds the same file."""

COMPILER_SECONDS = 600.0
"""Seconds that a compiler may take, many times what it needs, so that no call waits for ever."""

KEPT_DAYS = 30
"""Days after which a file that no process has loaded is removed, when another file is built."""

_DAY = 24 * 60 * 60.0
_DIGITS = 32
_HASH = f"-[0-9a-f]{{{_DIGITS}}}"
_ARTIFACT = re.compile(rf"[\w-]+{_HASH}{_HASH}\.(so|cubin)")
_LOCK = re.compile(rf"[\w-]+{_HASH}\.lock")


class NoFolderError(RuntimeError):
    """No folder can keep a file that has to be built; the message names each folder and what is wrong with it."""


@dataclass(frozen=True)
class Artifact:
    """A file that is built, before it is.

    Attributes:
        name: what it is and for which processor, as `cpu-x86_64`.
        suffix: `.so` or `.cubin`.
        inputs: all that decides its content: the sources and the options, but not the compiler.
        activity: for messages, what building it is, as "compiling CUDA kernels".
        duration: for messages, how long that takes.
    """

    name: str
    suffix: str
    inputs: tuple[str, ...]
    activity: str
    duration: str

    @property
    def stem(self) -> str:
        """The name and the key."""
        key = _hash("\0".join(self.inputs).encode())
        return f"{self.name}-{key}"


def obtain(
    artifact: Artifact,
    build: Callable[[Path], bytes],
    load: Callable[[Path, bytes], T],
    folder: Path | None = None,
) -> T:
    """Load an artifact from the first folder that can be used, built if it is not there.

    Args:
        artifact: what to load.
        build: returns its content; it may write to the empty folder that it is given, which is removed afterwards.
            It is called at most once, unless it raises an OSError.
        load: gets the file and its content. It raises an OSError if the file cannot be loaded here; then the file is
            built again, or the next folder is used.
        folder: the only folder to use. By default, the folders are `cache_directory()`, a temporary folder that the
            processes of this user share, and a temporary folder of this process.

    Returns:
        What `load` returned.

    Raises:
        NoFolderError: no folder can be used.
        Exception: whatever `build` raises, other than an OSError.
    """
    choices = FOLDERS if folder is None else (lambda: folder,)
    contents: list[bytes] = []

    def build_once(scratch: Path) -> bytes:
        if not contents:
            say(f"{artifact.activity}, which takes {artifact.duration}; the result is kept in {scratch.parent}")
            contents.append(build(scratch))
        return contents[0]

    problems = []
    for choose in choices:
        try:
            chosen = choose()
            prepare(chosen)
            if artifact.suffix == ".so":
                check_executable(chosen)
            found = _find(chosen, artifact, load)
            return found[0] if found else _build(chosen, artifact, build_once, load)
        except OSError as error:
            problems.append(_words(error))
            if choose is not choices[-1]:
                say(f"{problems[-1]}; a temporary folder is used instead")
    raise NoFolderError(f"no folder can be used for {artifact.name}: {'; '.join(problems)}")


def is_stored(artifact: Artifact) -> bool:
    """Whether `obtain` would find an artifact without building it."""
    for choose in FOLDERS[:-1]:
        with contextlib.suppress(OSError):
            folder = choose()
            check_trust(folder, folder.stat())
            if _find(folder, artifact, lambda path, _: path):
                return True
    return False


def share(folder: Path, made: Iterable[Path]) -> None:
    """Let everybody read the artifacts in a folder, as for an image in which another user runs.

    Args:
        folder: the folder.
        made: it and those above it, as far as they were made for this. Others keep their mode.
    """
    for path in _artifacts(folder):
        path.chmod(0o644)
    for path in made:
        path.chmod(0o755)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if sys.platform != "win32" and ~mode & 0o005:
        say(f"{folder} keeps mode {mode:o}, with which others cannot read it (chmod 755 lets them)")


def _find(folder: Path, artifact: Artifact, load: Callable[[Path, bytes], T]) -> tuple[T] | None:
    """Load the file of an artifact, if one is whole and trustworthy, and return the result of `load`; report others."""
    for path in _files(folder, artifact):
        try:
            return (load(path, _read(path)),)
        except FileNotFoundError:
            continue  # removed since the folder was listed
        except OSError as error:
            say(f"{_words(error)}; it is not used")
    return None


def _files(folder: Path, artifact: Artifact) -> list[Path]:
    return sorted(folder.glob(f"{artifact.stem}-*{artifact.suffix}"))


def _read(path: Path) -> bytes:
    """The content of a file, after all checks. A link is not followed: its target may be in any folder."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:  # closed also if it is a folder
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a file")
        check_trust(path, status)
        content = file.read()
    if path.stem.rpartition("-")[2] != _hash(content):
        raise OSError(f"{path} is damaged: its content does not have the checksum in its name")
    if time.time() - status.st_mtime > _DAY:
        with contextlib.suppress(OSError):  # a folder that cannot be written is not tidied either
            os.utime(path)
    return content


def _build(folder: Path, artifact: Artifact, build: Callable[[Path], bytes], load: Callable[[Path, bytes], T]) -> T:
    """Build an artifact, put it in place of all files that are not used, and load it."""

    def wait() -> None:
        say(f"another process is {artifact.activity}; waiting for it, at most {LOCK_SECONDS:.0f} s")

    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"{folder} cannot be written")
    with locked(folder / f"{artifact.stem}.lock", LOCK_SECONDS, wait):
        if found := _find(folder, artifact, load):  # built by another process meanwhile
            return found[0]
        _tidy(folder, artifact)
        for path in _files(folder, artifact):
            if path.is_dir():
                path.rmdir()  # one that is not empty leaves no place for the file, so that it is not built in vain
        with _scratch(folder, artifact) as scratch:
            content = build(scratch)
            path = folder / f"{artifact.stem}-{_hash(content)}{artifact.suffix}"
            temporary = scratch / path.name
            temporary.touch(0o600)
            temporary.write_bytes(content)
            load(temporary, content)  # a file that cannot be loaded is not kept
            os.replace(temporary, path)
        for other in _files(folder, artifact):
            if other != path:
                other.unlink(missing_ok=True)
        return load(path, content)


@contextlib.contextmanager
def _scratch(folder: Path, artifact: Artifact) -> Iterator[Path]:
    """A folder for a build. `tempfile.TemporaryDirectory` would be removed by a forked process that exits before."""
    scratch = tempfile.mkdtemp(dir=folder, prefix=f"{artifact.stem}.", suffix=".tmp")
    try:
        yield Path(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _tidy(folder: Path, artifact: Artifact) -> None:
    """Remove what killed builds have left, and what was not used for long. The lock of `artifact` is held."""
    _remove_scratch(folder, artifact.stem)
    for path in folder.iterdir():
        if _LOCK.fullmatch(path.name):
            with contextlib.suppress(OSError), locked(path, 0):  # an error: another process is building
                _remove_scratch(folder, path.stem)
    for path in _artifacts(folder):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > KEPT_DAYS * _DAY:
                path.unlink()


def _remove_scratch(folder: Path, stem: str) -> None:
    for path in folder.glob(f"{stem}.*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _artifacts(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _ARTIFACT.fullmatch(path.name) and path.is_file()]


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]


def _words(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)
