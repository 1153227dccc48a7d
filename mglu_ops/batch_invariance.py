"""A switch for the whole process that gives a row's result the same bits in every batch.

Every kernel gives the same bits to the same call, but which kernel runs depends on the number of tokens, and kernels
differ in the order of their sums. With the switch on, `mglu::forward` runs kernels that sum in the same order for every
number of tokens, and refuses calls for which there are none: on a CPU, in float64, and in training, which uses library
GEMMs.
"""

from __future__ import annotations

enabled = False
"""Read by every call; written by `set_batch_invariant_mode`."""


class set_batch_invariant_mode:  # noqa: N801 (a function that can be a block, like torch.set_grad_enabled)
    """Turn batch-invariant results on or off: from now on, or inside a `with` block.

    The mode applies to all threads, and to every call made (eagerly, by compiled code or by a package in this process)
    or captured into a CUDA graph while it is on; it does not affect the C++ library. It costs speed: on compute
    capability 9.0, calls with few tokens run the kernel for many; elsewhere, calls with many tokens run the kernel for
    few.

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
    """Whether `set_batch_invariant_mode` has turned the mode on."""
    return enabled
