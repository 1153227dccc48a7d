"""Builds by several processes and threads, and builds that are killed or interrupted.

The compilers are fakes. Tests with the fixture `slow_kind` run for the CPU library and for cubins. Other tests cover
shared code, or one of the two.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from mglu_ops.backends import cache
from mglu_ops.backends.cpu import library
from mglu_ops.backends.cuda import compiler
from mglu_ops.files import source_directory
from mglu_ops.packaging import library as packaging
from tests.support.builds import CONTENT, artifact, fake_compiler, files, obtain, only_file, shared_folder
from tests.support.layers import make_layer

pytest_plugins = ["tests.support.builds"]
pytestmark = pytest.mark.usefixtures("folder")

PROCESSES = multiprocessing.get_context("fork")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.01)


def forked(function: Callable[[], object]) -> BaseProcess:
    """A forked process that runs a function, and exits with 0 if the function returns."""
    process = PROCESSES.Process(target=function, daemon=True)
    process.start()
    return process


def exit_code(process: BaseProcess) -> int | None:
    process.join(20)
    return process.exitcode


def test_processes_that_start_together_build_once(slow_kind, folder, capfd):
    children = [forked(slow_kind.use) for _ in range(4)]
    assert [exit_code(child) for child in children] == [0] * 4
    assert slow_kind.builds == 1
    assert only_file(folder).read_bytes() == CONTENT
    printed = capfd.readouterr().err
    assert printed.count("the result is kept in") == 1
    assert 1 <= printed.count("another process is ") <= 3
    assert "; waiting for it, at most 300 s" in printed


def test_threads_that_start_together_build_once(slow_kind):
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(slow_kind.use())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [CONTENT] * 4
    assert slow_kind.builds == 1


def test_a_file_appears_whole(folder, monkeypatch):
    """Other processes may read the cache at any time. They must see a file only when it is complete."""
    replace, seen = os.replace, []

    def watched(source: str, target: Path) -> None:
        seen.append((list(folder.glob("*.so")), Path(source).read_bytes()))
        replace(source, target)

    monkeypatch.setattr(cache.os, "replace", watched)
    obtain(artifact())
    assert seen == [([], CONTENT)]
    assert only_file(folder).read_bytes() == CONTENT


def test_a_killed_build_does_not_block_the_next(folder, tmp_path):
    def build_long(scratch: Path) -> bytes:
        (tmp_path / "started").touch()
        time.sleep(60)
        return b"half"

    child = forked(lambda: obtain(artifact(), build_long))
    wait_for((tmp_path / "started").exists)
    child.kill()
    assert exit_code(child) == -signal.SIGKILL
    begin = time.monotonic()
    assert obtain(artifact()).read_bytes() == CONTENT
    assert time.monotonic() - begin < 5
    assert files(folder) == [only_file(folder)]


def test_a_lock_that_is_held_for_too_long_is_passed_by(folder, monkeypatch, capsys):
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.2)
    folder.mkdir(0o700)
    with FileLock(folder / f"{artifact().stem}.lock"):
        assert obtain(artifact()).parent == shared_folder()
    printed = capsys.readouterr().err
    assert "another process is building it; waiting for it, at most 0 s" in printed
    assert f"mglu_ops: {folder} is not used: The file lock " in printed


def test_a_process_that_is_forked_while_a_thread_builds_waits_for_it(slow_kind, folder, monkeypatch):
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "load_library", lambda _: slow_kind.use())
    thread = threading.Thread(target=library.load)
    thread.start()
    wait_for(slow_kind.log.exists)
    time.sleep(0.3)  # the compiler must start before the fork: otherwise the child keeps the compiler's pipe open
    child = forked(lambda: None if library.load() == CONTENT else pytest.fail("another content"))
    assert exit_code(child) == 0
    thread.join()
    assert slow_kind.builds == 1
    assert only_file(folder).read_bytes() == CONTENT


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
    assert exit_code(child) == 0
    thread.join()


@pytest.fixture
def interrupt_when(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """A function that sends SIGINT to this process when a condition is met."""

    def interrupt(condition: Callable[[], bool]) -> None:
        def work() -> None:
            wait_for(condition)
            time.sleep(0.3)  # a process that is just starting might miss the signal
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=work).start()

    # Programs that a shell starts in the background ignore SIGINT, so set the usual handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield interrupt
    signal.signal(signal.SIGINT, before)


def assert_ended(pids: Iterable[str]) -> None:
    """Assert that all processes end soon. A zombie counts as ended, because it only waits for its parent."""

    def has_ended(pid: str) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    wait_for(lambda: all(map(has_ended, pids)))


def test_ctrl_c_ends_a_build_of_the_cpu_kernels_and_its_compiler(folder, interrupt_when, tmp_path, monkeypatch):
    """The fake compiler starts a child process, as real compilers do."""
    pids = tmp_path / "pids"
    pids.touch()
    body = f"touch $TMPDIR/half; sleep 60 & echo $! >> {pids}; echo $$ >> {pids}; wait"
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, body)))
    monkeypatch.setattr(library, "_loaded", None)
    layer = make_layer((3,))
    count = 2 * len(list(source_directory("cpu").glob("*.cpp")))
    interrupt_when(lambda: len(pids.read_text().splitlines()) == count)
    with pytest.raises(KeyboardInterrupt):
        torch.ops.mglu.forward(layer.x, layer.weight, layer.packed_masks)
    assert_ended(pids.read_text().split())
    assert not files(folder)
    assert not files(tmp_path / "tmp")


def test_ctrl_c_ends_the_wait_for_another_process(folder, interrupt_when, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "say", lambda _: (tmp_path / "started").touch())
    folder.mkdir(0o700)
    with FileLock(folder / f"{artifact().stem}.lock"):
        interrupt_when((tmp_path / "started").exists)
        with pytest.raises(KeyboardInterrupt):
            obtain(artifact())


def test_ctrl_c_ends_the_build_of_the_library_for_programs(interrupt_when, tmp_path, monkeypatch):
    """CMake leaves the work to child processes, which must end too."""
    pid = tmp_path / "pid"
    cmake = tmp_path / "cmake"
    cmake.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {pid}.new; mv {pid}.new {pid}; wait\n")
    cmake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    interrupt_when(pid.exists)
    with pytest.raises(KeyboardInterrupt):
        packaging.build_runtime(tmp_path / "out")
    assert_ended([pid.read_text().strip()])
