"""Tensor and expert parallelism of experts: each rank computes what its rows or experts contribute to a result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle

from ..expert_calls import inverse_of, sort_pairs
from ..formats import get_format
from ..nn.arguments import check_columns_of_ranks, check_rows_of_ranks
from ..nn.experts import ExpertsDown, GatherRows, MGLUExperts, MGLUExpertsFeedForward, weighted_sum
from .colwise import place

BY_EXPERTS: dict[str, Placement] = dict.fromkeys(("weight", "weight_scale", "mask_logits", "packed_masks"), Shard(0))
BY_ROWS: dict[str, Placement] = {**dict.fromkeys(BY_EXPERTS, Shard(1)), "mask_logits": Shard(2)}
TOKENS = ("replicated", "sharded")
DIVISIONS = {"experts": (BY_EXPERTS, Shard(0)), "rows": (BY_ROWS, Shard(2))}
"""The placements of the tensors of `MGLUExperts` and of the weight of `ExpertsDown`, for each way to divide a layer."""


class ParallelExperts(ParallelStyle):
    """Divide an `MGLUExpertsFeedForward` over ranks, for `parallelize_module`.

        parallelize_module(block, mesh, {"mlp": ParallelExperts("experts")})

    With `"experts"` (expert parallelism), each rank holds its share of the experts, with their masks and projections.
    With `"rows"` (tensor parallelism), each rank holds the same rows of every expert, which are intermediate features,
    and the same columns of its projection. The routers of experts and of masks are on every rank.

    By default, all ranks have all tokens and route them alike; each computes what its experts or rows contribute, and
    the results are summed over the ranks. So is the gradient of x. No shape depends on the routing, and nothing waits
    for a GPU.

    With `tokens="sharded"`, each rank has tokens of its own, as many as it likes, as in data-parallel training: x
    `[..., hidden_size]` is a plain tensor, and so is the result. A token is sent to the ranks of its experts by
    all-to-all, one row for each expert, and the results come back. All ranks must call the layer, also one without
    tokens. How many rows a rank sends depends on the routing, so **the host waits for its GPU** in each call, and CUDA
    graphs cannot capture one. The gradients of the experts are averages over the ranks. The routers stay ordinary
    parameters: DDP or FSDP averages their gradients over the ranks, as in the rest of the model.

    Layers with learned, fixed and frozen masks are divided alike, before or after `mglu_ops.freeze`. So are quantized
    ones with their scales, before or after `mglu_ops.quantize`; a rank's rows in `fp8_block`, and its columns of the
    projections in `fp8_block` and `int4_group`, must be a multiple of 128.

    Args:
        divide: `"experts"` or `"rows"`.
        input_layouts: placement of x `[..., hidden_size]`: replicated by default; `Shard(1)` if each rank has a part
            of the sequence of x `[batch, sequence, hidden_size]`, which is then gathered.
        output_layouts: placement of the result, likewise; `Shard(1)` scatters the sum. The logits of
            `output_router_logits` are of all tokens.
        tokens: `"replicated"`; or, with `"experts"` and without layouts, `"sharded"`.

    Raises:
        ValueError: `divide` or `tokens` is not as above; or (by `parallelize_module`) the number of ranks does not
            divide num_experts or intermediate_size, or would cut blocks or groups of weights that share a scale.
        TypeError: (by `parallelize_module`) the module is not an `MGLUExpertsFeedForward`.
    """

    def __init__(
        self,
        divide: str,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        tokens: str = "replicated",
    ) -> None:
        if divide not in DIVISIONS:
            raise ValueError(f"divide: got {divide!r}, must be 'experts' or 'rows'")
        if tokens not in TOKENS:
            raise ValueError(f"tokens: got {tokens!r}, must be 'replicated' or 'sharded'")
        if tokens == "sharded" and divide != "experts":
            raise ValueError(f"divide: got {divide!r} with tokens='sharded', must be 'experts'")
        if tokens == "sharded" and (input_layouts or output_layouts):
            raise ValueError(
                f"input_layouts, output_layouts: got {input_layouts!r}, {output_layouts!r} with tokens='sharded', "
                "must be None: each rank passes a plain tensor with its own tokens"
            )
        super().__init__()
        self.divide, self.tokens = divide, tokens
        self.input_layouts, self.output_layouts = input_layouts or Replicate(), output_layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MGLUExpertsFeedForward):
            raise TypeError(
                f"module: got {type(module).__name__}, must be an MGLUExpertsFeedForward for ParallelExperts"
            )
        divide(module.experts, module.down_proj, self.divide, device_mesh, self.src_data_rank)
        if self.tokens == "sharded":
            module.combine = exchange
            module.experts.ranks_of_tokens = module.down_proj.ranks_of_tokens = device_mesh.size()
            return module
        # This replicates the parameters of the routers.
        return distribute_module(module, device_mesh, None, self._gathered, self._summed)

    def _gathered(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        x, *rest = inputs
        return DTensor.from_local(x, mesh, [self.input_layouts]).redistribute(placements=[Replicate()]), *rest

    def _summed(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        y, *logits = outputs if isinstance(outputs, tuple) else (outputs,)
        y = DTensor.from_local(y, mesh, [Partial()]).redistribute(placements=[self.output_layouts]).to_local()
        return (y, *(one.to_local() for one in logits)) if logits else y


def exchange(layer: MGLUExpertsFeedForward, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
    """`weighted_sum` for tokens that only this rank has: send a row for each expert of a token, and get its result.

    Rows travel sorted by expert, so that a rank needs only the number of rows for each of its experts to know theirs.
    """
    experts = layer.experts
    assert isinstance(experts.weight, DTensor)
    mesh = experts.weight.device_mesh
    group, ranks, top_k = mesh.get_group(), mesh.size(), expert_ids.shape[1]
    order, offs = sort_pairs(expert_ids, experts.num_experts)
    inverse = inverse_of(order)
    to_send = offs.diff(prepend=offs.new_zeros(1))
    to_get = all_to_all_single(to_send, None, None, group)
    counts = torch.stack([to_send, to_get]).view(2, ranks, -1)  # by rank and expert
    sent, got = counts.sum(2).tolist()

    rows = all_to_all_single_autograd(GatherRows.apply(x, order, inverse, top_k), got, sent, group)
    own = experts.num_experts // ranks
    ids = mesh.get_local_rank() * own + torch.arange(experts.num_experts, device=x.device) % own
    ids = ids.repeat_interleave(counts[1].flatten(), output_size=sum(got)).unsqueeze(1)
    results = weighted_sum(layer, rows, ids, expert_weights.new_ones(ids.shape))
    results = all_to_all_single_autograd(results, sent, got, group)
    results = GatherRows.apply(results, inverse, order, 1).unflatten(0, expert_ids.shape)
    return torch.bmm(expert_weights.unsqueeze(1), results).squeeze(1)


def divide(experts: MGLUExperts, down_proj: ExpertsDown, way: str, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Place the tensors of a layer on the ranks, and tell its parts the number of the rank's first expert.

    Args:
        experts: the first half of the layer.
        down_proj: the second half.
        way: a key of DIVISIONS.
        mesh: the ranks, in one dimension.
        src_data_rank: the rank whose values all get; None if each has them already.
    """
    of_experts, of_down_proj = DIVISIONS[way]
    ranks, first_expert = mesh.size(), 0
    of_scale: Placement = of_down_proj
    if way == "rows":
        check_rows_of_ranks("intermediate_size", experts.out_features, ranks, experts.weight_format)
        check_columns_of_ranks("intermediate_size", down_proj.in_features, ranks, down_proj.weight_format)
        if get_format(down_proj.weight_format).columns is None:
            of_scale = Replicate()
    else:
        check_rows_of_ranks("num_experts", experts.num_experts, ranks, "dense")
        first_expert = mesh.get_local_rank() * (experts.num_experts // ranks)
    experts.first_expert = down_proj.first_expert = first_expert
    place(down_proj, "weight", of_down_proj, mesh, src_data_rank)
    place(down_proj, "weight_scale", of_scale, mesh, src_data_rank)
    for name, placement in of_experts.items():
        place(experts, name, placement, mesh, src_data_rank)
