"""Calls a backend by its name, without the dispatcher, and checks the launches of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mglu_ops import dispatch
from mglu_ops.backends import BACKENDS, reference
from mglu_ops.backends.cuda import LaunchConfig
from mglu_ops.backends.cuda.choice import LaunchChoice, choose
from mglu_ops.backends.cuda.device import gpu_of
from mglu_ops.call import Call
from mglu_ops.given import Given
from tests.support.budgets import assert_matches


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


def pack(masks: Tensor) -> Tensor:
    """Pack bool masks `[n, d, h]` without the package's own code."""
    n, d, h = masks.shape
    padded = torch.zeros(n, d, -(-h // 8) * 8, dtype=torch.uint8, device=masks.device)
    padded[:, :, :h] = masks
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=masks.device)
    return (padded.view(n, d, -(-h // 8), 8) * weights).sum(-1, dtype=torch.uint8).permute(1, 2, 0).contiguous()


class Problem:
    """Random inputs of one call, and its float64 result."""

    def __init__(
        self,
        tokens: int,
        d: int,
        h: int,
        n_masks: int,
        dtype: torch.dtype = torch.float16,
        activation: str = "silu",
        mask_weights_dtype: torch.dtype | None = None,
    ) -> None:
        self.x = torch.randn(tokens, h, device="cuda").to(dtype)
        self.weight = (torch.randn(d, h, device="cuda") / max(h, 1) ** 0.5).to(dtype)
        self.masks = torch.rand(n_masks, d, h, device="cuda") < 0.5
        self.packed = pack(self.masks)
        self.activation = activation
        self.mask_weights = (
            None if mask_weights_dtype is None else torch.rand(tokens, n_masks, device="cuda").to(mask_weights_dtype)
        )

    @property
    def given(self) -> Given:
        return Given(self.x, self.weight, self.packed, self.activation, self.mask_weights)

    @property
    def call(self) -> Call:
        return Call.of(self.given)

    def run(self, config: LaunchConfig | None = None) -> Tensor:
        return run_on("cuda", *self.given[:5], launch=config)

    def launch(self, sequence: Any, out: Tensor, workspace: Tensor, **addresses: int) -> None:
        """Launch prepared kernels on the current stream. They write to the test's tensors `out` and `workspace`."""
        pointers = self.given.addresses(out) | addresses
        sequence(torch.cuda.current_stream().cuda_stream, pointers, workspace.data_ptr())

    def oracle(self) -> Tensor:
        """The float64 result, summed mask by mask to save memory."""
        result = torch.zeros(len(self.x), len(self.weight), dtype=torch.float64, device=self.x.device)
        for i, mask in enumerate(self.masks):
            weights = None if self.mask_weights is None else self.mask_weights[:, i : i + 1]
            result += reference.forward(self.x, self.weight, mask[None], self.activation, weights)
        return result

    def check(self, config: LaunchConfig | None = None) -> None:
        assert unsupported("cuda", *self.given[:5]) is None
        assert_matches(self.run(config), self.oracle(), self.x.dtype)
