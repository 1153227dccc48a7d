"""Compiles the kernels of a model while vLLM loads its weights and compiles its graph.

vLLM captures a CUDA graph for each of about 50 numbers of tokens. A layer of an 8B model needs 20 kernels for them.
NVRTC takes 0.4 to 3 s for each, and a first start on a machine would wait for them one by one. This module does not
import vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from .. import batch_invariance, dispatch
from ..backends.base import Task
from ..call import Call


def compile_in_background(calls: Iterable[tuple[Task, Call]]) -> threading.Thread:
    """Start a thread that compiles the kernels of calls, in order, into the cache of kernels.

    NVRTC releases Python's lock. A call that needs a kernel that the thread is compiling waits for it. Errors are left
    to the call itself, which will raise them.
    """

    def compile_all() -> None:
        for task, call in calls:
            with suppress(Exception):
                dispatch.build(task, replace(call, batch_invariant=batch_invariance.enabled))

    thread = threading.Thread(target=compile_all, name="mglu_ops kernels", daemon=True)
    thread.start()
    return thread
