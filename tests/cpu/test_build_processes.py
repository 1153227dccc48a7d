"""Builds by several processes and threads, builds that are killed or interrupted, and what they leave behind.

The compilers are stand-ins. A test with `slow_kind` runs for the CPU library and for cubins; a test without it is of
what both share, or of one of them alone.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from build_kinds import CONTENT, artifact, fake_compiler, folder_made, obtain, only_file, shared_folder

from mglu_ops.backends import cache, cache_folders, file_lock, interruptible
from mglu_ops.backends.cpu import library
from mglu_ops.backends.cuda import compiler
from mglu_ops.packaging import library as packaging

pytest_plugins = ["build_kinds"]
pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="processes are not forked on Windows"),
    pytest.mark.usefixtures("folder"),
]


@pytest.fixture(autouse=True)
def _ctrl_c_interrupts() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, which it does not in programs that a shell starts in the background."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# --- Old versions and leftovers -------------------------------------------------------------------------------------


def age(path: Path, days: float) -> None:
    then = time.time() - days * 24 * 60 * 60
    os.utime(path, (then, then))


def test_what_was_not_used_for_long_is_removed_by_a_build(folder):
    """Two versions of the package may use one folder in turn, so a version stays as long as it is used."""
    old, used, recent = (obtain(artifact("library", version)) for version in ("1", "2", "3"))
    foreign = folder / "of-somebody-else.so"
    foreign.touch()
    for path in (old, used, foreign):
        age(path, cache.KEPT_DAYS + 0.1)
    age(recent, cache.KEPT_DAYS - 0.1)
    assert obtain(artifact("library", "2")) == used
    new = obtain(artifact("library", "4"))
    assert set(folder.iterdir()) == {used, recent, new, foreign}


def test_a_use_is_written_down_once_a_day(folder):
    """Two writes of a file's time, for what many processes load at once, would be one too many."""
    path = obtain(artifact())
    for days, is_new in ((0.9, False), (1.1, True)):
        age(path, days)
        assert obtain(artifact()) == path
        assert (time.time() - path.stat().st_mtime < 60) == is_new


def test_what_a_killed_build_leaves_is_removed_by_the_next(folder, tmp_path):
    def build_long(scratch: Path) -> bytes:
        (scratch / "half.o").touch()
        (tmp_path / "started").touch()
        time.sleep(60)
        return b""

    for wanted, following in ((artifact("same"), artifact("same")), (artifact("other"), artifact("next"))):
        child = forked(lambda wanted=wanted: obtain(wanted, build_long))
        wait_for(tmp_path / "started")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert {path.suffix for path in folder.iterdir()} >= {".tmp", ".lock"}
        (tmp_path / "started").unlink()
        obtain(following)
        assert {path.suffix for path in folder.iterdir()} == {".so"}


def test_a_build_leaves_the_lock_and_the_files_of_another_that_goes_on(folder):
    with file_lock.locked(folder_made(folder) / f"{artifact('other').stem}.lock", 0):
        scratch = folder / f"{artifact('other').stem}.x.tmp"
        scratch.mkdir()
        (folder / "of-somebody-else.lock").touch()
        obtain(artifact())
        assert scratch.is_dir()
        assert (folder / f"{artifact('other').stem}.lock").exists()
        assert (folder / "of-somebody-else.lock").exists()


# --- Processes and threads ------------------------------------------------------------------------------------------


