"""The arguments of the operators as named tuples, which are passed from an operator to the launch of its kernels.

`mglu_ops.ops` defines the sizes E, T, K and S of experts. A dimension in parentheses, as in `[(E,) ...]`, exists only
with experts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from .tensors import check_dense


class Given(NamedTuple):
    """The arguments of `mglu::forward`, or of `mglu::experts_forward` or `mglu::grouped_forward`.

    Only `experts_forward` has `expert_ids`, and only `grouped_forward` has `offs`.
    """

    x: Tensor
    """`[..., in_features]`; with expert_ids `[T, in_features]`; with offs `[S, in_features]`, sorted by expert."""
    weight: Tensor
    """`[(E,) out_features, in_features]` in x's dtype, or as `weight_format` stores it (`mglu_ops.formats`)."""
    packed_masks: Tensor
    """uint8 `[(E,) out_features, ceil(in_features / 8), n_masks]`."""
    activation: str = "silu"
    """A name of `mglu_ops.activations.ACTIVATIONS`."""
    mask_weights: Tensor | None = None
    """`[..., n_masks]`; with expert_ids `[T, K, n_masks]`; with offs `[S, n_masks]`."""
    weight_scale: Tensor | None = None
    """`[(E,) ...]`, the scales of the weight (`WeightFormat.scale_shape`); None for a dense weight."""
    weight_format: str = "dense"
    """A name of `mglu_ops.formats.FORMATS`."""
    activation_format: str = "dense"
    """The format to which x is rounded, a name of `mglu_ops.formats.ACTIVATION_FORMATS`."""
    expert_ids: Tensor | None = None
    """int32 or int64 `[T, K]`."""
    offs: Tensor | None = None
    """int32 `[E]`: the end of each expert's rows."""

    @staticmethod
    def of_train(x: Tensor, weight: Tensor, packed_masks: Tensor, *options: Any, offs: Tensor | None = None) -> Given:
        """Take the arguments of `mglu::forward_train` in its schema's order."""
        return Given(x, weight, packed_masks, **dict(zip(_OPTIONS[SteGiven], options, strict=False)), offs=offs)

    @property
    def out_features(self) -> int:
        return self.packed_masks.shape[-3]

    @property
    def in_features(self) -> int:
        return self.x.shape[-1]

    @property
    def n_masks(self) -> int:
        return self.packed_masks.shape[-1]

    @property
    def routing(self) -> Tensor | None:
        """The tensor that assigns rows to experts, `expert_ids` or `offs`; None without experts."""
        return self.offs if self.expert_ids is None else self.expert_ids

    @property
    def leading(self) -> tuple[int, ...]:
        """The sizes of the result before out_features: x's, or `T, K` with expert_ids."""
        return tuple(self.x.shape[:-1] if self.expert_ids is None else self.expert_ids.shape)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, without arguments that are None."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}

    def addresses(self, out: Tensor) -> dict[str, int]:
        """The addresses of the tensors and of the result, by the names of the kernels' parameters; 0 for None.

        This runs in every call. A dict display is faster than a loop over the fields.
        """
        mask_weights, scale, routing = self.mask_weights, self.weight_scale, self.routing
        return {
            "x": self.x.data_ptr(),
            "weight": self.weight.data_ptr(),
            "packed_masks": self.packed_masks.data_ptr(),
            "mask_weights": 0 if mask_weights is None else mask_weights.data_ptr(),
            "weight_scale": 0 if scale is None else scale.data_ptr(),
            "expert_ids": 0 if routing is None else routing.data_ptr(),
            "items": 0,  # for kernels that read a table of items, replaced by the table's address
            "out": out.data_ptr(),
        }

    def in_rows(self) -> Given:
        """Return the arguments with x `[tokens, in_features]` and mask weights `[tokens, n_masks]`.

        Scales, ids and offs become contiguous. A tensor is copied only if no view has the new shape or layout.
        """
        x, weights, scale, ids, offs = self.x, self.mask_weights, self.weight_scale, self.expert_ids, self.offs
        if x.dim() == 2 and scale is ids is offs is None and (weights is None or weights.dim() == 2):
            return self
        return self._replace(
            x=as_rows(x),
            mask_weights=None if weights is None else as_rows(weights),
            weight_scale=None if scale is None else scale.contiguous(),
            expert_ids=None if ids is None else ids.contiguous(),
            offs=None if offs is None else offs.contiguous(),
        )

    def of_expert(self, expert: int, x: Tensor, mask_weights: Tensor | None) -> Given:
        """The arguments of one expert's layer, for rows of x and their mask weights."""
        return self._replace(
            x=x,
            weight=self.weight[expert],
            packed_masks=self.packed_masks[expert],
            mask_weights=mask_weights,
            weight_scale=None if self.weight_scale is None else self.weight_scale[expert],
            expert_ids=None,
            offs=None,
        )


