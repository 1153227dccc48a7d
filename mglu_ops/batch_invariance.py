"""A process-wide switch. While it is on, the result of a row of x has the same bits in every batch.

Every kernel is deterministic, but the number of tokens decides which kernel runs, and kernels sum in different orders.
While the switch is on, `mglu::forward` runs only kernels whose order of summation does not depend on the number of
tokens. Calls that no such kernel can run are refused: calls on a CPU, in float64, or in training, which uses torch's
GEMMs.
"""

from __future__ import annotations

enabled = False
"""The state of the switch. Every call reads it; only `set_batch_invariant_mode` writes it."""


class set_batch_invariant_mode:  # noqa: N801 (a function and a context manager, like torch.set_grad_enabled)
    """Turn batch-invariant results on or off: from now on, or inside a `with` block.

    The mode applies to all threads. It covers every call that runs or is captured into a CUDA graph while it is on:
    eager calls, compiled code and packages, but not the C++ library. It costs speed: aligned calls in 16 bits then run
    the kernel for many tokens on compute capability 9.0 and the kernel for few tokens on other GPUs, and other calls
    run `plain`.

    Raises:
        TypeError: `mode` is not a bool.
    """

    def __init__(self, mode: bool = True) -> None:
        global enabled
        if not isinstance(mode, bool):
            raise TypeError(f"mode: got {mode!r}, must be True or False")
        self._before = enabled
        enabled = mode

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        global enabled
        enabled = self._before


def is_batch_invariant_mode_enabled() -> bool:
    """True while `set_batch_invariant_mode` has the mode turned on."""
    return enabled