def forked(function: Callable[[], object]) -> int:
    """The id of a process that runs a function and exits with 0 if it returns."""
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def wait_for(path: Path, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def exit_code(child: int, seconds: float) -> int:
    """The exit code of a process that must end within a time."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail(f"the process did not end within {seconds} s")
        time.sleep(0.01)


def test_processes_that_start_together_build_once(slow_kind, folder, capfd):
    children = [forked(slow_kind.use) for _ in range(4)]
    assert [exit_code(child, 20) for child in children] == [0] * 4
    assert slow_kind.builds == 1
    assert only_file(folder).read_bytes() == CONTENT
    printed = capfd.readouterr().err
    assert printed.count("the result is kept in") == 1
    assert 1 <= printed.count("another process is ") <= 3
    assert "; waiting for it, at most 300 s" in printed


def test_threads_that_start_together_build_once(slow_kind, folder):
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(slow_kind.use())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [CONTENT] * 4
    assert slow_kind.builds == 1


def test_a_lock_that_is_held_for_too_long_is_passed_by(folder, monkeypatch, capsys):
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.2)
    lock = folder_made(folder) / f"{artifact().stem}.lock"
    with file_lock.locked(lock, 0):
        assert obtain(artifact()).parent == shared_folder()
    printed = capsys.readouterr().err
    assert "another process is building it; waiting for it, at most 0 s" in printed
    assert f"another process has held {lock} for 0 s; a temporary folder is used instead" in printed
    assert not lock.exists()


def test_a_file_system_without_locks_builds_without(folder, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError(37, os.strerror(37))

    monkeypatch.setattr(file_lock.fcntl, "flock", no_locks)
    assert obtain(artifact()).parent == folder


def test_on_windows_which_has_no_flock_a_block_runs_without_a_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "fcntl", None)  # importing it is an error
    names = runpy.run_path(file_lock.__file__)
    with names["locked"](tmp_path / "some.lock", 0):
        assert not list(tmp_path.glob("*.lock"))


def test_a_process_that_is_forked_while_a_thread_builds_waits_for_it(slow_kind, folder, monkeypatch):
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "load_library", lambda _: slow_kind.use())
    thread = threading.Thread(target=library.load)
    thread.start()
    wait_for(slow_kind.log)
    child = forked(lambda: None if library.load() == CONTENT else pytest.fail("another content"))
    assert exit_code(child, 10) == 0
    thread.join()
    assert slow_kind.builds == 1
    assert len(list(folder.iterdir())) == 1


def test_a_lock_does_not_outlive_a_killed_process_in_its_children(folder, tmp_path):
    lock = folder_made(folder) / "some.lock"

    def hold() -> None:
        with file_lock.locked(lock, 0):
            forked(lambda: (tmp_path / "child").touch() or time.sleep(5))
            time.sleep(60)

    child = forked(hold)
    wait_for(tmp_path / "child")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with file_lock.locked(lock, 1):
        assert lock.exists()


def test_a_process_is_not_forked_while_cuda_core_is_imported():
    importing, ended = threading.Event(), threading.Event()

    def work() -> None:
        with compiler._IMPORTING:
            importing.set()
            time.sleep(0.3)
            ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    importing.wait()
    child = forked(lambda: compiler._cuda_core.__name__ if ended.is_set() else pytest.fail("forked too early"))
    assert exit_code(child, 10) == 0
    thread.join()


def test_the_folder_of_a_process_is_removed_at_its_end_and_not_by_its_children(monkeypatch):
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(cache_folders.atexit, "register", at_exit.append)
    folder = cache_folders._own_temporary_folder()
    assert exit_code(forked(at_exit[0]), 10) == 0
    assert folder.is_dir()
    at_exit[0]()
    assert not folder.exists()


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, threading, time
import torch, mglu_ops
def interrupt():
    while not os.path.exists({started!r}): time.sleep(0.02)
    global begin
    begin = time.monotonic()
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
x, weight, masks = torch.randn(2, 64), torch.randn(512, 64), torch.rand(2, 512, 64) > 0.5
packed = torch.ops.mglu.pack_masks(masks)
try:
    torch.ops.mglu.forward(x, weight, packed)
finally:
    print(time.monotonic() - begin, flush=True)
"""


def test_ctrl_c_ends_a_build_of_the_cpu_kernels_and_its_compiler(folder, tmp_path, monkeypatch):
    """The stand-in starts a process of its own, as compilers do.

    The signal goes to another thread than the main one, as the system may choose: this does not wake the main thread.
    """
    pids, started = tmp_path / "pids", tmp_path / "started"
    body = f"sleep 60 & echo $! >> {pids}; echo $$ >> {pids}; touch {started}; wait"
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, body)))
    program = PROGRAM.format(started=str(started))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert float(done.stdout) < 1
    assert not list(folder.iterdir())
    assert_ended(map(int, pids.read_text().split()))


def assert_ended(pids: Iterable[int]) -> None:
    """Processes have ended, or end as soon as they are scheduled. A zombie waits only for whoever adopted it."""
    deadline = time.monotonic() + 2
    for pid in pids:
        with suppress(OSError):
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                assert time.monotonic() < deadline, f"process {pid} runs on"
                time.sleep(0.01)


def interrupt_when(started: Path) -> None:
    def work() -> None:
        wait_for(started)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    threading.Thread(target=work).start()


needs_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="Ctrl-C interrupts the main thread"
)


@needs_main_thread
def test_ctrl_c_ends_the_compilation_of_a_cubin(folder, tmp_path, monkeypatch):
    """A function of C that waits for a byte stands for NVRTC."""
    waiting, writing = os.pipe()
    ended = threading.Event()

    def run_nvrtc(*_: object) -> bytes:
        (tmp_path / "started").touch()
        ctypes.CDLL(None).read(waiting, ctypes.create_string_buffer(1), 1)
        ended.set()
        return CONTENT

    monkeypatch.setattr(compiler, "has_cuda_core", lambda: True)
    monkeypatch.setattr(compiler, "_run_nvrtc", lambda *_: interruptible.call(run_nvrtc))
    interrupt_when(tmp_path / "started")
    with pytest.raises(KeyboardInterrupt):
        compiler.compile_cubin("plain", "sm_90", {})
    assert not ended.is_set()
    assert not list(folder.iterdir())
    os.write(writing, b"x")
    assert ended.wait(10)
    os.close(waiting)
    os.close(writing)


@needs_main_thread
def test_ctrl_c_ends_the_wait_for_another_process(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "say", lambda _: (tmp_path / "started").touch())
    with file_lock.locked(folder_made(folder) / f"{artifact().stem}.lock", 0):
        interrupt_when(tmp_path / "started")
        with pytest.raises(KeyboardInterrupt):
            obtain(artifact())


@needs_main_thread
def test_ctrl_c_ends_the_build_of_the_library_for_programs(tmp_path, monkeypatch):
    """CMake starts processes that do the work."""
    pid = tmp_path / "pid"
    cmake = tmp_path / "cmake"
    cmake.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {pid}.new; mv {pid}.new {pid}; wait\n")
    cmake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    interrupt_when(pid)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        packaging.build_runtime(tmp_path / "out")
    assert time.monotonic() - begin < 5
    assert_ended([int(pid.read_text())])
