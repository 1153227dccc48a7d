"""The interface of a backend: an object that says whether it can run a call of `mglu::forward`, and prepares it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

from torch import Tensor

from ..layer_call import LayerCall


class PreparedCall(Protocol):
    """A call with everything settled but its tensors, which may be any of the same description. Thread-safe."""

    def __call__(self, x: Tensor, weight: Tensor, packed_masks: Tensor, route_weights: Tensor | None) -> Tensor:
        """The result `[..., out_features]` in x's dtype.

        x `[..., in_features]` and route_weights `[..., n_masks]` are of the rank of the call that was described.
        """


class Backend(ABC):
    """One implementation of `mglu::forward`, entered in `mglu_ops.backends.BACKENDS`."""

    name: ClassVar[str]

    @abstractmethod
    def unsupported_reason(self, call: LayerCall) -> str | None:
        """Why `prepare` cannot take a call; None if it can."""

    def supports(self, call: LayerCall) -> bool:
        """Whether `prepare` can take a call."""
        return self.unsupported_reason(call) is None

    @abstractmethod
    def prepare(self, call: LayerCall, launch: Any = None) -> PreparedCall:
        """Choose, compile and load what runs a supported call.

        Args:
            call: the call.
            launch: how to run it in place of the backend's own choice, for tests and tuning; its type is the backend's.
        """

    def can_pack(self, masks: Tensor) -> bool:
        """Whether `pack` takes these masks."""
        return False

    def pack(self, masks: Tensor) -> Tensor:
        """The packed masks of bool masks, or of logits by `M = logits > 0`, `[n_masks, out_features, in_features]`."""
        raise NotImplementedError(f"the backend {self.name} does not pack masks")
