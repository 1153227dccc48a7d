"""A mixture of MGLU experts in vLLM, for tensor and expert parallelism.

vLLM's own layer of experts, `FusedMoE`, has the two matrices of SwiGLU, so only its router is used here.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.fused_moe import GateLinear
from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router
from vllm.model_executor.models.utils import extract_layer_index

from .. import ops
from ..backends.base import Task
from ..call import Call
from ..formats import get_format
from ..nn.arguments import check_columns, check_int
from ..transformers.quantization import stored_weights
from .layers import ColumnParallelMGLU, naming, set_loader
from .shards import Part, columns_of_rank, down_scale_shard, down_shard

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import ParallelConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig

_router = cache(create_fused_moe_router)


@torch.library.custom_op(
    "mglu_vllm::route", mutates_args=(), schema="(Tensor logits, int top_k, bool renormalize) -> (Tensor, Tensor)"
)
def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose experts with vLLM's softmax router: weights (float32) and ids (int32), both `[tokens, top_k]`.

    On a GPU, the router reads from the context of each step which tokens are padding. `route` is a custom operator, so
    that this code runs at each step, and not only while vLLM compiles the model.

    Args:
        logits: floating `[tokens, num_experts]`.
        top_k: number of experts of a token.
        renormalize: divide the weights of a token by their sum.
    """
    router = _router(top_k=top_k, global_num_experts=logits.shape[1], renormalize=renormalize)
    return router.select_experts(logits, logits, torch.int32)  # the router reads only the sizes of the first argument


