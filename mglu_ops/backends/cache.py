"""The cache of kernels that are built on first use: the CPU library and the CUDA cubins.

A file is called `NAME-KEY-CHECKSUM.SUFFIX`. The key is the hash of the sources and options, but not of the compiler, so
a machine with a filled cache needs no compiler. The checksum is the hash of the content, which is verified before use.
As a file is code, the file and its folder must belong to this user or to root, and nobody else may be able to write to
them.

A file is written under a temporary name and renamed, so it is never seen in part. If several processes need the same
file, one builds it and the others wait.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from ..notices import say

T = TypeVar("T")

LOCK_SECONDS = 300.0
"""Seconds that a process waits for another process to build the same file."""

_DIGITS = 32


@dataclass(frozen=True)
class Artifact:
    """The description of a file in the cache, which may not be built yet.

    Attributes:
        name: what the file holds and for which processor, such as `cpu-x86_64`.
        suffix: `.so` or `.cubin`.
        inputs: the sources and options from which the file is built. The compiler is not one of them.
        activity: how messages describe the build, such as "compiling CUDA kernels".
        duration: how messages describe the time that the build takes.
    """

    name: str
    suffix: str
    inputs: tuple[str, ...]
    activity: str
    duration: str

    @property
    def stem(self) -> str:
        """The first part of the file's name: `NAME-KEY`."""
        key = _hash("\0".join(self.inputs).encode())
        return f"{self.name}-{key}"


def obtain(
    artifact: Artifact,
    build: Callable[[Path], bytes],
    load: Callable[[Path, bytes], T],
    folder: Path | None = None,
) -> T:
    """Load an artifact, and build it first if no folder has it.

    Args:
        artifact: the artifact.
        build: returns the content of the file. Its argument is an empty scratch folder, which is removed afterwards.
        load: gets the path and the content of the file, and raises an OSError if this machine cannot load the file.
            Then the file is built again, or the next folder is used.
        folder: the only folder to use. The default is `cache_directory()` or, if that folder cannot be used, a
            temporary folder that the processes of this user share.

    Returns:
        What `load` returned.

    Raises:
        OSError: no folder can keep the file. The message names each folder and its problem.
        Exception: any exception of `build` except an OSError.
    """
    for choice in _folders(folder):
        if found := _find(choice, artifact, load):
            return found[0]
    content: bytes | None = None
    problems = []
    advice = "; set MGLU_CACHE_DIR to another folder" if folder is None else ""
    for choice in _folders(folder):
        try:
            choice.mkdir(0o700, parents=True, exist_ok=True)
            _check_trust(choice)
            with _lock(choice, artifact):
                if found := _find(choice, artifact, load):  # another process has built it meanwhile
                    return found[0]
                if artifact.suffix == ".so":
                    _check_execution(choice)
                if content is None:
                    say(f"{artifact.activity}, which takes {artifact.duration}; the result is kept in {choice}")
                    with tempfile.TemporaryDirectory(prefix="mglu_ops-build-", ignore_cleanup_errors=True) as scratch:
                        content = build(Path(scratch))
                return _store(choice, artifact, content, load)
        except OSError as error:
            problems.append(f"{choice} is not used: {error}")
            say(problems[-1] + advice)
    raise OSError(f"no folder can keep {artifact.name}: {'; '.join(problems)}{advice}")


def is_stored(artifact: Artifact) -> bool:
    """True if `obtain` need not build an artifact."""
    return any(_find(folder, artifact, lambda path, _: path) for folder in _folders(None))


def cache_directory() -> Path:
    """The folder of the cache: `MGLU_CACHE_DIR`, or `mglu_ops` in the user's XDG cache folder.

    If the user has no home directory, it is a temporary folder that the processes of this user share.
    """
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    default = os.path.join(xdg if os.path.isabs(xdg) else "~/.cache", "mglu_ops")
    chosen = os.environ.get("MGLU_CACHE_DIR") or default
    try:
        return Path(chosen).expanduser().resolve()
    except RuntimeError:
        folder = _temporary_folder()
        say(f"there is no home directory for {chosen} (set MGLU_CACHE_DIR); compiled kernels are kept in {folder}")
        return folder


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir(), f"mglu_ops-{os.geteuid()}")


def _folders(only: Path | None) -> Iterator[Path]:
    """Yield the folders to try, in order."""
    if only is not None:
        yield only
    else:
        yield cache_directory()
        with suppress(FileNotFoundError):  # no temporary folder can be written to
            yield _temporary_folder()


def _check_trust(path: Path) -> None:
    """Raise an OSError if another user can write to a file or folder.

    Parent folders need no check: a user who can write to them can only replace the folder by another folder, which
    passes this check only if it belongs to this user or to root.
    """
    if path.is_symlink():  # its target may be in a folder of another user
        raise OSError(f"{path} is a symbolic link")
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        raise OSError(f"{path} is owned by user {status.st_uid} and not by {os.geteuid()}, who runs this, or root")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise OSError(f"{path} has mode {mode:o}, so others can write to it (chmod go-w makes it private)")


def _check_execution(folder: Path) -> None:
    """Raise an OSError if libraries in a folder cannot be loaded, or if its disk is full. Call this before a build."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0")
        file.flush()
        try:
            mmap.mmap(file.fileno(), 1, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
        except PermissionError as error:
            raise OSError(f"the system runs no code from it, as from a disk that is mounted noexec ({error})") from None


def _files(folder: Path, artifact: Artifact) -> list[Path]:
    return sorted(folder.glob(f"{artifact.stem}-*{artifact.suffix}"))


def _find(folder: Path, artifact: Artifact, load: Callable[[Path, bytes], T]) -> tuple[T, ...]:
    """Return `(load(...),)` of the first undamaged and trusted file of an artifact, or `()`. Report unusable files."""
    for path in _files(folder, artifact):
        try:
            _check_trust(folder)
            _check_trust(path)
            content = path.read_bytes()
            if path.stem.rpartition("-")[2] != _hash(content):
                raise OSError(f"{path} is damaged: its content does not have the checksum in its name")
            return (load(path, content),)
        except FileNotFoundError:
            continue  # another process has removed it meanwhile
        except OSError as error:
            say(f"{path} is not used: {error}")
    return ()


def _lock(folder: Path, artifact: Artifact) -> AbstractContextManager[object]:
    """Take the lock of an artifact; a `with` block releases it. The system also releases it when the process ends.

    Raises:
        OSError: the lock cannot be taken, or another process has held it for `LOCK_SECONDS`.
    """
    lock = FileLock(folder / f"{artifact.stem}.lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is {artifact.activity}; waiting for it, at most {LOCK_SECONDS:.0f} s")
        return lock.acquire(timeout=LOCK_SECONDS)


def _store(folder: Path, artifact: Artifact, content: bytes, load: Callable[[Path, bytes], T]) -> T:
    """Write the file of an artifact and load it. Remove older files of the artifact.

    The new file is removed as well if it cannot be loaded.
    """
    path = folder / f"{artifact.stem}-{_hash(content)}{artifact.suffix}"
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f"{artifact.stem}.")  # private, whatever the umask
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    for other in _files(folder, artifact):
        if other != path:
            other.unlink(missing_ok=True)
    try:
        return load(path, content)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
