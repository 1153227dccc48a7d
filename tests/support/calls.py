"""Calls a backend by its name, without the dispatcher, and checks the launches of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mglu_ops import dispatch
from mglu_ops.backends import BACKENDS
from mglu_ops.backends.cuda.choice import LaunchChoice, choose
from mglu_ops.backends.cuda.device import gpu_of
from mglu_ops.call import Call
from mglu_ops.given import Given
from tests.support.budgets import assert_matches
from tests.support.layers import Layer, make_layer


def run_on(backend: str, *operands: Any, launch: Any = None, **options: Any) -> Tensor:
    """The backend's result for the arguments of `mglu::forward`. Without `launch`, the backend chooses one."""
    return dispatch.forward(Given(*operands, **options), backend=backend, launch=launch)


def unsupported(backend: str, *operands: Any) -> str | None:
    """The backend's reason for refusing these arguments of `mglu::forward`, or None if it takes them."""
    reason = BACKENDS[backend].reason("forward", Call.of(Given(*operands)))
    return None if reason is None or reason.is_preference else str(reason)


def launch_of(*operands: Any) -> LaunchChoice:
    """The launch that the CUDA backend chooses for these arguments of `mglu::forward`."""
    call = Call.of(Given(*operands))
    return choose(call, gpu_of(call.device.index))


@contextmanager
def without_waiting() -> Iterator[None]:
    """Raise an error if code inside the block waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Problem(Layer):
    """A random layer on the GPU, run on the CUDA backend. Its tensors may be replaced."""

    def __init__(
        self,
        tokens: int,
        d: int,
        h: int,
        n_masks: int,
        dtype: torch.dtype = torch.float16,
        activation: str = "silu",
        mask_weights_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        """Take the arguments of `make_layer`, such as `routing`. The values depend on torch's seed."""
        seed = int(torch.randint(2**31, ()))
        options |= {"activation": activation, "mask_weights_dtype": mask_weights_dtype, "seed": seed}
        super().__init__(**vars(make_layer((tokens,), h, d, n_masks, dtype=dtype, device="cuda", **options)))

    @property
    def call(self) -> Call:
        return Call.of(self.given)

    def run(self, config: Any = None) -> Tensor:
        """The result of the launch `config`, or of the launch that the backend chooses, in memory that held NaN."""
        torch.full(self.call.result_shape, torch.nan, dtype=self.x.dtype, device="cuda")
        return dispatch.forward(self.given, backend="cuda", launch=config)

    def launch(self, sequence: Any, out: Tensor, workspace: Tensor, **addresses: int) -> None:
        """Launch prepared kernels on the current stream. They write to the test's tensors `out` and `workspace`."""
        pointers = self.given.in_rows().addresses(out) | addresses
        sequence(torch.cuda.current_stream().cuda_stream, pointers, workspace.data_ptr())

    def check(self, config: Any = None) -> None:
        assert unsupported("cuda", *self.given) is None
        found = self.run(config)
        assert not found[~self.has_expert].count_nonzero()
        assert_matches(found, self.oracle(), self.x.dtype, str(config))
