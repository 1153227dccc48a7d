"""The feed-forward layer of an MGLU model in vLLM, for any tensor-parallel size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from .. import notices, ops
from ..activations import get_activation
from ..formats import check_activation_format, get_format
from ..masks import packed_shape
from ..nn.arguments import check_columns, check_masks
from ..nn.masked_linear import top_k_mask_weights
from ..transformers.configuration import ACTIVATIONS
from ..transformers.quantization import stored_weights
from .quantization import METHOD
from .shards import packed_shard, packed_shard_of_logits, rows_of_rank, scale_shard, weight_shard

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig


class ColumnParallelMGLU(nn.Module):
    """The MGLU projection whose `out_features` are spread over the ranks: this rank's columns of the result.

    Checkpoints hold the whole weight, its scales if it is quantized, and packed masks or logits. `load_weights` takes
    this rank's rows of each, and packs logits.

    Args:
        in_features: last size of x.
        out_features: last size of the result of all ranks together; a multiple of the number of ranks.
        n_masks: number of masks, 1 to 16.
        activation: as in `mglu_ops.nn.MGLU`, or Transformers' name for it.
        top_k: number of masks that a token keeps; None for no router. Each rank computes all routes.
        weight_format: how the weight is stored, a name of `mglu_ops.formats`.
        activation_format: what x is rounded to, likewise.
        quant_config: of the router, which is a linear layer.
        prefix: name of the module in the model.

    Raises:
        ValueError: an argument is out of range, `out_features` is not a multiple of the number of ranks, or a rank's
            rows are not whole blocks of 128 rows in `fp8_block`.
    """

    weight: nn.Parameter
    weight_scale: nn.Parameter | None
    packed_masks: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        n_masks: int,
        activation: str,
        top_k: int | None,
        weight_format: str,
        activation_format: str,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        check_masks(n_masks, True, top_k)
        stored = get_format(weight_format)
        check_columns(stored, in_features)
        check_activation_format(activation_format, weight_format)
        self.activation = ACTIVATIONS.get(activation, activation)
        get_activation(self.activation)
        self.in_features, self.out_features = in_features, out_features
        self.n_masks, self.top_k = n_masks, top_k
        self.weight_format, self.activation_format = weight_format, activation_format
        self.loaded: set[str] = set()
        self.rank, self.ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        own = rows_of_rank(out_features, self.rank, self.ranks, weight_format)
        rows = own.stop - own.start
        weight = torch.empty(rows, in_features // stored.packed, dtype=stored.dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("weight_scale", None)
        if not stored.is_dense:
            scale = torch.empty(stored.scale_shape(rows, in_features), dtype=stored.scale_dtype)
            self.weight_scale = nn.Parameter(scale, requires_grad=False)
        # Zeros are valid masks, for runs with dummy weights. A parameter, because vLLM checks that parameters were
        # loaded.
        masks = torch.zeros(packed_shape(n_masks, rows, in_features), dtype=torch.uint8)
        self.packed_masks = nn.Parameter(masks, requires_grad=False)
        self.router = None
        if top_k is not None:
            self.router = ReplicatedLinear(
                in_features,
                n_masks,
                bias=False,
                quant_config=quant_config,
                prefix=f"{prefix}.router",
                return_bias=False,
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[tokens, in_features]` to `[tokens, out_features / ranks]`."""
        mask_weights = None
        if self.router is not None and self.top_k is not None:
            mask_weights = top_k_mask_weights(self.router(x), self.top_k)
        given = (x, self.weight, self.packed_masks, self.activation, mask_weights)
        return ops.forward(*given, self.weight_scale, self.weight_format, self.activation_format)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take this rank's part of the layer's tensors in a checkpoint; vLLM's loader calls it, perhaps repeatedly.

        Returns:
            The names of the parameters that were loaded.

        Raises:
            TypeError, ValueError: a tensor has another shape or dtype than the config says, packed masks are damaged,
                or the layer has no tensor of that name, or both forms of masks. The message names the tensor.
        """
        names, loaded = set(), set()
        for name, tensor in weights:
            names.add(name)
            if {"packed_masks", "mask_logits"} <= names:
                raise ValueError("packed_masks: got mask_logits of the layer too, but it has one form of masks")
            loaded.add(self._load(name, tensor))
        self.loaded |= loaded
        return loaded

    def _load(self, name: str, tensor: Tensor) -> str:
        rows = (self.out_features, self.in_features, self.rank, self.ranks)
        if name == "weight":
            self.weight.data.copy_(weight_shard(tensor, *rows, self.weight_format))
        elif name == "weight_scale":
            shard = scale_shard(tensor, *rows, self.weight_format)
            assert self.weight_scale is not None
            self.weight_scale.data.copy_(shard)
        elif name == "packed_masks":
            self.packed_masks.data.copy_(packed_shard(tensor, self.n_masks, *rows))
        elif name == "mask_logits":
            self.packed_masks.data.copy_(packed_shard_of_logits(tensor, self.n_masks, *rows))
            return "packed_masks"
        elif name.startswith("router.") and name in (own := dict(self.named_parameters())):
            getattr(own[name], "weight_loader", default_weight_loader)(own[name], tensor)
        else:
            raise ValueError(f"{name}: an MGLU layer has no such tensor (mask_top_k is {self.top_k} in the config)")
        return name


def check_loaded(model: nn.Module) -> None:
    """Check that all tensors of a model's MGLU layers were loaded; vLLM does so only for models without quantization.

    Raises:
        ValueError: a tensor is missing; the message names it.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, ColumnParallelMGLU):
            own = dict(layer.named_parameters())
            # A quantizer may give the router more parameters, which checkpoints need not have.
            expected = {key for key in own if not key.startswith("router.")} | ({"router.weight"} & own.keys())
            if missing := sorted(expected - layer.loaded):
                raise ValueError(f"{name}.{missing[0]}: the checkpoint has no such tensor, which the config describes")


class MGLUMLP(nn.Module):
    """`down_proj(mglu(x))`, in place of the feed-forward layer of a model of vLLM.

    Args:
        config: the model's config with `hidden_size`, `intermediate_size`, `hidden_act`, `n_masks` and `mask_top_k`,
            and with the formats of the weight and of x if `mglu_ops.quantize` has quantized it. The activation scheme
            of another quantizer does not change x of MGLU.
        quant_config: of the linear layers, `down_proj` and the router. It does not change the weight of MGLU; a warning
            says so if that is dense.
        prefix: name of the module in the model.

    Raises:
        ValueError: as in `ColumnParallelMGLU`.
    """

    def __init__(self, config: PretrainedConfig, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        settings: Any = config
        weight_format, activation_format = stored_weights(config).formats_of(f"{prefix}.mglu")
        if quant_config is not None and quant_config.get_name() != METHOD and weight_format == "dense":
            notices.warn(
                f"quantization: {quant_config.get_name()} quantizes linear layers only, and leaves the weight of MGLU "
                "layers in the dtype of the model; mglu_ops.quantize quantizes those of a checkpoint",
                stacklevel=2,
            )
        self.mglu = ColumnParallelMGLU(
            settings.hidden_size,
            settings.intermediate_size,
            settings.n_masks,
            settings.hidden_act,
            settings.mask_top_k,
            weight_format,
            activation_format,
            quant_config,
            prefix=f"{prefix}.mglu",
        )
        self.down_proj = RowParallelLinear(
            settings.intermediate_size,
            settings.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
            return_bias=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[tokens, hidden_size]` to `[tokens, hidden_size]`; every rank gets the whole result."""
        return self.down_proj(self.mglu(x))
