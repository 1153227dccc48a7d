"""The interface of a backend: an object that says whether it can run a call, and prepares it.

Every backend runs `mglu::forward`. Some also pack masks, run `mglu::forward_train` or `mglu::backward`, or run experts.
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
    """A call with everything decided except its tensors, which may be any that fit its description. Thread-safe."""

    def __call__(self, given: LayerArguments) -> Tensor:
        """The result `[..., out_features]` in x's dtype; tensors have the ranks of the call that was described."""


class PreparedForwardTrain(Protocol):
    """A forward pass in training with everything decided except its tensors; see `PreparedCall`. Thread-safe."""

    def __call__(self, given: LayerArguments) -> tuple[Tensor, Tensor]:
        """The result, and the partial derivatives that backward needs (`mglu_ops.ops` has the equations).

        Args:
            given: the arguments in any strides, `in_rows`, with a dense weight.

        Returns:
            The result `[tokens, out_features]`, and partials `[tokens, n_masks + 1, out_features]`, or with mask_weight
            weights `[tokens, 2 n_masks + 1, out_features]`. Both are contiguous and of x's dtype.
        """


class BackwardArguments(NamedTuple):
    """The arguments of `mglu::backward`, in the order of its schema; none has a default.

    For a backend, `...` in their shapes is a single dimension, the tokens.
    """

    grad_output: Tensor
    """`[..., out_features]` in x's dtype. Its strides, like x's and weight's, are arbitrary and may be 0."""
    x: Tensor
    """`[..., in_features]`."""
    weight: Tensor
    """`[out_features, in_features]`."""
    packed_masks: Tensor
    """`[out_features, ceil(in_features / 8), n_masks]`."""
    partials: Tensor
    """What `forward_train` of any backend returned; contiguous for a backend."""
    needs: Sequence[bool]
    """Whether the gradients of x and weight are needed."""
    logits_dtype: torch.dtype | None
    """The dtype of the gradient of the mask logits; None if it is not needed."""
    mask_weights_dtype: torch.dtype | None
    """The dtype of the gradient of mask_weights; None if it is not needed, or if there are none."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return dict(zip(self._fields, self[:5], strict=False))


class PreparedBackward(Protocol):
    """A backward pass with everything decided except its tensors; see `PreparedCall`. Thread-safe.

    Arguments other than tensors belong to the description.
    """

    def __call__(self, arguments: BackwardArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of x, weight, mask logits and mask weights.

        Returns:
            Contiguous `[tokens, in_features]`, `[out_features, in_features]`, `[n_masks, out_features, in_features]`
            and `[tokens, n_masks]`, each with memory of its own. A gradient that is not needed is an empty tensor.
        """


class PreparedExperts(Protocol):
    """A call of `mglu::experts_forward` or `mglu::grouped_forward`; see `PreparedCall`. Thread-safe.

    It reads no id and no offset on the host of a GPU. Kernels clamp offs, so that no value leads out of bounds.
    """

    def __call__(self, given: ExpertArguments) -> Tensor:
        """The contiguous result `[T, K, out_features]`, or `[S, out_features]` with offs; `given` is `in_rows`.

        Rows without an expert are zeros, and their x is not read.
        """


class PreparedDown(Protocol):
    """A call of `mglu::experts_down`; see `PreparedCall`. Thread-safe."""

    def __call__(self, given: DownArguments) -> Tensor:
        """The contiguous result `[T, out_features]`; `given` is `in_rows`."""


class PreparedGroupedForwardTrain(Protocol):
    """A call of `mglu::grouped_forward_train`; see `PreparedForwardTrain`. Thread-safe."""

    def __call__(self, given: ExpertArguments) -> tuple[Tensor, Tensor]:
        """The result `[S, out_features]` and the partials `[S, ..., out_features]`; `given` is `in_rows`."""


