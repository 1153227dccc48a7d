"""The feed-forward layer of an MGLU model in vLLM, for any tensor-parallel size."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from .. import notices, ops
from ..activations import get_activation
from ..backends.base import Task
from ..call import Call
from ..formats import get_format
from ..masks import packed_shape
from ..nn.arguments import check_columns, check_masks
from ..nn.masked_linear import top_k_mask_weights
from ..transformers.configuration import ACTIVATIONS
from ..transformers.quantization import stored_weights
from .quantization import METHOD
from .shards import Part, copy_shards, packed_shard, packed_shard_of_logits, rows_of_rank, scale_shard, weight_shard

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig


class ColumnParallelMGLU(nn.Module):
    """The MGLU projection, with `out_features` divided over the ranks. Each rank computes its columns of the result.

    Checkpoints hold the whole weight, its scales if it is quantized, and packed masks or logits. `load_weights` copies
    this rank's rows of these tensors, and packs logits.

    Args:
        config: the model's config with `hidden_size`, `hidden_act`, `n_masks` and `mask_top_k`. If `mglu_ops.quantize`
            has quantized the model, the config also has the formats of the weight and of x. A format of x that another
            quantizer sets does not affect MGLU.
        quant_config: quantization of the router of masks, which is a linear layer. It does not apply to the weight of
            MGLU; if that weight is dense, a warning says so.
        prefix: name of the module in the model.
        size: name of the config's key for the `out_features` of the whole layer.
        part: the part that this rank holds; by default its rows in the tensor-parallel group.

    Raises:
        ValueError: a value in the config is out of range, `out_features` is not a multiple of the number of ranks, or
            in `fp8_block` a rank's number of rows is not a multiple of 128.
    """

    weight: nn.Parameter
    weight_scale: nn.Parameter | None
    packed_masks: nn.Parameter

    def __init__(
        self,
        config: PretrainedConfig,
        quant_config: QuantizationConfig | None,
        prefix: str,
        size: str = "intermediate_size",
        part: Part | None = None,
    ) -> None:
        super().__init__()
        settings: Any = config
        self.weight_format, self.activation_format = stored_weights(config).formats_of(prefix)
        if quant_config is not None and quant_config.get_name() != METHOD and self.weight_format == "dense":
            notices.warn(
                f"quantization: {quant_config.get_name()} quantizes linear layers only, and leaves the weight of MGLU "
                "layers in the dtype of the model; mglu_ops.quantize quantizes those of a checkpoint",
                stacklevel=2,
            )
        self.in_features, self.out_features = settings.hidden_size, getattr(settings, size)
        self.n_masks, self.top_k = settings.n_masks, settings.mask_top_k
        check_masks(self.n_masks, True, self.top_k, "mask_top_k")
        stored = get_format(self.weight_format)
        check_columns(stored, self.in_features)
        self.activation = ACTIVATIONS.get(settings.hidden_act, settings.hidden_act)
        get_activation(self.activation)
        self.prefix = prefix
        self.loaded: set[str] = set()
        self.given: set[str] = set()  # the names in the checkpoint that is being loaded
        self.dtype = torch.get_default_dtype()  # vLLM builds a model with the model's dtype as the default
        self.part = part or Part(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
        own = rows_of_rank(self.out_features, self.part.rank, self.part.ranks, self.weight_format, size)
        rows, leading = own.stop - own.start, self.part.leading
        weight = torch.empty(*leading, rows, self.in_features // stored.packed, dtype=stored.dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("weight_scale", None)
        if not stored.is_dense:
            scale = torch.empty(*leading, *stored.scale_shape(rows, self.in_features), dtype=stored.scale_dtype)
            self.weight_scale = nn.Parameter(scale, requires_grad=False)
        # The masks are zeros, which are valid masks, because vLLM's runs with dummy weights load none. They are a
        # Parameter, because vLLM checks that all parameters were loaded.
        masks = torch.zeros(*leading, *packed_shape(self.n_masks, rows, self.in_features), dtype=torch.uint8)
        self.packed_masks = nn.Parameter(masks, requires_grad=False)
        set_loader(self)
        self.router = None
        if self.top_k is not None:
            self.router = ReplicatedLinear(
                self.in_features,
                self.n_masks,
                bias=False,
                quant_config=quant_config,
                prefix=f"{prefix}.router",
                return_bias=False,
            )

    def mask_weights(self, x: Tensor) -> Tensor | None:
        """The mask weights `[tokens, n_masks]`, or None without a router, which means 1 for each mask."""
        return None if self.router is None else top_k_mask_weights(self.router(x), self.top_k)

    def call(self, tokens: int) -> Call:
        """Describe the call of `forward` for a number of tokens; in a mixture, the call of one expert's layer."""
        return Call.contiguous(
            self.packed_masks.device,
            self.dtype,
            self.n_masks,
            tokens,
            self.packed_masks.shape[-3],
            self.in_features,
            self.activation,
            None if self.router is None else self.dtype,
            self.weight_format,
            self.activation_format,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[tokens, in_features]` to `[tokens, out_features / ranks]`."""
        given = (x, self.weight, self.packed_masks, self.activation, self.mask_weights(x))
        return ops.forward(*given, self.weight_scale, self.weight_format, self.activation_format)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy this rank's part of the layer's tensors from a checkpoint. vLLM's loader may call this repeatedly.

        Returns:
            The names of the parameters that were loaded.

        Raises:
            TypeError, ValueError: a tensor has an unknown name, or another shape or dtype than the config says; packed
                masks are damaged; or there are both packed masks and logits. The message names the tensor.
        """
        loaded = set()
        with naming(self.prefix):
            for name, tensor in weights:
                self.given.add(name)
                if {"packed_masks", "mask_logits"} <= self.given:
                    raise ValueError("packed_masks: got mask_logits of the layer too, but it has one form of masks")
                loaded.add(self._load(name, tensor))
        self.loaded |= loaded
        return loaded

    def _load(self, name: str, tensor: Tensor) -> str:
        if name in ("weight", "weight_scale", "packed_masks", "mask_logits"):
            shards = [self._shard(name, layer) for layer in self.part.layers(name, tensor)]
            name = "packed_masks" if name == "mask_logits" else name
            parameter = getattr(self, name)
            parameter.weight_loader(parameter, shards)
        elif name.startswith("router.") and name in (parameters := dict(self.named_parameters())):
            if name == "router.weight" and not tensor.is_floating_point() and parameters[name].is_floating_point():
                raise TypeError(f"{name}: got dtype {tensor.dtype}, must be floating")
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], tensor)
        else:
            raise ValueError(f"{name}: an MGLU layer has no such tensor (mask_top_k is {self.top_k} in the config)")
        return name

    def _shard(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's rows of one layer's tensor in a checkpoint. Logits are packed."""
        rows = (self.out_features, self.in_features, self.part.rank, self.part.ranks)
        if name == "weight":
            return weight_shard(tensor, *rows, self.weight_format)
        if name == "weight_scale":
            return scale_shard(tensor, *rows, self.weight_format)
        return (packed_shard_of_logits if name == "mask_logits" else packed_shard)(tensor, self.n_masks, *rows)


def set_loader(layer: nn.Module) -> None:
    """Give the parameters of a layer, but not those of its submodules, the loader `copy_shards`."""
    for parameter in layer.parameters(recurse=False):
        parameter.weight_loader = copy_shards  # type: ignore[attr-defined] # as vLLM's own parameters have


@contextmanager
def naming(prefix: str) -> Iterator[None]:
    """Put the name of a layer in front of the messages of errors about its tensors."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{prefix}.{error}") from error


def check_loaded(model: nn.Module, names: Collection[str]) -> None:
    """Check that all tensors of a model's feed-forward layers were loaded. vLLM does not check all of them.

    Args:
        model: a model of vLLM.
        names: the parameters that vLLM's loader has named as loaded, also in earlier calls.

    Raises:
        ValueError: a tensor is missing; the message names it.
    """
    for name, layer in model.named_modules():
        getattr(layer, "given", set()).clear()
        # vLLM does not check linear layers. Quantized ones may have no parameter `weight`.
        linear = getattr(type(layer), "LINEAR", None)
        has_weight = linear is not None and "weight" in dict(layer.get_submodule(linear).named_parameters())
        if has_weight and (tensor := f"{name}.{linear}.weight".removeprefix(".")) not in names:
            raise ValueError(f"{tensor}: the checkpoint has no such tensor, which the config describes")
        loaded = getattr(layer, "loaded", None)
        if isinstance(loaded, set):
            # Of the router's parameters, expect only the weight: a quantizer may add others, which checkpoints lack.
            expected = {key for key, _ in layer.named_parameters(recurse=False)}
            expected |= {"router.weight"} & {key for key, _ in layer.named_parameters()}
            if missing := sorted(expected - loaded):
                raise ValueError(f"{name}.{missing[0]}: the checkpoint has no such tensor, which the config describes")


class MGLUMLP(nn.Module):
    """`down_proj(mglu(x))`, which replaces the feed-forward layer of a model of vLLM.

    Args:
        config: as in `ColumnParallelMGLU`. It must also have `intermediate_size`.
        quant_config: quantization of `down_proj` and of the router of masks, as in `ColumnParallelMGLU`.
        prefix: name of the module in the model.

    Raises:
        ValueError: as in `ColumnParallelMGLU`.
    """

    LINEAR = "down_proj"
    """The layer of vLLM that `check_loaded` checks too."""

    def __init__(self, config: PretrainedConfig, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        settings: Any = config
        self.mglu = ColumnParallelMGLU(config, quant_config, f"{prefix}.mglu")
        self.down_proj = RowParallelLinear(
            settings.intermediate_size,
            settings.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
            return_bias=False,
        )

    def calls(self, tokens: int) -> list[tuple[Task, Call]]:
        """Describe the calls of this package's operators for a number of tokens."""
        return [("forward", self.mglu.call(tokens))]

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[tokens, hidden_size]` to `[tokens, hidden_size]`; every rank gets the whole result."""
        return self.down_proj(self.mglu(x))
