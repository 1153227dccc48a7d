"""The folders that may keep what is built where it runs, and whether they are to be trusted."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat
import sys
import tempfile
from functools import cache
from pathlib import Path


def cache_directory() -> Path:
    """The folder of the cache: `MGLU_CACHE_DIR`, or else `mglu_ops` in the user's XDG cache folder.

    Raises:
        OSError: `MGLU_CACHE_DIR` names a user who does not exist, or there is no home directory.
    """
    if chosen := os.environ.get("MGLU_CACHE_DIR"):
        return _absolute(chosen)
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "mglu_ops"
    except RuntimeError as error:
        raise OSError("there is no home directory to keep compiled kernels in (set MGLU_CACHE_DIR)") from error


@cache
def _absolute(text: str) -> Path:
    """The absolute form of a path at its first use, so that a later change of the working directory has no effect."""
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise OSError(f"MGLU_CACHE_DIR: got {text!r}, which names no home directory") from error


def _user() -> int:
    return 0 if sys.platform == "win32" else os.geteuid()


def _shared_temporary_folder() -> Path:
    """The folder for temporary use by all processes of this user."""
    folder = Path(tempfile.gettempdir()) / f"mglu_ops-{_user()}"
    if folder.is_symlink():  # anybody can make one there
        raise OSError(f"{folder} is a symbolic link")
    return folder


def _own_temporary_folder() -> Path:
    """A folder of this process, removed at its end."""
    return _own_temporary_folder_of(os.getpid())


@cache
def _own_temporary_folder_of(process: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="mglu_ops-"))

    def remove() -> None:
        if os.getpid() == process:  # and not a process that was forked
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


FOLDERS = (cache_directory, _shared_temporary_folder, _own_temporary_folder)
"""Functions that name a folder or raise an OSError, in the order in which the folders are tried."""


def missing_folders(folder: Path) -> list[Path]:
    """A folder and those above it, as far as they do not exist."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def prepare(folder: Path) -> None:
    """Make a folder, and those above it, for this user alone. One that exists must be trustworthy."""
    for missing in reversed(missing_folders(folder)):
        with contextlib.suppress(FileExistsError):
            missing.mkdir(0o700)
    if not folder.is_dir():
        raise OSError(f"{folder} is not a folder")
    check_trust(folder, folder.stat())


def check_trust(path: Path, status: os.stat_result) -> None:
    """Raise an OSError if another user can write to a path. Windows keeps a user's folders from others by itself.

    The folders above are not checked: who can write to them can only put another folder of this user or of root there.
    """
    if sys.platform == "win32":
        return
    if status.st_uid not in (0, _user()):
        raise OSError(f"{path} is owned by user {status.st_uid} and not by {_user()}, who runs this, or root")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise OSError(f"{path} has mode {mode:o}, with which others can write to it (chmod go-w makes it private)")


def check_executable(folder: Path) -> None:
    """Raise an OSError if the system loads no library from a folder, so that none is built there in vain."""
    if sys.platform != "win32" and os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise OSError(f"{folder} is on a disk that is mounted noexec")
