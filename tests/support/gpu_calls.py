"""Checks that calls do not make the host wait for the GPU, and that kernels wait until their inputs are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mglu_ops.given import Given


@contextmanager
def without_waiting() -> Iterator[None]:
    """Raise an error if code inside the block waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_gpu(given: Given) -> Given:
    return given._replace(**{name: tensor.cuda() for name, tensor in given.tensors().items()})


def assert_follows_producers(run: Callable[[Given], Tensor], given: Given) -> None:
    """Write ids, x or W just before each call.

    A kernel launched programmatically may start before the writes end. It must not read the old values.
    """
    expected = run(given)
    kept = {name: getattr(given, name).clone() for name in ("x", "weight", "expert_ids")}
    for last in kept:
        for _ in range(20):
            for name in kept:
                getattr(given, name).zero_()
            run(given)
            for name in sorted(kept, key=last.__eq__):
                getattr(given, name).copy_(kept[name])
            assert torch.equal(run(given), expected)
