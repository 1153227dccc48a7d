"""The base class of `MGLU`, `NaiveMGLU` and their experts: weight, masks and router, and how they are loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from .. import ops
from ..activations import get_activation
from ..checks import FLOATING
from ..formats import check_activation_format, get_format
from ..masks import check_layout, check_padding, clear_padding_, n_masks_of, packed_shape
from .arguments import WEIGHT_INITS, check_masks, check_weight_init, check_x, weight_of_linear
from .leveling import level_gain
from .stored_linear import StoredLinear, dtype_problem

LOGITS = "mask_logits"
LOGITS_STD = 0.01
"""The standard deviation of initial logits."""
PACKED = "packed_masks"


class UnroutedOptions(TypedDict, total=False):
    """The options of every layer with masks, except `top_k`. `MGLU` describes them."""

    n_masks: int
    activation: str
    learnable_masks: bool
    weight_init: str
    weight_format: str
    activation_format: str
    device: torch.device | str | None
    dtype: torch.dtype | None


class MaskedOptions(UnroutedOptions, total=False):
    """The options of every layer with masks. `MGLU` describes them."""

    top_k: int | None


class MaskedLinear(StoredLinear):
    """One weight and `n_masks` masks, which are learned as logits, or fixed and packed. `MGLU` describes the arguments.

    In a subclass that sets `num_experts`, the weight, scales, logits and packed masks of the experts are stacked along
    a first dimension.
    """

    n_masks: int
    activation: str
    top_k: int | None
    weight_init: str
    """`paper` or `leveled`: how the weight was initialised, here or in the module whose state dict was loaded."""
    activation_format: str
    """The format to which the operator rounds x, a name in `mglu_ops.formats.ACTIVATION_FORMATS`."""
    mask_logits: nn.Parameter | None
    packed_masks: Tensor | None
    router: nn.Linear | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        n_masks: int = 1,
        activation: str = "silu",
        learnable_masks: bool = True,
        top_k: int | None = None,
        weight_init: str = "paper",
        weight_format: str = "dense",
        activation_format: str = "dense",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_masks(n_masks, learnable_masks, top_k)
        get_activation(activation)
        check_weight_init(weight_init)
        is_dense = get_format(weight_format).is_dense
        check_activation_format(activation_format, weight_format)
        if learnable_masks and not is_dense:
            raise ValueError(
                f"weight_format: got {weight_format!r} with learnable_masks=True, must be 'dense': only a layer whose "
                "masks are fixed is quantized; pass learnable_masks=False, or train, freeze and call mglu_ops.quantize"
            )
        super().__init__(in_features, out_features, weight_format=weight_format, device=device, dtype=dtype)
        self.n_masks, self.top_k = n_masks, top_k
        self.activation, self.weight_init = activation, weight_init
        self.activation_format = activation_format
        self.register_parameter(LOGITS, None)
        self.register_buffer(PACKED, None)
        if learnable_masks:
            logits = torch.empty(*self.leading, n_masks, out_features, in_features, device=device, dtype=dtype)
            self.mask_logits = nn.Parameter(logits)
        else:
            shape = (*self.leading, *packed_shape(n_masks, out_features, in_features))
            self.packed_masks = torch.empty(shape, device=device, dtype=torch.uint8)
        self.router = None
        if top_k is not None:
            self.router = nn.Linear(in_features, n_masks, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter. Packed masks become a buffer even if they come as a Parameter.

        Transformers assigns every DTensor as a Parameter.

        Raises:
            ValueError: the parameter is logits, and the module has packed masks, which it would go on using.
        """
        if name == LOGITS and param is not None and self._buffers.get(PACKED) is not None:
            raise ValueError(
                f"{LOGITS}: got a parameter, must be None in a {type(self).__name__} with packed masks; construct one "
                "with learnable_masks=True"
            )
        if name == PACKED and param is not None:
            self.register_buffer(PACKED, param)
        else:
            super().register_parameter(name, param)

    @property
    def learnable_masks(self) -> bool:
        """True if the masks are logits that training updates; False for fixed and frozen masks."""
        return self.packed_masks is None

    @property
    def weight_gain(self) -> float:
        """The factor by which `weight_init` multiplies the initial weight."""
        return 1.0 if self.weight_init == "paper" else level_gain(self.n_masks, self.activation, self.top_k)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise all parameters and masks.

        The weight and the router are drawn as in `nn.Linear`, logits from 0.01 * N(0, 1), and the bits of fixed masks
        are 1 with probability 1/2. The weight is then multiplied by `weight_gain` and rounded to `weight_format`.
        """
        super().reset_parameters()
        self.reset_masks()
        if self.router is not None:
            self.router.reset_parameters()

    @torch.no_grad()
    def reset_masks(self) -> None:
        """Initialise only the masks, as `reset_parameters` does."""
        if self.packed_masks is not None:
            # A random byte is eight random mask bits. `randint_like` draws them, because DTensor has no sharding rule
            # for `random_`.
            self.packed_masks.copy_(torch.randint_like(self.packed_masks, 256))
            clear_padding_(self.packed_masks, self.in_features)
        elif self.mask_logits is not None:
            nn.init.normal_(self.mask_logits, std=LOGITS_STD)

    def check_input(self, x: Tensor) -> None:
        """Check x against this module.

        Raises:
            TypeError: x is not a tensor, or without autocast its dtype differs from a dense weight's or the router's.
            ValueError: x is not on the weight's device, its last size is not in_features, `check_pair` fails, or the
                weight's format does not allow `activation_format`, which may be set at any time.
        """
        if self.activation_format != "dense":
            check_activation_format(self.activation_format, self.weight_format)
        weight = self._parameters.get("weight")  # None if the weight is parametrized, and thus slow to compute
        is_dense = weight is not None and weight.dtype in FLOATING and self.weight_format == "dense"
        check_x(x, weight, self.in_features, takes_dtype=is_dense)  # if not is_dense, the operator checks x's dtype
        if self.router is not None:
            check_x(x, weight_of_linear(self.router), None, name="x of the router")
        if self.weight_format != "dense":
            self.check_pair()

    def mask_weights(self, x: Tensor) -> Tensor | None:
        """Return the mask weights `[..., n_masks]` (see `top_k_mask_weights`), or None without a router."""
        if self.router is None or self.top_k is None:
            return None
        return top_k_mask_weights(self.router(x), self.top_k)

    def extra_repr(self) -> str:
        formats = {"weight_format": self.weight_format, "activation_format": self.activation_format}
        stored = "".join(f", {name}={value!r}" for name, value in formats.items() if value != "dense")
        experts = "" if self.num_experts is None else f"num_experts={self.num_experts}, "
        return (
            f"{experts}in_features={self.in_features}, out_features={self.out_features}, n_masks={self.n_masks}, "
            f"activation={self.activation!r}, learnable_masks={self.learnable_masks}, top_k={self.top_k}{stored}"
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save the tensors, and save `weight_init` in the metadata of the state dict, where it needs no tensor."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            metadata.setdefault(prefix[:-1], {})["weight_init"] = self.weight_init

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, metadata: Any, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)
        has_weight = prefix + "weight" in state_dict and self._weight_problem(state_dict, prefix) is None
        if has_weight and metadata.get("weight_init") in WEIGHT_INITS:
            self.weight_init = metadata["weight_init"]

    def _problems(self, state_dict: Mapping[str, Any], prefix: str) -> dict[str, str | None]:
        logits, packed = prefix + LOGITS, prefix + PACKED
        problems = {logits: dtype_problem(logits, state_dict[logits])} if logits in state_dict else {}
        problems |= super()._problems(state_dict, prefix)
        if (problem := self._mask_problem(state_dict, prefix)) is not None:
            problems |= {logits: problem, packed: problem}
        return problems

    def _mask_problem(self, state_dict: Mapping[str, Any], prefix: str) -> str | None:
        """Return why this module cannot load the masks of a checkpoint, or None if it can."""
        logits_key, key = prefix + LOGITS, prefix + PACKED
        packed, has_logits = state_dict.get(key), logits_key in state_dict
        if self.learnable_masks and packed is not None:
            return (
                f"{key}: the checkpoint holds packed masks, but this {type(self).__name__} learns its masks; "
                "construct it with learnable_masks=False, or call mglu_ops.freeze(model) before loading"
            )
        if not self.learnable_masks and has_logits:
            return (
                f"{logits_key}: the checkpoint holds logits, but this {type(self).__name__} has packed masks; "
                "construct it with learnable_masks=True, load, and then call mglu_ops.freeze(model)"
            )
        if not self.learnable_masks and packed is not None:
            try:
                check_masks_of(self, packed, (*self.leading, self.out_features), key)
            except (TypeError, ValueError) as error:
                return str(error)
        return None


def check_masks_of(module: MaskedLinear, packed_masks: object, rows: Sequence[int], name: str) -> None:
    """Check that a value can be the packed masks of a module. Errors call it `name`.

    `rows` is `[out_features]`, or `[num_experts, out_features]`, of the part that this rank holds.

    Raises:
        TypeError: the value is not a uint8 tensor.
        ValueError: its shape does not fit the module, or its padding is not 0.
    """
    if not isinstance(packed_masks, Tensor):
        raise TypeError(f"{name}: got {type(packed_masks).__name__}, must be a torch.uint8 tensor")
    shape, one = list(packed_masks.shape), packed_masks
    if len(rows) > 1:
        expected = [*rows[:-1], *packed_shape(module.n_masks, rows[-1], module.in_features)]
        if shape != expected:
            raise ValueError(
                f"{name}: got shape {shape}, must be [num_experts, out_features, ceil(in_features / 8), n_masks] = "
                f"{expected}"
            )
        # Check the layout of one expert's masks, on the meta device. The masks of all experts cannot be viewed as the
        # masks of one layer, because torch 2.11 cannot flatten DTensors that are sharded along dimension 1.
        one = torch.empty(shape[1:], dtype=packed_masks.dtype, layout=packed_masks.layout, device="meta")
    try:
        check_layout(one, module.in_features, rows[-1])
        if n_masks_of(one) != module.n_masks:
            raise ValueError(f"got n_masks={n_masks_of(one)} (shape {shape}), must be {module.n_masks}")
        check_padding(packed_masks, module.in_features)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {str(error).removeprefix('packed_masks: ')}") from None


def packed_logits(mask_logits: Tensor) -> Tensor:
    """Pack the masks of logits `[n_masks, out_features, in_features]`, or of a stack of logits along dimension 0."""
    return (ops.pack_logits if mask_logits.dim() == 3 else ops.pack_expert_logits)(mask_logits)


def top_k_mask_weights(logits: Tensor, top_k: int) -> Tensor:
    """The softmax over each token's `top_k` largest router logits, and 0 for its other masks, `[..., n_masks]`."""
    kept = torch.zeros_like(logits).scatter(-1, logits.detach().topk(top_k, dim=-1).indices, 1.0)
    # Detach `logits` before `topk` and `scatter`, which DTensor cannot differentiate in torch 2.11. Convert the result,
    # because softmax returns float32 under autocast.
    return logits.masked_fill(kept == 0, -math.inf).softmax(-1).to(logits.dtype)