class SteGiven(NamedTuple):
    """The arguments of `mglu::forward_ste`, or with offs of `mglu::grouped_forward_ste`, shaped as in `Given`."""

    x: Tensor
    weight: Tensor
    mask_logits: Tensor
    """Floating `[(E,) n_masks, out_features, in_features]`."""
    activation: str = "silu"
    mask_weights: Tensor | None = None
    offs: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, without arguments that are None."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}

    def packed(self, packed_masks: Tensor) -> Given:
        """The arguments of the layer with packed masks in place of the logits."""
        options = dict(zip(_OPTIONS[SteGiven], options_of(self), strict=True))
        return Given(self.x, self.weight, packed_masks, **options, offs=self.offs)


class DownGiven(NamedTuple):
    """The arguments of `mglu::experts_down`, in the order of its schema."""

    y: Tensor
    """`[T, K, in_features]`: the result of `experts_forward`, whose out_features are the in_features here."""
    weight: Tensor
    """`[E, out_features, in_features]` in y's dtype, or as `weight_format` stores it."""
    expert_ids: Tensor
    """int32 or int64 `[T, K]`."""
    expert_weights: Tensor
    """Floating `[T, K]`."""
    weight_scale: Tensor | None = None
    weight_format: str = "dense"

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, without arguments that are None."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}

    def in_rows(self) -> DownGiven:
        """Return the arguments with contiguous y, ids, expert weights and scales; copy if needed."""
        y, weight, ids, expert_weights, scale, weight_format = self
        scale = None if scale is None else scale.contiguous()
        return DownGiven(y.contiguous(), weight, ids.contiguous(), expert_weights.contiguous(), scale, weight_format)

    def empty_gradients(self, needs: Sequence[bool]) -> list[Tensor]:
        """Return uninitialised gradients of y, weight and expert weights; empty if not needed."""
        tensors = zip((self.y, self.weight, self.expert_weights), needs, strict=True)
        return [tensor.new_empty(tensor.shape if needed else (0,)) for tensor, needed in tensors]


