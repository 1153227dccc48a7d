"""The feed-forward layer of an MGLU model in vLLM, for any tensor-parallel size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear

from .. import ops
from ..activations import get_activation
from ..masks import packed_shape
from ..nn.arguments import check_masks
from ..nn.masked_linear import top_k_mask_weights
from ..transformers.configuration import ACTIVATIONS
from .shards import packed_shard, packed_shard_of_logits, rows_of_rank, weight_shard

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig


class ColumnParallelMGLU(nn.Module):
    """The MGLU projection whose `out_features` are spread over the ranks: this rank's columns of the result.

    Checkpoints hold the whole weight, and packed masks or logits. `load_weights` takes this rank's rows of either form.
    The weight is not quantized.

    Args:
        in_features: last size of x.
        out_features: last size of the result of all ranks together; a multiple of the number of ranks.
        n_masks: number of masks, 1 to 16.
        activation: as in `mglu_ops.nn.MGLU`, or Transformers' name for it.
        top_k: number of masks that a token keeps; None for no router. Each rank computes all routes.
        prefix: name of the module in the model.

    Raises:
        ValueError: an argument is out of range, or `out_features` is not a multiple of the number of ranks.
    """

    weight: nn.Parameter
    packed_masks: nn.Parameter

    def __init__(
        self, in_features: int, out_features: int, n_masks: int, activation: str, top_k: int | None, prefix: str
    ) -> None:
        super().__init__()
        check_masks(n_masks, True, top_k)
        self.activation = ACTIVATIONS.get(activation, activation)
        get_activation(self.activation)
        self.in_features, self.out_features = in_features, out_features
        self.n_masks, self.top_k = n_masks, top_k
        self.rank, self.ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        own = rows_of_rank(out_features, self.rank, self.ranks)
        rows = own.stop - own.start
        self.weight = nn.Parameter(torch.empty(rows, in_features), requires_grad=False)
        # Zeros are valid masks, for runs with dummy weights. A parameter, because vLLM checks that parameters were
        # loaded.
        masks = torch.zeros(packed_shape(n_masks, rows, in_features), dtype=torch.uint8)
        self.packed_masks = nn.Parameter(masks, requires_grad=False)
        self.router = None
        if top_k is not None:
            self.router = ReplicatedLinear(
                in_features, n_masks, bias=False, prefix=f"{prefix}.router", return_bias=False
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[tokens, in_features]` to `[tokens, out_features / ranks]`."""
        mask_weights = None
        if self.router is not None and self.top_k is not None:
            mask_weights = top_k_mask_weights(self.router(x), self.top_k)
        return ops.forward(x, self.weight, self.packed_masks, self.activation, mask_weights)

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
        return loaded

    def _load(self, name: str, tensor: Tensor) -> str:
        rows = (self.out_features, self.in_features, self.rank, self.ranks)
        if name == "weight":
            self.weight.data.copy_(weight_shard(tensor, *rows))
        elif name == "packed_masks":
            self.packed_masks.data.copy_(packed_shard(tensor, self.n_masks, *rows))
        elif name == "mask_logits":
            self.packed_masks.data.copy_(packed_shard_of_logits(tensor, self.n_masks, *rows))
            return "packed_masks"
        elif name == "router.weight" and self.router is not None:
            self.router.weight.weight_loader(self.router.weight, tensor)
        else:
            raise ValueError(f"{name}: an MGLU layer has no such tensor (mask_top_k is {self.top_k} in the config)")
        return name


class MGLUMLP(nn.Module):
    """`down_proj(mglu(x))`, in place of the feed-forward layer of a model of vLLM.

    Args:
        config: the model's config with `hidden_size`, `intermediate_size`, `hidden_act`, `n_masks` and `mask_top_k`.
        quant_config: must be None; quantized MGLU models are not supported.
        prefix: name of the module in the model.

    Raises:
        ValueError: the model is to be quantized, or as in `ColumnParallelMGLU`.
    """

    def __init__(self, config: PretrainedConfig, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        if quant_config is not None:
            raise ValueError(f"quantization: got {quant_config.get_name()!r}, must be None for an MGLU model")
        settings: Any = config
        self.mglu = ColumnParallelMGLU(
            settings.hidden_size,
            settings.intermediate_size,
            settings.n_masks,
            settings.hidden_act,
            settings.mask_top_k,
            prefix=f"{prefix}.mglu",
        )
        self.down_proj = RowParallelLinear(
            settings.intermediate_size,
            settings.hidden_size,
            bias=False,
            prefix=f"{prefix}.down_proj",
            return_bias=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[tokens, hidden_size]` to `[tokens, hidden_size]`; every rank gets the whole result."""
        return self.down_proj(self.mglu(x))
