"""The base class of all layers whose weight may be stored in 8 or 4 bits: the parameters, and checks of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checks import FLOATING
from ..formats import WeightFormat, get_format
from .arguments import check_columns, check_dtype, check_sizes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import Self

SCALE = "weight_scale"

_REGISTERED = "_mglu_registered"
"""The attribute of the weight and the scales that a module had when one of the two was registered. Copies lack it."""


class StoredLinear(nn.Module):
    """One weight in a format of `mglu_ops.formats`, without a forward.

    A subclass that sets `num_experts` has as many weights, stacked along a first dimension that its scales have too.

    Args:
        in_features: columns of the weight, at least 1.
        out_features: rows of the weight, at least 1.
        weight_format: a name of `mglu_ops.formats.FORMATS`.
        device: of all tensors.
        dtype: of a dense weight.

    Raises:
        ValueError: an argument is out of range or of another type.
    """

    num_experts: int | None = None
    """The number of stacked layers; None for one layer, whose tensors have no dimension of experts."""
    in_features: int
    out_features: int
    weight_format: str
    """How the weight is stored, a name of `mglu_ops.formats.FORMATS`."""
    weight: nn.Parameter
    weight_scale: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        weight_format: str = "dense",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes(in_features=in_features, out_features=out_features)
        stored = get_format(weight_format)
        check_columns(stored, in_features)
        check_dtype(dtype)
        super().__init__()
        self.in_features, self.out_features, self.weight_format = in_features, out_features, weight_format
        columns = in_features // stored.packed
        weight = torch.empty(*self.leading, out_features, columns, device=device, dtype=stored.dtype or dtype)
        self.weight = nn.Parameter(weight, requires_grad=stored.is_dense)
        self.register_parameter(SCALE, None)
        if not stored.is_dense:
            shape = (*self.leading, *stored.scale_shape(out_features, in_features))
            scale = torch.empty(shape, device=device, dtype=stored.scale_dtype)
            self.weight_scale = nn.Parameter(scale, requires_grad=False)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; `check_pair` says why the weight and its scales are marked."""
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
    def weight_gain(self) -> float:
        """The factor of initial weights."""
        return 1.0

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the weight as `nn.Linear` does, multiply it by `weight_gain`, and round it to `weight_format`."""
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
        refused = {key: problem for key, problem in self._problems(state_dict, prefix).items() if problem is not None}
        error_msgs += dict.fromkeys(refused.values())  # one message for one cause, also with strict=False
        # The call below must not see what is refused: it would cast a wrong dtype silently, and report keys as missing
        # or unexpected in addition.
        kept = {key: value for key, value in state_dict.items() if key not in refused} if refused else state_dict
        super()._load_from_state_dict(kept, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        missing_keys[:] = [key for key in missing_keys if key not in refused]

    def _problems(self, state_dict: Mapping[str, Any], prefix: str) -> dict[str, str | None]:
        """Why this module cannot load tensors of a checkpoint, by their keys; None for what it can load."""
        # A weight without its scales is another weight.
        return dict.fromkeys((prefix + "weight", prefix + SCALE), self._weight_problem(state_dict, prefix))

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
            return dtype_problem(key, weight)
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


def dtype_problem(key: str, tensor: Any) -> str | None:
    """Return why a tensor of a checkpoint cannot be a dense weight or logits, or None if it can."""
    if not isinstance(tensor, Tensor) or tensor.dtype in FLOATING:
        return None
    return f"{key}: got dtype {tensor.dtype}, must be one of {', '.join(map(str, FLOATING))}"


def init_as_linear_(weight: Tensor) -> None:
    """Draw weights `[..., out_features, in_features]` as `nn.Linear` does, also DTensors that cannot be flattened."""
    std = nn.init.calculate_gain("leaky_relu", math.sqrt(5)) / math.sqrt(weight.shape[-1])
    bound = math.sqrt(3.0) * std
    nn.init.uniform_(weight, -bound, bound)


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
        if own.numel() * shards == weight.numel():
            rows_are_divided, columns_are_divided = (
                any(placement.is_shard(weight.dim() - i) for placement in placements) for i in (2, 1)
            )
            if columns_are_divided and weight.dim() == 3 and shards == mesh.size():
                return _quantized_columns(chosen, weight)
            # Each rank has equally many whole rows, and all rows that share a scale.
            if not columns_are_divided and (not rows_are_divided or own.shape[-2] % chosen.rows == 0):
                stored, scale = quantized(chosen, own)
                assert scale is not None
                return DTensor.from_local(stored, mesh, placements), DTensor.from_local(scale, mesh, placements)
    if weight.dim() == 2:
        return chosen.quantize(weight)
    each, scales = zip(*map(chosen.quantize, weight), strict=True)
    return torch.stack(each), torch.stack(scales)


def _quantized_columns(chosen: WeightFormat, weight: DTensor) -> tuple[Tensor, Tensor]:
    """`quantized` for a stack of which each rank has as many columns; all ranks gather one weight at a time."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    mesh, placements = weight.device_mesh, list(weight.placements)
    of_scale = placements if chosen.columns else [Replicate() for _ in placements]
    stored: list[Tensor] = []
    scales: list[Tensor] = []
    for one in weight.unbind(0):
        assert isinstance(one, DTensor)
        whole = chosen.quantize(one.full_tensor())
        for parts, tensor, placed in zip((stored, scales), whole, (placements, of_scale), strict=True):
            assert tensor is not None
            parts.append(distribute_tensor(tensor.unsqueeze(0), mesh, placed, src_data_rank=None).to_local())
    return (
        DTensor.from_local(torch.cat(stored), mesh, placements),
        DTensor.from_local(torch.cat(scales), mesh, of_scale),
    )
