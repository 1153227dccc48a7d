"""A lock between processes and between threads: a file under `flock`, which the system releases when a process ends."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_POLL_SECONDS = 0.05
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""The errors of file systems that have no locks, as some that are mounted over a network."""

_held: set[int] = set()
"""The descriptors of the locks of this process."""


@contextmanager
def locked(path: Path, seconds: float, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock `path`, a file that exists only while a process holds it or was killed while it did.

    Windows, and file systems without locks, run the block without one.

    Args:
        path: the file, in a folder that exists.
        seconds: how long to wait for another holder. Ctrl-C ends the wait.
        on_wait: called once if there is another holder, before the wait.

    Raises:
        TimeoutError: another process or thread still held the lock at the end of that time.
        OSError: the file cannot be made.
    """
    if sys.platform == "win32":
        yield
        return
    handle = _acquire(path, seconds, on_wait)
    try:
        yield
    finally:
        if handle in _held:  # it is not in a process that this thread was forked into
            _held.remove(handle)
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(handle)


def _acquire(path: Path, seconds: float, on_wait: Callable[[], None]) -> int:
    deadline = time.monotonic() + seconds
    handle = _try(path)
    if handle is None and seconds > 0:
        on_wait()
    while handle is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"another process has held {path} for {seconds:.0f} s")
        time.sleep(_POLL_SECONDS)
        handle = _try(path)
    return handle


def _try(path: Path) -> int | None:
    """A descriptor that holds the lock, or None if there is another holder."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    _held.add(handle)
    acquired = False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder may have removed the file in between; then this is the lock of a file that has no name.
        acquired = os.path.samestat(os.fstat(handle), path.stat())
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        acquired = True
    finally:
        if not acquired:
            _held.remove(handle)
            os.close(handle)
    return handle if acquired else None


def _close_all() -> None:
    """Close what a forked process has inherited; otherwise the parent's locks would outlive a parent that is killed."""
    while _held:
        os.close(_held.pop())


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_all)
