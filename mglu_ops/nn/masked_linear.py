"""The base class of `MGLU`, `NaiveMGLU` and their experts: parameters, masks, router, checkpoints, but no forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from .. import expert_ops, ops
from ..activations import get_activation
from ..checks import FLOATING
from ..formats import WeightFormat, check_activation_format, get_format
from ..masks import check_layout, check_padding, clear_padding_, n_masks_of, packed_shape
from .arguments import WEIGHT_INITS, check_columns, check_dtype, check_masks, check_sizes, check_weight_init
from .leveling import level_gain

if TYPE_CHECKING:
    from typing_extensions import Self

LOGITS = "mask_logits"
LOGITS_STD = 0.01
"""The standard deviation of new logits."""
PACKED = "packed_masks"
SCALE = "weight_scale"

_REGISTERED = "_mglu_registered"
"""The attribute of the weight and the scales that a module had when one of the two was registered. Copies lack it."""


class UnroutedOptions(TypedDict, total=False):
    """The options of every layer with masks but `top_k`; see `MGLU`."""

    n_masks: int
    activation: str
    learnable_masks: bool
    weight_init: str
    weight_format: str
    activation_format: str
    device: torch.device | str | None
    dtype: torch.dtype | None


class MaskedOptions(UnroutedOptions, total=False):
    """The options of every layer with masks; see `MGLU`."""

    top_k: int | None


class MaskedLinear(nn.Module):
    """One weight and `n_masks` masks, either learned as logits or fixed and packed; see `MGLU` for the arguments.

    A subclass that sets `num_experts` has as many weights, stacked along a first dimension that its scales, logits and
    packed masks have too.
    """

    num_experts: int | None = None
    """The number of stacked layers; None for one layer, whose tensors have no dimension of experts."""
    in_features: int
    out_features: int
    n_masks: int
    activation: str
    top_k: int | None
    weight_init: str
    """How the weights were drawn, by this module or by the one whose state dict it has loaded."""
    weight_format: str
    """How the weight is stored, a name of `mglu_ops.formats.FORMATS`."""
    activation_format: str
    """What the operator rounds x to, a name of `mglu_ops.formats.ACTIVATION_FORMATS`."""
    weight: nn.Parameter
    weight_scale: nn.Parameter | None
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
        check_sizes(in_features=in_features, out_features=out_features)
        check_masks(n_masks, learnable_masks, top_k)
        get_activation(activation)
        check_weight_init(weight_init)
        stored = get_format(weight_format)
        check_columns(stored, in_features)
        check_activation_format(activation_format, weight_format)
        if learnable_masks and not stored.is_dense:
            raise ValueError(
                f"weight_format: got {weight_format!r} with learnable_masks=True, must be 'dense': only a layer whose "
                "masks are fixed is quantized; pass learnable_masks=False, or train, freeze and call mglu_ops.quantize"
            )
        check_dtype(dtype)
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.n_masks, self.top_k = n_masks, top_k
        self.activation, self.weight_init = activation, weight_init
        self.weight_format, self.activation_format = weight_format, activation_format
        columns = in_features // stored.packed
        weight = torch.empty(*self.leading, out_features, columns, device=device, dtype=stored.dtype or dtype)
        self.weight = nn.Parameter(weight, requires_grad=stored.is_dense)
        self.register_parameter(SCALE, None)
        if not stored.is_dense:
            shape = (*self.leading, *stored.scale_shape(out_features, in_features))
            scale = torch.empty(shape, device=device, dtype=stored.scale_dtype)
            self.weight_scale = nn.Parameter(scale, requires_grad=False)
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
        """Register a parameter, but keep packed masks a buffer: Transformers assigns each DTensor as a Parameter."""
        if name == PACKED and param is not None:
            self.register_buffer(PACKED, param)
            return
        getattr(param, "__dict__", {}).pop(_REGISTERED, None)  # accelerate passes attributes on to a constructor
        super().register_parameter(name, param)
        for one in (param, self._parameters.get("weight"), self._parameters.get(SCALE)):
            if one is not None:
                setattr(one, _REGISTERED, True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply `to`, `half` and their like, which may move a stored weight and its scales, but not convert them."""
        stored = () if self.weight_format == "dense" else (self.weight, self.weight_scale)

        def keep_dtype(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            is_converted = result.dtype != tensor.dtype and any(tensor is one for one in stored)
            return tensor.to(result.device) if is_converted else result

        return super()._apply(keep_dtype, recurse)

    @property
    def leading(self) -> tuple[int, ...]:
        """The first sizes of the tensors, before the sizes of one layer: none, or `num_experts`."""
        return () if self.num_experts is None else (self.num_experts,)

    @property
    def learnable_masks(self) -> bool:
        """Whether the masks are logits that training updates; False for fixed and for frozen masks."""
        return self.packed_masks is None

    @property
    def weight_gain(self) -> float:
        """The factor that `weight_init` gives to an initial weight."""
        return 1.0 if self.weight_init == "paper" else level_gain(self.n_masks, self.activation, self.top_k)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise weight and router as `nn.Linear` does, logits from 0.01 * N(0, 1), fixed masks with bits that
        are 1 with probability 1/2. Then multiply the weight by `weight_gain`, and round it to `weight_format`.
        """
        weight: Tensor = self.weight
        if self.weight_scale is not None:
            shape = (*self.leading, self.out_features, self.in_features)
            weight = self.weight.new_empty(shape, dtype=torch.float32)
        init_as_linear_(weight)
        weight.mul_(self.weight_gain)
        if self.weight_scale is not None:
            stored, scale = quantized(get_format(self.weight_format), weight)
            assert scale is not None
            self.weight.copy_(stored)
            self.weight_scale.copy_(scale)
        self.reset_masks()
        if self.router is not None:
            self.router.reset_parameters()

    @torch.no_grad()
    def reset_masks(self) -> None:
        """Initialise the masks alone, as `reset_parameters` does."""
        if self.packed_masks is not None:
            # A random byte is eight random bits, so that no tensor of one byte per weight and mask is needed.
            # DTensor has no rule for `random_`.
            self.packed_masks.copy_(torch.randint_like(self.packed_masks, 256))
            clear_padding_(self.packed_masks, self.in_features)
        elif self.mask_logits is not None:
            nn.init.normal_(self.mask_logits, std=LOGITS_STD)

    def check_input(self, x: Tensor) -> None:
        """Check x against this module first: the errors of later checks would blame the weight for a wrong x.

        Raises:
            TypeError: x is not a tensor, or has another dtype than a dense weight, without autocast.
            ValueError: x is on another device than the weight, its last size is not in_features, or `check_pair` fails.
        """
        if not isinstance(x, Tensor):  # torch's own message would contain all values of a list or an array
            raise TypeError(f"x: got {'None' if x is None else type(x).__name__}, must be a tensor")
        weight = self._parameters.get("weight")  # None if it is parametrized, because computing it takes time
        if weight is not None:
            if x.device != weight.device:
                raise ValueError(f"x: got device {x.device}, must be the module's device {weight.device}")
            is_dense = weight.dtype in FLOATING and self.weight_format == "dense"  # the operator checks other dtypes
            if self.weight_format != "dense" and not torch.compiler.is_compiling():
                self.check_pair()
            if is_dense and x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
                raise TypeError(f"x: got dtype {x.dtype}, must be the module's dtype {weight.dtype}, or use autocast")
        if self.router is not None and x.shape[-1:] != (self.in_features,):
            raise ValueError(f"x: got shape {list(x.shape)}, must be [..., in_features] = [..., {self.in_features}]")

    def check_pair(self, path: str = "") -> None:
        """Check that no loader has replaced a stored weight without its scales, or these without the weight.

        accelerate casts a tensor of a checkpoint to the dtype of the parameter in whose place it writes it. It leaves
        alone what the checkpoint does not have, such as the scales if the weight in it is dense.

        Args:
            path: what precedes the parameter's name in the message.

        Raises:
            ValueError: only one of the two was replaced since the module has registered them.
        """
        weight, scale = self._parameters["weight"], self._parameters[SCALE]
        if weight is None or scale is None or (_REGISTERED in vars(weight)) == (_REGISTERED in vars(scale)):
            return
        raise ValueError(
            f"{path}{SCALE if _REGISTERED in vars(weight) else 'weight'}: was replaced without the other one of weight "
            f"and {SCALE}, which must be loaded together for weight_format={self.weight_format!r}; load a dense "
            "checkpoint into a dense model, and call mglu_ops.quantize after loading"
        )

    def mask_weights(self, x: Tensor) -> Tensor | None:
        """Return mask weights `[..., n_masks]`, or None without a router.

        They are the softmax over a token's `top_k` largest router logits, and 0 for the other masks.
        """
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
        """Save `weight_init` too, as metadata beside torch's version number and not as another tensor."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            metadata.setdefault(prefix[:-1], {})["weight_init"] = self.weight_init

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        weight, scale, logits, packed = (prefix + name for name in ("weight", SCALE, LOGITS, PACKED))
        problems = {logits: _dtype_problem(logits, state_dict[logits])} if logits in state_dict else {}
        if (problem := self._weight_problem(state_dict, prefix)) is not None:
            problems |= {weight: problem, scale: problem}  # a weight without its scales is another weight
        if (problem := self._mask_problem(state_dict, prefix)) is not None:
            problems |= {logits: problem, packed: problem}
        refused = {key: problem for key, problem in problems.items() if problem is not None}
        error_msgs += dict.fromkeys(refused.values())  # one message for one cause, also with strict=False
        # The call below must not see what is refused: it would cast a wrong dtype silently, and report keys as missing
        # or unexpected in addition.
        kept = {key: value for key, value in state_dict.items() if key not in refused} if refused else state_dict
        super()._load_from_state_dict(kept, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        missing_keys[:] = [key for key in missing_keys if key not in refused]
        if weight in kept and local_metadata.get("weight_init") in WEIGHT_INITS:
            self.weight_init = local_metadata["weight_init"]

    def _weight_problem(self, state_dict: Mapping[str, Any], prefix: str) -> str | None:
        """Return why this module cannot load the weight of a checkpoint and its scales, or None if it can."""
        key, scale_key = prefix + "weight", prefix + SCALE
        weight, scale = state_dict.get(key), state_dict.get(scale_key)
        if self.weight_format == "dense":
            if scale is not None:
                return (
                    f"{scale_key}: the checkpoint holds a quantized weight, but the weight of this "
                    f"{type(self).__name__} is dense; construct it with the weight_format of the checkpoint, or call "
                    "mglu_ops.quantize(model, weight_format) before loading"
                )
            return _dtype_problem(key, weight)
        if weight is None and scale is None:
            return None
        stored = get_format(self.weight_format)
        shapes = {
            key: (weight, stored.dtype, (self.out_features, self.in_features // stored.packed)),
            scale_key: (scale, stored.scale_dtype, stored.scale_shape(self.out_features, self.in_features)),
        }
        for name, (tensor, dtype, sizes) in shapes.items():
            shape = (*self.leading, *sizes)
            found = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else "no tensor"
            if found != (expected := f"{dtype} {list(shape)}"):
                is_dense = name == key and isinstance(tensor, Tensor) and tensor.dtype in FLOATING
                advice = "; load it into a dense model, and call mglu_ops.quantize after loading" if is_dense else ""
                return f"{name}: got {found}, must be {expected} for weight_format={self.weight_format!r}{advice}"
        return None

    def _mask_problem(self, state_dict: Mapping[str, Any], prefix: str) -> str | None:
        """Return why this module cannot load the masks of a checkpoint, or None if it can."""
        logits_key, key = prefix + LOGITS, prefix + PACKED
        packed, has_logits = state_dict.get(key), logits_key in state_dict
        if self.learnable_masks and packed is not None and not has_logits:
            return (
                f"{key}: the checkpoint holds packed masks, but this {type(self).__name__} learns its masks; "
                "construct it with learnable_masks=False, or call mglu_ops.freeze(model) before loading"
            )
        if not self.learnable_masks and packed is None and has_logits:
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


def _dtype_problem(key: str, tensor: Any) -> str | None:
    """Return why a tensor of a checkpoint cannot be a weight or logits, or None if it can."""
    if not isinstance(tensor, Tensor) or tensor.dtype in FLOATING:
        return None
    return f"{key}: got dtype {tensor.dtype}, must be one of {', '.join(map(str, FLOATING))}"


def check_masks_of(module: MaskedLinear, packed_masks: object, rows: Sequence[int], name: str) -> None:
    """Check that a value can be the packed masks of a module; the message calls it `name`.

    `rows` are the sizes of the masks before their columns: out_features, after the number of experts if there are any.
    A rank may hold a part of the module's.

    Raises:
        TypeError: it is not a uint8 tensor.
        ValueError: it has another shape than the module's masks, or its padding is not 0.
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
        # The metadata of one layer. In torch 2.11, DTensors that are divided along dimension 1 cannot be flattened.
        one = torch.empty(shape[1:], dtype=packed_masks.dtype, layout=packed_masks.layout, device="meta")
    try:
        check_layout(one, module.in_features, rows[-1])
        if n_masks_of(one) != module.n_masks:
            raise ValueError(f"got n_masks={n_masks_of(one)} (shape {shape}), must be {module.n_masks}")
        check_padding(packed_masks, module.in_features)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {str(error).removeprefix('packed_masks: ')}") from None


def init_as_linear_(weight: Tensor) -> None:
    """Draw weights `[..., out_features, in_features]` as `nn.Linear` does, also DTensors that cannot be flattened."""
    std = nn.init.calculate_gain("leaky_relu", math.sqrt(5)) / math.sqrt(weight.shape[-1])
    bound = math.sqrt(3.0) * std
    nn.init.uniform_(weight, -bound, bound)


def packed_logits(mask_logits: Tensor) -> Tensor:
    """The packed masks of logits `[n_masks, out_features, in_features]`, or of a stack of such along dimension 0."""
    return (ops.pack_logits if mask_logits.dim() == 3 else expert_ops.pack_expert_logits)(mask_logits)


def quantized(chosen: WeightFormat, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """The stored weight and the scales of a weight `[out_features, in_features]`, or of a stack along dimension 0.

    Only one weight at a time is copied to float32.
    """
    if chosen.is_dense:
        return chosen.quantize(weight)
    placements = getattr(weight, "placements", ())
    if any(placement.is_shard() for placement in placements):
        from torch.distributed.tensor import DTensor

        assert isinstance(weight, DTensor)
        mesh, own = weight.device_mesh, weight.to_local()
        shards = math.prod(mesh.size(i) for i, placement in enumerate(placements) if placement.is_shard())
        is_of_columns = any(placement.is_shard(weight.dim() - 1) for placement in placements)
        # Each rank has equally many whole rows, and all rows that share a scale.
        if not is_of_columns and own.numel() * shards == weight.numel() and own.shape[-2] % chosen.rows == 0:
            stored, scale = quantized(chosen, own)
            assert scale is not None
            return DTensor.from_local(stored, mesh, placements), DTensor.from_local(scale, mesh, placements)
    if weight.dim() == 2:
        return chosen.quantize(weight)
    each, scales = zip(*map(chosen.quantize, weight), strict=True)
    return torch.stack(each), torch.stack(scales)


def top_k_mask_weights(logits: Tensor, top_k: int) -> Tensor:
    """The softmax over the `top_k` largest router logits `[..., n_masks]` of a token, and 0 for the other masks."""
    kept = torch.zeros_like(logits).scatter(-1, logits.detach().topk(top_k, dim=-1).indices, 1.0)
    # `logits` is detached before `topk` and `scatter`, which DTensor cannot differentiate in torch 2.11. Under
    # autocast, softmax returns float32; the projections have the dtype of the router's result.
    return logits.masked_fill(kept == 0, -math.inf).softmax(-1).to(logits.dtype)
