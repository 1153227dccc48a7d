"""Runs compilers as child processes. Ctrl-C kills them and all processes that they have started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

COMPILER_SECONDS = 600.0
"""The time limit of a compiler in seconds, so that no call hangs forever. It is many times what compilers need."""


def run(
    commands: Sequence[Sequence[str]],
    environment: Mapping[str, str] | None = None,
    seconds: float | None = None,
    show: Callable[[str], object] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """Run commands in parallel and wait for all of them. Ctrl-C kills them and all processes that they have started.

    Args:
        commands: programs with their arguments.
        environment: variables to add to the environment of this process.
        seconds: the time limit for all commands together, after which they are killed.
        show: called with each line of output as it appears; requires `seconds` to be None.

    Returns:
        The result of each command. Its `stdout` holds standard output and standard error.

    Raises:
        OSError: a command cannot be started.
        subprocess.TimeoutExpired: the commands exceeded the time limit.
    """
    begin = time.monotonic()
    started: list[subprocess.Popen[str]] = []
    results = []
    try:
        for command in commands:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                errors="replace",
                start_new_session=True,  # a process group of its own, which can be killed as a whole
            )
            started.append(process)
        for process in started:
            rest = None if seconds is None else max(0.0, begin + seconds - time.monotonic())
            shown = _shown(process, show) if show else ""
            output = shown + process.communicate(timeout=rest)[0]
            results.append(subprocess.CompletedProcess(process.args, process.returncode, output))
    except BaseException:
        for process in started:
            with process:  # closes its pipe, and waits for it
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        raise
    return results


def _shown(process: subprocess.Popen[str], show: Callable[[str], object]) -> str:
    """Show the lines that a process writes until it closes its output, and return them."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        show(line.rstrip("\n"))
    return "".join(lines)
