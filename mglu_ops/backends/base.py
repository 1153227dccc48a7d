"""The interface of a backend, an object that says which calls it can run, and prepares them.

Every backend runs `mglu::forward`. Some also pack masks, train a layer or run experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ..expert_calls import DownArguments, ExpertArguments, ExpertCall
from ..layer_call import LayerArguments, LayerCall


class PreparedCall(Protocol):
    """A function that runs a call in which everything is decided except the tensors. Thread-safe.

    It takes any tensors that fit the `LayerCall` for which it was prepared.
    """

    def __call__(self, given: LayerArguments) -> Tensor:
        """Return y `[..., out_features]` in x's dtype. Tensors have the ranks of the call that was prepared."""


class PreparedForwardTrain(Protocol):
    """A prepared `mglu::forward_train`; see `PreparedCall`. Thread-safe."""

    def __call__(self, given: LayerArguments) -> tuple[Tensor, Tensor]:
        """Return the result, and the partial derivatives that backward needs (`mglu_ops.ops` has the equations).

        Args:
            given: the arguments in any strides, `in_rows`, with a dense weight.

        Returns:
            The result `[tokens, out_features]`, and partials `[tokens, n_masks + 1, out_features]`, or
            `[tokens, 2 n_masks + 1, out_features]` with mask weights. Both are contiguous and in x's dtype.
        """


class BackwardArguments(NamedTuple):
    """The arguments of `mglu::backward`, in the order of its schema.

    A backend gets tensors in which `...` is a single dimension, the tokens.
    """

    grad_output: Tensor
    """`[..., out_features]` in x's dtype. The strides of grad_output, x and weight are arbitrary and may be 0."""
    x: Tensor
    """`[..., in_features]`."""
    weight: Tensor
    """`[out_features, in_features]`."""
    packed_masks: Tensor
    """`[out_features, ceil(in_features / 8), n_masks]`."""
    partials: Tensor
    """The partials that the `forward_train` of any backend has returned. A backend gets them contiguous."""
    needs: Sequence[bool]
    """Two bools: whether the gradient of x is needed, and whether the gradient of weight is needed."""
    logits_dtype: torch.dtype | None
    """The dtype of the gradient of the mask logits; None if it is not needed."""
    mask_weights_dtype: torch.dtype | None
    """The dtype of the gradient of mask_weights; None if it is not needed, or if the layer has no mask weights."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return dict(zip(self._fields, self[:5], strict=False))


class PreparedBackward(Protocol):
    """A prepared `mglu::backward`; see `PreparedCall`. Thread-safe.

    The arguments that are not tensors have the same values each time that it is called.
    """

    def __call__(self, arguments: BackwardArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of x, weight, mask logits and mask weights.

        Returns:
            Contiguous `[tokens, in_features]`, `[out_features, in_features]`, `[n_masks, out_features, in_features]`
            and `[tokens, n_masks]`, which share no memory. A gradient that is not needed is an empty tensor.
        """


class PreparedExperts(Protocol):
    """A prepared `mglu::experts_forward` or `mglu::grouped_forward`; see `PreparedCall`. Thread-safe.

    On a GPU, the host reads no values of ids or offs. Kernels clamp offs, so wrong offs cause no access out of bounds.
    """

    def __call__(self, given: ExpertArguments) -> Tensor:
        """Return the contiguous result: `[T, K, out_features]`, or `[S, out_features]` with offs.

        The arguments come from `ExpertArguments.in_rows`. Rows of the result without an expert are zeros, and their
        rows of x are not read.
        """


class PreparedDown(Protocol):
    """A prepared `mglu::experts_down`; see `PreparedCall`. Thread-safe."""

    def __call__(self, given: DownArguments) -> Tensor:
        """Return the contiguous result `[T, out_features]`. The arguments come from `DownArguments.in_rows`."""


class PreparedGroupedForwardTrain(Protocol):
    """A prepared `mglu::grouped_forward_train`; see `PreparedForwardTrain`. Thread-safe."""

    def __call__(self, given: ExpertArguments) -> tuple[Tensor, Tensor]:
        """Return the result `[S, out_features]` and the partials `[S, entries, out_features]`.

        The arguments come from `ExpertArguments.in_rows`.
        """


