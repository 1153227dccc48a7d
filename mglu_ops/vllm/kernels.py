"""Compiles the kernels of a model while vLLM loads its weights and compiles its graph.

vLLM captures a CUDA graph for each of about 50 numbers of tokens. A layer of an 8B model needs 20 kernels for them, and
up to 7 more for steps with more tokens. NVRTC takes 0.4 to 3 s for each. A first start on a machine would wait for them
one by one, and so would the first requests. This module does not import vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from .. import batch_invariance, dispatch
from ..backends.base import Task
from ..call import Call

FEW_TOKENS, STRIDE = 512, 8
"""Above `FEW_TOKENS`, only multiples of `STRIDE` are asked for their kernels, since all tiles have a multiple of it."""


def steps(captured: Sequence[int], most_tokens: int) -> list[int]:
    """The numbers of tokens whose kernels vLLM's steps need, in the order in which it needs them.

    Args:
        captured: the numbers of tokens for which vLLM captures CUDA graphs. Steps with fewer tokens are padded to them.
        most_tokens: the most tokens of a step. vLLM first runs such a step, and then captures graphs, largest first.
    """
    others = range(max(captured, default=0) + 1, most_tokens)
    beyond = [tokens for tokens in others if tokens < FEW_TOKENS or tokens % STRIDE == 0]
    return list(dict.fromkeys((most_tokens, *sorted(captured, reverse=True), *beyond)))


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