class BackwardGiven(NamedTuple):
    """The arguments of `mglu::backward`, or of `mglu::grouped_backward` with offs.

    A backend gets the arguments after `in_rows`, in which `...` is a single dimension, the tokens.
    """

    grad_output: Tensor
    """`[..., out_features]` in x's dtype. The strides of grad_output, x and weight are arbitrary and may be 0."""
    x: Tensor
    """`[..., in_features]`."""
    weight: Tensor
    """`[(E,) out_features, in_features]`."""
    packed_masks: Tensor
    """`[(E,) out_features, ceil(in_features / 8), n_masks]`."""
    partials: Tensor
    """The partial derivatives that `forward_train` returned, on this backend or another one. `in_rows` makes them
    contiguous."""
    needs: Sequence[bool]
    """Two bools: whether the gradient of x is needed, and whether the gradient of weight is needed."""
    logits_dtype: torch.dtype | None
    """The dtype of the gradient of the mask logits; None if it is not needed."""
    mask_weights_dtype: torch.dtype | None
    """The dtype of the gradient of the mask weights; None if it is not needed, or if there are no mask weights."""
    offs: Tensor | None = None
    """int32 `[E]`: the end of each expert's rows."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, without arguments that are None."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}

    def in_rows(self) -> BackwardGiven:
        """Return the arguments with a single dimension of tokens, and contiguous partials and offs."""
        x, partials, offs = as_rows(self.x), self.partials, self.offs
        if x is self.x and partials.is_contiguous() and (offs is None or offs.is_contiguous()):
            return self
        return self._replace(
            grad_output=as_rows(self.grad_output),
            x=x,
            partials=partials.contiguous().view(len(x), *partials.shape[-2:]),
            offs=None if offs is None else offs.contiguous(),
        )

    def of_expert(self, expert: int, rows: slice) -> BackwardGiven:
        """The arguments of one expert's layer, for the rows of this expert."""
        return self._replace(
            grad_output=self.grad_output[rows],
            x=self.x[rows],
            weight=self.weight[expert],
            packed_masks=self.packed_masks[expert],
            partials=self.partials[rows],
            offs=None,
        )

    def empty_gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return uninitialised gradients of x, weight, mask logits and mask weights; empty if not needed."""
        x, needs, n_masks = self.x, self.needs, self.packed_masks.shape[-1]
        *experts, d, h = self.weight.shape
        logits, mask_weights = (*experts, n_masks, d, h), (*x.shape[:-1], n_masks)
        return (
            x.new_empty(x.shape if needs[0] else (0,)),
            self.weight.new_empty(self.weight.shape if needs[1] else (0,)),
            x.new_empty(logits if self.logits_dtype else (0,), dtype=self.logits_dtype or x.dtype),
            x.new_empty(mask_weights if self.mask_weights_dtype else (0,), dtype=self.mask_weights_dtype or x.dtype),
        )


_OPTIONS: dict[type, tuple[str, ...]] = {
    arguments: tuple(name for name in arguments._field_defaults if name not in ("expert_ids", "offs"))
    for arguments in (Given, SteGiven, DownGiven)
}
"""The names of the arguments with defaults, in the order of the schemas, in which ids and offs have no default."""
_GET_OPTIONS = {arguments: attrgetter(*names) for arguments, names in _OPTIONS.items()}


def options_of(given: Given | SteGiven) -> tuple[Any, ...]:
    """Return the values of the arguments that have defaults, in the order of the schemas, without ids and offs."""
    options: tuple[Any, ...] = _GET_OPTIONS[type(given)](given)
    return options


def schema_of_options(arguments: type[Given | SteGiven | DownGiven]) -> str:
    """Return the part of a schema that declares the arguments with defaults, in torch's notation."""
    types, hints = {Tensor | None: "Tensor?", str: "str"}, get_type_hints(arguments)
    defaults = {name: arguments._field_defaults[name] for name in _OPTIONS[arguments]}
    texts = {name: "None" if value is None else json.dumps(value) for name, value in defaults.items()}
    return ", ".join(f"{types[hints[name]]} {name}={text}" for name, text in texts.items())


def _with_routing(arguments: Callable[..., Any], name: str, after: int) -> Callable[..., Any]:
    """Return a function that takes the arguments of an operator over experts in its schema's order.

    The argument `name`, ids or offs, follows the first `after` arguments. If it is None, the function raises TypeError.
    """

    def take(*args: Any) -> Any:
        check_dense(name, args[after])  # torch accepts None for a tensor
        return arguments(*args[:after], *args[after + 1 :], **{name: args[after]})

    return take


OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "forward": ("forward", Given),
    "forward_ste": ("ste", SteGiven),
    "forward_train": ("train", Given.of_train),
    "backward": ("backward", BackwardGiven),
    "grouped_forward": ("forward", _with_routing(Given, "offs", 3)),
    "grouped_forward_ste": ("ste", _with_routing(SteGiven, "offs", 3)),
    "grouped_forward_train": ("train", _with_routing(Given.of_train, "offs", 3)),
    "grouped_backward": ("backward", _with_routing(BackwardGiven, "offs", 4)),
    "experts_forward": ("forward", _with_routing(Given, "expert_ids", 3)),
    "experts_down": ("down", DownGiven),
}
"""Maps each operator to its kind ("ste" has learned masks), and to the function that takes its arguments in order."""


def as_rows(tensor: Tensor) -> Tensor:
    """View `[..., n]` as `[tokens, n]`, or copy if the strides allow no view. Sizes may be 0."""
    return tensor if tensor.dim() == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
