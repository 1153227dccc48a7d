"""The interface of a backend: an object that says whether it can run a task of a call, and prepares it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from ..call import Call

Task = Literal["forward", "train", "backward", "down", "down_backward"]
"""What a call asks for, for a layer and for the layers of experts alike.

| task | operators | a prepared call takes | and returns |
|---|---|---|---|
| forward | `forward`, `experts_forward`, `grouped_forward` | `Given` | the result in x's dtype |
| train | `forward_train`, `grouped_forward_train` | `Given` after `in_rows`, with a dense weight | result, partials |
| backward | `backward`, `grouped_backward` | `BackwardGiven` after `in_rows` | the gradients of `mglu::backward` |
| down | `experts_down` | `DownGiven` after `in_rows` | the result `[T, out_features]` |
| down_backward | `experts_down_backward` | grad_output, `DownGiven` after `in_rows`, needs | the operator's gradients |

Results are contiguous and have memory of their own. The results of `train` have a single dimension of tokens. A
gradient that is not needed is an empty tensor. Rows without an expert are zeros, and their x is not read. Only the
backend `composite` reads ids or offs on the host of a GPU, and wrong ids or offs never cause an access out of bounds.
The partials of every backend have the layout that `mglu_ops.ops` describes, so that another backend can run `backward`.
"""

Prepared = Callable[..., Any]
"""A function that runs a call on any tensors that fit its description. All else is decided. Thread-safe."""


@dataclass(frozen=True)
class Reason:
    """The reason why a backend does not run a call.

    Attributes:
        text: the reason, for a message.
        is_preference: True if the backend can run the call, but another one is faster. A call that names the backend
            runs on it.
        is_loss: True if the call is slower because the backend does not run it.
        is_passing: True if the backend may be able to run the same call later, in the same process.
    """

    text: str
    is_preference: bool = False
    is_loss: bool = True
    is_passing: bool = False

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Description:
    """The way in which a backend runs a call.

    Attributes:
        text: what runs the call.
        launch: the launch configuration, if the backend has several.
        origin: the source of `launch`.
        slow_reason: why the call takes several times as long as similar calls on this backend; None if it does not.
        rounds_x: True if the kernel multiplies in the call's activation format.
    """

    text: str
    launch: Any = None
    origin: str = ""
    slow_reason: str | None = None
    rounds_x: bool = False


class Backend(ABC):
    """One implementation of the operators, entered in `mglu_ops.backends.BACKENDS`."""

    name: ClassVar[str]
    device_type: ClassVar[str | None]
    """The type of the devices on which the backend runs; None for all devices."""
    rounds_x: ClassVar[bool] = False
    """True if prepared calls round x to the call's activation format. Otherwise `dispatch` rounds x before a call."""
    batch_invariant_tasks: ClassVar[frozenset[Task]] = frozenset()
    """The tasks with a batch-invariant mode, in which the bits of a row do not depend on the other rows."""

    @abstractmethod
    def reason(self, task: Task, call: Call) -> Reason | None:
        """Return the reason why the backend does not run a task of a call; None if it does.

        In a call of `backward`, the activation and the layout of the mask weights mean nothing, and
        `mask_weights_dtype` is the operator's argument of that name.
        """

    @abstractmethod
    def prepare(self, task: Task, call: Call, launch: Any = None) -> Prepared:
        """Choose, compile and load the kernels of a task that the backend can run, and return the prepared call.

        `launch` replaces the launch that the backend chooses, for tests and tuning. Each backend has a type of its own.
        """

    def build(self, task: Task, call: Call) -> None:  # noqa: B027 (backends that compile nothing do nothing)
        """Compile the kernels of a task that the backend can run into the cache of kernels, and load nothing."""

    def describe(self, task: Task, call: Call) -> Description:
        """Describe how the backend would run a task that it can run, without compiling anything."""
        return Description(f"kernels of this package, for {call}")

    def can_pack(self, masks: Tensor) -> bool:
        """True if `pack` takes these masks."""
        return False

    def pack(self, masks: Tensor) -> Tensor:
        """Pack bool masks, or logits (`M = logits > 0`), of shape `[(E,) n_masks, out_features, in_features]`."""
        raise NotImplementedError(f"the backend {self.name} does not pack masks")


def no_kernel(call: Call) -> Reason:
    """Return the reason of a backend without kernels for x's dtype. This is no loss: torch's GEMMs are as fast."""
    return Reason(f"no kernel for x {call.dtype}", is_loss=False)


NO_DOWN_GRADIENTS = Reason("no kernel for the gradients of down projections", is_loss=False)