class GroupedBackwardArguments(NamedTuple):
    """The arguments of `mglu::grouped_backward`, in the order of its schema: `BackwardArguments` and offs."""

    grad_output: Tensor
    """`[S, out_features]`."""
    x: Tensor
    """`[S, in_features]`."""
    weight: Tensor
    """`[E, out_features, in_features]`."""
    packed_masks: Tensor
    """`[E, out_features, ceil(in_features / 8), n_masks]`."""
    offs: Tensor
    """int32 `[E]`; contiguous for a backend."""
    partials: Tensor
    """What `grouped_forward_train` of any backend returned; contiguous for a backend."""
    needs: Sequence[bool]
    logits_dtype: torch.dtype | None
    mask_weights_dtype: torch.dtype | None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return dict(zip(self._fields, self[:6], strict=False))

    def of_expert(self, expert: int, rows: slice) -> BackwardArguments:
        """The arguments of one expert's layer and its rows."""
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
    """A call of `mglu::grouped_backward`; see `PreparedBackward`. Thread-safe."""

    def __call__(self, arguments: GroupedBackwardArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of x, weight, mask logits `[E, n_masks, out_features, in_features]` and mask weights."""


class Backend(ABC):
    """One implementation of `mglu::forward`, entered in `mglu_ops.backends.BACKENDS`."""

    name: ClassVar[str]
    rounds_x: ClassVar[bool] = False
    """Whether prepared calls round x to the call's activation format. Otherwise `dispatch` does it before them."""

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
            launch: how to run it instead of the backend's own choice, for tests and tuning; the backend defines its
                type.
        """

    def can_pack(self, masks: Tensor) -> bool:
        """Whether `pack` takes these masks."""
        return False

    def pack(self, masks: Tensor) -> Tensor:
        """The packed masks of bool masks, or of logits by `M = logits > 0`, `[n_masks, out_features, in_features]`."""
        raise NotImplementedError(f"the backend {self.name} does not pack masks")

    def can_train_forward(self, call: LayerCall) -> bool:
        """Whether the backend runs the forward pass in training. Any backend can read what it keeps for backward."""
        return False

    def can_train_backward(self, call: LayerCall) -> bool:
        """Whether the backend runs the backward pass; see `prepare_backward` for the call."""
        return False

    def prepare_forward_train(self, call: LayerCall) -> PreparedForwardTrain:
        """Decide everything about a forward pass in training except its tensors.

        `call.leading` is one number of tokens.
        """
        raise NotImplementedError(f"the backend {self.name} does not train")

    def prepare_backward(self, call: LayerCall) -> PreparedBackward:
        """Decide everything about a backward pass except its tensors.

        The activation and the layout of the mask weights in `call` mean nothing; its `mask_weights_dtype` is the
        argument of that name. The size of the partial derivatives tells whether there were mask weights.
        """
        raise NotImplementedError(f"the backend {self.name} does not train")

    def unsupported_experts_reason(self, call: ExpertCall) -> str | None:
        """Why `prepare_experts`, or without masks `prepare_down`, cannot take a call; None if it can."""
        return f"the backend {self.name} has no kernels for experts"

    def prepare_experts(self, call: ExpertCall, launch: Any = None) -> PreparedExperts:
        """Decide everything about a call of experts except its tensors; `launch` as in `prepare`."""
        raise NotImplementedError(f"the backend {self.name} has no kernels for experts")

    def prepare_down(self, call: ExpertCall, launch: Any = None) -> PreparedDown:
        """Decide everything about a call of `mglu::experts_down` except its tensors; `launch` as in `prepare`."""
        raise NotImplementedError(f"the backend {self.name} has no kernels for experts")

    def can_train_experts_forward(self, call: ExpertCall) -> bool:
        """Whether the backend runs `mglu::grouped_forward_train`. Any backend can read what it keeps for backward."""
        return False

    def can_train_experts_backward(self, call: ExpertCall) -> bool:
        """Whether the backend runs `mglu::grouped_backward`; see `prepare_backward` for the call."""
        return False

    def prepare_grouped_forward_train(self, call: ExpertCall) -> PreparedGroupedForwardTrain:
        """Decide everything about a forward pass of experts in training except its tensors."""
        raise NotImplementedError(f"the backend {self.name} does not train experts")

    def prepare_grouped_backward(self, call: ExpertCall) -> PreparedGroupedBackward:
        """Decide everything about a backward pass of experts except its tensors; see `prepare_backward`."""
        raise NotImplementedError(f"the backend {self.name} does not train experts")
