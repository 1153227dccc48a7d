"""The base class of layers whose weight may be stored in 8 or 4 bits. It checks the checkpoints that are loaded."""

from __future__ import annotations

import math
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..checks import FLOATING
from ..formats import WeightFormat, check_scale, get_format
from ..sizes import ceil_div
from .arguments import check_columns, check_dtype, check_sizes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import Self

SCALE = "weight_scale"

_PAIR = "_mglu_pair"
"""An attribute of a stored weight and of its scales. Its text is the same in both if they belong together."""

_NOT_CAST = "_ddp_ignored"
"""The attribute that keeps `DistributedDataParallel` from casting a tensor for mixed precision."""


class _Shard(Tensor):
    """A rank's shard of a stored weight, or of its scales. FSDP2 gathers it without casting it.

    With mixed precision, FSDP2 casts floating-point shards, even shards in float8_e4m3fn, unless their class has the
    extension methods `fsdp_pre_all_gather` and `fsdp_post_all_gather`. FSDP2 moves, pads and slices a shard with the
    methods that are set below, which must return a `_Shard`. All other operations return ordinary tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # as in torch's subclasses

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """Return what this rank sends: its shard, padded to the size of the first rank's shard."""
        rows = ceil_div(outer_size[0], mesh.size())
        if self.shape[0] == rows:
            return (self,), None
        padded = self.new_zeros((rows, *outer_size[1:]))
        Tensor.narrow(padded, 0, 0, self.shape[0]).copy_(self)
        return (padded,), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the gathered tensor, whose memory FSDP2 owns. If `out` is given, FSDP2 has filled it already."""
        return (gathered[0], ()) if out is None else None


def _returning_shard(name: str) -> Callable[..., Tensor]:
    return lambda self, *args, **kwargs: getattr(Tensor, name)(self, *args, **kwargs).as_subclass(_Shard)


for _name in ("new_zeros", "narrow", "to", "cpu", "pin_memory"):
    setattr(_Shard, _name, _returning_shard(_name))


class StoredLinear(nn.Module):
    """A module without `forward` that holds one weight in a format of `mglu_ops.formats`.

    In a subclass that sets `num_experts`, the weights and scales of the experts are stacked along a first dimension.

    Args:
        in_features: columns of the weight, at least 1.
        out_features: rows of the weight, at least 1.
        weight_format: a name in `mglu_ops.formats.FORMATS`.
        device: device of all tensors.
        dtype: dtype of a dense weight.

    Raises:
        ValueError: an argument is out of range or of another type.
    """

    num_experts: int | None = None
    """The number of stacked layers; None for a single layer, whose tensors have no dimension of experts."""
    in_features: int
    out_features: int
    weight_format: str
    """The format of the stored weight, a name in `mglu_ops.formats.FORMATS`."""
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
        """Register a parameter. If weight and scales are both new to the module, mark them as a pair."""
        # Dynamo traces this if PEFT parametrizes the weight in a call, and cannot read or change a tensor's attributes.
        if name not in ("weight", SCALE) or torch.compiler.is_compiling():
            super().register_parameter(name, param)
            return
        self._mark()
        # accelerate passes a parameter's attributes to a constructor, which accepts neither _PAIR nor _NOT_CAST.
        kept = getattr(param, "__dict__", {})
        pair, _ = kept.pop(_PAIR, None), kept.pop(_NOT_CAST, None)
        super().register_parameter(name, param)
        if pair is not None:
            setattr(self._parameters[name], _PAIR, pair)
        self._mark()

    def _mark(self) -> None:
        """Mark a stored weight and its scales as a pair if neither is marked, and keep DDP from casting them."""
        weight, scale = self._parameters.get("weight"), self._parameters.get(SCALE)
        if weight is None or scale is None:
            return
        if _PAIR not in vars(weight) and _PAIR not in vars(scale):
            pair = uuid.uuid4().hex
            setattr(weight, _PAIR, pair)
            setattr(scale, _PAIR, pair)
        setattr(weight, _NOT_CAST, True)
        setattr(scale, _NOT_CAST, True)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and turn parameters that FSDP2 sets into `_Shard`s.

        FSDP2 calls `__setattr__` only in classes that define it; in other classes it writes to `_parameters`. DTensors
        of tensor parallelism must not hold `_Shard`s, because `torch.compile` does not accept that. They look like the
        DTensors of FSDP2, so this method reads from the call stack whether FSDP2 has called it.
        """
        if name not in ("weight", SCALE):
            super().__setattr__(name, value)
            return
        is_shard = _is_shard(self._parameters.get(name))  # True if load_state_dict(assign=True) replaces a shard
        is_shard |= sys._getframe(1).f_globals.get("__name__", "").startswith("torch.distributed.fsdp.")
        super().__setattr__(name, value)
        if is_shard:
            self._as_shard(name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()  # a copied parameter lacks the attributes of its original

    def _as_shard(self, name: str) -> None:
        """Turn the local part of a floating-point stored parameter into a `_Shard`. FSDP2 does not cast integers."""
        param = self._parameters.get(name)
        shard = getattr(param, "_local_tensor", None)
        if type(shard) is Tensor and shard.dtype.is_floating_point and self.weight_format != "dense":
            param._local_tensor = shard.as_subclass(_Shard)  # type: ignore[union-attr]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply methods such as `to` and `half`, which may move what a format defines but not convert it.

        These are scales, and all tensors that are not numbers in a dtype of x: stored weights and packed masks.
        """
        scales = () if self.weight_format == "dense" else tuple(self._scales())

        def keep_dtype(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            is_kept = tensor.dtype not in FLOATING or any(tensor is one for one in scales)
            return tensor.to(result.device) if is_kept and result.dtype != tensor.dtype else result

        shards = [name for name in ("weight", SCALE) if _is_shard(self._parameters.get(name))]
        super()._apply(keep_dtype, recurse)
        self._mark()  # parameters that could not change in place were replaced by new ones, which lack the mark
        for name in shards:
            self._as_shard(name)
        return self

    def _scales(self) -> Iterator[Tensor]:
        """The scales of the stored weight, or the tensors from which a parametrization computes them."""
        dtype = get_format(self.weight_format).scale_dtype
        if parametrize.is_parametrized(self, SCALE):
            originals = self.parametrizations[SCALE].parameters(recurse=False)  # type: ignore[union-attr,index]
            yield from (one for one in originals if one.dtype is dtype)
        elif (own := self._parameters.get(SCALE)) is not None:
            yield own

    @property
    def leading(self) -> tuple[int, ...]:
        """The leading sizes of all tensors: `(num_experts,)` for experts, else empty."""
        return () if self.num_experts is None else (self.num_experts,)

    @property
    def weight_gain(self) -> float:
        """The factor by which initial weights are multiplied."""
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
        """Check that a stored weight and its scales belong together: both were assigned, or neither was.

        accelerate casts a checkpoint's tensor to the dtype of the parameter that it replaces, and keeps parameters that
        the checkpoint lacks. A module that loads a dense checkpoint would thus combine the new weight with old scales.
        This check does not notice values that are written into a parameter, also through its `data`.

        An adapter of PEFT adds its product to the stored numbers, as if their scales were 1. Such a parametrization of
        only one of the two is refused as well.

        Args:
            path: prefix of the parameters' names in the message.

        Raises:
            ValueError: only one of the two was replaced, or is parametrized, or they come from different pairs.
        """
        computed = [name for name in ("weight", SCALE) if name not in self._parameters]
        if len(computed) == 1:
            raise ValueError(
                f"{path}{computed[0]}: got a tensor that an adapter or another parametrization computes, must be the "
                f"stored one for weight_format={self.weight_format!r}; call mglu_ops.dequantize(model) before an "
                "adapter is added"
            )
        weight, scale = self._parameters.get("weight"), self._parameters.get(SCALE)
        if weight is None or scale is None or torch.compiler.is_compiling():
            return
        if vars(weight).get(_PAIR) == vars(scale).get(_PAIR):
            return
        raise ValueError(
            f"{path}weight, {SCALE}: one of the two was replaced without the other one, must be replaced together for "
            f"weight_format={self.weight_format!r}; load a dense checkpoint into a dense model, and call "
            "mglu_ops.quantize after loading"
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
        error_msgs += dict.fromkeys(refused.values())  # one message for each cause, also with strict=False
        # Hide refused tensors from the call below. It would silently cast a wrong dtype, and would also report the keys
        # as missing or unexpected.
        kept = {key: value for key, value in state_dict.items() if key not in refused} if refused else state_dict
        super()._load_from_state_dict(kept, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        missing_keys[:] = [key for key in missing_keys if key not in refused]

    def _problems(self, state_dict: Mapping[str, Any], prefix: str) -> dict[str, str | None]:
        """Map keys of a checkpoint to the reason why this module cannot load the tensor, or to None if it can."""
        # Weight and scales are loaded together or not at all.
        return dict.fromkeys((prefix + "weight", prefix + SCALE), self._weight_problem(state_dict, prefix))

    def _weight_problem(self, state_dict: Mapping[str, Any], prefix: str) -> str | None:
        """Return why this module cannot load a checkpoint's weight and scales, or None if it can load them."""
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
        assert isinstance(scale, Tensor)
        try:
            check_scale(scale, scale_key)
        except ValueError as error:
            return str(error)
        return None


def _is_shard(param: Tensor | None) -> bool:
    return isinstance(getattr(param, "_local_tensor", None), _Shard)


def dtype_problem(key: str, tensor: Any) -> str | None:
    """Return why a checkpoint's tensor cannot be a dense weight or logits, or None if it can."""
    if not isinstance(tensor, Tensor) or tensor.dtype in FLOATING:
        return None
    return f"{key}: got dtype {tensor.dtype}, must be one of {', '.join(map(str, FLOATING))}"


def init_as_linear_(weight: Tensor) -> None:
    """Draw weights `[..., out_features, in_features]` as `nn.Linear` does. `weight` may be a DTensor."""
    std = nn.init.calculate_gain("leaky_relu", math.sqrt(5)) / math.sqrt(weight.shape[-1])
    bound = math.sqrt(3.0) * std
    nn.init.uniform_(weight, -bound, bound)


def quantized(chosen: WeightFormat, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Quantize a weight `[out_features, in_features]`, or a stack along dimension 0, to a stored weight and scales.

    Only one weight of a stack at a time is copied to float32.
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
            # If each rank has whole rows and whole blocks of rows with one scale, it quantizes its own part.
            if not columns_are_divided and (not rows_are_divided or own.shape[-2] % chosen.rows == 0):
                stored, scale = quantized(chosen, own)
                assert scale is not None
                return DTensor.from_local(stored, mesh, placements), DTensor.from_local(scale, mesh, placements)
    if weight.dim() == 2:
        return chosen.quantize(weight)
    each, scales = zip(*map(chosen.quantize, weight), strict=True)
    return torch.stack(each), torch.stack(scales)


def dequantized(chosen: WeightFormat, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the dense weight `[out_features, in_features]` of a stored weight, or of each weight of a stack.

    Only one weight of a stack at a time is copied to float32. Each rank computes its local part of a DTensor.
    """
    if hasattr(weight, "placements"):
        from torch.distributed.tensor import DTensor

        assert isinstance(weight, DTensor)
        assert isinstance(scale, DTensor)
        own = dequantized(chosen, weight.to_local(), scale.to_local(), dtype)
        shape = torch.Size((*weight.shape[:-1], weight.shape[-1] * chosen.packed))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(own, weight.device_mesh, weight.placements, shape=shape, stride=stride)
    if weight.dim() == 2:
        return chosen.dequantize(weight, scale, dtype)
    return torch.stack([chosen.dequantize(*one, dtype) for one in zip(weight, scale, strict=True)])


def _quantized_columns(chosen: WeightFormat, weight: DTensor) -> tuple[Tensor, Tensor]:
    """Compute `quantized` for a stack of weights whose columns are sharded. All ranks gather one weight at a time."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    mesh, placements = weight.device_mesh, list(weight.placements)
    scale_placements = placements if chosen.columns else [Replicate() for _ in placements]
    stored: list[Tensor] = []
    scales: list[Tensor] = []
    for one in weight.unbind(0):
        assert isinstance(one, DTensor)
        whole = chosen.quantize(one.full_tensor())
        for parts, tensor, placed in zip((stored, scales), whole, (placements, scale_placements), strict=True):
            assert tensor is not None
            parts.append(distribute_tensor(tensor.unsqueeze(0), mesh, placed, src_data_rank=None).to_local())
    return (
        DTensor.from_local(torch.cat(stored), mesh, placements),
        DTensor.from_local(torch.cat(scales), mesh, scale_placements),
    )