@route.register_fake
def _route_fake(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    sizes = (logits.shape[0], top_k)
    return logits.new_empty(sizes, dtype=torch.float32), logits.new_empty(sizes, dtype=torch.int32)


class ColumnParallelExperts(ColumnParallelMGLU):
    """MGLU experts. This rank has some rows of every expert, or with expert parallelism all rows of some experts.

    The first size of the parameters is the number of this rank's experts.
    """

    def forward(self, x: Tensor, expert_ids: Tensor) -> Tensor:  # type: ignore[override] # one layer takes no ids
        """Map x `[tokens, in_features]` to `[tokens, K, out_features of this rank]`.

        Args:
            x: `[tokens, in_features]`.
            expert_ids: int32 or int64 `[tokens, K]`, relative to this rank's first expert. The id of another rank's
                expert gives a row of zeros.
        """
        mask_weights = self.mask_weights(x)
        if mask_weights is not None:
            mask_weights = mask_weights.unsqueeze(1).expand(-1, expert_ids.shape[1], -1)
        given = (x, self.weight, self.packed_masks, expert_ids, self.activation, mask_weights)
        return ops.experts_forward(*given, self.weight_scale, self.weight_format, self.activation_format)


class RowParallelDown(nn.Module):
    """The down projections of experts. This rank has some columns of each expert's weight, or some whole weights.

    Args:
        config: a config with `hidden_size`, and with the format of the weight if `mglu_ops.quantize` has quantized it.
        prefix: name of the module in the model.
        size: name of the config's key for the number of columns of the whole weight.
        part: the part that this rank holds.

    Attributes:
        weight: Parameter `[experts of this rank, hidden_size, columns of this rank]`.
        weight_scale: Parameter of the scales; None if the weight is dense, which has the dtype of the model.

    Raises:
        ValueError: a rank's columns would cut groups that share a scale.
    """

    weight: nn.Parameter
    weight_scale: nn.Parameter | None

    def __init__(self, config: PretrainedConfig, prefix: str, size: str, part: Part) -> None:
        super().__init__()
        settings: Any = config
        self.in_features, self.out_features, self.part = getattr(settings, size), settings.hidden_size, part
        self.weight_format, _ = stored_weights(config).formats_of(prefix)
        stored = get_format(self.weight_format)
        check_columns(stored, self.in_features)
        own = columns_of_rank(self.in_features, part.rank, part.ranks, self.weight_format, size)
        columns, leading = own.stop - own.start, part.leading
        weight = torch.empty(*leading, self.out_features, columns // stored.packed, dtype=stored.dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("weight_scale", None)
        if not stored.is_dense:
            scale = torch.empty(*leading, *stored.scale_shape(self.out_features, columns), dtype=stored.scale_dtype)
            self.weight_scale = nn.Parameter(scale, requires_grad=False)
        set_loader(self)
        self.prefix = prefix
        self.loaded: set[str] = set()

    def forward(self, y: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Return this rank's partial sum of the result `[tokens, hidden_size]`.

        Args:
            y: `[tokens, K, columns of this rank]`.
            expert_ids: as in `ColumnParallelExperts`.
            expert_weights: floating `[tokens, K]`.
        """
        given = (y, self.weight, expert_ids, expert_weights)
        return ops.experts_down(*given, self.weight_scale, self.weight_format)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy this rank's part of the tensors of a checkpoint. vLLM's loader may call this method repeatedly.

        Returns:
            The names of the parameters that were loaded.

        Raises:
            TypeError, ValueError: a tensor has an unknown name, or another shape or dtype than the config says.
        """
        parameters, loaded = dict(self.named_parameters()), set()
        place = self.out_features, self.in_features, self.part.rank, self.part.ranks, self.weight_format
        with naming(self.prefix):
            for name, tensor in weights:
                if name not in parameters:
                    raise ValueError(f"{name}: the down projections in {self.weight_format} have no such tensor")
                shard, parameter = down_shard if name == "weight" else down_scale_shard, parameters[name]
                shards = [shard(layer, *place) for layer in self.part.layers(name, tensor)]
                parameter.weight_loader(parameter, shards)  # type: ignore[attr-defined]
                loaded.add(name)
        self.loaded |= loaded
        return loaded


class ParallelExperts(nn.Module):
    """The experts of a mixture with their down projections. Each rank computes a partial sum of the result.

    Args:
        config: as in `ColumnParallelMGLU`. It must also have `num_experts`. The size of an expert is its
            `moe_intermediate_size`, or `intermediate_size` if there is no such key.
        quant_config: quantization of the router of masks.
        prefix: name of the module in the model.

    Attributes:
        mglu: the MGLU layers.
        down_proj: the down projections.

    Raises:
        ValueError: as in `ColumnParallelMGLU`; with expert parallelism, `num_experts` is not a multiple of the number
            of ranks; or vLLM's options spread experts in a way that is not supported.
    """

    def __init__(self, config: PretrainedConfig, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        settings: Any = config
        parallel = get_current_vllm_config().parallel_config
        check_parallelism(parallel)
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        part = Part.of_experts(settings.num_experts, rank, ranks, parallel.enable_expert_parallel)
        is_moe_size = hasattr(config, "moe_intermediate_size")  # if True, intermediate_size belongs to dense layers
        size = "moe_intermediate_size" if is_moe_size else "intermediate_size"
        self.first_expert = part.experts.start
        self.mglu = ColumnParallelExperts(config, quant_config, f"{prefix}.mglu", size, part)
        self.down_proj = RowParallelDown(config, f"{prefix}.down_proj", size, part)

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Map x `[tokens, hidden_size]` to this rank's partial sum of the result `[tokens, hidden_size]`.

        Args:
            x: `[tokens, hidden_size]`.
            expert_ids: int32 or int64 `[tokens, K]`.
            expert_weights: floating `[tokens, K]`.
        """
        if self.first_expert:
            expert_ids = expert_ids - self.first_expert  # the ids of other ranks' experts are then out of range
        return self.down_proj(self.mglu(x, expert_ids), expert_ids, expert_weights)


def check_parallelism(parallel: ParallelConfig) -> None:
    """Check that vLLM's options keep the experts within the tensor-parallel group, and do not move them later.

    Raises:
        ValueError: an option spreads experts over more ranks, or moves them; the message names the option.
    """
    if parallel.enable_eplb:
        raise ValueError("enable_eplb: got True, must be False: MGLU experts are not moved between ranks")
    if parallel.enable_expert_parallel:
        for name in ("data_parallel_size", "prefill_context_parallel_size"):
            if (size := getattr(parallel, name)) > 1:
                raise ValueError(
                    f"{name}: got {size}, must be 1 with enable_expert_parallel: MGLU experts are spread over the "
                    "ranks of tensor_parallel_size, which all have the same tokens"
                )


class MGLUMoE(nn.Module):
    """A router and MGLU experts, which replace the feed-forward layer of a model of vLLM.

    Args:
        config: as in `ParallelExperts`. It must also have `num_experts_per_tok`, and may have `norm_topk_prob`, whose
            default is True.
        quant_config: quantization of the router of masks. The router of experts stays in the dtype of the model.
        prefix: name of the module in the model.

    Raises:
        ValueError: as in `ParallelExperts`, or `num_experts_per_tok` is not between 1 and `num_experts`.
    """

    LINEAR = "gate"
    """The layer of vLLM that `check_loaded` checks too."""

    def __init__(self, config: PretrainedConfig, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        settings: Any = config
        experts, self.top_k = settings.num_experts, settings.num_experts_per_tok
        check_int("num_experts_per_tok", self.top_k, experts, f"an int from 1 to num_experts={experts}")
        self.renormalize = getattr(settings, "norm_topk_prob", True)
        self.gate = GateLinear(settings.hidden_size, experts, prefix=f"{prefix}.gate")
        self.experts = ParallelExperts(config, quant_config, f"{prefix}.experts")

    def calls(self, tokens: int) -> list[tuple[Task, Call]]:
        """Describe the calls of this package's operators for a number of tokens."""
        mglu, down = self.experts.mglu, self.experts.down_proj
        experts, columns = mglu.packed_masks.shape[0], mglu.packed_masks.shape[-3]
        layer = Call.contiguous(
            down.weight.device,
            mglu.dtype,
            0,
            1,
            down.out_features,
            columns,
            "identity",
            weight_format=down.weight_format,
        )
        return [
            ("forward", mglu.call(tokens).over_experts(experts, tokens, self.top_k)),
            ("down", layer.over_experts(experts, tokens, self.top_k, torch.float32)),
        ]

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[tokens, hidden_size]` to `[tokens, hidden_size]`; every rank gets the whole result."""
        logits, _ = self.gate(x)  # vLLM 0.26 always returns a bias too
        weights, ids = route(logits, self.top_k, self.renormalize)
        return tensor_model_parallel_all_reduce(self.experts(x, ids, weights))


def has_experts(config: PretrainedConfig, prefix: str) -> bool:
    """True if the feed-forward layer named `prefix` is a mixture. The config is read as Transformers reads it."""
    settings: Any = config
    if not getattr(settings, "num_experts", 0):
        return False
    index, every = extract_layer_index(prefix), getattr(settings, "decoder_sparse_step", 1)
    return index not in getattr(settings, "mlp_only_layers", ()) and (index + 1) % every == 0
