"""Work of seconds outside Python that Ctrl-C ends at once: compilers, be they processes or functions of C.

Python raises KeyboardInterrupt in the main thread alone, and not before a function of C returns. So the work is done in
another thread, which is never interrupted halfway, and the main thread waits for it. It wakes up every now and then,
since the system may deliver the signal to another thread, or just before the main thread begins to wait: neither ends
a wait.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

_POLL_SECONDS = 0.1


class _StoppedError(Exception):
    """The main thread does not wait any more."""


def call(function: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
    """The result of a function that does not hold the interpreter's lock while it works.

    Args:
        function: the work. Where it cannot be stopped, it runs on after Ctrl-C, and its result is lost.
        stop: makes the function end soon. Ctrl-C calls it, and then waits for the function.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=work, name="mglu_ops compiler", daemon=True)
    thread.start()
    try:
        while not wait([result], _POLL_SECONDS).done:
            pass
        return result.result()
    except BaseException:  # of the function, or of a signal
        if stop is not None:
            stop()
            thread.join()
        raise


def run(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None, seconds: float = math.inf
) -> list[subprocess.CompletedProcess[str]]:
    """Run commands at once and wait for all of them. Ctrl-C kills them and what they have started.

    Args:
        commands: programs with their arguments.
        environment: variables to add to those of this process.
        seconds: how long they may take, all together. Then they are killed as by Ctrl-C.

    Returns:
        What each command returned. Its `stdout` holds standard output and standard error.

    Raises:
        OSError: a command cannot be started.
        subprocess.TimeoutExpired: a command takes longer.
    """
    stopped = threading.Event()
    variables = {**os.environ, **(environment or {})}
    # A group of their own lets the main thread kill all of them. Another thread is not interrupted: its commands stay
    # in the group of this process, to which the terminal sends Ctrl-C.
    own_group = sys.platform != "win32" and threading.current_thread() is threading.main_thread()
    return call(lambda: _run(commands, variables, own_group, stopped, seconds), stopped.set)


def _run(
    commands: Sequence[Sequence[str]],
    variables: Mapping[str, str],
    own_group: bool,
    stopped: threading.Event,
    seconds: float,
) -> list[subprocess.CompletedProcess[str]]:
    deadline = time.monotonic() + seconds
    started: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            started.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=variables,
                    errors="replace",
                    start_new_session=own_group,
                )
            )
        return [_result(process, stopped, deadline) for process in started]
    except BaseException:
        for process in started:
            _kill(process, own_group)
        raise


def _result(
    process: subprocess.Popen[str], stopped: threading.Event, deadline: float
) -> subprocess.CompletedProcess[str]:
    while not stopped.is_set():
        try:
            output, _ = process.communicate(timeout=_POLL_SECONDS)
            return subprocess.CompletedProcess(process.args, process.returncode, output)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise
    raise _StoppedError


def _kill(process: subprocess.Popen[str], group: bool) -> None:
    if process.poll() is None:
        if sys.platform != "win32" and group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    assert process.stdout is not None
    process.stdout.close()
    process.wait()