class GroupedBackwardArguments(NamedTuple):
    """The arguments of `mglu::grouped_backward`, in the order of its schema. See `BackwardArguments`."""

    grad_output: Tensor
    """`[S, out_features]`."""
    x: Tensor
    """`[S, in_features]`."""
    weight: Tensor
    """`[E, out_features, in_features]`."""
    packed_masks: Tensor
    """`[E, out_features, ceil(in_features / 8), n_masks]`."""
    offs: Tensor
    """int32 `[E]`. A backend gets it contiguous."""
    partials: Tensor
    """The partials that the `grouped_forward_train` of any backend has returned. A backend gets them contiguous."""
    needs: Sequence[bool]
    logits_dtype: torch.dtype | None
    mask_weights_dtype: torch.dtype | None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return dict(zip(self._fields, self[:6], strict=False))

    def of_expert(self, expert: int, rows: slice) -> BackwardArguments:
        """The arguments of one expert's backward pass, for its rows."""
        grad_output, x, weight, packed_masks, _, partials, needs, logits_dtype, mask_weights_dtype = self
        return BackwardArguments(
            grad_output[rows],
            x[rows],
            weight[expert],
            packed_masks[expert],
            partials[rows],
            needs,
            logits_dtype,
            mask_weights_dtype,
        )


class PreparedGroupedBackward(Protocol):
    """A prepared `mglu::grouped_backward`; see `PreparedBackward`. Thread-safe."""

    def __call__(self, arguments: GroupedBackwardArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of x, weight, mask logits `[E, n_masks, out_features, in_features]` and mask weights."""


class Backend(ABC):
    """One implementation of `mglu::forward`, entered in `mglu_ops.backends.BACKENDS`."""

    name: ClassVar[str]
    rounds_x: ClassVar[bool] = False
    """True if prepared calls round x to the call's activation format. Otherwise `dispatch` rounds it beforehand."""

    @abstractmethod
    def unsupported_reason(self, call: LayerCall) -> str | None:
        """The reason why `prepare` cannot take a call; None if it can."""

    def supports(self, call: LayerCall) -> bool:
        """True if `prepare` can take a call."""
        return self.unsupported_reason(call) is None

    @abstractmethod
    def prepare(self, call: LayerCall, launch: Any = None) -> PreparedCall:
        """Choose, compile and load the kernels of a supported call.

        Args:
            call: the call.
            launch: a launch configuration that overrides the backend's choice, for tests and tuning. Each backend
                defines its type.
        """

    def can_pack(self, masks: Tensor) -> bool:
        """True if `pack` takes these masks."""
        return False

    def pack(self, masks: Tensor) -> Tensor:
        """Pack bool masks or logits (`M = logits > 0`) `[n_masks, out_features, in_features]`."""
        raise NotImplementedError(f"the backend {self.name} does not pack masks")

    def can_train_forward(self, call: LayerCall) -> bool:
        """True if the backend can run `mglu::forward_train`. Its partials are valid for the backward of any backend."""
        return False

    def can_train_backward(self, call: LayerCall) -> bool:
        """True if the backend can run `mglu::backward`; `prepare_backward` describes the call."""
        return False

    def prepare_forward_train(self, call: LayerCall) -> PreparedForwardTrain:
        """Prepare a `mglu::forward_train`. `call.leading` is `(tokens,)`."""
        raise NotImplementedError(f"the backend {self.name} does not train")

    def prepare_backward(self, call: LayerCall) -> PreparedBackward:
        """Prepare a `mglu::backward`.

        Ignore the activation and the layout of the mask weights in `call`. `call.mask_weights_dtype` is None if the
        gradient of the mask weights is not needed. The size of the partials shows whether the layer has mask weights.
        """
        raise NotImplementedError(f"the backend {self.name} does not train")

    def unsupported_experts_reason(self, call: ExpertCall) -> str | None:
        """The reason why `prepare_experts` or, for n_masks = 0, `prepare_down` cannot take a call; None if it can."""
        return f"the backend {self.name} has no kernels for experts"

    def prepare_experts(self, call: ExpertCall, launch: Any = None) -> PreparedExperts:
        """Prepare a call of `mglu::experts_forward` or `mglu::grouped_forward`; `launch` as in `prepare`."""
        raise NotImplementedError(f"the backend {self.name} has no kernels for experts")

    def prepare_down(self, call: ExpertCall, launch: Any = None) -> PreparedDown:
        """Prepare a call of `mglu::experts_down`; `launch` as in `prepare`."""
        raise NotImplementedError(f"the backend {self.name} has no kernels for experts")

    def can_train_experts_forward(self, call: ExpertCall) -> bool:
        """True if the backend can run `mglu::grouped_forward_train`; see `can_train_forward`."""
        return False

    def can_train_experts_backward(self, call: ExpertCall) -> bool:
        """True if the backend can run `mglu::grouped_backward`; `prepare_backward` describes the call."""
        return False

    def prepare_grouped_forward_train(self, call: ExpertCall) -> PreparedGroupedForwardTrain:
        """Prepare a `mglu::grouped_forward_train`."""
        raise NotImplementedError(f"the backend {self.name} does not train experts")

    def prepare_grouped_backward(self, call: ExpertCall) -> PreparedGroupedBackward:
        """Prepare a `mglu::grouped_backward`; see `prepare_backward`."""
        raise NotImplementedError(f"the backend {self.name} does not train experts")
